"""An agent loop for verl: its own `ToolAgentLoop`, whose next generation begins while a tool still runs.

It is registered through verl's own file of agent loops (``actor_rollout_ref.rollout.agent.agent_loop_config_path``):

    - name: obsspec
      _target_: obsspec.integrations.verl.SpeculativeToolAgentLoop
      depth: 1

All that makes a sample is verl's code: it parses, calls tools, merges tokens and masks, and ends. Only where it asks
its client for a generation it may be given one that is under way already, and only if that one began with exactly the
token ids with which verl asks. So what we predict can be late or wrong, and the sample is what it would have been.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import anyio

from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.context import Context, Tokens
from obsspec.errors import InputError, did_you_mean
from obsspec.gate import PRICE_APART, ExpectedValue
from obsspec.hub import load_tokenizer
from obsspec.policies.replicas import Replicas
from obsspec.predictors import SANDBOX, Cascade, LanguageModel, Limits, Memory, Rules
from obsspec.speculation import Rollout, Settings, Speculator
from obsspec.training.posting import PostedTransitions
from obsspec.types import (
    Action,
    Chunk,
    Done,
    Exchange,
    Finish,
    Generation,
    Observation,
    Policy,
    PolicyError,
    Predictor,
    Query,
    Request,
    Sampling,
    Step,
    Turn,
)

_RELIED_ON = (
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager._performance_metrics",
    "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop._build_assistant_message",
    "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop._handle_pending_state",
    "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop._handle_processing_tools_state",
    "verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop.run",
    "verl.experimental.agent_loop.tool_parser:ToolParser.extract_tool_calls",
    "verl.utils.tokenizer.continuous_token:ContinuousTokenBuilder.merge_context_tokens",
    "verl.workers.rollout.llm_server:LLMServerClient._acquire_server",
    "verl.workers.rollout.llm_server:LLMServerClient.generate",
    "verl.workers.rollout.replica:TokenOutput.model_fields",
)
"""Of verl's code, what this module builds on."""


def lacking(names: Sequence[str] = _RELIED_ON) -> list[str]:
    """Which of the names, as ``module:attribute.attribute``, the installed packages do not have."""

    def has(name: str) -> bool:
        module, _, path = name.partition(":")
        try:
            found: Any = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return False
        return True

    return [name for name in names if not has(name)]


if _missing := lacking():
    raise InputError(
        f"obsspec.integrations.verl follows verl 0.9.1; the verl {version('verl')} that is installed lacks "
        f"{', '.join(_missing)}"
    )

import ray  # noqa: E402
from ray.util.metrics import Counter  # noqa: E402
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput  # noqa: E402
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop  # noqa: E402
from verl.workers.rollout.llm_server import LLMServerClient  # noqa: E402
from verl.workers.rollout.replica import TokenOutput  # noqa: E402

_log = logging.getLogger(__name__)
_VERLS = {*signature(AgentLoopBase.__init__).parameters, "tools", "name"}
"""What verl makes a loop of."""
_UNLIMITED = 1_000_000
"""Messages in a sample, where verl sets no limit."""
_FIGURES = {
    "obsspec_tool_calls": "Turns on which tools were called.",
    "obsspec_attempted": "Those for which a generation was begun before the tools had answered.",
    "obsspec_hits": "Those on which it began with what they then answered.",
    "obsspec_tool_seconds": "Seconds that tools took.",
    "obsspec_hidden_seconds": "Seconds of these in which generations ran that were kept.",
    "obsspec_wasted_tokens": "Tokens of whole generations that were discarded; those that were aborted are not known.",
}
"""What is counted of every sample, in its ``extra_fields``."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How the loops of one worker process speculate: the keys of an agent loop's entry in verl's file."""

    depth: int = 1
    """How many answers of tools ahead. 0 is verl's own loop."""
    breadth: int = 1
    """How many drafts to try for one answer."""
    predictor: str = "rules,memory"
    """Which predictors, of these two and ``language_model``."""
    world_model: str | None = None
    """What ``language_model`` runs on: the URL of a vLLM server, or several with commas between."""
    world_model_name: str | None = None
    """What it is called there; see `obsspec.policies.versions.newest`."""
    world_model_tokenizer: str | None = None
    """Its tokenizer's directory, or name at the model hub."""
    transitions: str | None = None
    """URL of an ``obsspec world-model serve --listen``, which is sent every tool call and its answer."""

    def __post_init__(self) -> None:
        names = self.predictor.split(",")
        for name in names:
            if name not in ("rules", "memory", "language_model"):
                raise InputError(f"agent loop obsspec: predictor {name}: not one of rules, memory, language_model")
        for key in ("world_model", "world_model_tokenizer"):
            if "language_model" in names and getattr(self, key) is None:
                raise InputError(f"agent loop obsspec: {key}: is missing, and predictor language_model needs it")
            if "language_model" not in names and getattr(self, key) is not None:
                raise InputError(f"agent loop obsspec: {key}: only predictor language_model uses it; add that")
        for key, least in (("depth", 0), ("breadth", 1)):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise InputError(f"agent loop obsspec: {key} {value!r}: must be a whole number of at least {least}")


