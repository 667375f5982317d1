"""Several predictors as one, the cheap ones first."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio

from obsspec.errors import InputError
from obsspec.predictors.trials import on_trial
from obsspec.types import Draft, Observation, Predictor, Query

_log = logging.getLogger(__name__)
_QUERIES = 4096
_FIRST = 5
"""Queries for which a predictor is asked whatever comes of it."""
_MOST = 100
"""Queries after which older ones count half: a predictor gets better as it learns, and worse as the policy changes."""
_IDLE = 20
"""Queries for which a predictor was not worth asking before it need not read along any more."""


class WorthAsking(Protocol):
    """Whether to ask ``predictor``, a name, about ``command``. `ExpectedValue.worth_asking` is one.

    ``chance``: that it has an exact draft which no cheaper predictor has, if it answers before the observation.
    ``seconds``: from the question to its draft, usually.
    """

    def __call__(self, predictor: str, command: str, chance: float, seconds: float) -> bool: ...


@dataclass(slots=True)
class Counts:
    """What one predictor of a cascade did for the committed observations."""

    asked: int = 0
    drafted: int = 0
    """Times that it proposed anything."""
    exact: int = 0
    """Times that one of its drafts was the observation."""
    failures: int = 0
    """Times that it raised, whether the query was committed or not."""


@dataclass(slots=True)
class _Ask:
    """One predictor, asked about one query."""

    began: float
    trial: bool
    """Whether it was asked though it was not worth that."""
    ended: float | None = None
    """When its first draft came; where there was none, when it returned or was cancelled. None so far."""
    answered: bool = False
    """Whether it was not cancelled before."""
    texts: set[str] = field(default_factory=set)

    def end(self, answered: bool) -> None:
        if self.ended is None:
            self.ended, self.answered = anyio.current_time(), answered


@dataclass(slots=True)
class _Record:
    """What came of asking one predictor lately, about queries that were committed."""

    asked: int = 0
    answered: int = 0
    """Before the observation."""
    own: int = 0
    """Of these, those with an exact draft that no cheaper predictor had proposed."""
    seconds: float = 0.0
    """Until it answered, or until the observation where it did not, summed."""
    idle: int = 0
    """The last queries for which it was not worth asking, or nobody had to ask it."""

    @property
    def chance(self) -> float:
        return (self.own + 1) / (self.answered + 2)

    @property
    def usual_seconds(self) -> float:
        """The likeliest mean of an exponential distribution of which the longest were not seen to their end: all time
        over the answers. So one that never answers in time becomes ever slower."""
        return self.seconds / max(1, self.answered)

    def learn(self, ask: _Ask, own: bool) -> None:
        self.asked += 1
        self.answered += ask.answered
        self.own += own
        self.seconds += (anyio.current_time() if ask.ended is None else ask.ended) - ask.began
        self.idle = self.idle + 1 if ask.trial else 0
        if self.asked >= _MOST:
            self.asked //= 2
            self.answered //= 2
            self.own //= 2
            self.seconds /= 2


class Cascade:
    """A ``types.Predictor`` made of others, given by name in order of cost.

    Each starts when the one before it has returned, or after ``patience`` seconds, and then they run side by side; so
    one that hangs holds up nobody (one that blocks the event loop does). None starts once a draft of at least
    ``enough`` has been proposed. One that raises is counted and logged, and the others go on.

    Drafts of equal text are merged: the text is proposed once, with the probability of whoever was first, and again
    only with a higher one. The predictors see the same evidence, so their agreement does not add up, and the highest
    estimate stands.

    A predictor that usually takes longer than ``patience`` is asked where ``worth_asking`` says so of what came of
    asking it; otherwise for one query in twenty, by which it comes back when it has learned or tools have become
    slower. Only committed queries count for that, so that nothing which a branch has generated can.
    """

    def __init__(
        self,
        predictors: Mapping[str, Predictor],
        patience: float = 0.02,
        enough: float = 0.95,
        worth_asking: WorthAsking | None = None,
    ) -> None:
        """``predictors``: by the names that their drafts bear. ``worth_asking``: everybody is asked without it."""
        if not predictors or patience < 0:
            raise InputError("cascade: needs at least one predictor, and a patience of 0 seconds or more")
        self._predictors = dict(predictors)
        self._patience = patience
        self._enough = enough
        self._worth_asking = worth_asking
        self.counts = {name: Counts() for name in predictors}
        self._records = {name: _Record() for name in predictors}
        self._asks: OrderedDict[Query, dict[str, _Ask]] = OrderedDict()
        """For the latest queries, each predictor that was asked."""

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        asks = self._remember(query)
        highest: dict[str, float] = {}

        def merge(ask: _Ask, draft: Draft) -> None:
            ask.texts.add(draft.text)
            ask.end(answered=True)
            if draft.probability > highest.get(draft.text, -1.0):
                highest[draft.text] = draft.probability
                propose(draft)

        async with anyio.create_task_group() as tasks:
            for name in self._predictors:
                if max(highest.values(), default=0.0) >= self._enough:
                    break
                worth = self._worth(name, query)
                if not worth and not on_trial(name, query):
                    continue
                asks[name] = ask = _Ask(anyio.current_time(), trial=not worth)
                returned = anyio.Event()
                tasks.start_soon(self._ask, name, query, ask, partial(merge, ask), returned)
                with anyio.move_on_after(self._patience):
                    await returned.wait()

    def _worth(self, name: str, query: Query) -> bool:
        record = self._records[name]
        if self._worth_asking is None or record.asked < _FIRST or record.usual_seconds <= self._patience:
            return True
        return self._worth_asking(name, query.command, record.chance, record.usual_seconds)

    async def _ask(
        self, name: str, query: Query, ask: _Ask, propose: Callable[[Draft], None], returned: anyio.Event
    ) -> None:
        try:
            await self._predictors[name].predict(query, propose)
        except Exception:
            self._fail(name)
        except BaseException:
            ask.end(answered=False)
            raise
        ask.end(answered=True)
        returned.set()

    async def prepare(self, query: Query) -> None:
        """All of them, side by side, but for those that have long not been worth asking."""

        async def one(name: str) -> None:
            try:
                await self._predictors[name].prepare(query)
            except Exception:
                self._fail(name)

        async with anyio.create_task_group() as tasks:
            for name in self._predictors:
                if self._worth_asking is None or self._records[name].idle < _IDLE:
                    tasks.start_soon(one, name)

    def learn(self, query: Query, observation: Observation) -> None:
        asks = self._asks.get(query, {})
        known = False
        for name, predictor in self._predictors.items():
            if ask := asks.get(name):
                exact = observation.text in ask.texts
                self.counts[name].asked += 1
                self.counts[name].drafted += bool(ask.texts)
                self.counts[name].exact += exact
                self._records[name].learn(ask, own=exact and not known)
                known = known or exact
            else:
                self._records[name].idle += 1
            try:
                predictor.learn(query, observation)
            except Exception:
                self._fail(name)

    def _remember(self, query: Query) -> dict[str, _Ask]:
        """Where to note who is asked about ``query``. Several rollouts may ask it; the last one counts."""
        asks = self._asks[query] = {}
        self._asks.move_to_end(query)
        if len(self._asks) > _QUERIES:
            self._asks.popitem(last=False)
        return asks

    def _fail(self, name: str) -> None:
        self.counts[name].failures += 1
        if self.counts[name].failures == 1:
            _log.warning("predictor %s failed; the rollouts go on without it", name, exc_info=True)
