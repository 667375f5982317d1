"""`obsspec world-model`: from a store or logs to a world model that foretells them, and as a service."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("peft")

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from obsspec.analysis.formats import read_log
from obsspec.errors import InputError
from obsspec.loading import training_start
from obsspec.models import load_model
from obsspec.training.trajectories import ExpertRun
from obsspec.training.transitions import Transitions
from obsspec.training.versions import current_version, only_process, publish_version
from obsspec.training.world_model import read_rollouts
from obsspec.types import Exchange
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
    assert again.returncode == 2 and "remove it and the model to start afresh" in again.stderr


def test_nothing_is_trained_over(store: Path, base: str, tmp_path: Path) -> None:
    """A model that this training did not write stays as it is, and so does one that another process is training."""
    before = {file.name: file.read_bytes() for file in Path(base).iterdir()}
    finished = world_model("train", store, "--output", base, "--world-model", base, *QUICK)
    assert finished.returncode == 2 and "already; choose another directory" in finished.stderr
    assert {file.name: file.read_bytes() for file in Path(base).iterdir() if file.name != "lock"} == before
    with only_process(tmp_path / "trained"):
        finished = world_model("train", store, "--output", tmp_path / "trained", "--world-model", base, *QUICK)
    assert finished.returncode == 2 and "another process is training there" in finished.stderr


def test_two_processes_train_the_model_that_one_trains(store: Path, base: str, tmp_path: Path) -> None:
    command = [
        "-m",
        "obsspec",
        "world-model",
        "train",
        str(store),
        "--world-model",
        base,
        "--hold-out",
        "0",
        "--output",
    ]
    options = ["--tokens", "2000", "--rows-per-step", "4"]
    subprocess.run([sys.executable, *command, str(tmp_path / "one"), *options], check=True, timeout=120)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    subprocess.run([*launcher, *command, str(tmp_path / "two"), *options], check=True, timeout=240, env=environment)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(weight, two[name], atol=1e-2) for name, weight in one.items())
    losses = [json.loads((tmp_path / name / "training.json").read_text())["losses"] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-2)


def test_a_whole_model_goes_on_from_its_own_versions(store: Path, base: str, tmp_path: Path) -> None:
    publish_version(
        tmp_path / "model", base, lambda directory: shutil.copytree(base, directory, dirs_exist_ok=True), {}
    )
    assert training_start(str(tmp_path / "model"), tmp_path / "model") == (base, None)
    with pytest.raises(InputError, match=r"copy .*v000001 elsewhere and give the copy"):
        training_start(str(tmp_path / "model"), tmp_path / "other")


def test_it_learns_logs(base: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"task": f"task {n}", "rollout": str(n), "command": "make", "output": "all is made"} for n in range(4)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train", log, "--output", tmp_path / "trained", "--world-model", base, "--hold-out", "0"]
    command += ["--full", *QUICK[:2], "--learning-rate", "0.001"]
    assert world_model(*command).returncode == 0
    assert scored(log, "--world-model", tmp_path / "trained") == (4, 4)


def test_it_learns_from_rollouts_and_experts_together(store: Path, tmp_path: Path) -> None:
    """Of both it has what the predictor will read: also the instruction, which logs do not have."""
    run = ExpertRun("names/easy/1", "names", "easy", "List them.", (Exchange("ls", "a"),), (False,))
    experts = tmp_path / "expert-runs.jsonl"
    experts.write_bytes(TypeAdapter(ExpertRun).dump_json(run) + b"\n")
    *rollouts, last = read_rollouts([store, experts])
    assert len(rollouts) == 6
    assert (last.task, last.instruction, last.exchanges) == (run.task, run.instruction, run.exchanges)
    assert len(last.seconds) == len(last.fresh) == 1
    experts.write_text(experts.read_text() + '{"task": "names/easy/2"}\n')
    with pytest.raises(InputError, match=r"expert-runs\.jsonl, line 2"):
        read_rollouts([experts])


def test_lines_of_logs_that_cannot_be_read_are_said(base: str, tmp_path: Path) -> None:
    good = '{"task": "a", "command": "make", "output": "all is made"}'
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text(f'{good}\n{{"command": "ls", "output": 3}}\n{good}\n')
    data = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for command in (["train", "--output", tmp_path / "trained", "--hold-out", "0", "--tokens", "200"], ["evaluate"]):
        finished = world_model(*command, *data, "--world-model", base)
        assert finished.returncode == 0, finished.stderr
        for file in data:
            sentence = f"{file}: 1 could not be read, the first: {file}, line 2: command and output must be text"
            assert finished.stderr.splitlines().count(sentence) == 1


def test_a_store_is_told_from_a_log(store: Path) -> None:
    for name in (store, store.parent):
        with pytest.raises(InputError, match=f"{store}: a store of transitions, which is no log; give the file itself"):
            read_log(name)
    with pytest.raises(InputError, match=f"{store}: a store of transitions, which is no log; give the file itself"):
        read_rollouts([store.parent])
    (store.parent / "log.jsonl").write_text('{"command": "make", "output": "all is made"}\n')
    assert read_log(store.parent).steps == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere", "--output", "x"], "nowhere: no such file or directory; give a store"),
        (["evaluate", "{store}", "--hold-out", "0"], "leaves no task to score on; raise it"),
        (["train", "{store}", "--output", "x", "--hold-out", "1"], "leaves no task to train on; lower it"),
        (["evaluate", "{dir}/changed"], "{dir}/changed, row 3 of steps: command: Input should be a valid string; "),
    ],
)
def test_bad_input_is_one_line(store: Path, base: str, tmp_path: Path, arguments: list[str], message: str) -> None:
    shutil.copy(store, tmp_path / "changed")
    with closing(sqlite3.connect(tmp_path / "changed")) as database, database:
        database.execute("UPDATE steps SET command = x'ff00' WHERE id = 3")
    filled = [argument.format(store=store, dir=tmp_path) for argument in arguments]
    finished = world_model(filled[0], "--world-model", base, *filled[1:])
    assert finished.returncode == 2
    line = finished.stderr.strip().splitlines()[-1]
    assert line.startswith("obsspec: ")
    assert re.search(message.format(dir=tmp_path), line)
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--world-model: is empty; give builtin"),
        ("{dir}", "model {dir}: not a complete model in .*; use a directory that save_pretrained has written"),
        ("{dir}/adapter", "adapter {dir}/adapter: no weights .*; give all that PEFT saved"),
        ("{dir}/nameless", "adapter {dir}/nameless: adapter_config.json names no base model"),
    ],
)
def test_what_is_no_world_model_is_one_line(base: str, tmp_path: Path, name: str, message: str) -> None:
    for adapter, named in (("adapter", base), ("nameless", "")):
        (tmp_path / adapter).mkdir()
        config = {"base_model_name_or_path": named, "peft_type": "LORA", "r": 4, "task_type": "CAUSAL_LM"}
        (tmp_path / adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message.format(dir=tmp_path)) as raised:
        load_model(*training_start(name.format(dir=tmp_path), tmp_path / "output"))
    assert "\n" not in str(raised.value)


TRAIN = ["world-model", "train", "{store}", "--output", "{dir}/x"]
SERVE = ["world-model", "serve", "{store}", "--output", "{dir}/x"]


@pytest.mark.parametrize(
    ("command", "option", "value", "message"),
    [
        *(
            (command, "--learning-rate", value, message)
            for command in (TRAIN, SERVE, ["warmstart", "policy", "--output", "{dir}/x"])
            for value, message in (("2", "1"), ("0", "more than 0"))
        ),
        *((TRAIN, "--learning-rate", value, "") for value in ("nan", "-1")),
        *((TRAIN, "--hold-out", value, "") for value in ("nan", "1.1")),
        (["world-model", "evaluate", "{store}"], "--hold-out", "nan", ""),
        *((SERVE, "--passes", value, "") for value in ("-1", "nan")),
        *((SERVE, "--replay", value, "") for value in ("1.5", "nan")),
        *((SERVE, "--publish-seconds", value, "") for value in ("-1", "nan")),
        *(
            (SERVE, "--listen", value, "give HOST:PORT, such as")
            for value in ("here", ":8100", "h:abc", "h:65536", "h:1_0")
        ),
        *(
            (SERVE, option, value, "give a URL like http://localhost:8000")
            for option, value in (
                *(("--vllm", value) for value in ("localhost,", "http://one,", ",http://one", "http://h:99999")),
                ("--sglang", "http://one,two"),
            )
        ),
    ],
)
def test_an_option_that_is_wrong_is_named_before_anything_is_loaded(
    store: Path, tmp_path: Path, command: list[str], option: str, value: str, message: str
) -> None:
    arguments = [argument.format(store=store, dir=tmp_path) for argument in command]
    program = "import sys; sys.modules['torch'] = None; from obsspec.cli import main; main()"
    before = list(tmp_path.iterdir())
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments, option, value], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    assert line.startswith("obsspec: ")
    assert option in line and message in line
    assert list(tmp_path.iterdir()) == before


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
