"""Expert runs become exactly the tokens that rollouts and predictors see, and an adapter learns them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import torch
from rich.console import Console

import tiny
from obsspec.chat import ChatFormat, TerminalChat, WorldModelChat
from obsspec.errors import InputError
from obsspec.models import load_model
from obsspec.predictors import LanguageModel
from obsspec.predictors.language_model import Limits
from obsspec.rollout import rollout
from obsspec.speculation import Settings, Speculator
from obsspec.tasks import Instance
from obsspec.tasks.problem import ExpertStep
from obsspec.testing import ScriptedEnvironment
from obsspec.training import finetune as finetune_module
from obsspec.training.finetune import Recipe, schedule
from obsspec.training.trajectories import (
    ExpertRun,
    Row,
    collect,
    policy_row,
    read_runs,
    world_model_rows,
)
from obsspec.training.warmstart import Score, evaluate, warmstart
from obsspec.types import Chunk, Exchange, Finish, Observation, Query, Request, Sampling, Task

torch.set_num_threads(1)  # A network this small only waits for others.
FORMAT = ChatFormat(tiny.tokenizer())
RUN = ExpertRun(
    task="names/easy/7",
    family="names",
    level="easy",
    instruction="List the files, then <|im_end|> say done.",
    exchanges=(
        Exchange("ls /wrok", "ls: no /wrok\n[exit code 2]"),
        Exchange("ls", "a\nb  é"),
        Exchange("touch c", "(no output)"),
    ),
    mistakes=(True, False, False),
)


def learned(row: Row) -> list[str]:
    """The texts that a row teaches."""
    return [FORMAT.decode(row.tokens[span.start : span.end]) for span in row.spans]


class Expert:
    """A policy that writes the commands of RUN."""

    def __init__(self, chat: TerminalChat) -> None:
        self._turns = [chat.action_tokens(exchange.command) for exchange in RUN.exchanges] + [chat.done_tokens()]

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        tokens = self._turns[request.turn]
        emit(Chunk(tokens, (0.0,) * len(tokens)))
        return "stop"


class Recorder:
    """A policy that notes what it is asked to continue."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        self.prompts.append(request.context.tokens)
        return "length"


@pytest.mark.anyio
async def test_policy_row_is_the_rollout() -> None:
    chat = TerminalChat(FORMAT)
    environment = ScriptedEnvironment(lambda done: Observation(RUN.exchanges[len(done) - 1].observation))
    speculator = Speculator(Expert(chat), chat, settings=Settings(Sampling(), depth=0))
    trajectory = await rollout(speculator, Task(RUN.task, RUN.instruction), environment.open)
    row = policy_row(replace(RUN, mistakes=(False, False, False)), chat)
    assert row.tokens == trajectory.context.tokens
    learned_tokens = {place for span in row.spans for place in range(span.start, span.end)}
    assert tuple(place in learned_tokens for place in range(len(row.tokens))) == trajectory.context.mask


def test_policy_does_not_learn_mistakes() -> None:
    row = policy_row(RUN, TerminalChat(FORMAT))
    assert learned(row) == ["```bash\nls\n```<|im_end|>", "```bash\ntouch c\n```<|im_end|>", "done<|im_end|>"]
    assert "ls /wrok" in FORMAT.decode(row.tokens)


async def prompts_of(run: ExpertRun, limits: Limits) -> list[tuple[int, ...]]:
    """What the predictor puts before its model, for every command of a run."""
    recorder = Recorder()
    predictor = LanguageModel(recorder, WorldModelChat(FORMAT), limits)
    for turn, exchange in enumerate(run.exchanges):
        query = Query(run.task, run.instruction, run.exchanges[:turn], exchange.command)
        await predictor.predict(query, lambda draft: None)
    return recorder.prompts


@pytest.mark.anyio
async def test_world_model_row_is_what_the_predictor_reads() -> None:
    (row,) = world_model_rows(RUN.instruction, RUN.exchanges, [1.0] * 3, WorldModelChat(FORMAT), Limits())
    assert learned(row) == [exchange.observation + "<|im_end|>" for exchange in RUN.exchanges]
    prompts = await prompts_of(RUN, Limits())
    assert [row.tokens[: span.start] for span in row.spans] == prompts


@pytest.mark.anyio
async def test_long_runs_and_observations_stay_within_what_the_predictor_reads() -> None:
    limits = Limits(context_tokens=400, draft_tokens=60, observation_characters=50)
    exchanges = [Exchange(f"cat {i}", "long " * 40 if i % 4 == 3 else f"line {i}") for i in range(12)]
    run = replace(RUN, exchanges=tuple(exchanges), mistakes=(False,) * 12)
    rows = world_model_rows(run.instruction, exchanges, [1.0] * 12, WorldModelChat(FORMAT), limits)
    assert len(rows) > 1
    assert max(len(row.tokens) for row in rows) <= limits.context_tokens
    assert [text for row in rows for text in learned(row)] == [f"line {i}<|im_end|>" for i in range(12) if i % 4 != 3]
    for prompt in (await prompts_of(run, limits))[:-1]:  # The answer to the last is too long to be learned.
        assert any(row.tokens[: len(prompt)] == prompt for row in rows)


