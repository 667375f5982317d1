"""What world models learn from, kept while rollouts run: a store of transitions that outlives crashes.

It is one SQLite file. Any number of processes add to it and read it at the same time, and what `Transitions.add` has
returned for is on the disk. A history is not stored with each transition: it is the earlier steps of the same rollout,
so a rollout is dropped whole or not at all.
"""

from __future__ import annotations

import math
import os
import sqlite3
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial, reduce
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Lock
from typing import IO, Annotated, Any, Literal, Protocol
from uuid import uuid4

import anyio
import anyio.to_thread
from pydantic import Field, TypeAdapter, ValidationError

from obsspec.errors import InputError, writing, wrong_field
from obsspec.lines import LineFile
from obsspec.types import Environment, Exchange, Observation, OpenEnvironment, Query, Task

_APPLICATION, _VERSION = 0x0B5_7A45, 1
"""What the file's header says that it is (SQLite's ``application_id`` and ``user_version``)."""

_PATIENCE = 60.0
"""Seconds to wait for another process that is writing."""
_AGAIN_SECONDS = 0.02

_BATCH = 100
"""Transitions that are read at once. Between batches nothing is held, so a slow reader is in nobody's way."""

_LAST = 2**63 - 1

_SCHEMA = """
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY,
    key TEXT NOT NULL UNIQUE,
    task TEXT NOT NULL,
    instruction TEXT NOT NULL,
    latest REAL NOT NULL
);
CREATE INDEX rollouts_by_age ON rollouts (latest);
-- AUTOINCREMENT: an id is never used again, also where the latest rollout was dropped, for readers go on from one.
CREATE TABLE steps (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    command TEXT NOT NULL,
    observation TEXT NOT NULL,
    seconds REAL NOT NULL,
    exit_code INTEGER,
    timed_out INTEGER NOT NULL,
    created REAL NOT NULL,
    digest BLOB NOT NULL, -- of the task and all exchanges up to this one: equal transitions have equal ones
    UNIQUE (rollout, place)
);
CREATE INDEX steps_by_digest ON steps (digest);
-- Counting the rows takes time in proportion to them; this does not.
CREATE TABLE size (steps INTEGER NOT NULL);
INSERT INTO size VALUES (0);
CREATE TRIGGER added AFTER INSERT ON steps BEGIN UPDATE size SET steps = steps + 1; END;
CREATE TRIGGER dropped AFTER DELETE ON steps BEGIN UPDATE size SET steps = steps - 1; END;
"""

_COLUMNS = (
    "steps.id, digest, key, place, task, instruction, command, observation, seconds, exit_code, timed_out, created"
)
_SELECT = f"SELECT {_COLUMNS} FROM steps JOIN rollouts ON rollouts.id = steps.rollout"
_SELECT_ROLLOUT = f"""
SELECT {_COLUMNS}, NOT EXISTS (
    SELECT 1 FROM steps AS later WHERE later.digest = steps.digest AND later.id > steps.id AND later.id <= ?
)
FROM steps JOIN rollouts ON rollouts.id = steps.rollout WHERE key = ? AND steps.id <= ? ORDER BY place
"""


@dataclass(frozen=True, slots=True)
class Transition:
    """One executed command, with all that came before it and what was observed."""

    id: int
    """Higher than those of all transitions that were added before."""
    rollout: str
    """The same for every transition of a rollout, and for no other's."""
    query: Query
    """Task, history and command: what a predictor would have been asked."""
    observation: Observation
    created: float
    """When it was added, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """All transitions of a rollout so far, in order. The sequences are equally long, and not empty."""

    task: str
    instruction: str
    exchanges: tuple[Exchange, ...]
    seconds: tuple[float, ...]
    """That the tools took."""
    fresh: tuple[bool, ...]
    """False where a later transition has the same task, history, command and observed text: learn that one."""


_Text = Annotated[str, Field(strict=True, min_length=0)]
"""Strict: no blob. With a length, whatever it is: else text that is no Unicode passes."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A transition as it is stored and exported: its history is the lines of the same rollout with lower places."""

    rollout: _Text
    place: Annotated[int, Field(ge=0, lt=2**63)]
    task: _Text
    instruction: _Text
    command: _Text
    observation: _Text
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    exit_code: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None
    timed_out: bool
    created: Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class _Stored:
    id: int
    digest: bytes
    line: _Line


