"""A world model learns from a store of transitions while it is written, and publishes what it has learned."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import torch

import tiny
from obsspec.errors import InputError
from obsspec.models import load_model
from obsspec.training.cotraining import CoTraining, Pace, Scored
from obsspec.training.finetune import Recipe, load_trainable
from obsspec.training.transitions import Transitions
from obsspec.training.versions import current_version, publish_version, publishing_alone
from obsspec.training.world_model import evaluate, held_out, read_rollouts, rows_of
from obsspec.types import Exchange, Observation, Query

torch.set_num_threads(1)  # A network this small only waits for others.
RECIPE = Recipe(rows_per_step=2, learning_rate=0.01)
PACE = Pace(passes=60)


def add(transitions: Transitions, name: str, printed: Sequence[str], seconds: float = 1.0) -> None:
    """A rollout in which ``touch FILE`` and ``ls`` print what they are said to."""
    history: tuple[Exchange, ...] = ()
    for place, text in enumerate(printed):
        query = Query(f"task {name}", "Make files.", history, f"touch {place}")
        transitions.add(name, query, Observation(text, seconds))
        history = (*history, Exchange(query.command, text))


@contextmanager
def cotraining(root: Path, base: str, recipe: Recipe = RECIPE, pace: Pace = PACE) -> Iterator[tuple[Transitions, Any]]:
    with Transitions.open(root / "store.sqlite") as transitions:
        yield transitions, CoTraining(transitions, root / "model", load_trainable(base, recipe), recipe, pace)


def until_done(training: CoTraining) -> None:
    while training.turn():
        pass


def test_it_foretells_what_it_has_learned(base: str, tmp_path: Path) -> None:
    with cotraining(tmp_path, base) as (transitions, training):
        assert current_version(tmp_path / "model").number == 1  # type: ignore[union-attr]
        assert not training.turn() and training.rates()["exact_rate"] is None
        add(transitions, "first", ["file", "done"])
        until_done(training)
        assert [each.exact for each in training.scored] == [False, False]  # Before it was trained on.
        assert training.figures.learned >= 2 * PACE.passes
        add(transitions, "second", ["file", "done"])
        training.turn()
        assert [(each.exact, each.published) for each in training.scored][2:] == [(True, False), (True, False)]
        version = training.publish()
        assert version is not None and version.number == 2
        assert training.publish() is None  # Nothing new.
        add(transitions, "third", ["file", "done"])
        training.turn()
        assert [(each.exact, each.published, each.frozen) for each in training.scored][4:] == 2 * [(True, True, False)]
        assert training.rates()["exact_rate"] == round(4 / 6, 4)
        assert (training.rates()["exact_rate_published"], training.rates()["exact_rate_frozen"]) == (round(2 / 6, 4), 0)
    model, tokenizer = load_model(base, version.directory)
    tallies = evaluate(read_rollouts([tmp_path / "store.sqlite"]), model, tokenizer)
    assert sum(tally.exact for tally in tallies.values()) == sum(tally.steps for tally in tallies.values()) == 6
    assert json.loads((tmp_path / "model" / "current.json").read_text())["version"] == 2


def test_another_process_goes_on_where_one_ended(base: str, tmp_path: Path) -> None:
    with cotraining(tmp_path, base) as (transitions, training):
        add(transitions, "first", ["file", "done"])
        until_done(training)
        training.save()
        weights, figures = training._learner.weights(), training.figures
    with cotraining(tmp_path, base) as (transitions, training):
        assert training.figures == figures
        assert all(torch.equal(weight, weights[name]) for name, weight in training._learner.weights().items())
        assert not training.turn()  # What was read is not read again.
        assert training.publish().number == 2
    with (
        pytest.raises(InputError, match=r"checkpoint: is of an adapter of rank 16 on .*, not of an adapter of rank 3"),
        cotraining(tmp_path, base, Recipe(rank=3)),
    ):
        pass
    (tmp_path / "model" / "checkpoint").write_bytes(b"torn")
    with pytest.raises(InputError, match="remove it to start afresh"), cotraining(tmp_path, base):
        pass


def test_weights_that_foretell_less_are_not_published(base: str, tmp_path: Path) -> None:
    with cotraining(tmp_path, base) as (transitions, training):
        add(transitions, "first", ["file", "done"])
        until_done(training)
        training.publish()
        good = training._learner.weights()
        training._learner.set_weights({name: 3 * weight for name, weight in good.items()})
        training._changed = True
        for number in range(20):
            add(transitions, f"again {number}", ["file", "done"])
        training._owed = -math.inf  # It only scores.
        training.turn()
        for number in range(20, 40):
            add(transitions, f"again {number}", ["file", "done"])
            training.turn()
        assert training.publish() is None and training.figures.rollbacks == 1
        assert all(torch.equal(weight, good[name]) for name, weight in training._learner.weights().items())
        assert current_version(tmp_path / "model").number == 2  # type: ignore[union-attr]


def test_chance_does_not_roll_back(base: str, tmp_path: Path) -> None:
    with cotraining(tmp_path, base) as (_, training):
        training._changed = True
        training._compared.extend([Scored(False, True, False, 1.0)] * 5 + [Scored(True, False, False, 1.0)] * 2)
        training._compared.extend([Scored(True, True, True, 1.0)] * 40)
        assert training.publish() is not None


@pytest.mark.parametrize("where", ["weights", "gradients"])
def test_what_is_no_number_is_forgotten(base: str, tmp_path: Path, where: str) -> None:
    with cotraining(tmp_path, base) as (transitions, training):
        before = training._learner.weights()
        weight = training._learner._trained[0]
        if where == "weights":
            weight.data.fill_(math.nan)
        else:
            hook = weight.register_hook(lambda gradient: gradient * math.inf)
        add(transitions, "first", ["file"])
        training.turn()
        assert training.figures.rollbacks == 1
        assert training.publish() is None
        assert all(torch.equal(weight, before[name]) for name, weight in training._learner.weights().items())
        if where == "gradients":
            hook.remove()
        until_done(training)
        assert training.publish() is not None


def test_a_store_that_was_made_anew_is_read_from_its_start(base: str, tmp_path: Path) -> None:
    with cotraining(tmp_path, base) as (transitions, training):
        add(transitions, "first", ["file", "done"])
        training.turn()
        training.save()
    for file in tmp_path.glob("store.sqlite*"):
        file.unlink()
    with Transitions.open(tmp_path / "store.sqlite") as transitions:
        add(transitions, "second", ["file"])
    with cotraining(tmp_path, base) as (_, training):
        training.turn()
        assert training.figures.seen == 3


def test_what_is_longer_than_a_model_reads_is_not_foretold(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tiny.llama(vocab_size=len(tokenizer), max_position_embeddings=200).save_pretrained(tmp_path / "short")
    tokenizer.save_pretrained(tmp_path / "short")
    with cotraining(tmp_path, str(tmp_path / "short")) as (transitions, training):
        add(transitions, "long", ["file"] * 40)
        until_done(training)
        model, _ = load_model(str(tmp_path / "short"))
        (tally,) = evaluate(read_rollouts([tmp_path / "store.sqlite"]), model, tokenizer).values()
        assert tally.steps == 40


def test_a_whole_model_is_cotrained(base: str, tmp_path: Path) -> None:
    recipe = Recipe(rows_per_step=2, learning_rate=1e-3, rank=None)
    with cotraining(tmp_path, base, recipe) as (transitions, training):
        add(transitions, "first", ["file", "done"])
        until_done(training)
        version = training.publish()
    model, tokenizer = load_model(str(version.directory))
    (tally,) = evaluate(read_rollouts([tmp_path / "store.sqlite"]), model, tokenizer).values()
    assert tally.exact == 2
    assert (tally.seconds, tally.exact_seconds) == (2.0, 2.0)


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_cotraining import Pace, cotraining
with cotraining(Path(sys.argv[2]), sys.argv[3], pace=Pace(passes=1e6)) as (transitions, training):
    while True:
        print(training.figures.version, flush=True)
        training.turn()
        training.publish()
"""


