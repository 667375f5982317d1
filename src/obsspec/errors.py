"""What a user can get wrong, told in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


LAST_PORT = 65535


class InputError(Exception):
    """Bad input. The message is one line that names the file or field and the remedy; a command prints just that."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for a ``name`` that is none of ``known``: the one that it is most like, or ``otherwise``."""
    closest = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {closest[0]}?" if closest else otherwise


def host_and_port(address: str) -> tuple[str, int]:
    """Of ``HOST:PORT`` or ``[HOST]:PORT``. Raises ValueError where it is neither."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > LAST_PORT:
        raise ValueError(f"no host with a port from 0 to {LAST_PORT}")
    return host, int(port)


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