class Transitions:
    """The store in one file. `Transitions.open` opens it, and `Transitions.reading` what is only read. Safe to share
    between threads.

    Every method raises InputError where the file cannot be read or written, or the disk is full; what was added before
    stays.
    """

    def __init__(self, path: Path, database: sqlite3.Connection, max_age_seconds: float, max_count: int) -> None:
        self._path = path
        self._database = database
        self._max_age_seconds = max_age_seconds
        self._max_count = max_count
        self._lock = Lock()

    @classmethod
    @contextmanager
    def open(cls, path: Path, max_age_seconds: float = math.inf, max_count: int = 1_000_000) -> Iterator[Transitions]:
        """The store in the file ``path``, which is created where there is none. It needs a local disk.

        Whenever this process adds something, it drops the rollouts to which nothing was added for ``max_age_seconds``,
        and then those that have waited longest, until there are ``max_count`` transitions or fewer. The rollout that
        was just added to stays, however long. Raises InputError where the file cannot be written or is of anything
        else, which it leaves as it was.
        """
        if not max_age_seconds > 0 or max_count < 1:
            raise InputError(
                f"transitions: max_age_seconds ({max_age_seconds}) must be above 0, max_count ({max_count}) at least 1"
            )
        with writing(path, "place"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise InputError(f"{path}: a directory; give a file, such as {path / 'transitions.sqlite'}")
            # SQLite would open what may only be read, and leave files beside it that nobody may write.
            if path.exists() and not os.access(path, os.W_OK):
                raise InputError(f"{path}: may only be read; choose a file that can be written")
        with _connection(path, "rwc") as database:
            with _explained(path):
                _patiently(database, partial(_prepare, database, path))
            yield cls(path, database, max_age_seconds, max_count)

    @classmethod
    @contextmanager
    def reading(cls, path: Path) -> Iterator[Transitions]:
        """The store that is in the file ``path``, to be read alone: nothing can be added to it.

        Others may write it meanwhile. It may be in a place that cannot be written, and nothing is left there. Raises
        InputError where there is no store, or it cannot be read.
        """
        before, mode = _changed_at(path), _reading_mode(path)
        with _connection(path, mode) as database:
            with _explained(path):
                database.execute("PRAGMA query_only = ON")
                _patiently(database, partial(_check, database, path))
            failure: Exception | None = None
            try:
                yield cls(path, database, math.inf, sys.maxsize)
            except Exception as error:
                failure = error
            if mode == _ALONE and _changed_at(path) != before:
                raise InputError(f"{path}: was written while it was read; read it again")
            if failure is not None:
                raise failure

    def __len__(self) -> int:
        with self._transaction("DEFERRED"):
            return self._count()

    def add(self, rollout: str, query: Query, observation: Observation) -> int | None:
        """Adds the next transition of a rollout and returns its id, once it would outlive a loss of power.

        ``rollout``: any text that no other rollout has; `recorded` takes a random one. Returns None where the bounds
        have dropped the beginning of the rollout, for then there is nothing to add it to. Raises ValueError where
        ``query`` does not continue what was added of the rollout before, and for what cannot be stored: text that is
        no Unicode, seconds that are negative or not finite.
        """
        if not 0 <= observation.seconds < math.inf:
            raise ValueError(f"seconds must be 0 or more, and finite, not {observation.seconds!r}")
        before = reduce(_then, query.history, _digest(b"", query.task))
        line = _line(rollout, query, observation, time.time())
        with self._transaction("IMMEDIATE"):
            if line.place:
                previous = self._find(rollout, line.place - 1)
                if previous is None and self._find(rollout, 0) is None:
                    return None
                if previous is None or previous.digest != before:
                    raise ValueError(f"rollout {rollout}: its history is not what was added of it before")
            if self._find(rollout, line.place) is not None:
                raise ValueError(f"rollout {rollout}: its transition {line.place} was added before")
            number = self._insert(line, before)
            self._drop(kept=rollout)
        return number

    def after(self, id: int = 0) -> Iterator[Transition]:
        """Every transition that was added after the one with this id, in the order of their ids.

        It ends with the latest. To follow other processes call it again with the last id that it gave: none is missed
        but what the bounds have dropped by then.
        """
        query = f"{_SELECT} WHERE steps.id > ? ORDER BY steps.id LIMIT {_BATCH}"
        while True:
            with self._transaction("DEFERRED"):  # One view of the file, so that histories are whole.
                rows = self._database.execute(query, (id,)).fetchall()
                batch = self._with_histories([self._stored(row) for row in rows])
            if not batch:
                return
            yield from batch
            id = batch[-1].id

    def for_training(self) -> Iterator[StoredRollout]:
        """The rollouts there are now, the latest first, each as it is now."""
        with self._transaction("DEFERRED"):
            until = self._latest_id()
            keys = [key for (key,) in self._database.execute("SELECT key FROM rollouts ORDER BY latest DESC, id DESC")]
        for key in keys:
            rollout = self.rollout(key, until)
            if rollout is not None:  # The bounds may have dropped it meanwhile.
                yield rollout

    def rollout(self, key: str, until: int = _LAST) -> StoredRollout | None:
        """A rollout by its name, without what was added after the transition ``until``; None where there is none."""
        with self._transaction("DEFERRED"):
            rows = self._database.execute(_SELECT_ROLLOUT, (until, key, until)).fetchall()
        if not rows:
            return None
        lines = [self._stored(columns).line for *columns, _ in rows]
        return StoredRollout(
            lines[0].task,
            lines[0].instruction,
            tuple(Exchange(line.command, line.observation) for line in lines),
            tuple(line.seconds for line in lines),
            tuple(bool(fresh) for *_, fresh in rows),
        )

    def news(self, id: int, most: int = 1000) -> tuple[int, dict[str, int]]:
        """What was added after the transition with this id, at most so many: the id of the last of it, and for each
        rollout that it belongs to the place, from 0, of the first."""
        query = "SELECT steps.id, key, place FROM steps JOIN rollouts ON rollouts.id = steps.rollout "
        with self._transaction("DEFERRED"):
            rows = self._database.execute(
                f"{query} WHERE steps.id > ? ORDER BY steps.id LIMIT ?", (id, most)
            ).fetchall()
        places: dict[str, int] = {}
        for _, key, place in rows:
            places.setdefault(key, place)
        return (rows[-1][0] if rows else id), places

    def anywhere(self, at: float) -> str | None:
        """The name of the rollout of the transition at ``at``, in [0, 1), of all there are; None where there is none.

        Where the bounds have dropped some between, those after them are found as often as they would have been.
        """
        query = "SELECT key FROM steps JOIN rollouts ON rollouts.id = steps.rollout WHERE steps.id > ? "
        with self._transaction("DEFERRED"):
            first = self._database.execute("SELECT coalesce(min(id), 0) FROM steps").fetchone()[0]
            after = first - 1 + int(at * (self._latest_id() + 1 - first))
            row = self._database.execute(f"{query} ORDER BY steps.id LIMIT 1", (after,)).fetchone()
        return None if row is None else str(row[0])

    def export_to(self, file: Path) -> int:
        """Writes every transition to a ``.jsonl`` or ``.parquet`` file, and returns how many.

        A transition's history is those of the same ``rollout`` with lower ``place``, which come before it. The file is
        replaced once it is whole.
        """
        write = {".jsonl": _write_jsonl, ".parquet": _write_parquet}[_kind(file)]
        lines = (_line(each.rollout, each.query, each.observation, each.created) for each in self.after())
        with (
            writing(file, "place"),
            NamedTemporaryFile("wb", dir=file.parent, prefix=file.name, delete=False) as stream,
        ):
            try:
                count = write(lines, stream)
                stream.flush()
                os.fsync(stream.fileno())
                Path(stream.name).replace(file)
            except BaseException:
                Path(stream.name).unlink()
                raise
        return count

    def import_from(self, file: Path) -> int:
        """Adds what `export_to` wrote, all of it or nothing, and returns how many were not there yet.

        They keep the time at which they were first added, so the bounds may drop them at once. Raises InputError that
        names the line and what is wrong with it: a field, a step before it that is missing, or a transition here that
        has its rollout and place and differs.
        """
        lines, unit = (_read_jsonl(file), "line") if _kind(file) == ".jsonl" else (_read_parquet(file), "row")
        added = 0
        with self._transaction("IMMEDIATE"):
            for number, line in enumerate(lines, start=1):
                found = self._find(line.rollout, line.place)
                if found is None:
                    if not self._append(line):
                        raise InputError(
                            f"{file}, {unit} {number}: place: the step of its rollout before {line.place} is missing; "
                            "give the whole of what was exported"
                        )
                    added += 1
                elif found.line != line:
                    field = next(name for name, value in asdict(line).items() if getattr(found.line, name) != value)
                    raise InputError(
                        f"{file}, {unit} {number}: {field}: not what {self._path} has for place {line.place} of that "
                        "rollout; remove that rollout from the file"
                    )
            self._drop(kept=None)
        return added

    def receive(self, content: bytes) -> tuple[int, int]:
        """Adds lines such as `posted_line` makes. Returns how many were added, and how many had nothing to be added to.

        A line that is there already is neither, so what was sent may be sent again. Raises ValueError that names the
        first line that is none, and then adds nothing.
        """
        lines = []
        for number, posted in enumerate(content.split(b"\n"), start=1):
            try:
                if posted:
                    lines.append(_ADAPTER.validate_json(posted))
            except ValidationError as error:
                raise ValueError(f"line {number}: {wrong_field(error, 'the line')}") from None
        added = homeless = 0
        with self._transaction("IMMEDIATE"):
            for line in lines:
                if self._find(line.rollout, line.place) is None:
                    appended = self._append(line)
                    added += appended
                    homeless += not appended
            self._drop(kept=lines[-1].rollout if lines else None)
        return added, homeless

    def latest_id(self) -> int:
        """Of the transition that was added last; 0 where there is none."""
        with self._transaction("DEFERRED"):
            return self._latest_id()

    def _latest_id(self) -> int:
        return int(self._database.execute("SELECT coalesce(max(id), 0) FROM steps").fetchone()[0])

    def _count(self) -> int:
        sizes = self._database.execute("SELECT steps FROM size").fetchall()
        match sizes:
            case [(int(count),)]:
                return count
        raise InputError(f"{self._path}, the row of size: steps: not a number, as it was made; choose another file")

    def _find(self, rollout: str, place: int) -> _Stored | None:
        row = self._database.execute(f"{_SELECT} WHERE key = ? AND place = ?", (rollout, place)).fetchone()
        return None if row is None else self._stored(row)

    def _stored(self, row: Sequence[Any]) -> _Stored:
        """Raises InputError where somebody has put into the file what never was added."""
        number, digest, *values = row
        try:
            line = _ADAPTER.validate_python(dict(zip(_Line.__slots__, values, strict=True)))
            wrong = None if isinstance(digest, bytes) else "digest: Input should be a blob"
        except ValidationError as error:
            wrong = wrong_field(error, "the row")
        if wrong is not None:
            raise InputError(
                f"{self._path}, row {number} of steps: {wrong}; not what rollouts added: remove its rollout, or choose "
                "another file"
            )
        return _Stored(number, digest, line)

    def _append(self, line: _Line) -> bool:
        """Inserts it behind the step before it; False where that is missing, or of another task."""
        previous = self._find(line.rollout, line.place - 1) if line.place else None
        if line.place and (previous is None or not _same_rollout(previous.line, line)):
            return False
        self._insert(line, previous.digest if previous else _digest(b"", line.task))
        return True

    def _insert(self, line: _Line, before: bytes) -> int:
        """``before``: the digest of what came before it in its rollout."""
        digest = _then(before, Exchange(line.command, line.observation))
        self._database.execute(
            "INSERT INTO rollouts (key, task, instruction, latest) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (key) DO UPDATE SET latest = max(latest, excluded.latest)",
            (line.rollout, line.task, line.instruction, line.created),
        )
        cursor = self._database.execute(
            "INSERT INTO steps (rollout, place, command, observation, seconds, exit_code, timed_out, created, digest) "
            "SELECT id, ?, ?, ?, ?, ?, ?, ?, ? FROM rollouts WHERE key = ?",
            (
                *(line.place, line.command, line.observation, line.seconds),
                *(line.exit_code, line.timed_out, line.created, digest),
                line.rollout,
            ),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _drop(self, kept: str | None) -> None:
        """The oldest rollouts but ``kept``, as far as the bounds ask for it."""
        oldest = time.time() - self._max_age_seconds
        self._database.execute("DELETE FROM rollouts WHERE latest < ? AND key IS NOT ?", (oldest, kept))
        dropped = 1
        while dropped and self._count() > self._max_count:
            dropped = self._database.execute(
                "DELETE FROM rollouts WHERE id = "
                "(SELECT id FROM rollouts WHERE key IS NOT ? ORDER BY latest, id LIMIT 1)",
                (kept,),
            ).rowcount

    def _with_histories(self, batch: Sequence[_Stored]) -> list[Transition]:
        """Each rollout is read once, for most steps of one are in the same batch."""
        query = f"{_SELECT} WHERE key = ? AND place < ? ORDER BY place"
        latest = {each.line.rollout: each.line.place for each in batch}  # They come in the order of their places.
        rollouts: dict[str, list[tuple[int, Exchange]]] = {}
        for key, place in latest.items():
            lines = [self._stored(row).line for row in self._database.execute(query, (key, place))]
            rollouts[key] = [(line.place, Exchange(line.command, line.observation)) for line in lines]
        return [
            _transition(each, tuple(done for place, done in rollouts[each.line.rollout] if place < each.line.place))
            for each in batch
        ]

    @contextmanager
    def _transaction(self, kind: Literal["IMMEDIATE", "DEFERRED"]) -> Iterator[None]:
        """To write, or to read from one view of the file. It is undone where the block raises."""
        with self._lock, _explained(self._path):
            self._database.execute(f"BEGIN {kind}")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite itself may have undone it, as where the disk is full.
                    self._database.execute("ROLLBACK")
                raise


class Recorder(Protocol):
    """Where transitions go: `Transitions`, or what sends them elsewhere."""

    def add(self, rollout: str, query: Query, observation: Observation) -> int | None:
        """See `Transitions.add`. Called in a thread, one call at a time."""


def posted_line(rollout: str, query: Query, observation: Observation) -> bytes:
    """A transition for `Transitions.receive`: a line of JSON, without the earlier steps of its rollout."""
    return _ADAPTER.dump_json(_line(rollout, query, observation, time.time())) + b"\n"


def recorded(open_environment: OpenEnvironment, transitions: Recorder) -> OpenEnvironment:
    """The same environment; each command is in ``transitions`` before the policy reads what was observed.

    An environment executes what is committed and nothing else, so this is what the rollouts really did, in any loop and
    with speculation or without. Where the store cannot be written, `execute` raises InputError, and the rollout ends.
    """
    # One writer at a time: others in this process would wait for the file's lock, each in a thread.
    writer = anyio.CapacityLimiter(1)

    @asynccontextmanager
    async def open_recorded(task: Task) -> AsyncIterator[Environment]:
        async with open_environment(task) as environment:
            yield _Recorded(environment, transitions, task, writer)

    return open_recorded


class _Recorded:
    def __init__(
        self, environment: Environment, transitions: Recorder, task: Task, writer: anyio.CapacityLimiter
    ) -> None:
        self._environment = environment
        self._transitions = transitions
        self._task = task
        self._writer = writer
        self._rollout = uuid4().hex
        self._history: tuple[Exchange, ...] = ()

    async def execute(self, command: str) -> Observation:
        observation = await self._environment.execute(command)
        query = Query(self._task.id, self._task.instruction, self._history, command)
        # In a thread, because it waits for the disk and the other rollouts go on meanwhile.
        await anyio.to_thread.run_sync(self._transitions.add, self._rollout, query, observation, limiter=self._writer)
        self._history += (Exchange(command, observation.text),)
        return observation

    async def score(self) -> float:
        return await self._environment.score()


# Digests: of a task, and then of one exchange after another.


def _digest(before: bytes, *texts: str) -> bytes:
    hashed = blake2b(before, digest_size=16)
    for text in texts:
        encoded = text.encode()
        hashed.update(len(encoded).to_bytes(8, "big"))
        hashed.update(encoded)
    return hashed.digest()


def _then(before: bytes, exchange: Exchange) -> bytes:
    return _digest(before, exchange.command, exchange.observation)


# Lines.


def _line(rollout: str, query: Query, observation: Observation, created: float) -> _Line:
    return _Line(
        rollout=rollout,
        place=len(query.history),
        task=query.task,
        instruction=query.instruction,
        command=query.command,
        observation=observation.text,
        seconds=observation.seconds,
        exit_code=observation.exit_code,
        timed_out=observation.timed_out,
        created=created,
    )


def _transition(stored: _Stored, history: tuple[Exchange, ...]) -> Transition:
    line = stored.line
    observation = Observation(line.observation, line.seconds, line.exit_code, line.timed_out)
    query = Query(line.task, line.instruction, history, line.command)
    return Transition(stored.id, line.rollout, query, observation, line.created)


def _same_rollout(first: _Line, second: _Line) -> bool:
    return (first.task, first.instruction) == (second.task, second.instruction)


# Files.

_ADAPTER = TypeAdapter(_Line)


def _kind(file: Path) -> Literal[".jsonl", ".parquet"]:
    if file.suffix == ".jsonl":
        return ".jsonl"
    if file.suffix == ".parquet":
        return ".parquet"
    raise InputError(f"{file}: neither .jsonl nor .parquet; give a file with one of these endings")


def _write_jsonl(lines: Iterable[_Line], stream: IO[bytes]) -> int:
    count = 0
    for line in lines:
        stream.write(_ADAPTER.dump_json(line) + b"\n")
        count += 1
    return count


def _read_jsonl(file: Path) -> list[_Line]:
    return LineFile(file, _ADAPTER, "rollout", "`Transitions.export_to`", "with the same call").read()


def _write_parquet(lines: Iterator[_Line], stream: IO[bytes]) -> int:
    pyarrow = _parquet(stream.name)
    text, number = pyarrow.string(), pyarrow.float64()
    types = (text, pyarrow.int64(), *(text,) * 4, number, pyarrow.int64(), pyarrow.bool_(), number)
    schema = pyarrow.schema(list(zip(_Line.__slots__, types, strict=True)))
    count = 0
    with pyarrow.parquet.ParquetWriter(stream, schema) as writer:
        while group := [asdict(line) for line in islice(lines, 10_000)]:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))
            count += len(group)
    return count


