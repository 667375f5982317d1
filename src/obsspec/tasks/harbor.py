"""Tasks from directories in the format of Harbor and Terminal-Bench 2, without building an image.

A task directory holds ``task.toml``, ``instruction.md`` and ``tests/test.sh``, which writes the reward to
``/logs/verifier/reward.txt``; without a number there the reward is 0. ``environment/`` and ``solution/`` are optional;
the solution is not read.

The sandbox shows this machine's own ``/usr`` and has no network, so no image is built. A ``Dockerfile`` is understood
where it needs none: ``FROM`` a plain ``debian``, ``ubuntu`` or ``python`` image, ``WORKDIR`` (which becomes another
name of the sandbox's working directory), and ``COPY`` of files and directories beside it. Whatever else it holds, and
every setting of ``task.toml`` that the sandbox cannot honour, is an error rather than a task that cannot be solved.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from obsspec.errors import InputError
from obsspec.types import Task

_PARTS = ("task.toml", "instruction.md", "tests")
_PLAIN_IMAGES = ("debian", "ubuntu", "python")
_DEFAULT_SECONDS = 600.0
_MOST_SECONDS = 7 * 24 * 3600
_NOT_PROVIDED = (("environment", "env"), ("environment", "gpus"), ("environment", "mcp_servers"), ("verifier", "env"))
_CHECK = """\
timeout {seconds:g} bash /tests/test.sh
test -s /logs/verifier/reward.txt
"""
_LINK = """\
[ {home} -ef "$PWD" ] || {{ mkdir -p "$(dirname {home})" && ln -sT "$PWD" {home}; }}
"""


def load_tasks(path: Path) -> list[Task]:
    """The task in the directory ``path``, or those in its subdirectories, sorted by name.

    An id is ``SUITE/NAME``: the name of the task's directory after that of the one that holds it, which is the family
    too. The level is ``metadata.difficulty``. ``agent.timeout_sec`` limits each command and ``verifier.timeout_sec``
    the check; 600 s where absent. Raises InputError, which names the file and the field, where a directory is no
    complete task or needs an image.
    """
    try:
        path = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle.
        raise InputError(f"{path}: no such directory; give a task directory, or a directory of them") from None
    if not path.is_dir():
        raise InputError(f"{path}: no such directory; give a task directory, or a directory of them")
    if any((path / part).exists() for part in _PARTS):
        return [_load(path)]
    directories = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not directories:
        raise InputError(
            f"{path}: no tasks here; a task is a directory with task.toml, instruction.md and tests/test.sh"
        )
    return [_load(directory) for directory in directories]


def _load(directory: Path) -> Task:
    name = f"{directory.parent.name}/{directory.name}"
    if not name.isprintable():
        raise InputError(f"{name!r}: a task is named after its directory, which must be printable; rename it")
    settings = _settings(directory / "task.toml")
    instruction = _text(directory / "instruction.md").strip()
    if not instruction:
        raise InputError(f"{directory / 'instruction.md'}: is empty; write what is to be done")
    _text(directory / "tests" / "test.sh")
    files, setup = _environment(directory, settings)
    return Task(
        id=name,
        instruction=instruction,
        family=directory.parent.name,
        level=str(settings.get("metadata", {}).get("difficulty", "")),
        files=files,
        setup=setup,
        check=_CHECK.format(seconds=_seconds(directory, settings, "verifier")),
        check_files=_below(directory / "tests", PurePosixPath("/tests")),
        time_limit=_seconds(directory, settings, "agent"),
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path}: is not valid TOML: {error}; correct it") from None
    for section in ("metadata", "agent", "verifier", "environment"):
        if not isinstance(settings.get(section, {}), dict):
            raise InputError(f"{path}: {section} must be a table; write [{section}]")
    for section, field in _NOT_PROVIDED:
        if settings.get(section, {}).get(field):
            raise InputError(f"{path}: {section}.{field}: the sandbox does not provide this; leave the task out")
    return settings


def _seconds(directory: Path, settings: Mapping[str, Any], section: str) -> float:
    seconds = settings.get(section, {}).get("timeout_sec", _DEFAULT_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MOST_SECONDS:
        path = directory / "task.toml"
        raise InputError(
            f"{path}: {section}.timeout_sec is {seconds!r}; give a positive number of seconds, up to {_MOST_SECONDS}"
        )
    return float(seconds)


def _environment(directory: Path, settings: Mapping[str, Any]) -> tuple[dict[str, bytes], str]:
    """The files to lay down and the set-up script."""
    folder = directory / "environment"
    for compose in sorted(folder.glob("docker-compose.y*ml")):
        raise InputError(f"{compose}: needs several containers, and the sandbox is one; leave the task out")
    dockerfile = folder / "Dockerfile"
    if dockerfile.exists():
        return _dockerfile(dockerfile)
    if image := settings.get("environment", {}).get("docker_image"):
        raise InputError(
            f"{directory / 'task.toml'}: environment.docker_image: {image!r} cannot be run; leave the task out"
        )
    return {}, ""


def _dockerfile(path: Path) -> tuple[dict[str, bytes], str]:
    """What a Dockerfile that needs no build asks for: files to lay down, and a set-up script."""
    home = PurePosixPath("/")
    files: dict[str, bytes] = {}
    for number, line in _instructions(_text(path)):
        keyword, _, rest = line.partition(" ")
        arguments = rest.split()
        match keyword.upper(), arguments:
            case "FROM", [image] if _is_plain(image):
                pass
            case "WORKDIR", [name] if _are_paths(arguments):
                home /= name
            case "COPY", [*sources, target] if sources and _are_paths(arguments):
                for source in sources:
                    into_directory = len(sources) > 1 or target.endswith("/") or home / target == home
                    files |= _copied(path, number, source, home / target, into_directory)
            case _:
                raise InputError(f"{path}, line {number}: {keyword} needs an image to be built; leave the task out")
    if home == PurePosixPath("/"):
        return files, ""
    under_home = {
        str(PurePosixPath(name).relative_to(home)) if PurePosixPath(name).is_relative_to(home) else name: content
        for name, content in files.items()
    }
    return under_home, _LINK.format(home=shlex.quote(str(home)))


def _instructions(text: str) -> list[tuple[int, str]]:
    """Each instruction with the number of its first line; comments left out, continued lines joined."""
    instructions: list[tuple[int, str]] = []
    continued = False
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        part = line.removesuffix("\\")
        if continued:
            instructions[-1] = (instructions[-1][0], instructions[-1][1] + part)
        else:
            instructions.append((number, part))
        continued = line.endswith("\\")
    return instructions


def _is_plain(image: str) -> bool:
    name = re.split("[:@]", image)[0]
    return name.removeprefix("docker.io/").removeprefix("library/") in _PLAIN_IMAGES


def _are_paths(names: list[str]) -> bool:
    """Whether they are just that: no flags, variables, patterns or quotes."""
    return not any(name.startswith("--") or set(name) & set("$*?[\"'") or not name.isprintable() for name in names)


def _copied(
    dockerfile: Path, number: int, source: str, target: PurePosixPath, into_directory: bool
) -> dict[str, bytes]:
    """The files of one source of a COPY: a directory's content, or one file, which may go into a directory."""
    folder = dockerfile.parent
    try:
        origin = (folder / source.lstrip("/")).resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle.
        origin = None
    if origin is None or not origin.is_relative_to(folder.resolve()):
        raise InputError(f"{dockerfile}, line {number}: COPY: there is no {source} in {folder}; add it")
    if origin.is_dir():
        return _below(origin, target)
    return {str(target / origin.name if into_directory else target): _bytes(origin)}


def _below(folder: Path, target: PurePosixPath) -> dict[str, bytes]:
    """Every file below a folder, by its path below ``target``."""
    return {
        str(target / file.relative_to(folder).as_posix()): _bytes(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; a task needs it") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; make it a readable file") from None


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from None
