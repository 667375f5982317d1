"""Running a grid of workloads and schedules: every point in virtual time, on all cores."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import trio
import trio.testing
from pydantic import TypeAdapter

from obsspec import __version__
from obsspec.errors import InputError
from obsspec.lab.schedules import SCHEDULES
from obsspec.lab.server import serving
from obsspec.lab.workload import Workload, merged, names, read, validated
from obsspec.lab.world import Opening, World
from obsspec.lines import LineFile
from obsspec.rollout import rollouts
from obsspec.types import Trajectory


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out of one point, over all its rollouts. Seconds are virtual where not said otherwise.

    No name is also a key of a workload, so that both may stand in one row.
    """

    finished: int
    """Rollouts."""
    active: int
    """Rollouts at the same time."""
    mean_latency: float
    """Agent latency of a rollout; waiting for its place among the concurrent ones is not in it."""
    makespan: float
    """From the first request to the end of the last rollout."""
    tool_calls: int
    attempted: int
    """Tool calls whose observation the predictor was asked for."""
    drafted: int
    """Tool calls for which a draft came before the observation."""
    hits: int
    tool_seconds: float
    generation_seconds: float
    """The policy's work on generations that were kept, their waiting at the server included."""
    hidden_seconds: float
    kept_tokens: int
    wasted_tokens: int
    """Of branches that were discarded."""
    busy_seconds: float
    """In which the policy server prefilled or decoded."""
    cpu_seconds: float
    """Real ones, of the processor."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a grid."""

    keys: dict[str, Any]
    """What the grid says of it: key to value."""
    workload: Workload


def grid(config: str) -> list[Point]:
    """The points of a TOML file or of a shipped workload. Raises InputError."""
    return points_of(read(config), config)


def points_of(content: dict[str, Any], config: str) -> list[Point]:
    """The product of all that the ``grid`` table in ``content`` lists, under dotted keys.

    Without schedules to choose from, or one that it names, it is run under each of them. Raises InputError that names
    ``config``.
    """
    content = dict(content)
    axes = dict(_axes(config, content.pop("grid", {})))
    if "schedule" not in axes and "schedule" not in content:
        axes["schedule"] = list(SCHEDULES)
    points = []
    for values in itertools.product(*axes.values()):
        keys = dict(zip(axes, values, strict=True))
        base = keys.get("base")
        if base is not None and base not in names():
            raise InputError(f"{config}: grid.base: no workload {base!r}; take one of {', '.join(names())}")
        point = content if base is None else merged(read(base), content)
        for key, value in keys.items():
            if key != "base":
                point = merged(point, _nested(key, value))
        workload = validated(point, config)
        if workload.schedule not in SCHEDULES:
            raise InputError(f"{config}: schedule: no {workload.schedule!r}; take one of {', '.join(SCHEDULES)}")
        points.append(Point(keys, workload))
    return points


