"""On which seats branches generate: real requests first, speculative ones in what is left.

A seat is one concurrent request that the policy server can run. A branch that is generating holds one. When a
committed branch would have to wait, the least valuable speculative holder is suspended: it gives its seat up and
queues again, its tokens kept. Which one is suspended depends on drafts alone, never on what a branch has generated.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush
from itertools import count as counting
from typing import Protocol

import anyio


class Claimant(Protocol):
    """What wants a seat."""

    @property
    def rank(self) -> tuple[float, float]:
        """Smallest first. The first number is 0 for real work and more for speculative work. It may change."""

    @property
    def turn(self) -> int:
        """How many generations of its rollout come before."""

    @property
    def leaving(self) -> bool:
        """Whether it has been told to give its seat up and is about to."""

    def suspend(self) -> None:
        """Tells it to give its seat up soon."""


Place = tuple[float, float, float]
"""In the queue: smallest first."""


class Seats:
    """The seats of one policy server, shared by every rollout that uses it."""

    def __init__(self, count: float = math.inf, stragglers_first: bool = False) -> None:
        """``count``: how many requests the server runs at once; at least 1.

        ``stragglers_first``: of the real requests that wait, those of the rollouts that have come least far go first,
        not those that have waited longest. For batches that begin together and of which the last rollout decides.
        """
        if not count >= 1:  # Also where it is not a number.
            raise ValueError(f"a policy server has at least one seat, not {count}")
        self.count = count
        self._stragglers_first = stragglers_first
        self._holding: dict[Claimant, None] = {}
        """In the order in which they got their seats, so that ties are settled alike in every run."""
        self._waiting: dict[Claimant, anyio.Event] = {}
        """In the order in which they came."""
        # What follows is worked out from the ranks of all of those, but only once for each change of a rank: there may
        # be a thousand of them, and several come or go in every turn of every rollout.
        self._ranked = True
        self._speculative: dict[Claimant, None] = {}
        """The holders that are speculative, in the same order."""
        self._queue: list[tuple[Place, int, Claimant, anyio.Event]] = []
        """A heap of those that wait, each with its rank and when it came; and of some that wait no more."""
        self._arrivals = counting()
        self._others = 0
        self._queued = 0
        self._request_seconds = 0.0
        self._counted_until = 0.0

    @property
    def running(self) -> int:
        """How many seats are taken, by others too."""
        return len(self._holding) + self._others

    def request_seconds(self) -> float:
        """The running requests, summed over the time so far: its increase in a second is how many ran on average."""
        now = anyio.current_time()
        self._request_seconds += self.running * (now - self._counted_until)
        self._counted_until = now
        return self._request_seconds

    def report(self, running: int, waiting: int) -> None:
        """What the server says of everybody's requests, where other processes use it as well.

        Speculation keeps off the seats that others take, and gives seats up while requests wait in the server itself.
        To be called every now and then.
        """
        self.request_seconds()
        self._others = max(0, running - len(self._holding))
        self._queued = waiting
        self.reconsider()
        self._suspend(waiting)

    @asynccontextmanager
    async def seat(self, claimant: Claimant) -> AsyncIterator[None]:
        """Waits for a seat, and holds it for the block. A waiter that is cancelled holds nothing."""
        granted = anyio.Event()
        self._waiting[claimant] = granted
        heappush(self._queue, (self._place(claimant), next(self._arrivals), claimant, granted))
        self._distribute()
        try:
            await granted.wait()
            yield
        finally:
            if claimant in self._holding:
                self.request_seconds()
                del self._holding[claimant]
                self._speculative.pop(claimant, None)
            else:
                del self._waiting[claimant]
            self._distribute()

    def reconsider(self) -> None:
        """Hands free seats out and suspends for real work. To be called whenever a rank has changed."""
        self._ranked = False
        self._distribute()

    def _distribute(self) -> None:
        while first := self._first():
            real = first.rank[0] == 0
            if not (self._has_room() if real else self._has_room(self._others) and not self._queued):
                break
            self.request_seconds()
            self._holding[first] = None
            if not real:
                self._speculative[first] = None
            self._waiting.pop(first).set()
        if first and real and self._speculative:
            real_waiting = sum(waiting.rank[0] == 0 for waiting in self._waiting)
            self._suspend(real_waiting - sum(holder.leaving for holder in self._holding))

    def _first(self) -> Claimant | None:
        """Of those that wait, the one with the smallest rank; of several, the one that came first."""
        if not self._waiting:
            self._queue.clear()
            return None
        self._rank()
        while True:
            _, _, claimant, granted = self._queue[0]
            if self._waiting.get(claimant) is granted:
                return claimant
            heappop(self._queue)

    def _rank(self) -> None:
        """Reads all ranks, where one may have changed."""
        if not self._ranked:
            self._ranked = True
            self._speculative = {holder: None for holder in self._holding if holder.rank[0] > 0}
            self._queue = [
                (self._place(claimant), next(self._arrivals), claimant, granted)
                for claimant, granted in self._waiting.items()
            ]
            heapify(self._queue)

    def _place(self, claimant: Claimant) -> Place:
        depth, value = claimant.rank
        return depth, claimant.turn if self._stragglers_first and depth == 0 else 0, value

    def _suspend(self, most: int) -> None:
        """Tells the least valuable speculative holders to go, at most so many."""
        self._rank()
        suspendable = [holder for holder in self._speculative if not holder.leaving]
        suspendable.sort(key=lambda holder: holder.rank, reverse=True)
        for holder in suspendable[: max(0, most)]:
            holder.suspend()

    def _has_room(self, others: int = 0) -> bool:
        return len(self._holding) + others + 1 <= self.count
