"""The command line. Each command here parses, calls the library, and prints; errors of the user are one line."""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import anyio
import typer
from rich.console import Console, ConsoleRenderable
from rich.table import Table
from typer.exceptions import TyperException

from obsspec.errors import InputError, host_and_port, writing
from obsspec.policies import Precision
from obsspec.signals import held_back

app = typer.Typer(
    name="obsspec",
    help="Observation speculation: faster rollouts for tool-using agents, with nothing changed in what is learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class _Standard(Console):
    def on_broken_pipe(self) -> None:
        """Says so like any other failure to write; the library's own way is to exit with 1, which means something."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


# What is printed is names and figures, which may look like markup.
output = _Standard(markup=False, emoji=False, highlight=False)
notes = Console(stderr=True, markup=False, emoji=False, highlight=False)

_BAD_INPUT, _INTERRUPTED, _TERMINATED = 2, 130, 143
_LARGEST_SEED = 2**63 - 1
_LOCAL = ("torch", "transformers", "tokenizers", "peft", "safetensors", "gguf", "accelerate", "huggingface_hub")
_EXTRAS = {
    **dict.fromkeys(_LOCAL, ("models in this process need", "local")),
    **dict.fromkeys(("trio", "pyarrow", "plotly"), ("the lab and analyses need", "lab")),
    "ray": ("rollouts on Ray need", "ray"),
    "aiohttp": ("a model on a server needs", "server"),
    "orjson": ("a model on a server needs", "server"),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client"), ("co-training needs", "training")),
}
"""By package: what needs it, and the extra that brings it."""


class Interruption(Exception):  # noqa: N818 -- nothing went wrong
    """Ctrl-C, with what became of the work."""


def _show_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("obsspec"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


_PREDICTOR = "Any of `rules,memory,language_model,timeouts`, or `off`. The language model wants a core of its own."
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON, for machines.")]
Threads = Annotated[int, typer.Option(min=1, max=1024, help="Threads for training.")]
Rank = Annotated[int, typer.Option(min=1, help="Of the low-rank update of every linear layer.")]


def _above_zero(value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"must be more than 0, not {value}")
    return value


@app.command()
def rollout(
    tasks: Annotated[
        str,
        typer.Option(
            help="`generated:FAMILIES/LEVELS/SEEDS`, such as `generated:all/easy/0-9` or "
            "`generated:logs,text/easy,medium/100-104`; or a Harbor / Terminal-Bench 2 task directory, or one full of "
            "them."
        ),
    ],
    directory: Annotated[Path, typer.Option("--output", help="Directory for what comes out.")],
    policy: Annotated[
        str,
        typer.Option(
            help="`builtin`, a model's directory or hub name, or an adapter's directory; or the URL of a vLLM server, "
            "such as `http://localhost:8000`. (SGLang servers are for the library: `obsspec.policies.sglang`.)"
        ),
    ] = "builtin",
    model: Annotated[
        str | None,
        typer.Option(help="Which of a server's models or LoRA adapters; by default the first that it lists."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory or hub name of a served model's tokenizer; by default what the server says."),
    ] = None,
    predictor: Annotated[str, typer.Option(help=_PREDICTOR)] = "rules,memory,timeouts",
    world_model: Annotated[
        str,
        typer.Option(
            help="What `language_model` runs on; named like the policy. On a vLLM server it is the newest of "
            "`world-model-v1`, `world-model-v2`, ..., also while rollouts go on; where there are none, the first "
            "model. On several servers: `URL,URL`."
        ),
    ] = "builtin",
    world_model_name: Annotated[
        str | None,
        typer.Option(help="Which of a server's models or LoRA adapters; `NAME-v1`, ... are versions of it."),
    ] = None,
    depth: Annotated[int, typer.Option(min=0, help="How many observations ahead to speculate; 0 is sequential.")] = 1,
    breadth: Annotated[int, typer.Option(min=1, help="How many drafts to try for one observation.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=_LARGEST_SEED, help="Seed of each task's first rollout.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each task, with consecutive seeds.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    max_turns: Annotated[int, typer.Option(min=1, help="Most generations in a rollout.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a generation.")] = 128,
    max_context: Annotated[int, typer.Option(min=1, help="Most tokens in a rollout.")] = 4096,
    precision: Annotated[
        Precision, typer.Option(help="Of weights in this process, not of a server's; int8 is for Llama models.")
    ] = "int8",
    latency: Annotated[
        str,
        typer.Option(help="Delay added to every command, and reported: seconds, or `FILE.json:NAME`, quantiles."),
    ] = "0",
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at the same time.")] = 2,
    seats: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Generations that the policy runs at once. In this process each takes a thread; 1 by default. Of a "
            "server: its `--max-num-seqs`; by default speculation gives way when requests wait there.",
        ),
    ] = None,
    gate: Annotated[
        Path | None,
        typer.Option(help="JSON file to keep what is learned of tools and drafts, for later runs to begin with."),
    ] = None,
    transitions: Annotated[
        str | None,
        typer.Option(
            help="SQLite file to which every executed command and its observation are added as they happen, for world "
            "models to learn from; several runs may share it. Or the URL of an `obsspec world-model serve --listen`."
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Run them on a Ray cluster: `local` is one on this machine for this run, `auto` the one that this "
            "machine is part of, or HOST:PORT of one. Needs `obsspec[ray]` on all its machines."
        ),
    ] = None,
    actors: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --ray: how many processes, each with --concurrency rollouts, and with its own models where they "
            "are on no server; 2 by default.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the interrupted run in --output.")] = False,
    as_json: Json = False,
) -> None:
    """Run a policy on terminal tasks in the sandbox, and write the trajectories as JSONL.

    A crash or Ctrl-C loses at most the rollouts in flight: the same command with --resume goes on.
    """
    from obsspec.reports.records import read_settings, read_trajectories
    from obsspec.reports.summary import summarize
    from obsspec.reports.tables import families_table, summary_table
    from obsspec.runs import Means, Plan, run

    means = Means(concurrency, seats, gate, transitions, ray, actors)
    plan = Plan(
        tasks=tasks,
        policy=policy,
        model=model,
        tokenizer=tokenizer,
        predictor=predictor,
        world_model=world_model,
        world_model_name=world_model_name,
        depth=depth,
        breadth=breadth,
        seed=seed,
        samples=samples,
        temperature=temperature,
        max_turns=max_turns,
        max_tokens=max_tokens,
        max_context=max_context,
        precision=precision,
        latency=latency,
    )
    if resume:
        read_settings(directory)  # A name that is mistyped begins no run.
    with _interruptible(f"the rollouts that had ended are in {directory}; the same command with --resume goes on"):
        broken = run(plan, directory, resume, means, notes)
    summary = summarize(read_trajectories(directory))
    if as_json:
        _print_json(asdict(summary) | {"broken": len(broken), "latency": latency})
    else:
        _print(summary_table(summary, title=str(directory)), families_table({"solved": summary}), *_delays(latency))
    if broken:
        raise InputError(
            f"{len(broken)} rollouts broke, as {directory / 'failures.jsonl'} says, and --resume tries them again; "
            f"{broken[0].task} seed {broken[0].seed}: {broken[0].error}"
        )


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A directory of `obsspec rollout`, or a training's `rollouts`.")],
    second: Annotated[Path, typer.Argument(help="Another one, of the same tasks and seeds.")],
    as_json: Json = False,
) -> None:
    """Say whether two runs that differ in their speculation alone produced the same trajectories, token for token, and
    how long their agents took.

    Exit code 1 if a policy wrote other tokens after the same ones. Rollouts whose environment itself answered the same
    command differently are counted apart, by name.
    """
    from obsspec.reports.comparison import check_comparable
    from obsspec.reports.comparison import compare as compare_runs
    from obsspec.reports.records import read_settings, read_trajectories
    from obsspec.reports.tables import comparison_table

    lines = read_trajectories(first), read_trajectories(second)
    settings = read_settings(first)
    check_comparable(settings, read_settings(second))
    comparison = compare_runs(*lines)
    if as_json:
        _print_json(asdict(comparison))
    else:
        left_out = len(comparison.environment)
        _print(
            comparison_table(comparison, str(first), str(second)),
            *_delays(settings.get("latency")),
            *([f"left out, the environment itself answered differently: {left_out}"] if left_out else []),
            f"trajectories identical: {comparison.identical} of {comparison.compared}",
        )
    if comparison.different:
        raise typer.Exit(1)


@app.command()
def warmstart(
    role: Annotated[Literal["policy", "world_model"], typer.Argument(help="What the adapter makes of the model.")],
    tasks: Annotated[
        list[str], typer.Option(help="Generated tasks whose experts are watched, as for `obsspec rollout`; repeatable.")
    ] = ["generated:all/easy,medium/1000-1036", "generated:all/hard/1000-1011"],  # noqa: B006
    runs: Annotated[
        Path, typer.Option(help="Where the expert runs are kept; those that are there already are not run again.")
    ] = Path("expert-runs.jsonl"),
    directory: Annotated[Path, typer.Option("--output", help="Directory for the adapter.")] = Path("adapter"),
    base: Annotated[str, typer.Option(help="The model that it is for; the package's own if not given.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to train on.")] = 300_000,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, callback=_above_zero, help="At its highest.")
    ] = 5e-4,
    rank: Rank = 16,
    seed: Annotated[
        int, typer.Option(min=0, max=_LARGEST_SEED, help="Of the initial weights and the order of the runs.")
    ] = 0,
    threads: Threads = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Experts at the same time.")] = 4,
) -> None:
    """Train a small policy or a world model: an adapter, on what experts do on generated tasks in the sandbox.

    The built-in policy was made with these defaults, and the built-in world model begun. It goes on where it was
    interrupted.
    """
    from obsspec.environments.sandbox import open_sandbox
    from obsspec.reports.tables import counting
    from obsspec.tasks import parse_instances

    instances = [instance for text in tasks for instance in parse_instances(text)]
    with _interruptible("the same command goes on, from the last checkpoint where there is one"):
        with notes.status("loading PyTorch"), held_back():
            import torch

            from obsspec.models import DEFAULT_MODEL
            from obsspec.training.finetune import Recipe
            from obsspec.training.trajectories import collect, read_runs
            from obsspec.training.warmstart import warmstart as train

        recipe = Recipe(tokens=tokens, learning_rate=learning_rate, rank=rank, seed=seed)
        with counting(notes, "experts", len(instances)) as advance:
            unsolved = anyio.run(collect, instances, runs, open_sandbox, concurrency, advance)
        for name in unsolved:
            notes.print(f"its expert does not solve {name}, which is left out")
        wanted = {instance.task.id for instance in instances}
        torch.set_num_threads(threads)
        learned = [run for run in read_runs(runs) if run.task in wanted]
        train(role, learned, directory, recipe, base or DEFAULT_MODEL, notes)
    _print(f"the adapter is in {directory}")


@app.command()
def demo(
    repeats: Annotated[int, typer.Option(min=1, help="How often every rollout is run both ways, interleaved.")] = 2,
    depth: Annotated[int, typer.Option(min=1, help="How many observations ahead to speculate.")] = 2,
    predictor: Annotated[str, typer.Option(help=_PREDICTOR)] = "rules,memory,timeouts",
    seats: Annotated[int, typer.Option(min=1, help="Generations that the policy runs at once, a thread each.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Run the built-in policy on terminal tasks with speculation off and on: what it hid, and that nothing changed."""
    from obsspec.demo import PLAN, print_demo, run_demo

    if json_file is not None:
        with writing(f"--json {json_file}", "file"):
            json_file.open("a").close()
    figures = run_demo(replace(PLAN, depth=depth, predictor=predictor), repeats, seats, notes)
    with _stdout():
        print_demo(figures, output)
    if json_file is not None:
        with writing(f"--json {json_file}", "file"):
            json_file.write_text(json.dumps(asdict(figures), indent=2) + "\n")
    if figures.different:
        raise typer.Exit(1)


def train(
    config: Annotated[
        Path | None, typer.Argument(help="Settings, as `--write-config` writes them; the defaults if not given.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--output", help="Directory for all that comes out, and to go on from.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the training in --output.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would do, need and write; do nothing.")
    ] = False,
    write_config: Annotated[
        Path | None,
        typer.Option(
            "--write-config", help="Write the settings, with a comment on each, to this file; do nothing else."
        ),
    ] = None,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """Train a policy by GRPO on terminal tasks in the sandbox: TRL learns, and rollouts are collected with speculation.

    Every setting is in CONFIG and also a flag. The first Ctrl-C ends it after the step under way, with a checkpoint,
    the second one at once; after either, or after a crash, the same command with --resume goes on.
    """
    from obsspec.reports.training import outlook, read_records, training_table
    from obsspec.training.settings import config_text, parse_all, read_settings

    settings = read_settings(config, flags)
    if write_config is not None:
        with writing(f"--write-config {write_config}", "file"), write_config.open("x") as file:
            file.write(config_text(settings))
        _print(f"the settings are in {write_config}: obsspec train {write_config} --output runs/training")
        return
    if dry_run:
        tasks, held_out = parse_all(settings)
        if settings.trl and find_spec("trl") is not None:
            with notes.status("loading TRL"), held_back():
                from obsspec.training.policy import trl_config
            trl_config(settings, directory or Path())
        rows = outlook(settings, len(tasks), len(held_out))
        if as_json:
            _print_json(rows)
        else:
            table = Table(show_header=False, title="What this training would do", title_justify="left")
            for row in rows.items():
                table.add_row(*row)
            _print(table)
        return
    if directory is None:
        raise InputError("--output: say where what comes out is to go, such as --output runs/training")
    parse_all(settings)  # What is wrong is said before PyTorch is loaded.
    if find_spec("trl") is None or find_spec("datasets") is None:
        raise InputError("training a policy needs TRL: pip install 'obsspec[rl]'")
    with _interruptible(f"what was learned is in {directory}; the same command with --resume goes on"):
        with notes.status("loading PyTorch"), held_back():
            from obsspec.training.policy import train as train_policy

        train_policy(settings, directory, resume, notes)
    steps, evaluations = (read_records(directory / f"{name}.jsonl") for name in ("steps", "evaluations"))
    if as_json:
        _print_json({"steps": steps, "evaluations": evaluations})
    else:
        _print(training_table(steps, evaluations), f"the policy: obsspec rollout --policy {directory / 'policy'} ...")


def _with_settings_as_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag for each setting of a training in the place of its ``**flags``."""
    from obsspec.training.settings import keys

    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    parameters = [
        each.replace(annotation=hints[each.name])
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for key in keys():
        default = "" if key.default in (None, "", ()) else f" Default: {key.default}."
        option = typer.Option(help=f"{key.description}{default}", rich_help_panel=key.section, show_default=False)
        kind = list[str] if key.name == "report_to" else key.kind
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


app.command()(_with_settings_as_flags(train))

world_model_app = typer.Typer(
    help="Train world models on what rollouts did, score them, and train one while rollouts run.",
    no_args_is_help=True,
)
app.add_typer(world_model_app, name="world-model")

Data = Annotated[
    list[Path],
    typer.Argument(
        help="Stores that `--transitions` wrote, expert runs that `obsspec warmstart` kept, or logs of agents, as for "
        "`obsspec analyze`."
    ),
]
From = Annotated[
    str,
    typer.Option(
        "--world-model",
        help="`builtin`, a model's directory or hub name, an adapter's directory, or a co-training's `--output`.",
    ),
]
HoldOut = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Share of the tasks that is left out of training and can be scored on."),
]
Weights = Annotated[
    Literal["uniform", "seconds"],
    typer.Option(
        "--weights", help="Whether every observation counts alike, or by how long its command took, up to 2 s."
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Train all weights, rather than an adapter.")]
TrainingPrecision = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the products in training.")]


@world_model_app.command("train")
def world_model_train(
    data: Data,
    directory: Annotated[Path, typer.Option("--output", help="Directory for the adapter, or the model.")],
    world_model: From = "builtin",
    hold_out: HoldOut = 0.1,
    weights: Weights = "uniform",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to train on.")] = 300_000,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, callback=_above_zero, help="At its highest.")
    ] = 2e-4,
    rows_per_step: Annotated[int, typer.Option(min=1, help="Rollouts in a step of the optimizer.")] = 4,
    rank: Rank = 16,
    full: Full = False,
    precision: TrainingPrecision = "float32",
    seed: Annotated[int, typer.Option(min=0, max=_LARGEST_SEED)] = 0,
    threads: Threads = 1,
) -> None:
    """Train a world model on what rollouts did, from a model or from another world model on.

    It goes on where it was interrupted. On several GPUs: `accelerate launch -m obsspec world-model train ...`.
    """
    with _interruptible("the same command goes on, from the last checkpoint where there is one"):
        with notes.status("loading PyTorch"), held_back():
            import torch

            from obsspec.loading import training_start
            from obsspec.training.finetune import Recipe, load_trainable
            from obsspec.training.world_model import held_out, read_rollouts, train

        torch.set_num_threads(threads)
        recipe = Recipe(tokens, rows_per_step, learning_rate, None if full else rank, precision=precision, seed=seed)
        rollouts = [each for each in read_rollouts(data, notes) if not held_out(each.task, hold_out)]
        if not rollouts:
            raise InputError(f"--hold-out {hold_out}: leaves no task to train on; lower it")
        base, adapter = training_start(world_model, directory)
        train(rollouts, load_trainable(base, recipe, adapter), directory, recipe, weights, notes)
    _print(f"the world model is in {directory}; score it: obsspec world-model evaluate --world-model {directory}")


@world_model_app.command("evaluate")
def world_model_evaluate(
    data: Data,
    world_model: From = "builtin",
    hold_out: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Score on the tasks alone that `train --hold-out` left out; 1 is all.",
        ),
    ] = 1.0,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Score a world model on what rollouts did: which observations it foretells exactly, after the true history."""
    from obsspec.reports.tables import counting

    with _interruptible("nothing was written"):
        with notes.status("loading PyTorch"), held_back():
            import torch

            from obsspec.loading import base_and_adapter
            from obsspec.models import load_model
            from obsspec.training.world_model import evaluate, held_out, read_rollouts, tallies_table, together

        torch.set_num_threads(threads)
        rollouts = [each for each in read_rollouts(data, notes) if held_out(each.task, hold_out)]
        if not rollouts:
            raise InputError(f"--hold-out {hold_out}: leaves no task to score on; raise it")
        model, tokenizer = load_model(*base_and_adapter(world_model, "world_model"))
        with counting(notes, "rollouts", len(rollouts)) as advance:
            tallies = evaluate(rollouts, model, tokenizer, advance)
    if as_json:
        figures = {name: asdict(tally) for name, tally in tallies.items()}
        _print_json({"world_model": world_model, "all": asdict(together(tallies.values())), "kinds": figures})
    else:
        _print(tallies_table(tallies, title=f"Foretold exactly by {world_model}, {len(rollouts)} rollouts"))


@world_model_app.command("serve")
def world_model_serve(
    store: Annotated[
        Path, typer.Argument(help="The store that rollouts write to with `--transitions`; made where there is none.")
    ],
    directory: Annotated[
        Path,
        typer.Option(
            "--output", help="Directory for its versions: give it to rollouts as `--world-model`, and they follow."
        ),
    ],
    world_model: From = "builtin",
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT at which to take transitions from other machines (`obsspec rollout --transitions "
            "http://HOST:PORT`), and to say how it goes (`/status`, `/metrics` for Prometheus)."
        ),
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(
            help="URL of a vLLM server to load every version on: the next as `world-model-v2`. On several, `URL,URL`, "
            "it is loaded on one after the other."
        ),
    ] = None,
    sglang: Annotated[str | None, typer.Option(help="The same of an SGLang server.")] = None,
    publish_seconds: Annotated[float, typer.Option(min=0.0, help="Between two versions, at least.")] = 120.0,
    passes: Annotated[float, typer.Option(min=0.0, help="How often a transition is trained on, on average.")] = 4.0,
    replay: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of what is trained on that is drawn from all there is."),
    ] = 0.5,
    weights: Weights = "uniform",
    learning_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, callback=_above_zero, help="It does not fall.")
    ] = 2e-4,
    rows_per_step: Annotated[int, typer.Option(min=1, help="Rollouts in a step of the optimizer.")] = 4,
    rank: Rank = 16,
    full: Full = False,
    precision: TrainingPrecision = "float32",
    threads: Threads = 1,
) -> None:
    """Train a world model on transitions as they come, and publish versions of it, until Ctrl-C.

    What is new is foretold before it is trained on, and that is the exact-match rate it reports. Weights that foretell
    less than those that were published last are never published. The same command goes on where one ended.
    """
    # What is wrong is said before PyTorch is loaded, and anything written.
    from obsspec.runs import server_urls

    on_vllm = () if vllm is None else server_urls("--vllm", vllm)
    on_sglang = () if sglang is None else server_urls("--sglang", sglang)
    if listen is not None:
        try:
            host_and_port(listen)
        except ValueError as error:
            raise InputError(f"--listen {listen}: {error}; give HOST:PORT, such as 127.0.0.1:8100") from None
    with _interruptible(f"the same command goes on; its versions are in {directory}"):
        with notes.status("loading PyTorch"), held_back():
            import torch

            from obsspec.loading import training_start
            from obsspec.training.cotraining import Pace
            from obsspec.training.finetune import Recipe
            from obsspec.training.service import Service, serve

        torch.set_num_threads(threads)
        recipe = Recipe(
            rows_per_step=rows_per_step,
            learning_rate=learning_rate,
            rank=None if full else rank,
            precision=precision,
        )
        base, adapter = training_start(world_model, directory)
        service = Service(store, directory, publish_seconds, listen, on_vllm, on_sglang)
        serve(service, base, adapter, recipe, Pace(passes=passes, replay=replay, weighting=weights), notes)


