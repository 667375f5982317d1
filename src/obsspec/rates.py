"""How often something came true, counted."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Rate:
    """Attempts, and those of them that hit."""

    hits: int = 0
    attempts: int = 0

    def count(self, hit: bool, most: float = math.inf) -> None:
        """Where ``most`` attempts have been counted, all of them count half from then on, so that old ones fade."""
        self.attempts += 1
        self.hits += hit
        if self.attempts >= most:
            self.hits, self.attempts = self.hits // 2, self.attempts // 2

    def estimate(self, prior: float, weight: float) -> float:
        """The probability that the next attempt hits: the mean of a Beta posterior whose prior, with mean ``prior``,
        counts as much as ``weight`` attempts."""
        return (self.hits + weight * prior) / (self.attempts + weight)
