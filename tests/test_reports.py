"""Results on disk, summaries and comparisons."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import trio
import trio.testing
from rich.console import Console

from obsspec import (
    Draft,
    Failure,
    InputError,
    Observation,
    Predictor,
    Query,
    Settings,
    Speculator,
    Task,
    Trajectory,
    rollout,
)
from obsspec.reports.comparison import check_comparable, compare
from obsspec.reports.records import TrajectoryLine, line_of, open_run, read_settings, read_trajectories
from obsspec.reports.summary import summarize
from obsspec.reports.tables import summary_table
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode


class Always:
    """Drafts ``text``, as predictor ``always``."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def predict(self, query: Query, propose: object) -> None:
        propose(Draft(self.text, 0.9, "always"))  # type: ignore[operator]

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


def trajectory(
    *commands: str,
    output: str = "out",
    draft: str = "out",
    depth: int = 1,
    task: str = "family/easy/1",
    reward: float = 1,
    predictor: Predictor | None = None,
    seconds: float = 1.0,
    breadth: int = 1,
) -> TrajectoryLine:
    texts = (*commands, "done")
    policy = ScriptedPolicy(lambda context, seed: texts[decode(context).count("\n") // 2])
    settings = Settings(depth=depth, breadth=breadth)
    speculator = Speculator(policy, ScriptedChat(), predictor or Always(draft), settings)
    environment = ScriptedEnvironment(lambda executed: Observation(output, seconds, 0), reward)

    async def main() -> Trajectory:
        return await rollout(speculator, Task(task, "go", "family", "easy"), environment.open)

    result = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return line_of(result, "go", lambda generation: decode(generation.tokens))


def write(path: Path, *lines: TrajectoryLine | Failure, **settings: object) -> None:
    with open_run(path, settings, resume=False) as run:
        for line in lines:
            run.write(line)


def test_a_line_holds_everything_and_reads_back(tmp_path: Path) -> None:
    line = trajectory("ls", "cat x")
    write(tmp_path / "run", line, depth=1)
    assert read_trajectories(tmp_path / "run") == [line]
    assert len(line.tokens) == len(line.mask) == len(line.logprobs)
    assert [message["content"] for message in line.messages] == ["go", "ls", "out", "cat x", "out", "done"]
    assert [turn.outcome for turn in line.turns] == ["hit", "hit", "off"]


def test_whatever_a_tool_prints_reads_back(tmp_path: Path) -> None:
    line = trajectory("ls", output="".join(map(chr, range(0x3000))) + "\U0001f642")
    write(tmp_path, line)
    assert read_trajectories(tmp_path) == [line]


def test_a_run_that_brought_nothing_forth_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, policy="misspelt")
    write(tmp_path, trajectory("ls"), policy="right")
    assert read_settings(tmp_path) == {"policy": "right"}
    with pytest.raises(InputError, match="holds a run already"):
        write(tmp_path, policy="other")


def test_a_torn_line_is_cut_and_the_rest_resumed(tmp_path: Path) -> None:
    write(tmp_path, trajectory("ls"))
    with (tmp_path / "trajectories.jsonl").open("a") as file:
        file.write('{"task":"family/easy/2","seed"')
    with open_run(tmp_path, {}, resume=True) as resumed:
        assert resumed.done == {("family/easy/1", 0)}
        resumed.write(trajectory("ls", task="family/easy/2"))
    assert [line.task for line in read_trajectories(tmp_path)] == ["family/easy/1", "family/easy/2"]


def test_failures_are_kept_apart_and_tried_again(tmp_path: Path) -> None:
    write(tmp_path, Failure("family/easy/1", 3, "OSError: no sandbox"))
    assert "no sandbox" in (tmp_path / "failures.jsonl").read_text()
    with open_run(tmp_path, {}, resume=True) as resumed:
        assert resumed.done == set()
        assert not (tmp_path / "failures.jsonl").exists()


def test_bad_run_directories_say_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "run", trajectory("ls"), depth=1)
    with pytest.raises(InputError, match="add --resume"):
        write(tmp_path / "run", depth=1)
    with pytest.raises(InputError, match=r"depth = 1, now it is 2"), open_run(tmp_path / "run", {"depth": 2}, True):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose a directory"):
        write(tmp_path / "file")
    with pytest.raises(InputError, match=r"trajectories.jsonl: No such file"):
        read_trajectories(tmp_path / "nothing")
    with (tmp_path / "run" / "trajectories.jsonl").open("a") as file:
        file.write('{"task": 1}\n')
    with pytest.raises(InputError, match=r"trajectories.jsonl, line 2: task"):
        read_trajectories(tmp_path / "run")


