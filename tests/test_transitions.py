"""The store of transitions: whatever happens, nothing that was acknowledged is lost."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from obsspec import Draft, InputError, Observation, Query, Seats, Settings, Speculator, Task, rollout
from obsspec.context import Tokens
from obsspec.gate import Gate
from obsspec.predictors.memory import Memory
from obsspec.runs import Means, Plan, run
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode, encode
from obsspec.training import transitions as module
from obsspec.training.transitions import Transition, Transitions, recorded
from obsspec.types import Exchange, Generation

Steps = Sequence[tuple[str, Observation]]


def store(directory: Path, name: str = "transitions.sqlite", **bounds: Any) -> Any:
    return Transitions.open(directory / name, **bounds)


def add(transitions: Transitions, rollout: str, steps: Steps, task: str = "task") -> list[int | None]:
    """Adds a whole rollout."""
    history: tuple[Exchange, ...] = ()
    numbers = []
    for command, observation in steps:
        numbers.append(transitions.add(rollout, Query(task, f"Do {task}.", history, command), observation))
        history += (Exchange(command, observation.text),)
    return numbers


def printing(*texts: str) -> Steps:
    return [(f"command {place}", Observation(text, 0.5, 0)) for place, text in enumerate(texts)]


def without_ids(transitions: Transitions) -> list[Transition]:
    return [replace(each, id=0) for each in transitions.after()]


def start(program: str, *arguments: object, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A process of its own that runs ``program`` after the imports, and does not outlive the test by much."""
    imports = "import sys\nfrom pathlib import Path\nfrom obsspec.training.transitions import *\n"
    imports += "from obsspec.errors import InputError\nfrom obsspec.types import Exchange, Observation, Query\n"
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", imports + program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# What is added and read.


def test_histories_come_back_whole_and_in_order(tmp_path: Path) -> None:
    steps = [
        ("ls", Observation("a\nb", 0.25, 0)),
        ("cat nothing", Observation("cat: nothing\n[exit code 1]", 1.5, 1)),
        ("sleep 99", Observation("[timed out after 30 s]", 30.0, None, timed_out=True)),
    ]
    with store(tmp_path) as transitions:
        assert list(transitions.after()) == []
        ids = add(transitions, "first", steps)
    with store(tmp_path) as transitions:
        read = list(transitions.after())
        assert len(transitions) == 3
    assert [each.id for each in read] == ids == sorted(ids)
    assert [each.observation for each in read] == [observation for _, observation in steps]
    history = tuple(Exchange(command, observation.text) for command, observation in steps)
    for place, each in enumerate(read):
        assert each.rollout == "first"
        assert each.query == Query("task", "Do task.", history[:place], steps[place][0])


def test_a_reader_goes_on_where_it_was(tmp_path: Path) -> None:
    with store(tmp_path) as writing, store(tmp_path) as reading:
        add(writing, "first", printing(*map(str, range(250))))
        seen = list(reading.after())
        assert len(seen) == 250
        assert list(reading.after(seen[-1].id)) == []
        add(writing, "second", printing("x", "y"))
        assert [each.observation.text for each in reading.after(seen[-1].id)] == ["x", "y"]


def test_ids_are_not_used_again(tmp_path: Path) -> None:
    """A reader would take what has an old id for something that it knows."""
    with store(tmp_path, max_count=1) as transitions:
        (first,) = add(transitions, "first", printing("a"))
        (second,) = add(transitions, "second", printing("b"))
    with closing(sqlite3.connect(tmp_path / "transitions.sqlite", isolation_level=None)) as database:
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("DELETE FROM rollouts")
    with store(tmp_path) as transitions:
        (third,) = add(transitions, "third", printing("c"))
    assert first and second and third
    assert first < second < third


