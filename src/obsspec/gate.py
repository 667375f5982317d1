"""When a draft is worth a branch.

``ExpectedValue`` weighs what a branch may save against what it costs the others on the same server, by what it has
learned from the turns so far. ``Threshold`` asks for a probability and learns nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from obsspec.errors import InputError, writing, wrong_field
from obsspec.rates import Rate
from obsspec.shell import kind_of
from obsspec.types import Action, Draft, Turn


@dataclass(frozen=True, slots=True)
class Bet:
    """What a gate is told of a draft that wants a branch."""

    probability: float
    """That the draft and every one below it are all exact, 0 to 1."""
    commands: tuple[str, ...]
    """Those that have to end before the branch's context is real: first the one that is running, last the one whose
    observation the draft is. None where no command is needed."""
    elapsed: float
    """Seconds that the first of them has been running."""
    running: int
    """Requests that the policy server is running now."""
    seats: float
    """How many it can run."""


class Gate(Protocol):
    """Decides whether a draft gets a branch, before anything has been generated on it.

    It is asked again, with more time elapsed, about a draft that it has held back, so it need not foresee how long a
    tool will run. Nothing that a branch has generated may enter its decisions.
    """

    def probability(self, draft: Draft, command: str, elapsed: float) -> float:
        """That the draft is exact of a command that has been running for so many seconds, 0 to 1; not simply what its
        predictor says of itself."""

    def admits(self, bet: Bet) -> bool:
        """Whether the draft gets its branch now."""

    def learn(self, turn: Turn) -> None:
        """Told every settled turn, from the event loop; must be quick."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Admits what is likely enough, by the predictor's own word. 0 admits everything. It foresees no time-out."""

    least: float = 0.1

    def probability(self, draft: Draft, command: str, elapsed: float) -> float:
        return 0.0 if draft.if_timed_out else draft.probability

    def admits(self, bet: Bet) -> bool:
        return bet.probability >= self.least

    def learn(self, turn: Turn) -> None:
        pass


@dataclass
class Calibration:
    """How often drafts of a stated probability really are exact, for each predictor, learned as they come true.

    Histogram binning (Zadrozny and Elkan, ICML 2001) with tenths as bins, each starting from what the predictor
    states. Old counts fade, for predictors learn as well.
    """

    rates: dict[str, list[Rate]] = field(default_factory=dict)
    """By predictor: a rate for each tenth of the stated probability."""

    def probability(self, predictor: str, stated: float) -> float:
        rates = self.rates.get(predictor)
        return stated if rates is None else rates[_tenth(stated)].estimate(prior=stated, weight=_PRIOR_DRAFTS)

    def stated(self, predictor: str, least: float) -> float:
        """The smallest probability that a predictor can state of a draft that is exact with probability ``least`` or
        more; 1 where there is none."""
        for place, rate in enumerate(self.rates.get(predictor, [Rate() for _ in range(10)])):
            low, high = place / 10, (place + 1) / 10
            # Within a tenth the estimate grows with what is stated: (hits + prior * stated) / (attempts + prior).
            needed = least + (least * rate.attempts - rate.hits) / _PRIOR_DRAFTS
            if needed < high:
                return max(low, needed)
        return 1.0

    def learn(self, predictor: str, stated: float, exact: bool) -> None:
        rate = self.rates.setdefault(predictor, [Rate() for _ in range(10)])[_tenth(stated)]
        rate.count(exact, most=_MOST_DRAFTS)


@dataclass
class Times:
    """How long the latest commands of some sort ran."""

    seconds: deque[float] = field(default_factory=deque)
    timed_out: deque[bool] = field(default_factory=deque)
    """Of the same commands."""

    def learn(self, seconds: float, timed_out: bool, most: int) -> None:
        """Forgets the oldest where there are more than ``most``."""
        self.seconds.append(seconds)
        self.timed_out.append(timed_out)
        if len(self.seconds) > most:
            self.seconds.popleft()
            self.timed_out.popleft()

    def timing_out(self, elapsed: float) -> Rate:
        """Of those that ran for longer, how many ran out of time."""
        longer = [ended for seconds, ended in zip(self.seconds, self.timed_out, strict=True) if seconds > elapsed]
        return Rate(sum(longer), len(longer))


_NO_TIMES = Times()


