"""What was observed before, looked up from the most specific circumstances to the most general.

For every observation the memory keeps, at each of its levels, which text followed which key. A prediction reads the
entry of every level and ranks what they say by how likely it is right. That likelihood is counted, not assumed: before
anything is learnt from an observation, each level is asked what it would have said, and its rate is kept by how many
observations the entry rests on and whether they agree.
"""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise, takewhile
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from obsspec.errors import InputError
from obsspec.rates import Rate
from obsspec.shell import effect, parse
from obsspec.types import Draft, Exchange, Observation, Query

LEVELS = ("history", "state", "recent", "task", "neighbour", "command", "similar")
"""From specific to general. The key of each but the last holds the command, and:

history: the task and every exchange so far. state: the task and the commands so far that may have changed something.
recent: the task and the command before. task: the task. neighbour: the exchange before. command: nothing else.

similar: what the most similar command of the same rollout printed, for agents try a command in many variants that
fail, or succeed silently, all alike. Its key holds that text and how similar the command is.
"""

_FORMAT = {"format": "obsspec memory", "version": 1}
_ALL_KINDS = "all"
_PRIOR = 0.5
_RATE_WEIGHT = 4.0
_ENTRY_WEIGHT = 2.0
_ANALOGUE_PRIOR = 0.25
_ANALOGUE_WEIGHT = 5.0
_TEXTS_PER_ENTRY = 4
_EXCHANGES_COMPARED = 20
"""The latest ones, among which the most similar is found."""
_CHARACTERS_COMPARED = 300
"""Of each command, the first ones."""


@dataclass(slots=True)
class _Entry:
    """What was observed under one key."""

    counts: dict[bytes, int] = field(default_factory=dict)
    """How often each text (by digest) was observed; the latest last."""
    rate: Rate = field(default_factory=Rate)
    """How often the first of ``ranked`` was what was observed next."""

    def ranked(self) -> list[bytes]:
        """The most frequent text first; of equals, the latest."""
        latest_first = list(self.counts)[::-1]
        return sorted(latest_first, key=lambda text: -self.counts[text])

    def kind(self) -> str:
        """What the entry's reliability is judged by: how much it rests on, and whether that agrees."""
        total = sum(self.counts.values())
        return f"{total if total < 4 else '4+'} {'agree' if len(self.counts) == 1 else 'differ'}"


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Where to look on one level."""

    level: str
    key: bytes
    analogue: _Analogue | None = None
    """On the level ``similar``; its entry holds a rate, and no texts."""


@dataclass(frozen=True, slots=True)
class _Analogue:
    """What the rollout's most similar command printed."""

    text: str
    kind: str
    """How similar the two are, how many commands before that one printed the same, and whether the programs are."""


@dataclass(frozen=True, slots=True)
class Recall:
    """One remembered observation."""

    text: str
    probability: float
    level: str