def test_what_does_not_continue_its_rollout_is_refused(tmp_path: Path) -> None:
    history = (Exchange("ls", "a"),)
    with store(tmp_path) as transitions:
        transitions.add("rollout", Query("task", "", (), "ls"), Observation("a"))
        for query in (
            Query("task", "", (), "ls"),  # It is there already.
            Query("task", "", (Exchange("ls", "b"),), "pwd"),
            Query("other", "", history, "pwd"),
            Query("task", "", (*history, Exchange("pwd", "/")), "ls"),
        ):
            with pytest.raises(ValueError, match="rollout rollout: its"):
                transitions.add("rollout", query, Observation("c"))
        for observation in (Observation("\ud800"), Observation("", -1.0), Observation("", float("nan"))):
            with pytest.raises(ValueError, match=r"seconds must be|surrogates not allowed"):
                transitions.add("rollout", Query("task", "", history, "pwd"), observation)
        assert len(transitions) == 1
        transitions.add("rollout", Query("task", "", history, "pwd"), Observation("c"))
        assert len(transitions) == 2


def test_training_sees_equal_transitions_once(tmp_path: Path) -> None:
    with store(tmp_path) as transitions:
        add(transitions, "first", printing("a", "b"))
        add(transitions, "again", [(command, replace(seen, seconds=9.0)) for command, seen in printing("a", "b")])
        add(transitions, "other history", printing("c", "b"))
        add(transitions, "other task", printing("a"), task="other")
        # Where one text ends and the next begins counts.
        add(transitions, "joined", [("command 0a", Observation(""))])
        assert len(transitions) == 7 + 1
        learned = [
            (each.task, [seen.observation for seen, fresh in zip(each.exchanges, each.fresh, strict=True) if fresh])
            for each in transitions.for_training()
        ]
        assert learned == [
            ("task", [""]),
            ("other", ["a"]),
            ("task", ["c", "b"]),
            ("task", ["a", "b"]),
            ("task", []),
        ]


def test_a_follower_learns_what_is_new_in_which_rollouts(tmp_path: Path) -> None:
    with store(tmp_path) as transitions:
        assert transitions.anywhere(0.5) is None and transitions.rollout("first") is None
        add(transitions, "first", printing("a", "b"))
        last, places = transitions.news(0)
        assert places == {"first": 0}
        assert transitions.news(last) == (last, {})
        transitions.add(
            "first",
            Query("task", "", tuple(Exchange(f"command {i}", t) for i, t in enumerate("ab")), "x"),
            Observation("c"),
        )
        add(transitions, "second", printing("d"))
        assert transitions.news(last)[1] == {"first": 2, "second": 0}
        assert transitions.news(last, most=1)[1] == {"first": 2}
        assert [transitions.anywhere(at) for at in (0.0, 0.74, 0.76, 0.999)] == ["first", "first", "second", "second"]
        first = transitions.rollout("first")
        assert first is not None and [each.observation for each in first.exchanges] == ["a", "b", "c"]


def test_what_is_added_meanwhile_does_not_change_what_is_learned(tmp_path: Path) -> None:
    with store(tmp_path) as transitions:
        add(transitions, "first", printing(*map(str, range(150))))
        add(transitions, "second", printing("other"))
        reading = transitions.for_training()
        assert next(reading).fresh == (True,)
        add(transitions, "again", printing(*map(str, range(150))))
        (rest,) = reading
    assert rest.fresh == (True,) * 150
    assert [exchange.observation for exchange in rest.exchanges] == [str(place) for place in range(150)]


# Bounds.


