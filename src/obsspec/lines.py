"""Files of JSON lines that outlive crashes: one process writes at a time, and every line whole and synced.

A line that a crash tore is cut off by the next writer, so nothing that was written before is lost.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from obsspec.errors import InputError, writing, wrong_field

Line = TypeVar("Line")


@dataclass(frozen=True, slots=True)
class LineFile(Generic[Line]):
    """A file whose lines are JSON objects of one type."""

    path: Path
    adapter: TypeAdapter[Line]
    first_field: str
    """The name with which every line begins, by which a line that a crash tore is known from anything else."""
    source: str
    """What writes such files, for people."""
    resumed_by: str
    """How to go on after a failure, for people."""

    def read(self) -> list[Line]:
        """Raises InputError that names the file, line and field that are wrong."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror}; give what {self.source} wrote") from None
        lines = content.split(b"\n")
        return self._parsed(lines if lines[-1] else lines[:-1])

    @contextmanager
    def writing(self) -> Iterator[tuple[list[Line], Callable[[Line], None]]]:
        """The lines that are there, and a function that appends one durably; the file is created where there is none.

        Raises InputError where the file cannot be written, is being written by another process, or holds anything
        else: then it stays as it was. The function raises InputError where the disk is full; all lines stay readable.
        """
        with writing(self.path, "place"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            stream = self.path.open("a+b", buffering=0)
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{self.path}: another process is writing it; wait for it or choose another") from None
            stream.seek(0)
            content = stream.read()
            whole = content.rfind(b"\n") + 1
            lines, torn = self._parsed(content[:whole].split(b"\n")[:-1]), content[whole:]
            if not torn.startswith(f'{{"{self.first_field}":'.encode()[: len(torn)]):
                number = len(lines) + 1
                raise InputError(f"{self.path}, line {number}: not what {self.source} writes; choose another file")
            os.truncate(stream.fileno(), whole)

            def append(line: Line) -> None:
                try:
                    append_durably(stream, self.adapter.dump_json(line) + b"\n")
                except OSError as error:
                    raise InputError(
                        f"{self.path}: {error.strerror}; the lines before are kept: make room and go on "
                        f"{self.resumed_by}"
                    ) from None

            yield lines, append

    def _parsed(self, lines: list[bytes]) -> list[Line]:
        parsed = []
        for number, line in enumerate(lines, start=1):
            try:
                parsed.append(self.adapter.validate_json(line))
            except ValidationError as error:
                raise InputError(
                    f"{self.path}, line {number}: {wrong_field(error, 'the line')}; not what {self.source} wrote, or "
                    "changed since: remove that line"
                ) from None
        return parsed


def append_durably(stream: BinaryIO, data: bytes) -> None:
    """Appends all of it and syncs, or raises OSError and leaves the file as it was. The stream has no buffer."""
    before = os.fstat(stream.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[stream.write(rest) :]
        os.fsync(stream.fileno())
    except OSError:
        with suppress(OSError):  # What matters is the first error.
            os.truncate(stream.fileno(), before)
        raise
