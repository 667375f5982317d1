"""What follows from a rollout's history, from what followed from the history before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from obsspec.types import Exchange, Query

State = TypeVar("State")


class Prefixes(Generic[State]):
    """Folds ``step`` over histories and remembers the latest results, for a history mostly grows by one exchange.

    States must be immutable, or treated as such: they are handed out again.
    """

    def __init__(
        self, start: Callable[[str], State], step: Callable[[State, Exchange], State], capacity: int = 1024
    ) -> None:
        """``start`` gives the state of an empty history from the instruction."""
        self._start = start
        self._step = step
        self._capacity = capacity
        self._states: OrderedDict[tuple[str, tuple[Exchange, ...]], State] = OrderedDict()

    def after(self, query: Query) -> State:
        """The state after ``query.history``."""
        key = (query.instruction, query.history)  # hashing a long history takes time: do it once where it is known
        known = self._states.get(key)
        if known is not None:
            return known
        before = self._states.get((query.instruction, query.history[:-1])) if query.history else None
        state = self._start(query.instruction) if before is None else before
        for exchange in query.history if before is None else query.history[-1:]:
            state = self._step(state, exchange)
        self._states[key] = state
        if len(self._states) > self._capacity:
            self._states.popitem(last=False)
        return state
