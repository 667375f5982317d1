"""On which seats branches generate: real requests first, speculative ones in what is left.

A seat is one concurrent request that the policy server can run. A branch that is generating holds one. When a
committed branch would have to wait, the least valuable speculative holder is suspended: it gives its seat up and
queues again, its tokens kept. Which one is suspended depends on drafts alone, never on what a branch has generated.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import anyio


class Claimant(Protocol):
    """What wants a seat."""

    @property
    def rank(self) -> tuple[float, float]:
        """Smallest first. The first number is 0 for real work and more for speculative work. It may change."""

    @property
    def leaving(self) -> bool:
        """Whether it has been told to give its seat up and is about to."""

    def suspend(self) -> None:
        """Tells it to give its seat up soon."""


class Seats:
    """The seats of one policy server, shared by every rollout that uses it."""

    def __init__(self, count: float = math.inf) -> None:
        """``count``: how many requests the server runs at once; at least 1."""
        if count < 1:
            raise ValueError(f"a policy server has at least one seat, not {count}")
        self._free = count
        self._holding: dict[Claimant, None] = {}
        """In the order in which they got their seats, so that ties are settled alike in every run."""
        self._waiting: dict[Claimant, anyio.Event] = {}

    @asynccontextmanager
    async def seat(self, claimant: Claimant) -> AsyncIterator[None]:
        """Waits for a seat, and holds it for the block. A waiter that is cancelled holds nothing."""
        granted = anyio.Event()
        self._waiting[claimant] = granted
        self.reconsider()
        try:
            await granted.wait()
            yield
        finally:
            if claimant in self._holding:
                del self._holding[claimant]
                self._free += 1
            else:
                del self._waiting[claimant]
            self.reconsider()

    def reconsider(self) -> None:
        """Hands free seats out and suspends for real work. To be called whenever a rank has changed."""
        while self._free >= 1 and self._waiting:
            claimant = min(self._waiting, key=lambda waiting: waiting.rank)
            self._holding[claimant] = None
            self._free -= 1
            self._waiting.pop(claimant).set()
        real_waiting = sum(waiting.rank[0] == 0 for waiting in self._waiting)
        if not real_waiting:
            return
        leaving = sum(holder.leaving for holder in self._holding)
        suspendable = [holder for holder in self._holding if holder.rank[0] > 0 and not holder.leaving]
        suspendable.sort(key=lambda holder: holder.rank, reverse=True)
        for holder in suspendable[: max(0, real_waiting - leaving)]:
            holder.suspend()