def test_kill_at_any_point_leaves_a_model_and_a_way_on(base: str, tmp_path: Path) -> None:
    with Transitions.open(tmp_path / "store.sqlite") as transitions:
        add(transitions, "first", ["file", "done"])
    for lines in (1, 3, 6):
        arguments = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path), base]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            printed = [int(process.stdout.readline()) for _ in range(lines)]
            process.kill()
        version = current_version(tmp_path / "model")
        assert version is not None and version.number >= printed[-1]
        load_model(base, version.directory)
    with cotraining(tmp_path, base) as (_, training):
        assert training.figures.version >= 6  # What each had published was gone on from.
        assert training.figures.seen == 2  # Nothing was counted twice.


def test_versions_are_whole_and_old_ones_go(tmp_path: Path) -> None:
    assert current_version(tmp_path / "none") is None

    def failing(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise RuntimeError("no more")

    for number in range(1, 6):
        version = publish_version(
            tmp_path, "base", lambda directory: (directory / "weights").touch(), {"steps": number}
        )
        assert current_version(tmp_path) == version and version.number == number
        with pytest.raises(RuntimeError):
            publish_version(tmp_path, "base", failing, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current.json", "v000003", "v000004", "v000005"]
    for content in (
        "{}",
        "[",
        "[]",
        '{"version": null, "base": "x"}',
        '{"version": 1.5, "base": "x"}',
        '{"version": 5}',
    ):
        (tmp_path / "current.json").write_text(content)
        with pytest.raises(InputError, match=r"current\.json: not what co-training wrote"):
            current_version(tmp_path)
    (tmp_path / "current.json").write_text('{"version": 9, "base": "x"}')
    with pytest.raises(InputError, match=r"current\.json: names version 9, which is not there"):
        current_version(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="choose a directory that can be written"):
        publish_version(tmp_path / "file", "base", failing, {})


def test_two_processes_do_not_publish_in_one_place(tmp_path: Path) -> None:
    with (
        publishing_alone(tmp_path),
        pytest.raises(InputError, match="another process is training there"),
        publishing_alone(tmp_path),
    ):
        pass
    (tmp_path / "writing-killed").mkdir()
    with publishing_alone(tmp_path):
        assert not (tmp_path / "writing-killed").exists()
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(InputError, match="holds a model"), publishing_alone(tmp_path):
        pass


def test_seconds_weigh_and_held_out_tasks_are_a_share(base: str, tmp_path: Path) -> None:
    from obsspec.chat import ChatFormat, WorldModelChat

    chat = WorldModelChat(ChatFormat(tiny.tokenizer()))
    with Transitions.open(tmp_path / "store.sqlite") as transitions:
        add(transitions, "slow", ["file", "done"], seconds=1.0)
        add(transitions, "quick", ["file"], seconds=0.0)
    quick, slow = read_rollouts([tmp_path / "store.sqlite"])
    assert [span.weight for row in rows_of(slow, chat, "seconds") for span in row.spans] == [0.5, 0.5]
    assert [span.weight for row in rows_of(quick, chat, "seconds") for span in row.spans] == [0.05]
    assert [span.place for row in rows_of(slow, chat, "uniform", first=1) for span in row.spans] == [1]
    assert 150 < sum(held_out(f"task {number}", 0.2) for number in range(1000)) < 250
