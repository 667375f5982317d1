"""Names of LoRA adapters on servers: of a world model that is trained, version 7 is ``world-model-v7``.

A new version comes under a new name, so that requests which began with the one before go on with it, and so that what a
server's prefix cache holds for the one is never taken for the other's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

WORLD_MODEL = "world-model"


def versioned(name: str, version: int) -> str:
    """What the version is called on a server."""
    return f"{name}-v{version}"


def versions(name: str, served: Iterable[str]) -> list[int]:
    """The versions of ``name`` among what is ``served``, oldest first."""
    matches = (re.fullmatch(rf"{re.escape(name)}-v(0|[1-9]\d*)", each, re.ASCII) for each in served)
    return sorted(int(match[1]) for match in matches if match)


def newest(name: str, served: Iterable[str]) -> str | None:
    """What the highest version is called; None where there is none."""
    numbers = versions(name, served)
    return versioned(name, numbers[-1]) if numbers else None
