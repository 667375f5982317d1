"""Names of LoRA adapters on servers: of a world model that is trained, version 7 is ``world-model-v7``.

A new version comes under a new name, so that requests which began with the one before go on with it, and so that what a
server's prefix cache holds for the one is never taken for the other's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

WORLD_MODEL = "world-model"


def versioned(name: str, version: int) -> str:
    """What the version is called on a server."""
    return f"{name}-v{version}"


def versions(name: str, served: Iterable[str]) -> list[int]:
    """The versions of ``name`` among what is ``served``, oldest first."""
    matches = (re.fullmatch(rf"{re.escape(name)}-v(0|[1-9]\d*)", each, re.ASCII) for each in served)
    return sorted(int(match[1]) for match in matches if match)


def newest(name: str | None, served: Sequence[str]) -> str | None:
    """What to ask for the newest of ``name``: its highest version that is ``served``; itself where there is none.

    Where no name is given it is `WORLD_MODEL`, or the first that is served; None where nothing is.
    """
    numbers = versions(name or WORLD_MODEL, served)
    if numbers:
        return versioned(name or WORLD_MODEL, numbers[-1])
    return name or (WORLD_MODEL if WORLD_MODEL in served else next(iter(served), None))