def test_the_rollouts_that_waited_longest_are_dropped_whole(tmp_path: Path) -> None:
    with store(tmp_path, max_count=6) as transitions:
        add(transitions, "first", printing("a"))
        add(transitions, "second", printing(*"bcd"))
        transitions.add("first", Query("task", "", (Exchange("command 0", "a"),), "ls"), Observation("e"))
        add(transitions, "third", printing(*"fg"))
        assert [each.rollout for each in transitions.after()] == ["first", "first", "third", "third"]
        assert len(transitions) == 4
        # A rollout that goes on after its beginning was dropped has nothing to be added to.
        history = tuple(Exchange(command, seen.text) for command, seen in printing(*"bcd"))
        assert transitions.add("second", Query("task", "", history, "ls"), Observation("h")) is None
        assert len(transitions) == 4
        # The one that is being added to stays, however long.
        add(transitions, "long", printing(*map(str, range(10))))
        assert len(transitions) == 10
        assert {each.rollout for each in transitions.after()} == {"long"}


def test_what_is_old_is_dropped(tmp_path: Path) -> None:
    with store(tmp_path, "before") as before:
        add(before, "old", printing("a", "b"))
        before.export_to(tmp_path / "old.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "old.jsonl").read_text().splitlines()]
    aged = [json.dumps(line | {"created": line["created"] - 7200}) for line in lines]
    (tmp_path / "old.jsonl").write_text("\n".join(aged) + "\n")
    with store(tmp_path) as unbounded:
        assert unbounded.import_from(tmp_path / "old.jsonl") == 2
        add(unbounded, "new", printing("c"))
        assert len(unbounded) == 3
    with store(tmp_path, max_age_seconds=3600) as bounded:
        assert len(bounded) == 3, "readers drop nothing"
        add(bounded, "newest", printing("d"))
        assert [each.rollout for each in bounded.after()] == ["new", "newest"]


@pytest.mark.parametrize("bounds", [{"max_count": 0}, {"max_age_seconds": 0}, {"max_age_seconds": float("nan")}])
def test_impossible_bounds_are_refused(tmp_path: Path, bounds: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(bounds))), store(tmp_path, **bounds):
        pass


# Many processes.

WRITER = """
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print(flush=True)
sys.stdin.readline()
with Transitions.open(path) as transitions:
    for rollout in range(count // 10):
        history = ()
        for place in range(10):
            query = Query("task", "", history, f"command {place}")
            transitions.add(f"{name}/{rollout}", query, Observation(f"{name} {rollout}", 1.0))
            history += (Exchange(query.command, f"{name} {rollout}"),)
"""


def test_many_processes_write_while_one_follows(tmp_path: Path) -> None:
    path = tmp_path / "transitions.sqlite"
    writers = [start(WRITER, path, name, 60) for name in "abcde"]
    for writer in writers:
        assert writer.stdout
        writer.stdout.readline()
    for writer in writers:  # All at once, and none finds the file there.
        assert writer.stdin
        writer.stdin.write("\n")
        writer.stdin.flush()
    followed: list[Transition] = []
    with store(tmp_path) as reading:
        running = True
        while running:
            running = any(writer.poll() is None for writer in writers)
            followed += reading.after(followed[-1].id if followed else 0)
        assert [writer.communicate()[1] for writer in writers] == [""] * 5
        assert followed == list(reading.after())
    assert len(followed) == 300
    for each in followed:
        place = len(each.query.history)
        assert each.query.command == f"command {place}"
        assert {exchange.observation for exchange in each.query.history} <= {each.observation.text}


def test_where_sqlite_does_not_wait_it_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was seen where five processes made a store at once on a busy machine, and never again."""
    prepare, calls = module._prepare, []

    def busy(database: sqlite3.Connection, path: Path) -> None:
        calls.append(path)
        if len(calls) < 3:
            database.execute("BEGIN IMMEDIATE")
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY_RECOVERY
            raise error
        prepare(database, path)

    monkeypatch.setattr(module, "_prepare", busy)
    with store(tmp_path) as transitions:
        add(transitions, "rollout", printing("a"))
        assert len(transitions) == 1
    assert len(calls) == 3


ENDLESS = """
history = ()
with Transitions.open(Path(sys.argv[1])) as transitions:
    while True:
        query = Query("task", "", history, f"command {len(history)}")
        print(transitions.add("killed", query, Observation(str(len(history)))), flush=True)
        history += (Exchange(query.command, str(len(history))),)
