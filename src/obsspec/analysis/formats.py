"""Logs of agents, in the formats that are common, as rollouts of commands and what they printed.

A file's format is told by its content. What cannot be read is counted and named, and the rest is used.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

from obsspec.analysis.messages import Json, chat_messages, joined
from obsspec.errors import InputError
from obsspec.predictors.harness import SANDBOX
from obsspec.training.transitions import is_store

_CONCURRENT = 64
"""So many rollouts may be mixed with one another in a log of requests."""

FORMATS = (
    "mini-swe-agent trajectories, SWE-agent .traj files, ATIF (Harbor job folders), messages of OpenAI's and "
    "Anthropic's interfaces, sessions of Codex and Claude Code, trajectories.jsonl of `obsspec rollout`, and JSON "
    "lines with command and output (and task, rollout, exit_code, seconds, generation_seconds)"
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
    incomplete: int = 0
    """Of JSON lines with a step each: those that executed nothing, or of which the output is not told, such as the last
    of an agent that hands in."""
    keeps_directory: bool = True
    """Whether ``cd`` lasts from one command to the next, as far as the commands tell."""
    _latest: deque[tuple[list[Json], int]] = field(
        default_factory=lambda: deque(maxlen=_CONCURRENT), init=False, repr=False, compare=False
    )
    """Messages of the latest rollouts that have any, and where these are among ``rollouts``."""

    @property
    def steps(self) -> int:
        return sum(len(rollout.steps) for rollout in self.rollouts)

    def left_out(self) -> Iterator[str]:
        """What of it is not among the rollouts, in sentences."""
        if self.incomplete:
            yield f"{self.incomplete} steps have no command or no output, and are left out."
        if self.skipped:
            yield f"{len(self.skipped)} could not be read, the first: {self.skipped[0]}"


class _UnreadableError(Exception):
    """Why something is not what it should be."""


_MALFORMED = (LookupError, TypeError, AttributeError, RecursionError)
"""What JSON raises that lacks a field, or has another kind of it."""


def read_log(*paths: Path) -> Log:
    """The rollouts in files, gzipped or not, and in all files under directories, in the order of their names.

    Raises InputError where a path cannot be read, or there is no step in any.
    """
    log = Log()
    seen: set[Path] = set()
    for path in paths:
        for file in _files(path, log):
            # Directories hold other files as well, which are no fault of the log's.
            named = file == path
            try:
                if not named and not file.is_file():
                    continue
                if file.resolve() in seen:  # It would be remembered, and so be predicted all too well.
                    continue
                seen.add(file.resolve())
                if named and file.is_file() and is_store(file):
                    raise _store_given(file)
                _read_file(file, _decoded(file.read_bytes()), log, named)
            except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
                reason = f"{file}: {getattr(error, 'strerror', None) or error}"
                if named:
                    raise InputError(f"{reason}; give a log that can be read") from None
                log.skipped.append(reason)
    log.skipped = [_writable(line) for line in log.skipped]  # Names of files may be any bytes.
    if not log.steps:
        for path in paths:
            for file in path.glob("*") if path.is_dir() else ():
                if os.access(file, os.R_OK) and file.is_file() and is_store(file):
                    raise _store_given(file)
        reason = next((f" ({sentence.rstrip('.')})" for sentence in log.left_out()), "")
        raise InputError(f"{', '.join(map(str, paths))}: no step of any agent{reason}; known are {FORMATS}")
    log.keeps_directory = _keeps_directory(log)
    return log


def _store_given(file: Path) -> InputError:
    return InputError(
        f"{file}: a store of transitions, which is no log; give the file itself to `obsspec world-model train` or "
        "`obsspec world-model evaluate`"
    )


def _decoded(content: bytes) -> str:
    """Where it is no UTF-8, with surrogates, which `_is_unicode` knows."""
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16")
    return content.decode("utf-8-sig", errors="surrogateescape")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parsed(text: str) -> Any:
    """Raises ValueError where it is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _files(path: Path, log: Log) -> list[Path]:
    if not path.exists():
        raise InputError(f"{path}: no such file or directory; give a log")
    if not path.is_dir():
        return [path]

    def skip(error: OSError) -> None:
        log.skipped.append(f"{error.filename}: {error.strerror}")

    suffixes = (".json", ".jsonl", ".traj", ".json.gz", ".jsonl.gz", ".traj.gz")
    names = (Path(directory, name) for directory, _, names in os.walk(path, onerror=skip) for name in names)
    return sorted(file for file in names if file.name.endswith(suffixes))


