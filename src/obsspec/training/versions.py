"""Versions of a model in a directory: published whole, by one process, and followed by any number.

    v000001/  v000002/  v000003/    each as PEFT or transformers saves it
    current.json                    which of them is current, and what is known of it

A version's directory is complete before ``current.json`` names it, and both outlive a loss of power.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from obsspec.errors import InputError, writing

_CURRENT = "current.json"
_WRITING = "writing-"
LOCK = "lock"
_KEPT = 3
"""Versions that stay: those who follow may still be loading the one before."""


@dataclass(frozen=True, slots=True)
class Version:
    """A model that was published."""

    number: int
    """From 1."""
    directory: Path
    base: str
    """The model that it was trained from."""


def current_version(root: Path) -> Version | None:
    """The version that is current in ``root``; None where nothing was published there.

    Raises InputError where the directory holds something else.
    """
    file = root / _CURRENT
    try:
        about = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not what co-training wrote ({error}); give its directory, or remove it") from None
    number, base = (about.get("version"), about.get("base")) if isinstance(about, dict) else (None, None)
    if type(number) is not int or number < 1 or not isinstance(base, str):
        raise InputError(f"{file}: not what co-training wrote; give its directory, or remove it")
    directory = _directory(root, number)
    if not directory.is_dir():
        raise InputError(f"{file}: names version {number}, which is not there; train on there, or remove the file")
    return Version(number, directory, base)


def publish_version(root: Path, base: str, write: Callable[[Path], None], about: Mapping[str, Any]) -> Version:
    """Makes a new version current, one higher than any that there was. ``write`` fills its directory.

    ``base``: the model that it was trained from. ``about``: what else is known of it, for ``current.json`` and its own
    ``version.json``. One process publishes at a time. Raises InputError where ``root`` cannot be written; then the
    version before stays current.
    """
    with writing(root, "directory"):
        root.mkdir(parents=True, exist_ok=True)
        numbers = _numbers(root)
        version = max(numbers, default=0) + 1
        described = json.dumps({"version": version, "base": base, **about}, indent=1) + "\n"
        with tempfile.TemporaryDirectory(dir=root, prefix=_WRITING, ignore_cleanup_errors=True) as scratch:
            new = Path(scratch) / "new"
            new.mkdir()
            write(new)
            (new / "version.json").write_text(described)
            sync_all(new)
            new.rename(_directory(root, version))
            (Path(scratch) / _CURRENT).write_text(described)
            _sync(Path(scratch) / _CURRENT)
            (Path(scratch) / _CURRENT).replace(root / _CURRENT)
        _sync(root)
        for number in sorted(numbers)[: -_KEPT + 1]:
            shutil.rmtree(_directory(root, number), ignore_errors=True)
    return Version(version, _directory(root, version), base)


@contextmanager
def publishing_alone(root: Path) -> Iterator[None]:
    """For the one process that publishes in ``root``. Raises InputError where there is one already, or a model."""
    with only_process(root):
        for name in ("adapter_config.json", "config.json"):
            if (root / name).exists():
                raise InputError(f"{root}: holds a model ({name}); choose another directory")
        for left in root.glob(f"{_WRITING}*"):  # Of a process that was killed.
            shutil.rmtree(left, ignore_errors=True)
        yield


@contextmanager
def only_process(directory: Path) -> Iterator[None]:
    """For the one process that trains in a directory, which is made. Raises InputError where there is one already."""
    with writing(directory, "directory"):
        directory.mkdir(parents=True, exist_ok=True)
        stream = (directory / LOCK).open("wb")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{directory}: another process is training there; wait or choose another") from None
        yield


def _directory(root: Path, number: int) -> Path:
    return root / f"v{number:06}"


def _numbers(root: Path) -> list[int]:
    names = (re.fullmatch(r"v(\d{6,})", path.name) for path in root.iterdir())
    return [int(name[1]) for name in names if name]


def sync_all(directory: Path) -> None:
    """Returns when all that is in it would outlive a loss of power."""
    for file in directory.rglob("*"):
        _sync(file)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
