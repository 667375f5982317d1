"""What a user can get wrong, told in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class InputError(Exception):
    """Bad input. The message is one line that names the file or field and the remedy; a command prints just that."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for a ``name`` that is none of ``known``: the one that it is most like, or ``otherwise``."""
    closest = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {closest[0]}?" if closest else otherwise


@contextmanager
def writing(what: object, kind: str) -> Iterator[None]:
    """Around what writes ``what``, a ``kind`` of place that the user chose. Raises InputError where it cannot."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what}: {error.strerror or error}; choose a {kind} that can be written") from None


def wrong_field(error: ValidationError, whole: str) -> str:
    """The first field that is wrong, and why; ``whole`` is the name of it where it is no single one."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"