class Memory:
    """A ``types.Predictor`` over what it was told to ``learn``.

    It holds at most ``capacity`` entries (up to seven for an observation), dropping the least recently used, and
    proposes at most ``breadth`` drafts, each at least as probable as ``floor``. Equal texts are stored once, however
    many entries hold them. Not safe for use from several threads.
    """

    def __init__(self, capacity: int = 100_000, breadth: int = 3, floor: float = 0.05) -> None:
        if capacity < 1 or breadth < 1:
            raise InputError(f"memory: capacity ({capacity}) and breadth ({breadth}) must be at least 1")
        self._capacity, self._breadth, self._floor = capacity, breadth, floor
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._texts: dict[bytes, str] = {}
        self._holders: defaultdict[bytes, int] = defaultdict(int)
        """How many entries hold each text."""
        self.rates: defaultdict[tuple[str, int, str], Rate] = defaultdict(Rate)
        """Of texts, by level, rank in their entry (from 0), and kind of entry; the kind ``all`` counts every one."""

    def __len__(self) -> int:
        return len(self._entries)

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        for recall in self.recall(query):
            propose(Draft(recall.text, recall.probability, "memory"))

    def recall(self, query: Query) -> list[Recall]:
        """Different texts, most probable first. A text that several levels know has the highest of their estimates."""
        best: dict[str, tuple[float, str]] = {}
        for lookup in _lookups(query):
            entry = self._entries.get(lookup.key)
            if entry:
                self._entries.move_to_end(lookup.key)
            for rank, text in enumerate(self._says(lookup, entry)):
                estimate = self._probability(lookup, rank, entry or _Entry())
                if text not in best or estimate > best[text][0]:
                    best[text] = (estimate, lookup.level)
        recalls = []
        left = 1.0  # only one of the texts can come true
        for text, (estimate, level) in sorted(best.items(), key=lambda item: -item[1][0])[: self._breadth]:
            probability = min(estimate, left)
            left -= probability
            if probability >= self._floor:
                recalls.append(Recall(text, probability, level))
        return recalls

    def _says(self, lookup: _Lookup, entry: _Entry | None) -> list[str]:
        """What an entry predicts, the likeliest first."""
        if lookup.analogue:
            return [lookup.analogue.text]
        return [self._texts[text] for text in entry.ranked()[: self._breadth]] if entry else []

    async def prepare(self, query: Query) -> None:
        """Nothing: it is quick."""

    def learn(self, query: Query, observation: Observation) -> None:
        observed = _digest(observation.text)
        self._texts.setdefault(observed, observation.text)
        for lookup in _lookups(query):
            entry = self._entries.setdefault(lookup.key, _Entry())
            self._entries.move_to_end(lookup.key)
            self._count(lookup, entry, observation.text)
            if lookup.analogue is None:
                self._add(entry, observed)
        while len(self._entries) > self._capacity:
            _, entry = self._entries.popitem(last=False)
            for text in entry.counts:
                self._release(text)

    def _probability(self, lookup: _Lookup, rank: int, entry: _Entry) -> float:
        prior = _ANALOGUE_PRIOR if lookup.analogue else _PRIOR / 2**rank
        of_level = self.rates.get((lookup.level, rank, _ALL_KINDS), Rate()).estimate(prior, _RATE_WEIGHT)
        of_kind = self.rates.get((lookup.level, rank, _kind(lookup, entry)), Rate()).estimate(of_level, _RATE_WEIGHT)
        weight = _ANALOGUE_WEIGHT if lookup.analogue else _ENTRY_WEIGHT
        return of_kind if rank else entry.rate.estimate(of_kind, weight)

    def _count(self, lookup: _Lookup, entry: _Entry, observed: str) -> None:
        """Count what ``entry`` would have predicted."""
        kind = _kind(lookup, entry)
        for rank, text in enumerate(self._says(lookup, entry)):
            self.rates[lookup.level, rank, kind].count(text == observed)
            self.rates[lookup.level, rank, _ALL_KINDS].count(text == observed)
            if rank == 0:
                entry.rate.count(text == observed)

    def _add(self, entry: _Entry, observed: bytes) -> None:
        if observed not in entry.counts:
            self._holders[observed] += 1
        entry.counts[observed] = entry.counts.pop(observed, 0) + 1
        if len(entry.counts) > _TEXTS_PER_ENTRY:
            oldest = next(iter(entry.counts))
            del entry.counts[oldest]
            self._release(oldest)

    def _release(self, text: bytes) -> None:
        """One entry fewer holds ``text``."""
        self._holders[text] -= 1
        if not self._holders[text]:
            del self._holders[text], self._texts[text]

    def save(self, path: Path) -> None:
        """Write everything to one file of JSON lines. It is there whole or not at all."""
        with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                for line in self._lines():
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink()
                raise

    def _lines(self) -> Iterator[Any]:
        yield _FORMAT | {"capacity": self._capacity, "breadth": self._breadth, "floor": self._floor}
        yield [[*key, rate.hits, rate.attempts] for key, rate in self.rates.items()]
        yield len(self._texts)
        yield from self._texts.values()
        numbers = {text: number for number, text in enumerate(self._texts)}
        for key, entry in self._entries.items():
            counts = [[numbers[text], count] for text, count in entry.counts.items()]
            yield [key.hex(), entry.rate.hits, entry.rate.attempts, counts]

    @classmethod
    def load(cls, path: Path) -> Memory:
        """What ``save`` wrote. Raises InputError where the file cannot be read or is not such a file."""
        try:
            with path.open() as file:
                return cls._from_lines(map(json.loads, file))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; give the path of a saved memory") from error
        except (ValueError, TypeError, LookupError, StopIteration) as error:
            raise InputError(f"{path}: not a whole memory file; delete it, or give another path") from error

    @classmethod
    def _from_lines(cls, lines: Iterator[Any]) -> Memory:
        header = next(lines)
        if not isinstance(header, dict) or not _FORMAT.items() <= header.items():
            raise ValueError(header)
        memory = cls(header["capacity"], header["breadth"], header["floor"])
        for level, rank, kind, hits, attempts in next(lines):
            memory.rates[level, rank, kind] = Rate(hits, attempts)
        texts = [next(lines) for _ in range(next(lines))]
        digests = [_digest(text) for text in texts]
        memory._texts = dict(zip(digests, texts, strict=True))
        for key, hits, attempts, counts in lines:
            entry = _Entry({digests[number]: count for number, count in counts}, Rate(hits, attempts))
            memory._entries[bytes.fromhex(key)] = entry
            for text in entry.counts:
                memory._holders[text] += 1
        return memory