"""


@pytest.mark.parametrize("acknowledged", [1, 40, 300])
def test_killed_outright_it_has_lost_nothing_that_was_acknowledged(tmp_path: Path, acknowledged: int) -> None:
    with start(ENDLESS, tmp_path / "transitions.sqlite") as child:
        assert child.stdout
        ids = [int(child.stdout.readline()) for _ in range(acknowledged)]
        child.kill()
        ids += [int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    assert child.returncode == -signal.SIGKILL
    with store(tmp_path) as transitions:
        read = list(transitions.after())
        assert [each.id for each in read][: len(ids)] == ids
        assert len(read) - len(ids) in (0, 1), "the last may have been killed before it could say so"
        assert [each.observation.text for each in read] == [str(place) for place in range(len(read))]
        add(transitions, "next", printing("a"))
        assert len(transitions) == len(read) + 1


# Files.

SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
observations = st.builds(
    Observation,
    text,
    st.floats(0, 1e300),
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
)


@SUFFIXES
@settings(deadline=None, max_examples=40)
@given(rollouts=st.dictionaries(text, st.lists(st.tuples(text, observations), min_size=1, max_size=4), max_size=4))
def test_any_text_goes_out_and_comes_in(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, rollouts: dict[str, Steps]
) -> None:
    directory = tmp_path_factory.mktemp("stores")
    file = directory / f"exported{suffix}"
    with store(directory, "first") as first, store(directory, "second") as second:
        for name, steps in rollouts.items():
            add(first, name, steps, task=name)
        count = sum(map(len, rollouts.values()))
        assert first.export_to(file) == len(first) == count
        assert second.import_from(file) == count
        assert second.import_from(file) == 0
        assert without_ids(second) == without_ids(first)
        assert list(second.for_training()) == list(first.for_training())


@SUFFIXES
def test_imports_are_added_to_what_is_there(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"exported{suffix}"
    with store(tmp_path, "first") as first, store(tmp_path, "second") as second:
        add(first, "shared", printing("a"))
        first.export_to(file)
        second.import_from(file)
        first.add("shared", Query("task", "", (Exchange("command 0", "a"),), "ls"), Observation("b"))
        add(first, "only first", printing("c"))
        add(second, "only second", printing("d"))
        first.export_to(file)
        assert second.import_from(file) == 2
        assert [each.observation.text for each in second.after()] == ["a", "d", "b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0] | {"seconds": "soon"}], r"line 1: seconds: Input should be a valid number"),
        (
            lambda lines: [lines[0], lines[1] | {"exit_code": 0.5}],
            r"line 2: exit_code: Input should be a valid integer",
        ),
        (lambda lines: [lines[0], {"rollout": "x"}], r"line 2: place: Field required"),
        (lambda lines: [lines[0], lines[2]], r"line 2: place: the step of its rollout before 2 is missing"),
        (lambda lines: [lines[0], lines[1] | {"task": "other"}], r"line 2: place: the step of its rollout before 1"),
        (lambda lines: [*lines, lines[1] | {"observation": "x"}], r"line 4: observation: not what .* for place 1"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_added(
    tmp_path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], message: str
) -> None:
    file = tmp_path / "exported.jsonl"
    with store(tmp_path, "first") as first, store(tmp_path, "second") as second:
        add(first, "rollout", printing("a", "b", "c"))
        first.export_to(file)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))
        with pytest.raises(InputError, match=rf"exported\.jsonl, {message}"):
            second.import_from(file)
        assert len(second) == 0
        assert list(second.after()) == []


def test_bad_files_are_named(tmp_path: Path) -> None:
    table = pyarrow.table({"rollout": ["x"], "place": [-1]})
    pyarrow.parquet.write_table(table, tmp_path / "foreign.parquet")
    (tmp_path / "broken.parquet").write_text("a shopping list")
    (tmp_path / "torn.jsonl").write_text('{"rollout":"x","pla')
    with store(tmp_path) as transitions:
        for name, message in (
            ("foreign.parquet", r"row 1: place: Input should be greater than or equal to 0"),
            ("broken.parquet", r"not a Parquet file"),
            ("none.parquet", r"No such file or directory"),
            ("none.jsonl", r"No such file or directory"),
            ("torn.jsonl", r"line 1: the line: Invalid JSON"),
            ("x.csv", r"neither \.jsonl nor \.parquet"),
        ):
            with pytest.raises(InputError, match=message) as raised:
                transitions.import_from(tmp_path / name)
            assert str(raised.value).startswith(str(tmp_path / name))
            assert "\n" not in str(raised.value)
        for file in (tmp_path / "none" / "x.jsonl", Path("/proc/x.parquet"), tmp_path / "x.csv"):
            with pytest.raises(InputError, match=str(file)):
                transitions.export_to(file)


def test_an_export_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "exported.parquet").write_text("the one before")
    with store(tmp_path / "store") as transitions:
        add(transitions, "first", printing("a"))
        with pytest.raises(InputError, match="pip install pyarrow"):
            transitions.export_to(tmp_path / "exported.parquet")
    assert (tmp_path / "exported.parquet").read_text() == "the one before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported.parquet", "store"]


# What the machine or the user has wrong.


def test_what_is_something_else_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a shopping list, and a long one at that\n" * 50)
    with closing(sqlite3.connect(tmp_path / "database")) as database:
        database.execute("CREATE TABLE shopping (item TEXT)")
    (tmp_path / "directory").mkdir()
    for name, message in (
        ("text", "file is not a database; choose another file"),
        ("database", "a database of something else"),
        ("directory", r"directory: a directory; give a file, such as .*/directory/transitions\.sqlite"),
        ("text/below", "File exists; choose a place that can be written"),
    ):
        before = (tmp_path / name).read_bytes() if (tmp_path / name).is_file() else b""
        with pytest.raises(InputError, match=message) as raised, store(tmp_path, name):
            pass
        assert str(raised.value).startswith(str(tmp_path / name))
        assert not before or (tmp_path / name).read_bytes() == before


def test_a_name_that_sqlite_knows_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Transitions.open(Path(":memory:")) as transitions:
        add(transitions, "first", printing("a"))
    assert (tmp_path / ":memory:").stat().st_size > 0


FILLING = """
history = ()
with Transitions.open(Path(sys.argv[1])) as transitions:
    try:
        while True:
            query = Query("task", "", history, f"command {len(history)}")
            transitions.add("large", query, Observation("x" * 5000))
            history += (Exchange(query.command, "x" * 5000),)
    except InputError as error:
        print(len(history), error, len(transitions))
