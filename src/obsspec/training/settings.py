"""All settings of a policy's training, in one file: `obsspec train CONFIG.toml`.

Each key of each section is also a flag of the command, so no two sections share a key. What a key means is said once,
in its field's description: there, in ``--help`` and as a comment in the file that ``--write-config`` writes.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from typing_extensions import Doc

from obsspec.errors import InputError, did_you_mean
from obsspec.policies import Precision

if TYPE_CHECKING:
    from obsspec.runs import Plan
    from obsspec.types import Task

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What the policy learns on, and what it is tested on."""

    tasks: Annotated[str, Doc("What the policy learns on, as for `obsspec rollout --tasks`.")] = (
        "generated:database,logs,permissions/easy/1000-1299"
    )
    held_out: Annotated[str, Doc("What it is evaluated on; none of `tasks`. Empty: it is not evaluated.")] = (
        "generated:database,logs,permissions/easy/0-9"
    )


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The model that is trained, and where it is sampled from."""

    policy: Annotated[
        str, Doc("`builtin`, a model's directory or hub name, or an adapter's directory; it goes on there.")
    ] = "builtin"
    full: Annotated[bool, Doc("Train all weights, rather than an adapter.")] = False
    rank: Annotated[int, Ge(1), Doc("Of a new adapter's low-rank update; one that is trained further keeps its.")] = 16
    precision: Annotated[
        Precision, Doc("Of the weights that are sampled from in this process; int8 is for Llama models.")
    ] = "int8"
    server: Annotated[
        str,
        Doc(
            "URL of a vLLM server that has the base model, started with --enable-lora and "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True (with `full`: VLLM_SERVER_DEV_MODE=1). Empty: sampled from in "
            "this process."
        ),
    ] = ""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How rollouts are collected."""

    tasks_per_step: Annotated[int, Ge(1), Doc("Tasks in each step of training.")] = 2
    group: Annotated[int, Ge(2), Doc("Rollouts of each of them, compared with one another.")] = 8
    temperature: Annotated[float, Gt(0), Le(100), Doc("Of sampling.")] = 1.0
    max_turns: Annotated[int, Ge(1), Doc("Most generations in a rollout.")] = 12
    max_tokens: Annotated[int, Ge(1), Doc("Most tokens in a generation.")] = 128
    max_context: Annotated[int, Ge(1), Doc("Most tokens in a rollout.")] = 2048
    concurrency: Annotated[int, Ge(1), Doc("Rollouts at the same time.")] = 4
    seats: Annotated[
        int | None,
        Ge(1),
        Doc(
            "Generations that the policy runs at once; in this process each takes a thread, 2 by default. Of a "
            "server: its --max-num-seqs; by default speculation gives way when requests wait there."
        ),
    ] = None
    latency: Annotated[str, Doc("Delay added to every command: seconds, or FILE.json:NAME, quantiles.")] = "0"
    ahead: Annotated[
        int,
        Ge(0),
        Doc(
            "How many steps may be collected while an earlier one is learned from. 0: each by the weights of "
            "the step before. More is faster where the two do not compete for the same machine."
        ),
    ] = 0
    attempts: Annotated[
        int, Ge(1), Doc("How often a rollout is tried that breaks. One that broke each time teaches nothing.")
    ] = 3


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Observation speculation. It changes how long steps take, and nothing else."""

    depth: Annotated[int, Ge(0), Doc("How many observations ahead; 0 is without speculation.")] = 2
    breadth: Annotated[int, Ge(1), Doc("How many drafts to try for one observation.")] = 2
    predictor: Annotated[
        str, Doc("Any of rules,memory,language_model,timeouts, or off. language_model wants a core.")
    ] = "rules,memory,timeouts"
    world_model: Annotated[
        str,
        Doc(
            "What language_model runs on, and from which co-training goes on: named like `policy`; or the URL of "
            "a vLLM server, of several `URL,URL`, which is not co-trained from here."
        ),
    ] = "builtin"
    cotrain: Annotated[
        bool, Doc("Train the world model beside the policy, on the same rollouts, in a process of its own.")
    ] = False
    publish_seconds: Annotated[float, Ge(0), Le(1e6), Doc("Between versions of the co-trained world model.")] = 60.0


@dataclass(frozen=True, slots=True)
class OptimizationSettings:
    """What becomes of the rollouts."""

    steps: Annotated[int, Ge(1), Le(100_000), Doc("Of the optimizer, each with rollouts of its own.")] = 40
    learning_rate: Annotated[float, Gt(0), Le(1), Doc("Of AdamW.")] = 5e-5
    rows: Annotated[int, Ge(1), Doc("Rollouts in one pass through the model; more want more memory.")] = 1
    threads: Annotated[
        int | None,
        Ge(1),
        Le(1024),
        Doc("For the passes, on CPUs. By default one for each core, but 1 where rollouts run here meanwhile."),
    ] = None
    seed: Annotated[int, Ge(0), Lt(2**31), Doc("Of the weights, the order of the tasks and the sampling.")] = 0
    evaluate_every: Annotated[int, Ge(0), Doc("Steps between evaluations; 0: never. They are not speculated on.")] = 10
    evaluation_samples: Annotated[int, Ge(1), Doc("Rollouts of each held-out task in an evaluation.")] = 1
    checkpoint_every: Annotated[int, Ge(1), Doc("Steps between checkpoints.")] = 5
    keep: Annotated[int, Ge(1), Doc("Checkpoints that stay.")] = 2
    report_to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        Doc(
            "Where figures go besides the two JSONL files: tensorboard, wandb or trackio, which has to be "
            "installed. The flag may be repeated."
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Of one run."""

    tasks: TaskSettings = TaskSettings()
    policy: PolicySettings = PolicySettings()
    rollouts: RolloutSettings = RolloutSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    optimization: OptimizationSettings = OptimizationSettings()
    trl: Annotated[
        dict[str, Any], Doc("Anything else that TRL's GRPOConfig has, by its name there: beta, epsilon, loss_type, ...")
    ] = field(default_factory=dict)

    @property
    def rollouts_per_step(self) -> int:
        return self.rollouts.tasks_per_step * self.rollouts.group

    def plan(self) -> Plan:
        """How a rollout runs. Raises InputError as `Plan` does."""
        from obsspec.runs import Plan

        rollouts, speculation = self.rollouts, self.speculation
        plan = Plan(
            tasks=self.tasks.tasks,
            policy=self.policy.policy,
            predictor=speculation.predictor,
            world_model=speculation.world_model,
            depth=speculation.depth,
            breadth=speculation.breadth,
            seed=self.optimization.seed,
            temperature=rollouts.temperature,
            max_turns=rollouts.max_turns,
            max_tokens=rollouts.max_tokens,
            max_context=rollouts.max_context,
            precision=self.policy.precision,
            latency=rollouts.latency,
        )
        plan.predictors()
        return plan


