"""The models that a plan names, in this process or on a server, and a speculator on them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from obsspec.background import background
from obsspec.budget import Seats
from obsspec.chat import ChatFormat, TerminalChat, WorldModelChat
from obsspec.errors import InputError
from obsspec.gate import PRICE_APART, ExpectedValue
from obsspec.hub import load_tokenizer
from obsspec.policies import Precision
from obsspec.predictors import Cascade, LanguageModel, Limits, Memory, Rules, TimeOuts
from obsspec.runs import BUILTIN, Plan, Servers
from obsspec.signals import held_back
from obsspec.speculation import Speculator
from obsspec.training.versions import Version, current_version
from obsspec.types import Policy, Predictor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from obsspec.policies.networks import Network

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0

OpenPolicy = Callable[[Seats], AbstractAsyncContextManager[Policy]]
"""Opens a policy that runs so many requests at once."""
OpenWorldModel = Callable[[], AbstractAsyncContextManager[Policy]]
"""Opens what a world model runs on."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a plan, loaded; of those that are on servers the tokenizers are here."""

    open_policy: OpenPolicy
    chat: TerminalChat
    world_model: tuple[OpenWorldModel, WorldModelChat] | None
    """None where the plan does not use it."""
    asking_price: float | None
    """What a second of the world model costs, as for `ExpectedValue.worth_asking`."""

    @classmethod
    def load(cls, plan: Plan, servers: Servers) -> Models:
        """``servers``: of those that are not in this process. Raises InputError for what is not there.

        PyTorch is imported where a model runs in this process, and only then.
        """
        open_policy: OpenPolicy
        if servers.policy is None:
            network, tokenizer = load(plan.policy, "policy", plan.precision)
            open_policy = partial(_in_process, network)
        else:
            remedy = f"give --tokenizer the one of the model at {servers.policy}"
            tokenizer = load_tokenizer(plan.tokenizer or "", remedy)
            open_policy = partial(_on_server, servers.policy, plan, tokenizer)
        world_model = _world_model(plan, servers) if "language_model" in plan.predictors() else None
        # Both on one server, or in this process, take each other's time.
        together = servers.world_model == (() if servers.policy is None else (servers.policy,))
        asking_price = None if together else PRICE_APART
        return cls(open_policy, TerminalChat(ChatFormat(tokenizer)), world_model, asking_price)

    @asynccontextmanager
    async def speculator(self, plan: Plan, seats: Seats, gate: ExpectedValue) -> AsyncIterator[Speculator]:
        """With empty caches and an empty memory: what it hits, it has learned since, but for what ``gate`` knows.

        Raises InputError where the policy's server is not fit for the plan.
        """
        predictors: dict[str, Predictor] = {"rules": Rules(), "memory": Memory(), "timeouts": TimeOuts()}
        async with AsyncExitStack() as opened:
            if self.world_model is not None:
                open_world_model, chat = self.world_model
                runs_on = await opened.enter_async_context(open_world_model())
                predictors["language_model"] = LanguageModel(runs_on, chat, least=gate.least, drafts=plan.breadth)
            chosen = {name: predictors[name] for name in plan.predictors()}
            worth_asking = partial(gate.worth_asking, price=self.asking_price)
            cascade = Cascade(chosen, worth_asking=worth_asking) if chosen else None
            policy = await opened.enter_async_context(self.open_policy(seats))
            yield Speculator(policy, self.chat, cascade, replace(plan.settings(), gate=gate), seats)


def _world_model(plan: Plan, servers: Servers) -> tuple[OpenWorldModel, WorldModelChat]:
    open_world_model: OpenWorldModel
    if not servers.world_model:
        root = Path(plan.world_model)
        version = current_version(root)
        network, tokenizer = load(plan.world_model, "world_model", plan.precision)
        if version is None:
            open_world_model = partial(_in_process, network, Seats(1))
        else:
            open_world_model = partial(_following, root, version, network, plan.precision)
    else:
        from obsspec.policies.replicas import Replicas

        remedy = f"start the server at {servers.world_model[0]} with a name or directory that is known here, too"
        tokenizer = load_tokenizer(servers.world_model_tokenizer, remedy)
        open_world_model = partial(
            Replicas.connect,
            servers.world_model,
            plan.world_model_name,
            tokenizer,
            max_context=Limits().context_tokens,
        )
    return open_world_model, WorldModelChat(ChatFormat(tokenizer))


@asynccontextmanager
async def _in_process(network: Network, seats: Seats) -> AsyncIterator[Policy]:
    from obsspec.policies.local import LocalPolicy

    yield LocalPolicy(network, int(seats.count))


@asynccontextmanager
async def _on_server(url: str, plan: Plan, tokenizer: PreTrainedTokenizerBase, seats: Seats) -> AsyncIterator[Policy]:
    """With the server's word on what everybody asks of it, so that many processes can share it."""
    from obsspec.policies.vllm import VllmPolicy

    connection = VllmPolicy.connect(url, plan.model, tokenizer, max_context=plan.max_context)
    async with connection as policy, background() as reports:
        policy.check(plan.settings().sampling)
        reports.start_soon(policy.report, seats)
        yield policy


@asynccontextmanager
async def _following(root: Path, version: Version, network: Network, precision: Precision) -> AsyncIterator[Policy]:
    """A world model in this process that takes up each new version that co-training publishes in ``root``."""
    from obsspec.policies.local import LocalPolicy

    policy = LocalPolicy(network)

    async def follow(known: Version) -> None:
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            try:
                newest = current_version(root)
                if newest is not None and newest.number != known.number:
                    network, _ = await anyio.to_thread.run_sync(load, str(root), "world_model", precision)
                    policy.replace(network)
                    known = newest
            except Exception as error:  # It may have gone while it was read, or be damaged. The one before does.
                _log.warning("world model: %s", error)

    async with background() as looks:
        looks.start_soon(follow, version)
        yield policy


def base_and_adapter(name: str, role: str) -> tuple[str, str | None]:
    """What `load_model` loads by the name of a plan: ``builtin``, a model's directory or hub name, an adapter's
    directory, or that of a co-training, of which it is the current version. ``role``: ``policy`` or ``world_model``.
    """
    if not name:  # As a path it would be the current directory.
        raise InputError(f"--{role.replace('_', '-')}: is empty; give {BUILTIN}, a model's directory or its hub name")
    from obsspec.models import DEFAULT_MODEL, adapter_base

    if name == BUILTIN:
        return DEFAULT_MODEL, f"builtin:{role}"
    version = current_version(Path(name))
    directory = Path(name) if version is None else version.directory
    if (directory / "adapter_config.json").is_file():
        return adapter_base(directory), str(directory)
    return str(directory) if version else name, None


def training_start(name: str, output: Path) -> tuple[str, str | None]:
    """The same for a world model that is to be trained further in ``output``. Raises InputError for one that would be
    gone when what is trained on it is used."""
    base, adapter = base_and_adapter(name, "world_model")
    version = current_version(Path(name))
    if version is None or adapter is not None:
        return base, adapter
    if Path(name).resolve() == output.resolve():
        return version.base, None
    raise InputError(
        f"--world-model {name}: its versions are whole models, and go when newer ones come; copy {version.directory} "
        "elsewhere and give the copy"
    )


def load(name: str, role: str, precision: Precision) -> tuple[Network, PreTrainedTokenizerBase]:
    """A model for this process, named as in a plan. ``role``: ``policy`` or ``world_model``.

    Raises InputError for what is not there.
    """
    with held_back():
        from obsspec.policies.networks import load_network

    return load_network(*base_and_adapter(name, role), precision)
