"""What speculation would save on a log: its rollouts, with its times and the drafts made for it, in the lab.

The lab runs the product's engine in virtual time. The policy server is an idle one: generations take as long as they
did in the log, however many run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import median

from obsspec.analysis.formats import Log, LoggedStep
from obsspec.analysis.prediction import Prediction
from obsspec.errors import InputError
from obsspec.lab.run import Figures, Point, run
from obsspec.lab.workload import Workload, read, validated
from obsspec.lab.world import RecordedTurn, RecordedWorld
from obsspec.shell import kind_of

CONCURRENCY = 16
"""Rollouts at the same time; on an idle server it makes no difference."""
_GRAINS = 200
"""Decode steps of a mean generation: the lab's times are whole steps, and what it does takes time in their number."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long a step's parts took. Seconds."""

    tool: float
    generation: float
    """Of the generation that asked for it."""
    next_generation: float
    """0 where none is known to follow."""

    @property
    def hideable(self) -> float:
        """How much of the tool's time the next generation could fill: the most that depth 1 hides."""
        return min(self.tool, self.next_generation)


@dataclass(frozen=True, slots=True)
class Losses:
    """Where the tools' time goes at depth 1. Seconds; together they are the tools' time."""

    hidden: float
    """Under generations that were kept."""
    late_or_held_back: float
    """A right draft came, but took its time, or the gate did not think it worth a branch."""
    wrong: float
    """The likeliest draft was wrong."""
    nothing_drafted: float
    """No draft of a probability of one half."""
    beyond_the_generation: float
    """The tool ran longer than the next generation could, or nothing followed."""


@dataclass(frozen=True, slots=True)
class Savings:
    """What came out of the lab."""

    schedules: dict[str, Figures]
    """By name: ``sequential``, ``reference``, and others with their depth."""
    losses: Losses

    @property
    def sequential(self) -> float:
        return self.schedules["sequential"].mean_latency

    def saved(self, name: str) -> float:
        """As a part of the mean agent latency."""
        return 1 - self.schedules[name].mean_latency / self.sequential if self.sequential else 0.0

    @property
    def best(self) -> str:
        """Of our own schedules."""
        return max((name for name in self.schedules if name.startswith("obsspec")), key=self.saved)


POINTS = ("sequential", "reference", "obsspec, depth 1", "obsspec, depth 2", "clairvoyant, depth 1")
"""What is simulated. ``clairvoyant`` is the bound: every observation is known at once."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where times come from that the log does not have."""

    name: str
    workload: Workload

    @classmethod
    def of(cls, name: str) -> Source:
        """A shipped workload. Raises InputError where there is none of that name."""
        try:
            return cls(name, validated(read(name), name))
        except InputError as error:
            raise InputError(f"--times {error}") from None

    def tool_seconds(self, uniform: float) -> float:
        tool = self.workload.tool
        return tool.seconds.sample(uniform) + tool.overhead

    def generation_seconds(self, uniform: float) -> float:
        generation = self.workload.generation
        if generation.seconds is not None:
            return generation.seconds.sample(uniform)
        assert generation.tokens is not None
        return generation.tokens.sample(uniform) * self.workload.server.costs.step(1)


def times(log: Log, source: Source, seed: int = 0) -> list[list[Times]]:
    """Of each rollout's steps; those that the log does not have are drawn from ``source``, whatever the command."""
    result = []
    for number, rollout in enumerate(log.rollouts):
        random = Random(f"{seed}/{number}")
        pairs = [_known(step, source, random) for step in rollout.steps]
        following = [generation for _, generation in pairs[1:]] + [rollout.last_generation_seconds or 0.0]
        result.append([Times(*pair, next_) for pair, next_ in zip(pairs, following, strict=True)])
    return result


def _known(step: LoggedStep, source: Source, random: Random) -> tuple[float, float]:
    first, second = random.random(), random.random()
    tool = source.tool_seconds(first) if step.seconds is None else step.seconds
    known = step.generation_seconds
    return tool, source.generation_seconds(second) if known is None else known


