"""Training a policy: TRL learns from rollouts that were collected with speculation, as it would without."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from rich.console import Console
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tiny
from obsspec.chat import ChatFormat, TerminalChat
from obsspec.environments.sandbox import open_sandbox
from obsspec.errors import InputError
from obsspec.reports.comparison import compare
from obsspec.reports.records import read_trajectories
from obsspec.reports.training import read_records
from obsspec.training import policy as policy_training
from obsspec.training.beside import CoTrainer
from obsspec.training.finetune import Recipe, finetune, load_trainable
from obsspec.training.policy import newest_checkpoint, train
from obsspec.training.settings import TrainingSettings, config_text, read_settings
from obsspec.training.trajectories import ExpertRun, policy_row
from obsspec.training.versions import current_version
from obsspec.types import Environment, Exchange, Task

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
    assert sum(solved[-4:]) >= sum(solved[:4]) + 6  # Of 32.
    versions = {
        version
        for line in read_trajectories(tmp_path / "run" / "rollouts")
        for turn in line.turns
        for version in turn.weight_versions
    }
    assert versions == {*range(16)}  # Each step's rollouts are by the weights of the step before.


def test_ahead_rollouts_are_collected_while_the_policy_learns(actor: str, tasks: str, tmp_path: Path) -> None:
    train(settings(actor, tasks, steps=5, ahead=1), tmp_path / "run", False, QUIET)
    versions: dict[int, set[int]] = {step: set() for step in range(5)}
    for line in read_trajectories(tmp_path / "run" / "rollouts"):
        versions[line.seed // 8] |= {version for turn in line.turns for version in turn.weight_versions}
    assert versions[0] == {0}
    assert all({step - 1} <= versions[step] <= {step - 1, step} for step in range(1, 5))  # At most one update behind.


def test_speculation_changes_nothing_that_is_learned(actor: str, tasks: str, tmp_path: Path) -> None:
    on, off = tmp_path / "on", tmp_path / "off"
    train(settings(actor, tasks, report_to=["tensorboard"]), on, False, QUIET)
    train(settings(actor, tasks, depth=0), off, False, QUIET)
    comparison = compare(read_trajectories(off / "rollouts"), read_trajectories(on / "rollouts"))
    assert (comparison.identical, comparison.compared, comparison.largest_logprob_difference) == (16, 16, 0.0)
    assert weights(on) == weights(off)
    hits = {run: sum(step["rollouts"]["hits"] for step in read_records(run / "steps.jsonl")) for run in (on, off)}
    assert hits[off] == 0 < hits[on]
    events = EventAccumulator(str(on / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2]
    assert "train/rollouts/hidden_seconds" in events.Tags()["scalars"]


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
    with pytest.raises(InputError, match="holds no training; leave --resume out"):
        train(chosen, tmp_path / "other", True, QUIET)
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


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ({"learning_rate": 1.0}, r"\[trl\] learning_rate: is set by the other sections"),
        ({"bet": 0.1}, r"\[trl\] bet: TRL's GRPOConfig has no such key; did you mean beta\?"),
        ({"optim": "none such"}, r"\[trl\]: .*none such"),
        ({"loss_type": "dapoo"}, r"\[trl\] loss_type = 'dapoo': is nothing that TRL has; did you mean dapo\?"),
        ({"logging_strategy": "no"}, r"\[trl\] logging_strategy: is set by the other sections"),
    ],
)
def test_what_trl_does_not_take_is_said_before_anything_is_loaded(
    said: dict[str, Any], refusal: str, actor: str, tasks: str, tmp_path: Path
) -> None:
    chosen = settings(actor, tasks)
    chosen.trl.update(said)
    with pytest.raises(InputError, match=refusal):
        train(chosen, tmp_path / "run", False, QUIET)
    assert not (tmp_path / "run").exists()


def test_groups_that_are_all_alike_cost_no_passes_and_change_nothing(
    actor: str, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = tmp_path / "tasks" / "never"
    copytree(Path(tasks) / "one", never.with_name("one"))
    copytree(Path(tasks) / "one", never)
    (never / "tests" / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")
    passes: Counter[str] = Counter()
    loss = policy_training.GRPOTrainer.compute_loss

    def counted(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        passes[trainer.args.output_dir] += 1
        return loss(trainer, *args, **kwargs)

    monkeypatch.setattr(policy_training.GRPOTrainer, "compute_loss", counted)
    norms = []
    for name, rows in (("each", 1), ("together", 8)):
        run = tmp_path / name
        train(settings(actor, str(never.parent), steps=1, rows=rows, seed=1), run, False, QUIET)
        (step,) = read_records(run / "steps.jsonl")
        assert 0 < step["rollouts"]["solved"] < 4
        norms.append(step["trl"]["grad_norm"])
    assert [*passes.values()] == [4, 1]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


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
    trimmed = policy_training._trimmed(inputs)
    assert trimmed["prompt_ids"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert trimmed["completion_ids"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert {name: value.shape[1] for name, value in trimmed.items() if value.dim() == 2} == {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), 3),
        **dict.fromkeys(("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps"), 3),
    }
    assert trimmed["prompt_mask"].sum() == prompt_mask.sum() and trimmed["advantages"].shape == (2,)


def breaking(monkeypatch: pytest.MonkeyPatch, breaks: Callable[[Task, int], bool]) -> None:
    """Sandboxes that break, as ``breaks`` says of the task and how many of its sandboxes were opened before."""
    opened: Counter[str] = Counter()

    @asynccontextmanager
    async def open_breaking(task: Task) -> AsyncIterator[Environment]:
        opened[task.id] += 1
        if breaks(task, opened[task.id] - 1):
            raise OSError("the sandbox died")
        async with open_sandbox(task) as environment:
            yield environment

    monkeypatch.setattr("obsspec.runs.open_sandbox", open_breaking)


def test_a_rollout_that_breaks_is_tried_again(
    actor: str, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, lambda task, before: before == 0)
    train(settings(actor, tasks, steps=1), tmp_path / "run", False, QUIET)
    (step,) = read_records(tmp_path / "run" / "steps.jsonl")
    assert (step["rollouts"]["rollouts"], step["rollouts"]["broken"]) == (8, 0)


def test_a_task_that_always_breaks_teaches_nothing(
    actor: str, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, lambda task, before: task.id.endswith("two"))
    train(settings(actor, tasks, steps=1, attempts=2), tmp_path / "run", False, QUIET)
    (step,) = read_records(tmp_path / "run" / "steps.jsonl")
    assert (step["rollouts"]["rollouts"], step["rollouts"]["broken"]) == (4, 4)
    failures = [json.loads(line) for line in (tmp_path / "run/rollouts/failures.jsonl").read_text().splitlines()]
    assert {each["error"] for each in failures} == {"OSError: the sandbox died"}


def test_where_every_rollout_breaks_it_ends_and_says_why(
    actor: str, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, lambda task, before: True)
    with pytest.raises(InputError, match=r"every rollout broke, the first with: OSError: the sandbox died; .*--resume"):
        train(settings(actor, tasks, steps=1, attempts=1), tmp_path / "run", False, QUIET)


def test_gradients_that_are_no_numbers_never_reach_the_weights(
    actor: str, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = policy_training._Trainer.compute_loss
    bad = [1]

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = sound(self, *args, **kwargs)
        return loss * torch.nan if self.state.global_step in bad else loss

    monkeypatch.setattr(policy_training._Trainer, "compute_loss", compute_loss)
    run = tmp_path / "run"
    train(settings(actor, tasks, steps=3), run, False, QUIET)
    steps = read_records(run / "steps.jsonl")
    assert [step["skipped"] for step in steps] == [False, True, False]
    versions = [
        load_file(run / f"policy/v{number:06}/model.safetensors") for number in (2, 3, 4)
    ]  # After the first step, the second and the third.
    assert all(torch.equal(versions[0][name], versions[1][name]) for name in versions[0])
    assert not all(torch.equal(versions[1][name], versions[2][name]) for name in versions[1])
    bad += [4, 5, 6]
    with pytest.raises(InputError, match=r"no numbers in 3 steps in a row; lower learning_rate"):
        train(settings(actor, tasks, steps=10), run, True, QUIET)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None and checkpoint.name == "checkpoint-6"


def test_a_full_disk_leaves_the_checkpoint_before(
    actor: str, tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sound, saves = tmp_path / "run", torch.save, []

    def save(state: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        saves.append(file)
        if "checkpoint-2" in str(file):
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")  # PyTorch's word.
        sound(state, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(InputError, match=r"checkpoint-2: PytorchStreamWriter failed .*; make room, and --resume"):
        train(settings(actor, tasks), run, False, QUIET)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-1"]
    monkeypatch.undo()
    train(settings(actor, tasks), run, True, QUIET)
    assert [step["step"] for step in read_records(run / "steps.jsonl")] == [1, 2]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_after_the_step_and_twice_at_once(actor: str, tasks: str, tmp_path: Path, times: int) -> None:
    run = tmp_path / "run"
    (tmp_path / "config.toml").write_text(config_text(settings(actor, tasks, steps=500)))
    command = [sys.executable, "-m", "obsspec", "train", tmp_path / "config.toml", "--output", run]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while len(read_records(run / "steps.jsonl")) < 2:
            time.sleep(0.02)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].endswith("the same command with --resume goes on")
    done, checkpoint = len(read_records(run / "steps.jsonl")), newest_checkpoint(run)
    assert (
        checkpoint is not None
        and int(checkpoint.name.removeprefix("checkpoint-")) in ((done,), (done, done - 1))[times - 1]
    )
    train(settings(actor, tasks, steps=done + 1), run, True, QUIET)
    assert len(read_records(run / "steps.jsonl")) == done + 1


def test_the_world_model_learns_beside_it(actor: str, tasks: str, base: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    chosen = settings(
        actor, tasks, predictor="rules,language_model", world_model=base, cotrain=True, publish_seconds=0.5, steps=6
    )
    train(chosen, run, False, QUIET)
    steps = read_records(run / "steps.jsonl")
    assert steps[-1]["world_model"]["version"] > 1 and steps[-1]["world_model"]["transitions"] > 0
    assert current_version(run / "world-model") is not None
    assert not subprocess.run(["pgrep", "-f", str(run)], capture_output=True, check=False).stdout


def test_a_cotraining_that_is_killed_is_started_again(base: str, tmp_path: Path) -> None:
    said: list[str] = []
    with CoTrainer.start(tmp_path / "store.sqlite", base, tmp_path / "model", 1.0) as cotrainer:
        cotrainer.wait_for_version()
        assert os.getpriority(os.PRIO_PROCESS, cotrainer._process.pid) == 19
        assert os.getsid(cotrainer._process.pid) == os.getsid(0)  # Elsewhere niceness may count for nothing.
        cotrainer._process.kill()
        cotrainer._process.wait()
        cotrainer.keep_up(said.append)
        assert len(said) == 1 and said[0].startswith("co-training ended (")
        assert cotrainer._process.poll() is None
    assert cotrainer._process.returncode is not None
    with (
        CoTrainer.start(tmp_path / "other.sqlite", "/nowhere", tmp_path / "other", 1.0) as broken,
        pytest.raises(InputError, match=r"co-training: .*/nowhere.*; its output is in .*other\.log"),
    ):
        broken.wait_for_version()
