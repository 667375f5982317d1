"""Git repositories: commit, merge, tag and push, with hooks that take their time."""

from __future__ import annotations

from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import NOUNS, PEOPLE, VERBS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_OPENINGS = (
    "{repository} is a git repository.",
    "This is about the git repository {repository}.",
    "Work in the git repository {repository}.",
    "There is a git repository in the directory {repository}.",
)
_COMMIT = (
    'Commit the file {new} with the message "{message}", and nothing else.',
    'Make a commit of only {new}; its message is "{message}".',
    'Add just {new} and commit it as "{message}".',
)
_MERGE = (
    "Merge the branch {branch} into main and then delete that branch.",
    "Bring the branch {branch} into main, and delete {branch} afterwards.",
    "The branch {branch} is finished: merge it into main and delete it.",
)
_TAG = (
    "Tag the result {tag}.",
    "Then give main the tag {tag}.",
    "Put the tag {tag} on the last commit.",
)
_PUSH = (
    "Finally push main to origin.",
    "At the end push the branch main to origin.",
)

_SETUP = """\
set -e
export GIT_AUTHOR_DATE=2024-01-02T03:04:05Z GIT_COMMITTER_DATE=2024-01-02T03:04:05Z
add() {{ echo "$1" > "$1"; git add "$1"; git -c core.hooksPath=/dev/null commit -q -m "$2"; }}
git init -q -b main {repository}
cd {repository}
git config user.name {person}
git config user.email {person}@example.com
add {old}.txt "Start {old}"
git checkout -q -b {branch}
add {theirs} "{their_message}"
git -c core.hooksPath=/dev/null checkout -q main
git clone -q --bare . ../origin.git
git remote add origin ../origin.git
for name in {untracked}; do echo "$name" > "$name"; done
"""


def generate(random: Random, level: Level) -> Problem:
    """Easy: commit one of two new files. Medium: merge a branch and tag. Hard: commit, merge, tag and push."""
    repository, branch, old, new, other, theirs = pick(random, NOUNS, 6)
    new, other, theirs = f"{new}.txt", f"{other}.txt", f"{theirs}.txt"
    message = f"{random.choice(VERBS).capitalize()} {random.choice(NOUNS)}"
    their_message = f"{random.choice(VERBS).capitalize()} {random.choice(NOUNS)}"
    tag = f"v{random.randint(0, 9)}.{random.randint(0, 9)}"
    committing, merging, pushing = level != "medium", level != "easy", level == "hard"

    sentences = [random.choice(_OPENINGS)]
    steps: list[ExpertStep] = []
    conditions = [f"lines('{repository}/{other}') == {[other]!r}"]
    expected = [f"Start {old}"]
    if committing:
        sentences.append(random.choice(_COMMIT))
        steps += [ExpertStep("git status --short"), ExpertStep(f"git add {new} && git commit -q -m '{message}'")]
        conditions += [
            _git(repository, f"show main:{new}", [new]),
            _git(repository, f"log --format=%s main -- {new}", [message]),
            _git(repository, f"log --format=%s main -- {other}", []),
        ]
        expected.append(message)
    if merging:
        sentences += [random.choice(_MERGE), random.choice(_TAG)]
        steps.append(ExpertStep("git branch"))
        if random.random() < 0.3:
            steps.append(ExpertStep(f"git merge -q {misspell(random, branch)}", mistake=True))
        steps += [
            ExpertStep(f"git merge -q --no-edit {branch}"),
            ExpertStep(f"git branch -q -d {branch}"),
            ExpertStep(f"git tag {tag}"),
        ]
        conditions += [
            _git(repository, f"show main:{theirs}", [theirs]),
            _git(repository, "branch --format='%(refname:short)'", ["main"]),
            f"{_output(repository, 'rev-parse main')} == {_output(repository, f'rev-parse {tag}^{{}}')}",
        ]
        expected.append(their_message)
    if pushing:
        sentences.append(random.choice(_PUSH))
        steps.append(ExpertStep("git push -q origin main"))
        conditions.append(f"{_output(repository, 'rev-parse main')} == {_output('origin.git', 'rev-parse main')}")
    else:
        steps.append(ExpertStep("git log --format=%s"))
    conditions.append(f"set({expected!r}) <= set({_output(repository, 'log --format=%s main')})")
    steps[0] = ExpertStep(f"cd {repository} && {steps[0].command}")
    return Problem(
        instruction=" ".join(sentences).format(repository=repository, branch=branch, new=new, message=message, tag=tag),
        check=CHECK,
        expert=tuple(steps),
        files={
            f"{repository}/.git/hooks/pre-commit": _hook(random, "checks passed"),
            f"{repository}/.git/hooks/post-merge": _hook(random, "build passed"),
            f"{repository}/.git/hooks/pre-push": _hook(random, "tests passed"),
        },
        setup=_SETUP.format(
            repository=repository,
            person=random.choice(PEOPLE),
            branch=branch,
            old=old,
            theirs=theirs,
            their_message=their_message,
            untracked=f"{new} {other}" if committing else other,
        ),
        check_files=assertions(*conditions),
    )


def _output(repository: str, command: str) -> str:
    """The expression for the lines that a git command prints."""
    return f"output({f'git -C {repository} {command}'!r})"


def _git(repository: str, command: str, expected: list[str]) -> str:
    return f"{_output(repository, command)} == {expected!r}"


def _hook(random: Random, line: str) -> bytes:
    return f"#!/bin/bash\n{effort(random)}\necho '{line}'\n".encode()