"""


def test_a_full_disk_is_one_line_and_what_was_added_stays(tmp_path: Path) -> None:
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    path = tmp_path / "transitions.sqlite"
    program = (
        "import sys\nfrom pathlib import Path\nfrom obsspec.errors import InputError\n"
        "from obsspec.training.transitions import Transitions\nfrom obsspec.types import *\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program + FILLING, str(path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=little_room,
    )
    (line,) = finished.stdout.splitlines()
    assert f"{path}: " in line
    assert "what was added before is kept: make room" in line
    added = int(line.split()[0])
    assert 10 < added == int(line.split()[-1])
    with store(tmp_path) as transitions:
        assert len(list(transitions.after())) == added
        add(transitions, "next", printing("a"))


OPENING = """
try:
    with Transitions.open(Path(sys.argv[1])):
        pass
except InputError as error:
    print(error)
"""


def printed(program: str, *arguments: object, prefix: Sequence[str]) -> str:
    child = start(program, *arguments, prefix=prefix)
    stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 0, stderr
    return stdout


@pytest.mark.parametrize(("file", "directory"), [(None, 0o500), (0o444, 0o700), (0o444, 0o500)])
def test_a_file_that_may_not_be_written_is_one_line(
    tmp_path: Path, unprivileged: list[str], file: int | None, directory: int
) -> None:
    """And SQLite's own files, with these permissions, are not left to those who may."""
    path = tmp_path / "in" / "transitions.sqlite"
    path.parent.mkdir()
    if file is not None:
        with Transitions.open(path):
            pass
        path.chmod(file)
    path.parent.chmod(directory)
    try:
        before = list(path.parent.iterdir())
        (line,) = printed(OPENING, path, prefix=unprivileged).splitlines()
        assert line.startswith(f"{path}: ") and "written" in line
        assert list(path.parent.iterdir()) == before
    finally:
        path.parent.chmod(0o700)


