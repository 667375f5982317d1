"""A run on disk: one directory with ``run.json`` (what was asked for) and ``trajectories.jsonl`` (what came out).

A line is on the disk before the next rollout's result is taken, so a crash loses at most the rollouts in flight.
Rollouts that broke are in ``failures.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, model_validator

from obsspec.errors import InputError, writing
from obsspec.lines import LineFile, append_durably
from obsspec.rollout import Failure
from obsspec.types import Action, Generation, Interval, Trajectory, Turn

_SETTINGS, _TRAJECTORIES, _FAILURES = "run.json", "trajectories.jsonl", "failures.jsonl"

Span = tuple[float, float]
"""Start and end, in seconds since the rollout began."""


class DraftLine(BaseModel):
    predictor: str
    probability: float
    seconds: float
    admitted: bool
    exact: bool


class TurnLine(BaseModel):
    """One turn. ``tokens`` counts what the policy generated; the ids are in the trajectory."""

    command: str | None
    observation: str | None
    exit_code: int | None
    timed_out: bool
    tokens: int
    weight_versions: list[int]
    generating: list[Span]
    executing: Span | None
    outcome: Literal["hit", "miss", "late", "gated", "failed", "off"]
    drafts: list[DraftLine]
    wasted_tokens: int
    hidden_seconds: float

    @property
    def tool_seconds(self) -> float:
        return self.executing[1] - self.executing[0] if self.executing else 0.0


class TrajectoryLine(BaseModel):
    """One line of ``trajectories.jsonl``. ``tokens``, ``mask`` and ``logprobs`` have the same length."""

    task: str
    family: str
    level: str
    seed: int
    reward: float | None
    end: Literal["done", "turns", "length"]
    seconds: float
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    messages: list[dict[str, str]]
    turns: list[TurnLine]

    @model_validator(mode="after")
    def _lengths_agree(self) -> TrajectoryLine:
        if not len(self.tokens) == len(self.mask) == len(self.logprobs):
            raise ValueError("tokens, mask and logprobs must have the same length")
        return self


def line_of(trajectory: Trajectory, instruction: str, text: Callable[[Generation], str]) -> TrajectoryLine:
    """``text`` gives what a generation reads, for the messages."""
    messages = [{"role": "user", "content": instruction}]
    for turn in trajectory.turns:
        messages.append({"role": "assistant", "content": text(turn.generation)})
        if turn.observation is not None:
            messages.append({"role": "user", "content": turn.observation.text})
    return TrajectoryLine(
        task=trajectory.task,
        family=trajectory.family,
        level=trajectory.level,
        seed=trajectory.seed,
        reward=trajectory.reward,
        end=trajectory.end,
        seconds=trajectory.seconds,
        tokens=list(trajectory.context.tokens),
        mask=[int(sampled) for sampled in trajectory.context.mask],
        logprobs=list(trajectory.context.logprobs),
        messages=messages,
        turns=[_turn_line(turn) for turn in trajectory.turns],
    )


def _turn_line(turn: Turn) -> TurnLine:
    observation = turn.observation
    return TurnLine(
        command=turn.step.command if isinstance(turn.step, Action) else None,
        observation=observation.text if observation else None,
        exit_code=observation.exit_code if observation else None,
        timed_out=observation.timed_out if observation else False,
        tokens=len(turn.generation.tokens),
        weight_versions=list(turn.generation.weight_versions),
        generating=[_span(interval) for interval in turn.generating],
        executing=_span(turn.executing) if turn.executing else None,
        outcome=turn.outcome,
        drafts=[
            DraftLine(
                predictor=draft.predictor,
                probability=draft.probability,
                seconds=draft.seconds,
                admitted=draft.admitted,
                exact=draft.exact,
            )
            for draft in turn.drafts
        ],
        wasted_tokens=turn.wasted_tokens,
        hidden_seconds=turn.hidden_seconds,
    )


def _span(interval: Interval) -> Span:
    return (interval.start, interval.end)


class RunDirectory:
    """Where one run's results go. ``open_run`` opens it."""

    def __init__(self, path: Path, done: set[tuple[str, int]], append: Callable[[TrajectoryLine], None]) -> None:
        self.done = done
        """The (task, seed) pairs that are there already."""
        self._failures = path / _FAILURES
        self._append = append

    def write(self, line: TrajectoryLine | Failure) -> None:
        """Appends one result, durably. Raises InputError where the disk is full; what was there stays readable."""
        if isinstance(line, TrajectoryLine):
            self._append(line)
            return
        try:
            with self._failures.open("ab", buffering=0) as stream:
                append_durably(stream, json.dumps(asdict(line)).encode() + b"\n")
        except OSError as error:
            raise InputError(
                f"{self._failures}: {error.strerror}, while {line.task} seed {line.seed} broke with {line.error}; "
                "go on with --resume"
            ) from None


@contextmanager
def open_run(path: Path, settings: dict[str, Any], resume: bool) -> Iterator[RunDirectory]:
    """The run directory ``path``, with what an earlier, interrupted run of the same settings left in it.

    ``settings``: what was asked for; a resumed run must ask for the same. Raises InputError where the directory
    cannot be written, is being written by another process, holds a run already, or holds anything else's files.
    """
    file = path / _TRAJECTORIES
    with writing(f"--output {path}", "directory"):
        path.mkdir(parents=True, exist_ok=True)
        holds_some = file.exists() and file.stat().st_size > 0
    if holds_some:
        _check_resumable(path, settings, resume)
    with _trajectories(path).writing() as (lines, append):
        with writing(f"--output {path}", "directory"):
            if not lines:  # What is there, if anything, is of a run that brought nothing forth.
                (path / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
            (path / _FAILURES).unlink(missing_ok=True)  # They are tried again.
        yield RunDirectory(path, {(line.task, line.seed) for line in lines}, append)


def read_trajectories(path: Path) -> list[TrajectoryLine]:
    """The trajectories of a run directory. Raises InputError that names the file, line and field that are wrong."""
    return _trajectories(path).read()


def _trajectories(path: Path) -> LineFile[TrajectoryLine]:
    return LineFile(
        path / _TRAJECTORIES, TypeAdapter(TrajectoryLine), "task", "`obsspec rollout --output`", "with --resume"
    )


def read_settings(path: Path) -> dict[str, Any]:
    """What a run was asked for: its ``run.json``. Raises InputError where there is none or it is broken."""
    file = path / _SETTINGS
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError):
        raise InputError(f"{file}: missing or broken; give a directory that `obsspec rollout --output` wrote") from None
    if not isinstance(settings, dict):
        raise InputError(f"{file}: not a JSON object; give a directory that `obsspec rollout --output` wrote")
    return settings


def _check_resumable(path: Path, settings: dict[str, Any], resume: bool) -> None:
    before = read_settings(path)
    if not resume:
        raise InputError(f"--output {path}: holds a run already; add --resume or choose another directory")
    check_same(path / _SETTINGS, before, settings)


def check_same(file: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises InputError where what a run is asked to go on with is not what ``file`` says it began with."""
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise InputError(
                f"--resume: {file} has {name} = {before.get(name)!r}, now it is {now.get(name)!r};"
                " use the same settings or choose another directory"
            )