@dataclass
class ToolTimes:
    """How long commands run, by the programs that they name, learned from those that have ended."""

    kinds: dict[str, Times] = field(default_factory=dict)
    """Those of each kind of command; those used last come last."""
    all: Times = field(default_factory=Times)
    """Those of any command."""

    def learn(self, command: str, seconds: float, timed_out: bool = False) -> None:
        kind = kind_of(command)
        self.kinds[kind] = self.kinds.pop(kind, Times())
        self.kinds[kind].learn(seconds, timed_out, _MOST_TIMES_OF_A_KIND)
        self.all.learn(seconds, timed_out, _MOST_TIMES)
        if len(self.kinds) > _MOST_KINDS:
            del self.kinds[next(iter(self.kinds))]

    def remaining(self, command: str, elapsed: float, most: float, after: float = 0.0) -> float:
        """Expected seconds, of at most ``most``, until a command that has run for ``elapsed`` and then ``after`` more
        seconds are over: E[min(most, T - elapsed + after) | T > elapsed].

        The mean over the command's own kind, with all commands counting as much as a few of its own. Where none has
        ever run for so long it is expected to run as long again.
        """
        every = _remaining(self.all.seconds, elapsed, most, after)
        own = _remaining(self._of_kind(command).seconds, elapsed, most, after)
        usual = sum(every) / len(every) if every else min(most, elapsed + after) if self.all.seconds else most
        return (sum(own) + _PRIOR_TIMES * usual) / (len(own) + _PRIOR_TIMES)

    def outlasting(self, command: str, seconds: float, most: float) -> float:
        """Expected seconds, of at most ``most``, that a command that begins now goes on after its first ``seconds``:
        E[min(most, max(0, T - seconds))]. As with `remaining`, all commands count as much as a few of its own kind."""
        every = [min(most, max(0.0, time - seconds)) for time in self.all.seconds]
        own = [min(most, max(0.0, time - seconds)) for time in self._of_kind(command).seconds]
        usual = sum(every) / len(every) if every else most
        return (sum(own) + _PRIOR_TIMES * usual) / (len(own) + _PRIOR_TIMES)

    def timing_out(self, command: str, elapsed: float) -> float:
        """The chance that a command that has run for ``elapsed`` seconds runs into its time limit: of the commands of
        its kind that ran for longer, the share that did, with all commands counting as much as a few of its own."""
        usual = self.all.timing_out(elapsed).estimate(prior=0.0, weight=1.0)
        return self._of_kind(command).timing_out(elapsed).estimate(usual, _PRIOR_TIMES)

    def _of_kind(self, command: str) -> Times:
        return self.kinds.get(kind_of(command), _NO_TIMES)


@dataclass
class StepTimes:
    """How much slower one more running request makes the policy server's decoding for every other one.

    A decode step takes a + b * running seconds. a and b are fitted to the turns by least squares, weighted by tokens;
    old turns fade, and where the load hardly varied what is usual prevails.
    """

    weight: float = 0.0
    running: float = 0.0
    """Weighted mean, as the next one."""
    seconds: float = 0.0
    """Of a step."""
    variance: float = 0.0
    """Of the number of running requests, times the weight; the next one is its covariance with the step time."""
    covariance: float = 0.0

    def learn(self, tokens: int, running: float, seconds: float) -> None:
        """``seconds`` for each of ``tokens`` while so many were ``running``."""
        fade = 1 - _RECENT_STEPS
        self.weight = fade * self.weight + tokens
        share = tokens / self.weight
        apart, slower = running - self.running, seconds - self.seconds
        self.running += share * apart
        self.seconds += share * slower
        self.variance = fade * self.variance + tokens * (1 - share) * apart * apart
        self.covariance = fade * self.covariance + tokens * (1 - share) * apart * slower

    def slowdown(self, usual: float) -> float:
        """b / a. ``usual``: what it is where nothing is known."""
        if not self.weight:
            return usual
        guess = usual * self.seconds / (1 + usual * self.running)
        more = _PRIOR_TOKENS * self.running**2
        slope = (self.covariance + more * guess) / max(1e-12, self.variance + more)
        slope = min(max(0.0, slope), 0.999 * self.seconds / max(1e-12, self.running))
        return slope / max(1e-12, self.seconds - slope * self.running)


