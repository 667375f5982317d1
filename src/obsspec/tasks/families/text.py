"""Text processing: one pipeline from a text file to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import NOUNS, PEOPLE, VERBS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_OPENINGS = (
    "From {source} make {target}:",
    "Write {target} from the text in {source}.",
    "Process {source} and save the result as {target}.",
    "Create {target} out of {source} like this:",
)
_FETCH = (
    "First run ./fetch.sh to get {source}.",
    "./fetch.sh downloads {source}; run it first.",
    "Get {source} with ./fetch.sh before anything else.",
)
_COUNT = (
    "Then write how many lines {target} has to {number}.",
    "Put the number of lines of {target} into {number}.",
    "Count the lines of {target} and save the count as {number}.",
)
_PUBLISH = (
    "Finally publish it with ./publish.sh {target}.",
    "When all is done, run ./publish.sh {target}.",
)


@dataclass(frozen=True, slots=True)
class _Filter:
    """One stage of the pipeline."""

    sentence: str
    command: str
    apply: Callable[[list[str]], list[str]]


def generate(random: Random, level: Level) -> Problem:
    """Easy: one filter. Medium: fetch, two filters. Hard: fetch, three filters, and a count. Always publish."""
    source, target, number = (f"{name}.txt" for name in pick(random, NOUNS, 3))
    text = _text(random, {"easy": 7, "medium": 12, "hard": 16}[level])
    filters = _filters(random, text, {"easy": 1, "medium": 2, "hard": 3}[level])
    result = text
    for stage in filters:
        result = stage.apply(result)

    pipeline = " | ".join(stage.command for stage in filters)
    first, _, rest = pipeline.partition(" | ")
    command = f"{first} < {source}{' | ' + rest if rest else ''} > {target}"
    look = f"cat {source}" if level == "easy" else f"head -n 3 {source}"
    sentences = [random.choice(_OPENINGS), *(stage.sentence for stage in filters)]
    steps = [ExpertStep(look), ExpertStep(command)]
    if random.random() < 0.2:
        steps.insert(0, ExpertStep(look.replace(source, misspell(random, source)), mistake=True))
    conditions = [f"lines({source!r}) == {text!r}", f"lines({target!r}) == {result!r}"]
    files = {source: _joined(text).encode(), "publish.sh": _publisher(random)}
    if level != "easy":
        sentences.insert(0, random.choice(_FETCH))
        steps.insert(0, ExpertStep("./fetch.sh"))
        files["fetch.sh"] = _fetcher(random, source, files.pop(source))
    if level == "hard":
        sentences.append(random.choice(_COUNT))
        steps += [ExpertStep(f"cat {target}"), ExpertStep(f"wc -l < {target} > {number}")]
        conditions.append(f"lines({number!r}) == {[str(len(result))]!r}")
    sentences.append(random.choice(_PUBLISH))
    steps.append(ExpertStep(f"./publish.sh {target}"))
    conditions.append(f"lines('public/{target}') == {result!r}")
    return Problem(
        instruction=" ".join(sentences).format(source=source, target=target, number=number),
        check=CHECK,
        expert=tuple(steps),
        files=files,
        check_files=assertions(*conditions),
    )


def _text(random: Random, length: int) -> list[str]:
    """Lines of three words from a small vocabulary, some of them twice."""
    people, verbs, nouns = pick(random, PEOPLE, 4), pick(random, VERBS, 4), pick(random, NOUNS, 4)
    lines = [f"{random.choice(people)} {random.choice(verbs)} {random.choice(nouns)}" for _ in range(length - 2)]
    return lines + pick(random, lines, 2)


def _filters(random: Random, text: Sequence[str], n: int) -> list[_Filter]:
    """``n`` filters that make sense one after the other and leave at least one line."""
    word = random.choice(random.choice(text).split())
    some = random.randint(2, 4)
    selecting = random.choice((_keep(random, word), _drop(random, word)))
    sorting = random.choice((_sorted(random), _unique(random)))
    ending = random.choice((_first(random, some), _last(random, some), _upper(random)))
    stages = (selecting, sorting, ending)
    chosen = [stages[i] for i in sorted(pick(random, range(3), n))]
    result = list(text)
    for stage in chosen:
        result = stage.apply(result)
    return chosen if result else _filters(random, text, n)


def _keep(random: Random, word: str) -> _Filter:
    phrases = (
        "Keep only the lines with the word {}.",
        "Take the lines that contain {}.",
        "Pick out the lines with {}.",
    )
    return _Filter(
        random.choice(phrases).format(word),
        f"grep -w {word}",
        lambda text: [line for line in text if word in line.split()],
    )


def _drop(random: Random, word: str) -> _Filter:
    phrases = ("Leave out the lines with the word {}.", "Drop every line that contains {}.", "Skip lines with {}.")
    return _Filter(
        random.choice(phrases).format(word),
        f"grep -vw {word}",
        lambda text: [line for line in text if word not in line.split()],
    )


def _sorted(random: Random) -> _Filter:
    phrases = ("Sort the lines.", "Put the lines in alphabetical order.", "Order the lines from a to z.")
    return _Filter(random.choice(phrases), "sort", sorted)


def _unique(random: Random) -> _Filter:
    phrases = (
        "Sort the lines without duplicates.",
        "Sort the lines and keep each only once.",
        "Sort, and drop repeats.",
    )
    return _Filter(random.choice(phrases), "sort -u", lambda text: sorted(set(text)))


def _first(random: Random, n: int) -> _Filter:
    phrases = ("Keep the first {} lines.", "Only the first {} lines are needed.", "Cut it after {} lines.")
    return _Filter(random.choice(phrases).format(n), f"head -n {n}", lambda text: text[:n])


def _last(random: Random, n: int) -> _Filter:
    phrases = ("Keep the last {} lines.", "Only the last {} lines are needed.", "Take just the {} lines at the end.")
    return _Filter(random.choice(phrases).format(n), f"tail -n {n}", lambda text: text[-n:])


def _upper(random: Random) -> _Filter:
    phrases = ("Write everything in capitals.", "Change all letters to upper case.", "Make it all capital letters.")
    return _Filter(random.choice(phrases), "tr a-z A-Z", lambda text: [line.upper() for line in text])


def _joined(text: Sequence[str]) -> str:
    return "".join(line + "\n" for line in text)


def _fetcher(random: Random, source: str, text: bytes) -> bytes:
    return f"""#!/bin/bash
{effort(random)}
cat > {source} <<'END'
{text.decode()}END
echo "fetched $(wc -l < {source}) lines to {source}"
""".encode()


def _publisher(random: Random) -> bytes:
    return f"""#!/bin/bash
# Usage: ./publish.sh FILE
{effort(random)}
mkdir -p public && cp "$1" public/ || exit 1
echo "published $1: $(wc -l < "$1") lines"
""".encode()
