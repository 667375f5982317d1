"""Logs of agents, in the formats that are common, as rollouts of commands and what they printed.

A file's format is told by its content. What cannot be read is counted and named, and the rest is used.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from obsspec.errors import InputError
from obsspec.predictors.harness import SANDBOX

Json = dict[str, Any]

FORMATS = (
    "mini-swe-agent trajectories, SWE-agent .traj files, ATIF (Harbor job folders), JSON lines of OpenAI messages, "
    "trajectories.jsonl of `obsspec rollout`, and JSON lines with command and output (and task, rollout, exit_code, "
    "seconds, generation_seconds)"
)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One executed command."""

    command: str
    observation: str
    """What was printed, rendered as ObsSpec's own sandbox does, so that exit codes and silence read alike in all
    formats."""
    seconds: float | None = None
    """That the tool took; None where the log does not tell."""
    generation_seconds: float | None = None
    """That the policy took to write the command; None where the log does not tell."""


@dataclass(frozen=True, slots=True)
class LoggedRollout:
    """One run of an agent."""

    task: str
    steps: tuple[LoggedStep, ...]
    last_generation_seconds: float | None = None
    """Of the generation after the last step, by which the agent ended; None where the log does not tell."""


@dataclass
class Log:
    """All that could be read."""

    rollouts: list[LoggedRollout] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    """How many rollouts came in each."""
    skipped: list[str] = field(default_factory=list)
    """What could not be read, and why: a line each."""
    keeps_directory: bool = True
    """Whether ``cd`` lasts from one command to the next, as far as the commands tell."""

    @property
    def steps(self) -> int:
        return sum(len(rollout.steps) for rollout in self.rollouts)


class _UnreadableError(Exception):
    """Why something is not what it should be."""


def read_log(*paths: Path) -> Log:
    """The rollouts in files, gzipped or not, and in all files under directories, in the order of their names.

    Raises InputError where a path cannot be read, or there is no step in any.
    """
    log = Log()
    for path in paths:
        files = _files(path)
        for file in files:
            try:
                content = file.read_bytes()
                text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode(errors="replace")
            except (OSError, EOFError) as error:
                raise InputError(f"{file}: {getattr(error, 'strerror', None) or error}; give a log") from None
            # Directories hold other files as well, which are no fault of the log's.
            _read_file(file, text, log, named=file == path)
    if not log.steps:
        skipped = f" ({log.skipped[0]})" if log.skipped else ""
        raise InputError(f"{', '.join(map(str, paths))}: no step of any agent{skipped}; known are {FORMATS}")
    log.keeps_directory = _keeps_directory(log)
    return log


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"{path}: no such file or directory; give a log")
    if not path.is_dir():
        return [path]
    suffixes = (".json", ".jsonl", ".traj", ".json.gz", ".jsonl.gz", ".traj.gz")
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(suffixes))


def _read_file(file: Path, text: str, log: Log, named: bool) -> None:
    try:
        document = json.loads(text)
    except ValueError:
        _read_rows(file, _lines(text), log, named)
        return
    if isinstance(document, list):
        _read_rows(file, ((f"item {number}", item) for number, item in enumerate(document, start=1)), log, named)
    elif isinstance(document, dict) and (reader := _reader(document)):
        _add(log, str(file), reader, document, _task(document, file))
    else:
        _read_rows(file, [("line 1", document)], log, named)


