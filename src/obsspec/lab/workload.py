"""What the lab simulates: a validated TOML file, and the workloads that come with the package."""

from __future__ import annotations

import math
import tomllib
import typing
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from obsspec.environments.latency import Latency, read_latency, recorded
from obsspec.errors import InputError, did_you_mean
from obsspec.lab.server import Costs, Scheduling

_WORKLOADS = files("obsspec.lab") / "workloads"


def _whole(seats: float) -> float:
    if not (seats == math.inf or (seats >= 1 and seats.is_integer())):
        raise ValueError("seats are a whole number of at least 1, or inf")
    return seats if math.isinf(seats) else int(seats)


GateName = Literal["expected_value", "everything"]
"""The product's own gate; or none: whatever is drafted gets a branch."""

Seats = Annotated[float, AfterValidator(_whole)]


def normal_score(uniform: float) -> float:
    """The standard normal variate that is larger than a share ``uniform``, in [0, 1), of all."""
    return NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Distribution(_Table):
    """Of a length of time or a number of tokens: a plain number, or a table of exactly one of these."""

    always: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The plain number."""
    mean: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Lognormal, with ``sigma``, the standard deviation of its natural logarithm."""
    sigma: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    quantiles: dict[float, float] | None = None
    """Probability to value; logarithmic between them, constant beyond."""
    recorded: tuple[float, ...] | None = None
    """Values whose empirical quantiles these are."""
    file: str | None = None
    """A JSON file, relative to the configuration, in which ``name`` leads to a list or to quantiles."""
    name: str = ""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"always": value} if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _one_kind(self) -> Distribution:
        kinds = (self.always, self.mean, self.quantiles, self.recorded, self.file)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("give a number, or exactly one of mean, quantiles, recorded and file")
        if self.always is None and self.mean is None:
            probabilities, values = zip(*self._table.quantiles, strict=True) if self._table.quantiles else ((), ())
            if not values or not all(0 <= value < math.inf for value in values):
                raise ValueError("there must be at least one number, each 0 or more")
            if not 0 <= probabilities[0] <= probabilities[-1] <= 1:
                raise ValueError("quantiles must have probabilities from 0 to 1")
        return self

    def sample(self, uniform: float) -> float:
        """The value at ``uniform``, in [0, 1)."""
        if self.always is not None:
            return self.always
        if self.mean is not None:
            return self.mean * math.exp(self.sigma * normal_score(uniform) - self.sigma**2 / 2)
        return self._table.sample(uniform)

    @cached_property
    def average(self) -> float:
        """The mean of what `sample` gives, which for quantiles is not that of the data behind them."""
        if self.always is not None:
            return self.always
        points = 20_000
        return self.mean or sum(self.sample((point + 0.5) / points) for point in range(points)) / points

    @cached_property
    def _table(self) -> Latency:
        if self.file is not None:
            return read_latency(self.file, self.name)
        if self.recorded is not None:
            return recorded(list(self.recorded), "the configuration")
        return Latency(tuple(sorted((self.quantiles or {}).items())), "quantiles")


class Tool(_Table):
    """The environment."""

    seconds: Distribution
    """Of one call."""
    overhead: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds added to every call, as by a remote sandbox."""
    group_sigma: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Rollouts of one group share a lognormal factor, of mean 1, on their ``seconds``: slow tasks have stragglers."""
    kinds: int = Field(default=1, ge=1)
    """Of commands, equally frequent, which the gate can tell apart."""
    predictability: float = Field(default=0.0, ge=0, le=1)
    """How far a command's kind tells how long it runs: the correlation of their normal scores."""

    @property
    def mean_seconds(self) -> float:
        return self.seconds.average + self.overhead


class Generation(_Table):
    """The policy's generations: how long they take alone on an idle server, or how many tokens they have."""

    seconds: Distribution | None = None
    tokens: Distribution | None = None

    @model_validator(mode="after")
    def _either(self) -> Generation:
        if (self.seconds is None) == (self.tokens is None):
            raise ValueError("give either seconds or tokens")
        return self


