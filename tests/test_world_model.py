"""`obsspec world-model`: from a store or logs to a world model that foretells them, and as a service."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")

from obsspec.training.transitions import Transitions
from obsspec.training.versions import current_version
from test_cotraining import add

QUICK = ["--tokens", "9000", "--learning-rate", "0.01", "--rows-per-step", "2"]


def world_model(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "obsspec", "world-model", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def scored(*arguments: str | Path) -> tuple[int, int]:
    """Exact, and of how many."""
    finished = world_model("evaluate", *arguments, "--json")
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert sum(kind["steps"] for kind in figures["kinds"].values()) == figures["all"]["steps"]
    return figures["all"]["exact"], figures["all"]["steps"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Transitions.open(tmp_path / "store.sqlite") as transitions:
        for number in range(6):
            add(transitions, f"rollout {number}", ["file", "done"])
    return tmp_path / "store.sqlite"


def test_it_learns_a_store(store: Path, base: str, tmp_path: Path) -> None:
    trained, held = tmp_path / "trained", ["--hold-out", "0.5"]
    command = ["train", store, "--output", trained, "--world-model", base, *QUICK, *held]
    finished = world_model(*command)
    assert finished.returncode == 0, finished.stderr
    assert str(trained) in finished.stdout
    exact, steps = scored(store, "--world-model", trained, *held)
    assert 0 < exact == steps < 12
    again = world_model(*command, "--weights", "seconds")
    assert again.returncode == 2 and "remove it to start afresh" in again.stderr


def test_it_learns_logs(base: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"task": f"task {n}", "rollout": str(n), "command": "make", "output": "all is made"} for n in range(4)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train", log, "--output", tmp_path / "trained", "--world-model", base, "--hold-out", "0"]
    command += ["--full", *QUICK[:2], "--learning-rate", "0.001"]
    assert world_model(*command).returncode == 0
    assert scored(log, "--world-model", tmp_path / "trained") == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere", "--output", "x"], "nowhere: no such file or directory; give a store"),
        (["evaluate", "{store}", "--hold-out", "0"], "leaves no task to score on; raise it"),
        (["train", "{store}", "--output", "x", "--hold-out", "1"], "leaves no task to train on; lower it"),
        (["train", "{store}", "--output", "x", "--learning-rate", "2"], "learning_rate must be at most 1, not 2"),
        (["serve", "{store}", "--output", "{dir}/x", "--passes", "-1"], "passes must be from 0"),
        (["serve", "{store}", "--output", "{dir}/x", "--listen", "here"], "--listen here: .*give HOST:PORT"),
    ],
)
def test_bad_input_is_one_line(store: Path, base: str, tmp_path: Path, arguments: list[str], message: str) -> None:
    filled = [argument.format(store=store, dir=tmp_path) for argument in arguments]
    finished = world_model(*filled, "--world-model", base)
    assert finished.returncode == 2
    line = finished.stderr.strip().splitlines()[-1]
    assert line.startswith("obsspec: ")
    assert re.search(message, line)
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_service_ends_when_it_is_told_to_and_goes_on(
    store: Path, base: str, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "obsspec", "world-model", "serve", str(store), "--output", str(tmp_path / "model")]
    command += ["--world-model", base, "--publish-seconds", "0", "--learning-rate", "0.01"]
    seen = 0
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            said = [process.stderr.readline(), process.stderr.readline()]
            process.send_signal(number)
            rest = process.stderr.read()
        assert process.returncode == 128 + number, rest
        assert "interrupted; the same command goes on" in rest
        assert said[0].startswith("version ")
        version = current_version(tmp_path / "model")
        assert version is not None and version.number > seen
        seen = version.number
    assert "12 transitions seen" in said[0]
