"""The demonstration, on the built-in models and real shells."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from rich.console import Console

from obsspec.demo import Figures, print_demo, run_demo
from obsspec.runs import Plan


@pytest.fixture(scope="module")
def figures() -> Figures:
    plan = Plan("generated:checksum,service/easy/0", predictor="rules,memory,language_model", depth=2)
    return run_demo(plan, 2, 1, Console(stderr=True))


def test_nothing_is_changed(figures: Figures) -> None:
    assert (figures.identical, figures.compared, figures.environment) == (4, 4, [])
    assert figures.largest_logprob_difference == 0
    assert figures.off.solved == figures.on.solved
    assert figures.off.kept_tokens == figures.on.kept_tokens
    assert figures.off.hits == figures.off.attempted == 0


def test_something_is_hidden(figures: Figures) -> None:
    """That anything is: how much is for benchmarks, on a quiet machine."""
    assert 0 < figures.on.hits <= figures.on.drafted <= figures.on.attempted <= figures.on.tool_calls
    assert 0 < figures.on.hidden_seconds < figures.on.tool_seconds
    assert set(figures.on.predictors) <= {"rules", "memory", "language_model"}


def test_it_ends_with_what_matters(figures: Figures) -> None:
    console = Console(record=True, width=100)
    print_demo(figures, console)
    lines = console.export_text().rstrip().splitlines()
    assert lines[-1] == "trajectories identical: 4 of 4"
    text = "\n".join(lines[-7:])
    for words in ("tasks: 2, rollouts each way: 4", "success rate: ", "hit rate: ", "hidden: ", "agent latency: "):
        assert words in text
    assert json.loads(json.dumps(asdict(figures)))["ratio"] == figures.ratio
