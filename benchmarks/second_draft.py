"""What a second draft of the built-in world model is worth: the likeliest alternative, against one that is sampled.

    python benchmarks/second_draft.py --json second_draft.json

Experts solve held-out tasks in the sandbox, and the world model drafts every observation from the exchanges before it:
greedily; then from where replacing a token by its runner-up is likeliest (as with ``--breadth 2``); and, to compare,
at temperature 1. A draft whose probability falls below ``--floor`` is given up in all of them. Seconds and tokens are
those that the second draft takes after the first, on one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from obsspec.chat import ChatFormat, WorldModelChat
from obsspec.models import BUILTIN_WORLD_MODEL, DEFAULT_MODEL
from obsspec.policies.local import LocalPolicy
from obsspec.policies.networks import load_network
from obsspec.predictors import LanguageModel, Limits, Prompts
from obsspec.reports.tables import counting
from obsspec.tasks import parse_instances
from obsspec.types import Chunk, Draft, Finish, Policy, Query, Request, Sampling
from world_model import Step, play


@dataclass(slots=True)
class Guess:
    """One draft, or the attempt at one."""

    text: str | None = None
    """None where it was given up."""
    probability: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Drafts:
    """What was drafted for one step."""

    first: Guess = field(default_factory=Guess)
    alternative: Guess = field(default_factory=Guess)
    sampled: list[Guess] = field(default_factory=list)


class Measured:
    """A policy that notes what each request took."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    async def generate(self, request: Request, emit: Callable[[Chunk], None]) -> Finish:
        self.tokens.append(0)
        began = time.perf_counter()

        def count(chunk: Chunk) -> None:
            self.tokens[-1] += len(chunk.tokens)
            emit(chunk)

        try:
            return await self._policy.generate(request, count)
        finally:
            self.seconds.append(time.perf_counter() - began)


async def greedy(policy: Policy, chat: WorldModelChat, query: Query, floor: float) -> tuple[Guess, Guess]:
    """The first draft and the alternative, as the product makes them."""
    measured = Measured(policy)
    proposed: dict[int, Draft] = {}

    def propose(draft: Draft) -> None:
        proposed[len(measured.seconds) - 1] = draft

    await LanguageModel(measured, chat, floor=floor, drafts=2).predict(query, propose)
    guesses = [Guess(tokens=t, seconds=s) for t, s in zip(measured.tokens, measured.seconds, strict=True)]
    guesses += [Guess() for _ in range(2 - len(guesses))]
    for place, draft in proposed.items():
        guesses[place] = replace(guesses[place], text=draft.text, probability=draft.probability)
    return guesses[0], guesses[1]


async def sample(policy: Policy, chat: WorldModelChat, query: Query, floor: float, seed: int) -> Guess:
    """A draft at temperature 1, given up below the floor like the others."""
    limits = Limits()
    context = Prompts(chat, limits).of(query)
    if context is None:
        return Guess()
    measured = Measured(policy)
    tokens: list[int] = []
    logprob = 0.0
    finish: Finish | None = None
    sampling = Sampling(temperature=1.0, max_tokens=limits.draft_tokens)
    asked = Request(context, sampling, limits.draft_tokens, chat.stop, seed, len(query.history))
    with anyio.CancelScope() as likely_enough:

        def emit(chunk: Chunk) -> None:
            nonlocal logprob
            tokens.extend(chunk.tokens)
            logprob += sum(chunk.logprobs)
            if logprob < math.log(floor):
                likely_enough.cancel()

        finish = await measured.generate(asked, emit)
    guess = Guess(tokens=len(tokens), seconds=measured.seconds[0])
    if finish == "stop" and logprob >= math.log(floor):
        guess = replace(guess, text=chat.text(tuple(tokens)), probability=math.exp(min(0.0, logprob)))
    return guess


async def draft(
    policy: Policy, chat: WorldModelChat, steps: Sequence[Step], floor: float, samples: int, advance: Callable[[], None]
) -> list[Drafts]:
    drafts = []
    for step in steps:
        first, alternative = await greedy(policy, chat, step.query, floor)
        sampled = [await sample(policy, chat, step.query, floor, seed) for seed in range(samples)]
        drafts.append(Drafts(first, alternative, sampled))
        advance()
    return drafts


def row(name: str, steps: Sequence[Step], drafts: Sequence[Drafts], second: Callable[[Drafts], Guess | None]) -> dict:
    """Of one way to make a second draft, over all steps; ``second`` is None for the first draft alone."""
    firsts = [each.first for each in drafts]
    seconds = [second(each) for each in drafts]
    texts = [step.observation.text for step in steps]
    slow = [step.observation.seconds >= 0.5 for step in steps]
    rights = [
        first.text == text or (guess is not None and guess.text == text)
        for first, guess, text in zip(firsts, seconds, texts, strict=True)
    ]
    new = [
        guess
        for first, guess in zip(firsts, seconds, strict=True)
        if guess is not None and guess.text is not None and guess.text != first.text
    ]
    written = [guess for guess in seconds if guess is not None]
    return {
        "drafts": name,
        "steps": len(steps),
        "exact": sum(rights),
        "slow_steps": sum(slow),
        "slow_exact": sum(right and is_slow for right, is_slow in zip(rights, slow, strict=True)),
        "second_drafts": len(new),
        "second_probability": statistics.fmean(guess.probability for guess in new) if new else 0.0,
        "second_tokens": sum(guess.tokens for guess in written) / len(steps),
        "second_seconds": sum(guess.seconds for guess in written) / len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="generated:all/easy/0")
    parser.add_argument("--floor", type=float, default=0.1, help="least probability of a draft")
    parser.add_argument("--samples", type=int, default=3, help="draws at temperature 1, each a second draft of its own")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    network, tokenizer = load_network(DEFAULT_MODEL, BUILTIN_WORLD_MODEL)
    policy, chat = LocalPolicy(network), WorldModelChat(ChatFormat(tokenizer))

    steps = anyio.run(play, parse_instances(arguments.tasks))
    with counting(Console(stderr=True), "steps", len(steps)) as advance:
        drafts = anyio.run(draft, policy, chat, steps, arguments.floor, arguments.samples, advance)
    rows = [
        row("first alone", steps, drafts, lambda each: None),
        row("first, likeliest alternative", steps, drafts, lambda each: each.alternative),
        *(
            row(f"first, sampled with seed {seed}", steps, drafts, lambda each, seed=seed: each.sampled[seed])
            for seed in range(arguments.samples)
        ),
    ]
    headings = ("drafts", "exact", "from 0.5 s", "second drafts", "probability", "tokens", "seconds")
    table = Table(*headings, title=f"Exact by any draft, {arguments.tasks}, floor {arguments.floor}")
    for each in rows:
        table.add_row(
            each["drafts"],
            f"{each['exact']} of {each['steps']} ({each['exact'] / each['steps']:.1%})",
            f"{each['slow_exact']} of {each['slow_steps']}",
            str(each["second_drafts"]),
            f"{each['second_probability']:.2f}",
            f"{each['second_tokens']:.1f}",
            f"{each['second_seconds']:.2f}",
        )
    Console(width=120).print(table)
    if arguments.json:
        settings = {"tasks": arguments.tasks, "floor": arguments.floor}
        guesses = [
            {"family": step.family, "command": step.query.command, "observation": step.observation.text} | asdict(each)
            for step, each in zip(steps, drafts, strict=True)
        ]
        arguments.json.write_text(json.dumps(settings | {"rows": rows, "steps": guesses}, indent=2) + "\n")


if __name__ == "__main__":
    main()
