"""Log analysis: collect logs, pick entries out, and find who has the most errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random

from obsspec.tasks.families.checks import CHECK, assertions
from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import CITIES, NOUNS, VERBS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_LEVELS = ("DEBUG", "INFO", "WARN", "ERROR")

_COLLECT = (
    "Collect the logs with ./collect.sh first.",
    "Run ./collect.sh to get the logs.",
    "The logs come from ./collect.sh, so run that first.",
    "Start with ./collect.sh, which gathers the logs.",
)
_COUNT = (
    "Count the {severity} lines of {log} and write the number to {answer}.",
    "How many lines of {log} are {severity}? Put the number into {answer}.",
    "I need the number of {severity} entries of {log} in {answer}.",
)
_EXTRACT = (
    "Copy the {severity} lines of {log} to {answer}.",
    "Save all {severity} entries of {log} as {answer}.",
    "I want only the {severity} lines of {log}, in the file {answer}.",
)
_WORST_SERVICE = (
    "Find the service with the most {severity} lines in {log} and write its name to {answer}.",
    "Which service has the most {severity} entries in {log}? Put its name into {answer}.",
    "Write into {answer} the name of the service that logged {severity} most often in {log}.",
)
_WORST_HOST = (
    "Each file in {log} is the log of one host. Write the name of the host with the most {severity} lines to {answer}.",
    "There is a log for each host in {log}. Which host has the most {severity} lines? Put its name into {answer}.",
    "Find out which host has the most {severity} entries (one log for each in {log}), and write its name to {answer}.",
)
_MERGE = (
    "Then save the {severity} lines of all hosts, sorted by time, as {merged}.",
    "Also write every {severity} line of all the logs to {merged} in order of time.",
)
_ALERT = (
    "Finally run ./alert.sh {answer} to tell everybody.",
    "Then send {answer} out with ./alert.sh {answer}.",
    "When {answer} is right, run ./alert.sh {answer}.",
)


def generate(random: Random, level: Level) -> Problem:
    """Easy: count or copy lines. Medium: the worst service of one log. Hard: the worst of three hosts, and a merge."""
    match level:
        case "easy":
            return _lines_of_one_log(random)
        case "medium":
            return _worst_service(random)
        case "hard":
            return _worst_host(random)


def _lines_of_one_log(random: Random) -> Problem:
    log, answer = f"{random.choice(NOUNS)}.log", f"{random.choice(NOUNS)}.txt"
    entries = _entries(random, 9)
    severity = _severity(random.choice(entries))
    selected = [entry for entry in entries if _severity(entry) == severity]
    count = random.random() < 0.5
    steps = [
        ExpertStep("./collect.sh"),
        *_look(random, log),
        ExpertStep(f"grep {'-c ' if count else ''}{severity} {log} > {answer}"),
        ExpertStep(f"cat {answer}"),
    ]
    expected = [str(len(selected))] if count else selected
    instruction = f"{random.choice(_COLLECT)} {random.choice(_COUNT if count else _EXTRACT)}"
    return Problem(
        instruction=instruction.format(severity=severity, log=log, answer=answer),
        check=CHECK,
        expert=tuple(steps),
        files={"collect.sh": _collector(random, {log: entries})},
        check_files=assertions(f"lines({log!r}) == {entries!r}", f"lines({answer!r}) == {expected!r}"),
    )


def _worst_service(random: Random) -> Problem:
    log, answer = f"{random.choice(NOUNS)}.log", f"{random.choice(NOUNS)}.txt"
    entries = _entries(random, 14)
    severity = random.choice(("WARN", "ERROR"))
    worst = _most_frequent(entry.split()[2] for entry in entries if _severity(entry) == severity)
    if worst is None:
        return _worst_service(random)
    steps = [
        ExpertStep("./collect.sh"),
        *_look(random, log),
        ExpertStep(f"grep {severity} {log} | cut -d ' ' -f 3 | sort | uniq -c | sort -nr"),
        ExpertStep(f"echo {worst} > {answer}"),
        ExpertStep(f"./alert.sh {answer}"),
    ]
    instruction = f"{random.choice(_COLLECT)} {random.choice(_WORST_SERVICE)} {random.choice(_ALERT)}"
    return Problem(
        instruction=instruction.format(severity=severity, log=log, answer=answer),
        check=CHECK,
        expert=tuple(steps),
        files={"collect.sh": _collector(random, {log: entries}), "alert.sh": _alert(random)},
        check_files=assertions(
            f"lines({log!r}) == {entries!r}", f"lines({answer!r}) == {[worst]!r}", f"lines('sent.txt') == {[worst]!r}"
        ),
    )


def _worst_host(random: Random) -> Problem:
    answer, merged = f"{random.choice(NOUNS)}.txt", f"{random.choice(NOUNS)}.log"
    entries = _entries(random, 18)
    severity = random.choice(("WARN", "ERROR"))
    logs: dict[str, list[str]] = {host: [] for host in pick(random, CITIES, 3)}
    for entry in entries:
        logs[random.choice(list(logs))].append(entry)
    worst = _most_frequent(host for host, own in logs.items() for entry in own if _severity(entry) == severity)
    if worst is None or not all(logs.values()):
        return _worst_host(random)
    steps = [
        ExpertStep("./collect.sh"),
        ExpertStep("ls logs"),
        ExpertStep(f"grep -c {severity} logs/*.log"),
        ExpertStep(f"echo {worst} > {answer}"),
        ExpertStep(f"grep -h {severity} logs/*.log | sort > {merged}"),
        ExpertStep(f"cat {merged}"),
        ExpertStep(f"./alert.sh {answer}"),
    ]
    if random.random() < 0.2:
        steps.insert(2, ExpertStep(f"grep -c {severity} *.log", mistake=True))
    sentences = (random.choice(phrases) for phrases in (_COLLECT, _WORST_HOST, _MERGE, _ALERT))
    return Problem(
        instruction=" ".join(sentences).format(severity=severity, log="logs", answer=answer, merged=merged),
        check=CHECK,
        expert=tuple(steps),
        files={
            "collect.sh": _collector(random, {f"logs/{host}.log": own for host, own in logs.items()}),
            "alert.sh": _alert(random),
        },
        check_files=assertions(
            *(f"lines('logs/{host}.log') == {own!r}" for host, own in logs.items()),
            f"lines({answer!r}) == {[worst]!r}",
            f"lines({merged!r}) == {[entry for entry in entries if _severity(entry) == severity]!r}",
            f"lines('sent.txt') == {[worst]!r}",
        ),
    )


def _look(random: Random, log: str) -> list[ExpertStep]:
    """The beginning of the log; now and then after an attempt with a name that is not quite right."""
    slip = [ExpertStep(f"head -n 3 {misspell(random, log)}", mistake=True)] if random.random() < 0.2 else []
    return [*slip, ExpertStep(f"head -n 3 {log}")]


def _entries(random: Random, n: int) -> list[str]:
    """Lines ``HH:MM LEVEL service message`` in order of time, no two in the same minute."""
    services = pick(random, NOUNS, 3)
    return [
        f"{minute // 60:02}:{minute % 60:02} {random.choice(_LEVELS)} {random.choice(services)} {random.choice(VERBS)}"
        for minute in sorted(pick(random, range(24 * 60), n))
    ]


def _severity(entry: str) -> str:
    return entry.split()[1]


def _most_frequent(names: Iterable[str]) -> str | None:
    """None where two share the first place, or there is no name."""
    first, second = [*Counter(names).most_common(2), ("", 0), ("", 0)][:2]
    return first[0] if first[1] > second[1] else None


def _collector(random: Random, logs: Mapping[str, list[str]]) -> bytes:
    """A script that writes the logs as if it asked their hosts for them."""
    writes = "".join(
        f"mkdir -p $(dirname {log}); cat > {log} <<'END'\n{''.join(entry + chr(10) for entry in entries)}END\n"
        for log, entries in logs.items()
    )
    total = sum(len(entries) for entries in logs.values())
    return f'#!/bin/bash\n{effort(random)}\n{writes}echo "collected {total} lines"\n'.encode()


def _alert(random: Random) -> bytes:
    return f"""#!/bin/bash
# Usage: ./alert.sh FILE
{effort(random)}
cp "$1" sent.txt || exit 1
echo "alert sent: $(cat sent.txt)"
""".encode()
