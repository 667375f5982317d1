"""Archives: unpack, clean, pack again, and upload."""

from __future__ import annotations

from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import DIRECTORIES, NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_UNPACK = (
    "Unpack {old} into the new directory {target}.",
    "Extract {old} to {target}, a directory that you have to make.",
    "Make the directory {target} and extract {old} there.",
)
_DELETE = (
    "Delete all .{extension} files below {target}.",
    "Remove every file in {target} that ends in .{extension}.",
    "The .{extension} files in {target} are not needed: delete them.",
)
_PACK = (
    "Pack the directory {folder} as {new}.",
    "Make an archive {new} of the directory {folder}.",
    "Create {new} from the directory {folder}.",
)
_LEAVE_OUT = (
    "Leave out the .{extension} files, but do not delete them.",
    "The .{extension} files must stay where they are but not get into the archive.",
)
_REPACK = (
    "Pack {folder} from there as {new}, so that its paths start with {folder}.",
    "Make an archive {new} of the directory {folder} in it; the paths must start with {folder}.",
    "Create {new} from {target}/{folder}, with paths that start with {folder}.",
)
_INSTALL = (
    "Then run ./install.sh {target}.",
    "When it is there, run ./install.sh {target}.",
    "After that install it with ./install.sh {target}.",
)
_UPLOAD = (
    "Upload it with ./upload.sh {new}.",
    "Then run ./upload.sh {new}.",
    "At the end run ./upload.sh {new}.",
)


def generate(random: Random, level: Level) -> Problem:
    """Easy: unpack and install. Medium: pack some of a directory and upload. Hard: unpack, delete, pack, upload."""
    folder, target = pick(random, DIRECTORIES, 2)
    old, new = (f"{name}.tar.gz" for name in pick(random, NOUNS, 2))
    extensions = pick(random, ("txt", "md", "csv", "log", "tmp", "bak"), 3)
    names = pick(random, NOUNS, random.randint(4, 6))
    part = random.choice([noun for noun in NOUNS if noun not in names])
    files = {
        f"{folder}/{random.choice(('', part + '/'))}{name}.{extensions[i % 3]}": f"{name}\n"
        for i, name in enumerate(names)
    }
    extension = extensions[0]
    rest = {path: content for path, content in files.items() if not path.endswith(extension)}

    unpacking = level != "medium"
    setup = f"tar -czf {old} --sort=name --mtime=2024-01-02 {folder} && rm -r {folder}" if unpacking else ""
    look = f"tar -tzf {old}" if unpacking else f"find {folder} -type f | sort"
    steps = [ExpertStep(look)]
    if unpacking and random.random() < 0.3:
        steps.insert(0, ExpertStep(f"tar -tzf {misspell(random, old)}", mistake=True))
    scripts = {"upload.sh": _script(random, "uploads", "uploaded")}
    phrases: list[tuple[str, ...]]
    match level:
        case "easy":
            scripts = {"install.sh": _script(random, "installed", "installed")}
            phrases = [_UNPACK, _INSTALL]
            commands = [f"mkdir {target} && tar -xzf {old} -C {target}", f"./install.sh {target}"]
            unpacked = {f"{target}/{path}": content for path, content in files.items()}
            conditions = [
                f"members({old!r}) == {files!r}",
                f"tree({target!r}) == {unpacked!r}",
                f"tree('installed/{target}') == {_moved(unpacked, 'installed')!r}",
            ]
        case "medium":
            phrases = [_PACK, _LEAVE_OUT, _UPLOAD]
            commands = [
                f"tar -czf {new} --exclude='*.{extension}' {folder}",
                f"tar -tzf {new} | sort",
                f"./upload.sh {new}",
            ]
            conditions = [f"tree({folder!r}) == {files!r}"]
        case "hard":
            phrases = [_UNPACK, _DELETE, _REPACK, _UPLOAD]
            commands = [
                f"mkdir {target} && tar -xzf {old} -C {target}",
                f"find {target} -name '*.{extension}' -delete",
                f"tar -czf {new} -C {target} {folder}",
                f"tar -tzf {new} | sort",
                f"./upload.sh {new}",
            ]
            conditions = [f"members({old!r}) == {files!r}", f"tree('{target}') == {_moved(rest, target)!r}"]
    if level != "easy":
        conditions += [f"members({name!r}) == {rest!r}" for name in (new, f"uploads/{new}")]
    sentences = " ".join(random.choice(choice) for choice in phrases)
    return Problem(
        instruction=sentences.format(old=old, new=new, target=target, folder=folder, extension=extension),
        check=CHECK,
        expert=(*steps, *(ExpertStep(command) for command in commands)),
        files={**scripts, **{path: content.encode() for path, content in files.items()}},
        setup=setup,
        check_files=assertions(*conditions),
    )


def _moved(files: dict[str, str], folder: str) -> dict[str, str]:
    return {f"{folder}/{path}": content for path, content in files.items()}


def _script(random: Random, folder: str, done: str) -> bytes:
    """A script that copies what it is given to a folder."""
    return f"""#!/bin/bash
{effort(random)}
mkdir -p {folder} && cp -r "$1" {folder}/ || exit 1
echo "{done} $1"
""".encode()
