"""Our sandbox as a tool of verl's: real shells, one for each sample, whose task rewards it."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from scripted import ROLLOUT, Verl, assert_equal, figures

from obsspec.errors import InputError
from obsspec.integrations.verl_sandbox import _task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A task that is done by ``make fail``, which the script runs now and then."""
    directory = tmp_path_factory.mktemp("tasks") / "make"
    for part in ("environment", "tests"):
        (directory / part).mkdir(parents=True)
    (directory / "environment" / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nCOPY Makefile ./\n")
    (directory / "environment" / "Makefile").write_text("fail:\n\ttouch made\n\tfalse\n")
    (directory / "task.toml").write_text("")
    (directory / "instruction.md").write_text("Make it.")
    (directory / "tests" / "test.sh").write_text("test -e made && echo 1 > /logs/verifier/reward.txt")
    return str(directory)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this file is not, one sandbox breaks."""
    file = tmp_path_factory.mktemp("shell") / "broken"
    file.touch()
    return file


@pytest.fixture(scope="module")
def verl(cluster: None, base: str, broken: Path, tmp_path_factory: pytest.TempPathFactory) -> Verl:
    directory = tmp_path_factory.mktemp("verl")
    tools, loops = directory / "tools.yaml", directory / "loops.yaml"
    tools.write_text(f"tools: [{{class_name: breaking.Shell, config: {{type: native, broken: {broken}}}}}]")
    entry = "_target_: obsspec.integrations.verl_sandbox.SandboxAgentLoop"
    loops.write_text(f"- {{name: plain, {entry}, depth: 0}}\n- {{name: obsspec, {entry}, depth: 2}}\n")
    files = (f"tool_config_path={tools}", "function_tool_path=null")
    return Verl(base, str(loops), *(f"{ROLLOUT}.multi_turn.{file}" for file in files))


def test_samples_run_in_shells_and_are_rewarded_alike(verl: Verl, task: str) -> None:
    verl.take(0.02)
    plain, ahead = (verl.samples(name, 8, 4, task) for name in ("plain", "obsspec"))
    assert_equal(plain, ahead)
    assert figures(ahead)["obsspec_hits"] > 0
    rewards = ahead.batch["rm_scores"].sum(dim=1).tolist()
    assert set(rewards) == {0.0, 1.0}


def test_a_sample_whose_sandbox_breaks_teaches_nothing(verl: Verl, task: str, broken: Path) -> None:
    """And the others go on."""
    broken.unlink()
    samples = verl.samples("obsspec", 4, 4, task)
    learned = samples.batch["response_mask"].sum(dim=1).tolist()
    assert learned.count(0) == 1
    assert samples.batch["rm_scores"][learned.index(0)].sum() == 0


def test_a_row_without_a_task_is_named(verl: Verl) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match=r"a row of the dataset has no extra_info\.task"):
        verl.samples("obsspec", 2, 1, task=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is 2 tasks; give one"):
        _task({"task": "generated:logs/easy/0-1"})