@pytest.mark.parametrize("field", ["tokens", "mask", "logprobs"])
def test_a_line_whose_lists_disagree_is_refused(tmp_path: Path, field: str) -> None:
    line = trajectory("ls")
    write(tmp_path, line.model_copy(update={field: getattr(line, field)[1:]}))
    with pytest.raises(InputError, match=r"line 1: .* same length"):
        read_trajectories(tmp_path)


def test_trajectories_without_their_settings_are_nobodys_to_add_to(tmp_path: Path) -> None:
    write(tmp_path, trajectory("ls"))
    (tmp_path / "run.json").unlink()
    before = (tmp_path / "trajectories.jsonl").read_bytes()
    for resume in (False, True):
        with pytest.raises(InputError, match=r"run\.json: missing"), open_run(tmp_path, {}, resume):
            pass
    assert (tmp_path / "trajectories.jsonl").read_bytes() == before


def test_a_full_disk_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """The limit on file sizes stands for a full disk: the write fails in its middle, with an OSError."""
    line = trajectory("ls")
    with open_run(tmp_path / "run", {}, resume=False) as run:
        run.write(line)
        size = (tmp_path / "run" / "trajectories.jsonl").stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
        try:
            with pytest.raises(InputError, match="make room and go on with --resume"):
                run.write(trajectory("cat x"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
    assert read_trajectories(tmp_path / "run") == [line]


def test_a_summary_states_its_denominators() -> None:
    lines = [trajectory("ls", "cat x"), trajectory("ls", draft="wrong", reward=0), trajectory("ls", depth=0)]
    summary = summarize(lines)
    assert (summary.rollouts, summary.solved, summary.tool_calls) == (3, 2, 4)
    assert (summary.attempted, summary.drafted, summary.hits) == (3, 3, 2)
    assert summary.tool_seconds == pytest.approx(4.0)
    assert summary.hidden_seconds == pytest.approx(0.6 + 0.5)
    assert summary.wasted_tokens == 5
    assert summary.waiting_seconds == pytest.approx(0)
    always = summary.predictors["always"]
    assert (always.drafted, always.drafts, always.exact, always.hits) == (3, 3, 2, 2)
    assert (always.share_of_hits, always.share_of_hidden) == (1, 1)
    assert always.hidden_seconds == pytest.approx(summary.hidden_seconds)
    assert summary.solved_by_family == {"family": (2, 3)}


class Both:
    """Drafts what is wrong, as ``quick``, and a second later what is right, as ``slow``; ``silent`` says nothing."""

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        propose(Draft("wrong", 0.6, "quick"))
        if query.command == "make":
            propose(Draft("also wrong", 0.5, "quick"))
        await anyio.sleep(1)
        propose(Draft("out", 0.9, "slow"))

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


def test_each_predictor_has_its_share() -> None:
    """Of what a finished run's file tells: ``quick`` is in time for three calls and right on one of them."""
    right_on_ls = trajectory("make", "ls", predictor=Both(), seconds=5.0, breadth=3)
    with_ls = trajectory("ls", predictor=Both(), seconds=0.5, breadth=3, output="wrong")
    predictors = summarize([right_on_ls, with_ls]).predictors
    assert list(predictors) == ["quick", "slow"]
    quick, slow = predictors["quick"], predictors["slow"]
    assert (quick.drafted, quick.drafts, quick.exact, quick.hits) == (3, 4, 1, 1)
    assert (slow.drafted, slow.drafts, slow.exact, slow.hits) == (2, 2, 2, 2)
    assert (quick.draft_seconds, slow.draft_seconds) == (0, 1)
    assert quick.share_of_hits == pytest.approx(1 / 3)
    assert slow.share_of_hits == pytest.approx(2 / 3)
    assert (quick.hidden_seconds, slow.hidden_seconds) == (pytest.approx(0.5), pytest.approx(0.3 + 0.5))
    assert quick.share_of_hidden + slow.share_of_hidden == pytest.approx(1)


def test_the_table_of_predictors_fits_a_page() -> None:
    console = Console(record=True, width=80)
    console.print(summary_table(summarize([trajectory("make", "ls", predictor=Both(), seconds=5.0, breadth=3)]), "run"))
    rows = [line.split() for line in console.export_text().splitlines()]
    (row,) = [row for row in rows if "slow" in row]
    assert [cell for cell in row if cell != "│"] == [
        "slow",
        "2",
        "2",
        "of",
        "2",
        "1.00",
        "2",
        "(100.0%)",
        "0.8",
        "(100.0%)",
    ]


def test_time_in_which_nothing_ran_is_waiting() -> None:
    line = trajectory("ls", depth=0)
    late = [
        turn.model_copy(
            update={
                "generating": [(start + 2, end + 2) for start, end in turn.generating],
                "executing": turn.executing and (turn.executing[0] + 2, turn.executing[1] + 2),
            }
        )
        for turn in line.turns
    ]
    summary = summarize([line.model_copy(update={"turns": late, "seconds": line.seconds + 3})])
    assert summary.waiting_seconds == pytest.approx(3)


def test_equal_runs_compare_as_identical_whatever_their_speculation() -> None:
    comparison = compare([trajectory("ls", depth=0)], [trajectory("ls", depth=2)])
    assert (comparison.identical, comparison.compared) == (1, 1)
    assert comparison.first_seconds > comparison.second_seconds


def test_a_policy_that_wrote_otherwise_is_a_difference() -> None:
    comparison = compare([trajectory("ls", "a")], [trajectory("ls", "b")])
    assert (comparison.identical, comparison.compared) == (0, 1)
    assert [(place.turn, place.what) for place in comparison.different] == [(1, "the policy wrote other tokens")]


def test_an_environment_that_answers_otherwise_is_counted_apart() -> None:
    comparison = compare([trajectory("date", "a", output="1")], [trajectory("date", "b", output="2")])
    assert (comparison.identical, comparison.compared, comparison.different) == (0, 0, ())
    assert "'date'" in comparison.environment[0].what
    assert comparison.environment[0].task == "family/easy/1"


def test_a_longer_run_and_a_changed_mask_are_differences() -> None:
    one = trajectory("ls")
    longer = trajectory("ls", "ls")
    assert compare([one], [longer]).identical == 0
    unmasked = one.model_copy(update={"mask": [1 - bit for bit in one.mask]})
    assert compare([one], [unmasked]).identical == 0


def test_runs_may_differ_in_speculation_and_in_nothing_else() -> None:
    first = {"tasks": "a", "depth": 0, "predictor": "off", "temperature": 1.0}
    check_comparable(first, first | {"tasks": "b", "depth": 2, "predictor": "rules"})
    for other in (first | {"temperature": 0.5}, first | {"latency": "1"}, {}):
        with pytest.raises(InputError, match=r"more than speculation: (temperature|latency) is "):
            check_comparable(first, other)


def test_runs_are_paired_by_task_and_seed() -> None:
    one, other = trajectory("ls"), trajectory("ls", task="family/easy/2")
    comparison = compare([one, other], [one])
    assert comparison.only_in_first == (("family/easy/2", 0),)
    with pytest.raises(InputError, match="no rollout in common"):
        compare([one], [other])
