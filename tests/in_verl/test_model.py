"""A real policy in verl: the one that comes with the package, at temperature 1, in real shells."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import thinking
from scripted import ROLLOUT, TRAINING, Verl, assert_equal, assert_idle, figures

from obsspec.chat import _TERMINAL_SYSTEM
from obsspec.tasks import parse_tasks

SAVE = """
import sys
from obsspec.models import BUILTIN_POLICY, DEFAULT_MODEL, load_model
for part in load_model(DEFAULT_MODEL, BUILTIN_POLICY):
    part.save_pretrained(sys.argv[1])
"""
TASKS = ["generated:c_program/easy/0", "generated:makefile/easy/0"]


@pytest.fixture
def policy() -> Iterator[str]:
    with TemporaryDirectory() as directory:  # Half a GB, which pytest would keep.
        subprocess.run([TRAINING / "python", "-c", SAVE, directory], check=True)
        yield directory


def test_its_samples_are_the_same(cluster: None, policy: str, tmp_path: Path) -> None:
    tools, loops = tmp_path / "tools.yaml", tmp_path / "loops.yaml"
    tools.write_text("tools: [{class_name: obsspec.integrations.verl_sandbox.Shell, config: {type: native}}]")
    entries = (
        f"- {{name: {name}, _target_: thinking.Loop, depth: {depth}}}\n"
        for name, depth in (("plain", 0), ("obsspec", 2))
    )
    loops.write_text("".join(entries))
    of_tools = (
        f"multi_turn.tool_config_path={tools}",
        "multi_turn.function_tool_path=null",
        "multi_turn.format=fenced",
    )
    settings = (*of_tools, "multi_turn.max_assistant_turns=6", "agent.num_workers=1")
    verl = Verl(policy, str(loops), *(f"{ROLLOUT}.{setting}" for setting in settings), server=thinking.Server)
    rows = [name for name in TASKS for _ in range(2)]
    columns = {
        "raw_prompt": [
            [
                {"role": "system", "content": _TERMINAL_SYSTEM},
                {"role": "user", "content": parse_tasks(name)[0].instruction},
            ]
            for name in rows
        ],
        "extra_info": [{"task": name} for name in rows],
        "index": rows,
    }
    plain, ahead = (verl.run(name, **columns) for name in ("plain", "obsspec"))
    assert_equal(plain, ahead)
    own = figures(ahead)
    assert own["obsspec_tool_calls"] >= len(rows)
    assert own["obsspec_hits"] > 0, own
    assert_idle(verl)
