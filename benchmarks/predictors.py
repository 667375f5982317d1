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
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table

from obsspec.predictors import SANDBOX, Cascade, Memory, Rules
from obsspec.rates import Rate
from obsspec.types import Draft, Exchange, Observation, Predictor, Query

LIKELY = 0.5
"""A step counts as attempted where the best draft has at least this probability."""
BINS = 10


@dataclass
class Score:
    """What a predictor did over one log."""

    steps: int = 0
    attempted: Rate = field(default_factory=Rate)
    """Best drafts of at least LIKELY, and those of them that were exact."""
    any_exact: int = 0
    """Steps where one of the drafts was exact, however unlikely."""
    squared_error: float = 0.0
    bins: list[Rate] = field(default_factory=lambda: [Rate() for _ in range(BINS)])
    """All drafts, by tenths of their probability."""
    probability: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Sum of the probabilities in each bin."""
    seconds: float = 0.0
    """CPU time of all predictions."""

    def count(self, drafts: list[Draft], observed: str, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.any_exact += any(draft.text == observed for draft in drafts)
        best = max(drafts, key=lambda draft: draft.probability, default=None)
        if best and best.probability >= LIKELY:
            self.attempted.count(best.text == observed)
        for draft in drafts:
            exact = draft.text == observed
            number = min(int(draft.probability * BINS), BINS - 1)
            self.bins[number].count(exact)
            self.probability[number] += draft.probability
            self.squared_error += (draft.probability - exact) ** 2

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


def trajectories(log: Path) -> Iterator[tuple[str, list[Exchange]]]:
    """The task and the exchanges of each trajectory. Steps that executed nothing are left out."""
    with gzip.open(log, "rt") if log.suffix == ".gz" else log.open() as lines:
        rows = [json.loads(line) for line in lines]
    executed = [row for row in rows if row["output"] is not None and row["command"] and row["command"] != "submit"]
    for (task, _), steps in groupby(executed, key=lambda row: (row["task"], row.get("trial"))):
        yield (
            task,
            [Exchange(row["command"], SANDBOX.render(row["output"], row.get("returncode") or 0)) for row in steps],
        )


async def replay(log: Path, predictor: Predictor, *, learn_late: bool = False) -> Score:
    """Predict every step of a log. ``learn_late``: learn from a trajectory only when it is over, so that only earlier
    trajectories help."""
    score = Score()
    for task, exchanges in trajectories(log):
        unlearnt = []
        for number, exchange in enumerate(exchanges):
            query = Query(task, "", tuple(exchanges[:number]), exchange.command)
            drafts: list[Draft] = []
            start = time.process_time()
            await predictor.predict(query, drafts.append)
            score.count(merged(drafts), exchange.observation, time.process_time() - start)
            unlearnt.append((query, Observation(exchange.observation)))
            if not learn_late:
                predictor.learn(*unlearnt.pop())
        for each in unlearnt:
            predictor.learn(*each)
    return score


def merged(drafts: list[Draft]) -> list[Draft]:
    """One draft for each text: a cascade proposes a text again where its probability has risen."""
    return list({draft.text: draft for draft in sorted(drafts, key=lambda draft: draft.probability)}.values())


async def measure(log: Path) -> dict[str, Any]:
    harness = replace(SANDBOX, keeps_directory=keeps_directory(log))
    rules, memory = Rules(harness), Memory()
    cascade = Cascade({"rules": Rules(harness), "memory": Memory()})
    scores = {
        "rules": await replay(log, rules),
        "memory": await replay(log, memory),
        "memory, earlier trajectories": await replay(log, Memory(), learn_late=True),
        "cascade": await replay(log, cascade),
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
        "log": log.name,
        "predictors": {name: score.figures() for name, score in scores.items()},
        "rules": by_rule,
        "memory levels": dict(by_level),
    }


def keeps_directory(log: Path) -> bool:
    """InterCode, which has trials, keeps the directory between commands; mini-swe-agent starts a shell for each."""
    with gzip.open(log, "rt") if log.suffix == ".gz" else log.open() as lines:
        return "trial" in json.loads(next(lines))


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
    results = [anyio.run(measure, log) for log in arguments.logs]
    console = Console(width=max(Console().width, 120))
    for result in results:
        show(console, result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
