"""Search and replace over many files, then publish them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import DIRECTORIES, NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

Files = Mapping[str, str]
"""Content by path."""

_WORD = (
    "In all files below {root} replace the word {old} by {new}; longer words that contain it stay.",
    "Change {old} to {new} everywhere under {root}, but only where it is a whole word.",
    "The word {old} should be {new} in every file in {root}. Leave words like {old}s alone.",
)
_KIND = (
    "In the .{extension} files below {root} replace {old} by {new}, and leave other files as they are.",
    "Change {old} to {new} in every .{extension} file under {root}, only in those.",
    "Only the .{extension} files in {root} need {new} in place of {old}.",
)
_SETTING = (
    "Set {key} to {value} in all files below {root} that have it.",
    "Every file in {root} that sets {key} should set it to {value}.",
    "Whatever {key} is now in the files under {root}, make it {value}.",
)
_PUBLISH = (
    "When that is done, run ./publish.sh {root}.",
    "After that publish it with ./publish.sh {root}.",
    "Finally run ./publish.sh {root}.",
)
_EXTENSIONS = ("conf", "txt", "md", "html", "ini")


@dataclass(frozen=True, slots=True)
class _Project:
    """Files below a directory, and the words in them that the changes are about."""

    root: str
    files: Files
    whole: str
    """A word that also occurs as a part of others."""
    common: str
    key: str
    extension: str


@dataclass(frozen=True, slots=True)
class _Change:
    """One replacement: what is asked, how the expert looks for it and does it, and the files afterwards."""

    sentence: str
    look: str
    command: str
    after: Files


def generate(random: Random, level: Level) -> Problem:
    """Easy: one replacement. Medium: two. Hard: three. Then publish."""
    project, unused = _project(random)
    root, after = project.root, project.files
    sentences: list[str] = []
    steps: list[ExpertStep] = []
    kinds = pick(random, (_word, _kind, _setting), {"easy": 1, "medium": 2, "hard": 3}[level])
    for kind, new in zip(kinds, unused, strict=False):
        change = kind(random, project, new, after)
        after = change.after
        sentences.append(change.sentence)
        if random.random() < 0.2 / len(kinds):
            steps.append(ExpertStep(change.look.replace(root, misspell(random, root)), mistake=True))
        steps += [ExpertStep(change.look), ExpertStep(change.command)]
    sentences.append(random.choice(_PUBLISH).format(root=root))
    steps.append(ExpertStep(f"./publish.sh {root}"))
    published = {path.replace(root, "public", 1): content for path, content in after.items()}
    return Problem(
        instruction=" ".join(sentences),
        check=CHECK,
        expert=tuple(steps),
        files={"publish.sh": _publisher(random), **{path: text.encode() for path, text in project.files.items()}},
        check_files=assertions(f"tree({root!r}) == {dict(after)!r}", f"tree('public') == {published!r}"),
    )


def _project(random: Random) -> tuple[_Project, list[str]]:
    """A project of five or six files, and words that do not occur in it."""
    root = random.choice(DIRECTORIES)
    words = pick(random, NOUNS, 24)
    whole, common, key, other_key, *fillers = words[:9]
    extensions = pick(random, _EXTENSIONS, 2)
    files = {}
    for i, name in enumerate(words[9 : 9 + random.randint(5, 6)]):
        text = [random.choice(fillers), [f"{whole}s", whole, common][i % 3], random.choice((whole, common, fillers[0]))]
        setting = f"{random.choice((key, key, other_key)) if i else key} = {random.randint(10, 99)}"
        folder = f"{root}/{random.choice(words[15:17])}" if i % 2 else root
        files[f"{folder}/{name}.{extensions[i // 2 % 2]}"] = f"{' '.join(text)}\n{setting}\n"
    return _Project(root, files, whole, common, key, extensions[1]), words[17:]


def _word(random: Random, project: _Project, new: str, files: Files) -> _Change:
    root, old = project.root, project.whole
    return _Change(
        random.choice(_WORD).format(root=root, old=old, new=new),
        f"grep -rlw {old} {root} | sort",
        rf"grep -rlw {old} {root} | xargs sed -i 's/\b{old}\b/{new}/g'",
        {path: re.sub(rf"\b{old}\b", new, text) for path, text in files.items()},
    )


def _kind(random: Random, project: _Project, new: str, files: Files) -> _Change:
    root, old, extension = project.root, project.common, project.extension
    after = {path: text.replace(old, new) if path.endswith("." + extension) else text for path, text in files.items()}
    return _Change(
        random.choice(_KIND).format(root=root, old=old, new=new, extension=extension),
        f"grep -rl {old} {root} | sort",
        f"find {root} -name '*.{extension}' -exec sed -i 's/{old}/{new}/g' {{}} +",
        after,
    )


def _setting(random: Random, project: _Project, new: str, files: Files) -> _Change:
    root, key, value = project.root, project.key, random.randint(100, 999)
    return _Change(
        random.choice(_SETTING).format(root=root, key=key, value=value),
        f"grep -r {key} {root} | sort",
        f"grep -rl {key} {root} | xargs sed -i 's/{key} = .*/{key} = {value}/'",
        {path: re.sub(rf"{key} = .*", f"{key} = {value}", text) for path, text in files.items()},
    )


def _publisher(random: Random) -> bytes:
    return f"""#!/bin/bash
# Usage: ./publish.sh DIRECTORY
{effort(random)}
rm -rf public && cp -r "$1" public && echo "published $(find public -type f | wc -l) files"
""".encode()