def _read_file(file: Path, text: str, log: Log, named: bool) -> None:
    lines = [] if _is_unicode(text) else enumerate(text.split("\n"), start=1)
    # JSON is UTF-8. What is not is bad in any file, for what it was cannot be told.
    bad = [f"{file}, line {number}: not UTF-8" for number, line in lines if not _is_unicode(line)]
    try:
        document = _parsed(text)
    except ValueError:
        log.skipped += bad
        _read_rows(file, _lines(text), log, named)
        return
    if bad:  # Of a document nothing can be left out.
        log.skipped.append(bad[0])
        return
    if isinstance(document, list):
        _read_rows(file, ((f"item {number}", item) for number, item in enumerate(document, start=1)), log, named)
    elif isinstance(document, dict) and (reader := _reader(document)):
        _add_document(log, str(file), reader, document, file)
    else:
        _read_rows(file, [("line 1", document)], log, named)


def _lines(text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip() and _is_unicode(line):
            try:
                yield f"line {number}", _parsed(line)
            except ValueError:
                yield f"line {number}", None


def _read_rows(file: Path, content: Iterable[tuple[str, Any]], log: Log, named: bool) -> None:
    """Rows of one file, each with its place. A file without any good one counts as bad only where it was ``named``."""
    rows: list[_Row] = []
    bad: list[str] = []
    for place, row in content:
        if not isinstance(row, dict):
            bad.append(f"{file}, {place}: not a JSON object")
        elif reader := _reader(row):
            rows.append(_Row(f"{file}, {place}", row, "document", reader))
        elif "command" in row and "role" not in row and {"output", "observation"} & row.keys():
            rows.append(_Row(f"{file}, {place}", row, "step"))
        else:
            messages = _understood(f"{file}, {place}", row, bad)
            if messages:
                session = row.get("sessionId")
                rows.append(_Row(f"{file}, {place}", {"messages": messages, "session": session}, "message"))
    if rows or named:
        log.skipped += bad
    for kind, group in groupby(rows, key=lambda row: row.kind):
        if kind == "message":
            for messages in _conversations(row.content for row in group):
                _add(log, str(file), _MESSAGES, {"messages": messages}, _task({"messages": messages}, file))
        elif kind == "step":
            _add_steps(log, group)
        else:
            for each in group:
                assert each.reader is not None
                _add_document(log, each.where, each.reader, each.content, file)


def _understood(where: str, item: Any, bad: list[str]) -> list[Json]:
    """The messages that an item has; of one that is none, or is malformed, ``bad`` is told."""
    try:
        messages = chat_messages(item)
        for message in messages or ():
            _calls(message)
    except _MALFORMED as error:
        bad.append(f"{where}: a field is missing or of another kind: {error}")
        return []
    if messages is None:
        bad.append(f"{where}: has neither messages nor command and output")
    return messages or []


def _conversations(rows: Iterable[Json]) -> Iterator[list[Json]]:
    """Sessions that have a name may be written at the same time. Otherwise a system message after any other begins a
    new conversation."""
    sessions: dict[str, list[Json]] = {}
    for row in rows:
        sessions.setdefault(str(row["session"]), []).extend(row["messages"])
    for messages in sessions.values():
        conversation: list[Json] = []
        for message in messages:
            if message["role"] == "system" and any(each["role"] != "system" for each in conversation):
                yield conversation
                conversation = []
            conversation.append(message)
        yield conversation


@dataclass(frozen=True, slots=True)
class _Reader:
    name: str
    steps: Callable[[Json], Iterable[LoggedStep | float]]
    """The steps, and the seconds of generations that asked for none."""
    messages: Callable[[Json], list[Any]] | None = None
    """Of a document of messages, what it has of them: `steps` is given those alone that can be understood."""


_RowKind = Literal["document", "message", "step"]


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a file, or one item of a list in it."""

    where: str
    content: Json
    kind: _RowKind
    reader: _Reader | None = None
    """Of a document."""


def _add_document(log: Log, where: str, reader: _Reader, document: Json, file: Path) -> None:
    before, task = len(log.skipped), _task(document, file)
    if reader.messages is not None:
        items = enumerate(reader.messages(document), start=1)
        understood = (_understood(f"{where}, message {number}", item, log.skipped) for number, item in items)
        document = {"messages": [message for messages in understood for message in messages]}
    _add(log, where, reader, document, task, complained=len(log.skipped) > before)


def _add(log: Log, where: str, reader: _Reader, document: Json, task: str, complained: bool = False) -> None:
    """``complained``: whether what is wrong with the document has been said."""
    try:
        rollout = _rollout(task, reader.steps(document))
    except (_UnreadableError, ValueError, *_MALFORMED) as error:
        reason = (
            str(error) if isinstance(error, _UnreadableError) else f"a field is missing or of another kind: {error}"
        )
        log.skipped.append(f"{where}: not {reader.name} as we know it ({reason})")
        return
    if not rollout.steps:
        if not complained:
            log.skipped.append(f"{where}: {reader.name} without a command that has an observation")
    else:
        messages = document["messages"] if reader.messages is not None else []
        # A log of requests has every prefix of a rollout, and prefixes of several that ran at the same time.
        before = next((each for each in reversed(log._latest) if _begins(each[0], messages)), None)
        if before is None:
            if messages:
                log._latest.append((messages, len(log.rollouts)))
            log.rollouts.append(rollout)
            log.formats[reader.name] += 1
        else:
            log._latest.remove(before)
            log._latest.append((messages, before[1]))
            log.rollouts[before[1]] = rollout


def _begins(first: list[Json], messages: list[Json]) -> bool:
    return 0 < len(first) < len(messages) and messages[: len(first)] == first


def _rollout(task: str, parts: Iterable[LoggedStep | float]) -> LoggedRollout:
    """Generations that asked for nothing count with the next one that did."""
    steps: list[LoggedStep] = []
    before: float | None = None
    for part in parts:
        if not isinstance(part, LoggedStep):
            before = (before or 0.0) + _checked(part, "generation time")
            continue
        if part.command.strip():
            generating = part.generation_seconds
            if before is not None:
                generating = before + (generating or 0.0)
            _checked(part.seconds, "tool time")
            steps.append(replace(part, generation_seconds=_checked(generating, "generation time")))
            before = None
    return LoggedRollout(_writable(task), tuple(steps), before)


Seconds = TypeVar("Seconds", float, float | None)


def _checked(seconds: Seconds, what: str) -> Seconds:
    if seconds is not None and not 0 <= seconds < _LONGEST:
        raise _UnreadableError(f"{what} must be a number of seconds from 0 to {_LONGEST:.0f}, not {seconds}")
    return seconds


_LONGEST = 1e7
"""Seconds: four months."""


def _task(document: Json, file: Path) -> str:
    """What tells that two rollouts were of the same task: a name, or the instruction itself."""
    info = document.get("info")
    for content in (document, info if isinstance(info, dict) else {}):
        for key in _TASK_KEYS:
            if isinstance(content.get(key), str):
                return str(content[key])
    if file.name.startswith("trajectory.") and file.parent.name == "agent":
        return file.parents[1].name.rpartition("__")[0] or file.parents[1].name  # Harbor: TASK__TRIAL/agent/
    for name, who, what in (
        ("messages", "role", "content"),
        ("input", "role", "content"),
        ("steps", "source", "message"),
    ):
        for message in _said(document.get(name)):
            if isinstance(message, dict) and message.get(who) == "user":
                text = _text(message.get(what))
                if not _OF_HARNESS.fullmatch(text.strip()):
                    return text
    return re.sub(r"(\.(traj|jsonl?|gz))+$", "", file.name)


_OF_HARNESS = re.compile(r"<\w+>.*</\w+>", re.DOTALL)
"""What Codex and Claude Code say in the user's name: where they run, what they are to heed."""
_TASK_KEYS = ("task", "task_id", "task_name", "instance_id")


# JSON lines of steps.


def _add_steps(log: Log, rows: Iterable[_Row]) -> None:
    """Rows with a name of their rollout may be mixed with those of others; rows without follow one another."""
    rollouts: list[tuple[str, list[LoggedStep]]] = []
    latest: dict[tuple[str, str], tuple[int, list[LoggedStep]]] = {}
    for each in rows:
        row = each.content
        try:
            step = _plain_step(row)
        except _UnreadableError as error:
            log.skipped.append(f"{each.where}: {error}")
            continue
        if step is None:
            log.incomplete += 1
            continue
        task = str(next((row[key] for key in _TASK_KEYS if key in row), ""))
        name = next((str(row[key]) for key in ("rollout", "trial", "trajectory", "session") if key in row), "")
        place = row.get("step")
        place = place if isinstance(place, int) else -1
        before, steps = latest.get((task, name), (-1, None))
        if steps is None or 0 <= place <= before:
            steps = []
            rollouts.append((task, steps))
        steps.append(step)
        if not name:
            latest = {key: own for key, own in latest.items() if key[1]}
        latest[task, name] = place, steps
    for task, steps in rollouts:
        log.rollouts.append(_rollout(task, steps))
        log.formats["JSON lines"] += 1


def _plain_step(row: Json) -> LoggedStep | None:
    """None for one that is incomplete."""
    command, output = row["command"], row.get("output", row.get("observation"))
    if command is None or output is None:
        return None
    if not isinstance(command, str) or not isinstance(output, str):
        raise _UnreadableError("command and output must be text")
    if not command.strip():
        return None
    code = row.get("exit_code", row.get("returncode"))
    seconds, generating = (_seconds(row, key) for key in ("seconds", "generation_seconds"))
    return _step(command, _observation(output, code), seconds, generating)


def _seconds(row: Json, key: str) -> float | None:
    value = row.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _UnreadableError(f"{key} must be a number of seconds, not {value!r:.40}")
    return float(_checked(value, key))


def _step(command: Any, observation: str, seconds: float | None = None, generating: float | None = None) -> LoggedStep:
    if not isinstance(command, str):
        raise _UnreadableError(f"a command must be text, not {command!r:.40}")
    return LoggedStep(_writable(command.strip()), _writable(observation), seconds, generating)


def _writable(text: str) -> str:
    """Without lone surrogates, which no file can hold."""
    return text.encode(errors="replace").decode()


# Messages, of which mini-swe-agent's trajectories are made as well.


def _messages(document: Json) -> Iterator[LoggedStep | float]:
    """Several calls in one message are one step: the policy goes on when all have been answered."""
    messages = joined(document["messages"])
    called = [_calls(message) for message in messages]
    calls_tools = any(called)
    asked: dict[str, str] = {}
    answers: dict[str, str] = {}
    asked_at = observed_at = generating = None
    for message, calls in zip(messages, called, strict=True):
        role, time = message.get("role"), _time(message)
        if role == "assistant":
            # Where tools are called, a block of bash in a text is none that is run.
            commands = calls if calls_tools else _blocks(message)
            if not commands and asked:
                continue  # A remark between a call and its answer.
            if asked:
                yield from _turn(asked, answers, _between(asked_at, observed_at), generating)
            generating = _between(observed_at, time)
            if not commands and generating is not None:
                yield generating
            asked, answers, asked_at, observed_at = commands, {}, time, time
        elif asked and (role == "tool" or (role == "user" and (not calls_tools or "raw_output" in _extra(message)))):
            key = _answered(message.get("tool_call_id"), asked, answers)
            if key is not None:
                answers[key] = _message_observation(message)
                observed_at = time
            if len(answers) == len(asked):
                yield from _turn(asked, answers, _between(asked_at, observed_at), generating)
                asked = {}
        elif not asked:
            observed_at = time
    if asked:
        yield from _turn(asked, answers, _between(asked_at, observed_at), generating)


def _answered(named: Any, asked: Mapping[str, str], answers: Mapping[str, str]) -> str | None:
    """Which call an answer is of that names this one: the first without an answer where it names none, or where calls
    have no names."""
    if str(named) in asked:
        return str(named)
    waiting = (key for key in asked if key not in answers)
    return next((key for key in waiting if named in _NO_NAMES or key.startswith(_UNNAMED)), None)


def _turn(
    asked: dict[str, str], answers: dict[str, str], seconds: float | None, generating: float | None
) -> Iterator[LoggedStep | float]:
    """The calls of one message that were answered, as one step."""
    answered = [key for key in asked if key in answers]
    if answered:
        command = "\n".join(asked[key] for key in answered)
        yield _step(command, "\n".join(answers[key] for key in answered), seconds, generating)
    elif generating is not None:
        yield generating


def _said(given: Any) -> list[Any]:
    """What a request for a response gave: items, or the user's text alone."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given if isinstance(given, list) else []


_MESSAGES = _Reader("messages", _messages, lambda document: _said(document["messages"]))
_RESPONSE = _Reader(
    "OpenAI responses", _messages, lambda document: [*_said(document.get("input")), *document["output"]]
)


def _calls(message: Json) -> dict[str, str]:
    """What a message of the policy calls, in its order: by the name that its answer gives, or by place."""
    actions = _extra(message).get("actions")
    if isinstance(actions, list):
        actions = [each if isinstance(each, dict) else {"command": each} for each in actions]
        return {_key(each.get("tool_call_id"), place): each["command"] for place, each in enumerate(actions)}
    calls = message.get("tool_calls") or []
    return {
        _key(call.get("id"), place): _call(call["function"]["name"], call["function"]["arguments"])
        for place, call in enumerate(calls)
    }


_NO_NAMES = (None, "")
_UNNAMED = "#"


def _key(named: Any, place: int) -> str:
    return f"{_UNNAMED}{place}" if named in _NO_NAMES else str(named)


def _blocks(message: Json) -> dict[str, str]:
    """The one block of bash in a text."""
    blocks = _FENCED.findall(_text(message.get("content")))
    return {"": blocks[0].strip()} if len(blocks) == 1 else {}


def _extra(message: Json) -> Json:
    """What mini-swe-agent adds to a message."""
    extra = message.get("extra")
    return extra if isinstance(extra, dict) else {}


_FENCED = re.compile(r"```(?:bash|sh|shell|mswea_bash_command)\s*\n(.*?)\n?```", re.DOTALL)


def _call(name: str, arguments: Any) -> str:
    """A shell command as it is; a call of any other tool with its arguments."""
    if isinstance(arguments, str):
        try:
            arguments = _parsed(arguments)
        except ValueError:
            return f"{name} {arguments}"
    if isinstance(arguments, dict) and not {"path", "file_path"} & arguments.keys():  # as editors have
        for key in ("command", "cmd", "keystrokes"):
            match arguments.get(key):
                case str(command):
                    return command.strip()
                case ["bash" | "sh", "-c" | "-lc", str(command)]:
                    return command.strip()
                case [*words] if words and all(isinstance(word, str) for word in words):
                    return shlex.join(words)
    return f"{name} {json.dumps(arguments, sort_keys=True)}"


def _message_observation(message: Json) -> str:
    extra = _extra(message)
    if isinstance(extra.get("raw_output"), str):
        return _observation(extra["raw_output"], extra.get("returncode"))
    text = _printed(message.get("content"))
    if match := _RETURNCODE.fullmatch(text.strip()):
        return _observation(match[3] if match[2] is None else match[2], int(match[1]))
    if match := _HEADER.match(text):
        return _observation(text[match.end() :], int(match["code"]))
    return _observation(text, None)


def _printed(content: Any) -> str:
    """What a tool gave. Codex has put it into JSON of several kinds."""
    if isinstance(content, str) and content.startswith("{"):
        with suppress(ValueError):
            parsed = _parsed(content)
            content = parsed if "output" in parsed and "metadata" in parsed else content
    if isinstance(content, dict):
        text = next(
            (content[name] for name in ("output", "content", "text") if isinstance(content.get(name), str)), None
        )
        metadata = content.get("metadata")
        code = metadata.get("exit_code") if isinstance(metadata, dict) else None
        if text is None:
            return json.dumps(content, sort_keys=True)
        return f"Exit code {code}\n{text}" if isinstance(code, int) else text
    if isinstance(content, list) and any(isinstance(part, dict) and "stdout" in part for part in content):
        return "".join(f"{part.get('stdout', '')}{part.get('stderr', '')}" for part in content)
    return _text(content)


_HEADER = re.compile(
    r"(?:Chunk ID: .*\n)?(?:Wall time: .*\n)?(?:Exit code:? |Process exited with code )(?P<code>-?\d{1,9})\n"
    r"(?:(?:Wall time|Total output lines|Original token count): .*\n)*(?:Output:\n)?"
)
"""What Codex and Claude Code put before what a command printed: how it ended, and how long it took."""


_RETURNCODE = re.compile(r"<returncode>(-?\d+)</returncode>\s*(?:<output>\n?(.*?)\n?</output>|(.*))", re.DOTALL)
"""How mini-swe-agent shows what a command printed."""


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _time(message: Json) -> float | None:
    """When a message came, in seconds."""
    for content in (message, _extra(message)):
        value = content.get("timestamp", content.get("created_at"))
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e14:
            return float(value) / (1000 if value > 1e11 else 1)  # 1e11 seconds are in the year 5138.
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                return None
    return None


def _between(start: float | None, end: float | None) -> float | None:
    """None where it is not known, or cannot be: sessions are taken up again much later."""
    return None if start is None or end is None or end - start >= _LONGEST else max(0.0, end - start)


# SWE-agent.


def _swe_agent(document: Json) -> Iterator[LoggedStep]:
    for step in document["trajectory"]:
        if step["action"] and step["observation"] is not None:
            yield _step(step["action"], _observation(step["observation"], None), _seconds(step, "execution_time"))


_SWE_AGENT = _Reader("SWE-agent", _swe_agent)


# The Agent Trajectory Interchange Format, as Harbor writes it.


def _atif(document: Json) -> Iterator[LoggedStep]:
    """Several calls in one step are one, and may share one result."""
    for step in document["steps"]:
        results = (step.get("observation") or {}).get("results") or []
        calls = [_call(call["function_name"], call.get("arguments")) for call in step.get("tool_calls") or []]
        if calls and results:
            texts = [_text(result.get("content")) for result in results]
            yield _step("\n".join(calls), _observation("\n".join(texts), None))


_ATIF = _Reader("ATIF", _atif)


# ObsSpec's own runs.


def _obsspec(document: Json) -> Iterator[LoggedStep | float]:
    for turn in document["turns"]:
        generating = sum(until - since for since, until in turn["generating"])
        if turn["executing"] is None:
            yield generating
        else:
            start, end = turn["executing"]
            yield _step(turn["command"], turn["observation"], end - start, generating)


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
            return replace(_MESSAGES, name="mini-swe-agent")
        return _MESSAGES
    if isinstance(document.get("output"), list) and "command" not in document:
        return _RESPONSE
    return None


# What was printed.

_SILENCE = frozenset(
    (
        "Your command ran successfully and did not produce any output.",
        "(Bash completed with no output)",
        SANDBOX.silence,
    )
)
"""What harnesses write for nothing."""


def _observation(output: str, code: Any) -> str:
    return SANDBOX.render("" if output.strip() in _SILENCE else output, _exit_code(code))


def _exit_code(code: Any) -> int:
    """Tables in which some are missing make numbers or text of them."""
    match code:
        case None:
            return 0
        case int() if not isinstance(code, bool):
            return code
        case float() if code.is_integer():
            return int(code)
        case str() if re.fullmatch(r"-?\d{1,9}", code.strip()):
            return int(code)
    raise _UnreadableError(f"an exit code must be a whole number, not {code!r:.40}")


def _keeps_directory(log: Log) -> bool:
    """Agents whose shell is new for each command change the directory in most of them."""
    commands = [step.command for rollout in log.rollouts for step in rollout.steps]
    changing = sum(bool(re.match(r"cd \S+ *(&&|;)", command)) for command in commands)
    return changing < 0.3 * len(commands)