def simulate(
    log: Log, measured: Sequence[Sequence[Times]], predictions: Sequence[Prediction], advance: Callable[[], None]
) -> Savings:
    """Calls ``advance`` once for each of `POINTS`."""
    commands: dict[str, str] = {}
    for rollout in log.rollouts:
        for step in rollout.steps:
            commands.setdefault(kind_of(step.command), step.command)
    places = {kind: place for place, kind in enumerate(commands)}
    proposed = iter(predictions)
    rollouts = []
    for rollout, row in zip(log.rollouts, measured, strict=True):
        turns = []
        for step, own in zip(rollout.steps, row, strict=True):
            drafts = tuple((guess.probability, guess.exact) for guess in next(proposed).guesses)
            turns.append(RecordedTurn(places[kind_of(step.command)], own.generation, own.tool, drafts))
        turns.append(RecordedTurn(len(places), row[-1].next_generation, 0.0))
        rollouts.append(tuple(turns))
    world = partial(RecordedWorld, rollouts=tuple(rollouts), commands=tuple(commands.values()))
    flat = [own for row in measured for own in row]
    mean = sum(own.generation for own in flat) / len(flat)
    grain = max(1e-3, mean / _GRAINS)
    points = [_point(name, len(rollouts), max(map(len, rollouts)), predictions, grain) for name in POINTS]
    figures = dict(zip(POINTS, run(points, advance, world=world), strict=True))
    hidden = figures["obsspec, depth 1"].hidden_seconds
    return Savings(figures, _losses(flat, predictions, hidden))


def _point(name: str, rollouts: int, turns: int, predictions: Sequence[Prediction], step_seconds: float) -> Point:
    schedule, _, depth = name.partition(", depth ")
    workload = {
        "schedule": schedule,
        "rollouts": rollouts,
        "turns": turns,
        "concurrency": min(CONCURRENCY, rollouts),
        "tool": {"seconds": 0},
        "generation": {"seconds": 0},
        "predictor": {"accuracy": 0, "delay_seconds": median(each.seconds for each in predictions)},
        # Nobody reads tokens as they come, so they need not be streamed.
        "server": {"step_seconds": step_seconds, "stream_interval": 10**9},
        "lengths": {"prompt": 1, "observation": 1},
    } | ({"depth": int(depth)} if depth else {})
    return Point({}, validated(workload, "the log"))


def _losses(measured: Sequence[Times], predictions: Sequence[Prediction], hidden: float) -> Losses:
    right = wrong = nothing = 0.0
    for own, prediction in zip(measured, predictions, strict=True):
        if prediction.exact:
            right += own.hideable
        elif prediction.attempted:
            wrong += own.hideable
        else:
            nothing += own.hideable
    beyond = sum(own.tool - own.hideable for own in measured)
    # Drafts of less than one half may hit as well. And the lab's times are whole steps, so it may hide a little more.
    hidden = min(hidden, right + wrong + nothing)
    more = max(0.0, hidden - right)
    return Losses(hidden, max(0.0, right - hidden), wrong - max(0.0, more - nothing), max(0.0, nothing - more), beyond)


def advice(savings: Savings) -> Iterator[str]:
    """What to set, in sentences."""
    best = savings.best
    saved, bound = savings.saved(best), savings.saved("clairvoyant, depth 1")
    if bound < 0.02:
        yield "Tools take too little of these agents' time: even perfect predictions would save less than 2 %."
        return
    depth = best.rpartition(" ")[2]
    if savings.saved("obsspec, depth 2") - savings.saved("obsspec, depth 1") < 0.005:
        depth = "1"
    little = " Rules and memory alone would save less than 1 % here." if saved < 0.01 else ""
    yield f"Set --predictor rules,memory,timeouts --depth {depth}.{little}"
    losses = savings.losses
    missed = losses.nothing_drafted + losses.wrong
    if missed > losses.hidden:
        yield (
            f"Unpredicted observations cost {missed / (missed + losses.hidden):.0%} of what depth 1 could hide: "
            "several rollouts of each task (memory) or a world model trained on them would add most."
        )
    if losses.late_or_held_back > losses.hidden:
        yield "Most right drafts came late, or for calls too short to be worth a branch."
    if losses.beyond_the_generation > 2 * (missed + losses.hidden):
        yield "Most of the tools' time is in calls that run longer than the next generation: no prediction hides that."
