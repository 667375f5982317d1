"""A run on disk: one directory with ``run.json`` (what was asked for) and ``trajectories.jsonl`` (what came out).

A line is written whole and synced before the next rollout's result is taken, so a crash loses at most the rollouts
in flight; a line that a crash tore is cut off when the run is resumed. Rollouts that broke are in ``failures.jsonl``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from obsspec.errors import InputError
from obsspec.rollout import Failure
from obsspec.types import Action, Generation, Interval, Trajectory, Turn

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
    """Where one run's results go. Opening it takes over what an earlier, interrupted run of the same kind left."""

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool) -> None:
        """``settings``: what was asked for; a resumed run must ask for the same.

        Raises InputError where the directory cannot be written, holds a run already, or holds another one.
        """
        self.path = path
        self._trajectories = path / "trajectories.jsonl"
        self._failures = path / "failures.jsonl"
        description = path / "run.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._trajectories.touch()
            if description.exists() and self._trajectories.stat().st_size:
                _check_resumable(description, settings, resume)
                _cut_torn_line(self._trajectories)
            else:
                description.unlink(missing_ok=True)  # Of a run that brought nothing forth.
                _append(description, json.dumps(settings, indent=2) + "\n")
            self._failures.unlink(missing_ok=True)  # They are tried again.
        except OSError as error:
            raise InputError(f"--output {path}: {error.strerror}; choose a directory that can be written") from None
        self.done = {(line.task, line.seed) for line in read_trajectories(path)}
        """The (task, seed) pairs that are there already."""

    def write(self, line: TrajectoryLine | Failure) -> None:
        """Appends one result, durably. Raises InputError where the disk is full; what was there stays readable."""
        if isinstance(line, Failure):
            path, text = self._failures, json.dumps({"task": line.task, "seed": line.seed, "error": line.error})
        else:
            path, text = self._trajectories, line.model_dump_json()
        try:
            _append(path, text + "\n")
        except OSError as error:
            raise InputError(
                f"{path}: {error.strerror}; the results before are kept: make room and go on with --resume"
            ) from None


def read_trajectories(path: Path) -> list[TrajectoryLine]:
    """The trajectories of a run directory. Raises InputError that names the file, line and field that are wrong."""
    file = path / "trajectories.jsonl"
    try:
        lines = file.read_text().split("\n")  # Texts may hold other characters that `splitlines` takes for line ends.
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{file}: {reason}; give a directory that `obsspec rollout --output` wrote") from None
    if not lines[-1]:
        lines.pop()
    trajectories = []
    for number, line in enumerate(lines, start=1):
        try:
            trajectories.append(TrajectoryLine.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise InputError(
                f"{file}, line {number}: {where}: {first['msg']}; the file was changed or cut, remove that line"
            ) from None
    return trajectories


def read_settings(path: Path) -> dict[str, Any]:
    """What a run was asked for: its ``run.json``. Raises InputError where there is none or it is broken."""
    file = path / "run.json"
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError):
        raise InputError(f"{file}: missing or broken; give a directory that `obsspec rollout --output` wrote") from None
    if not isinstance(settings, dict):
        raise InputError(f"{file}: not a JSON object; give a directory that `obsspec rollout --output` wrote")
    return settings


def _check_resumable(description: Path, settings: dict[str, Any], resume: bool) -> None:
    if not resume:
        raise InputError(
            f"--output {description.parent}: holds a run already; add --resume or choose another directory"
        )
    before = read_settings(description.parent)
    for name in sorted(before.keys() | settings.keys()):
        if before.get(name) != settings.get(name):
            raise InputError(
                f"--resume: {description} has {name} = {before.get(name)!r}, now it is {settings.get(name)!r};"
                " use the same settings or choose another directory"
            )


def _cut_torn_line(file: Path) -> None:
    if not file.exists():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(file, whole)


def _append(file: Path, text: str) -> None:
    """Appends durably, or leaves the file as it was."""
    with file.open("ab", buffering=0) as stream:
        before = stream.tell()
        data = memoryview(text.encode())
        try:
            while data:
                data = data[stream.write(data) :]
            os.fsync(stream.fileno())
        except OSError:
            with suppress(OSError):  # What matters is the first error.
                os.truncate(file, before)
            raise