lab = typer.Typer(
    help="What speculation would do on a workload: the engine in virtual time, between simulated parts.",
    no_args_is_help=True,
)
app.add_typer(lab, name="lab")


@app.command()
def analyze(
    logs: Annotated[
        list[Path],
        typer.Argument(
            help="Files, gzipped or not, or directories of them: mini-swe-agent and SWE-agent trajectories, Harbor job "
            "folders (ATIF), messages of OpenAI's and Anthropic's interfaces, sessions of Codex and Claude Code, what "
            "`obsspec rollout` wrote, or JSON lines with `command`, `output` and, where known, `task`, `rollout`, "
            "`exit_code`, `seconds` and `generation_seconds`. What each is is told by its content."
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option("--output", help="Directory for `analysis.html`, `analysis.json` and `steps.parquet`."),
    ] = None,
    times: Annotated[
        str,
        typer.Option(
            help="The lab's workload (`obsspec lab list`) whose times stand for those that a log does not tell."
        ),
    ] = "local-exec",
    as_json: Json = False,
) -> None:
    """Tell from logs of your agents what ObsSpec would save them, and why not more.

    Every step is predicted from those before it, in the logs' order, and then learned from. The lab runs the rollouts
    with these predictions and with the logs' times.
    """
    from obsspec.analysis.formats import read_log
    from obsspec.analysis.prediction import predict, predictors
    from obsspec.analysis.report import Analysis, check_writable, figures, tables, write
    from obsspec.analysis.savings import POINTS, Source, simulate
    from obsspec.analysis.savings import times as times_of
    from obsspec.reports.tables import counting

    source = Source.of(times)
    if directory is not None:
        check_writable(directory)  # Better known before the work.
    with _interruptible("nothing was written"):
        log = read_log(*logs)
        asked = predictors(log)
        with counting(notes, "predictions", len(asked) * log.steps) as advance:
            predictions = {name: predict(log, predictor, advance) for name, predictor in asked.items()}
        measured = times_of(log, source)
        with counting(notes, "simulations", len(POINTS)) as advance:
            savings = simulate(log, measured, predictions["rules + memory"], advance)
    analysis = Analysis(log, measured, source.name, predictions, savings)
    if directory is not None:
        write(analysis, directory)
    if as_json:
        _print_json(figures(analysis))
    else:
        output.width = max(output.width, 120)
        _print(*tables(analysis))


@lab.command("run")
def lab_run(
    config: Annotated[str, typer.Argument(help="A TOML file, or a shipped workload by its name.")],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="Directory for `points.parquet`, `points.html`, a plot, and `points.jsonl`, by which a grid that was "
            "interrupted goes on.",
        ),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Cores to use; all if not given.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate every point of a workload's grid; without a grid, the workload under every schedule."""
    from obsspec.lab.report import points_table, rows, write
    from obsspec.lab.run import grid, recorded, run
    from obsspec.reports.tables import counting

    points = grid(config)
    outcome = "nothing was written: give --output to go on from where it stopped"
    if directory is not None:
        outcome = f"the points so far are in {directory / 'points.jsonl'}; the same command goes on"
    with (
        _interruptible(outcome),
        recorded(directory) as (known, keep),
        counting(notes, "points", len(points)) as advance,
    ):
        figures = run(points, advance, processes, known, keep)
    results = rows(points, figures)
    if directory is not None:
        write(results, directory, config)
    if as_json:
        _print_json({"config": config, "points": results})
    else:
        output.width = max(output.width, 120)  # A narrow terminal wraps lines; it must not cut figures short.
        _print(points_table(results, config))


@lab.command("list")
def lab_list(as_json: Json = False) -> None:
    """The workloads that come with the package, and the schedules under which they can be run."""
    from obsspec.lab.report import names_tables
    from obsspec.lab.schedules import SCHEDULES
    from obsspec.lab.workload import names

    if as_json:
        _print_json({"workloads": names(), "schedules": {name: each.what for name, each in SCHEDULES.items()}})
    else:
        _print(names_tables())


def _delays(latency: Any) -> list[str]:
    """What there is to say of delays that were added to every command."""
    none = latency in (None, "0")
    return [] if none else [f"Every command was delayed, as by a remote sandbox: {latency}."]


def _print(*what: ConsoleRenderable | str) -> None:
    with _stdout():
        for each in what:
            output.print(each, soft_wrap=isinstance(each, str))


def _print_json(figures: dict[str, Any]) -> None:
    with _stdout():
        print(json.dumps(figures, indent=2))


@contextmanager
def _stdout() -> Iterator[None]:
    """Raises InputError where standard output takes nothing more."""
    try:
        yield
        if sys.stdout is not None:  # It is where the caller closed it.
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Else Python complains once more when it ends.
        raise InputError(f"standard output: {error.strerror}; give it a place that can be written") from None


@contextmanager
def _interruptible(outcome: str) -> Iterator[None]:
    """For work that Ctrl-C ends: says what becomes of it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interruption(outcome) from None


def main() -> None:
    """Entry point. Exit codes: 0, 1 (trajectories differ), 2 (bad input), 130 (Ctrl-C), 143 (SIGTERM)."""
    stop_requested = _watch_for_signals()
    # Scripts start what runs in the background with Ctrl-C ignored; then being told to end would do nothing either.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # It cleans up as Ctrl-C does.
    try:
        _check_none_is_empty(sys.argv[1:])
        code = app(standalone_mode=False)
        interruption = "" if code == _INTERRUPTED else None  # Typer returns it for a KeyboardInterrupt.
    except Interruption as error:
        interruption = f"; {error}"
    except Exception as error:
        # Some libraries, interrupted while they are imported, try otherwise and then fail for another reason.
        interruption = "" if stop_requested() else None
        if interruption is None:
            code = _explain(error)
    if interruption is not None:
        print(f"obsspec: interrupted{interruption}", file=sys.stderr)
        code = _TERMINATED if signal.SIGTERM in stop_requested() else _INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _check_none_is_empty(arguments: list[str]) -> None:
    """Raises InputError where one is, as is a variable of a shell that was never set. Read as a path it would be the
    current directory."""
    before = "an argument"
    for argument in arguments:
        option, has_value, value = argument.partition("=")
        if not argument.strip() or (option.startswith("--") and has_value and not value.strip()):
            raise InputError(f"{option.strip() or before}: is empty; give a value, or leave it out")
        before = argument if argument.startswith("-") else "an argument"


def _watch_for_signals() -> Callable[[], set[int]]:
    """A function that tells which signals have come. It changes nothing in how they are handled."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    received: set[int] = set()

    def so_far() -> set[int]:
        with suppress(BlockingIOError):
            received.update(os.read(reading, 4096))
        return received & {signal.SIGINT, signal.SIGTERM}

    return so_far


def _explain(error: Exception) -> int:
    """One line on what went wrong, where it is not our fault. Raises it again where it is."""
    match error:
        case InputError():
            return _complain(str(error))
        case TyperException():  # Without a message it has shown the help.
            message = error.format_message()
            return _complain(f"{message} (--help explains)") if message else _BAD_INPUT
        case ImportError() if (package := _package(error)) in _EXTRAS:
            what, extra = _EXTRAS[package]
            return _complain(f"{what} {package}: pip install 'obsspec[{extra}]'")
        case OSError():  # Of the machine rather than of an option: no room, no descriptors, a name too long.
            return _complain(f"{error.filename or 'this machine'}: {error.strerror or error}")
    raise error


def _package(error: ImportError) -> str:
    """What is not installed, also where it is asked for by a module in it."""
    return (error.name or "").partition(".")[0]


def _complain(message: str) -> int:
    print(f"obsspec: {' '.join(message.split())}", file=sys.stderr)
    return _BAD_INPUT
