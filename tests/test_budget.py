"""Seats: who gets one, who gives one up, and what other processes change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio
import trio.testing
from anyio.abc import TaskGroup
from hypothesis import given
from hypothesis import strategies as st

from obsspec import Seats


def virtually(function: Callable[[], Awaitable[Any]]) -> Any:
    return trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))


class Request:
    """Holds a seat until it is told to go, or suspended."""

    def __init__(self, seats: Seats, depth: int, probability: float = 1.0, turn: int = 0) -> None:
        self.rank = (float(depth), -probability)
        self.turn = turn
        self.holds = False
        self._seats = seats
        self._scope = anyio.CancelScope()

    @property
    def leaving(self) -> bool:
        return self._scope.cancel_called

    def suspend(self) -> None:
        self._scope.cancel()

    async def start(self, group: TaskGroup) -> Request:
        group.start_soon(self._run)
        await anyio.wait_all_tasks_blocked()
        return self

    async def _run(self) -> None:
        with self._scope:
            async with self._seats.seat(self):
                self.holds = True
                await anyio.sleep_forever()
        self.holds = False


def test_free_seats_go_to_real_work_first_and_then_to_what_is_likeliest() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            seats = Seats(2)
            first = await Request(seats, 0).start(group)
            second = await Request(seats, 0).start(group)
            unlikely = await Request(seats, 1, 0.2).start(group)
            likely = await Request(seats, 1, 0.9).start(group)
            deep = await Request(seats, 2, 1.0).start(group)
            real = await Request(seats, 0).start(group)
            waiting = [unlikely, likely, deep, real]
            assert [each.holds for each in waiting] == [False] * 4
            order = []
            for leaving in (first, second, real, likely):
                leaving.suspend()
                await anyio.wait_all_tasks_blocked()
                (granted,) = (each for each in waiting if each.holds and each not in order)
                order.append(granted)
            assert order == [real, likely, unlikely, deep]
            group.cancel_scope.cancel()

    virtually(main)


@pytest.mark.parametrize(("stragglers_first", "expected"), [(False, [3, 1, 2, 1]), (True, [1, 1, 2, 3])])
def test_of_real_requests_the_rollouts_that_are_behind_go_first_where_that_is_wanted(
    stragglers_first: bool, expected: list[int]
) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            seats = Seats(1, stragglers_first)
            holder = await Request(seats, 0).start(group)
            waiting = [await Request(seats, 1, turn=0).start(group)]
            waiting += [await Request(seats, 0, turn=turn).start(group) for turn in (3, 1, 2, 1)]
            turns = []
            while waiting:
                holder.suspend()
                await anyio.wait_all_tasks_blocked()
                holder = next(each for each in waiting if each.holds)
                waiting.remove(holder)
                turns.append(holder.turn)
            assert turns == [*expected, 0]  # Speculative work comes last all the same.
            group.cancel_scope.cancel()

    virtually(main)


def test_real_work_takes_the_seat_of_the_least_likely_branch() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            seats = Seats(3)
            branches = [await Request(seats, 1, probability).start(group) for probability in (0.9, 0.1, 0.5)]
            real = await Request(seats, 0).start(group)
            assert real.holds
            assert [branch.holds for branch in branches] == [True, False, True]
            assert seats.running == 3
            group.cancel_scope.cancel()

    virtually(main)


def test_speculation_keeps_off_the_seats_that_other_processes_take() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            seats = Seats(4)
            seats.report(running=3, waiting=0)
            branch = await Request(seats, 1).start(group)
            another = await Request(seats, 1, 0.5).start(group)
            assert (branch.holds, another.holds) == (True, False)
            real = await Request(seats, 0).start(group)
            assert real.holds, "real work queues in the server, among the others' real work"
            seats.report(running=2, waiting=0)
            await anyio.wait_all_tasks_blocked()
            assert another.holds
            assert seats.running == 3
            group.cancel_scope.cancel()

    virtually(main)


def test_speculation_gives_way_to_requests_that_wait_in_the_server() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as group:
            seats = Seats(4)
            likely = await Request(seats, 1, 0.9).start(group)
            unlikely = await Request(seats, 1, 0.1).start(group)
            seats.report(running=4, waiting=1)
            await anyio.wait_all_tasks_blocked()
            assert (likely.holds, unlikely.holds) == (True, False)
            later = await Request(seats, 1, 1.0).start(group)
            assert not later.holds, "nothing new begins while others wait"
            seats.report(running=2, waiting=0)
            await anyio.wait_all_tasks_blocked()
            assert later.holds
            group.cancel_scope.cancel()

    virtually(main)


@given(st.data())
def test_whatever_comes_goes_and_changes_the_first_in_rank_is_seated_and_the_last_suspended(
    data: st.DataObject,
) -> None:
    """Against the rules in a few lines, which look at everything each time. Ranks are few, so that there are ties."""
    count = data.draw(st.integers(1, 3))
    ranks = st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([-0.9, -0.5]))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            seats = Seats(count)
            waiting: list[Request] = []
            holding: list[Request] = []
            for _ in range(data.draw(st.integers(1, 25))):
                present = waiting + holding
                change = data.draw(st.sampled_from(["comes", "goes", "changes"] if present else ["comes"]))
                if change == "comes":
                    waiting.append(Request(seats, 0))
                    waiting[-1].rank = data.draw(ranks)
                    await waiting[-1].start(group)
                else:
                    request = data.draw(st.sampled_from(present))
                    if change == "goes":
                        request.suspend()
                        (waiting if request in waiting else holding).remove(request)
                    else:
                        request.rank = data.draw(ranks)
                        seats.reconsider()
                    await anyio.wait_all_tasks_blocked()
                while waiting:
                    first = min(waiting, key=lambda each: each.rank)
                    if len(holding) == count:
                        last = max(holding, key=lambda each: each.rank)
                        if first.rank[0] > 0 or last.rank[0] == 0:
                            break
                        holding.remove(last)
                    waiting.remove(first)
                    holding.append(first)
                assert [each.holds for each in waiting + holding] == [False] * len(waiting) + [True] * len(holding)
            group.cancel_scope.cancel()

    virtually(main)


@pytest.mark.parametrize("count", [0, -1, 0.5, float("nan")])
def test_a_server_without_seats_is_refused(count: float) -> None:
    with pytest.raises(ValueError, match="at least one seat"):
        Seats(count)
