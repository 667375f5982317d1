"""A predictor that knows the truth, for experiments: how much would one of this accuracy and delay save?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import anyio

from obsspec.errors import InputError
from obsspec.types import Draft, Observation, Query

Truth = Callable[[Query], str | None]
"""What a query's command will be observed to print; None where that is not known."""


class Oracle:
    """A ``types.Predictor`` that proposes the truth with probability ``accuracy``, and otherwise something else.

    Whether it is right is a pure function of ``seed``, the task, its commands so far and the command, so that runs can
    be compared. It takes ``seconds`` for each draft, and reports ``accuracy`` as the draft's probability.
    """

    def __init__(self, truth: Truth, accuracy: float = 1.0, seconds: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= accuracy <= 1.0 or seconds < 0:
            raise InputError(
                f"oracle: accuracy ({accuracy}) must be within 0 and 1, and seconds ({seconds}) at least 0"
            )
        self._truth = truth
        self._accuracy = accuracy
        self._seconds = seconds
        self._seed = seed

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        await anyio.sleep(self._seconds)
        text = self._truth(query)
        if text is not None:
            exact = Random(repr((self._seed, _circumstances(query)))).random() < self._accuracy
            propose(Draft(text if exact else f"not {text}", self._accuracy, "oracle"))

    async def prepare(self, query: Query) -> None:
        """Nothing: it knows already."""

    def learn(self, query: Query, observation: Observation) -> None:
        """Nothing: it knows already."""


def recorded(observations: Iterable[tuple[Query, str]]) -> Truth:
    """The truth from a record of queries and what was observed, found by task, commands so far and command."""
    table = {_circumstances(query): text for query, text in observations}
    return lambda query: table.get(_circumstances(query))


def _circumstances(query: Query) -> tuple[str, ...]:
    return (query.task, *(exchange.command for exchange in query.history), query.command)
