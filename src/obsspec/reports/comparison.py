"""Whether two runs of the same rollouts produced the same trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from obsspec.errors import InputError
from obsspec.reports.records import TrajectoryLine, TurnLine


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs of one rollout part."""

    task: str
    seed: int
    turn: int
    what: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, rollout by rollout."""

    identical: int
    """Rollouts with the same token ids and the same loss mask."""
    compared: int
    """Rollouts in both runs whose environment answered the same commands alike."""
    different: tuple[Difference, ...]
    """Rollouts whose policy wrote other tokens after the same ones. With a deterministic engine there are none."""
    environment: tuple[Difference, ...]
    """Rollouts left out of ``compared``: the environment itself answered the same command differently."""
    only_in_first: tuple[tuple[str, int], ...]
    only_in_second: tuple[tuple[str, int], ...]
    largest_logprob_difference: float
    """Over the identical rollouts, natural log."""
    first_seconds: float
    """Agent latency of the compared rollouts, summed, in the first run; then in the second."""
    second_seconds: float


_SPECULATION = {"predictor", "world_model", "world_model_name", "depth", "breadth"}
_WHICH_ROLLOUTS = {"tasks", "seed", "samples"}


def check_comparable(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raises InputError where two runs' settings differ in more than speculation and which rollouts were run."""
    for name in sorted((first.keys() | second.keys()) - _SPECULATION - _WHICH_ROLLOUTS):
        if first.get(name) != second.get(name):
            raise InputError(
                f"the runs differ in more than speculation: {name} is {first.get(name)!r} in the first, "
                f"{second.get(name)!r} in the second; run one of them again with the other's"
            )


def compare(first: Iterable[TrajectoryLine], second: Iterable[TrajectoryLine]) -> Comparison:
    """Pairs rollouts by task and seed. Raises InputError where none are in both."""
    ones = {(line.task, line.seed): line for line in first}
    others = {(line.task, line.seed): line for line in second}
    both = [key for key in ones if key in others]
    if not both:
        raise InputError("the two runs have no rollout in common: give them the same tasks and seeds")
    different, environment, identical = [], [], []
    for key in both:
        one, other = ones[key], others[key]
        difference = _first_difference(one, other)
        if difference is None:
            identical.append(key)
        elif difference.what.startswith("the environment"):
            environment.append(difference)
        else:
            different.append(difference)
    aside = {(difference.task, difference.seed) for difference in environment}
    compared = [key for key in both if key not in aside]
    return Comparison(
        identical=len(identical),
        compared=len(compared),
        different=tuple(different),
        environment=tuple(environment),
        only_in_first=tuple(key for key in ones if key not in others),
        only_in_second=tuple(key for key in others if key not in ones),
        largest_logprob_difference=max(
            (abs(a - b) for key in identical for a, b in zip(ones[key].logprobs, others[key].logprobs, strict=True)),
            default=0.0,
        ),
        first_seconds=sum(ones[key].seconds for key in compared),
        second_seconds=sum(others[key].seconds for key in compared),
    )


def _first_difference(one: TrajectoryLine, other: TrajectoryLine) -> Difference | None:
    for turn, ((mine, tokens), (theirs, their_tokens)) in enumerate(
        zip(_with_tokens(one), _with_tokens(other), strict=False)
    ):
        if tokens != their_tokens:
            return Difference(one.task, one.seed, turn, "the policy wrote other tokens")
        if mine.observation != theirs.observation:
            return Difference(one.task, one.seed, turn, f"the environment answered {mine.command!r} differently")
    if one.tokens != other.tokens or one.mask != other.mask:
        return Difference(
            one.task,
            one.seed,
            min(len(one.turns), len(other.turns)),
            "the trajectories differ in length or given tokens",
        )
    return None


def _with_tokens(line: TrajectoryLine) -> Iterator[tuple[TurnLine, list[int]]]:
    """Each turn with the token ids that its generation wrote."""
    written = [token for token, sampled in zip(line.tokens, line.mask, strict=True) if sampled]
    for turn in line.turns:
        yield turn, written[: turn.tokens]
        written = written[turn.tokens :]
