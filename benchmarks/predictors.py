"""How often predictors that need no model are exact, on logs of real agents, and how honest their probabilities are.

    python benchmarks/predictors.py LOG.jsonl.gz ... [--json FILE]

A log has one JSON object a line, a step each, in order: ``task``, ``command``, ``output``, and where there are several
trajectories of a task, ``trial``; where exit codes were shown, ``returncode``. Every step is predicted from what came
before it in the log, and then learnt from. An observation is the output as ObsSpec's sandbox renders it; exact means
equal text.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from obsspec.analysis.formats import Log, read_log
from obsspec.analysis.prediction import Prediction, predict, predictors
from obsspec.predictors import Memory, Rules
from obsspec.rates import Rate
from obsspec.types import Draft, Observation, Predictor, Query

BINS = 10


@dataclass
class Score:
    """What a predictor did over one log."""

    steps: int = 0
    attempted: Rate = field(default_factory=Rate)
    """Best drafts of a probability of at least one half, and those of them that were exact."""
    any_exact: int = 0
    """Steps where one of the drafts was exact, however unlikely."""
    squared_error: float = 0.0
    bins: list[Rate] = field(default_factory=lambda: [Rate() for _ in range(BINS)])
    """All drafts, by tenths of their probability."""
    probability: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Sum of the probabilities in each bin."""
    seconds: float = 0.0
    """CPU time of all predictions."""

    def count(self, prediction: Prediction) -> None:
        self.steps += 1
        self.seconds += prediction.seconds
        self.any_exact += any(guess.exact for guess in prediction.guesses)
        if prediction.attempted:
            self.attempted.count(prediction.exact)
        for guess in prediction.guesses:
            number = min(int(guess.probability * BINS), BINS - 1)
            self.bins[number].count(guess.exact)
            self.probability[number] += guess.probability
            self.squared_error += (guess.probability - guess.exact) ** 2

    def figures(self) -> dict[str, Any]:
        drafts = sum(rate.attempts for rate in self.bins)
        return {
            "steps": self.steps,
            "attempted": self.attempted.attempts,
            "exact": self.attempted.hits,
            "wrong": self.attempted.attempts - self.attempted.hits,
            "exact_of_all": self.attempted.hits / self.steps,
            "exact_of_attempted": share(self.attempted),
            "any_draft_exact_of_all": self.any_exact / self.steps,
            "drafts": drafts,
            "brier": self.squared_error / drafts if drafts else None,
            "calibration": [
                {"drafts": rate.attempts, "probability": total / rate.attempts, "exact": share(rate)}
                for rate, total in zip(self.bins, self.probability, strict=True)
                if rate.attempts
            ],
            "cpu_microseconds": 1e6 * self.seconds / self.steps,
        }


def share(rate: Rate) -> float | None:
    return rate.hits / rate.attempts if rate.attempts else None


class LearnsLate:
    """Learns from a rollout only when the next one begins, so that only earlier ones help."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._unlearnt: list[tuple[Query, Observation]] = []

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        if not query.history:
            for each in self._unlearnt:
                self._predictor.learn(*each)
            self._unlearnt.clear()
        await self._predictor.predict(query, propose)

    async def prepare(self, query: Query) -> None:
        await self._predictor.prepare(query)

    def learn(self, query: Query, observation: Observation) -> None:
        self._unlearnt.append((query, observation))


def executed(file: Path) -> Log:
    """A log without the steps that executed nothing: InterCode's ``submit`` ends a rollout."""
    log = read_log(file)
    steps = [tuple(step for step in rollout.steps if step.command != "submit") for rollout in log.rollouts]
    rollouts = [replace(rollout, steps=left) for rollout, left in zip(log.rollouts, steps, strict=True)]
    return replace(log, rollouts=rollouts)


def score(log: Log, predictor: Predictor) -> Score:
    result = Score()
    for prediction in predict(log, predictor, lambda: None):
        result.count(prediction)
    return result


def measure(file: Path) -> dict[str, Any]:
    log = executed(file)
    asked = predictors(log)
    rules, memory = asked["rules"], asked["memory"]
    assert isinstance(rules, Rules) and isinstance(memory, Memory)
    scores = {
        "rules": score(log, rules),
        "memory": score(log, memory),
        "memory, earlier trajectories": score(log, LearnsLate(Memory())),
        "cascade": score(log, asked["rules + memory"]),
    }
    by_rule: dict[str, dict[str, int]] = {
        rule: {"attempts": rate.attempts, "exact": rate.hits}
        for (rule, program), rate in rules.rates.items()
        if not program
    }
    by_level: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (level, rank, kind), rate in memory.rates.items():
        if rank == 0 and kind == "all":
            by_level[level] = {"attempts": rate.attempts, "exact": rate.hits}
    return {
        "log": file.name,
        "predictors": {name: each.figures() for name, each in scores.items()},
        "rules": by_rule,
        "memory levels": dict(by_level),
    }


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=result["log"])
    for heading in (
        "predictor",
        "steps",
        "attempted",
        "exact",
        "wrong",
        "exact/all",
        "exact/attempted",
        "any draft/all",
        "Brier",
        "CPU µs",
    ):
        table.add_column(heading, justify="left" if heading == "predictor" else "right")
    for name, each in result["predictors"].items():
        table.add_row(
            name,
            *(str(each[key]) for key in ("steps", "attempted", "exact", "wrong")),
            *(percent(each[key]) for key in ("exact_of_all", "exact_of_attempted", "any_draft_exact_of_all")),
            "" if each["brier"] is None else f"{each['brier']:.3f}",
            f"{each['cpu_microseconds']:.0f}",
        )
    console.print(table)
    for title in ("rules", "memory levels"):
        table = Table("", "attempts", "exact", "share", title=f"{title}, whatever their probability")
        for name, each in result[title].items():
            table.add_row(name, str(each["attempts"]), str(each["exact"]), percent(each["exact"] / each["attempts"]))
        console.print(table)
    table = Table("predictor", "drafts", "mean probability", "exact", title="calibration")
    for name, each in result["predictors"].items():
        for row in each["calibration"]:
            table.add_row(name, str(row["drafts"]), percent(row["probability"]), percent(row["exact"]))
    console.print(table)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def check(parser: argparse.ArgumentParser, log: Path) -> None:
    """Ends the program with one line where a log is not as described above."""
    number = 0
    try:
        with gzip.open(log, "rt") if log.suffix == ".gz" else log.open() as lines:
            for number, line in enumerate(lines, start=1):
                if missing := {"task", "command", "output"} - json.loads(line).keys():
                    parser.error(f"{log}, line {number}: has no {', '.join(sorted(missing))}; --help describes a log")
    except OSError as error:
        parser.error(f"{log}: {error.strerror or error}; give a log, as --help describes")
    except (ValueError, AttributeError, EOFError):
        parser.error(f"{log}, line {number + 1}: not a JSON object; --help describes a log")
    if not number:
        parser.error(f"{log}: is empty; --help describes a log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    for log in arguments.logs:
        check(parser, log)
    results = [measure(log) for log in arguments.logs]
    console = Console(width=max(Console().width, 120))
    for result in results:
        show(console, result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