class SpeculativeToolAgentLoop(ToolAgentLoop):  # type: ignore[misc]
    """verl's `ToolAgentLoop` with speculation. There is one for every sample; a process shares what it learns.

    Samples with images, videos or audio run as verl's own do, and so do all under ``full_determinism``, where every
    request of a sample has the same id and two at a time would collide.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See verl; and the fields of `Speculation`."""
        own = {field.name: kwargs.pop(field.name) for field in fields(Speculation) if field.name in kwargs}
        for name in kwargs.keys() - _VERLS:
            known = [field.name for field in fields(Speculation)]
            remedy = did_you_mean(name, known, f"there are {', '.join(known)}")
            raise InputError(f"agent loop obsspec: {name}: no such key; {remedy}")
        speculation = Speculation(**own)
        super().__init__(*args, **kwargs)
        self._process = _Process.of(speculation, self.max_tool_response_length)

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """See verl. Adds `_FIGURES` to the sample's ``extra_fields``."""
        async with AsyncExitStack() as stack:
            self.server_manager = ahead = _Ahead(self, self._process, stack)
            output = await super().run(sampling_params, priority=priority, **kwargs)
            figures = ahead.figures()
        output.extra_fields.update(figures)
        self._process.count(figures)
        return output

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        self.server_manager.agent_data = agent_data
        return await super()._handle_pending_state(agent_data, sampling_params)

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        before, began = len(agent_data.messages), self.loop.time()
        state = await super()._handle_processing_tools_state(agent_data)
        await self.server_manager.observe(agent_data.messages[before:], self.loop.time() - began)
        return state


class SpeculativeAgentLoopManager(AgentLoopManager):  # type: ignore[misc]
    """verl's manager for its trainer before version 1, which logs the sums of `_FIGURES` beside its own timings.

    It is set as ``+actor_rollout_ref.rollout.agent.agent_loop_manager_class``. The trainer of version 1 logs nothing
    that a loop counts; the same sums are among Ray's own metrics with either.
    """

    def _performance_metrics(self, metrics: Any, output: Any) -> dict[str, float]:
        timing: dict[str, float] = super()._performance_metrics(metrics, output)
        for name in _FIGURES:
            if name in output.non_tensor_batch:
                timing[f"agent_loop/{name}"] = float(sum(output.non_tensor_batch[name]))
        return timing


