"""Naming tasks on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from obsspec import InputError
from obsspec.tasks import FAMILIES, LEVELS, generate, parse_instances, parse_tasks


def test_names_stand_for_every_combination() -> None:
    tasks = parse_tasks("generated:logs,text/easy,hard/0-2,7")
    assert [task.id for task in tasks] == [
        f"{family}/{level}/{seed}" for seed in (0, 1, 2, 7) for family in ("logs", "text") for level in ("easy", "hard")
    ]
    assert {task.id for task in parse_tasks("generated:all/all/3")} == {
        f"{family}/{level}/3" for family in FAMILIES for level in LEVELS
    }
    assert len(FAMILIES) >= 15


def test_what_is_named_twice_is_there_once() -> None:
    tasks = parse_tasks("generated:logs,text,logs/easy,easy/1,0-2,1")
    assert [task.id for task in tasks] == [f"{family}/easy/{seed}" for seed in (1, 0, 2) for family in ("logs", "text")]


def test_a_task_is_the_one_that_its_id_names() -> None:
    (instance,) = parse_instances("generated:database/medium/5")
    assert instance == generate("database", "medium", 5)
    assert (instance.task.family, instance.task.level) == ("database", "medium")
    assert instance.task.instruction
    assert instance.task.check


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("generated:lgos/easy/0", "unknown family 'lgos': did you mean logs?"),
        ("generated:logs/esay/0", "unknown level 'esay': did you mean easy?"),
        ("generated:logs/easy", "expected generated:FAMILIES/LEVELS/SEEDS"),
        ("generated:", "expected generated:FAMILIES/LEVELS/SEEDS"),
        ("generated:logs/easy/x", "seeds 'x'"),
        ("generated:logs/easy/5-2", "seeds '5-2'"),
        ("generated:logs/easy/-1", "seeds '-1'"),
        ("generated:logs/easy/", "seeds ''"),
        ("generated:logs/easy/0-99999999999", "more than 100,000"),
        ("generated:logs/easy/" + "9" * 5000, "seeds '999"),
        ("/nowhere/at/all", "/nowhere/at/all"),
        ("x" * 5000, "no such directory"),
    ],
)
def test_bad_names(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        parse_tasks(text)


def test_an_empty_directory_holds_no_task(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(tmp_path)):
        parse_tasks(str(tmp_path))


def test_links_in_a_circle_are_no_directory(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="no such directory"):
        parse_tasks(str(tmp_path / "loop"))


def test_experts_are_for_generated_tasks_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected generated:"):
        parse_instances(str(tmp_path))
