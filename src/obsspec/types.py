"""The nouns of ObsSpec, and the three seams: Policy, Predictor, Environment.

Values are frozen and compare by content. Nothing here imports a model, a shell or a network client.
A seam is a Protocol whose docstring is its whole contract; implement it anywhere, no registration needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from obsspec.context import Context, Tokens

Finish = Literal["stop", "length"]
"""Why a generation ended: it sampled a stop token, or it used up its token budget."""


def finish_of(tokens: Sequence[int], stop: Tokens, max_tokens: int) -> Finish | None:
    """How a generation that holds ``tokens`` so far has ended, if it has."""
    if tokens and tokens[-1] in stop:
        return "stop"
    return "length" if len(tokens) >= max_tokens else None


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: an instruction, a way to set the environment up, and a way to score it."""

    id: str
    """Unique and stable, for instance ``logs/easy/17``. Memory, seeds and result files are keyed by it."""
    instruction: str
    """What the policy is asked to do, in English."""
    family: str = ""
    """Which generator or suite the task came from; summaries group by it."""
    level: str = ""
    """``easy``, ``medium`` or ``hard`` for generated tasks."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Laid down before ``setup``; relative paths are under the working directory. Files that start with
    ``#!`` become executable."""
    setup: str = ""
    """A bash script run once in the working directory, before the first turn and outside every clock."""
    check: str = ""
    """A bash script run in the working directory after the last turn. Exit code 0 means reward 1, any other 0,
    unless it leaves a number in the file ``/logs/verifier/reward.txt``, which is then the reward."""
    check_files: Mapping[str, bytes] = field(default_factory=dict)
    """Laid down just before ``check``, so that the policy never sees them."""
    time_limit: float = 30.0
    """Seconds that one command may run before it is killed and observed as a time-out."""


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy wants executed."""

    command: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A generation that holds no single action. Nothing is executed; ``reply`` is observed at once."""

    reply: str


@dataclass(frozen=True, slots=True)
class Done:
    """The policy says that it has finished. The rollout ends here."""

    answer: str = ""


Step = Action | Malformed | Done
"""What a generation was parsed into."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy reads next: the text that the harness renders, after its truncation."""

    text: str
    seconds: float = 0.0
    """How long the action took."""
    exit_code: int | None = None
    """None where there was none: a time-out, a malformed action, a tool that has no exit codes."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Generation:
    """Tokens that the policy sampled, whole or so far."""

    tokens: Tokens = ()
    """Sampled token ids, the stop token included."""
    logprobs: tuple[float, ...] = ()
    """Natural log-probability of each token under the distribution it was sampled from; same length as tokens."""
    weight_versions: tuple[int, ...] = ()
    """Version of the policy's weights that sampled each token; same length as tokens."""
    finish: Finish | None = None
    """None while it is incomplete."""


RunnerUp = tuple[int, float]
"""The second likeliest token at some place, and its natural log-probability."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One or more tokens that a policy has just sampled."""

    tokens: Tokens
    logprobs: tuple[float, ...]
    weight_version: int = 0
    runners_up: tuple[RunnerUp, ...] = ()
    """One for each token where the request asked for them; none otherwise."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policy samples. The same for every generation of a rollout."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_tokens: int = 256
    """Most tokens in one generation."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation asked of a policy: from the start, or onwards from the tokens of a suspended one."""

    context: Context
    """The exact tokens to continue. Its segments say which tokens were sampled and which were given."""
    sampling: Sampling
    max_tokens: int
    """Most tokens in this generation, counted from its start, those in ``resume`` included. At least 1."""
    stop: Tokens
    """Sampling one of these token ids ends the generation; it is emitted like any other."""
    seed: int
    """The rollout's seed. With ``turn`` and the token's position it determines every random draw."""
    turn: int
    """Which turn of its rollout this generation opens, from 0."""
    resume: Generation = Generation()
    """What an earlier, suspended request for this generation already emitted."""
    priority: int = 0
    """Observations ahead of the committed branch: 0 is real work, more is speculative and less urgent."""
    rollout: str = ""
    """The same for every request of a rollout, so that a policy can keep its prefix cache warm."""
    runners_up: bool = False
    """Whether it is to be said of each token of a greedy generation which was the second likeliest. A policy may leave
    that out; world models get second drafts from it."""

    @property
    def wants_runners_up(self) -> bool:
        return self.runners_up and self.sampling.temperature == 0


class PolicyError(Exception):
    """A request failed in a way that may pass: the connection broke, the server is restarting. It is tried again."""


class Policy(Protocol):
    """Whatever samples the next tokens.

    ``generate`` calls ``emit`` with each token or run of tokens as it is sampled, in order, none twice, and returns
    how the generation ended. It starts after ``request.resume``, whose tokens it does not emit again. It may be
    cancelled at any await: then it stops sampling, emits nothing more, and everything emitted so far stays valid, so
    that a later request can resume from it. A failure that may pass raises PolicyError, after any number of tokens;
    the caller tries again from those. Many calls run at the same time, also for the same rollout.
    """

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish: ...


