"""Observations that need no model: silent commands, files that the rollout wrote or saw, echo, pwd, repeats, programs
that are missing, files restored from git, scripts that edit a file and say so.

The rules are few and conservative. Each counts how often it is right, by program, and proposes only while that rate
is above a floor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from obsspec.predictors.harness import SANDBOX, Harness
from obsspec.predictors.prefixes import Prefixes
from obsspec.predictors.session import Session
from obsspec.rates import Rate
from obsspec.shell import effect, parse
from obsspec.types import Draft, Observation, Query

PRIORS: Mapping[str, float] = {
    "silent": 0.95,
    "redirected": 0.95,
    "echo": 0.95,
    "pwd": 0.95,
    "restored": 0.9,
    "script": 0.85,
    "shown": 0.95,
    "shown before a run": 0.85,
    "missing": 0.95,
    "written": 0.95,
    "written before a run": 0.95,
    "repeat": 0.95,
    "repeat after a run": 0.9,
    "rerun": 0.9,
}
"""Where each rule's rate starts, before anything is counted.

Rounded down from the rates of a capable agent on SWE-bench Verified (``benchmarks/predictors.py``). There, echo and pwd
were too rare to measure. Silent commands of weak agents fail far more often, and the counts soon say so."""

_RULE_WEIGHT = 20.0
_PROGRAM_WEIGHT = 4.0


@dataclass(frozen=True, slots=True)
class Guess:
    """An observation, the rule that gives it, and the program that the rule's rate is counted for."""

    text: str
    rule: str
    program: str


class Rules:
    """A ``types.Predictor`` that proposes one draft or none, in well under a millisecond.

    A draft's probability is the rate of its rule for its program: hits over attempts, both counted by ``learn``,
    smoothed towards the rate of the rule for all programs, and that towards its prior. A command of several parts
    has the rule of its least certain part. A rule whose rate is below ``floor`` proposes nothing, goes on counting,
    and may recover.
    """

    def __init__(self, harness: Harness = SANDBOX, floor: float = 0.8) -> None:
        self._harness = harness
        self._floor = floor
        self.rates: defaultdict[tuple[str, str], Rate] = defaultdict(Rate)
        """By rule and program; the program ``""`` stands for all of a rule's."""
        self._sessions: Prefixes[Session] = Prefixes(
            lambda _: Session(), lambda session, exchange: session.then(exchange, harness)
        )

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        guess = self.guess(query)
        if guess and (probability := self.probability(guess.rule, guess.program)) >= self._floor:
            propose(Draft(guess.text, probability, "rules"))

    async def prepare(self, query: Query) -> None:
        """Nothing: it is quick."""

    def learn(self, query: Query, observation: Observation) -> None:
        guess = self.guess(query)
        if guess:
            exact = guess.text == observation.text
            self.rates[guess.rule, ""].count(exact)
            self.rates[guess.rule, guess.program].count(exact)

    def probability(self, rule: str, program: str) -> float:
        """How likely a guess of this rule is exact, by what was counted so far."""
        of_rule = self.rates.get((rule, ""), Rate()).estimate(PRIORS[rule], _RULE_WEIGHT)
        return self.rates.get((rule, program), Rate()).estimate(of_rule, _PROGRAM_WEIGHT)

    def guess(self, query: Query) -> Guess | None:
        """What the rules say, however sure they are."""
        return self._repeated(query) or self._computed(query)

    def _repeated(self, query: Query) -> Guess | None:
        """The same command was observed before, and nothing was written since."""
        own = effect(query.command)
        if own == "writes" or (own == "moves" and self._harness.keeps_directory):
            return None
        rule = "rerun" if own == "unknown" else "repeat"
        for exchange in reversed(query.history):
            if exchange.command == query.command:
                simples = parse(query.command)
                return Guess(exchange.observation, rule, simples[0].name if simples else "")
            between = effect(exchange.command)
            if between == "writes" or (between == "moves" and self._harness.keeps_directory):
                return None
            if between == "unknown":
                if own == "unknown":
                    return None
                rule = "repeat after a run"
        return None

    def _computed(self, query: Query) -> Guess | None:
        """Its program is known not to be there, or every part of it to print something certain, or nothing."""
        session = self._sessions.after(query)
        if missing := session.says_missing(query.command):
            return Guess(missing, "missing", "")
        parts = session.copy().run(query.command)
        output = "".join(part.output for part in parts or ())
        if not parts or len(output) > self._harness.limit:
            return None
        weakest = min(parts, key=lambda part: self.probability(part.rule, part.program))
        text = self._harness.render(output)
        if not output and any(each.command == query.command and each.observation != text for each in query.history):
            return None  # it should have been silent, and was not
        return Guess(text, weakest.rule, weakest.program)
