"""Observation speculation: branches, and when they are kept. All that decides is in this file.

The rules:

1. Nothing here executes anything. The caller executes the committed branch's action, and only that.
2. A branch is kept if and only if its draft renders to the same tokens as the observation. What it generated, how
   much and how fast, decides nothing. So a branch that may still prove right is never dropped to free its seat:
   it is suspended, with its tokens kept, and resumed from them.
3. A branch that is discarded takes with it all that stands on it.

A branch is a hypothetical context and the generation that runs on it. It moves through these states, each only
forwards but for the suspension:

    waiting for a seat <-> generating -> complete -> drafting (its action is known; children grow on drafts)

and ends by being discarded, or by having its own observation settled. Exactly one branch of a rollout is committed:
its context is what a sequential rollout would hold. Its distance above the committed branch is a branch's depth.

The file knows nothing of HTTP, models or shells: those are behind Policy, Chat and Predictor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import anyio
from anyio.abc import TaskGroup

from obsspec.background import background
from obsspec.budget import Seats
from obsspec.context import Context, Tokens
from obsspec.errors import InputError
from obsspec.gate import Bet, ExpectedValue, Gate
from obsspec.types import (
    Action,
    Chat,
    Chunk,
    Done,
    Draft,
    DraftRecord,
    End,
    Exchange,
    Finish,
    Generation,
    Interval,
    Malformed,
    Observation,
    Outcome,
    Policy,
    PolicyError,
    Predictor,
    Query,
    Request,
    Sampling,
    Step,
    Turn,
    finish_of,
)

_FIRST_PAUSE, _LAST_PAUSE = 0.25, 1024.0
"""Seconds between one look at the drafts that were held back and the next, twice as long each time."""

LONGEST_DRAFT = 100_000
"""Characters. A longer draft is nonsense: harnesses truncate what a policy reads far below this."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How rollouts run, and how far they speculate."""

    sampling: Sampling = field(default_factory=Sampling)
    depth: int = 1
    """How many observations ahead to speculate. 0 is the sequential rollout."""
    breadth: int = 1
    """How many drafts to try for one observation."""
    gate: Gate = field(default_factory=ExpectedValue)
    max_turns: int = 20
    """Most generations in a rollout."""
    max_context: int = 4096
    """Most tokens in a rollout's context."""
    retries: int = 5
    """How often a committed request that fails is tried again."""
    backoff: float = 0.5
    """Seconds before the first of those tries; twice as many before each next one."""

    def __post_init__(self) -> None:
        for name, least in (("depth", 0), ("breadth", 1), ("max_turns", 1), ("max_context", 1), ("retries", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


class Branch:
    """A hypothetical context and the generation that runs on it."""

    def __init__(self, context: Context, turn: int, history: tuple[Exchange, ...], draft: float = 1.0) -> None:
        """``draft``: the probability that the last observation in ``context`` is exact; 1 where it was really seen."""
        self.context = context
        self.turn = turn
        self.history = history
        self.draft = draft
        self.depth = 0
        """How many of the observations in its context are still drafts; 0 once it is committed."""
        self.probability = 1.0
        """That all of those are exact."""
        self.generation = Generation()
        self.step: Step | None = None
        self.error: Exception | None = None
        self.complete = anyio.Event()
        """Set when ``step`` or ``error`` is."""
        self.advanced = anyio.Event()
        """Set, and replaced, whenever ``depth`` falls."""
        self.generating: list[Interval] = []
        self.requested_at = 0.0
        """When the latest request got its seat."""
        self.first_token_seconds = 0.0
        """From a request to the first token of all."""
        self.request_seconds = 0.0
        """All requests that ran in those intervals, summed over them."""
        self.asked_at: float | None = None
        """When the predictor was asked about ``step``."""
        self.predictor_failed = False
        self.predictor_returned = False
        self.drafts: dict[Tokens, DraftRecord] = {}
        """By what they render to."""
        self.held: dict[Tokens, Draft] = {}
        """Those that the gate holds back."""
        self.children: dict[Tokens, Branch] = {}
        self.scope = anyio.CancelScope()
        """Contains all that runs for this branch, but for the predictor's preparation, which ends before."""
        self.preparation = anyio.CancelScope()
        self._request_scope = anyio.CancelScope()

    @property
    def rank(self) -> tuple[float, float]:
        """For the budget: committed branches first, then the likeliest."""
        return (self.depth, -self.probability)

    @property
    def leaving(self) -> bool:
        return self._request_scope.cancel_called or self.scope.cancel_called

    def suspend(self) -> None:
        """Aborts the request in flight. What it emitted stays, and the next request resumes from it."""
        self._request_scope.cancel()

    def request_scope(self) -> anyio.CancelScope:
        """A fresh scope for one request, which `suspend` cancels."""
        self._request_scope = anyio.CancelScope()
        return self._request_scope

    def emit(self, chunk: Chunk) -> None:
        """Takes tokens from the policy, which may be late: a request that was aborted has nothing more to say."""
        if self.leaving:
            return
        if not self.generation.tokens:
            self.first_token_seconds = anyio.current_time() - self.requested_at
        self.generation = Generation(
            self.generation.tokens + chunk.tokens,
            self.generation.logprobs + chunk.logprobs,
            self.generation.weight_versions + (chunk.weight_version,) * len(chunk.tokens),
        )

    def above(self) -> Iterator[Branch]:
        """This branch and every one that stands on it."""
        yield self
        for child in self.children.values():
            yield from child.above()


class Speculator:
    """Runs rollouts of one policy, speculating on what their tools will print. Safe to share between rollouts."""

    def __init__(
        self,
        policy: Policy,
        chat: Chat,
        predictor: Predictor | None = None,
        settings: Settings | None = None,
        seats: Seats | None = None,
    ) -> None:
        """``seats``: those of the policy server, where it has few; unlimited otherwise."""
        self.policy = policy
        self.chat = chat
        self.predictor = predictor
        self.settings = settings or Settings()
        self.seats = seats or Seats()

    @asynccontextmanager
    async def rollout(self, instruction: str, *, seed: int = 0, task: str = "") -> AsyncIterator[Rollout]:
        """One rollout around tool calls of your own. Whatever it started has ended when the block has.

            async with speculator.rollout(instruction, seed=7) as rollout:
                while action := await rollout.act():
                    rollout.observe(Observation(await my_tool(action.command)))

        ``task`` is the key under which predictors remember; the instruction where it is empty.
        """
        async with background() as branches:
            yield Rollout(self, branches, instruction, seed, task or instruction)


class Rollout:
    """One rollout: a committed branch, and the branches that stand on it. Made by `Speculator.rollout`."""

    def __init__(self, speculator: Speculator, tasks: TaskGroup, instruction: str, seed: int, task: str) -> None:
        self._policy = speculator.policy
        self._chat = speculator.chat
        self._predictor = speculator.predictor
        self._settings = speculator.settings
        self._seats = speculator.seats
        self._tasks = tasks
        self._instruction = instruction
        self._seed = seed
        self._task = task
        self._began = anyio.current_time()
        self._executing_since: float | None = None
        self._turns: list[Turn] = []
        self.end: End | None = None
        """Why the rollout ended; None while it runs."""
        prompt = Context.of(self._chat.start(instruction))
        if self._token_budget(prompt) < 1:
            raise InputError(f"the task's prompt takes {prompt.length} tokens: raise max_context above that")
        self._committed = Branch(prompt, 0, ())
        self._start(self._committed)

    # The loop that a caller sees: act, execute, observe.

    async def act(self) -> Action | None:
        """The policy's next action, on whose observation speculation has then begun; None when the rollout has ended.

        Raises what the policy raised, after retries where it was a PolicyError.
        """
        if self._executing_since is not None:
            raise RuntimeError("act() was called twice without observe() between: give the last action's observation")
        while self.end is None:
            branch = self._committed
            await branch.complete.wait()
            match branch.step:
                case Action() as action:
                    self._executing_since = anyio.current_time()
                    return action
                case Malformed(reply):
                    self._settle(Observation(reply), executing=None)
                case Done():
                    self._finish("done")
                case None:
                    raise branch.error or RuntimeError("a branch completed with neither a step nor an error")
        return None

    def observe(self, observation: Observation) -> None:
        """What the action's execution printed. The branch whose draft said so is kept, every other is discarded."""
        if self._executing_since is None:
            raise RuntimeError("observe() was called without an action: call act() first")
        if not isinstance(observation, Observation) or not isinstance(observation.text, str):
            raise TypeError(f"observe() takes an Observation of text, not {observation!r:.200}")
        executing = self._interval(self._executing_since)
        self._executing_since = None
        branch = self._committed
        if self._predictor is not None and isinstance(branch.step, Action):
            # A predictor's failure never fails a rollout; what it did not learn, it will predict wrongly.
            with suppress(Exception):
                self._predictor.learn(self._query(branch, branch.step), observation)
        self._settle(observation, executing)

    @property
    def context(self) -> Context:
        """What the policy has seen and written, up to the last complete generation."""
        branch = self._committed
        if branch.generation.finish is None:
            return branch.context
        return branch.context.sampled(branch.generation.tokens, branch.generation.logprobs)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns settled so far, each with the seconds that were hidden under its tool."""
        kept = [interval for turn in self._turns for interval in turn.generating]
        if self.end is None:
            kept += self._committed.generating
        return tuple(_with_hidden_seconds(turn, kept) for turn in self._turns)

    # Committing and discarding.

    def _settle(self, observation: Observation, executing: Interval | None) -> None:
        parent = self._committed
        rendered = self._chat.observe(parent.generation, observation.text)
        kept = parent.children.pop(rendered, None)
        wasted = sum(len(branch.generation.tokens) for child in parent.children.values() for branch in child.above())
        parent.scope.cancel()
        for child in parent.children.values():
            for branch in child.above():
                branch.scope.cancel()
        self._turns.append(self._turn(parent, observation, executing, rendered, kept is not None, wasted))
        self._settings.gate.learn(self._turns[-1])
        if parent.turn + 1 >= self._settings.max_turns:
            self.end = "turns"
        elif self._token_budget(extended := self._extend(parent, rendered)) < 1:
            self.end = "length"
        else:
            if kept is None:
                kept = Branch(extended, parent.turn + 1, _history(parent, observation.text))
                self._start(kept)
            self._commit(kept)

    def _commit(self, branch: Branch) -> None:
        """Everything on the branch comes one observation closer to what is known, and may now look further ahead."""
        self._committed = branch
        branch.draft = branch.probability = 1.0
        self._place(branch)
        self._seats.reconsider()

    def _place(self, branch: Branch) -> None:
        """Tells a branch and all above it where they stand now."""
        for other in branch.above():
            other.depth = other.turn - self._committed.turn
            other.advanced.set()
            other.advanced = anyio.Event()
            for child in other.children.values():
                child.probability = other.probability * child.draft

    def _finish(self, end: End) -> None:
        self._turns.append(self._turn(self._committed))
        self.end = end

    def _turn(
        self,
        branch: Branch,
        observation: Observation | None = None,
        executing: Interval | None = None,
        rendered: Tokens = (),
        hit: bool = False,
        wasted: int = 0,
    ) -> Turn:
        """The record of a branch whose observation is known now, or, without one, of the rollout's last branch."""
        assert branch.step is not None
        seconds = sum(interval.seconds for interval in branch.generating)
        drafts = tuple(replace(record, exact=tokens == rendered) for tokens, record in branch.drafts.items())
        return Turn(
            generation=branch.generation,
            step=branch.step,
            observation=observation,
            generating=tuple(branch.generating),
            executing=executing,
            outcome="hit" if hit and executing else self._outcome(branch, drafts),
            drafts=drafts,
            wasted_tokens=wasted,
            running=branch.request_seconds / seconds if seconds else 0.0,
            first_token_seconds=branch.first_token_seconds,
        )

    def _outcome(self, branch: Branch, drafts: tuple[DraftRecord, ...]) -> Outcome:
        """How speculation on a branch's observation ended where it was not a hit."""
        if not self._speculates(branch):
            return "off"
        if any(draft.admitted for draft in drafts):
            return "miss"
        if drafts:
            return "gated"
        if branch.predictor_failed:
            return "failed"
        return "off" if branch.predictor_returned else "late"

    def _speculates(self, branch: Branch) -> bool:
        """Whether the observation of the branch's action is to be predicted, once the branch is near enough."""
        return isinstance(branch.step, Action) and self._predictor is not None and self._may_speculate(branch)

    def _may_speculate(self, branch: Branch) -> bool:
        """Whether anything may follow the branch's observation before it is known."""
        return self._settings.depth > 0 and branch.turn + 1 < self._settings.max_turns

    # One branch: it generates, then drafts; each draft that is worth it becomes a child, which does the same.

    def _start(self, branch: Branch) -> None:
        self._tasks.start_soon(self._grow, branch)

    async def _grow(self, branch: Branch) -> None:
        with branch.scope:
            if self._predictor is not None and self._may_speculate(branch):
                self._tasks.start_soon(self._prepare, branch, self._predictor)
            try:
                finish = await self._generate(branch)
                branch.generation = replace(branch.generation, finish=finish)
                branch.step = self._chat.parse(branch.generation)
            except Exception as error:
                branch.error = error
            finally:
                branch.preparation.cancel()
            branch.complete.set()
            await _until_depth(branch, below=self._settings.depth)
            if branch.turn + 1 < self._settings.max_turns:
                await self._draft(branch)

    async def _generate(self, branch: Branch) -> Finish:
        """Generates until the branch's generation is complete, through suspensions and failures that may pass."""
        failures = 0
        while True:
            try:
                finish = self._finish_of(branch) or await self._request(branch)
            except Exception as error:
                if branch.depth > 0:
                    # Nobody needs this branch yet. If it is committed, the request is made again, from its tokens.
                    await _until_depth(branch, below=1)
                    continue
                failures += 1
                if failures > self._settings.retries or not isinstance(error, PolicyError):
                    raise
                await anyio.sleep(self._settings.backoff * 2 ** (failures - 1))
            else:
                if finish is not None:
                    return finish

    async def _request(self, branch: Branch) -> Finish | None:
        """One request, on a seat of its own. None where it was suspended."""
        with branch.request_scope():
            async with self._seats.seat(branch):
                request = Request(
                    context=branch.context,
                    sampling=self._settings.sampling,
                    max_tokens=self._token_budget(branch.context),
                    stop=self._chat.stop,
                    seed=self._seed,
                    turn=branch.turn,
                    resume=branch.generation,
                    priority=branch.depth,
                    rollout=f"{self._task}#{self._seed}",
                )
                branch.requested_at, request_seconds = anyio.current_time(), self._seats.request_seconds()
                try:
                    finish = await self._policy.generate(request, branch.emit)
                finally:
                    branch.generating.append(self._interval(branch.requested_at))
                    branch.request_seconds += self._seats.request_seconds() - request_seconds
                if (written := len(branch.generation.tokens)) > request.max_tokens:
                    raise ValueError(f"the policy wrote {written} tokens where max_tokens was {request.max_tokens}")
                if finish not in ("stop", "length"):
                    raise ValueError(f"the policy returned {finish!r} where it must be 'stop' or 'length'")
                return finish
        return None

    async def _prepare(self, branch: Branch, predictor: Predictor) -> None:
        """While the policy writes a command, the predictor may read what came before it."""
        with branch.preparation, suppress(Exception):
            await _until_depth(branch, below=self._settings.depth)
            await predictor.prepare(self._query(branch, Action("")))

    async def _draft(self, branch: Branch) -> None:
        match branch.step:
            case Malformed(reply):  # What it will read is known without executing anything.
                self._consider(branch, Draft(reply, 1.0))
            case Action() as action if self._predictor is not None:
                branch.asked_at = anyio.current_time()
                try:
                    await self._predictor.predict(
                        self._query(branch, action), lambda draft: self._consider(branch, draft)
                    )
                    branch.predictor_returned = True
                except Exception:
                    branch.predictor_failed = True
        await self._reconsider(branch)

    async def _reconsider(self, branch: Branch) -> None:
        """What was not worth a branch may become so: the longer a tool has run, the longer it is likely to go on."""
        pause = _FIRST_PAUSE
        while branch.held and pause < _LAST_PAUSE:
            with anyio.move_on_after(pause) as waiting:
                await branch.advanced.wait()
            pause = 2 * pause if waiting.cancelled_caught else _FIRST_PAUSE
            for draft in tuple(branch.held.values()):
                self._consider(branch, draft)

    def _consider(self, parent: Branch, draft: Draft) -> None:
        """Grows a child on a draft, if the draft is usable, new, and worth a branch.

        A predictor may propose a draft again, with another probability: one that the gate held back may then pass.
        """
        if parent.scope.cancel_called:
            return
        try:
            _check(draft)
            rendered = self._chat.observe(parent.generation, draft.text)
        except Exception:  # What the tokenizer cannot read is not an observation either.
            parent.predictor_failed = True
            return
        if rendered in parent.children:
            return
        probability = 1.0  # Of what is observed where nothing is executed.
        if isinstance(parent.step, Action):
            elapsed = self._elapsed() if parent is self._committed else 0.0
            probability = self._settings.gate.probability(draft, parent.step.command, elapsed)
        child = Branch(self._extend(parent, rendered), parent.turn + 1, _history(parent, draft.text), probability)
        possible = len(parent.children) < self._settings.breadth and self._token_budget(child.context) >= 1
        admitted = possible and self._settings.gate.admits(self._bet(parent, child))
        self._record(parent, rendered, draft, admitted)
        if admitted:
            parent.held.pop(rendered, None)
            parent.children[rendered] = child
            self._place(parent)
            self._start(child)
        elif possible:
            parent.held[rendered] = draft

    def _bet(self, parent: Branch, child: Branch) -> Bet:
        return Bet(
            probability=parent.probability * child.draft,
            commands=tuple(exchange.command for exchange in child.history[len(self._committed.history) :]),
            elapsed=self._elapsed(),
            running=self._seats.running,
            seats=self._seats.count,
        )

    def _elapsed(self) -> float:
        """Seconds that the committed branch's action has been executing."""
        return 0.0 if self._executing_since is None else anyio.current_time() - self._executing_since

    def _record(self, parent: Branch, rendered: Tokens, draft: Draft, admitted: bool) -> None:
        """A draft that is proposed again keeps the moment when it first came."""
        before = parent.drafts.get(rendered)
        if before is not None:
            seconds = before.seconds
        else:
            seconds = 0.0 if parent.asked_at is None else anyio.current_time() - parent.asked_at
        parent.drafts[rendered] = DraftRecord(
            draft.predictor, draft.probability, seconds, admitted, exact=False, if_timed_out=draft.if_timed_out
        )

    # What a branch stands on.

    def _token_budget(self, context: Context) -> int:
        """Most tokens of a generation that continues ``context``; the same on a branch as in a sequential rollout."""
        return min(self._settings.sampling.max_tokens, self._settings.max_context - context.length)

    def _finish_of(self, branch: Branch) -> Finish | None:
        """Whether the tokens alone show that the generation is over: it may have been suspended just then."""
        return finish_of(branch.generation.tokens, self._chat.stop, self._token_budget(branch.context))

    def _extend(self, branch: Branch, rendered: Tokens) -> Context:
        generation = branch.generation
        return branch.context.sampled(generation.tokens, generation.logprobs).given(rendered)

    def _query(self, branch: Branch, action: Action) -> Query:
        return Query(self._task, self._instruction, branch.history, action.command)

    def _interval(self, began: float) -> Interval:
        return Interval(began - self._began, anyio.current_time() - self._began)


async def _until_depth(branch: Branch, below: int) -> None:
    while branch.depth >= below:
        await branch.advanced.wait()


def _history(branch: Branch, observation: str) -> tuple[Exchange, ...]:
    """What a predictor is told of a branch's past once ``observation`` has followed: executed commands only."""
    if isinstance(branch.step, Action):
        return (*branch.history, Exchange(branch.step.command, observation))
    return branch.history


def _check(draft: Draft) -> None:
    """Raises where a draft cannot be an observation: predictors may be anything."""
    if len(draft.text) > LONGEST_DRAFT:
        raise ValueError(f"a draft of {len(draft.text)} characters")
    draft.text.encode()  # Not text, or lone surrogates.
    if not 0.0 <= draft.probability <= 1.0:  # Also false for NaN.
        raise ValueError(f"a draft of probability {draft.probability}")


def _with_hidden_seconds(turn: Turn, kept: Iterable[Interval]) -> Turn:
    """``kept``: when the policy worked on generations that were kept, in the order of their turns, none overlapping."""
    if turn.executing is None:
        return turn
    start, end = turn.executing.start, turn.executing.end
    hidden = sum(max(0.0, min(end, work.end) - max(start, work.start)) for work in kept)
    return replace(turn, hidden_seconds=hidden)
