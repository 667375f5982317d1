"""Checksums: find damaged files, restore them, and write manifests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_FIND = (
    "{manifest} holds the {algorithm} sums of some files. Write the names of those that do not match to {bad}.",
    "Check the files against {manifest} with {algorithm}sum, and list the damaged ones in {bad}.",
    "Some files differ from their {algorithm} sums in {manifest}. Put their names into {bad}, one a line.",
    "Verify {manifest} with {algorithm}sum. The names of all files that fail go into {bad}.",
)
_RESTORE = (
    "Then restore each of them with ./restore.sh FILE.",
    "./restore.sh FILE brings one back: repair all of them.",
    "Repair them too, with ./restore.sh FILE.",
)
_MANIFEST = (
    "At the end write the {other} sums of all .{extension} files to {new}.",
    "Last, make a new manifest {new} with the {other} sums of every .{extension} file.",
    "Finally save the {other} sums of the .{extension} files in {new}.",
)
_RECEIVE = (
    "First receive the files with ./receive.sh.",
    "Run ./receive.sh first; it brings the files.",
    "The files arrive with ./receive.sh, so begin with that.",
)
_ALGORITHMS = ("md5", "sha1", "sha256")


def generate(random: Random, level: Level) -> Problem:
    """Easy: receive and verify. Medium: restore a damaged file too. Hard: two of them, and a new manifest."""
    manifest, bad, new, *names = pick(random, NOUNS, 8)
    extension = random.choice(("dat", "csv", "bin", "img"))
    algorithm, other = pick(random, _ALGORITHMS, 2)
    manifest, bad, new = f"{manifest}.{algorithm}", f"{bad}.txt", f"{new}.{other}"
    names = [f"{name}.{extension}" for name in sorted(names[: random.randint(3, 5)])]
    files = {name: f"{name} {random.randint(100, 999)}\n".encode() for name in names}
    damaged = sorted(pick(random, names, {"easy": random.randint(1, 2), "medium": 1, "hard": 2}[level]))

    verify = f"{algorithm}sum -c {manifest}"
    listing = f"{verify} 2>/dev/null | grep FAILED | cut -d: -f1 > {bad}"
    sentences = [random.choice(_RECEIVE), random.choice(_FIND)]
    commands = ["./receive.sh", verify, listing]
    if level == "easy":
        commands.append(f"cat {bad}")
    else:
        sentences.append(random.choice(_RESTORE))
        commands += [f"./restore.sh {name}" for name in damaged] + [verify]
    if level == "hard":
        sentences.append(random.choice(_MANIFEST))
        commands.append(f"{other}sum *.{extension} > {new}")
    steps = [ExpertStep(command) for command in commands]
    if random.random() < 0.2:
        steps.insert(1, ExpertStep(f"{algorithm}sum -c {misspell(random, manifest)}", mistake=True))

    contents = {name: content.decode() for name, content in files.items()}
    conditions = [f"sorted(lines({bad!r})) == {damaged!r}"]
    if level != "easy":
        conditions += [f"open({name!r}).read() == {content!r}" for name, content in contents.items()]
    if level == "hard":
        sums = {name: hashlib.new(other, content).hexdigest() for name, content in files.items()}
        read = f"{{os.path.normpath(line.split()[1].lstrip('*')): line.split()[0] for line in lines({new!r})}}"
        conditions.append(f"{read} == {sums!r}")
    return Problem(
        instruction=" ".join(sentences).format(
            manifest=manifest, algorithm=algorithm, bad=bad, new=new, other=other, extension=extension
        ),
        check=CHECK,
        expert=tuple(steps),
        files={
            manifest: _manifest(algorithm, files),
            **{f"backup/{name}": content for name, content in files.items()},
            **{f"inbox/{name}": content + b"?" * (name in damaged) for name, content in files.items()},
            "receive.sh": _script(random, "", f"cp inbox/* .\necho 'received {len(files)} files'"),
            "restore.sh": _script(random, " FILE", 'cp "backup/$1" . && echo "restored $1"'),
        },
        check_files=assertions(*conditions),
    )


def _manifest(algorithm: str, files: Mapping[str, bytes]) -> bytes:
    return "".join(
        f"{hashlib.new(algorithm, content).hexdigest()}  {name}\n" for name, content in files.items()
    ).encode()


def _script(random: Random, arguments: str, commands: str) -> bytes:
    return f"#!/bin/bash\n# Usage: $0{arguments}\n{effort(random)}\n{commands}\n".encode()
