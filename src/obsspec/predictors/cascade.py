"""Several predictors as one, the cheap ones first."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import anyio

from obsspec.errors import InputError
from obsspec.types import Draft, Observation, Predictor, Query

_log = logging.getLogger(__name__)
_QUERIES = 4096


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


class Cascade:
    """A ``types.Predictor`` made of others, given by name in order of cost.

    Each starts when the one before it has returned, or after ``patience`` seconds, and then they run side by side; so
    one that hangs holds up nobody (one that blocks the event loop does). None starts once a draft of at least
    ``enough`` has been proposed. One that raises is counted and logged, and the others go on.

    Drafts of equal text are merged: the text is proposed once, with the probability of whoever was first, and again
    only with a higher one. The predictors see the same evidence, so their agreement does not add up, and the highest
    estimate stands.
    """

    def __init__(self, predictors: Mapping[str, Predictor], patience: float = 0.02, enough: float = 0.95) -> None:
        if not predictors or patience < 0:
            raise InputError("cascade: needs at least one predictor, and a patience of 0 seconds or more")
        self._predictors = dict(predictors)
        self._patience = patience
        self._enough = enough
        self.counts = {name: Counts() for name in predictors}
        self._proposed: OrderedDict[Query, dict[str, set[str]]] = OrderedDict()
        """For the latest queries, which texts each predictor that was asked proposed."""

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        by_predictor = self._remember(query)
        highest: dict[str, float] = {}

        def merge(name: str, draft: Draft) -> None:
            by_predictor[name].add(draft.text)
            if draft.probability > highest.get(draft.text, -1.0):
                highest[draft.text] = draft.probability
                propose(draft)

        async with anyio.create_task_group() as tasks:
            for name in self._predictors:
                if max(highest.values(), default=0.0) >= self._enough:
                    break
                by_predictor.setdefault(name, set())
                returned = anyio.Event()
                tasks.start_soon(self._ask, name, query, partial(merge, name), returned)
                with anyio.move_on_after(self._patience):
                    await returned.wait()

    async def _ask(self, name: str, query: Query, propose: Callable[[Draft], None], returned: anyio.Event) -> None:
        try:
            await self._predictors[name].predict(query, propose)
        except Exception:
            self._fail(name)
        returned.set()

    async def prepare(self, query: Query) -> None:
        """All of them, side by side."""

        async def one(name: str) -> None:
            try:
                await self._predictors[name].prepare(query)
            except Exception:
                self._fail(name)

        async with anyio.create_task_group() as tasks:
            for name in self._predictors:
                tasks.start_soon(one, name)

    def learn(self, query: Query, observation: Observation) -> None:
        for name, texts in self._proposed.get(query, {}).items():
            self.counts[name].asked += 1
            self.counts[name].drafted += bool(texts)
            self.counts[name].exact += observation.text in texts
        for name, predictor in self._predictors.items():
            try:
                predictor.learn(query, observation)
            except Exception:
                self._fail(name)

    def _remember(self, query: Query) -> dict[str, set[str]]:
        """Where to note what is proposed for ``query``, which several rollouts may ask."""
        proposed = self._proposed.setdefault(query, {})
        self._proposed.move_to_end(query)
        if len(self._proposed) > _QUERIES:
            self._proposed.popitem(last=False)
        return proposed

    def _fail(self, name: str) -> None:
        self.counts[name].failures += 1
        if self.counts[name].failures == 1:
            _log.warning("predictor %s failed; the rollouts go on without it", name, exc_info=True)
