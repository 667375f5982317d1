"""Tasks: generated ones of sixteen families, and directories of others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import TypeVar, get_args

from obsspec.errors import InputError, did_you_mean
from obsspec.tasks.families import FAMILIES
from obsspec.tasks.problem import ExpertStep, Level
from obsspec.types import Task

__all__ = [
    "FAMILIES",
    "LEVELS",
    "ExpertStep",
    "Instance",
    "Level",
    "generate",
    "generate_many",
    "parse_instances",
    "parse_tasks",
]

Name = TypeVar("Name", bound=str)

LEVELS: tuple[Level, ...] = get_args(Level)

_GENERATED = "generated:"
_MOST_SEEDS = 100_000


@dataclass(frozen=True, slots=True)
class Instance:
    """A generated task, and an expert's way through it."""

    task: Task
    expert: tuple[ExpertStep, ...]


def generate(family: str, level: Level, seed: int) -> Instance:
    """The task ``family/level/seed``: the same one for ever. InputError if there is no such family or level."""
    name = f"{_known('family', family, FAMILIES)}/{_known('level', level, LEVELS)}/{seed}"
    problem = FAMILIES[family](Random(name), level)
    task = Task(
        id=name,
        instruction=problem.instruction,
        family=family,
        level=level,
        files=problem.files,
        setup=problem.setup,
        check=problem.check,
        check_files=problem.check_files,
    )
    return Instance(task, problem.expert)


def generate_many(families: Sequence[str], levels: Sequence[Level], seeds: Iterable[int]) -> list[Instance]:
    """Every combination, seed by seed, so that a beginning of the list has all families and levels in it."""
    return [generate(family, level, seed) for seed, family, level in product(seeds, families, levels)]


def parse_tasks(text: str) -> list[Task]:
    """The tasks that a command line names: generated ones, or those in a directory.

    ``generated:FAMILIES/LEVELS/SEEDS`` takes families and levels separated by commas, or ``all``, and seeds as numbers
    and ranges, both ends included: ``generated:logs,text/easy/0-9,20``. Anything else is the path of a directory that
    holds a task, or a directory of tasks. InputError if it is none of these.
    """
    if text.startswith(_GENERATED):
        return [instance.task for instance in parse_instances(text)]
    if not text.strip():
        raise InputError("tasks: none are named; give a directory of tasks, or such as generated:all/easy/0-9")
    from obsspec.tasks.harbor import load_tasks

    return load_tasks(Path(text))


def parse_instances(text: str) -> list[Instance]:
    """As `parse_tasks`, for generated tasks only: these have experts."""
    parts = text.removeprefix(_GENERATED).split("/")
    if not text.startswith(_GENERATED) or len(parts) != 3:
        raise InputError(f"tasks {text!r}: expected generated:FAMILIES/LEVELS/SEEDS, such as generated:all/easy/0-9")
    families = list(FAMILIES) if parts[0] == "all" else parts[0].split(",")
    levels = LEVELS if parts[1] == "all" else [_known("level", level, LEVELS) for level in parts[1].split(",")]
    return generate_many(list(dict.fromkeys(families)), list(dict.fromkeys(levels)), dict.fromkeys(_seeds(parts[2])))


def _known(kind: str, name: str, known: Iterable[Name]) -> Name:
    """The one of ``known`` that is called ``name``."""
    names = list(known)
    for each in names:
        if each == name:
            return each
    hint = did_you_mean(name, names, "none is like it;")
    raise InputError(f"unknown {kind} {name!r}: {hint} choose from {', '.join(names)}")


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise InputError(f"seeds {text!r}: expected numbers and rising ranges, such as 0-9,20")
        if len(seeds) + last - first >= _MOST_SEEDS:
            raise InputError(f"seeds {text!r}: more than {_MOST_SEEDS:,} at once; give fewer")
        seeds.extend(range(first, last + 1))
    return seeds
