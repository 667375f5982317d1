"""Co-training: a world model that learns from rollouts while they run.

It follows a store of transitions. Of what is new it first scores a sample, before it trains on it, so the exact-match
rate is that of predictions; then it trains on what is new and on a draw from all there is, so that what was learned
before stays; and now and then it publishes a version. Weights that foretell less than the published ones are never
published: training goes on from the published ones instead.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.errors import InputError, writing
from obsspec.training.finetune import Learner, Recipe, Trainable, save_state
from obsspec.training.trajectories import Row
from obsspec.training.transitions import StoredRollout, Transitions
from obsspec.training.versions import Version, publish_version
from obsspec.training.world_model import Weighting, foretold, rows_of

_WARM_STEPS = 10
"""Over which the learning rate rises."""
_MOST_WAITING = 1000
"""New rollouts that wait to be trained on. More than these are learned only as they are drawn from all there is."""
_MOST_SCORED = 30
"""Of a rollout, observations."""
_ENOUGH_SCORED = 30
"""Observations, before two sets of weights are compared."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a co-training divides its time."""

    passes: float = 4.0
    """How often a transition is trained on, on average. What comes faster than that is trained on less often; when
    nothing comes, training ends after so many."""
    replay: float = 0.5
    """Share of the rows that are drawn from all transitions there are; the others are new."""
    scored: int = 2
    """Most rollouts whose new observations are scored before each step."""
    window: int = 200
    """Over how many scored observations the exact-match rate is taken."""
    tolerance: float = 0.03
    """How much less than the published weights those in training may foretell."""
    weighting: Weighting = "uniform"

    def __post_init__(self) -> None:
        for name, low, high in (("passes", 0, math.inf), ("replay", 0, 1), ("tolerance", 0, 1)):
            if not low <= getattr(self, name) <= high:
                raise InputError(f"co-training: {name} must be from {low} to {high}, not {getattr(self, name)}")
        for name in ("scored", "window"):
            if getattr(self, name) < 1:
                raise InputError(f"co-training: {name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Scored:
    """An observation that was foretold, or not, before it was trained on."""

    exact: bool
    """By the weights in training."""
    published: bool
    """By those that were published last."""
    frozen: bool
    """By those with which the co-training began."""
    seconds: float
    """That the command took."""


@dataclass(slots=True)
class Figures:
    """What a co-training has done since it first began."""

    seen: int = 0
    """Transitions that were read."""
    steps: int = 0
    """Of the optimizer."""
    tokens: int = 0
    """Trained on."""
    learned: int = 0
    """Observations trained on, every time counted."""
    loss: float = math.nan
    """Of the latest steps, a mean over learned tokens, in nats."""
    rollbacks: int = 0
    version: int = 0
    """That was published last; 0 before the first."""


@dataclass(slots=True)
class _Waiting:
    """Rollouts with something new to train on, the oldest first, and from which place on it is new."""

    places: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def add(self, key: str, place: int) -> None:
        self.places.setdefault(key, place)
        if len(self.places) > _MOST_WAITING:
            self.places.popitem(last=False)


class CoTraining:
    """A world model in training on the transitions of a store.

    ``directory`` gets its versions (`training.versions`) and a checkpoint, from which another process goes on where
    this one ended, at any point. Whoever drives it calls `turn` again and again, and `publish` when a version is due.
    """

    def __init__(
        self, transitions: Transitions, directory: Path, trainable: Trainable, recipe: Recipe, pace: Pace
    ) -> None:
        """Goes on from the checkpoint in ``directory`` where there is one; else the first version is published at once.

        Of ``recipe``, ``tokens`` does not matter: it trains for as long as something is there to learn. Raises
        InputError where the directory cannot be written, or holds the checkpoint of another model.
        """
        self.figures = Figures()
        self.scored: deque[Scored] = deque(maxlen=pace.window)
        """The latest, the newest last."""
        self._transitions = transitions
        self.directory = directory
        self._checkpoint = directory / "checkpoint"
        self._recipe = recipe
        self._pace = pace
        self._chat = WorldModelChat(ChatFormat(trainable.tokenizer))
        self._base = trainable.base
        self._learner = Learner(trainable, recipe)
        self._random = Random(recipe.seed)
        self._read = 0
        self._owed = 0.0
        """Observations still to be trained on."""
        self._waiting = _Waiting()
        self._compared: deque[Scored] = deque(maxlen=10 * _ENOUGH_SCORED)
        """Scored since the last version."""
        self._warm = 0
        """Steps since training began from weights that were not in training."""
        self._first = self._learner.weights()
        self._published = self._first
        self._changed = False
        """Whether the weights in training are others than those."""
        if self._checkpoint.exists():
            self._resume()
        else:
            self._release()

    def rates(self) -> dict[str, float | None]:
        """Of the scored observations in the window, the share that was foretold; null where there is none.

        In order: by the weights in training; by the published ones; by those with which the co-training began; and, by
        the first, the share of the seconds that the commands took.
        """
        scored = list(self.scored)

        def rate(part: float, whole: float) -> float | None:
            return round(part / whole, 4) if whole else None

        return {
            "exact_rate": rate(sum(each.exact for each in scored), len(scored)),
            "exact_rate_published": rate(sum(each.published for each in scored), len(scored)),
            "exact_rate_frozen": rate(sum(each.frozen for each in scored), len(scored)),
            "exact_rate_of_seconds": rate(
                sum(each.seconds for each in scored if each.exact), sum(each.seconds for each in scored)
            ),
        }

    def turn(self) -> bool:
        """Looks at what is new, scores a sample of it, and trains for one step. Returns False where all is done."""
        read, places = self._transitions.news(self._read)
        rollouts = {key: rollout for key in places if (rollout := self._transitions.rollout(key, read)) is not None}
        for key in self._random.sample(list(rollouts), min(len(rollouts), self._pace.scored)):
            self._score(rollouts[key], places[key])
        for key, rollout in rollouts.items():
            new = len(rollout.exchanges) - places[key]
            self.figures.seen += new
            self._owed += new * self._pace.passes
            self._waiting.add(key, places[key])
        self._read = read
        rows = self._batch() if self._owed > 0 else []
        if rows:
            self._learn(rows)
        else:
            self._owed = min(0.0, self._owed)  # What is left can be found nowhere.
        return bool(rollouts or rows)

    def publish(self) -> Version | None:
        """Publishes the weights in training, unless there is nothing new in them, or they foretell less than those
        that were published last: then training goes on from the latter, and None is returned."""
        if not self._changed:
            return None
        if self._worse():
            self._roll_back()
            self.save()
            return None
        return self._release()

    def save(self) -> None:
        """Renews the checkpoint: the file is replaced whole. Raises InputError where it cannot be written."""
        state = {
            "base": self._base,
            "rank": self._recipe.rank,
            "learner": self._learner.state(),
            "first": self._first,
            "published": self._published,
            "changed": self._changed,
            "warm": self._warm,
            "read": self._read,
            "owed": self._owed,
            "waiting": list(self._waiting.places.items()),
            "figures": asdict(self.figures),
            "scored": [asdict(each) for each in self.scored],
            "compared": [asdict(each) for each in self._compared],
        }
        new = self._checkpoint.with_name("checkpoint.new")
        with writing(self._checkpoint, "place"):
            save_state(state, new)
            new.replace(self._checkpoint)

    def _score(self, rollout: StoredRollout, first: int) -> None:
        """What was observed from place ``first`` on, by the weights in training and by the published ones.

        Of what is very much the latest, for training waits meanwhile.
        """
        first = max(first, len(rollout.exchanges) - _MOST_SCORED)
        exact = foretold(self._learner.model, rollout, self._chat, first)
        published = self._foretold_by(self._published, rollout, first) if self._changed else exact
        frozen = published if self._published is self._first else self._foretold_by(self._first, rollout, first)
        for place in range(first, len(rollout.exchanges)):
            scored = Scored(place in exact, place in published, place in frozen, rollout.seconds[place])
            self.scored.append(scored)
            self._compared.append(scored)

    def _foretold_by(self, weights: dict[str, torch.Tensor], rollout: StoredRollout, first: int) -> set[int]:
        """By weights that are not in training."""
        training = self._learner.weights()
        try:
            self._learner.set_weights(weights)
            return foretold(self._learner.model, rollout, self._chat, first)
        finally:
            self._learner.set_weights(training)

    def _batch(self) -> list[Row]:
        """So many rows as a step has, of what is new and of all there is; fewer where there is little to learn."""
        rows: list[Row] = []
        for _ in range(4 * self._recipe.rows_per_step):
            if len(rows) >= self._recipe.rows_per_step:
                break
            key, first = self._draw()
            rollout = None if key is None else self._transitions.rollout(key)
            if rollout is not None:
                taught = rows_of(rollout, self._chat, self._pace.weighting, first)
                cut = [row for row in (row.cut(self._learner.longest) for row in taught) if row.spans]
                # Of a very long rollout some now, the others when it is drawn again.
                rows += self._random.sample(cut, min(len(cut), self._recipe.rows_per_step - len(rows)))
        return rows

    def _draw(self) -> tuple[str | None, int]:
        """A rollout, and from which place on it is learned."""
        if self._waiting.places and self._random.random() >= self._pace.replay:
            return self._waiting.places.popitem(last=False)
        return self._transitions.anywhere(self._random.random()), 0

    def _learn(self, rows: list[Row]) -> None:
        loss = self._learner.learn(rows, min(1.0, (self._warm + 1) / _WARM_STEPS))
        self._warm += 1
        self._changed = True
        figures = self.figures
        figures.steps += 1
        figures.tokens += sum(len(row.tokens) for row in rows)
        spans = sum(len(row.spans) for row in rows)
        figures.learned += spans
        self._owed -= spans
        figures.loss = loss if math.isnan(figures.loss) else figures.loss + 0.05 * (loss - figures.loss)
        if not math.isfinite(loss):
            figures.loss = math.nan
            self._roll_back()

    def _worse(self) -> bool:
        """Whether the weights in training foretell less than the published ones, by more than chance would have it.

        Both were scored on the same observations, so what differs are those that only one of them foretells: the
        difference of two rates has the standard error sqrt(those) / observations.
        """
        count = len(self._compared)
        if count < _ENOUGH_SCORED:
            return False
        lost = sum(each.published and not each.exact for each in self._compared)
        won = sum(each.exact and not each.published for each in self._compared)
        return lost - won > max(self._pace.tolerance * count, 2 * math.sqrt(lost + won))

    def _roll_back(self) -> None:
        self._learner.restart(self._published)
        self._warm = 0
        self._changed = False
        self._compared.clear()
        self.figures.rollbacks += 1

    def _release(self) -> Version:
        about = {
            **self.rates(),
            "scored": len(self.scored),
            "steps": self.figures.steps,
            "transitions": self.figures.seen,
        }
        version = publish_version(self.directory, self._base, self._learner.save, about)
        self._published = self._learner.weights()
        self._changed = False
        self._compared.clear()
        self.figures.version = version.number
        self.save()
        return version

    def _resume(self) -> None:
        try:
            state: dict[str, Any] = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
            begun = state["base"], state["rank"]
            if begun == (self._base, self._recipe.rank):
                self._learner.restore(state["learner"])
                self._first, self._published = state["first"], state["published"]
                self._changed, self._warm = state["changed"], state["warm"]
                self._read, self._owed = state["read"], state["owed"]
                self._waiting.places.update(state["waiting"])
                self.figures = Figures(**state["figures"])
                self.scored.extend(Scored(**each) for each in state["scored"])
                self._compared.extend(Scored(**each) for each in state["compared"])
        except Exception as error:  # PyTorch says in many ways that a file is not what it wrote.
            raise InputError(
                f"{self._checkpoint}: damaged ({type(error).__name__}); remove it to start afresh"
            ) from error
        if begun != (self._base, self._recipe.rank):
            raise InputError(
                f"{self._checkpoint}: is of {_named(*begun)}, not of {_named(self._base, self._recipe.rank)}; "
                "go on with the same settings, or choose another directory"
            )
        if self._read > self._transitions.latest_id():
            self._read = 0  # A store that was made anew counts anew.


def _named(base: str, rank: int | None) -> str:
    return f"the whole of {base}" if rank is None else f"an adapter of rank {rank} on {base}"
