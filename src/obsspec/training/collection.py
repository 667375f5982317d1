"""Rollouts for a trainer that is synchronous.

An event loop in a thread of its own keeps the policy, the predictors and what they have learned, and the connections to
servers, from one step of training to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

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


class Collection:
    """Runs rollouts when it is told to, and waits for them."""

    def __init__(self, portal: BlockingPortal, stack: ExitStack, speculator: Speculator, chat: TerminalChat) -> None:
        self.chat = chat
        self._portal = portal
        self._stack = stack
        self._speculator = speculator
        settings = replace(speculator.settings, depth=0)
        self._sequential = Speculator(speculator.policy, speculator.chat, None, settings, speculator.seats)

    @classmethod
    @contextmanager
    def open(cls, models: Models, plan: Plan, seats: Seats, gate: ExpectedValue) -> Iterator[Collection]:
        """With a speculator of ``models``. When the block ends nothing that it started is left."""
        with (
            start_blocking_portal(name="rollouts") as portal,
            portal.wrap_async_context_manager(models.speculator(plan, seats, gate)) as speculator,
            ExitStack() as stack,
        ):
            yield cls(portal, stack, speculator, models.chat)

    @property
    def policy(self) -> Policy:
        return self._speculator.policy

    def enter(self, opened: AbstractAsyncContextManager[Result]) -> Result:
        """Enters it in the event loop, until this is closed."""
        return self._stack.enter_context(self._portal.wrap_async_context_manager(opened))

    def call(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """What ``work`` returns, in the event loop. Interrupted, it is cancelled, and has ended before this returns."""
        ended = threading.Event()

        async def run() -> Result:
            try:
                return await work()
            finally:
                ended.set()

        future = self._portal.start_task_soon(run)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                ended.wait()
            raise

    def run(
        self,
        jobs: Jobs,
        environment: OpenEnvironment,
        concurrency: int,
        finished: Callable[[Trajectory | Failure], None],
        speculating: bool = True,
    ) -> list[Trajectory | Failure]:
        """As `obsspec.rollout.rollouts` does."""
        speculator = self._speculator if speculating else self._sequential
        return self.call(lambda: rollouts(speculator, jobs, environment, concurrency, finished))

    def remember(self, transitions: Iterator[Transition]) -> None:
        """Tells the predictors what was observed before."""
        predictor = self._speculator.predictor

        async def learn() -> None:
            for each in transitions:
                if predictor is not None:
                    predictor.learn(each.query, each.observation)

        self.call(learn)
