"""Every family of generated tasks, played in the real sandbox by its expert, by nobody, and not quite right."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import anyio
import pytest

from obsspec.environments.sandbox import open_sandbox
from obsspec.tasks import FAMILIES, Instance, Level, generate
from obsspec.tasks.families import words
from obsspec.types import Observation, Task

LEVELS: tuple[Level, ...] = ("easy", "medium", "hard")
SEEDS = (0, 1, 2)
SANDBOXES_AT_A_TIME = 4

every_family = pytest.mark.parametrize("family", FAMILIES)

Play = tuple[list[Observation], float]
"""What was observed, and the reward."""


async def play(task: Task, commands: Sequence[str]) -> Play:
    async with open_sandbox(task) as sandbox:
        observations = [await sandbox.execute(command) for command in commands]
        return observations, await sandbox.score()


async def play_all(games: Sequence[tuple[Task, Sequence[str]]]) -> list[Play]:
    """Plays several games at a time; the results are in the order of the games."""
    results: dict[int, Play] = {}
    limiter = anyio.CapacityLimiter(SANDBOXES_AT_A_TIME)

    async def one(number: int, task: Task, commands: Sequence[str]) -> None:
        async with limiter:
            results[number] = await play(task, commands)

    async with anyio.create_task_group() as group:
        for number, game in enumerate(games):
            group.start_soon(one, number, *game)
    return [results[number] for number in range(len(games))]


def commands(instance: Instance) -> list[str]:
    return [step.command for step in instance.expert]


def faultless(family: str, level: Level) -> Instance:
    """The first instance in which the expert makes no mistake."""
    instances = (generate(family, level, seed) for seed in itertools.count())
    return next(instance for instance in instances if not any(step.mistake for step in instance.expert))


@every_family
@pytest.mark.anyio
async def test_the_expert_solves_it(family: str) -> None:
    instances = [generate(family, level, seed) for level in LEVELS for seed in SEEDS]
    plays = await play_all([(instance.task, commands(instance)) for instance in instances])
    for instance, (observations, reward) in zip(instances, plays, strict=True):
        assert reward == 1.0, (instance.task.id, [observation.text for observation in observations])
        assert not any(observation.timed_out for observation in observations), instance.task.id


@every_family
@pytest.mark.anyio
async def test_doing_nothing_earns_nothing(family: str) -> None:
    tasks = [generate(family, level, seed).task for level in LEVELS for seed in SEEDS]
    plays = await play_all([(task, ["true"]) for task in tasks])
    assert [reward for _, reward in plays] == [0.0] * len(tasks)


@every_family
@pytest.mark.anyio
async def test_a_step_left_out_is_noticed_and_the_same_commands_print_the_same(family: str) -> None:
    instance = faultless(family, "medium")
    every_step = commands(instance)
    without = [every_step[:i] + every_step[i + 1 :] for i in range(len(every_step))]
    plays = await play_all([(instance.task, steps) for steps in without])
    assert 0.0 in [reward for _, reward in plays]
    whole = [observation.text for observation in plays[-1][0]]
    for i, (observations, _) in enumerate(plays):
        assert [observation.text for observation in observations[:i]] == whole[:i]


NEAR_MISSES: dict[str, tuple[Level, str]] = {
    # Files that were to be left out are packed as well.
    "archive": ("medium", "new=$(ls *.tar.gz); tar -czf $new $(ls -d */ | grep -v uploads); cp $new uploads/"),
    # The header is copied as well.
    "csv_table": ("easy", 'old=$(ls -tr *.csv | head -n 1); sed -i "1i $(head -n 1 $old)" $(ls -t *.csv | head -n 1)'),
    # One file more is renamed.
    "file_tree": ("easy", 'file=$(find . -mindepth 3 -type f | head -n 1); mv "$file" "$(dirname "$file")/other"'),
    # Everything is committed, not only what was asked for.
    "git_history": ("easy", "git add -A && git commit -q --no-verify --amend --no-edit"),
    # Numbers become strings.
    "json_records": ("medium", """sed -i -E 's/: ([0-9]+)/: "\\1"/' *.json active/*.json"""),
    # The count stands beside the name.
    "logs": ("medium", "sed -i 's/$/ 3/' *.txt"),
    # One script may be executed by everybody.
    "permissions": ("hard", "chmod 777 $(find . -mindepth 2 -name '*.sh' | head -n 1)"),
    # The last line is lost.
    "text": ("easy", "sed -i '$d' public/*.txt"),
}
"""For some families, what turns the expert's result into one that looks like it and is wrong."""


@pytest.mark.parametrize("family", NEAR_MISSES)
@pytest.mark.anyio
async def test_a_near_miss_earns_nothing(family: str) -> None:
    level, spoil = NEAR_MISSES[family]
    instance = faultless(family, level)
    observations, reward = await play(instance.task, [*commands(instance), spoil])
    assert observations[-1].exit_code == 0, observations[-1].text
    assert reward == 0.0


@every_family
def test_seeds_differ(family: str) -> None:
    for level in LEVELS:
        instances = [generate(family, level, seed) for seed in range(40)]
        assert len({(instance.task.instruction, instance.expert) for instance in instances}) == len(instances)


@every_family
def test_instructions_are_worded_in_several_ways(family: str) -> None:
    names = {*words.NOUNS, *words.VERBS, *words.PEOPLE, *words.DIRECTORIES, *words.CITIES}

    def wording(instruction: str) -> str:
        return " ".join(word for word in re.findall("[A-Za-z]+", instruction) if word not in names)

    for level in LEVELS:
        assert len({wording(generate(family, level, seed).task.instruction) for seed in range(40)}) >= 3


def test_a_seed_means_the_same_in_every_process() -> None:
    program = """
from obsspec.tasks import FAMILIES, generate
for family in FAMILIES:
    for level in ("easy", "medium", "hard"):
        for seed in range(5):
            print(generate(family, level, seed))
"""
    one, other = (
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    )
    assert one == other


@every_family
def test_experts_take_about_as_many_steps_as_the_level_says(family: str) -> None:
    most: dict[Level, int] = {"easy": 4, "medium": 6, "hard": 8}
    for level in LEVELS:
        for seed in range(20):
            right = [step for step in generate(family, level, seed).expert if not step.mistake]
            assert 2 <= len(right) <= most[level]