class Chat(Protocol):
    """Between tokens and what they mean. Pure: the same arguments always give the same result.

    ``start`` gives the tokens that the policy sees first. ``parse`` reads a complete generation. ``observe`` gives
    the tokens that follow ``generation`` in the context when its observation reads ``text``, up to and including
    whatever opens the policy's next turn. It never re-tokenises what was already seen. ``stop`` holds the ids of the
    tokens that end a generation.
    """

    @property
    def stop(self) -> Tokens: ...

    def start(self, instruction: str) -> Tokens: ...

    def parse(self, generation: Generation) -> Step: ...

    def observe(self, generation: Generation, text: str) -> Tokens: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """One executed command of a rollout and what was observed."""

    command: str
    observation: str


@dataclass(frozen=True, slots=True)
class Query:
    """What a predictor is asked: given all this, what will ``command`` be observed to print?"""

    task: str
    """The task's id."""
    instruction: str
    history: tuple[Exchange, ...]
    """Every command executed so far, in order. On a branch, the last observations may themselves be drafts."""
    command: str


@dataclass(frozen=True, slots=True)
class Draft:
    """One predicted observation."""

    text: str
    probability: float
    """The predictor's own estimate, 0 to 1, that ``text`` is exactly what will be observed."""
    predictor: str = ""
    """Which predictor made it: ``rules``, ``memory``, ``language_model``, ``timeouts``."""
    if_timed_out: bool = False
    """Whether ``probability`` holds only if the command runs into its time limit, which no other draft foresees."""


class Predictor(Protocol):
    """Whatever guesses an observation: rules, memory, a language model.

    ``predict`` calls ``propose`` once for each draft, as soon as it has it, in any order, and returns when it has no
    more. It may be cancelled at any await, and must then stop. It may raise: that costs the drafts not yet proposed
    and nothing else. Many calls run at the same time.

    ``prepare`` is called while the policy still writes the command, with a query whose command is empty: time to read
    the history. It is cancelled when the command is known, and may raise as well. ``learn`` is told every committed
    observation, once, in the order of its rollout; it is called from the event loop and must be quick.
    """

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None: ...

    async def prepare(self, query: Query) -> None: ...

    def learn(self, query: Query, observation: Observation) -> None: ...


class Environment(Protocol):
    """One rollout's tools.

    ``execute`` runs one command at a time and returns what the policy will observe, after truncation. A command that
    fails, prints nonsense or runs out of time is an Observation like any other; raising means that the environment
    itself is broken, and ends the rollout. If cancelled it kills what it started. ``score`` gives the reward; no
    command is executed after it.
    """

    async def execute(self, command: str) -> Observation: ...

    async def score(self) -> float: ...


OpenEnvironment = Callable[[Task], AbstractAsyncContextManager[Environment]]
"""Sets an environment up for a task on entry and removes every trace of it on exit, however the block ends."""


Outcome = Literal["hit", "miss", "late", "gated", "failed", "off"]
"""How speculation on a turn ended.

hit: a draft equalled the observation. miss: drafts were tried and none did. late: the tool finished before the first
draft. gated: there were drafts, none worth a branch. failed: the predictor raised or proposed nothing usable.
off: nothing was attempted (no predictor, depth 0, no command to predict, or the
predictor had no idea)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``start`` to ``end`` on the rollout's clock, in seconds since it began."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """One draft that arrived before the observation, and whether it was right."""

    predictor: str
    probability: float
    seconds: float
    """From the question to the draft."""
    admitted: bool
    """Whether the gate let it have a branch."""
    exact: bool
    if_timed_out: bool = False
    """As in the draft."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One action and its observation, with what speculation did for it."""

    generation: Generation
    step: Step
    observation: Observation | None
    """None where the rollout ended with this generation."""
    generating: tuple[Interval, ...]
    """When the policy worked on ``generation``. It may lie before the turn began, under earlier tools; suspended
    branches have gaps."""
    executing: Interval | None
    outcome: Outcome
    drafts: tuple[DraftRecord, ...] = ()
    wasted_tokens: int = 0
    """Tokens of the branches that this turn's observation discarded."""
    hidden_seconds: float = 0.0
    """The part of ``executing`` during which the policy did work that was then kept."""
    running: float = 0.0
    """How many requests the policy ran on average while it worked on ``generation``, this one included."""
    first_token_seconds: float = 0.0
    """From the request for ``generation``, on its seat, to its first token: the policy reads the context then. Where it
    was suspended before, that of the request which brought it."""


End = Literal["done", "turns", "length"]
"""Why a rollout ended: the policy said so, it used up its turns, or the context is full."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Running a task once: what came out of it."""

    task: str
    family: str
    level: str
    seed: int
    context: Context
    """Everything the policy saw and wrote, with the mask of which tokens it wrote."""
    turns: tuple[Turn, ...]
    end: End
    seconds: float
    """Agent latency: from the first request to the end of the last tool or generation. Set-up and scoring excluded."""
    reward: float | None = None
