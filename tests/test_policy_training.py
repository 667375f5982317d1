"""Training a policy: TRL learns from rollouts that were collected with speculation, as it would without."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from rich.console import Console

import tiny
from obsspec.chat import ChatFormat, TerminalChat
from obsspec.errors import InputError
from obsspec.reports.comparison import compare
from obsspec.reports.records import read_trajectories
from obsspec.reports.training import read_records
from obsspec.training.finetune import Recipe, finetune, load_trainable
from obsspec.training.policy import _trimmed, train
from obsspec.training.settings import TrainingSettings, config_text, read_settings
from obsspec.training.trajectories import ExpertRun, policy_row
from obsspec.training.versions import current_version
from obsspec.types import Exchange

QUIET = Console(quiet=True)
COMMANDS = ("sleep 0.1; touch a", "touch b", "cat c")


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny policy that writes one of three commands, as likely as not ``touch a``, and is done."""
    base, directory = (tmp_path_factory.mktemp(name) for name in ("base", "actor"))
    tokenizer = tiny.tokenizer()
    tiny.llama(vocab_size=len(tokenizer), initializer_range=0.05).save_pretrained(base)
    tokenizer.save_pretrained(base)
    printed = {"cat c": "cat: c: No such file or directory\n[exit code: 1]"}
    recipe = Recipe(tokens=40_000, rank=None, learning_rate=0.01, rows_per_step=3)
    trainable = load_trainable(str(base), recipe)
    chat = TerminalChat(ChatFormat(trainable.tokenizer))
    runs = [
        ExpertRun(str(place), "", "", "Do it.", (Exchange(command, printed.get(command, "")),), (False,))
        for place, command in enumerate(COMMANDS)
    ]
    finetune("actor", trainable, [policy_row(run, chat) for run in runs], directory, recipe, {}, QUIET)
    return str(directory)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of two tasks that are solved by making the file ``a``."""
    root = tmp_path_factory.mktemp("tasks")
    for name in ("one", "two"):
        (root / name / "tests").mkdir(parents=True)
        (root / name / "task.toml").write_text('version = "1.0"\n')
        (root / name / "instruction.md").write_text("Do it.\n")
        (root / name / "tests" / "test.sh").write_text(
            "#!/bin/bash\ntest -e /work/a && echo 1 > /logs/verifier/reward.txt\n"
        )
    return str(root)


def settings(actor: str, tasks: str, **flags: Any) -> TrainingSettings:
    chosen = {
        "tasks": tasks,
        "held_out": "",
        "policy": actor,
        "full": True,
        "precision": "float32",
        "tasks_per_step": 2,
        "group": 4,
        "max_turns": 3,
        "max_tokens": 32,
        "max_context": 512,
        "threads": 1,
        "steps": 2,
        "checkpoint_every": 1,
        "learning_rate": 0.003,
    }
    return read_settings(None, chosen | flags)


def weights(run: Path) -> bytes:
    """Of the last version."""
    version = current_version(run / "policy")
    assert version is not None
    return (version.directory / "model.safetensors").read_bytes()


def test_the_policy_learns_what_is_rewarded(actor: str, tasks: str, tmp_path: Path) -> None:
    train(settings(actor, tasks, steps=16, learning_rate=0.0015), tmp_path / "run", False, QUIET)
    steps = read_records(tmp_path / "run" / "steps.jsonl")
    assert [step["step"] for step in steps] == [*range(1, 17)]
    solved = [step["rollouts"]["solved"] for step in steps]
    print(solved)
    assert sum(solved[-4:]) >= sum(solved[:4]) + 6  # Of 32.
    versions = {
        version
        for line in read_trajectories(tmp_path / "run" / "rollouts")
        for turn in line.turns
        for version in turn.weight_versions
    }
    assert versions == {*range(16)}  # Each step's rollouts are by the weights of the step before.


def test_speculation_changes_nothing_that_is_learned(actor: str, tasks: str, tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    train(settings(actor, tasks), on, False, QUIET)
    train(settings(actor, tasks, depth=0), off, False, QUIET)
    comparison = compare(read_trajectories(off / "rollouts"), read_trajectories(on / "rollouts"))
    assert (comparison.identical, comparison.compared, comparison.largest_logprob_difference) == (16, 16, 0.0)
    assert weights(on) == weights(off)
    hits = {run: sum(step["rollouts"]["hits"] for step in read_records(run / "steps.jsonl")) for run in (on, off)}
    assert hits[off] == 0 < hits[on]


def test_a_killed_training_goes_on_bit_for_bit(actor: str, tasks: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(settings(actor, tasks, steps=4), whole, False, QUIET)
    chosen = settings(actor, tasks, steps=4)
    config = tmp_path / "config.toml"
    config.write_text(config_text(chosen))
    process = subprocess.Popen([sys.executable, "-m", "obsspec", "train", config, "--output", killed], stderr=-3)
    while len(read_records(killed / "steps.jsonl")) < 2 and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()
    with pytest.raises(InputError, match="add --resume or choose another"):
        train(chosen, killed, False, QUIET)
    with pytest.raises(InputError, match=r"optimization\.learning_rate = 0\.003, now it is 0\.004"):
        train(settings(actor, tasks, steps=4, learning_rate=0.004), killed, True, QUIET)
    train(chosen, killed, True, QUIET)
    assert weights(killed) == weights(whole)
    rollouts = [read_trajectories(run / "rollouts") for run in (whole, killed)]
    assert compare(*rollouts).identical == 32
    steps = [[line["trl"]["loss"] for line in read_records(run / "steps.jsonl")] for run in (whole, killed)]
    assert steps[0] == steps[1]


def test_padding_is_cut_and_nothing_else() -> None:
    prompt_mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    completion_mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    inputs = {
        "prompt_ids": torch.arange(8).view(2, 4),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.arange(10).view(2, 5),
        "completion_mask": completion_mask,
        "tool_mask": torch.ones(2, 5),
        "old_per_token_logps": torch.zeros(2, 5),
        "advantages": torch.ones(2),
    }
    trimmed = _trimmed(inputs)
    assert trimmed["prompt_ids"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert trimmed["completion_ids"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert {name: value.shape[1] for name, value in trimmed.items() if value.dim() == 2} == {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), 3),
        **dict.fromkeys(("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps"), 3),
    }
    assert trimmed["prompt_mask"].sum() == prompt_mask.sum() and trimmed["advantages"].shape == (2,)