def _read_parquet(file: Path) -> list[_Line]:
    pyarrow = _parquet(file)
    try:
        with file.open("rb") as stream:
            rows = pyarrow.parquet.read_table(stream).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = getattr(error, "strerror", None) or "not a Parquet file"
        raise InputError(f"{file}: {reason}; give what `Transitions.export_to` wrote") from None
    lines = []
    for place, row in enumerate(rows, start=1):
        try:
            lines.append(_ADAPTER.validate_python(row))
        except ValidationError as error:
            raise InputError(
                f"{file}, row {place}: {wrong_field(error, 'the row')}; not what `Transitions.export_to` wrote"
            ) from None
    return lines


def _parquet(file: object) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{file}: Parquet needs pyarrow: pip install pyarrow, or choose .jsonl") from None
    return pyarrow


# The database.


def is_store(path: Path) -> bool:
    """Whether a file is an SQLite database, as stores of transitions are."""
    with path.open("rb") as stream:
        return stream.read(16) == b"SQLite format 3\0"


_ALONE = "ro&immutable=1"


@contextmanager
def _connection(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """``mode``: as in the URIs of SQLite."""
    where = f"{path.absolute().as_uri()}?mode={mode}"
    with _explained(path):
        database = sqlite3.connect(where, _PATIENCE, isolation_level=None, check_same_thread=False, uri=True)
    # What is no UTF-8 is told by `Transitions._stored`, which knows where it is.
    database.text_factory = lambda content: content.decode(errors="surrogateescape")
    with closing(database):
        yield database


def _reading_mode(path: Path) -> str:
    """How to open a file that is only read, so that nothing is left beside it.

    Whoever opens a store shares it by two more files, which the last one that may write removes. One who may not write
    can use those of others. Where there are none, nobody has it open, and it can be read as it is.
    """
    real = path.resolve()
    latest, shared = (Path(f"{real}{suffix}") for suffix in ("-wal", "-shm"))
    for file in (real, latest, shared):
        if file.exists() and not os.access(file, os.R_OK):
            raise InputError(f"{path}: {file} may not be read; ask its owner, or give a copy that you can read")
    if os.access(real, os.W_OK) and os.access(real.parent, os.W_OK):
        return "rw"
    if latest.exists() and shared.exists():
        return "ro"
    if latest.exists() and latest.stat().st_size > 0:
        raise InputError(
            f"{path}: what was added last is in {latest}, which can only be read where both can be written; copy both "
            "to another directory and give that copy"
        )
    return _ALONE


def _changed_at(path: Path) -> tuple[int, int, int]:
    """Another value whenever the file has been written or replaced."""
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a store that rollouts have written to") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: no file; give a store that rollouts have written to")
    return status.st_ino, status.st_size, status.st_mtime_ns


