"""Whole rollouts: a task in an environment, from the first request to the reward; and many of them at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import anyio

from obsspec.background import raising_alone
from obsspec.speculation import Rollout, Speculator
from obsspec.types import OpenEnvironment, Task, Trajectory

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that broke: its environment or its policy raised."""

    task: str
    seed: int
    error: str
    """One line."""

    @classmethod
    def of(cls, task: Task, seed: int, error: Exception) -> Failure:
        return cls(task.id, seed, " ".join(f"{type(error).__name__}: {error}".split()))


async def rollout(speculator: Speculator, task: Task, open_environment: OpenEnvironment, seed: int = 0) -> Trajectory:
    """Runs a task once. Raises what the environment or the policy raised; leaves nothing running however it ends."""
    async with open_environment(task) as environment:
        began = anyio.current_time()
        async with speculator.rollout(task.instruction, seed=seed, task=task.id) as run:
            while action := await run.act():
                run.observe(await environment.execute(action.command))
            seconds = anyio.current_time() - began
        return _trajectory(run, task, seed, seconds, reward=await environment.score())


async def rollouts(
    speculator: Speculator,
    jobs: Iterable[tuple[Task, int]],
    open_environment: OpenEnvironment,
    concurrency: int = 8,
    finished: Callable[[Trajectory | Failure], None] = lambda result: None,
) -> list[Trajectory | Failure]:
    """Runs every (task, seed) of ``jobs``, at most ``concurrency`` at once, and returns what came out, in their order.

    ``finished`` is called with each result as it comes: for writing it down, and for progress (see
    `obsspec.reports.progress`). A rollout that breaks is a Failure in the result and does not disturb the others;
    what ``finished`` raises ends them all.
    """
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ValueError(f"concurrency must be a whole number of at least 1, not {concurrency!r}")
    results: dict[int, Trajectory | Failure] = {}

    async def run(numbered: tuple[int, tuple[Task, int]]) -> None:
        place, (task, seed) = numbered
        try:
            results[place] = await rollout(speculator, task, open_environment, seed)
        except Exception as error:
            results[place] = Failure.of(task, seed, error)
        finished(results[place])

    await for_each(enumerate(jobs), run, concurrency)
    return [results[place] for place in sorted(results)]


async def for_each(items: Iterable[Item], work: Callable[[Item], Awaitable[None]], concurrency: int) -> None:
    """Calls ``work`` with every item, in order, at most ``concurrency`` at once. What it raises ends them all."""
    pending = iter(items)

    async def take() -> None:
        for item in pending:
            await work(item)

    async with raising_alone() as workers:
        for _ in range(concurrency):
            workers.start_soon(take)


def _trajectory(run: Rollout, task: Task, seed: int, seconds: float, reward: float) -> Trajectory:
    assert run.end is not None
    return Trajectory(
        task=task.id,
        family=task.family,
        level=task.level,
        seed=seed,
        context=run.context,
        turns=run.turns,
        end=run.end,
        seconds=seconds,
        reward=reward,
    )