class _Process:
    """What the loops of one worker process share."""

    def __init__(self, speculation: Speculation, longest: int) -> None:
        """``longest``: characters of a tool's answer above which verl cuts it."""
        self.speculation = speculation
        self.gate = ExpectedValue()
        # verl cuts before the policy reads it, so rules have nothing to say of longer answers. Memory sees them cut.
        predictors: dict[str, Predictor] = {"rules": Rules(replace(SANDBOX, limit=longest)), "memory": Memory()}
        if speculation.world_model is not None:
            predictors["language_model"] = _WorldModel(speculation).predictor(self.gate, speculation.breadth)
        names = speculation.predictor.split(",")
        chosen = {name: predictor for name, predictor in predictors.items() if name in names}
        self.predictor = Cascade(chosen, worth_asking=partial(self.gate.worth_asking, price=PRICE_APART))
        self._counters = {name: Counter(name, description) for name, description in _FIGURES.items()}
        self._open = ExitStack()  # Until the process ends.
        url = speculation.transitions
        self._posted = None if url is None else self._open.enter_context(PostedTransitions.open(url))

    @staticmethod
    @cache
    def of(speculation: Speculation, longest: int) -> _Process:
        return _Process(speculation, longest)

    def record(self, rollout: str, query: Query, observation: Observation) -> None:
        if self._posted is not None:
            self._posted.add(rollout, query, observation)

    def count(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            if value > 0:
                self._counters[name].inc(value)


class _WorldModel:
    """What ``language_model`` runs on, in one worker process. A ``types.Policy``.

    No sample waits for its servers: until they have been found, and while they are away, there are no drafts.
    """

    def __init__(self, speculation: Speculation) -> None:
        """To be called in the event loop that will use it."""
        remedy = "agent loop obsspec: give the directory or hub name of its tokenizer as world_model_tokenizer"
        self._tokenizer = load_tokenizer(speculation.world_model_tokenizer or "", remedy)
        self._policy: Policy | None = None
        self._held = asyncio.get_running_loop().create_task(self._hold(speculation))

    def predictor(self, gate: ExpectedValue, breadth: int) -> LanguageModel:
        return LanguageModel(self, WorldModelChat(ChatFormat(self._tokenizer)), least=gate.least, drafts=breadth)

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        """See ``types.Policy``."""
        if self._policy is None:
            raise PolicyError("the world model's servers have not been found yet")
        return await self._policy.generate(request, emit)

    async def _hold(self, speculation: Speculation) -> None:
        """Until the process ends."""
        urls, name = (speculation.world_model or "").split(","), speculation.world_model_name
        try:
            connected = Replicas.connect(urls, name, self._tokenizer, max_context=Limits().context_tokens)
            async with connected as self._policy:
                await anyio.sleep_forever()
        except InputError as error:
            _log.error("agent loop obsspec: goes on without its world model: %s", error)


@dataclass(frozen=True, slots=True)
class _Call:
    """How verl asks for the generations of a sample, but for the prompt."""

    request_id: str
    sampling_params: dict[str, Any]
    rest: dict[str, Any]

    async def __call__(self, client: LLMServerClient, prompt: Tokens, **more: Any) -> TokenOutput:
        # A copy, for the client writes into it.
        parameters = dict(self.sampling_params)
        rest = self.rest | more
        return await client.generate(self.request_id, prompt_ids=list(prompt), sampling_params=parameters, **rest)


class _Ahead:
    """Stands for verl's client in one sample: the next generation may be under way when verl asks for it."""

    def __init__(self, loop: SpeculativeToolAgentLoop, process: _Process, stack: AsyncExitStack) -> None:
        self.agent_data: AgentData
        self._loop = loop
        self._client: LLMServerClient = loop.server_manager
        self._process = process
        self._stack = stack
        self._seams: _Seams | None = None
        self._rollout: Rollout | None = None
        self._turns: tuple[Turn, ...] = ()
        self._history: tuple[Exchange, ...] = ()
        self._name = uuid4().hex

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **rest: Any
    ) -> TokenOutput:
        """What the client returns for the same arguments."""
        prompt, call = tuple(prompt_ids), _Call(request_id, dict(sampling_params), rest)
        if self._seams is None:
            self._seams = _Seams(self._loop, self.agent_data, _cancelling(self._client), call, prompt)
            if self._may_speculate(call):
                await self._begin(self._seams)
        if self._rollout is not None and call == self._seams.call:
            await self._rollout.act()
            if output := self._seams.output(self._rollout.context, prompt):
                return output
        await self._end()
        return await call(self._client, prompt)

    async def observe(self, messages: Sequence[Mapping[str, Any]], seconds: float) -> None:
        """What verl made of the tools' answers."""
        if self._rollout is None or self._seams is None:
            return
        text = _text_of(messages)
        if text is None or self._rollout.end is not None:
            await self._end()
            return
        observation = Observation(text, seconds)
        command = self._seams.command(self._rollout.context.segment.tokens)
        query = Query(self._seams.task, self._seams.instruction, self._history, command)
        self._process.record(self._name, query, observation)
        self._history += (Exchange(command, text),)
        self._rollout.observe(observation)

    def figures(self) -> dict[str, float]:
        """By the names of `_FIGURES`; all 0 where nothing was speculated."""
        turns = self._turns if self._rollout is None else self._rollout.turns
        executed = [(turn, turn.executing.seconds) for turn in turns if turn.executing]
        values = (
            len(executed),
            sum(turn.outcome in ("hit", "miss") for turn, _ in executed),
            sum(turn.outcome == "hit" for turn, _ in executed),
            sum(seconds for _, seconds in executed),
            sum(turn.hidden_seconds for turn, _ in executed),
            sum(turn.wasted_tokens for turn, _ in executed),
        )
        return dict(zip(_FIGURES, values, strict=True))

    def _may_speculate(self, call: _Call) -> bool:
        media = any(call.rest.get(name) for name in ("image_data", "video_data", "audio_data"))
        return self._process.speculation.depth > 0 and not media and not self._loop.rollout_config.full_determinism

    async def _begin(self, seams: _Seams) -> None:
        settings = Settings(
            Sampling(max_tokens=self._loop.response_length),
            depth=self._process.speculation.depth,
            breadth=self._process.speculation.breadth,
            gate=self._process.gate,
            max_turns=_most_turns(self._loop),
            max_context=len(seams.prompt) + self._loop.response_length,
        )
        speculator = Speculator(seams, seams, self._process.predictor, settings)
        rollout = speculator.rollout(seams.instruction, task=seams.task)
        self._rollout = await self._stack.enter_async_context(rollout)

    async def _end(self) -> None:
        """verl goes on alone: something came that was not foreseen here."""
        if self._rollout is not None:
            self._turns, self._rollout = self._rollout.turns, None
            await self._stack.aclose()


