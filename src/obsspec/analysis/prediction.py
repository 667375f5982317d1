"""How predictable a log's observations are: every step is predicted from what came before it, and learned from then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import anyio

from obsspec.analysis.formats import Log
from obsspec.predictors.cascade import Cascade
from obsspec.predictors.harness import SANDBOX
from obsspec.predictors.memory import Memory
from obsspec.predictors.rules import Rules
from obsspec.types import Draft, Exchange, Observation, Predictor, Query

LIKELY = 0.5
"""A step counts as attempted where the best draft has at least this probability."""


@dataclass(frozen=True, slots=True)
class Guess:
    """One draft for a step whose observation is known."""

    probability: float
    """That the predictor gave it."""
    exact: bool
    predictor: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was proposed for one step."""

    guesses: tuple[Guess, ...]
    """Of different texts, the likeliest first."""
    seconds: float
    """CPU time that the drafts took."""

    @property
    def attempted(self) -> bool:
        return bool(self.guesses) and self.guesses[0].probability >= LIKELY

    @property
    def exact(self) -> bool:
        """Whether it was attempted, and rightly."""
        return self.attempted and self.guesses[0].exact


def predictors(log: Log) -> dict[str, Predictor]:
    """Fresh ones: each alone, and at last all together."""
    harness = replace(SANDBOX, keeps_directory=log.keeps_directory)
    return {
        "rules": Rules(harness),
        "memory": Memory(),
        "rules + memory": Cascade({"rules": Rules(harness), "memory": Memory()}),
    }


def predict(log: Log, predictor: Predictor, advance: Callable[[], None]) -> list[Prediction]:
    """One for each step of the log, in order. Calls ``advance`` after each."""
    return anyio.run(_predict, log, predictor, advance)


async def _predict(log: Log, predictor: Predictor, advance: Callable[[], None]) -> list[Prediction]:
    predictions = []
    for rollout in log.rollouts:
        history: tuple[Exchange, ...] = ()
        for step in rollout.steps:
            query = Query(rollout.task, "", history, step.command)
            drafts: list[Draft] = []
            began = time.process_time()
            await predictor.predict(query, drafts.append)
            took = time.process_time() - began
            predictions.append(Prediction(tuple(_guesses(drafts, step.observation)), took))
            predictor.learn(query, Observation(step.observation))
            history = (*history, Exchange(step.command, step.observation))
            advance()
    return predictions


def _guesses(drafts: Sequence[Draft], observed: str) -> Iterator[Guess]:
    """One for each text: a cascade proposes a text again where its probability has risen."""
    rising = sorted(drafts, key=lambda draft: draft.probability)
    for draft in reversed({draft.text: draft for draft in rising}.values()):
        yield Guess(draft.probability, draft.text == observed, draft.predictor)