READING = """
try:
    with Transitions.reading(Path(sys.argv[1])) as transitions:
        rollouts = list(transitions.for_training())
        print(len(rollouts), len(transitions), len(list(transitions.after())))
        transitions.add("more", Query("task", "", (), "ls"), Observation(""))
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("file", [0o644, 0o444])
@pytest.mark.parametrize("directory", [0o755, 0o555])
@pytest.mark.parametrize("others", ["none", "write", "wrote and were killed"])
def test_reading_needs_no_permission_to_write_and_leaves_nothing(
    tmp_path: Path, unprivileged: list[str], file: int, directory: int, others: str
) -> None:
    path, link = tmp_path / "in" / "transitions.sqlite", tmp_path / "link"
    link.symlink_to(path)
    with ExitStack() as writing:
        if others == "none":
            with Transitions.open(path) as transitions:
                add(transitions, "first", printing("a", "b"))
        elif others == "write":
            transitions = writing.enter_context(Transitions.open(path))
            add(transitions, "first", printing("a", "b"))
        else:
            with start(ENDLESS, path) as child:
                assert child.stdout is not None
                assert [child.stdout.readline() for _ in "ab"] == ["1\n", "2\n"]
                child.kill()
        for each in path.parent.iterdir():
            each.chmod(file)
        path.parent.chmod(directory)
        try:
            before = {each.name: each.stat().st_mode for each in path.parent.iterdir()}
            counted, refused = printed(READING, link, prefix=unprivileged).splitlines()
            rollouts, count, single = map(int, counted.split())
            assert (rollouts, count) == (1, single)
            assert count == 2 or (others == "wrote and were killed" and count > 2)
            assert "attempt to write a readonly database" in refused
            after = {each.name: each.stat().st_mode for each in path.parent.iterdir()}
            # Whoever may write tidies up after those who were killed.
            assert after == before or (others == "wrote and were killed" and list(after) == [path.name])
        finally:
            path.parent.chmod(0o755)
        for each in path.parent.iterdir():
            each.chmod(0o644)
        with Transitions.open(path) as transitions:
            add(transitions, "second", printing("c"))
            assert len(transitions) == count + 1


def test_a_reader_that_cannot_share_the_file_notices_a_writer(tmp_path: Path, unprivileged: list[str]) -> None:
    program = """
try:
    with Transitions.reading(Path(sys.argv[1])) as transitions:
        print(len(transitions), flush=True)
        sys.stdin.readline()
except InputError as error:
    print(error)