class _Seams:
    """What the engine speculates with in one sample: a ``types.Policy`` and a ``types.Chat`` made of verl's parts.

    There are no seats, so no branch is ever suspended. verl's servers give a generation whole or not at all, and one
    that is begun anew for having taken long would lean towards short ones. Where a server is busy, its own scheduling
    puts speculation last (``actor_rollout_ref.rollout.scheduling_policy: priority``).
    """

    stop: Tokens = ()
    """Servers say themselves that a generation has ended."""

    def __init__(
        self,
        loop: SpeculativeToolAgentLoop,
        agent_data: AgentData,
        client: LLMServerClient,
        call: _Call,
        prompt: Tokens,
    ) -> None:
        self.call = call
        self.prompt = prompt
        self._loop = loop
        self._client = client
        self._messages = list(agent_data.messages)
        self._schemas = agent_data._active_tool_schemas
        self._tools = [tool.tool_schema for tool in agent_data._active_tools.values()]
        self._by_priority = loop.rollout_config.scheduling_policy == "priority"
        self._said: dict[Tokens, tuple[str, list[Any]]] = {}
        """By the tokens of a generation: its text, and the tools that it calls."""
        self._outputs: dict[Context, TokenOutput] = {}
        """By the context that was continued."""
        self.task = hashlib.blake2b(json.dumps(self._messages, default=str).encode(), digest_size=12).hexdigest()
        """The same for all samples of a prompt."""
        self.instruction = str(self._messages[-1].get("content") or "") if self._messages else ""

    def output(self, context: Context, prompt: Tokens) -> TokenOutput | None:
        """What came of the request that led to ``context``, if it was one for exactly ``prompt``."""
        continued = context.parent
        if continued is None or continued.length != len(prompt) or continued.tokens != prompt:
            return None
        return self._outputs.get(continued)

    def command(self, generation: Tokens) -> str:
        """The calls of a generation as predictors read them: a lone ``command`` argument as the command that it is."""
        _, calls = self._said[generation]
        if len(calls) == 1:
            arguments = _arguments(calls[0])
            if list(arguments) == ["command"] and isinstance(arguments["command"], str):
                return arguments["command"]
        return "\n".join(f"{call.name} {call.arguments}" for call in calls)

    # A Policy.

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        """See ``types.Policy``."""
        # verl itself sends no priority with its requests, which is 0; lower is sooner.
        priority = {"priority": request.priority} if self._by_priority and request.priority else {}
        output = await self.call(self._client, request.context.tokens, **priority)
        tokens = tuple(output.token_ids)
        self._outputs[request.context] = output
        # What is longer than the response may be, verl cuts.
        kept = tokens[: request.max_tokens]
        self._said[kept] = await self._read(tokens)
        logprobs = tuple(output.log_probs[: len(kept)]) if output.log_probs else (0.0,) * len(kept)
        emit(Chunk(kept, logprobs, output.extra_fields.get("global_steps") or 0))
        return "length" if len(tokens) >= request.max_tokens else "stop"

    async def _read(self, generation: Tokens) -> tuple[str, list[Any]]:
        content, calls = await self._loop.tool_parser.extract_tool_calls(list(generation), self._tools)
        return content, calls[: self._loop.max_parallel_calls]

    # A Chat.

    def start(self, instruction: str) -> Tokens:
        """See ``types.Chat``."""
        return self.prompt

    def parse(self, generation: Generation) -> Step:
        """See ``types.Chat``. verl ends a sample where a message calls no tool, and where the response is full."""
        calls = self._said[generation.tokens][1]
        return Action(self.command(generation.tokens)) if calls and generation.finish == "stop" else Done()

    def observe(self, generation: Generation, text: str) -> Tokens:
        """See ``types.Chat``. Raises ValueError where ``text`` cannot answer the calls of the generation."""
        content, calls = self._said[generation.tokens]
        before = [*self._messages, self._loop._build_assistant_message(content, SimpleNamespace(tool_calls=calls))]
        merged = self._loop.continuous_token_builder.merge_context_tokens(
            before, [*before, *_answers(calls, text)], list(generation.tokens), tools=self._schemas
        ).token_ids
        written = len(generation.tokens)
        if tuple(merged[:written]) != generation.tokens:
            raise ValueError("verl changes the tokens of a message when its tools have answered")
        return tuple(merged[written:])