class Key(NamedTuple):
    """One setting."""

    section: str
    name: str
    kind: Any
    """Its type."""
    default: Any
    description: str


@cache
def keys() -> tuple[Key, ...]:
    """Every setting but those of ``[trl]``, which are TRL's."""
    found = []
    for section, settings in _SECTIONS.items():
        hints = get_type_hints(settings, include_extras=True)
        for each in dataclasses.fields(settings):
            kind, *_, described = get_args(hints[each.name])
            found.append(Key(section, each.name, kind, each.default, described.documentation))
    return tuple(found)


_SECTIONS: dict[str, Any] = {
    "tasks": TaskSettings,
    "policy": PolicySettings,
    "rollouts": RolloutSettings,
    "speculation": SpeculationSettings,
    "optimization": OptimizationSettings,
}


def read_settings(file: Path | None, flags: Mapping[str, Any]) -> TrainingSettings:
    """What ``file`` says, or the defaults, with ``flags`` (by key, None where not given) in the place of its values.

    Raises InputError that names a key or value that is wrong, and the nearest key that there is.
    """
    from pydantic import TypeAdapter, ValidationError  # A quarter of a second.

    said: dict[str, Any] = {}
    if file is not None:
        try:
            said = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}; `obsspec train --write-config {file}` writes one") from None
        except (ValueError, RecursionError) as error:  # Of Unicode and of endless numbers, too.
            raise InputError(f"{file}: is not TOML ({error}); `--write-config` writes one to begin with") from None
    source = str(file or "settings")
    sections = {key.name: key.section for key in keys()}
    _check_keys(said, [*_SECTIONS, "trl"], source, sections)
    for section, values in said.items():
        if not isinstance(values, dict):
            raise InputError(f"{source}: {section} is a section: write [{section}] and its keys below")
        if section != "trl":
            own = [key.name for key in keys() if key.section == section]
            _check_keys(values, own, f"{source}: [{section}]", sections)
    for name, value in flags.items():
        if value is not None:
            said.setdefault(sections[name], {})[name] = value
    try:
        # TOML's dates, which no setting is, become what no setting takes.
        encoded = json.dumps(said, default=lambda value: {"date": str(value)})
    except RecursionError:
        raise InputError(f"{source}: lists in lists in lists, too deep to be read; take them out") from None
    if r"\u0000" in encoded:
        raise InputError(f"{source}: a text has a zero byte in it; take it out")
    try:
        return TypeAdapter(TrainingSettings).validate_json(encoded, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise InputError(f"{source}: {first['msg']}") from None
        section, *names = map(str, first["loc"])
        value = json.dumps(first["input"], default=str)
        where = f"{source}: [{section}] {'.'.join(names)} ="
        if names and flags.get(names[0]) is not None:
            where = f"--{names[0].replace('_', '-')}"
        raise InputError(f"{where} {value:.100}: {first['msg']}") from None


def _check_keys(said: Iterable[str], known: list[str], where: str, sections: Mapping[str, str]) -> None:
    for name in said:
        if name not in known:
            if name in sections:
                raise InputError(f"{where}: {name} belongs in [{sections[name]}]; put it there")
            remedy = did_you_mean(name, [*known, *sections], f"it has {', '.join(known)}")
            raise InputError(f"{where}: there is no {name}; {remedy}")


def parse_all(settings: TrainingSettings) -> tuple[list[Task], list[Task]]:
    """The tasks to learn on and those to be evaluated on. Raises InputError for settings that cannot be carried out."""
    from obsspec.runs import is_url
    from obsspec.tasks import parse_tasks

    plan = settings.plan()
    plan.environment()
    policy = settings.policy.policy
    if not policy or is_url(policy):
        raise InputError(f"policy = {policy!r}: name the model that is trained; a server's URL is for the key server")
    if settings.policy.server and not is_url(settings.policy.server):
        raise InputError(f"server = {settings.policy.server!r}: is no URL, such as http://localhost:8000")
    tasks = parse_tasks(settings.tasks.tasks)
    held_out = parse_tasks(settings.tasks.held_out) if settings.tasks.held_out else []
    both = {task.id for task in tasks} & {task.id for task in held_out}
    if both:
        raise InputError(f"held_out: {min(both)} is one of tasks as well; evaluate on others than are learned on")
    if len(tasks) < settings.rollouts.tasks_per_step:
        raise InputError(
            f"tasks: {len(tasks)} are fewer than tasks_per_step = {settings.rollouts.tasks_per_step}; give more, "
            "or take fewer a step"
        )
    if settings.speculation.cotrain and is_url(settings.speculation.world_model):
        raise InputError(
            "cotrain: a world model on a server is trained by `obsspec world-model serve --vllm URL`; leave cotrain out"
        )
    if settings.rollouts_per_step % settings.optimization.rows:
        raise InputError(
            f"rows = {settings.optimization.rows}: does not divide the {settings.rollouts_per_step} rollouts of a "
            "step; choose one that does, such as 1"
        )
    for package in settings.optimization.report_to:
        if find_spec(package) is None:
            raise InputError(f"report_to: {package} is not installed; pip install {package}, or leave it out")
    return tasks, held_out


def config_text(settings: TrainingSettings) -> str:
    """The settings as a TOML file with a comment on every key."""
    import tomli_w

    lines = ["# What `obsspec train` is to do. Every key is also a flag: --learning-rate 5e-5.", ""]
    for section, kind in _SECTIONS.items():
        lines += [f"[{section}]", *_comment(kind.__doc__)]
        for key in keys():
            if key.section == section:
                value = getattr(getattr(settings, section), key.name)
                lines += ["", *_comment(key.description)]
                lines.append(f"# {key.name} = ..." if value is None else tomli_w.dumps({key.name: value}).rstrip())
        lines.append("")
    (trl,) = get_type_hints(TrainingSettings, include_extras=True)["trl"].__metadata__
    lines += [*_comment(trl.documentation), tomli_w.dumps({"trl": settings.trl})]
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in wrap(text, _WIDTH)]