@dataclass
class ExpectedValue:
    """Admits a draft where what its branch may save is worth what it costs:

        p * gain * (1 - price) > (1 - p) * (waste * price + reading * running)

    p is the calibrated probability. ``gain`` is how much of the next generation would lie under the tools that have to
    end first, less what would still lie there if the branch began only when the first of them ends. ``waste`` is how
    long the branch would run when it turns out wrong. ``price`` is the time that all other requests together lose for
    each second of one more: running * b / (a + b * running), see `StepTimes`. ``reading`` is how long the server reads
    a draft, while all others wait; it reads an observation in any case, so only a wrong draft costs that.

    The gain shrinks with the price as well, for a rollout that is ahead asks for its next generation sooner, and so
    slows the others: with a mean turn time C = Z + L * (a + b * n), where Z is the tools' time, L the tokens and
    n = N * (C - Z) / C how many of N rollouts generate, a second less of Z takes 1 - price as much off C as a second
    less of generation.

    Meant to be shared by all rollouts of a process: what it has learned is in its fields, and can be saved.
    """

    calibration: Calibration = field(default_factory=Calibration)
    tool_times: ToolTimes = field(default_factory=ToolTimes)
    step_times: StepTimes = field(default_factory=StepTimes)
    generation_seconds: float = 1.0
    """Of a generation that was kept, on average over the last turns."""
    reading_seconds: float = 0.01
    """From a request to its first token, less what that token itself takes, on average over the last turns; at first,
    250 tokens at 25,000 a second."""
    price: float = 0.0
    """As above, on average over the last drafts that wanted a branch."""
    running: float = 0.0
    """Likewise, the requests that the server was running then."""
    kept: dict[str, Rate] = field(default_factory=dict)
    """By predictor: of its exact drafts that came in time, those that had got a branch."""
    turns: int = 0
    """How many it has learned from."""

    def worth_asking(
        self, predictor: str, command: str, chance: float, seconds: float, price: float | None = None
    ) -> bool:
        """Whether a predictor is to be asked at all, before it has cost anything:

            chance * kept * gain * (1 - price) > seconds * its price

        ``chance``: that it has an exact draft which no cheaper predictor has, if it answers in time. ``seconds``: from
        the question to its draft, usually. ``kept`` is the chance that such a draft gets a branch, and ``gain`` how
        much of the next generation would lie under the command from then on.

        ``price``: what the rollouts lose for each second that it works. By default that of a policy second, and
        somewhat more than nothing on an idle server: right where it runs on the policy's server, or on its cores.
        """
        gain = self.tool_times.outlasting(command, seconds, self.generation_seconds)
        kept = self.kept.get(predictor, _NEVER_EXACT).estimate(prior=1.0, weight=_PRIOR_KEPT)
        cost = max(_LEAST_PRICE, self.price) if price is None else price
        return chance * kept * gain * (1 - self.price) > seconds * cost

    def least(self, predictor: str, command: str) -> float:
        """The least probability that ``predictor`` has to state of a draft for ``command``, which begins now, to get it
        a branch, on a server as the last drafts found it. Less likely ones need not be written to their end."""
        hidden = self.tool_times.remaining(command, 0.0, self.generation_seconds)
        cost = hidden * self.price + max(0.0, self.reading_seconds) * self.running
        worth = hidden * (1 - self.price)
        return self.calibration.stated(predictor, cost / (cost + worth) if cost + worth else 1.0)

    def probability(self, draft: Draft, command: str, elapsed: float) -> float:
        exact = self.calibration.probability(draft.predictor, draft.probability)
        if not draft.if_timed_out:
            return exact
        # Every command has such a draft. While it is not the likely end, breadth is left to other drafts.
        timing_out = self.tool_times.timing_out(command, elapsed)
        return exact * timing_out if timing_out >= 0.5 else 0.0

    def admits(self, bet: Bet) -> bool:
        if not bet.commands:
            return True
        first, *later = bet.commands
        most = self.generation_seconds
        # Each at most as long as what it can hide: one very slow call in a hundred must not speak for the others.
        after = sum(self.tool_times.remaining(command, 0.0, most) for command in later)
        hidden = self.tool_times.remaining(first, bet.elapsed, most, after)
        gain = hidden - min(most, after)
        loaded = self.step_times.slowdown(usual=min(_MOST_SLOWDOWN, _FULL / bet.seats)) * bet.running
        price = loaded / (1 + loaded)
        self.price += _RECENT * (price - self.price)
        self.running += _RECENT * (bet.running - self.running)
        reading = max(0.0, self.reading_seconds) * bet.running
        return bet.probability * gain * (1 - price) > (1 - bet.probability) * (hidden * price + reading)

    def learn(self, turn: Turn) -> None:
        if isinstance(turn.step, Action) and turn.executing is not None:
            timed_out = turn.observation is not None and turn.observation.timed_out
            self.tool_times.learn(turn.step.command, turn.executing.seconds, timed_out)
            for draft in turn.drafts:
                if timed_out or not draft.if_timed_out:
                    self.calibration.learn(draft.predictor, draft.probability, draft.exact)
                if draft.exact:
                    self.kept.setdefault(draft.predictor, Rate()).count(draft.admitted, most=_MOST_KEPT)
        seconds = sum(interval.seconds for interval in turn.generating)
        self.turns += 1
        recent = max(_RECENT, 1 / self.turns)
        self.generation_seconds += recent * (seconds - self.generation_seconds)
        tokens = len(turn.generation.tokens)
        if tokens > 1 and turn.generating[0].start > 0:  # A rollout's first generation reads its whole prompt.
            step = (seconds - turn.first_token_seconds) / (tokens - 1)
            self.step_times.learn(tokens, turn.running, step)
            # A request that comes during a step waits for its end, half a step on average; then its own begins.
            self.reading_seconds += recent * (turn.first_token_seconds - 1.5 * step - self.reading_seconds)

    def save(self, file: Path) -> None:
        """Writes what it has learned as JSON, whole or not at all. Raises InputError where it cannot."""
        from pydantic import TypeAdapter  # Takes a quarter of a second, which most programs need not spend.

        written = file.with_name(f".{file.name}.new")
        with writing(file, "file"):
            written.write_bytes(TypeAdapter(ExpectedValue).dump_json(self, indent=1))
            written.replace(file)

    @classmethod
    def load(cls, file: Path) -> ExpectedValue:
        """Reads what `save` wrote. Raises InputError for anything else."""
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(ExpectedValue).validate_json(file.read_bytes())
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}; give a file that a gate was saved to") from None
        except ValidationError as error:
            raise InputError(
                f"{file}: {wrong_field(error, 'the file')}; give a file that a gate was saved to"
            ) from None


