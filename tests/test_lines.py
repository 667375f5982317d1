"""Files of JSON lines: whatever happens, no line of anybody is lost."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from obsspec.errors import InputError
from obsspec.lines import LineFile


@dataclass
class Note:
    task: str
    text: str


def notes(path: Path) -> LineFile[Note]:
    return LineFile(path, TypeAdapter(Note), "task", "the test", "as before")


def test_lines_are_appended_and_read_back(tmp_path: Path) -> None:
    file = notes(tmp_path / "new" / "notes.jsonl")
    written = [Note("a", "line\u2028 separators\n and \x85"), Note("b", "")]
    for number, note in enumerate(written):
        with file.writing() as (lines, append):
            assert lines == written[:number]
            append(note)
    assert file.read() == written


@pytest.mark.parametrize("torn", ["{", '{"task":', '{"task":"c","te'])
def test_a_torn_line_is_cut_by_the_next_writer(tmp_path: Path, torn: str) -> None:
    file = notes(tmp_path / "notes.jsonl")
    with file.writing() as (_, append):
        append(Note("a", "b"))
    with file.path.open("a") as stream:
        stream.write(torn)
    with pytest.raises(InputError, match="line 2"):
        file.read()
    with file.writing() as (lines, append):
        assert lines == [Note("a", "b")]
    assert file.read() == lines


@pytest.mark.parametrize(
    "content",
    [
        "no line end at all",
        "a shopping list\nwith two lines\n",
        '{"task":"a","text":"b"}\nan addition',
        '{"task": 1}\n{',
    ],
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, content: str) -> None:
    file = notes(tmp_path / "mine.txt")
    file.path.write_text(content)
    with pytest.raises(InputError, match=r"mine\.txt, line \d"), file.writing():
        pass
    assert file.path.read_text() == content


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    file = notes(tmp_path / "notes.jsonl")
    program = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""
    file.path.touch()
    command = [sys.executable, "-c", program, str(file.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout
        other.stdout.readline()
        with pytest.raises(InputError, match="another process"), file.writing():
            pass
        other.stdin.close()
    with file.writing() as (lines, _):
        assert lines == []