def _kind(lookup: _Lookup, entry: _Entry) -> str:
    """What the reliability of what is found there is judged by."""
    return lookup.analogue.kind if lookup.analogue else entry.kind()


def _lookups(query: Query) -> list[_Lookup]:
    """One for each level, most specific first; the same in every process."""
    task = _digest_command(query.task)
    exchanges = list(map(_digest_exchange, query.history))
    changes = [_digest_command(each.command) for each in query.history if effect(each.command) != "reads"]
    last = [_digest_command(each.command) for each in query.history[-1:]]
    circumstances = ([task, *exchanges], [task, *changes], [task, *last], [task], [*exchanges[-1:]], list[bytes]())
    command = _digest_command(query.command)
    lookups = [
        _Lookup(level, _joined(_digest_command(level), command, *parts))
        for level, parts in zip(LEVELS[:-1], circumstances, strict=True)
    ]
    if analogue := _analogue(query):
        parts = _digest_command("similar"), _digest_command(analogue.kind), _digest(analogue.text)
        lookups.append(_Lookup("similar", _joined(*parts), analogue))
    return lookups


def _analogue(query: Query) -> _Analogue | None:
    """What the most similar of the rollout's latest commands printed; of equals, the latest."""
    recent = query.history[-_EXCHANGES_COMPARED:]
    if not recent:
        return None
    words = _words(query.command)
    similarity, number = max((_overlap(words, _words(each.command)), number) for number, each in enumerate(recent))
    text = recent[number].observation
    before = list(takewhile(lambda each: each.observation == text, reversed(recent[:number])))
    same = _shape(query.command) == _shape(recent[number].command)
    return _Analogue(text, f"{int(similarity * 5) / 5} {min(len(before), 2)} {'same' if same else 'other'} programs")


def _overlap(some: frozenset[str], others: frozenset[str]) -> float:
    """The Jaccard index: the share of both sets' elements that are in both."""
    common = len(some & others)
    return common / max(1, len(some) + len(others) - common)


@lru_cache(maxsize=2048)
def _shape(command: str) -> str:
    """How a command begins, the programs that it runs and how it joins them, and which of them write files."""
    simples = parse(command)
    if not simples:
        return " ".join(command.split()[:1])
    programs = []
    for simple in simples:
        programs.append(f"{simple.after} {simple.name} {len(simple.outputs)}")
    return " ".join((*command.split()[:1], *programs))


@lru_cache(maxsize=2048)
def _words(command: str) -> frozenset[str]:
    """The words and signs of a command, and which follows which."""
    words = re.findall(r"\w+|[^\w\s]", command[:_CHARACTERS_COMPARED])
    return frozenset(words).union(map(" ".join, pairwise(words)))


def _digest(text: str) -> bytes:
    return _joined(text.encode("utf-8", "surrogatepass"))


def _joined(*parts: bytes) -> bytes:
    """A digest of digests, or of one text."""
    return blake2b(b"".join(parts), digest_size=16).digest()


_digest_command = lru_cache(maxsize=8192)(_digest)


@lru_cache(maxsize=4096)
def _digest_exchange(exchange: Exchange) -> bytes:
    return _joined(_digest(exchange.command), _digest(exchange.observation))
