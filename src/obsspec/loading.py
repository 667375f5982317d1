"""The models that a plan names, in this process or on a server, and a speculator on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from obsspec.background import background
from obsspec.budget import Seats
from obsspec.chat import ChatFormat, TerminalChat, WorldModelChat
from obsspec.gate import ExpectedValue
from obsspec.hub import load_tokenizer
from obsspec.policies import Precision
from obsspec.policies.vllm import VllmPolicy
from obsspec.predictors import Cascade, LanguageModel, Memory, Rules, TimeOuts
from obsspec.runs import BUILTIN, Plan
from obsspec.speculation import Speculator
from obsspec.types import Policy, Predictor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from obsspec.policies.networks import Network

OpenPolicy = Callable[[Seats], AbstractAsyncContextManager[Policy]]
"""Opens a policy that runs so many requests at once."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a plan, loaded; a policy that is on a server has its tokenizer here."""

    open_policy: OpenPolicy
    chat: TerminalChat
    world_model: tuple[Network, WorldModelChat] | None
    """None where the plan does not use it."""

    @classmethod
    def load(cls, plan: Plan, url: str | None = None) -> Models:
        """``url``: of the server that has the policy; None for this process. Raises InputError for what is not there.

        PyTorch is imported where a model runs in this process, and only then.
        """
        open_policy: OpenPolicy
        if url is None:
            network, tokenizer = _load(plan.policy, "policy", plan.precision)
            open_policy = partial(_in_process, network)
        else:
            tokenizer = load_tokenizer(plan.tokenizer or "", f"give --tokenizer the one of the model at {url}")
            open_policy = partial(_on_server, url, plan, tokenizer)
        world_model = None
        if "language_model" in plan.predictors():
            network, its_tokenizer = _load(plan.world_model, "world_model", plan.precision)
            world_model = (network, WorldModelChat(ChatFormat(its_tokenizer)))
        return cls(open_policy, TerminalChat(ChatFormat(tokenizer)), world_model)

    @asynccontextmanager
    async def speculator(self, plan: Plan, seats: Seats, gate: ExpectedValue) -> AsyncIterator[Speculator]:
        """With empty caches and an empty memory: what it hits, it has learned since, but for what ``gate`` knows.

        Raises InputError where the policy's server is not fit for the plan.
        """
        predictors: dict[str, Predictor] = {"rules": Rules(), "memory": Memory(), "timeouts": TimeOuts()}
        if self.world_model is not None:
            from obsspec.policies.local import LocalPolicy

            network, chat = self.world_model
            drafts: Literal[1, 2] = 1 if plan.breadth == 1 else 2
            predictors["language_model"] = LanguageModel(LocalPolicy(network), chat, least=gate.least, drafts=drafts)
        chosen = {name: predictors[name] for name in plan.predictors()}
        cascade = Cascade(chosen, worth_asking=gate.worth_asking) if chosen else None
        async with self.open_policy(seats) as policy:
            yield Speculator(policy, self.chat, cascade, replace(plan.settings(), gate=gate), seats)


@asynccontextmanager
async def _in_process(network: Network, seats: Seats) -> AsyncIterator[Policy]:
    from obsspec.policies.local import LocalPolicy

    yield LocalPolicy(network, int(seats.count))


@asynccontextmanager
async def _on_server(url: str, plan: Plan, tokenizer: PreTrainedTokenizerBase, seats: Seats) -> AsyncIterator[Policy]:
    """With the server's word on what everybody asks of it, so that many processes can share it."""
    connection = VllmPolicy.connect(url, plan.model, tokenizer, max_context=plan.max_context)
    async with connection as policy, background() as reports:
        policy.check(plan.settings().sampling)
        reports.start_soon(policy.report, seats)
        yield policy


def _load(name: str, role: str, precision: Precision) -> tuple[Network, PreTrainedTokenizerBase]:
    """A model by the name of a plan: ``builtin``, a model's directory or hub name, or an adapter's directory."""
    from obsspec.models import DEFAULT_MODEL, adapter_base
    from obsspec.policies.networks import load_network

    if name == BUILTIN:
        return load_network(DEFAULT_MODEL, f"builtin:{role}", precision)
    if (Path(name) / "adapter_config.json").is_file():
        return load_network(adapter_base(Path(name)), name, precision)
    return load_network(name, None, precision)
