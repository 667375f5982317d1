"""The command line, as a user runs it: in processes of its own, on real sandboxes, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import tiny
from obsspec.reports.records import read_trajectories
from obsspec.signals import held_back

OBSSPEC = (sys.executable, "-c", "from obsspec.cli import main; main()")


def obsspec(*arguments: str | Path, seconds: float = 300, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OBSSPEC, *map(str, arguments)], capture_output=True, text=True, timeout=seconds, check=False, cwd=cwd
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: it writes nonsense, which is all the same to the mechanics."""
    directory = tmp_path_factory.mktemp("policy")
    tokenizer = tiny.tokenizer()
    tiny.llama(vocab_size=len(tokenizer), max_position_embeddings=8192).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def runs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same rollouts, sequential and speculative."""
    directory = tmp_path_factory.mktemp("runs")
    for name, options in (("off", ("--depth", "0")), ("on", ("--depth", "2", "--breadth", "2"))):
        finished = rollout(policy, directory / name, "--predictor", "rules,memory", *options)
        assert finished.returncode == 0, finished.stderr
        assert "2 of 2 tasks" in finished.stdout
    return directory / "off", directory / "on"


def rollout(
    policy: Path, output: Path, *options: str, tasks: str = "generated:text,logs/easy/0"
) -> subprocess.CompletedProcess[str]:
    return obsspec(*("rollout", "--policy", policy, "--output", output, "--tasks", tasks, "--max-turns", "3", *options))


def test_speculation_changes_nothing(runs: tuple[Path, Path]) -> None:
    compared = obsspec("compare", *runs)
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout.rstrip().endswith("trajectories identical: 2 of 2")
    figures = json.loads(obsspec("compare", *runs, "--json").stdout)
    assert figures["identical"] == figures["compared"] == 2
    assert figures["largest_logprob_difference"] == 0


def test_a_changed_token_is_found(runs: tuple[Path, Path], tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (runs[1] / "trajectories.jsonl").read_text().splitlines()]
    place = lines[0]["mask"].index(1)
    lines[0]["tokens"][place] += 1
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(runs[1] / "run.json", tmp_path)
    compared = obsspec("compare", runs[0], tmp_path)
    assert compared.returncode == 1
    assert "trajectories identical: 1 of 2" in compared.stdout
    assert lines[0]["task"] in compared.stdout


def test_another_seed_is_another_run(policy: Path, runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert rollout(policy, tmp_path / "run", "--seed", "1", "--predictor", "off").returncode == 0
    compared = obsspec("compare", runs[0], tmp_path / "run")
    assert compared.returncode == 2
    assert "no rollout in common" in compared.stderr


def test_runs_that_differ_in_more_than_speculation_are_not_compared(
    policy: Path, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    assert rollout(policy, tmp_path / "run", "--temperature", "0.5", "--predictor", "off").returncode == 0
    assert "temperature is 1.0 in the first, 0.5 in the second" in complaint(
        obsspec("compare", runs[0], tmp_path / "run")
    )


def test_figures_for_machines(policy: Path, tmp_path: Path) -> None:
    finished = rollout(policy, tmp_path / "run", "--predictor", "off", "--latency", "0.01", "--samples", "2", "--json")
    figures = json.loads(finished.stdout)
    assert figures["rollouts"] == 4
    assert figures["latency"] == "0.01"
    assert "remote sandbox: 0.01" in rollout(policy, tmp_path / "2", "--latency", "0.01", "--predictor", "off").stdout


def test_a_finished_run_is_not_run_again(policy: Path, runs: tuple[Path, Path]) -> None:
    before = (runs[0] / "trajectories.jsonl").read_bytes()
    again = rollout(policy, runs[0], "--predictor", "rules,memory", "--depth", "0")
    assert again.returncode == 2
    assert "--resume" in again.stderr
    aside = policy.rename(policy.with_name("aside"))  # It does not even load the model.
    resumed = rollout(policy, runs[0], "--predictor", "rules,memory", "--depth", "0", "--resume")
    aside.rename(policy)
    assert resumed.returncode == 0, resumed.stderr
    assert "2 of 2 tasks" in resumed.stdout
    other = rollout(policy, runs[0], "--predictor", "rules,memory", "--depth", "1", "--resume")
    assert other.returncode == 2
    assert "depth = 0" in other.stderr
    assert (runs[0] / "trajectories.jsonl").read_bytes() == before


IN_THE_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
"""As a script starts it: with Ctrl-C ignored."""


@pytest.mark.parametrize(
    ("started", "number", "code"), [([], signal.SIGINT, 130), (IN_THE_BACKGROUND, signal.SIGTERM, 143)]
)
def test_interrupted_it_keeps_what_is_done_and_goes_on(
    policy: Path, tmp_path: Path, started: list[str], number: signal.Signals, code: int
) -> None:
    output, tasks = tmp_path / "run", "generated:text/easy/0-11"
    options = ("--predictor", "off", "--policy", str(policy), "--output", str(output), "--tasks", tasks)
    command = [*started, *OBSSPEC, "rollout", *options, "--max-turns", "3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0) as child:
        wait_for_lines(output / "trajectories.jsonl", 2)
        os.killpg(child.pid, number)  # As a terminal does: to whatever it has started, too.
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == code, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("obsspec: interrupted; ")
    assert str(output) in line
    assert "--resume" in line
    kept = read_trajectories(output)
    assert 2 <= len(kept) < 12
    resumed = rollout(policy, output, "--predictor", "off", "--resume", tasks=tasks)
    assert resumed.returncode == 0, resumed.stderr
    lines = read_trajectories(output)
    assert lines[: len(kept)] == kept
    assert len({line.task for line in lines}) == len(lines) == 12


def test_what_the_gate_has_learned_is_kept(policy: Path, tmp_path: Path) -> None:
    gate, turns = tmp_path / "gate.json", []
    for name in ("first", "second"):
        finished = rollout(policy, tmp_path / name, "--gate", str(gate))
        assert finished.returncode == 0, finished.stderr
        turns.append(json.loads(gate.read_text())["turns"])
    assert turns[1] == 2 * turns[0] > 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", [0.5, 1.5])
def test_it_can_be_stopped_while_it_loads(tmp_path: Path, number: signal.Signals, code: int, moment: float) -> None:
    options = ("--tasks", "generated:all/all/0-9", "--output", str(tmp_path / "run"))
    with subprocess.Popen([*OBSSPEC, "rollout", *options], stderr=subprocess.PIPE, text=True) as child:
        wait_for(lambda: (tmp_path / "run" / "run.json").exists())
        time.sleep(moment)  # Into the imports, and into what they load.
        child.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(30)
        child.send_signal(number)  # As one does where it was swallowed: what is imported there may do so.
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == code, stderr
    (line,) = stderr.splitlines()
    assert line.startswith("obsspec: interrupted")


def test_killed_outright_it_goes_on(policy: Path, tmp_path: Path) -> None:
    output, tasks = tmp_path / "run", "generated:text/easy/0-11"
    options = ("--predictor", "off", "--policy", str(policy), "--output", str(output), "--tasks", tasks)
    with subprocess.Popen([*OBSSPEC, "rollout", *options, "--max-turns", "3"], stderr=subprocess.DEVNULL) as child:
        wait_for_lines(output / "trajectories.jsonl", 2)
        child.kill()
    resumed = rollout(policy, output, "--predictor", "off", "--resume", tasks=tasks)
    assert resumed.returncode == 0, resumed.stderr
    assert len({line.task for line in read_trajectories(output)}) == len(read_trajectories(output)) == 12


def test_two_processes_do_not_share_a_directory(policy: Path, tmp_path: Path) -> None:
    output, tasks = tmp_path / "run", "generated:text/easy/0-11"
    options = ("--predictor", "off", "--policy", str(policy), "--output", str(output), "--tasks", tasks)
    with subprocess.Popen([*OBSSPEC, "rollout", *options, "--max-turns", "3"], stderr=subprocess.DEVNULL) as child:
        wait_for_lines(output / "trajectories.jsonl", 1)
        line = complaint(rollout(policy, output, "--predictor", "off", "--resume", tasks=tasks))
        child.terminate()
    assert "another process is writing it" in line


def test_names_may_look_like_markup(policy: Path, tmp_path: Path) -> None:
    suite = tmp_path / "[bold]x[" / "b]"
    (suite / "tests").mkdir(parents=True)
    (suite / "task.toml").write_text("")
    (suite / "instruction.md").write_text("[/b] Do it.")
    (suite / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    finished = rollout(policy, tmp_path / "[red]", "--predictor", "off", tasks=str(suite))
    assert finished.returncode == 0, finished.stderr
    assert "[red]" in finished.stdout.replace("\n", "")  # Titles wrap.
    assert "[bold]x[" in finished.stdout


@pytest.mark.parametrize("stdout", ["/dev/full", "closed pipe"])
def test_output_that_nobody_takes_is_said_in_one_line(runs: tuple[Path, Path], stdout: str) -> None:
    if stdout == "closed pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(stdout, os.O_WRONLY)
    command = [*OBSSPEC, "compare", *map(str, runs)]
    finished = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert "standard output: " in complaint(finished)


def wait_for_lines(file: Path, count: int) -> None:
    wait_for(lambda: file.exists() and file.read_bytes().count(b"\n") >= count)


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def complaint(finished: subprocess.CompletedProcess[str]) -> str:
    """The one line of a command that refuses bad input, after those that say how far it came."""
    assert finished.returncode == 2, finished.stderr
    *before, line = finished.stderr.splitlines()
    assert all(re.fullmatch(r"\w+: \d+ of \d+", each) for each in before), finished.stderr
    assert line.startswith("obsspec: ")
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "./missing"], "model ./missing: no such directory"),
        (["--policy", "{dir}"], "not a complete model in {dir}"),
        (["--tasks", "generated:lgos/easy/0"], "unknown family 'lgos': did you mean logs?"),
        (["--tasks", "{dir}/tasks"], "task.toml"),
        (["--tasks", "{dir}/none"], "{dir}/none: no such directory"),
        (["--depth", "-1"], "--depth"),
        (["--breadth", "0"], "--breadth"),
        (["--temperature", "-0.5"], "--temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--precision", "int3"], "--precision"),
        (["--predictor", "oracle"], "--predictor oracle: not one of rules, memory, language_model, timeouts, off"),
        (["--latency", "-3"], "--latency -3"),
        (["--output", "/dev/null/run"], "--output /dev/null/run: Not a directory"),
        (["--output", "{dir}/file"], "--output {dir}/file: File exists"),
        (["--output", "{dir}/none", "--resume"], "{dir}/none/run.json: missing"),
        (["--output", "{dir}/foreign"], "{dir}/foreign/run.json: missing"),
        (["--seed", str(2**64)], "--seed"),
        (["--policy", "~nobody-of-this-name/model"], "model ~nobody-of-this-name/model: "),
        (["--policy", "x" * 5000], "File name too long"),
        (["--tasks", "generated:text/easy/0-99999999999"], "more than 100,000"),
        (["--tasks", "generated:text/easy/0", "--frobnicate"], "No such option: --frobnicate"),
        (["--policy", "http://127.0.0.1:9"], "server http://127.0.0.1:9: Connect call failed"),
        (
            ["--predictor", "language_model", "--world-model", "http://127.0.0.1:9,http://127.0.0.1:7"],
            "server http://127.0.0.1:9: Connect call failed",
        ),
        (
            ["--predictor", "language_model", "--world-model", "http://127.0.0.1:9,http://127.0.0.1:7"],
            "server http://127.0.0.1:7: Connect call failed",
        ),
        (["--policy", "htp://127.0.0.1:9"], "server htp://127.0.0.1:9: neither http nor https; give a URL like"),
        *(
            (
                ["--predictor", "language_model", "--world-model", urls],
                f"--world-model {urls}: no URL before or after a comma; give URL,URL",
            )
            for urls in (",http://127.0.0.1:9", "http://127.0.0.1:9,", "http://127.0.0.1:9,,http://127.0.0.1:7")
        ),
        (
            ["--predictor", "language_model", "--world-model", "http://127.0.0.1:9,model"],
            "server model: URL should be absolute; give a URL like",
        ),
        (["--policy", "./missing", "--model", "x"], "--policy ./missing: is no URL of a server, and --model"),
        (["--gate", "{dir}/file"], "{dir}/file: the file: Invalid JSON"),
        (["--gate", "{dir}/none/gate"], "{dir}/none/gate: No such file or directory"),
        (["--transitions", "{dir}/file"], "{dir}/file: file is not a database; choose another file"),
        (["--transitions", "htp://x:1"], "--transitions htp://x:1: neither http nor https; give the URL of an"),
        (["--policy", "http://127.0.0.1:9,http://127.0.0.1:7"], ": several servers; give the URL of one"),
        (["--policy", "http://"], "--policy http://: server http://: "),
        (["--transitions", "/dev/null/file"], "/dev/null/file: File exists; choose a place that can be written"),
    ],
)
def test_bad_input_is_refused_in_one_line(policy: Path, tmp_path: Path, options: Sequence[str], message: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "trajectories.jsonl").write_text("somebody else's")
    (tmp_path / "tasks" / "task.toml").write_text("broken = [")
    (tmp_path / "tasks" / "instruction.md").write_text("Do it.")
    good = ["--policy", str(policy), "--output", str(tmp_path / "run"), "--tasks", "generated:text/easy/0"]
    given = [option.format(dir=tmp_path) for option in options]
    assert message.format(dir=tmp_path) in complaint(obsspec("rollout", *good, "--predictor", "off", *given))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("rollout", "--tasks", "generated:text/easy/0", "--output", ""), "--output"),
        (("rollout", "--tasks", "generated:text/easy/0", "--output=", "--resume"), "--output"),
        (
            ("rollout", "--tasks", "generated:text/easy/0", "--output", "{dir}/run", "--transitions", " "),
            "--transitions",
        ),
        (("analyze", "{dir}", "--times", ""), "--times"),
        (("analyze", ""), "an argument"),
        (("analyze", "{dir}", "--json", ""), "--json"),
    ],
)
def test_what_is_empty_is_named_and_is_not_the_current_directory(
    tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    """As a variable of a shell is that was never set."""
    (tmp_path / "log.jsonl").write_text('{"command": "ls", "output": "a"}\n')
    finished = obsspec(*(argument.format(dir=tmp_path) for argument in arguments), cwd=tmp_path)
    assert complaint(finished) == f"obsspec: {named}: is empty; give a value, or leave it out"
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_full_disk_is_said_in_one_line(policy: Path, tmp_path: Path) -> None:
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    options = ("--policy", policy, "--output", tmp_path / "run", "--tasks", "generated:text/easy/0", "--samples", 20)
    command = [*OBSSPEC, "rollout", "--predictor", "off", "--max-turns", "2", *map(str, options)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=little_room)
    line = complaint(finished)
    assert f"{tmp_path}/run/trajectories.jsonl: File too large" in line
    assert "--resume" in line
    assert read_trajectories(tmp_path / "run"), "what was written before is whole"


@pytest.mark.parametrize("command", [[], ["rollout"], ["compare"], ["warmstart"], ["demo"]])
def test_help_explains(command: list[str]) -> None:
    shown = obsspec(*command, "--help")
    assert shown.returncode == 0
    assert len(shown.stdout.splitlines()) > 8


def test_compare_names_the_file_that_is_missing_or_broken(runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert f"{tmp_path}/trajectories.jsonl: No such file" in complaint(obsspec("compare", runs[0], tmp_path))
    (tmp_path / "trajectories.jsonl").write_text('{"task": 3}\n')
    assert "line 1: " in complaint(obsspec("compare", runs[0], tmp_path))


def test_demo_checks_its_file_before_it_works() -> None:
    assert "--json /nowhere/x.json: No such file" in complaint(obsspec("demo", "--json", "/nowhere/x.json"))
    assert "--predictor oracle: not one of" in complaint(obsspec("demo", "--predictor", "oracle"))


def test_an_adapter_is_trained_and_used(policy: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    options = ("--base", policy, "--tokens", "300", "--runs", tmp_path / "runs.jsonl", "--output", adapter)
    trained = obsspec("warmstart", "policy", "--tasks", "generated:logs/easy/1000-1001", *options)
    assert trained.returncode == 0, trained.stderr
    assert str(adapter) in trained.stdout
    finished = rollout(adapter, tmp_path / "run", "--predictor", "off", tasks="generated:logs/easy/0")
    assert finished.returncode == 0, finished.stderr
    assert len(read_trajectories(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runs", "{dir}/notes.txt"], "notes.txt, line 1: not what `obsspec warmstart --runs` writes"),
        (["--threads", "99999999999"], "--threads"),
        (["--output", "/"], "cannot hold a model"),
        (["--output", "{dir}/adapter"], "adapter.checkpoint: damaged"),
    ],
)
def test_bad_input_to_warmstart_loses_nothing(
    policy: Path, tmp_path: Path, options: Sequence[str], message: str
) -> None:
    (tmp_path / "notes.txt").write_text("milk and bread")
    (tmp_path / "adapter.checkpoint").write_bytes(b"no checkpoint")
    good = ("--base", str(policy), "--tokens", "300", "--runs", str(tmp_path / "runs.jsonl"))
    tasks = ("--tasks", "generated:logs/easy/1000", "--output", str(tmp_path / "other"))
    given = [option.format(dir=tmp_path) for option in options]
    assert message in complaint(obsspec("warmstart", "policy", *good, *tasks, *given))
    assert (tmp_path / "notes.txt").read_text() == "milk and bread"


def test_expert_runs_on_a_full_disk_are_one_line(policy: Path, tmp_path: Path) -> None:
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))

    command = [*OBSSPEC, "warmstart", "policy", "--runs", str(tmp_path / "runs.jsonl"), "--base", str(policy)]
    finished = subprocess.run(
        [*command, "--tasks", "generated:logs,text/easy/1000-1005"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=little_room,
    )
    assert f"{tmp_path}/runs.jsonl: File too large; " in complaint(finished)


def test_warmstart_wants_generated_tasks() -> None:
    line = complaint(obsspec("warmstart", "policy", "--tasks", "/somewhere"))
    assert "expected generated:" in line


@pytest.mark.parametrize("missing", ["torch", "transformers", "huggingface_hub", "safetensors"])
@pytest.mark.parametrize(
    "command", [["demo"], ["rollout", "--tasks", "generated:text/easy/0", "--output", "{dir}/run"]]
)
def test_without_the_local_extra_it_says_what_to_install(tmp_path: Path, missing: str, command: list[str]) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from obsspec.cli import main; main()"
    arguments = [argument.format(dir=tmp_path) for argument in command]
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert "pip install 'obsspec[local]'" in complaint(finished)


def test_the_local_extra_alone_is_enough_for_models_in_this_process() -> None:
    others = ["aiohttp", "orjson", "starlette", "uvicorn", "prometheus_client", "trio", "plotly", "pyarrow"]
    modules = ["loading", "runs", "demo", "training.warmstart", "training.world_model", "training.cotraining"]
    imports = ", ".join(f"obsspec.{module}" for module in modules)
    program = f"import sys; sys.modules.update(dict.fromkeys({others!r})); import {imports}"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    ("missing", "extra", "command"),
    [
        *((missing, "lab", ["lab", "run", "paper-8b"]) for missing in ("trio", "pyarrow", "plotly")),
        *((missing, "training", ["world-model", "serve", "store"]) for missing in ("uvicorn", "prometheus_client")),
        ("aiohttp", "server", ["rollout", "--tasks", "generated:text/easy/0", "--policy", "http://127.0.0.1:9"]),
    ],
)
def test_without_another_extra_it_says_what_to_install(
    tmp_path: Path, missing: str, extra: str, command: list[str]
) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from obsspec.cli import main; main()"
    finished = subprocess.run(
        [sys.executable, "-c", program, *command, "--output", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"pip install 'obsspec[{extra}]'" in complaint(finished)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C, also where the tests run in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_waits_for_an_import() -> None:
    """PyTorch ends the process where its own is interrupted."""
    ended = []
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        ended.append(True)
    assert ended
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