def _most_turns(loop: ToolAgentLoop) -> int:
    """How many messages verl lets the policy write in a sample."""
    limits = [loop.max_assistant_turns or _UNLIMITED]
    if loop.max_user_turns:
        limits.append(loop.max_user_turns + 1)
    return min(limits)


def _arguments(call: Any) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, TypeError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The answers of a turn's tools as one text, which `_answers` takes apart; None where they are not all text."""
    texts = [message["content"] for message in messages]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    return str(texts[0]) if len(texts) == 1 else json.dumps(texts)


def _answers(calls: Sequence[Any], text: str) -> list[dict[str, Any]]:
    texts = [text] if len(calls) == 1 else json.loads(text)
    if not isinstance(texts, list) or len(texts) != len(calls) or not all(isinstance(each, str) for each in texts):
        raise ValueError(f"{text:.100} does not answer {len(calls)} calls")
    identifiers = [{} if call.tool_call_id is None else {"tool_call_id": call.tool_call_id} for call in calls]
    return [
        {"role": "tool", "content": each, **identifier} for each, identifier in zip(texts, identifiers, strict=True)
    ]


def _cancelling(client: LLMServerClient) -> LLMServerClient:
    """The same client, but that a request whose caller is cancelled is aborted in its server too.

    To stop waiting for what a Ray actor returns does not stop the actor; it goes on to the end of the generation.
    """
    copied = copy.copy(client)

    async def acquire(request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, server = await type(client)._acquire_server(copied, request_id, **extra)
        return server_id, _Server(server)

    copied._acquire_server = acquire
    return copied


class _Server:
    """A server's actor, for a client that wants nothing but generations of it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.generate = self

    async def remote(self, **arguments: Any) -> Any:
        reference = self._actor.generate.remote(**arguments)
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