"""
    path = tmp_path / "in" / "transitions.sqlite"
    with Transitions.open(path) as transitions:
        add(transitions, "first", printing("a"))
    path.chmod(0o444)
    with start(program, path, prefix=unprivileged) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        path.chmod(0o644)
        with Transitions.open(path) as transitions:
            add(transitions, "second", printing("b"))
        stdout, stderr = child.communicate("\n", timeout=60)
    assert child.returncode == 0, stderr
    assert stdout == f"{path}: was written while it was read; read it again\n"


def test_what_was_added_last_is_not_left_out_where_it_cannot_be_read(tmp_path: Path, unprivileged: list[str]) -> None:
    """As where a store was copied while it was open, without one of its files."""
    path = tmp_path / "in" / "transitions.sqlite"
    with start(ENDLESS, path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        child.kill()
    Path(f"{path}-shm").unlink()
    path.chmod(0o444)
    assert f"what was added last is in {path}-wal" in printed(READING, path, prefix=unprivileged)
    assert not Path(f"{path}-shm").exists()


@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, unprivileged: list[str], ending: str) -> None:
    path = tmp_path / "in" / "transitions.sqlite"
    with Transitions.open(path) as transitions:
        add(transitions, "first", printing("a"))
        Path(f"{path}{ending}").chmod(0)
        assert f"{path}: {path}{ending} may not be read; " in printed(READING, path, prefix=unprivileged)


READERS: dict[str, Callable[[Transitions], object]] = {
    "after": lambda transitions: list(transitions.after()),
    "of a history": lambda transitions: list(transitions.after(1)),
    "for_training": lambda transitions: list(transitions.for_training()),
    "rollout": lambda transitions: transitions.rollout("first"),
    "add": lambda transitions: transitions.add(
        "first",
        Query("task", "Do task.", (Exchange("command 0", "a"), Exchange("command 1", "b")), "ls"),
        Observation(""),
    ),
}


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ("UPDATE steps SET command = x'ff00'", "command: "),
        ("UPDATE steps SET command = CAST('ls' AS BLOB)", "command: "),
        ("UPDATE steps SET observation = x'ff00'", "observation: "),
        ("UPDATE steps SET observation = CAST(x'ff' AS TEXT)", "observation: "),
        ("UPDATE steps SET seconds = 'long'", "seconds: "),
        ("UPDATE steps SET seconds = -1", "seconds: "),
        ("UPDATE steps SET seconds = 9e999", "seconds: "),
        ("UPDATE steps SET exit_code = 'bad'", "exit_code: "),
        ("UPDATE steps SET timed_out = 7", "timed_out: "),
        ("UPDATE steps SET created = 'today'", "created: "),
        ("UPDATE steps SET digest = 'text'", "digest: "),
        ("UPDATE rollouts SET task = x'ff'", "task: "),
        ("UPDATE rollouts SET instruction = x'ff'", "instruction: "),
        ("ALTER TABLE steps DROP COLUMN created", "no such column: created; not as it was made"),
        ("DROP TABLE steps", "no such table: "),
    ],
)
def test_what_was_put_into_it_by_hand_is_named(tmp_path: Path, change: str, column: str) -> None:
    with store(tmp_path) as transitions:
        add(transitions, "first", printing("a", "b"))
    with closing(sqlite3.connect(tmp_path / "transitions.sqlite", isolation_level=None)) as database:
        database.execute(change)
    with store(tmp_path) as transitions:
        for reader in READERS.values():
            with pytest.raises(InputError) as raised:
                reader(transitions)
            message = str(raised.value)
            assert re.match(rf"{tmp_path}/transitions\.sqlite(, row [12] of steps)?: {column}", message), message
            assert "\n" not in message


@pytest.mark.parametrize("change", ["UPDATE size SET steps = 'many'", "DELETE FROM size", "DROP TABLE size"])
def test_a_size_that_is_none_is_named(tmp_path: Path, change: str) -> None:
    with store(tmp_path) as transitions:
        add(transitions, "first", printing("a"))
        with closing(sqlite3.connect(tmp_path / "transitions.sqlite", isolation_level=None)) as database:
            database.execute(change)
        with pytest.raises(InputError, match=r"transitions\.sqlite(: no such table|, the row of size): "):
            len(transitions)


@pytest.mark.parametrize("content", [None, b"", b"a shopping list, and a long one at that" * 50])
def test_reading_what_is_no_store_is_one_line_and_makes_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "transitions.sqlite"
    if content is not None:
        path.write_bytes(content)
    message = r"transitions\.sqlite: (No such file|file is not|a database of)"
    with pytest.raises(InputError, match=message), Transitions.reading(path):
        pass
    assert (path.read_bytes() if path.exists() else None) == content


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_reading_what_is_no_file_is_one_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "transitions.sqlite"
    make(path)
    with pytest.raises(InputError, match=r"transitions\.sqlite: no file; give a store"), Transitions.reading(path):
        pass


# Rollouts.


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("depth", [0, 2])
def test_rollouts_record_what_they_execute(tmp_path: Path, depth: int, backend: str) -> None:
    texts = ("ls", "?", "pwd", "done")
    policy = ScriptedPolicy(lambda context, seed: texts[decode(context).count("\n") // 2], seconds=0.001)
    predictor = Memory()
    predictor.learn(Query("task", "go", (), "ls"), Observation("ls printed"))

    def environment() -> ScriptedEnvironment:
        return ScriptedEnvironment(lambda executed: Observation(f"{executed[-1]} printed", 0.01, 0))

    async def main(transitions: Transitions) -> None:
        speculator = Speculator(policy, ScriptedChat(), predictor, Settings(depth=depth))
        for _ in range(2):
            trajectory = await rollout(speculator, Task("task", "go"), recorded(environment().open, transitions))
            assert trajectory.reward == 1.0

    with store(tmp_path) as transitions:
        anyio.run(main, transitions, backend=backend)
        read = list(transitions.after())
    first = Query("task", "go", (), "ls")
    second = Query("task", "go", (Exchange("ls", "ls printed"),), "pwd")
    assert [each.query for each in read] == [first, second] * 2
    assert [each.observation.text for each in read] == ["ls printed", "pwd printed"] * 2
    assert len({each.rollout for each in read}) == 2


def test_a_run_adds_what_its_sandboxes_execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a policy that writes commands, which one of random weights does not."""
    texts = ("echo one > file; cat file", "cat file missing", "done")

    class Scripted:
        chat = SimpleNamespace(text=lambda generation: decode(generation.tokens))

        @asynccontextmanager
        async def speculator(self, plan: Plan, seats: Seats, gate: Gate) -> AsyncIterator[Speculator]:
            policy = ScriptedPolicy(lambda context, seed: texts[decode(context).count("\n\n")], seconds=0.0)
            yield Speculator(policy, SpacedChat(), None, plan.settings(), seats)

    class SpacedChat(ScriptedChat):
        def start(self, instruction: str) -> Tokens:
            return encode("go")

        def observe(self, generation: Generation, text: str) -> Tokens:
            return encode(f"{text}\n\n")

    monkeypatch.setattr("obsspec.loading.Models.load", lambda plan, url: Scripted())
    file, console = tmp_path / "new" / "transitions.sqlite", Console(quiet=True)
    for number in range(2):
        output = tmp_path / f"run-{number}"
        assert run(Plan("generated:text/easy/0-1"), output, False, Means(transitions=str(file)), console) == []
    with Transitions.open(file) as transitions:
        read = list(transitions.after())
    assert [each.query.task for each in read].count("text/easy/0") == len(read) // 2 == 4
    assert {each.query.command for each in read} == set(texts[:2])
    assert {each.observation.text for each in read if not each.query.history} == {"one"}
    assert {each.observation.exit_code for each in read if each.query.history} == {1}
    assert all(each.observation.seconds > 0 for each in read)


def test_a_predictor_learns_from_the_store(tmp_path: Path) -> None:
    memory = Memory()
    with store(tmp_path) as transitions:
        add(transitions, "first", printing("a", "b"))
        for each in transitions.after():
            memory.learn(each.query, each.observation)
        last = list(transitions.after())[-1].query
    drafts: list[Draft] = []
    anyio.run(memory.predict, last, drafts.append)
    assert drafts[0].text == "b"
