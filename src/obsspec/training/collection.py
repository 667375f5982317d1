"""Rollouts for a trainer that is synchronous.

An event loop in a thread of its own keeps the policy, the predictors and what they have learned, and the connections to
servers, from one step of training to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from obsspec.rollout import Failure, rollouts
from obsspec.speculation import Speculator
from obsspec.training.transitions import Transition
from obsspec.types import OpenEnvironment, Policy, Task, Trajectory

if TYPE_CHECKING:
    from obsspec.budget import Seats
    from obsspec.chat import TerminalChat
    from obsspec.gate import ExpectedValue
    from obsspec.loading import Models
    from obsspec.runs import Plan

Result = TypeVar("Result")
Jobs = Sequence[tuple[Task, int]]
"""Tasks, each with the seed of a rollout."""


class _Work(Generic[Result]):
    """Something that runs in the event loop."""

    def __init__(self, portal: BlockingPortal, work: Callable[[], Awaitable[Result]]) -> None:
        self._ended = threading.Event()
        self._future = portal.start_task_soon(self._run, work)

    async def _run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        try:
            return await work()
        finally:
            self._ended.set()

    def result(self) -> Result:
        """What it returns. Interrupted, it is cancelled."""
        try:
            return self._future.result()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """It has ended when this returns."""
        self._future.cancel()
        self._ended.wait()


class Collection:
    """Runs rollouts when it is told to: those of one step after the other, some steps before they are wanted."""

    def __init__(
        self, portal: BlockingPortal, stack: ExitStack, speculator: Speculator, chat: TerminalChat, ahead: int
    ) -> None:
        self.chat = chat
        self._portal = portal
        self._stack = stack
        self._speculator = speculator
        settings = replace(speculator.settings, depth=0)
        self._sequential = Speculator(speculator.policy, speculator.chat, None, settings, speculator.seats)
        self._ahead = ahead
        self._steps: dict[int, _Work[Any]] = {}
        """Those that were begun and not taken."""
        self._one_at_a_time = anyio.Lock()

    @classmethod
    @contextmanager
    def open(cls, models: Models, plan: Plan, seats: Seats, gate: ExpectedValue, ahead: int) -> Iterator[Collection]:
        """With a speculator of ``models``. When the block ends nothing that it started is left.

        ``ahead``: as for `take`.
        """
        with (
            start_blocking_portal(name="rollouts") as portal,
            portal.wrap_async_context_manager(models.speculator(plan, seats, gate)) as speculator,
            ExitStack() as stack,
        ):
            collection = cls(portal, stack, speculator, models.chat, ahead)
            try:
                yield collection
            finally:
                for begun in reversed(collection._steps.values()):  # Else the next in turn would begin.
                    begun.cancel()

    @property
    def policy(self) -> Policy:
        return self._speculator.policy

    def enter(self, opened: AbstractAsyncContextManager[Result]) -> Result:
        """Enters it in the event loop, until this is closed."""
        return self._stack.enter_context(self._portal.wrap_async_context_manager(opened))

    def call(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """What ``work`` returns, in the event loop. Interrupted, it is cancelled, and has ended before this returns."""
        return _Work(self._portal, work).result()

    def take(self, step: int, last: int, collect: Callable[[int], Awaitable[Result]]) -> Result:
        """What ``collect(step)`` returns.

        The same is begun for up to ``ahead`` steps after it, but none after ``last``, one after the other; so while
        the weights are updated the rollouts of a later step are under way, and none of their tokens is sampled by
        weights that are more than ``ahead`` updates older than those that learn from it.
        """
        for each in range(step, min(step + self._ahead, last) + 1):
            if each not in self._steps:
                self._steps[each] = _Work(self._portal, partial(self._in_turn, partial(collect, each)))
        result: Result = self._steps[step].result()
        del self._steps[step]
        return result

    def collect(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """What ``work`` returns, which collects rollouts: not beside those of a step."""
        return self.call(partial(self._in_turn, work))

    async def _in_turn(self, work: Callable[[], Awaitable[Result]]) -> Result:
        async with self._one_at_a_time:
            return await work()

    async def run(
        self,
        jobs: Jobs,
        environment: OpenEnvironment,
        concurrency: int,
        finished: Callable[[Trajectory | Failure], None],
        speculating: bool,
    ) -> list[Trajectory | Failure]:
        """As `obsspec.rollout.rollouts` does. To be called in the event loop."""
        speculator = self._speculator if speculating else self._sequential
        return await rollouts(speculator, jobs, environment, concurrency, finished)

    def remember(self, transitions: Iterator[Transition]) -> None:
        """Tells the predictors what was observed before."""
        predictor = self._speculator.predictor

        async def learn() -> None:
            for each in transitions:
                if predictor is not None:
                    predictor.learn(each.query, each.observation)

        self.call(learn)
