"""Permissions: modes of files, directories and scripts, and an audit of them."""

from __future__ import annotations

from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import DIRECTORIES, NOUNS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_EXECUTABLE = (
    "Make {script} executable for its owner and run it.",
    "The script {script} cannot be run yet: give its owner the right to execute it, then run it.",
    "Let the owner execute {script}, then start it.",
    "Please run {script}; it needs the execute permission for its owner first.",
)
_ONE = (
    "Give {path} the mode {mode}.",
    "Set the permissions of {path} to {mode}.",
    "Change {path} to mode {mode}.",
)
_ALL = (
    "Below {root}, give every directory, {root} itself too, the mode {directories} and every file the mode {files}.",
    "Set all directories in {root} (with {root} itself) to {directories} and all files to {files}.",
    "All files in {root} need the mode {files}, and all directories, {root} as well, {directories}.",
)
_SCRIPTS = (
    "Only the .sh files get {scripts} instead.",
    "But the mode of .sh files must be {scripts}.",
)
_AUDIT = (
    "Then run ./audit.sh {root}.",
    "At the end check it with ./audit.sh {root}.",
    "When all is set, run ./audit.sh {root}.",
)

_FILE_MODES = ("600", "640", "644", "660", "400", "440", "444")
_DIRECTORY_MODES = ("700", "750", "755", "710", "770")


def generate(random: Random, level: Level) -> Problem:
    """Easy: make a script executable and run it. Medium: modes of two files. Hard: modes of a whole tree."""
    match level:
        case "easy":
            return _script(random)
        case "medium":
            return _files(random)
        case "hard":
            return _tree(random)


def _script(random: Random) -> Problem:
    name, product = pick(random, NOUNS, 2)
    folder = random.choice(DIRECTORIES)
    script, target = f"{folder}/{name}.sh", f"{product}.txt"
    before = random.choice(("600", "640", "644", "664"))
    steps = [
        ExpertStep(f"stat -c '%a %n' {folder}/*"),
        ExpertStep(f"chmod u+x {script}"),
        ExpertStep(script),
    ]
    if random.random() < 0.2:
        steps.insert(1, ExpertStep(f"chmod u+x {name}.sh", mistake=True))
    other = f"{folder}/{random.choice([noun for noun in NOUNS if noun not in (name, product)])}.sh"
    return Problem(
        instruction=random.choice(_EXECUTABLE).format(script=script),
        check=CHECK,
        expert=tuple(steps),
        files={
            script: f"#!/bin/bash\n{effort(random)}\necho {product} > {target}\necho 'wrote {target}'\n".encode(),
            other: b"#!/bin/bash\necho nothing to do\n",
        },
        setup=f"chmod {before} {folder}/*",
        check_files=assertions(
            f"int(mode({script!r}), 8) & 0o100",
            f"mode({other!r}) == {before!r}",
            f"lines({target!r}) == {[product]!r}",
        ),
    )


def _files(random: Random) -> Problem:
    root = random.choice(DIRECTORIES)
    paths = [f"{root}/{name}.{random.choice(('txt', 'key', 'csv', 'md'))}" for name in pick(random, NOUNS, 4)]
    before, *wanted = pick(random, _FILE_MODES, 3)
    modes = dict.fromkeys(paths, before) | dict(zip(pick(random, paths, 2), wanted, strict=True))
    changed = [path for path in modes if modes[path] != before]
    steps = [ExpertStep(f"stat -c '%a %n' {root}/*")]
    if random.random() < 0.2:
        steps.append(ExpertStep(f"chmod {modes[changed[0]]} {misspell(random, changed[0])}", mistake=True))
    steps += [ExpertStep(f"chmod {modes[path]} {path}") for path in changed]
    steps.append(ExpertStep(f"./audit.sh {root}"))
    sentences = [random.choice(_ONE).format(path=path, mode=modes[path]) for path in changed]
    return Problem(
        instruction=" ".join([*sentences, random.choice(_AUDIT).format(root=root)]),
        check=CHECK,
        expert=tuple(steps),
        files={"audit.sh": _audit(random), **{path: f"{path}\n".encode() for path in paths}},
        setup=f"chmod 755 {root} && chmod {before} {root}/*",
        check_files=assertions(*_audited({root: "755", **modes})),
    )


def _tree(random: Random) -> Problem:
    root = random.choice(DIRECTORIES)
    folders = [root, *(f"{root}/{name}" for name in pick(random, NOUNS, 2))]
    names = [
        f"{name}.{extension}"
        for name, extension in zip(pick(random, NOUNS, 5), ("sh", "sh", "txt", "md", "csv"), strict=True)
    ]
    paths = [f"{random.choice(folders)}/{name}" for name in names]
    directories, scripts = pick(random, _DIRECTORY_MODES, 2)
    files = random.choice(_FILE_MODES)
    modes = dict.fromkeys(folders, directories) | {path: scripts if path.endswith(".sh") else files for path in paths}
    look = f"find {root} | sort"
    steps = [
        ExpertStep(look),
        ExpertStep(f"find {root} -type d -exec chmod {directories} {{}} +"),
        ExpertStep(f"find {root} -type f -exec chmod {files} {{}} +"),
        ExpertStep(f"find {root} -name '*.sh' -exec chmod {scripts} {{}} +"),
        ExpertStep(f"find {root} -type f | sort | xargs stat -c '%a %n'"),
        ExpertStep(f"./audit.sh {root}"),
    ]
    if random.random() < 0.2:
        steps.insert(0, ExpertStep(look.replace(root, misspell(random, root)), mistake=True))
    sentences = " ".join(random.choice(phrases) for phrases in (_ALL, _SCRIPTS, _AUDIT))
    return Problem(
        instruction=sentences.format(root=root, directories=directories, files=files, scripts=scripts),
        check=CHECK,
        expert=tuple(steps),
        files={"audit.sh": _audit(random), **{path: f"{path}\n".encode() for path in paths}},
        setup=f"mkdir -p {' '.join(folders)} && find {root} -exec chmod 777 {{}} +",
        check_files=assertions(*_audited(modes)),
    )


def _audited(modes: dict[str, str]) -> list[str]:
    """Conditions: all modes are as wanted, all files are still there, and the audit saw it."""
    report = sorted(f"{path} {mode}" for path, mode in modes.items())
    return [
        *(f"mode({path!r}) == {mode!r}" for path, mode in modes.items()),
        f"sorted(lines('audit.txt')) == {report!r}",
    ]


def _audit(random: Random) -> bytes:
    return f"""#!/bin/bash
# Usage: ./audit.sh DIRECTORY
{effort(random)}
find "$1" -exec stat -c '%n %a' {{}} + | sort > audit.txt
echo "audited $(wc -l < audit.txt) paths below $1"
""".encode()
