"""The memory predictor: what it recalls, how sure it is, what it keeps and what it writes."""

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obsspec.errors import InputError
from obsspec.predictors import Memory
from obsspec.types import Draft, Exchange, Observation, Query


def query(command: str, *history: tuple[str, str], task: str = "task") -> Query:
    return Query(task, "", tuple(Exchange(*each) for each in history), command)


def learn(memory: Memory, observation: str, asked: Query) -> None:
    memory.learn(asked, Observation(observation))


def texts(memory: Memory, asked: Query) -> list[str]:
    return [recall.text for recall in memory.recall(asked)]


def test_knows_nothing_at_first() -> None:
    assert Memory().recall(query("ls")) == []


@pytest.mark.anyio
async def test_proposes_what_was_observed() -> None:
    memory = Memory()
    learn(memory, "a\nb", query("ls"))
    drafts: list[Draft] = []
    await memory.predict(query("ls"), drafts.append)
    (draft,) = drafts
    assert (draft.text, draft.predictor) == ("a\nb", "memory")
    assert 0.0 < draft.probability < 1.0


def test_the_more_often_it_was_right_the_surer_it_is() -> None:
    memory = Memory()
    sureness = []
    for _ in range(10):
        learn(memory, "same", query("ls"))
        sureness.append(memory.recall(query("ls"))[0].probability)
    assert sureness == sorted(sureness)
    assert sureness[-1] > 0.9


def test_what_is_never_the_same_gets_improbable() -> None:
    memory = Memory(floor=0.0)
    for number in range(30):
        learn(memory, f"{number} seconds", query("pytest"))
    assert memory.recall(query("pytest"))[0].probability < 0.2


def test_the_same_state_beats_the_same_command() -> None:
    """After the same writes, reading in between changes nothing; after other writes the output is another."""
    memory = Memory()
    random = Random(1)
    for number in range(24):
        text = random.choice("12")
        reads = [("ls", "f")] * random.randrange(3)
        learn(memory, text, query("cat f", (f"echo {text} > f", ""), *reads, task=f"task {number % 2}"))
    assert texts(memory, query("cat f", ("echo 1 > f", ""), ("wc f", "new"), task="task 0"))[0] == "1"
    assert texts(memory, query("cat f", ("echo 2 > f", ""), ("wc f", "new"), task="task 1"))[0] == "2"


def test_other_tasks_help_where_nothing_closer_is_known() -> None:
    memory = Memory()
    for number in range(5):
        learn(memory, "Python 3.11.7", query("python --version", task=f"task {number}"))
    recall, *_ = memory.recall(query("python --version", ("ls", "x"), task="new task"))
    assert (recall.text, recall.level) == ("Python 3.11.7", "command")
    assert recall.probability > 0.7


def test_variants_of_a_command_fail_alike() -> None:
    """An agent that is stuck tries variants; what it does once it is not is another matter."""
    memory = Memory()
    failure = "tail: invalid option -- 'r'"
    for task in range(6):
        history: list[tuple[str, str]] = []
        for number in range(4):
            command = f"tail -r file{task}.txt | head -n {number}"
            learn(memory, failure, query(command, *history, task=str(task)))
            history.append((command, failure))
        learn(memory, f"size {task}", query(f"wc file{task}.txt", *history, task=str(task)))
    before = [("tail -r new.txt | head -n 1", failure)] * 3
    variant, *_ = memory.recall(query("tail -r new.txt | head -n 2", *before, task="new"))
    assert (variant.text, variant.level) == (failure, "similar")
    assert variant.probability > 0.7
    assert all(recall.probability < 0.5 for recall in memory.recall(query("wc new.txt", *before, task="new")))


def test_the_most_similar_command_decides() -> None:
    history = [("grep -n a f.txt", "1:a"), ("cat g | wc -l", "7"), ("ls", "f.txt")]
    (recall,) = Memory().recall(query("cat g.txt | wc -l", *history))
    assert (recall.text, recall.level) == ("7", "similar")
    assert recall.probability < 0.5, "nothing is known yet of how much similarity tells"