def instance(name: str, commands: tuple[str, ...] = ("ls",)) -> Instance:
    return Instance(Task(name, "Do it.", "names", "easy"), tuple(ExpertStep(command) for command in commands))


class Environments:
    """Opens scripted environments, in which the tasks named unsolvable score 0."""

    def __init__(self, *unsolvable: str) -> None:
        self._unsolvable = unsolvable
        self.opened: list[str] = []

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[ScriptedEnvironment]:
        self.opened.append(task.id)
        reward = 0.0 if task.id in self._unsolvable else 1.0
        yield ScriptedEnvironment(lambda done: Observation(f"{task.id}: {done[-1]}"), reward)


@pytest.mark.anyio
async def test_collect_leaves_out_what_was_not_solved_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "runs.jsonl"
    instances = [instance("names/easy/1", ("ls", "pwd")), instance("names/easy/2"), instance("names/easy/3")]
    first = Environments("names/easy/2")
    assert await collect(instances[:2], file, first.open) == ["names/easy/2"]
    with file.open("ab") as stream:
        stream.write(b'{"task":"names/easy/3","fam')
    again = Environments()
    assert await collect(instances, file, again.open) == []
    assert again.opened == ["names/easy/2", "names/easy/3"]
    runs = read_runs(file)
    assert sorted(run.task for run in runs) == ["names/easy/1", "names/easy/2", "names/easy/3"]
    assert runs[0].exchanges == (Exchange("ls", "names/easy/1: ls"), Exchange("pwd", "names/easy/1: pwd"))


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"task": "a"}\n')
    with pytest.raises(InputError, match=r"runs\.jsonl, line 1"):
        read_runs(tmp_path / "runs.jsonl")
    with pytest.raises(InputError, match=r"none\.jsonl"):
        read_runs(tmp_path / "none.jsonl")


def test_schedule_takes_every_row_before_any_again() -> None:
    steps = schedule([10, 20, 30, 40], Recipe(tokens=240, rows_per_step=3))
    order = [index for step in steps for index in step]
    assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 3]
    assert sum((10, 20, 30, 40)[index] for index in order) >= 240
    assert all(len(step) == 3 for step in steps[:-1])
    assert steps != schedule([10, 20, 30, 40], Recipe(tokens=240, rows_per_step=3, seed=1))


RUNS = [
    replace(
        RUN,
        task=f"names/easy/{seed}",
        instruction=f"Make {name}.",
        exchanges=(Exchange(f"touch {name}", "(no output)"), Exchange("ls", f"{name}\nls")),
        mistakes=(False, False),
    )
    for seed, name in enumerate(["file", "done", "assistant"])
]
RECIPE = Recipe(tokens=20_000, rows_per_step=2, learning_rate=0.01)


@pytest.mark.parametrize("role", ["policy", "world_model"])
def test_an_adapter_learns_its_runs(role: Any, base: str, tmp_path: Path) -> None:
    before = evaluate(role, load_model(base)[0], RUNS, tiny.tokenizer())
    total = 9 if role == "policy" else 6
    assert before["names"].exact < total
    warmstart(role, RUNS, tmp_path / "adapter", RECIPE, base, Console(quiet=True))
    model, tokenizer = load_model(base, tmp_path / "adapter")
    assert evaluate(role, model, RUNS, tokenizer) == {"names": Score(total, total)}
    report = json.loads((tmp_path / "adapter" / "training.json").read_text())
    assert report["tasks"] == {"names/easy": "0 1 2"}
    assert report["losses"][-1] < 0.1 * report["losses"][0]
    assert report["tokens"] >= RECIPE.tokens


class Interrupting(Console):
    """Somebody who presses Ctrl-C at a number of lines printed."""

    def __init__(self, lines: int) -> None:
        super().__init__(quiet=True)
        self._lines = lines

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._lines -= 1
        if self._lines == 0:
            raise KeyboardInterrupt


def test_an_interrupted_training_ends_in_the_same_adapter(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, tokens=3_000)
    warmstart("policy", RUNS, tmp_path / "whole", recipe, base, Console(quiet=True))
    monkeypatch.setattr(finetune_module, "_CHECKPOINT_SECONDS", 0.0)
    for lines in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            warmstart("policy", RUNS, tmp_path / "parts", recipe, base, Interrupting(lines))
        load_model(base, tmp_path / "parts")  # Usable at any time.
    warmstart("policy", RUNS, tmp_path / "parts", recipe, base, Console(quiet=True))
    for name in ("adapter_model.safetensors", "adapter_config.json", "training.json"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("saving")) == []


def test_another_training_in_the_same_place_is_refused(base: str, tmp_path: Path) -> None:
    recipe = replace(RECIPE, tokens=200)
    warmstart("policy", RUNS, tmp_path / "adapter", recipe, base, Console(quiet=True))
    with pytest.raises(InputError, match="another"):
        warmstart("policy", RUNS, tmp_path / "adapter", replace(recipe, seed=1), base, Console(quiet=True))
    with pytest.raises(InputError, match="tokens"):
        Recipe(tokens=0)
    with pytest.raises(InputError, match="nothing to learn"):
        warmstart("policy", [], tmp_path / "other", recipe, base, Console(quiet=True))