class Predictor(_Table):
    """The world model."""

    accuracy: float | tuple[tuple[float, float], ...] = 0.664
    """The chance that its first draft is exact: one number, or (tool seconds, chance) pairs in rising order, each of
    which holds from so many seconds on."""
    further: tuple[float, ...] = ()
    """The chances of a second, third ... draft, for breadth."""
    concentration: float = Field(default=math.inf, gt=0)
    """The chance that the world model gives its first draft follows a beta distribution whose mean is ``accuracy`` and
    whose two parameters have this sum. So a small one is a world model that is sure: of most drafts it knows that they
    are exact, or that they are not. Infinite: it says the same of all."""
    delay_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """From the question to the drafts."""
    delay_fraction: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The same, as a fraction of the mean tool time."""
    server: Literal["own", "shared"] = "own"
    """``shared``: its drafts are decoded by the policy's server, in as many steps as take the delay on an idle one."""
    seats: Seats = math.inf
    """How many questions a server of its own answers at once."""

    @model_validator(mode="after")
    def _sound(self) -> Predictor:
        steps = self.accuracy if isinstance(self.accuracy, tuple) else ((0.0, self.accuracy),)
        seconds = [least for least, _ in steps]
        if not steps or seconds[0] != 0 or seconds != sorted(seconds):
            raise ValueError("accuracy must be a number, or pairs (tool seconds, chance) that begin at 0 and rise")
        if any(not 0 <= chance <= 1 for _, chance in steps) or any(chance < 0 for chance in self.further):
            raise ValueError("accuracy must be within 0 and 1")
        if max(chance for _, chance in steps) + sum(self.further) > 1:
            raise ValueError("accuracy and further together must not exceed 1")
        if (self.delay_seconds is None) == (self.delay_fraction is None):
            raise ValueError("give either delay_seconds or delay_fraction")
        return self

    def chance(self, tool_seconds: float) -> float:
        """That the first draft is exact, of a call that takes so long."""
        if not isinstance(self.accuracy, tuple):
            return self.accuracy
        return next(chance for least, chance in reversed(self.accuracy) if tool_seconds >= least)


class Server(_Table):
    """The policy server: see `obsspec.lab.server`."""

    step_seconds: float = Field(gt=0, allow_inf_nan=False)
    step_seconds_per_sequence: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    prefill_tokens_per_second: float = Field(default=math.inf, gt=0)
    seats: Seats = math.inf
    stream_interval: int = Field(default=8, ge=1)
    scheduling: Scheduling | None = None
    """That of the schedule where it is not given."""

    @property
    def costs(self) -> Costs:
        return Costs(**self.model_dump(exclude={"scheduling"}))


class Lengths(_Table):
    """Tokens that the policy reads."""

    prompt: int = Field(default=1000, ge=1)
    observation: Distribution = Distribution(always=100)


class Workload(_Table):
    """One point: a workload, and the schedule under which it is to be run."""

    turns: int = Field(ge=1)
    """Of each rollout: a generation and a tool call each."""
    rollouts: int = Field(ge=1)
    groups: int = Field(default=1, ge=1)
    """Different tasks among them."""
    concurrency: int | None = Field(default=None, ge=1)
    """Rollouts at the same time; all of them where neither this nor ``load`` is given."""
    load: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The same as a fraction of the server's capacity: 1 is as many rollouts as fill its seats when each is a full
    batch's generation and then a tool in turn."""
    seed: int = 0
    schedule: str = "obsspec"
    depth: int | None = Field(default=None, ge=0)
    """Instead of the schedule's, as the next three; nothing makes the sequential schedule speculate."""
    breadth: int | None = Field(default=None, ge=1)
    gate: GateName | None = None
    budget: bool | None = None
    """Whether the client counts the server's seats."""
    stragglers_first: bool = False
    """Whether it gives them to the rollouts that have come least far, where it counts them."""
    tool: Tool
    generation: Generation
    predictor: Predictor
    server: Server
    lengths: Lengths = Lengths()

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        if self.concurrency is not None and self.load is not None:
            raise ValueError("give either concurrency or load")
        if self.load is not None and math.isinf(self.server.seats):
            raise ValueError("load is a fraction of the server's seats: give server.seats")
        if self.predictor.server == "shared" and not math.isinf(self.predictor.seats):
            raise ValueError("predictor.seats are those of a server of its own, and this one is shared")
        if self.load is not None and self.active > self.rollouts:
            raise ValueError(f"load {self.load:g} is {self.active} rollouts at once: give at least as many rollouts")
        return self

    @property
    def predictor_seconds(self) -> float:
        """From a question to the drafts, on an idle server."""
        delay = self.predictor.delay_seconds
        return delay if delay is not None else (self.predictor.delay_fraction or 0.0) * self.tool.mean_seconds

    @property
    def mean_tokens(self) -> float:
        """Of one generation."""
        if self.generation.tokens is not None:
            return self.generation.tokens.average
        assert self.generation.seconds is not None
        return self.generation.seconds.average / self.server.costs.step(1)

    @property
    def active(self) -> int:
        """Rollouts at the same time."""
        if self.load is None:
            return min(self.concurrency or self.rollouts, self.rollouts)
        seats = self.server.seats
        generation = self.mean_tokens * self.server.costs.step(int(seats))
        return max(1, round(self.load * seats * (generation + self.tool.mean_seconds) / generation))