PRICE_APART = 0.02
"""Of a second of a predictor that takes none from the policy: the energy, say. See `ExpectedValue.worth_asking`."""

_PRIOR_DRAFTS = 10.0
"""Drafts that what a predictor states of itself counts as much as."""
_MOST_DRAFTS = 400
_PRIOR_KEPT = 2.0
_MOST_KEPT = 50
"""Exact drafts of a predictor: what becomes of them changes with the load."""
_NEVER_EXACT = Rate()
_LEAST_PRICE = 0.1
"""Of a second that a predictor works: also where nobody else runs on the server, it takes something from the policy."""
_PRIOR_TIMES = 4.0
"""Commands of its own kind that all commands together count as much as."""
_MOST_TIMES = 256
_MOST_TIMES_OF_A_KIND = 64
_MOST_KINDS = 1000
_RECENT = 0.02
"""Weight of the latest turn in averages."""
_FULL = 3.0
"""b * seats / a of a full server, usually: 3.4 in `lab/workloads/h100-8b.toml`, which has the arithmetic."""
_MOST_SLOWDOWN = 0.25
"""b / a at the most, usually: servers with few seats are small ones, on which reading the weights still prevails."""
_RECENT_STEPS = 0.002
"""The same in the fit of step times, which needs many turns."""
_PRIOR_TOKENS = 50.0
"""Tokens that what is usual of them counts as much as, as if half had come at no load and half at twice the mean."""


def _tenth(probability: float) -> int:
    return min(9, int(10 * probability))


def _remaining(times: Iterable[float], elapsed: float, most: float, after: float) -> list[float]:
    longest, less = most - after + elapsed, elapsed - after  # Without a call for each, of which there would be many.
    return [most if seconds > longest else seconds - less for seconds in times if seconds > elapsed]
