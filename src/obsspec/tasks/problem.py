"""What a task family generates: a problem, and an expert's way through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

Level = Literal["easy", "medium", "hard"]


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """One command of an expert."""

    command: str
    mistake: bool = False
    """Whether it is a slip that a later step corrects. A policy reads it but is not trained to write it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One instance of a family. The fields of `Task` of the same names say what each is for."""

    instruction: str
    check: str
    expert: tuple[ExpertStep, ...]
    """Commands that solve it, in order. All that they use can be read in the instruction or in what the sandbox
    printed before; the last one leaves the correct end state."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    setup: str = ""
    check_files: Mapping[str, bytes] = field(default_factory=dict)


Family = Callable[[Random, Level], Problem]
"""Generates unlimited instances: every choice comes from the random source, so a seed names an instance for ever."""
