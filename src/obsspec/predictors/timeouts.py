"""What is observed where a command runs into its time limit."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from obsspec.shell import kind_of
from obsspec.types import Draft, Observation, Query

_TEXTS = 64
"""Latest time-outs that are remembered of each kind of command, and of all kinds together."""
_KINDS = 1000
"""Kinds of commands that are remembered, those that timed out latest."""
_PRIOR = 2.0
"""Time-outs of its own kind that those of all kinds together count as much as."""


class TimeOuts:
    """A ``types.Predictor`` that proposes the text most often observed when such a command ran out of time.

    It proposes that for every command, and says only how likely the text is if there is a time-out; how likely that is,
    ever more the longer the command has run, the gate knows. What it has seen is all that it proposes: it has no draft
    before the first time-out, and a command that prints on the way is seldom cut at the same place twice.
    """

    def __init__(self) -> None:
        self._all: deque[str] = deque(maxlen=_TEXTS)
        self._kinds: OrderedDict[str, deque[str]] = OrderedDict()

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        if not self._all:
            return
        own, every = self._kinds.get(kind_of(query.command), ()), Counter(self._all)
        counts = Counter(own)

        def probability(text: str) -> float:
            return (counts[text] + _PRIOR * every[text] / len(self._all)) / (len(own) + _PRIOR)

        text = max((*counts, *every), key=probability)
        propose(Draft(text, probability(text), "timeouts", if_timed_out=True))

    async def prepare(self, query: Query) -> None:
        """Nothing: it does not read the history."""

    def learn(self, query: Query, observation: Observation) -> None:
        if not observation.timed_out:
            return
        kind = kind_of(query.command)
        self._all.append(observation.text)
        self._kinds.setdefault(kind, deque(maxlen=_TEXTS)).append(observation.text)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
