"""File trees: collect, rename and delete files below a directory, then index it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import DIRECTORIES, NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

Files = dict[str, str]
"""Content by path."""

_EXTENSIONS = ("txt", "md", "log", "csv", "tmp", "bak", "json", "html")

_OPENINGS = (
    "Tidy up the directory {root}.",
    "The directory {root} needs some cleaning.",
    "Please put the files under {root} in order.",
    "Reorganise {root} for me.",
)
_INDEX = (
    "At the end run ./index.sh {root}.",
    "When that is done, run ./index.sh {root} to write the index.",
    "Last of all, index it with ./index.sh {root}.",
)


@dataclass(frozen=True, slots=True)
class _Change:
    """One change to the tree: what is asked, how the expert does it, and what there is afterwards."""

    sentence: str
    command: str
    slip: str
    """A wrong attempt at it that changes nothing."""
    after: Files


def generate(random: Random, level: Level) -> Problem:
    """Easy: one change. Medium: two. Hard: three and another look. Always the index at the end."""
    root = random.choice(DIRECTORIES)
    files = _tree(random, root)
    kinds = pick(random, (_collect, _delete, _rename, _delete_empty), {"easy": 1, "medium": 2, "hard": 3}[level])
    extensions = pick(random, sorted({path.rpartition(".")[2] for path in files if files[path]}), len(kinds))
    changes: list[_Change] = []
    after = files
    for kind, extension in zip(kinds, extensions, strict=True):
        changes.append(kind(random, root, extension, after))
        after = changes[-1].after

    look = f"find {root} -type f | sort"
    slip = random.choice(changes) if random.random() < 0.2 else None
    steps = [ExpertStep(look)]
    for change in changes:
        if change is slip:
            steps.append(ExpertStep(change.slip, mistake=True))
        steps.append(ExpertStep(change.command))
    if level == "hard":
        steps.append(ExpertStep(look))
    steps.append(ExpertStep(f"./index.sh {root}"))
    sentences = [random.choice(_OPENINGS), *(change.sentence for change in changes), random.choice(_INDEX)]
    folders = {root, *(path.partition("/")[0] for path in after)}
    return Problem(
        instruction=" ".join(sentences).format(root=root),
        check=CHECK,
        expert=tuple(steps),
        files={"index.sh": _indexer(random), **{path: content.encode() for path, content in files.items()}},
        check_files=assertions(
            *(f"tree({folder!r}) == {_under(folder, after)!r}" for folder in sorted(folders)),
            f"lines('index.txt') == {sorted(_under(root, after))!r}",
        ),
    )


def _tree(random: Random, root: str) -> Files:
    """Six to nine files of three kinds in two or three folders, one or two of them empty."""
    folders = [f"{root}/{name}" for name in pick(random, NOUNS, random.randint(2, 3))]
    extensions = pick(random, _EXTENSIONS, 3) * 2 + ["old"] * random.randint(1, 2)
    names = pick(random, NOUNS, len(extensions))
    return {
        f"{random.choice(folders)}/{name}.{extension}": "" if extension == "old" else f"{name} {extension}\n"
        for name, extension in zip(names, extensions, strict=True)
    }


def _collect(random: Random, root: str, extension: str, files: Files) -> _Change:
    target = random.choice([name for name in NOUNS if not any(name in path for path in files)])
    sentence = random.choice(
        (
            f"Move every .{extension} file below {root} into a new directory {target}.",
            f"Make a directory {target} and move all .{extension} files from {root} there.",
            f"All .{extension} files in {root} belong in a new directory called {target}.",
        )
    )
    move = f"find {root} -name '*.{extension}' -exec mv -t {target} {{}} +"
    after = {
        f"{target}/{path.rpartition('/')[2]}" if path.endswith("." + extension) else path: content
        for path, content in files.items()
    }
    return _Change(sentence, f"mkdir {target} && {move}", move, after)


def _delete(random: Random, root: str, extension: str, files: Files) -> _Change:
    sentence = random.choice(
        (
            f"Delete every .{extension} file below {root}.",
            f"Remove all files in {root} that end in .{extension}.",
            f"The .{extension} files under {root} are no longer needed, so delete them.",
        )
    )
    after = {path: content for path, content in files.items() if not path.endswith("." + extension)}
    wrong = f"find {misspell(random, root)} -name '*.{extension}' -delete"
    return _Change(sentence, f"find {root} -name '*.{extension}' -delete", wrong, after)


def _rename(random: Random, root: str, extension: str, files: Files) -> _Change:
    path = random.choice([path for path in files if path.endswith("." + extension)])
    folder, _, name = path.rpartition("/")
    new = random.choice([noun for noun in NOUNS if not any(noun in path for path in files)]) + "." + extension
    sentence = random.choice(
        (
            f"Rename the file {name} to {new} in the directory where it is.",
            f"Find {name} and rename it to {new}.",
            f"The file {name} should be called {new}; leave it where it is.",
        )
    )
    after = {f"{folder}/{new}" if other == path else other: content for other, content in files.items()}
    return _Change(sentence, f"mv {path} {folder}/{new}", f"mv {root}/{name} {root}/{new}", after)


def _delete_empty(random: Random, root: str, extension: str, files: Files) -> _Change:
    sentence = random.choice(
        (
            f"Delete the empty files below {root}.",
            f"Remove every file in {root} that is empty.",
            f"Empty files under {root} are to be deleted.",
        )
    )
    after = {path: content for path, content in files.items() if content}
    wrong = f"find {misspell(random, root)} -type f -empty -delete"
    return _Change(sentence, f"find {root} -type f -empty -delete", wrong, after)


def _under(folder: str, files: Files) -> Files:
    return {path: content for path, content in files.items() if path.startswith(folder + "/")}


def _indexer(random: Random) -> bytes:
    return f"""#!/bin/bash
# Usage: ./index.sh DIRECTORY
{effort(random)}
find "$1" -type f | sort > index.txt
echo "indexed $(wc -l < index.txt) files"
""".encode()
