"""Logs of agents: every format is read, bad parts are named, and what the analysis says can be worked out by hand."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from obsspec import InputError
from obsspec.analysis.formats import Log, LoggedRollout, LoggedStep, read_log
from obsspec.analysis.prediction import predict, predictors
from obsspec.analysis.report import Analysis, figures, write
from obsspec.analysis.savings import POINTS, Savings, Source, advice, simulate, times
from test_cli import OBSSPEC, obsspec

COMMAND, OUTPUT = "cat notes", "three\nlines\nhere"

# The same two steps in every format: one that fails after 2 s and 3 s of generation, and a silent one.

MINI_SWE_AGENT = {
    "info": {"exit_status": "Submitted"},
    "trajectory_format": "mini-swe-agent-1",
    "messages": [
        {"role": "system", "content": "You use bash.", "timestamp": 100.0},
        {"role": "user", "content": "Fix it.", "timestamp": 100.0},
        {"role": "assistant", "content": "THOUGHT: look\n\n```bash\ncat notes\n```", "timestamp": 103.0},
        {
            "role": "user",
            "content": "<returncode>1</returncode>\n<output>\nthree\nlines\nhere\n</output>",
            "timestamp": 105.0,
        },
        {"role": "assistant", "content": "```bash\nmkdir d\n```", "timestamp": 106.0},
        {"role": "user", "content": "<returncode>0</returncode>\n<output>\n</output>", "timestamp": 106.5},
        {"role": "assistant", "content": "Done.", "timestamp": 110.5},
    ],
}
MINI_SWE_AGENT_2 = {
    "trajectory_format": "mini-swe-agent-1.1",
    "messages": [
        {"role": "user", "content": "Fix it.", "extra": {"timestamp": 100.0}},
        {
            "role": "assistant",
            "content": "look",
            "tool_calls": [{"id": "a", "function": {"name": "bash", "arguments": '{"command": "cat notes"}'}}],
            "extra": {"actions": [{"command": "cat notes", "tool_call_id": "a"}], "timestamp": 103.0},
        },
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": "whatever the model read",
            "extra": {"raw_output": "three\nlines\nhere\n", "returncode": 1, "timestamp": 105.0},
        },
        {"role": "assistant", "content": "", "extra": {"actions": [{"command": "mkdir d"}], "timestamp": 106.0}},
        {"role": "tool", "content": "", "extra": {"raw_output": "", "returncode": 0, "timestamp": 106.5}},
        {"role": "exit", "content": "", "extra": {}},
    ],
}
SWE_AGENT = {
    "environment": "swe_main",
    "trajectory": [
        {"action": "cat notes\n", "observation": "three\nlines\nhere\n", "execution_time": 2.0, "thought": ""},
        {
            "action": "mkdir d",
            "observation": "Your command ran successfully and did not produce any output.",
            "execution_time": 0.5,
        },
        {"action": "", "observation": "", "execution_time": 0.0},
    ],
    "info": {},
}
ATIF = {
    "schema_version": "ATIF-v1.4",
    "session_id": "s",
    "agent": {"name": "terminus", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "Fix it."},
        {
            "step_id": 2,
            "source": "agent",
            "message": "look",
            "tool_calls": [
                {"tool_call_id": "1", "function_name": "bash_command", "arguments": {"keystrokes": "cat notes\n"}}
            ],
            "observation": {"results": [{"source_call_id": "1", "content": OUTPUT}]},
        },
        {
            "step_id": 3,
            "source": "agent",
            "tool_calls": [{"tool_call_id": "2", "function_name": "shell", "arguments": {"command": "mkdir d"}}],
            "observation": {"results": [{"content": None}]},
        },
    ],
}


def calling(**commands: str) -> dict[str, Any]:
    """A message of the policy that calls a tool for each of ``commands``, by id."""
    calls = [
        {"id": key, "type": "function", "function": {"name": "bash", "arguments": json.dumps({"cmd": command})}}
        for key, command in commands.items()
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answering(key: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": key, "content": text, **more}


OPENAI = [
    {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
    calling(a=COMMAND),
    answering("a", OUTPUT),
    calling(b="mkdir d"),
    answering("b", ""),
]
OLD_OPENAI = [
    {"role": "user", "content": "Fix it."},
    {"role": "assistant", "function_call": {"name": "bash", "arguments": json.dumps({"command": COMMAND})}},
    {"role": "function", "name": "bash", "content": OUTPUT},
    {"role": "assistant", "function_call": {"name": "bash", "arguments": '{"command": "mkdir d"}'}},
    {"role": "function", "name": "bash", "content": ""},
]
RESPONSES = [
    {"role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    {"type": "reasoning", "id": "r", "summary": []},
    {
        "type": "function_call",
        "call_id": "a",
        "name": "shell",
        "arguments": json.dumps({"command": ["sh", "-c", COMMAND]}),
    },
    {"type": "function_call_output", "call_id": "a", "output": OUTPUT},
    {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["mkdir", "d"]}},
    {"type": "local_shell_call_output", "call_id": "b", "output": ""},
]
CODEX = [
    {"timestamp": "2026-01-01T00:00:00Z", "type": "session_meta", "payload": {"id": "s"}},
    *(
        {"timestamp": f"2026-01-01T00:00:0{second}.{part}Z", "type": "response_item", "payload": payload}
        for (second, part), payload in zip(((0, 0), (1, 0), (3, 0), (5, 0), (6, 0), (6, 5)), RESPONSES, strict=True)
    ),
    {"timestamp": "2026-01-01T00:00:09Z", "type": "event_msg", "payload": {"type": "token_count"}},
]
ANTHROPIC = [
    {"role": "user", "content": "Fix it."},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "a", "name": "bash", "input": {"command": COMMAND, "description": "Look"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": OUTPUT, "is_error": True}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "b", "name": "bash", "input": {"command": "mkdir d"}}],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": ""}]},
            {"type": "text", "text": "Go on."},
        ],
    },
]
CLAUDE_CODE = [
    {"type": "summary", "summary": "Before", "sessionId": "s"},
    {"type": "user", "isMeta": True, "message": {"role": "user", "content": "Caveat"}},
    *(
        {"type": message["role"], "sessionId": "s", "timestamp": f"2026-01-01T00:00:0{time}Z", "message": message}
        for time, message in zip(("0", "3", "5", "6", "6.5"), ANTHROPIC, strict=True)
    ),
    {"type": "assistant", "isSidechain": True, "message": calling(z="rm -r /")},
]
STEPS = [
    {"task": "a", "command": COMMAND, "output": f"{OUTPUT}\n", "exit_code": 1, "seconds": 2, "generation_seconds": 3},
    {"task": "a", "command": "mkdir d", "output": "", "seconds": 0.5},
]
OURS = {
    "task": "a",
    "turns": [
        {"command": COMMAND, "observation": f"{OUTPUT}\n[exit code 1]", "generating": [[1, 4]], "executing": [4, 6]},
        {"command": None, "observation": "malformed", "generating": [[6, 6.5]], "executing": None},
        {"command": "mkdir d", "observation": "(no output)", "generating": [[6.5, 7]], "executing": [7, 7.5]},
        {"command": None, "observation": None, "generating": [[7.5, 11.5]], "executing": None},
    ],
}  # fmt: skip


def lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


FAILED, FINE, SILENT = f"{OUTPUT}\n[exit code 1]", OUTPUT, "(no output)"


@pytest.mark.parametrize(
    ("name", "content", "first", "task", "seconds", "generating", "last"),
    [
        ("t/t.traj.json", json.dumps(MINI_SWE_AGENT), FAILED, "Fix it.", [2, 0.5], [3, 1], 4),
        ("t/t.traj.json", json.dumps(MINI_SWE_AGENT_2, indent=2), FAILED, "Fix it.", [2, 0.5], [3, 1], None),
        ("owner__repo-1.traj", json.dumps(SWE_AGENT), FINE, "owner__repo-1", [2, 0.5], [None, None], None),
        ("job/fix__aB3/agent/trajectory.json", json.dumps(ATIF), FINE, "fix", [None, None], [None, None], None),
        ("chat.jsonl", lines(OPENAI), FINE, "Fix it.", [None, None], [None, None], None),
        ("chats.jsonl", lines([{"messages": OPENAI}]), FINE, "Fix it.", [None, None], [None, None], None),
        ("old.jsonl", lines(OLD_OPENAI), FINE, "Fix it.", [None, None], [None, None], None),
        ("items.jsonl", lines(RESPONSES), FINE, "Fix it.", [None, None], [None, None], None),
        (
            "response.json",
            json.dumps({"input": "Fix it.", "output": RESPONSES[1:]}),
            *(FINE, "Fix it.", [None, None], [None, None], None),
        ),
        ("rollout-1.jsonl", lines(CODEX), FINE, "Fix it.", [2, 0.5], [3, 1], None),
        ("chat.json", json.dumps({"messages": ANTHROPIC}), FINE, "Fix it.", [None, None], [None, None], None),
        ("session.jsonl", lines(CLAUDE_CODE), FINE, "Fix it.", [2, 0.5], [3, 1], None),
        ("steps.json", json.dumps(STEPS), FAILED, "a", [2, 0.5], [3, None], None),
        ("chat.json", json.dumps(OPENAI), FINE, "Fix it.", [None, None], [None, None], None),
        ("steps.jsonl", lines(STEPS), FAILED, "a", [2, 0.5], [3, None], None),
        ("run/trajectories.jsonl", lines([OURS]), FAILED, "a", [2, 0.5], [3, 1], 4),
    ],
)
def test_every_format_is_read_whatever_its_place(
    tmp_path: Path,
    name: str,
    content: str,
    first: str,
    task: str,
    seconds: list[float],
    generating: list[float],
    last: float | None,
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    expected = LoggedRollout(
        task,
        (
            LoggedStep(COMMAND, first, seconds[0], generating[0]),
            LoggedStep("mkdir d", SILENT, seconds[1], generating[1]),
        ),
        last,
    )
    assert read_log(file).rollouts == [expected]
    assert read_log(tmp_path).rollouts == [expected]
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(content.encode()))
    assert [rollout.steps for rollout in read_log(packed).rollouts] == [expected.steps]


def test_steps_of_several_rollouts_are_told_apart(tmp_path: Path) -> None:
    rows = [
        {"task": task, "trial": trial, "step": step, "command": "ls", "output": f"{task}{trial}{step}"}
        for task, trial, step in [("a", 1, 0), ("a", 1, 1), ("a", 2, 0), ("b", 2, 0), ("b", 2, 1), ("b", 2, 0)]
    ]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    assert [len(rollout.steps) for rollout in read_log(tmp_path / "log.jsonl").rollouts] == [2, 1, 2, 1]


def test_rollouts_that_were_written_at_the_same_time_are_told_apart(tmp_path: Path) -> None:
    rows = [
        {"instance_id": "a", "rollout": rollout, "step": step, "command": "ls", "output": f"{rollout}{step}"}
        for step in range(3)
        for rollout in "xy"
    ]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    rollouts = read_log(tmp_path / "log.jsonl").rollouts
    assert [[step.observation for step in rollout.steps] for rollout in rollouts] == [
        ["x0", "x1", "x2"],
        ["y0", "y1", "y2"],
    ]
    assert {rollout.task for rollout in rollouts} == {"a"}


def conversation(tmp_path: Path, *messages: dict[str, Any]) -> LoggedRollout:
    (tmp_path / "chat.json").write_text(json.dumps({"messages": messages, "task": "t"}))
    (rollout,) = read_log(tmp_path / "chat.json").rollouts
    return rollout


def test_several_calls_of_one_message_are_one_step_however_they_are_answered(tmp_path: Path) -> None:
    rollout = conversation(
        tmp_path,
        {"role": "user", "content": "Fix it.", "timestamp": 100},
        {**calling(a="pwd", b="ls"), "timestamp": 103},
        {"role": "assistant", "content": "While we wait."},
        {"role": "user", "content": "Be brief."},
        answering("b", "x y", timestamp=104),
        answering("a", "/", timestamp=105),
        {"role": "assistant", "content": "Try\n```bash\nmake test\n```", "timestamp": 109},
    )
    assert rollout == LoggedRollout("t", (LoggedStep("pwd\nls", "/\nx y", 2.0, 3.0),), 4.0)


def test_calls_that_are_items_of_their_own_are_one_step(tmp_path: Path) -> None:
    calls = [
        {"type": "function_call", "call_id": key, "name": "shell", "arguments": json.dumps({"command": command})}
        for key, command in (("a", "pwd"), ("b", "ls"))
    ]
    answers = [{"type": "function_call_output", "call_id": key, "output": key} for key in "ba"]
    (step,) = conversation(tmp_path, {"role": "user", "content": "Fix it."}, *calls, *answers).steps
    assert (step.command, step.observation) == ("pwd\nls", "a\nb")


@pytest.mark.parametrize("named", ["t1", 7])
def test_an_answer_is_that_of_the_call_it_names(tmp_path: Path, named: str | int) -> None:
    other = "t2" if named == "t1" else 8
    calls = [
        {"role": "assistant", "tool_calls": [{"id": key, "function": {"name": "bash", "arguments": {"command": run}}}]}
        for key, run in ((named, "ls"), (other, "pwd"))
    ]
    remark = {"role": "assistant", "content": [{"type": "text", "text": "And where?"}]}
    answers = [answering(key, text) for key, text in (("none of them", "?"), (other, "/home"), (named, "a b"))]
    (step,) = conversation(tmp_path, calls[0], remark, calls[1], *answers).steps
    assert (step.command, step.observation) == ("ls\npwd", "a b\n/home")


@pytest.mark.parametrize(("unnamed", "names"), [({}, "xy"), ({"id": ""}, ("", ""))])
def test_calls_without_names_are_answered_in_their_order(
    tmp_path: Path, unnamed: dict[str, str], names: Sequence[str]
) -> None:
    call = {
        "role": "assistant",
        "tool_calls": [{**unnamed, "function": {"name": "bash", "arguments": {"command": each}}} for each in "ab"],
    }
    (step,) = conversation(tmp_path, call, answering(names[0], "1"), answering(names[1], "2")).steps
    assert (step.command, step.observation) == ("a\nb", "1\n2")


def test_a_call_that_nobody_answers_is_the_last_generation(tmp_path: Path) -> None:
    rollout = conversation(
        tmp_path,
        {"role": "user", "content": "Fix it.", "timestamp": 100},
        {**calling(a="ls"), "timestamp": 103},
        answering("a", "x", timestamp=104),
        {**calling(b="submit"), "timestamp": 110},
        {"role": "exit", "content": "", "timestamp": 111},
    )
    assert rollout == LoggedRollout("t", (LoggedStep("ls", "x", 1.0, 3.0),), 6.0)


def test_calls_of_other_tools_keep_their_arguments(tmp_path: Path) -> None:
    call = calling(a="")
    call["tool_calls"][0]["function"] = {"name": "editor", "arguments": {"command": "view", "path": "/a"}}
    rollout = conversation(tmp_path, call, answering("a", "text"))
    assert rollout.steps[0].command == 'editor {"command": "view", "path": "/a"}'
    call["tool_calls"][0]["function"] = {"name": "shell", "arguments": {"command": ["bash", "-lc", "ls -la"]}}
    assert conversation(tmp_path, call, answering("a", "text")).steps[0].command == "ls -la"


def test_a_log_of_requests_holds_each_rollout_once(tmp_path: Path) -> None:
    requests = [{"messages": OPENAI[:end]} for end in (1, 3, 5)]
    for rows in ([*requests, *requests], [row for row in requests for _ in range(2)]):  # In turn, and side by side.
        (tmp_path / "requests.jsonl").write_text(lines(rows))
        assert [len(rollout.steps) for rollout in read_log(tmp_path / "requests.jsonl").rollouts] == [2, 2]


@pytest.mark.parametrize(
    ("printed", "observed"),
    [
        ("Exit code: 1\nWall time: 0.1 seconds\nOutput:\nno", "no\n[exit code 1]"),
        (
            "Chunk ID: a1\nWall time: 0.1 seconds\nProcess exited with code 0\nOriginal token count: 1\nOutput:\nyes",
            "yes",
        ),
        ('{"output": "no", "metadata": {"exit_code": 1, "duration_seconds": 1.5}}', "no\n[exit code 1]"),
        ({"content": "yes", "success": True}, "yes"),
        ({"stdout": "yes"}, '{"stdout": "yes"}'),
        ("Exit code 2\nno", "no\n[exit code 2]"),
        ("(Bash completed with no output)", SILENT),
        ('{"output": "a file of JSON"}', '{"output": "a file of JSON"}'),
        ([{"stdout": "yes", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}], "yes"),
    ],
)
def test_what_harnesses_put_around_an_output_is_none_of_it(tmp_path: Path, printed: Any, observed: str) -> None:
    call = {"type": "shell_call", "id": "a", "action": {"commands": ["make"]}}
    rollout = conversation(tmp_path, call, {"type": "shell_call_output", "call_id": "a", "output": printed})
    assert [(step.command, step.observation) for step in rollout.steps] == [("make", observed)]


def test_the_task_is_what_the_user_asked_not_what_the_harness_says(tmp_path: Path) -> None:
    said = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "<environment_context>\n  <cwd>/a</cwd>\n</environment_context>"}
            ],
        },
        {"role": "user", "content": "Fix <b>it</b>."},
    ]
    (tmp_path / "session.jsonl").write_text(lines([*said, *RESPONSES[1:]]))
    assert [rollout.task for rollout in read_log(tmp_path / "session.jsonl").rollouts] == ["Fix <b>it</b>."]


def test_sessions_in_one_file_are_told_apart(tmp_path: Path) -> None:
    others = [{**row, "sessionId": "t"} for row in CLAUDE_CODE]
    mixed = [row for pair in zip(CLAUDE_CODE, others, strict=True) for row in pair]
    for rows in (mixed, [*CLAUDE_CODE, *others]):
        (tmp_path / "sessions.jsonl").write_text(lines(rows))
        assert [len(rollout.steps) for rollout in read_log(tmp_path / "sessions.jsonl").rollouts] == [2, 2]


def test_no_file_is_read_twice(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(STEPS))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert read_log(tmp_path / "a.jsonl", tmp_path, tmp_path / "a.jsonl").steps == 2


@pytest.mark.parametrize(("code", "shown"), [(1, 1), ("2", 2), (3.0, 3), (0, 0), (None, 0)])
def test_exit_codes_are_read_as_tables_write_them(tmp_path: Path, code: Any, shown: int) -> None:
    (tmp_path / "log.jsonl").write_text(lines([{"command": "ls", "output": "a", "returncode": code}]))
    observation = read_log(tmp_path / "log.jsonl").rollouts[0].steps[0].observation
    assert observation == (f"a\n[exit code {shown}]" if shown else "a")


def test_milliseconds_are_told_from_seconds(tmp_path: Path) -> None:
    times_of = [1.7e12, 1.7e12 + 3000, 1.7e12 + 3500]
    given = [{"role": "user", "content": "Fix it."}, calling(a="ls"), answering("a", "x")]
    messages = [message | {"timestamp": moment} for message, moment in zip(given, times_of, strict=True)]
    assert conversation(tmp_path, *messages).steps == (LoggedStep("ls", "x", 0.5, 3.0),)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_are_no_part_of_a_log(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "log.jsonl").write_bytes(lines(STEPS).encode(encoding))
    assert read_log(tmp_path / "log.jsonl").steps == 2


def test_what_no_file_can_hold_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"task": "\\ud800", "command": "echo \\ud800", "output": "\\udfff\\u0000"}\n')
    write(analysed(read_log(file)), tmp_path / "out")
    assert pyarrow.parquet.read_table(tmp_path / "out/steps.parquet").to_pylist()[0]["command"] == "echo ?"


def test_a_bad_line_is_named_and_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    bad = [
        "{not json",
        "[1]",
        '{"other": 1}',
        '{"command": "ls"}',
        '{"command": "ls", "output": 3}',
        '{"command": "ls", "output": "", "seconds": -1}',
        '{"trajectory": [{"action": 1}]}',
        '{"messages": [7]}',
        '{"turns": [{}]}',
        '{"turns": [{"command": "ls", "observation": "", "generating": [[0, -5]], "executing": [0, 1]}]}',
        '{"trajectory": [{"action": 7, "observation": "", "execution_time": 1}]}',
        '{"command": "ls", "output": "", "seconds": true}',
        '{"command": "ls", "output": "", "exit_code": "none"}',
        "[" * 100_000,
    ]
    file.write_text("\n".join([json.dumps(STEPS[0]), *bad, json.dumps(STEPS[1])]))
    log = read_log(file)
    assert log.steps == 2
    assert len(log.skipped) == len(bad)
    named = {re.split(r":|, message", line)[0] for line in log.skipped}
    assert named == {f"{file}, line {number}" for number in range(2, 2 + len(bad))}


def test_steps_without_a_command_or_an_output_are_counted(tmp_path: Path) -> None:
    """They are no fault of a log: an agent may write no command, and what it hands in prints nothing."""
    incomplete = [
        '{"command": "submit", "output": null}',
        '{"command": null, "output": "which command?"}',
        '{"command": "", "output": ""}',
        '{"command": " ", "observation": ""}',
    ]
    (tmp_path / "log.jsonl").write_text("\n".join([*incomplete, lines(STEPS)]))
    log = read_log(tmp_path)
    assert (log.steps, log.incomplete, log.skipped) == (2, len(incomplete), [])
    assert list(log.left_out()) == ["4 steps have no command or no output, and are left out."]


DEEP = "[" * 5000
BAD_MESSAGES = [
    {"role": "assistant", "tool_calls": 5},
    {"role": "assistant", "tool_calls": ["ls"]},
    {"role": "assistant", "tool_calls": [{"id": "x", "type": "custom"}]},
    {"role": "assistant", "tool_calls": [{"id": ["x"], "function": {"name": "bash", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": ["x"], "content": "?"},
    {"role": "user", "content": [{"type": "tool_result", "content": "?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "bash"}]},
    {"type": "function_call", "call_id": "x", "name": "bash"},
    {"type": "function_call_output", "call_id": ["x"], "output": "?"},
    {"type": "no such thing"},
    7,
]


def test_a_bad_message_is_named_and_costs_only_itself(tmp_path: Path) -> None:
    chat = [*OPENAI[:2], *BAD_MESSAGES, *OPENAI[2:]]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": chat}))
    (tmp_path / "chat.jsonl").write_text(lines(chat))
    for name, place in (("chat.json", "message"), ("chat.jsonl", "line")):
        log = read_log(tmp_path / name)
        assert [len(rollout.steps) for rollout in log.rollouts] == [2]
        expected = [f"{tmp_path / name}, {place} {number}" for number in range(3, 3 + len(BAD_MESSAGES))]
        assert [line.partition(":")[0] for line in log.skipped] == expected


def test_arguments_that_are_no_json_are_part_of_the_command(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "run", "arguments": DEEP}
    rollout = conversation(tmp_path, call, {"type": "function_call_output", "call_id": "a", "output": "yes"})
    assert rollout.steps[0].command == f"run {DEEP}"


def test_other_files_in_a_directory_are_no_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model": "m"}')
    (tmp_path / "result.json").write_text("[]")
    (tmp_path / "log.jsonl").write_text(lines(STEPS))
    assert read_log(tmp_path).skipped == []


def test_a_line_that_is_no_utf8_is_named_and_costs_only_itself(tmp_path: Path) -> None:
    """What is escaped, or was replaced by those who wrote it, is none of these."""
    printed = ["caf\xe9", "\\u00e9 \\udfff \\u0000", "\ufffd"]
    rows = [f'{{"task": "a", "command": "cat", "output": "{text}"}}' for text in printed]
    content = "".join(f"{row}\n" for row in rows).encode()
    (tmp_path / "log.jsonl").write_bytes(content + rows[0].encode("latin-1") + b"\n" + content)
    (tmp_path / "pretty.json").write_bytes(json.dumps(OPENAI, ensure_ascii=False, indent=1).encode() + b"\xe9")
    log = read_log(tmp_path)
    assert [step.observation for rollout in log.rollouts for step in rollout.steps] == [
        "caf\xe9",
        "\xe9 ? \0",
        "\ufffd",
    ] * 2
    last = len(json.dumps(OPENAI, indent=1).splitlines())
    assert log.skipped == [
        f"{tmp_path}/log.jsonl, line 4: not UTF-8",
        f"{tmp_path}/pretty.json, line {last}: not UTF-8",
    ]


def test_files_may_have_any_names(tmp_path: Path) -> None:
    """A report can be written all the same."""
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    (odd / os.fsdecode(b"\xff.jsonl")).write_text(lines([*STEPS, 3]))
    (odd / os.fsdecode(b"\xfe.json")).write_bytes(b"\xff\xfe\x00")
    (tmp_path / "log.jsonl").write_text(lines(STEPS))
    finished = obsspec("analyze", str(tmp_path), str(odd), "--output", str(tmp_path / "report"), "--json")
    assert finished.returncode == 0, finished.stderr
    skipped = json.loads(finished.stdout)["skipped"]
    assert [line.rpartition("/")[2].partition(":")[0] for line in skipped] == ["?.json", "?.jsonl, line 3"]
    assert {file.name for file in (tmp_path / "report").iterdir()} == {
        "analysis.html",
        "analysis.json",
        "steps.parquet",
    }


def test_a_document_that_is_no_utf8_is_named_once(tmp_path: Path) -> None:
    chat = json.dumps({"messages": [*OPENAI, *[{"role": "user", "content": "\xe9"}] * 3]}, ensure_ascii=False, indent=1)
    (tmp_path / "a.json").write_bytes(chat.encode("latin-1"))
    (tmp_path / "b.jsonl").write_text(lines(STEPS))
    log = read_log(tmp_path)
    assert log.steps == 2
    (line,) = log.skipped
    assert re.fullmatch(rf"{tmp_path}/a\.json, line \d+: not UTF-8", line)


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path, unprivileged: list[str], mode: int) -> None:
    (tmp_path / "log.jsonl").write_text(lines(STEPS))
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "log.jsonl").write_text(lines(STEPS))
    closed.chmod(mode)
    try:
        command = [*unprivileged, *OBSSPEC, "analyze", str(tmp_path), "--json"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        closed.chmod(0o755)
    assert finished.returncode == 0, finished.stderr
    figures = json.loads(finished.stdout)
    assert figures["steps"] == 2
    (line,) = figures["skipped"]
    assert line == f"{closed if mode == 0 else closed / 'log.jsonl'}: Permission denied"


def test_a_file_that_is_cut_short_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(STEPS))
    packed = gzip.compress(lines(STEPS * 100).encode())
    (tmp_path / "b.jsonl.gz").write_bytes(packed[:-9])
    (tmp_path / "c.jsonl.gz").write_bytes(packed[:30] + b"corrupt" + packed[37:])
    log = read_log(tmp_path)
    assert log.steps == 2
    assert len(log.skipped) == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file or directory"),
        (b"", "no step of any agent"),
        (b"\x00\x7f", "line 1: not a JSON object"),
        (b"\x00\xff", "line 1: not UTF-8"),
        ('{"messages":\n["\xe9"]}'.encode("latin-1"), "line 2: not UTF-8"),
        ("\ufeff{}".encode("utf-16-le")[:-1], "truncated data; give a log that can be read"),
        (b"\x1f\x8bnot gzip", "give a log"),
        (b'{"messages": []}', "no step of any agent"),
        (b'{"a": 1}', "neither messages nor command and output"),
        (b'{"command": "ls", "output": null}\n' * 2, "(2 steps have no command or no output, and are left out)"),
    ],
)
def test_what_is_no_log_is_one_line(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    file = tmp_path / "log"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_log(file)
    assert str(file) in str(error.value)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_whether_the_directory_lasts_is_told_by_the_commands(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(lines([{"command": "cd /src && ls", "output": "a"}] * 3))
    assert not read_log(file).keeps_directory
    file.write_text(lines([{"command": "cd /src", "output": ""}, {"command": "ls", "output": "a"}]))
    assert read_log(file).keeps_directory


# Predictions.


def logged(*rollouts: list[LoggedStep], last: float | None = None) -> Log:
    return Log([LoggedRollout("task", tuple(steps), last) for steps in rollouts])


def analysed(log: Log) -> Analysis:
    predictions = {name: predict(log, each, lambda: None) for name, each in predictors(log).items()}
    measured = times(log, Source.of("local-exec"))
    savings = simulate(log, measured, predictions["rules + memory"], lambda: None)
    return Analysis(log, measured, "local-exec", predictions, savings)


def test_a_step_is_predicted_before_it_is_learned_from() -> None:
    log = logged([LoggedStep("./once", "7")], [LoggedStep("./once", "7")], [LoggedStep("./once", "8")])
    memory = predict(log, predictors(log)["memory"], lambda: None)
    assert [each.exact for each in memory] == [False, True, False]
    assert [each.attempted for each in memory] == [False, True, True]


# Savings.


def silent(count: int, seconds: float, generating: float) -> list[LoggedStep]:
    return [LoggedStep(f"mkdir d{place}", SILENT, seconds, generating) for place in range(count)]


def test_predicted_tools_hide_as_much_as_the_next_generation_fills() -> None:
    """Four tools of 2 s, each with a generation of 0.5 s before and one at the end."""
    savings = analysed(logged(silent(4, 2.0, 0.5), last=0.5)).savings
    assert savings.sequential == pytest.approx(4 * 2 + 5 * 0.5)
    for name in POINTS[1:]:
        assert savings.schedules[name].mean_latency == pytest.approx(4 * 2 + 0.5, abs=0.05), name
    assert savings.losses.hidden == pytest.approx(2.0, abs=0.05)
    assert savings.losses.beyond_the_generation == pytest.approx(6.0)
    assert savings.losses.nothing_drafted == savings.losses.wrong == 0


def test_very_long_generations_take_no_longer_to_simulate() -> None:
    savings = analysed(logged(silent(3, 9e6, 9e6), last=9e6)).savings
    assert savings.sequential == pytest.approx(7 * 9e6)
    assert savings.saved("obsspec, depth 1") == pytest.approx(3 / 7, abs=0.01)


def test_what_nobody_predicts_saves_nothing_but_could() -> None:
    steps = [LoggedStep(f"./measure {place}", f"{place * 7919}", 1.0, 1.0) for place in range(4)]
    savings = analysed(logged(steps, last=1.0)).savings
    assert savings.saved("obsspec, depth 1") == pytest.approx(0, abs=1e-3)
    assert savings.saved("clairvoyant, depth 1") == pytest.approx(4 / 9, abs=0.01)
    assert savings.losses.nothing_drafted == pytest.approx(4.0)
    assert any("Unpredicted" in sentence for sentence in advice(savings))


def test_the_losses_add_up_to_the_tools_time() -> None:
    steps = [
        *silent(3, 1.5, 0.4),
        *(LoggedStep("./roll", str(place % 2), 0.7, 0.9) for place in range(6)),
        *(LoggedStep("cat a", "same", 0.01, 0.9) for _ in range(3)),
    ]
    analysis = analysed(logged(steps, steps, last=0.2))
    losses = analysis.savings.losses
    parts = [getattr(losses, name) for name in losses.__dataclass_fields__]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(sum(step.seconds or 0 for step in steps) * 2)


def test_times_that_are_missing_are_drawn_the_same_every_time_and_said() -> None:
    log = logged([LoggedStep("ls", "a"), LoggedStep("ls", "a", 2.0, 3.0)])
    source = Source.of("paper-8b")
    (first, second) = times(log, source)[0]
    assert times(log, source)[0] == [first, second]
    assert (second.tool, second.generation, first.next_generation) == (2.0, 3.0, 3.0)
    assert first.tool > 1.0, "that workload's sandbox is a remote one"
    assert first.generation > 0
    assert figures(analysed(log))["steps_without_tool_time"] == 1


def test_tools_that_take_no_time_are_said_not_to_pay() -> None:
    savings: Savings = analysed(logged(silent(4, 0.001, 5.0))).savings
    assert "less than 2 %" in next(advice(savings))


# The command.


def test_the_command_tells_what_a_log_would_save(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    rows = [{"task": "a", "rollout": n, "command": "make <b>", "output": "ok", "seconds": 1.0, "generation_seconds": 1.0} for n in (1, 2, 3) for _ in "12"]  # fmt: skip # noqa: E501
    file.write_text(f"{lines(rows)}nonsense\n")
    finished = obsspec("analyze", file, "--output", tmp_path / "out")
    assert finished.returncode == 0, finished.stderr
    assert "Steps: 6, rollouts: 3 (3 in JSON lines), tasks: 1." in finished.stdout
    assert f"{file}, line 7: not a JSON object" in finished.stdout
    assert "Set --predictor rules,memory" in finished.stdout
    report = json.loads((tmp_path / "out/analysis.json").read_text())
    assert report["predictors"]["memory"]["exact"] >= 3
    assert pyarrow.parquet.read_table(tmp_path / "out/steps.parquet").num_rows == 6
    assert "<b>" not in (tmp_path / "out/analysis.html").read_text().partition("<script")[0].partition("<body>")[2]
    as_json = obsspec("analyze", file, "--json")
    again = json.loads(as_json.stdout)
    assert again["kinds"] == report["kinds"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.jsonl"], "missing.jsonl: no such file"),
        (["{log}", "--times", "nowhere"], "--times nowhere: No such file or directory; give a TOML file or one of"),
        (["{log}", "--output", "/proc/no"], "--output /proc/no"),
        (["{log}", "--output", "{log}"], "File exists; choose a directory"),
    ],
)
def test_what_the_command_cannot_use_is_one_line(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(lines(STEPS))
    finished = obsspec("analyze", *(argument.format(log=file) for argument in arguments))
    assert finished.returncode == 2
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("name", ["analysis.json", "analysis.html", "steps.parquet"])
@pytest.mark.parametrize("obstacle", ["directory", "pipe", "link to nowhere", "may not be written"])
def test_an_output_that_cannot_be_written_is_known_before_the_work(
    tmp_path: Path, unprivileged: list[str], name: str, obstacle: str
) -> None:
    (tmp_path / "log.jsonl").write_text(lines(STEPS))
    place = tmp_path / "out" / name
    place.parent.mkdir()
    if obstacle == "directory":
        place.mkdir()
    elif obstacle == "pipe":
        os.mkfifo(place)
    elif obstacle == "link to nowhere":
        place.symlink_to(tmp_path / "nowhere" / name)
    else:
        place.touch(0o444)
    reason = "(no file to write to|No such file or directory|Permission denied)"
    refused_before_the_work(tmp_path, unprivileged, rf": {name}: {reason}; choose a")
    assert list(place.parent.iterdir()) == [place]


def test_an_output_directory_that_cannot_be_written_is_known_before_the_work(
    tmp_path: Path, unprivileged: list[str]
) -> None:
    (tmp_path / "log.jsonl").write_text(lines(STEPS))
    (tmp_path / "out").mkdir(0o555)
    refused_before_the_work(tmp_path, unprivileged, ": Permission denied; choose a directory")


def refused_before_the_work(root: Path, prefix: list[str], reason: str) -> None:
    command = [*prefix, *OBSSPEC, "analyze", str(root / "log.jsonl"), "--output", str(root / "out")]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()  # The work says how far it has come.
    assert re.match(rf"obsspec: --output {root / 'out'}{reason}", line), line


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    write(analysed(logged(silent(3, 1.0, 1.0))), tmp_path)
    page = (tmp_path / "analysis.html").read_text()
    assert "What ObsSpec would save" in page
    assert '<script src="http' not in page
