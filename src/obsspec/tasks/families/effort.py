"""The time that a task's own scripts take."""

from __future__ import annotations

from random import Random


def effort(random: Random) -> str:
    """A shell line that prints nothing and takes about 0.5 to 2 s, half of it waiting and half computing."""
    seconds = random.randint(3, 10) / 10
    million_rounds = random.randint(2, 8)
    return f"sleep {seconds}; python3 -c 'sum(i * i % 7 for i in range({million_rounds}000000))'"