def _patiently(database: sqlite3.Connection, prepare: Callable[[], None]) -> None:
    """SQLite itself waits for others almost always: not while one of them begins or ends to share the file."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            prepare()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            database.rollback()
            time.sleep(_AGAIN_SECONDS)


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    """Makes it ours where it is empty, and refuses it where it is anything else's."""
    database.execute("PRAGMA foreign_keys = ON")
    # FULL: a commit is synced. With NORMAL it would outlive a kill, but not a loss of power.
    database.execute("PRAGMA synchronous = FULL")
    if _header(database) == (0, 0):
        database.execute("BEGIN IMMEDIATE")  # Another process may be making it.
        if database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            for statement in _statements():
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {_VERSION}")
        database.execute("COMMIT")
    _check(database, path)
    if database.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise InputError(f"{path}: its file system cannot be shared between processes; choose a file on a local disk")


def _check(database: sqlite3.Connection, path: Path) -> None:
    if _header(database) != (_APPLICATION, _VERSION):
        raise InputError(f"{path}: a database of something else, or of another version; choose another file")


def _header(database: sqlite3.Connection) -> tuple[int, int]:
    application, version = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
    )
    return application, version


def _statements() -> Iterator[str]:
    """Of the schema. (``executescript`` would commit before the first.)"""
    statement = ""
    for line in _SCHEMA.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


_REMEDIES = {
    sqlite3.SQLITE_ERROR: "not as it was made: choose another file",
    sqlite3.SQLITE_NOTADB: "choose another file",
    sqlite3.SQLITE_CORRUPT: "choose another file",
    sqlite3.SQLITE_BUSY: f"another process has been writing it for {_PATIENCE:.0f} s: wait for it",
    sqlite3.SQLITE_FULL: "what was added before is kept: make room",
    sqlite3.SQLITE_IOERR: "what was added before is kept: make room, or choose a file on another disk",
}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raises InputError for what SQLite raises."""
    try:
        yield
    except (sqlite3.ProgrammingError, sqlite3.IntegrityError):  # Mistakes of a program, not of the user.
        raise
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # The rest of it says where in SQLite it was.
        raise InputError(
            f"{path}: {error}; {_REMEDIES.get(code, 'choose a file that can be read and written')}"
        ) from None
