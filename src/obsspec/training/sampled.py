"""Bringing a policy's new weights to where rollouts sample from."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import torch

from obsspec.budget import Seats
from obsspec.errors import InputError
from obsspec.gate import ExpectedValue
from obsspec.loading import Models, load
from obsspec.policies.http import Server
from obsspec.policies.local import LocalPolicy
from obsspec.policies.networks import Network
from obsspec.policies.versions import versioned
from obsspec.policies.vllm import VllmPolicy
from obsspec.runs import find_models
from obsspec.training.beside import CoTrainer
from obsspec.training.collection import Collection
from obsspec.training.finetune import Trainable, save_weights
from obsspec.training.publishing import Publisher, VllmAdapters, VllmWeights
from obsspec.training.settings import PolicySettings, TrainingSettings
from obsspec.training.versions import Version, publish_version
from obsspec.types import PolicyError

_PATIENCE_SECONDS, _RETRY_SECONDS = 600.0, 2.0
"""How long a server may be away, and between one try and the next."""
_ON_SERVER = "policy"
"""Version 7 of an adapter is ``policy-v7`` there."""


class SampledPolicy:
    """The policy that rollouts sample from, in this process or on a server: made equal to the one in training."""

    def __init__(self, settings: PolicySettings, directory: Path, trainable: Trainable, collection: Collection) -> None:
        self.trainable = trainable
        self.collection = collection
        """Rollouts of it."""
        self._settings = settings
        self._directory = directory
        self._current: tuple[Version, int] | None = None
        """With its step. For the event loop."""
        self._one_at_a_time = anyio.Lock()
        self._publisher: Publisher | None = None
        if settings.server:
            connection = collection.enter(Server(settings.server))
            self._publisher = VllmWeights(connection) if settings.full else VllmAdapters(connection, _ON_SERVER)

    @classmethod
    @contextmanager
    def open(
        cls,
        settings: TrainingSettings,
        output: Path,
        trainable: Trainable,
        cotrainer: CoTrainer | None,
        gate: ExpectedValue,
    ) -> Iterator[SampledPolicy]:
        """``output``: the run's directory, where versions go. Nothing is published yet.

        Raises InputError where a server cannot be reached or is not fit.
        """
        plan, server = settings.plan(), settings.policy.server
        if cotrainer is not None and "language_model" in plan.predictors():
            cotrainer.wait_for_version()
            plan = replace(plan, world_model=str(cotrainer.directory))
        if server:
            tokenizer = output / "tokenizer"
            trainable.tokenizer.save_pretrained(tokenizer)
            plan = replace(plan, policy=server, tokenizer=str(tokenizer))
        plan, servers = find_models(plan)
        seats = Seats(settings.rollouts.seats or (math.inf if server else 2))
        models = Models.load(plan, servers)
        with Collection.open(models, plan, seats, gate, settings.rollouts.ahead) as collection:
            yield cls(settings.policy, output / "policy", trainable, collection)

    def publish(self, step: int) -> None:
        """Brings the weights in training, those after ``step`` steps, to where they are sampled from.

        They become a version in ``policy/`` as well. Raises InputError for a disk that is full, and for a server that
        will not take them.
        """
        write = partial(save_weights, self.trainable, precision=torch.float32)
        version = publish_version(self._directory, self.trainable.base, write, {"step": step})
        if self._settings.server:
            self.collection.call(partial(self._publish, version, step))
        else:
            network, _ = load(str(version.directory), "policy", self._settings.precision)
            self.collection.call(partial(self._replace, network, step))

    async def bring_back(self) -> None:
        """Gives a server the current version where it has lost it; waits for one that is restarting.

        Raises InputError for one that does not come back. To be called in the event loop.
        """
        if self._settings.server and self._current is not None:
            await self._until_it_answers(self._give_if_lost)

    # In the event loop, so that no request is half of one version and half of another.

    async def _replace(self, network: Network, step: int) -> None:
        assert isinstance(self.collection.policy, LocalPolicy)
        self.collection.policy.replace(network, step)

    async def _publish(self, version: Version, step: int) -> None:
        self._current = version, step
        await self._until_it_answers(self._give)

    async def _give_if_lost(self) -> None:
        """All weights look the same from here, old and new."""
        assert isinstance(self.collection.policy, VllmPolicy)
        if self._settings.full or self.collection.policy.model not in await self.collection.policy.models():
            await self._give()

    async def _give(self) -> None:
        policy = self.collection.policy
        assert self._current is not None and self._publisher is not None and isinstance(policy, VllmPolicy)
        version, step = self._current
        await self._publisher.publish(version.number, version.directory)
        policy.weight_version = step
        if not self._settings.full:
            policy.model = versioned(_ON_SERVER, version.number)

    async def _until_it_answers(self, give: Callable[[], Awaitable[None]]) -> None:
        """One at a time: an adapter that is loaded anew is away for a moment."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                async with self._one_at_a_time:
                    return await give()
            except PolicyError as error:
                if time.monotonic() > until:
                    raise InputError(f"{error}; start it again, and --resume goes on") from None
                await anyio.sleep(_RETRY_SECONDS)
