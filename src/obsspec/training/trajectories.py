"""From expert runs in the sandbox to the rows that a policy and a world model are trained on.

A row holds exactly the tokens that a rollout, or the predictor, would put before the model, piece by piece, so that
nothing is learned on other tokens than those it will see. Its labels say which of them are learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from obsspec.chat import ChatFormat, TerminalChat, WorldModelChat
from obsspec.context import Tokens
from obsspec.lines import LineFile
from obsspec.predictors.language_model import Limits, Prompts
from obsspec.rollout import for_each
from obsspec.tasks import Instance
from obsspec.types import Exchange, Generation, OpenEnvironment, Query

Role = Literal["policy", "world_model"]
"""What an adapter makes of the base model: it writes commands, or what they print."""


_MOST_CHARACTERS = 64
"""In a token, on average: text that is longer than that is certainly too long to be drafted."""


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """What an expert did on a task and what it saw, from the instruction to the solution."""

    task: str
    """The task's id."""
    family: str
    level: str
    instruction: str
    exchanges: tuple[Exchange, ...]
    mistakes: tuple[bool, ...]
    """For each exchange, whether its command is a slip that a later one corrects."""

    def __post_init__(self) -> None:
        if len(self.mistakes) != len(self.exchanges):
            raise ValueError("mistakes and exchanges must have the same length")


_RUN = TypeAdapter(ExpertRun)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of a row that are learned: a whole command, or a whole observation and its end."""

    start: int
    end: int
    """Of the token after the last."""
    weight: float = 1.0
    """How much the loss of each of its tokens counts."""
    place: int = 0
    """Which of the run's steps it is, from 0."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to train on. What is in none of its ``spans`` is read but not learned."""

    tokens: Tokens
    spans: tuple[Span, ...]

    def cut(self, length: int) -> Row:
        """At most the first ``length`` tokens, and the spans that are whole in them."""
        return Row(self.tokens[:length], tuple(span for span in self.spans if span.end <= length))


async def collect(
    instances: Iterable[Instance],
    file: Path,
    open_environment: OpenEnvironment,
    concurrency: int = 6,
    finished: Callable[[], None] = lambda: None,
) -> list[str]:
    """Runs each instance's expert that has no line in ``file`` yet, and appends those that solved their task.

    A line is written whole and synced; a crash loses at most the runs in flight, and the same call goes on.
    ``finished`` is called after each instance, for progress. Returns the ids of the tasks that stayed unsolved.
    """
    unsolved: list[str] = []
    with _runs(file).writing() as (runs, append):
        done = {run.task for run in runs}

        async def work(instance: Instance) -> None:
            if instance.task.id not in done:
                run, reward = await _run_expert(instance, open_environment)
                if reward == 1:
                    append(run)
                else:
                    unsolved.append(instance.task.id)
            finished()

        await for_each(instances, work, concurrency)
    return unsolved


def read_runs(file: Path) -> list[ExpertRun]:
    """The runs that ``collect`` wrote. Raises InputError for anything else."""
    return _runs(file).read()


def is_expert_runs(file: Path) -> bool:
    """Whether a file begins as those that ``collect`` wrote, and as no log of an agent does."""
    with file.open("rb") as stream:
        first = stream.readline()
    try:
        _RUN.validate_json(first)
    except ValidationError:
        return False
    return True


def _runs(file: Path) -> LineFile[ExpertRun]:
    return LineFile(file, _RUN, "task", "`obsspec warmstart --runs`", "with the same command")


def rows(role: Role, run: ExpertRun, chat_format: ChatFormat) -> list[Row]:
    """What one run teaches."""
    if role == "policy":
        return [policy_row(run, TerminalChat(chat_format))]
    return world_model_rows(
        run.instruction, run.exchanges, [1.0] * len(run.exchanges), WorldModelChat(chat_format), Limits()
    )


def policy_row(run: ExpertRun, chat: TerminalChat) -> Row:
    """The whole run as its policy sees it. Learned are the commands that are no mistakes, and the final ``done``."""
    pieces = _Pieces(chat.start(run.instruction))
    for turn, (exchange, mistake) in enumerate(zip(run.exchanges, run.mistakes, strict=True)):
        action = chat.action_tokens(exchange.command)
        pieces.add(action, 0.0 if mistake else 1.0, turn)
        pieces.add(chat.observe(Generation(action, finish="stop"), exchange.observation))
    pieces.add(chat.done_tokens(), 1.0, len(run.exchanges))
    return pieces.row()


def world_model_rows(
    instruction: str,
    exchanges: Sequence[Exchange],
    weights: Sequence[float],
    chat: WorldModelChat,
    limits: Limits,
) -> list[Row]:
    """Every prompt that the predictor makes of a rollout, with its answer. Learned are the answers.

    ``weights``: one for each exchange, how much its answer counts; 0 for what is only read. Prompts that continue one
    another share a row, so a rollout is one row unless its prompts start again. An answer that the predictor would give
    up as too long is not learned.
    """
    prompts = Prompts(chat, limits)
    finished: list[_Pieces] = []
    current = _Pieces()
    for turn, (exchange, weight) in enumerate(zip(exchanges, weights, strict=True)):
        context = prompts.of(Query("", instruction, tuple(exchanges[:turn]), exchange.command))
        if context is None:
            continue
        prompt = context.tokens
        if prompt[: len(current.tokens)] != tuple(current.tokens):
            finished.append(current)
            current = _Pieces()
        current.add(prompt[len(current.tokens) :])
        if len(exchange.observation) > _MOST_CHARACTERS * limits.draft_tokens:
            continue  # Not to be encoded in vain.
        answer = chat.answer(exchange.observation)
        if len(answer) <= limits.draft_tokens:
            current.add(answer, weight, turn)
    rows = [pieces.row() for pieces in (*finished, current)]
    return [row for row in rows if row.spans]


class _Pieces:
    """A row while it grows."""

    def __init__(self, opening: Tokens = ()) -> None:
        self.tokens = list(opening)
        self._spans: list[Span] = []

    def add(self, tokens: Tokens, weight: float = 0.0, place: int = 0) -> None:
        start = len(self.tokens)
        self.tokens += tokens
        if weight:
            self._spans.append(Span(start, len(self.tokens), weight, place))

    def row(self) -> Row:
        """Up to the end of the last span: what follows it teaches nothing."""
        end = self._spans[-1].end if self._spans else 0
        return Row(tuple(self.tokens[:end]), tuple(self._spans))


async def _run_expert(instance: Instance, open_environment: OpenEnvironment) -> tuple[ExpertRun, float]:
    task, steps = instance.task, instance.expert
    async with open_environment(task) as environment:
        exchanges = [Exchange(step.command, (await environment.execute(step.command)).text) for step in steps]
        reward = await environment.score()
    mistakes = tuple(step.mistake for step in steps)
    return ExpertRun(task.id, task.family, task.level, task.instruction, tuple(exchanges), mistakes), reward