def _axes(config: str, table: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    if not isinstance(table, dict):
        raise InputError(f"{config}: grid: make it a table of keys, each with a list of values")
    for key, values in table.items():
        if isinstance(values, dict):
            yield from _axes(config, values, f"{prefix}{key}.")
        elif isinstance(values, list) and values:
            yield prefix + key, values
        else:
            raise InputError(f"{config}: grid.{prefix}{key}: make it a list of values")


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


Making = Callable[[Workload], World]
"""The world of a settled workload."""


def simulate(workload: Workload, world: Making = World) -> Figures:
    """Runs the product's engine on a workload in virtual time. The same workload always gives the same figures."""
    with _reproducible_trio():
        return trio.run(_simulate, workload, world, clock=trio.testing.MockClock(autojump_threshold=0))


async def _simulate(workload: Workload, make: Making) -> Figures:
    schedule = SCHEDULES[workload.schedule]
    world = make(schedule.settle(workload))
    began = time.process_time()
    async with serving(schedule.server(world)) as server:
        speculator = schedule.speculator(world, server)
        start = trio.current_time()
        results = await rollouts(speculator, world.jobs(), Opening(world), workload.active)
        makespan = trio.current_time() - start
    trajectories = [result for result in results if isinstance(result, Trajectory)]
    if len(trajectories) < len(results):
        raise RuntimeError(next(result for result in results if not isinstance(result, Trajectory)).error)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    outcomes = [turn.outcome for turn in turns]
    return Figures(
        finished=len(trajectories),
        active=workload.active,
        mean_latency=sum(trajectory.seconds for trajectory in trajectories) / len(trajectories),
        makespan=makespan,
        tool_calls=sum(turn.executing is not None for turn in turns),
        attempted=sum(turn.executing is not None and turn.outcome != "off" for turn in turns),
        drafted=sum(outcome in ("hit", "miss", "gated") for outcome in outcomes),
        hits=outcomes.count("hit"),
        tool_seconds=sum(turn.executing.seconds for turn in turns if turn.executing),
        generation_seconds=sum(interval.seconds for turn in turns for interval in turn.generating),
        hidden_seconds=sum(turn.hidden_seconds for turn in turns),
        kept_tokens=sum(len(turn.generation.tokens) for turn in turns),
        wasted_tokens=sum(turn.wasted_tokens for turn in turns),
        busy_seconds=server.busy_seconds,
        cpu_seconds=time.process_time() - began,
    )


@contextmanager
def _reproducible_trio() -> Iterator[None]:
    """Trio shuffles tasks that are ready at the same moment, on purpose. Its own testing tools switch that off so."""
    scheduler: Any = trio._core._run
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = True, Random(0)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = before


@dataclass(frozen=True, slots=True)
class Simulated:
    """A line of ``points.jsonl``: what came out of a workload that leaves nothing open to its schedule."""

    workload: Workload
    version: str
    """Of ObsSpec, for another one may give other figures."""
    figures: Figures


@contextmanager
def recorded(directory: Path | None) -> Iterator[tuple[Sequence[Simulated], Callable[[Simulated], None]]]:
    """What ``points.jsonl`` in a directory holds already, and a function that adds to it, so that a grid that was
    interrupted need not start over. Without a directory nothing is kept. Raises InputError where it cannot be used."""
    if directory is None:
        yield (), lambda simulated: None
        return
    adapter = TypeAdapter(Simulated)
    file = LineFile(directory / "points.jsonl", adapter, "workload", "`obsspec lab run --output`", "the same way")
    with file.writing() as (known, keep):
        yield known, keep


def run(
    points: Sequence[Point],
    advance: Callable[[], None],
    processes: int | None = None,
    known: Sequence[Simulated] = (),
    keep: Callable[[Simulated], None] = lambda simulated: None,
    world: Making = World,
) -> list[Figures]:
    """The figures of all points, in their order, on ``processes`` cores: all of them by default.

    Points that can only come out alike are simulated once, such as sequential ones that differ in their predictor; and
    those that are ``known`` not at all. ``keep`` is called with each of the others as it comes, ``advance`` once for
    each point. Leaves no process behind however it ends. Raises InputError where the system killed one.
    """
    settled = [SCHEDULES[point.workload.schedule].settle(point.workload) for point in points]
    done = {each.workload.model_dump_json(): each.figures for each in known if each.version == __version__}
    keys = [workload.model_dump_json() for workload in settled]
    pending = {key: workload for key, workload in zip(keys, settled, strict=True) if key not in done}
    for _ in filter(done.__contains__, keys):
        advance()
    with _workers(min(processes or len(os.sched_getaffinity(0)), max(1, len(pending)))) as workers:
        try:
            for key, figures in workers(pending, world):
                done[key] = figures
                keep(Simulated(pending[key], __version__, figures))
                for _ in range(keys.count(key)):
                    advance()
        except BrokenProcessPool:
            raise InputError("the system killed a process, perhaps for want of memory: use fewer --processes") from None
    return [done[key] for key in keys]


_ENDING = {signal.SIGINT, signal.SIGTERM}


@contextmanager
def _workers(
    processes: int,
) -> Iterator[Callable[[Mapping[str, Workload], Making], Iterator[tuple[str, Figures]]]]:
    """Simulates in processes that end with the block, and yields what is done as it is. Being told to end is for this
    process alone: they inherit that it is blocked."""
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))

    def start(workloads: Mapping[str, Workload], world: Making) -> Iterator[tuple[str, Figures]]:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            keys = {executor.submit(simulate, workload, world): key for key, workload in workloads.items()}
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        return ((keys[future], future.result()) for future in as_completed(keys))

    try:
        yield start
    finally:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        executor.shutdown(cancel_futures=True)
