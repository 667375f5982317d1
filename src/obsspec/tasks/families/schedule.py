"""Cron-like schedules: add, move and remove jobs in a crontab, and check it with a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from obsspec.tasks.families.effort import effort
from obsspec.tasks.families.words import NOUNS, VERBS, misspell, pick
from obsspec.tasks.problem import ExpertStep, Level, Problem

_OPENINGS = (
    "The jobs in {file} need a change.",
    "Please edit the schedule {file}.",
    "Change the crontab {file}.",
    "The crontab {file} has to be brought up to date.",
)
_ADD = ("Add a job that runs {job} {when}.", "{job} should also run, {when}.", "Schedule {job} {when}.")
_MOVE = ("Let {job} run {when} instead.", "Change the time of {job}: {when}.", "Reschedule {job} to run {when}.")
_REMOVE = ("Remove {job}.", "{job} must not run any more.", "Delete the job {job}.")
_CHECK = (
    "Then ./cron.sh check {file} must succeed.",
    "Check the result with ./cron.sh check {file}.",
    "Make sure that ./cron.sh check {file} accepts it.",
)
_COUNT = (
    "Last, save what ./cron.sh count {file} prints in {counts}.",
    "Write the output of ./cron.sh count {file} to {counts}.",
    "At the end run ./cron.sh count {file} and keep its output in {counts}.",
)
_DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


def generate(random: Random, level: Level) -> Problem:
    """Easy: one change. Medium: two. Hard: three, and a month simulated."""
    file, new, *old = (f"{noun}.sh" for noun in pick(random, NOUNS, 6))
    file = file.replace(".sh", random.choice((".cron", ".crontab", ".tab")))
    before = {job: _time(random)[1] for job in old[: random.randint(3, 4)]}
    after = dict(before)
    sentences = [random.choice(_OPENINGS)]
    steps = [ExpertStep(f"cat {file}")]
    if random.random() < 0.2:
        steps.insert(0, ExpertStep(f"cat {misspell(random, file)}", mistake=True))
    changes = pick(random, ("add", "move", "remove"), {"easy": 1, "medium": 2, "hard": 3}[level])
    for change, job in zip(changes, pick(random, sorted(before), len(changes)), strict=True):
        when, fields = _time(random)
        if change == "add":
            job, after[new] = new, fields
            sentence, command = random.choice(_ADD), f"echo '{fields} ./{job}' >> {file}"
        elif change == "move":
            after[job] = fields
            sentence, command = random.choice(_MOVE), f"sed -i 's|.* ./{job}|{fields} ./{job}|' {file}"
            if random.random() < 0.5:
                before[job] = f"{random.randint(1, 23)} {random.randint(24, 59)} * * *"  # Hour and minute swapped.
        else:
            del after[job]
            sentence, command = random.choice(_REMOVE), f"sed -i '/{job}/d' {file}"
        sentences.append(sentence.format(job=f"./{job}", when=when))
        steps.append(ExpertStep(command))

    sentences.append(random.choice(_CHECK))
    steps.append(ExpertStep(f"./cron.sh check {file}"))
    counts = f"{random.choice(VERBS)}.txt" if level == "hard" else ""
    if counts:
        sentences.append(random.choice(_COUNT))
        steps += [ExpertStep(f"./cron.sh count {file} > {counts}"), ExpertStep(f"cat {counts}")]
    return Problem(
        instruction=" ".join(sentences).format(file=file, counts=counts),
        check=f"python3 -I /tests/cron.py same {file} /tests/wanted {counts}",
        expert=tuple(steps),
        files={file: _crontab(before), "cron.sh": _scheduler(random)},
        check_files={"/tests/cron.py": _CRON.encode(), "/tests/wanted": _crontab(after)},
    )


def _time(random: Random) -> tuple[str, str]:
    """A time in English, and in the five fields of cron."""
    minute, hour, day, weekday = (
        random.randint(10, 59),
        random.randint(1, 23),
        random.randint(2, 28),
        random.randrange(7),
    )
    step = random.choice((5, 10, 15, 20, 30))
    return random.choice(
        (
            (f"every day at {hour}:{minute}", f"{minute} {hour} * * *"),
            (f"daily at {hour}:{minute}", f"{minute} {hour} * * *"),
            (f"every hour at minute {minute}", f"{minute} * * * *"),
            (f"every {step} minutes", f"*/{step} * * * *"),
            (f"every {_DAYS[weekday]} at {hour}:{minute}", f"{minute} {hour} * * {weekday}"),
            (f"from Monday to Friday at {hour}:{minute}", f"{minute} {hour} * * 1-5"),
            (f"on day {day} of every month at {hour}:{minute}", f"{minute} {hour} {day} * *"),
        )
    )


def _crontab(jobs: Mapping[str, str]) -> bytes:
    return "".join(f"{fields} ./{job}\n" for job, fields in jobs.items()).encode()


def _scheduler(random: Random) -> bytes:
    return f"""#!/bin/bash
# Usage: ./cron.sh check FILE | count FILE
{effort(random)}
exec python3 -I - "$@" <<'END'
{_CRON}END
""".encode()


_CRON = '''\
"""Usage: check FILE says whether a crontab is valid; count FILE says how often each job runs in a month;
same FILE OTHER [COUNTS] exits with 0 if two crontabs mean the same and COUNTS holds the counts."""
import sys

LIMITS = {"minute": (0, 59), "hour": (0, 23), "day": (1, 31), "month": (1, 12), "weekday": (0, 7)}


def expand(name, text):
    """The numbers that a field stands for."""
    low, high = LIMITS[name]
    numbers = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        first, _, last = (f"{low}-{high}" if span == "*" else span).partition("-")
        last, step = last or first, step or "1"
        if not (first.isdigit() and last.isdigit() and step.isdigit() and int(step)):
            raise ValueError(f"{name} {part} is not a number, a range or *")
        if not low <= int(first) <= int(last) <= high:
            raise ValueError(f"{name} {part} is not in {low}-{high}")
        numbers.update(range(int(first), int(last) + 1, int(step)))
    return {number % 7 for number in numbers} if name == "weekday" else numbers


def read(path):
    """Command and expanded fields of each job."""
    jobs = []
    for number, line in enumerate(open(path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        *fields, command = line.split(None, 5)
        if len(fields) != 5:
            sys.exit(f"{path} line {number}: expected five fields and a command")
        try:
            jobs.append((command.strip(), [sorted(expand(*field)) for field in zip(LIMITS, fields)]))
        except ValueError as error:
            sys.exit(f"{path} line {number}: {error}")
    return jobs


def count(fields):
    """How often a job runs in February 2027, which has 28 days and begins on a Monday."""
    minutes, hours, days, months, weekdays = fields
    if len(days) == 31 or len(weekdays) == 7:
        runs = [day for day in range(1, 29) if day in days and day % 7 in weekdays]
    else:
        runs = [day for day in range(1, 29) if day in days or day % 7 in weekdays]
    return len(minutes) * len(hours) * len(runs) * (2 in months)


action, path, *others = sys.argv[1:]
jobs = read(path)
counts = [f"{command} {count(fields)}" for command, fields in jobs]
if action == "check":
    print(f"{path}: {len(jobs)} jobs, no errors")
elif action == "count":
    print("\\n".join(counts))
elif action == "same":
    same = sorted(jobs) == sorted(read(others[0]))
    counted = not others[1:] or sorted(open(others[1]).read().split("\\n")[:-1]) == sorted(counts)
    sys.exit(0 if same and counted else 1)
'''
