"""When a draft is worth a branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Gate(Protocol):
    """Decides whether a draft gets a branch, before anything has been generated on it."""

    def __call__(self, probability: float) -> bool:
        """``probability``: that the draft and every draft above it are all exact, 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class Threshold:
    """Admits what is likely enough. 0 admits everything."""

    least: float = 0.1

    def __call__(self, probability: float) -> bool:
        return probability >= self.least
