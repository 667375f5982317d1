"""Immutable token contexts that share their prefixes.

A context is a chain of segments. Extending one makes a new context and leaves the old one as it was, so a branch is
just another context, and there is nothing to snapshot or restore.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

Tokens = tuple[int, ...]
"""Token ids."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that entered a context together."""

    tokens: Tokens
    sampled: bool
    """True where the policy wrote them: these, and only these, are trained on."""
    logprobs: tuple[float, ...] = ()
    """For sampled tokens, the natural log-probability of each; empty otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The exact tokens that the policy has seen so far, with the mask of which ones it wrote."""

    parent: Context | None = field(default=None, repr=False)
    segment: Segment = field(default=Segment((), sampled=False), repr=False)
    length: int = 0
    """Tokens in the whole context."""

    @staticmethod
    def of(tokens: Tokens) -> Context:
        """A context of given (not sampled) tokens."""
        return Context().given(tokens)

    def given(self, tokens: Tokens) -> Context:
        """This context, then tokens that the policy is to read."""
        return Context(self, Segment(tuple(tokens), sampled=False), self.length + len(tokens))

    def sampled(self, tokens: Tokens, logprobs: tuple[float, ...]) -> Context:
        """This context, then tokens that the policy wrote."""
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} sampled tokens came with {len(logprobs)} log-probabilities")
        return Context(self, Segment(tuple(tokens), True, tuple(logprobs)), self.length + len(tokens))

    def segments(self) -> list[Segment]:
        """All segments, oldest first."""
        chain: list[Segment] = []
        node: Context | None = self
        while node is not None:
            if node.segment.tokens:
                chain.append(node.segment)
            node = node.parent
        return chain[::-1]

    @property
    def tokens(self) -> Tokens:
        """All token ids, oldest first; ``length`` of them."""
        return tuple(chain.from_iterable(segment.tokens for segment in self.segments()))

    @property
    def mask(self) -> tuple[bool, ...]:
        """For each token, whether the policy wrote it."""
        return tuple(segment.sampled for segment in self.segments() for _ in segment.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """For each token its log-probability, 0.0 where the policy did not write it."""

        def of_segment(segment: Segment) -> Iterator[float]:
            return iter(segment.logprobs if segment.sampled else (0.0,) * len(segment.tokens))

        return tuple(value for segment in self.segments() for value in of_segment(segment))
