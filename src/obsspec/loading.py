"""The models that a plan names, loaded into this process, and a speculator on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from obsspec.budget import Seats
from obsspec.chat import ChatFormat, TerminalChat, WorldModelChat
from obsspec.models import BUILTIN_POLICY, BUILTIN_WORLD_MODEL, DEFAULT_MODEL, adapter_base
from obsspec.policies import Precision
from obsspec.policies.local import LocalPolicy
from obsspec.policies.networks import Network, load_network
from obsspec.predictors import Cascade, LanguageModel, Memory, Rules
from obsspec.runs import BUILTIN, Plan
from obsspec.speculation import Speculator
from obsspec.types import Predictor


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a plan, loaded, in this process."""

    policy: Network
    chat: TerminalChat
    world_model: tuple[Network, WorldModelChat] | None
    """None where the plan does not use it."""

    @classmethod
    def load(cls, plan: Plan) -> Models:
        """Raises InputError where a model cannot be had."""
        policy, chat_format = _load(plan.policy, BUILTIN_POLICY, plan.precision)
        world_model = None
        if "language_model" in plan.predictors():
            network, world_model_format = _load(plan.world_model, BUILTIN_WORLD_MODEL, plan.precision)
            world_model = (network, WorldModelChat(world_model_format))
        return cls(policy, TerminalChat(chat_format), world_model)

    def speculator(self, plan: Plan, workers: int) -> Speculator:
        """With empty caches and an empty memory: what it hits, it has learned since.

        ``workers``: threads of the policy, one generation each.
        """
        predictors: dict[str, Predictor] = {"rules": Rules(), "memory": Memory()}
        if self.world_model is not None:
            network, chat = self.world_model
            predictors["language_model"] = LanguageModel(LocalPolicy(network), chat)
        chosen = {name: predictors[name] for name in plan.predictors()}
        cascade = Cascade(chosen) if chosen else None
        return Speculator(LocalPolicy(self.policy, workers), self.chat, cascade, plan.settings(), Seats(workers))


def _load(name: str, builtin: str, precision: Precision) -> tuple[Network, ChatFormat]:
    """A model by the name of a plan: ``builtin``, a model's directory or hub name, or an adapter's directory."""
    if name == BUILTIN:
        base, adapter = DEFAULT_MODEL, builtin
    elif (Path(name) / "adapter_config.json").is_file():
        base, adapter = adapter_base(Path(name)), name
    else:
        base, adapter = name, None
    network, tokenizer = load_network(base, adapter, precision)
    return network, ChatFormat(tokenizer)