def test_several_observations_of_one_key_are_several_drafts() -> None:
    memory = Memory(breadth=2)
    random = Random(1)
    for number in range(60):
        learn(memory, random.choice(["heads", "heads", "heads", "tails", "edge"]), query("flip", task=str(number)))
    first, second = memory.recall(query("flip", task="new"))
    assert (first.text, second.text) == ("heads", "tails") or (first.text, second.text) == ("heads", "edge")
    assert first.probability > second.probability
    assert abs(first.probability - 0.6) < 0.2
    assert first.probability + second.probability <= 1.0


def test_is_bounded_and_forgets_the_least_recently_used() -> None:
    memory = Memory(capacity=60)
    for number in range(100):
        learn(memory, f"output {number}", query(f"command {number}", task=f"task {number}"))
        assert texts(memory, query("command 0", task="task 0")) == ["output 0"]
    assert len(memory) <= 60
    assert texts(memory, query("command 99", task="task 99")) == ["output 99"]
    assert texts(memory, query("command 50", task="task 50")) == []


def test_equal_texts_are_stored_once(tmp_path: Path) -> None:
    memory = Memory()
    for number in range(20):
        learn(memory, "long " * 2000, query(f"command {number}", task=f"task {number}"))
    memory.save(tmp_path / "memory")
    assert (tmp_path / "memory").stat().st_size < 40_000


lessons = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.lists(st.tuples(st.sampled_from(["ls", "rm x"]), st.sampled_from(["", "x"])), max_size=2),
        st.sampled_from(["ls", "cat f", "make"]),
        st.text(max_size=2),
    ),
    max_size=40,
)


@given(lessons, st.integers(1, 50))
@settings(max_examples=50, deadline=None)
def test_what_is_loaded_is_what_was_saved(tmp_path_factory: pytest.TempPathFactory, lessons, capacity: int) -> None:
    memory = Memory(capacity, breadth=4, floor=0.0)
    asked = [query(command, *history, task=task) for task, history, command, _ in lessons]
    for each, (*_, text) in zip(asked, lessons, strict=True):
        learn(memory, text, each)
    assert len(memory) <= capacity
    path = tmp_path_factory.mktemp("memory") / "memory"
    memory.save(path)
    loaded = Memory.load(path)
    assert [*map(loaded.recall, asked)] == [*map(memory.recall, asked)]
    for each in asked:
        learn(memory, "new", each)
        learn(loaded, "new", each)
        recalls = memory.recall(each)
        assert loaded.recall(each) == recalls
        assert sum(recall.probability for recall in recalls) <= 1.0 + 1e-9
        assert len({recall.text for recall in recalls}) == len(recalls)


def test_any_text_can_be_saved(tmp_path: Path) -> None:
    memory = Memory()
    for text in ("", "\ud800", "\x00\x85\u2028\n", "日本"):
        learn(memory, text, query(f"print {text}"))
    memory.save(tmp_path / "memory")
    loaded = Memory.load(tmp_path / "memory")
    assert texts(loaded, query("print \ud800")) == ["\ud800"]
    assert texts(loaded, query("print \x00\x85\u2028\n")) == ["\x00\x85\u2028\n"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    learn(memory, "old", query("ls"))
    memory.save(tmp_path / "memory")
    learn(memory, "new", query("ls"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        memory.save(tmp_path / "memory")
    assert [path.name for path in tmp_path.iterdir()] == ["memory"]
    assert texts(Memory.load(tmp_path / "memory"), query("ls")) == ["old"]


def test_files_that_are_no_memory(tmp_path: Path) -> None:
    memory = Memory()
    for number in range(3):
        learn(memory, f"text {number}", query("ls", task=str(number)))
    whole = tmp_path / "whole"
    memory.save(whole)
    lines = whole.read_text().splitlines(keepends=True)
    path = tmp_path / "memory"
    for content in (
        "",
        "{}\n",
        "not json",
        "[]",
        lines[0],
        "".join(lines[:4]),
        "".join(lines)[:-3],
        json.dumps({"format": "obsspec memory", "version": 99}) + "\n",
    ):
        path.write_text(content)
        with pytest.raises(InputError, match="memory"):
            Memory.load(path)
    with pytest.raises(InputError, match="No such file"):
        Memory.load(tmp_path / "absent")


def test_impossible_settings() -> None:
    for settings_ in ({"capacity": 0}, {"breadth": 0}):
        with pytest.raises(InputError, match="at least 1"):
            Memory(**settings_)
