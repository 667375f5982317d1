"""The settings of a training: one file, every key a flag, and what is wrong named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obsspec.errors import InputError
from obsspec.reports.training import Journal, evaluation_steps, makespan, read_records
from obsspec.training.settings import TrainingSettings, config_text, keys, parse_all, read_settings

OBSSPEC = (sys.executable, "-m", "obsspec")


def test_what_is_written_is_read_again_and_explains_every_key(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    chosen = read_settings(None, {"steps": 7, "seats": 3, "report_to": ["tensorboard"], "cotrain": True})
    chosen.trl.update({"beta": 0.04, "top_k": 3, "model_init_kwargs": {"a b": [True, {"c": 1.5}]}})
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text(config_text(chosen), encoding=encoding)
        assert read_settings(file, {}) == chosen
    assert read_settings(file, {"steps": 9}).optimization.steps == 9
    names = [key.name for key in keys()]
    assert len(set(names)) == len(names)
    written = tomllib.loads(config_text(TrainingSettings()))
    assert {name for section in written.values() for name in section} == {*names} - {"seats", "threads"}
    assert all(key.description in config_text(TrainingSettings()).replace("\n# ", " ") for key in keys())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[optimisation]", "there is no optimisation; did you mean optimization?"),
        ("[optimization]\nlearning_rat = 1", "[optimization]: there is no learning_rat; did you mean learning_rate?"),
        ("[tasks]\nsteps = 3", "[tasks]: steps belongs in [optimization]; put it there"),
        ("steps = 3", "steps belongs in [optimization]; put it there"),
        ("[optimization]\nsteps = 0", "[optimization] steps = 0: Input should be greater than or equal to 1"),
        ("[optimization]\nsteps = '3'", '[optimization] steps = "3": Input should be a valid integer'),
        ("[rollouts]\ntemperature = nan", "[rollouts] temperature"),
        (
            "[policy]\nprecision = 'int4'",
            "[policy] precision = \"int4\": Input should be 'int8', 'float32' or 'bfloat16'",
        ),
        ("policy = 'builtin'", "policy is a section: write [policy] and its keys below"),
        ("steps", "is not TOML"),
        (f"[optimization]\nsteps = {'9' * 5000}", "is not TOML"),
        ("[optimization]\nsteps = 1000000000", "[optimization] steps = 1000000000: Input should be less than or equal"),
        (f"[trl]\nx = {'[' * 250}{']' * 250}", "recursion limit"),
        (f"[trl]\nx = {'[' * 3000}{']' * 3000}", "is not TOML"),
        ('[tasks]\ntasks = "a\\u0000b"', "zero byte"),
        ("[tasks]\ntasks = 2020-01-01", "[tasks] tasks"),
        ("[rollouts]\ntemperature = inf", "[rollouts] temperature"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        read_settings(file, {})
    assert str(raised.value).startswith(str(file)) and said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"held_out": "generated:logs/easy/1000"}, "held_out: logs/easy/1000 is one of tasks as well"),
        ({"tasks": "generated:logs/easy/1000"}, "tasks: 1 are fewer than tasks_per_step = 2"),
        ({"tasks": "nowhere"}, "nowhere"),
        ({"tasks": ""}, "tasks: none are named"),
        ({"server": "not a url"}, "server = 'not a url': is no URL"),
        ({"rows": 3}, "rows = 3: does not divide the 16 rollouts of a step"),
        ({"predictor": "oracle"}, "--predictor oracle: not one of"),
        ({"latency": "x"}, "latency"),
        ({"cotrain": True, "world_model": "http://localhost:1"}, "cotrain: a world model on a server is trained by"),
        ({"policy": "http://localhost:1"}, "a server's URL is for the key server"),
        ({"policy": ""}, "policy = ''"),
        ({"report_to": ["trackio"]}, "report_to: trackio is not installed; pip install trackio"),
    ],
)
def test_what_cannot_be_carried_out_is_said_before_anything_is_loaded(flags: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_all(read_settings(None, flags))
    assert said in str(raised.value)


def test_a_flag_that_is_wrong_is_named_as_it_was_written() -> None:
    with pytest.raises(InputError, match=r"^--learning-rate 2: Input should be less than or equal to 1$"):
        read_settings(None, {"learning_rate": 2})


def test_the_command_writes_a_file_and_says_what_it_would_do(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    written = subprocess.run(
        [*OBSSPEC, "train", "--write-config", file, "--steps", "3"], capture_output=True, check=True
    )
    assert f"obsspec train {file}" in written.stdout.decode().replace("\n", " ")
    again = subprocess.run([*OBSSPEC, "train", "--write-config", file], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (
        2,
        f"obsspec: --write-config {file}: File exists; choose a file that can be written\n",
    )
    dry = subprocess.run(
        [*OBSSPEC, "train", file, "--dry-run", "--group", "4"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert "3, of 2 tasks and 4 rollouts each" in dry.stdout
    again = subprocess.run([*OBSSPEC, "train", file, "--dry-run", "--json"], capture_output=True, check=True)
    assert json.loads(again.stdout)["world model"] == "none"  # No predictor uses it.
    nowhere = subprocess.run([*OBSSPEC, "train", file], capture_output=True, text=True, check=False)
    assert (nowhere.returncode, nowhere.stderr.count("\n")) == (2, 1)


@given(st.lists(st.floats(0, 100), max_size=20), st.integers(1, 8))
def test_a_makespan_is_between_what_many_and_one_would_take(seconds: list[float], concurrency: int) -> None:
    total, longest = sum(seconds), max(seconds, default=0.0)
    took = makespan(seconds, concurrency)
    assert max(longest, total / concurrency) <= took + 1e-6
    assert took <= total / concurrency + longest + 1e-6


def test_evaluations_are_at_the_ends_and_between() -> None:
    assert evaluation_steps(5, 2) == [0, 2, 4, 5]
    assert evaluation_steps(4, 2) == [0, 2, 4]
    assert evaluation_steps(4, 0) == []


def test_records_after_the_checkpoint_are_cut_off_and_a_torn_line_too(tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    steps.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0}\n{"step": 3}\n')
    journal = Journal(tmp_path, 2)
    assert [line["step"] for line in read_records(steps)] == [1, 2]
    assert journal.evaluated == {0}