def _lines(text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError:
                yield f"line {number}", None


def _read_rows(file: Path, content: Iterable[tuple[str, Any]], log: Log, named: bool) -> None:
    """Rows of one file, each with its place. A file without any good one counts as bad only where it was ``named``."""
    rows: list[tuple[str, Json]] = []
    bad: list[str] = []
    for place, row in content:
        if not isinstance(row, dict):
            bad.append(f"{file}, {place}: not a JSON object")
        elif _reader(row) or "role" in row or "command" in row:
            rows.append((f"{file}, {place}", row))
        else:
            bad.append(f"{file}, {place}: has neither messages nor command and output")
    if rows or named:
        log.skipped += bad
    for kind, group in groupby(rows, key=lambda row: _line_kind(row[1])):
        if kind == "document":
            for where, row in group:
                reader = _reader(row)
                assert reader is not None
                _add(log, where, reader, row, _task(row, None))
        elif kind == "message":
            messages = [row for _, row in group]
            _add(log, str(file), _OPENAI, {"messages": messages}, _task({"messages": messages}, file))
        else:
            _add_steps(log, list(group))


def _line_kind(row: Json) -> str:
    return "document" if _reader(row) else "message" if "role" in row else "step"


@dataclass(frozen=True, slots=True)
class _Reader:
    name: str
    steps: Callable[[Json], Iterable[LoggedStep | float]]
    """The steps, and the seconds of generations that asked for none."""


def _add(log: Log, where: str, reader: _Reader, document: Json, task: str) -> None:
    try:
        rollout = _rollout(task, reader.steps(document))
    except (_UnreadableError, LookupError, TypeError, ValueError, AttributeError) as error:
        log.skipped.append(f"{where}: not {reader.name} as we know it ({type(error).__name__}: {error})")
        return
    if rollout.steps:
        log.rollouts.append(rollout)
        log.formats[reader.name] += 1
    else:
        log.skipped.append(f"{where}: {reader.name} without a command that has an observation")


def _rollout(task: str, parts: Iterable[LoggedStep | float]) -> LoggedRollout:
    """Generations that asked for nothing count with the next one that did."""
    steps: list[LoggedStep] = []
    seconds: float | None = None
    for part in parts:
        if not isinstance(part, LoggedStep):
            seconds = (seconds or 0.0) + part
        elif seconds is None:
            steps.append(part)
        else:
            steps.append(replace(part, generation_seconds=seconds + (part.generation_seconds or 0.0)))
            seconds = None
    return LoggedRollout(task, tuple(steps), seconds)


def _task(document: Json, file: Path | None) -> str:
    """What tells that two rollouts were of the same task: a name, or the instruction itself."""
    info = document.get("info") if isinstance(document.get("info"), dict) else {}
    for content in (document, info or {}):
        for key in ("task", "task_id", "task_name", "instance_id"):
            if isinstance(content.get(key), str):
                return str(content[key])
    if file is not None and file.name.startswith("trajectory.json") and file.parent.name == "agent":
        return file.parents[1].name.rpartition("__")[0] or file.parents[1].name  # Harbor: TASK__TRIAL/agent/
    messages = document.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            return _text(message.get("content"))
    return file.name.partition(".")[0] if file else ""


# JSON lines of steps.


def _add_steps(log: Log, rows: list[tuple[str, Json]]) -> None:
    steps: list[tuple[tuple[str, str], int, LoggedStep]] = []
    for where, row in rows:
        try:
            if step := _plain_step(row):
                trial = next((row[key] for key in ("rollout", "trial", "trajectory", "session") if key in row), "")
                place = row.get("step")
                steps.append(((str(row.get("task", "")), str(trial)), place if isinstance(place, int) else -1, step))
        except _UnreadableError as error:
            log.skipped.append(f"{where}: {error}")
    before: tuple[tuple[str, str], int] | None = None
    rollout: list[LoggedStep] = []
    for key, place, step in steps:
        if before is not None and (key != before[0] or 0 <= place <= before[1]):
            log.rollouts.append(LoggedRollout(before[0][0], tuple(rollout)))
            log.formats["JSON lines"] += 1
            rollout = []
        rollout.append(step)
        before = key, place
    if before is not None:
        log.rollouts.append(LoggedRollout(before[0][0], tuple(rollout)))
        log.formats["JSON lines"] += 1


def _plain_step(row: Json) -> LoggedStep | None:
    """None for a step that executed nothing."""
    command, output = row["command"], row.get("output", row.get("observation"))
    if not command or output is None:
        return None
    if not isinstance(command, str) or not isinstance(output, str):
        raise _UnreadableError("command and output must be text")
    code = row.get("exit_code", row.get("returncode"))
    seconds, generating = (_seconds(row, key) for key in ("seconds", "generation_seconds"))
    return LoggedStep(command, _observation(output, code), seconds, generating)


def _seconds(row: Json, key: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value < 1e7:
        raise _UnreadableError(f"{key} must be a number of seconds, not {value!r:.40}")
    return float(value)


# OpenAI messages, of which mini-swe-agent's trajectories are made as well.


def _messages(document: Json) -> Iterator[LoggedStep | float]:
    asked: list[str] = []
    answered_at = observed_at = None
    for message in document["messages"]:
        role, time = message.get("role"), _time(message)
        if role == "assistant":
            asked, answered_at = _commands(message), time
            generating = _between(observed_at, answered_at)
            if not asked and generating is not None:
                yield generating
        elif role in ("user", "tool") and asked:
            took = _between(answered_at, time)
            yield LoggedStep(asked.pop(0), _message_observation(message), took, generating)
            # Of several calls in one message, the later ones were generated with the first.
            generating = None if generating is None else 0.0
            answered_at = observed_at = time
        else:
            observed_at = time


_OPENAI = _Reader("OpenAI messages", _messages)


def _commands(message: Json) -> list[str]:
    """That a message of the policy asks for, in the order of their observations."""
    extra = message.get("extra")
    if isinstance(extra, dict) and isinstance(extra.get("actions"), list):
        return [each["command"] if isinstance(each, dict) else str(each) for each in extra["actions"]]
    if message.get("tool_calls"):
        return [_call(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    blocks = _FENCED.findall(_text(message.get("content")))
    return [blocks[0].strip()] if len(blocks) == 1 else []


_FENCED = re.compile(r"```(?:bash|sh|shell|mswea_bash_command)\s*\n(.*?)\n?```", re.DOTALL)


def _call(name: str, arguments: Any) -> str:
    """A shell command as it is; a call of any other tool with its arguments."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"{name} {arguments}"
    if isinstance(arguments, dict):
        for key in ("command", "cmd", "keystrokes"):
            if isinstance(arguments.get(key), str):
                return str(arguments[key]).strip()
    return f"{name} {json.dumps(arguments, sort_keys=True)}"


def _message_observation(message: Json) -> str:
    extra = message.get("extra")
    if isinstance(extra, dict) and isinstance(extra.get("raw_output"), str):
        return _observation(extra["raw_output"], extra.get("returncode"))
    text = _text(message.get("content"))
    if match := _RETURNCODE.fullmatch(text.strip()):
        return _observation(match[2], int(match[1]))
    return _observation(text, None)


_RETURNCODE = re.compile(r"<returncode>(-?\d+)</returncode>\s*<output>\n?(.*?)\n?</output>", re.DOTALL)
"""How mini-swe-agent shows what a command printed."""


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _time(message: Json) -> float | None:
    """When a message came, in seconds."""
    extra = message.get("extra")
    for content in (message, extra if isinstance(extra, dict) else {}):
        value = content.get("timestamp", content.get("created_at"))
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                return None
    return None


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


# SWE-agent.


def _swe_agent(document: Json) -> Iterator[LoggedStep]:
    for step in document["trajectory"]:
        if step["action"].strip() and step["observation"] is not None:
            seconds = _seconds(step, "execution_time")
            yield LoggedStep(step["action"].strip(), _observation(step["observation"], None), seconds)


_SWE_AGENT = _Reader("SWE-agent", _swe_agent)


# The Agent Trajectory Interchange Format, as Harbor writes it.


def _atif(document: Json) -> Iterator[LoggedStep]:
    for step in document["steps"]:
        results = (step.get("observation") or {}).get("results") or []
        calls = step.get("tool_calls") or []
        by_call = {result.get("source_call_id"): result for result in results}
        for place, call in enumerate(calls):
            result = by_call.get(call.get("tool_call_id")) or (results[place] if place < len(results) else None)
            if result is not None:
                command = _call(call["function_name"], call.get("arguments"))
                yield LoggedStep(command, _observation(_text(result.get("content")), None))


_ATIF = _Reader("ATIF", _atif)


# ObsSpec's own runs.


def _obsspec(document: Json) -> Iterator[LoggedStep | float]:
    for turn in document["turns"]:
        generating = sum(until - since for since, until in turn["generating"])
        if turn["executing"] is None:
            yield float(generating)
        else:
            start, end = turn["executing"]
            yield LoggedStep(turn["command"], turn["observation"], end - start, generating)


_OBSSPEC = _Reader("ObsSpec runs", _obsspec)


def _reader(document: Json) -> _Reader | None:
    if isinstance(document.get("turns"), list):
        return _OBSSPEC
    if isinstance(document.get("trajectory"), list):
        return _SWE_AGENT
    steps = document.get("steps")
    if str(document.get("schema_version", "")).startswith("ATIF") and isinstance(steps, list):
        return _ATIF
    if isinstance(document.get("messages"), list):
        if str(document.get("trajectory_format", "")).startswith("mini-swe-agent"):
            return replace(_OPENAI, name="mini-swe-agent")
        return _OPENAI
    return None


# What was printed.

_SILENCE = frozenset(("Your command ran successfully and did not produce any output.", SANDBOX.silence))
"""What harnesses write for nothing."""


def _observation(output: str, code: Any) -> str:
    output = "" if output.strip() in _SILENCE else output
    return SANDBOX.render(output, code if isinstance(code, int) else 0)


def _keeps_directory(log: Log) -> bool:
    """Agents whose shell is new for each command change the directory in most of them."""
    commands = [step.command for rollout in log.rollouts for step in rollout.steps]
    changing = sum(bool(re.match(r"cd \S+ *(&&|;)", command)) for command in commands)
    return changing < 0.3 * len(commands)