def names() -> list[str]:
    """Of the workloads that come with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _WORKLOADS.iterdir() if entry.name.endswith(".toml"))


def read(config: str) -> dict[str, Any]:
    """The content of a TOML file, or of a shipped workload by its name, on top of the one that its ``base`` names.

    Raises InputError.
    """
    file = Path(config)
    try:
        text = (_WORKLOADS / f"{config}.toml" if config in names() else file).read_text()
        content = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{config}: {error.strerror}; give a TOML file or one of {', '.join(names())}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{config}: not TOML: {error}") from None
    _anchor_files(content, file.parent)
    base = content.pop("base", None)
    if base is None:
        return content
    if base not in names():
        raise InputError(f"{config}: base: no workload {base!r}; take one of {', '.join(names())}")
    return merged(read(base), content)


def _anchor_files(content: Any, directory: Path) -> None:
    """A file that is named in a configuration lies beside it."""
    if isinstance(content, dict):
        if isinstance(content.get("file"), str):
            content["file"] = str(directory / content["file"])
        content = list(content.values())
    for each in content if isinstance(content, list) else ():
        _anchor_files(each, directory)


_ALTERNATIVES = ({"concurrency", "load"}, {"delay_seconds", "delay_fraction"}, {"seconds", "tokens"})


def merged(below: dict[str, Any], above: dict[str, Any], table: type[BaseModel] = Workload) -> dict[str, Any]:
    """``below`` with what ``above`` says instead: tables key by key, distributions whole, but for another mean or sigma
    of one that is lognormal.

    A key also replaces those that exclude it, so that a load may be put on a workload that has a concurrency.
    """
    result = dict(below)
    for key, value in above.items():
        for alternatives in _ALTERNATIVES:
            for other in alternatives - {key} if key in alternatives else ():
                result.pop(other, None)
        inner, before = _table_of(table, key), result.get(key)
        if inner is not None and isinstance(before, dict) and isinstance(value, dict):
            whole = inner is Distribution and not ("mean" in before and value.keys() <= {"mean", "sigma"})
            result[key] = value if whole else merged(before, value, inner)
        else:
            result[key] = value
    return result


def _table_of(table: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The type of the table that ``key`` leads to; None where it leads to a value."""
    annotation = table.model_fields[key].annotation if key in table.model_fields else None
    kinds = (annotation, *typing.get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def validated(content: dict[str, Any], source: str) -> Workload:
    """Raises InputError that names the source, the key, and the remedy."""
    try:
        return Workload.model_validate(content)
    except ValidationError as error:
        errors = error.errors()
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        *tables, last = [str(part) for part in first["loc"]] or ["the workload"]
        key = ".".join((*tables, last))
        if first["type"] != "extra_forbidden":
            raise InputError(f"{source}: {key}: {first['msg'].removeprefix('Value error, ')}") from None
        table: type[BaseModel] = Workload
        for name in tables:
            table = _table_of(table, name) or table
        remedy = did_you_mean(last, table.model_fields, f"known are {', '.join(table.model_fields)}")
        raise InputError(f"{source}: {key}: no such key; {remedy}") from None
