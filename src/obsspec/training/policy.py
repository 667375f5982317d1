"""Training a policy on its own rollouts: TRL's GRPO learns, ObsSpec collects.

A step, in the order in which it happens:

    collect     the rollouts of a few tasks, a group of each, with speculation
    learn       TRL turns their rewards into advantages and takes one step of its optimizer
    publish     the new weights, as a version in ``policy/``, and to where the policy is sampled from

Token ids, log-probabilities and the mask of what the policy wrote go to TRL as they were sampled. Its probability ratio
is to the distribution that was sampled from, so what eight-bit weights or a server's numerics change is accounted for.

A run's directory:

    settings.toml                           what was asked for
    steps.jsonl evaluations.jsonl           what came of it (`reports.training`)
    rollouts/                               every rollout, as `obsspec rollout` writes them
    policy/ world-model/                    versions of both models: give them to ``--policy`` and ``--world-model``
    transitions.sqlite                      what the world model learns from
    checkpoints/                            what a resumed run goes on from
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, get_type_hints

import torch
from datasets import Dataset
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from safetensors import SafetensorError
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from obsspec.errors import InputError, did_you_mean, writing
from obsspec.gate import ExpectedValue
from obsspec.hub import quiet
from obsspec.loading import base_and_adapter
from obsspec.reports.records import RunDirectory, TrajectoryLine, check_same, line_of, open_run
from obsspec.reports.training import (
    Display,
    EvaluationRecord,
    Journal,
    RolloutFigures,
    StepRecord,
    evaluation_steps,
    rollout_figures,
)
from obsspec.rollout import Failure
from obsspec.training.beside import CoTrainer
from obsspec.training.collection import Jobs
from obsspec.training.finetune import Recipe, Trainable, load_trainable
from obsspec.training.sampled import SampledPolicy
from obsspec.training.settings import TrainingSettings, config_text, parse_all, read_settings
from obsspec.training.transitions import Transitions, recorded
from obsspec.training.versions import only_process, publishing_alone, sync_all
from obsspec.types import Task, Trajectory

_CHECKPOINT = "checkpoint-"
_COMPLETE = "complete"
"""A file that a checkpoint has once it is whole."""
_MOST_REMEMBERED = 100_000
"""Transitions that predictors are told again where a run goes on."""
_MOST_SKIPPED = 3
"""Steps in a row whose gradients are no numbers."""
_SEEDS = 1_000_000_000
"""So many rollouts have seeds of their own for each seed of a run."""
_RELIED_ON = (
    "use_vllm",
    "steps_per_generation",
    "generation_batch_size",
    "eval_strategy",
    "eval_on_start",
    "num_train_epochs",
    "num_iterations",
    "reward_weights",
    "logging_strategy",
    "ignore_data_skip",
    "save_only_model",
)
"""Of TRL's settings, those that have to stay as they are."""
_NAMES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
}
"""What these may be, where they are text: TRL says so only after the rollouts of a step."""


def train(settings: TrainingSettings, output: Path, resume: bool, notes: Console) -> None:
    """Trains in the directory ``output``, or goes on there.

    A first Ctrl-C ends it after the step under way, with a checkpoint; a second one at once, and then, as after a kill,
    ``resume`` goes on from the last checkpoint. Raises InputError where it cannot go on; the checkpoints stay.
    """
    tasks, held_out = parse_all(settings)
    config = trl_config(settings, output)
    with ExitStack() as stack:
        stack.enter_context(only_process(output))
        stack.enter_context(publishing_alone(output / "policy"))
        _check_resumable(output, settings, resume)
        with notes.status("loading the policy"), quiet():
            rank = None if settings.policy.full else settings.policy.rank
            base, adapter = base_and_adapter(settings.policy.policy, "policy")
            trainable = load_trainable(base, Recipe(rank=rank, seed=settings.optimization.seed), adapter)
        store = output / "transitions.sqlite"
        transitions = stack.enter_context(Transitions.open(store))
        rollouts = stack.enter_context(open_run(output / "rollouts", _decisive(settings), resume=True))
        cotrainer = _cotrainer(settings, output, store, stack)
        last = newest_checkpoint(output)
        gate = ExpectedValue.load(last / "gate.json") if last else ExpectedValue()
        with notes.status("loading what is sampled from"), quiet():
            sampled = stack.enter_context(SampledPolicy.open(settings, output, trainable, cotrainer, gate))
        # Now that all is there: a start that failed takes no directory.
        with writing(output, "directory"):
            (output / "settings.new").write_text(config_text(settings))
            (output / "settings.new").replace(output / "settings.toml")
        sampled.collection.remember(transitions.after(max(0, transitions.latest_id() - _MOST_REMEMBERED)))
        journal = Journal(output, _step_of(last) if last else 0)
        run = _Run(settings, tasks, held_out, sampled, rollouts, transitions, cotrainer, gate, journal, notes)
        loop = _Loop(run)
        stack.enter_context(loop.display.shown())
        stack.enter_context(loop.ending())
        stack.enter_context(quiet())
        trainer = _trainer(config, trainable, loop, _trackers(settings.optimization.report_to, output))
        trainer.train(resume_from_checkpoint=str(last) if last else None)


def _cotrainer(settings: TrainingSettings, output: Path, store: Path, stack: ExitStack) -> CoTrainer | None:
    if not settings.speculation.cotrain:
        return None
    directory, seconds = output / "world-model", settings.speculation.publish_seconds
    return stack.enter_context(CoTrainer.start(store, settings.speculation.world_model, directory, seconds))


@dataclass(frozen=True, slots=True)
class _Run:
    """What a training has open."""

    settings: TrainingSettings
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    sampled: SampledPolicy
    rollouts: RunDirectory
    transitions: Transitions
    cotrainer: CoTrainer | None
    gate: ExpectedValue
    journal: Journal
    notes: Console


class _Loop(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """What happens around TRL's steps."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.display = Display(run.notes, run.settings.optimization.steps)
        self.stream = task_stream(run.tasks, run.settings)
        """The tasks of all steps."""
        self._environment = run.settings.plan().environment()
        self._figures: RolloutFigures | None = None
        self._began = 0.0
        self._waited = 0.0
        self._ended = 0.0
        self._publish_seconds = 0.0
        self._learning = ExitStack()
        """Shows that it is under way."""
        self._skipped = 0
        """Steps in a row, the latest included."""
        self._ending = False

    # Collecting.

    def collect(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's ``rollout_func``. A prompt is a task's id: what the policy reads is the chat's affair."""
        began, step = time.monotonic(), trainer.state.global_step
        collection, last = self.run.sampled.collection, self.run.settings.optimization.steps - 1
        results, self._figures = collection.take(step, last, self._step)
        self._waited = time.monotonic() - began
        assert [result.task for result in results] == list(prompts)
        for result in results:
            if (result.task, result.seed) not in self.run.rollouts.done:  # A resumed run does them again.
                self.run.rollouts.write(result)
        self._learning.enter_context(self.display.phase(f"step {step + 1}: learning"))
        # Rollouts in this process have set it to one, which some of PyTorch's libraries take for all threads.
        torch.set_num_threads(_threads(self.run.settings))
        rows = [_row(result, self.run.sampled.trainable.tokenizer.eos_token_id) for result in results]
        return {name: [row[name] for row in rows] for name in rows[0]}

    async def _step(self, step: int) -> tuple[list[TrajectoryLine | Failure], RolloutFigures]:
        """The rollouts of a step, from 0."""
        settings = self.run.settings
        each, group = settings.rollouts.tasks_per_step, settings.rollouts.group
        tasks = [task for task in self.stream[step * each : (step + 1) * each] for _ in range(group)]
        first = settings.optimization.seed * _SEEDS + step * len(tasks)
        jobs = [(task, first + place) for place, task in enumerate(tasks)]
        return await self._rollouts(f"step {step + 1}: rollouts", jobs, speculating=True)

    async def _rollouts(
        self, what: str, jobs: Jobs, speculating: bool
    ) -> tuple[list[TrajectoryLine | Failure], RolloutFigures]:
        """Of every job, those that break tried again. Raises InputError where all of them break."""
        rollouts, sampled = self.run.settings.rollouts, self.run.sampled
        # What held-out tasks print teaches no world model.
        environment = recorded(self._environment, self.run.transitions) if speculating else self._environment
        results: dict[int, Trajectory | Failure] = {}
        began = time.monotonic()
        with self.display.phase(what, len(jobs)) as advance:

            def finished(result: Trajectory | Failure) -> None:
                if isinstance(result, Trajectory):
                    advance()

            for attempt in range(rollouts.attempts):
                if attempt:
                    await sampled.bring_back()
                places = [place for place in range(len(jobs)) if not isinstance(results.get(place), Trajectory)]
                todo = [jobs[place] for place in places]
                came = await sampled.collection.run(todo, environment, rollouts.concurrency, finished, speculating)
                results.update(zip(places, came, strict=True))
                if all(isinstance(result, Trajectory) for result in results.values()):
                    break
        seconds = time.monotonic() - began
        text = sampled.collection.chat.text
        came = [results[place] for place in range(len(jobs))]
        ordered = [
            result if isinstance(result, Failure) else line_of(result, task.instruction, text)
            for (task, _), result in zip(jobs, came, strict=True)
        ]
        failures = [result for result in ordered if isinstance(result, Failure)]
        for failure in failures:
            self.run.notes.print(f"left out: {failure.task} seed {failure.seed} broke: {failure.error}", soft_wrap=True)
        if len(failures) == len(jobs):
            raise InputError(f"every rollout broke, the first with: {failures[0].error}; mend that and --resume")
        lines = [result for result in ordered if isinstance(result, TrajectoryLine)]
        return ordered, rollout_figures(lines, len(failures), seconds, rollouts.concurrency)

    def rewards(
        self,
        prompts: Any,
        completions: Any,
        reward: list[float | None],
        log_metric: Callable[[str, float], None],
        **_: Any,
    ) -> list[float | None]:
        """TRL's reward function: what the tasks' checks gave. None for a rollout that broke, which teaches nothing."""
        figures = self._figures
        assert figures is not None
        log_metric("rollouts/solved", figures.solved / figures.rollouts)
        log_metric("rollouts/seconds", figures.seconds)
        log_metric("rollouts/seconds_without_speculation", figures.seconds_without)
        log_metric("rollouts/hidden_seconds", figures.hidden_seconds)
        log_metric("rollouts/hits_of_calls", figures.hits / figures.tool_calls if figures.tool_calls else 0.0)
        return reward

    # Around the steps. The names and arguments are those of transformers' callbacks.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.run.sampled.publish(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluate(state.global_step)  # After the checkpoint of the step before: a kill loses no step by it.
        self._began = time.monotonic()
        if self.run.cotrainer is not None:
            self.run.cotrainer.keep_up(lambda said: self.run.notes.print(said, soft_wrap=True))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        trained = [weight for weight in model.parameters() if weight.grad is not None]
        if all(bool(weight.grad.isfinite().all()) for weight in trained):
            self._skipped = 0
            return
        for weight in trained:
            weight.grad = None  # So the optimizer leaves it as it is.
        self._skipped += 1
        said = f"step {state.global_step + 1}: gradients are no numbers; the weights stay as they are"
        self.run.notes.print(said, soft_wrap=True)
        if self._skipped == _MOST_SKIPPED:
            raise InputError(
                f"gradients were no numbers in {_MOST_SKIPPED} steps in a row; lower learning_rate, and --resume goes "
                "on from the last checkpoint"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._learning.close()
        began = time.monotonic()
        with self.display.phase(f"step {state.global_step}: publishing"):
            self.run.sampled.publish(state.global_step)
        self._ended = time.monotonic()
        self._publish_seconds = self._ended - began
        if self._ending:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float], **_: Any) -> None:
        if "loss" not in logs or self._figures is None:
            return  # The last one, of the whole training.
        figures, self._figures = self._figures, None
        seconds = self._ended - self._began
        record = StepRecord(
            step=state.global_step,
            seconds=seconds,
            waiting_seconds=self._waited,
            update_seconds=seconds - self._waited - self._publish_seconds,
            publish_seconds=self._publish_seconds,
            rollouts=figures,
            skipped=self._skipped > 0,
            world_model=None if self.run.cotrainer is None else self.run.cotrainer.about(),
            trl={name: _number(value) for name, value in logs.items() if not name.startswith("rollouts/")},
        )
        self.run.journal.write(record)
        self.display.step(record)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._ending:
            self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        """Where it is due: after every so many steps, before the first and after the last."""
        optimization = self.run.settings.optimization
        due = evaluation_steps(optimization.steps, optimization.evaluate_every)
        if not self.run.held_out or step not in due or step in self.run.journal.evaluated:
            return
        # The same in every evaluation, and none twice: rollouts of one seed are lucky together.
        again = [task for task in self.run.held_out for _ in range(optimization.evaluation_samples)]
        jobs = [(task, optimization.seed * _SEEDS + place) for place, task in enumerate(again)]
        what = f"after step {step}: held-out tasks"
        _, figures = self.run.sampled.collection.collect(lambda: self._rollouts(what, jobs, speculating=False))
        record = EvaluationRecord(step, figures)
        self.run.journal.write(record)
        self.display.evaluation(record)

    def save(self, directory: Path) -> None:
        """What a checkpoint has besides TRL's."""
        self.run.gate.save(directory / "gate.json")

    @contextmanager
    def ending(self) -> Iterator[None]:
        """While the block runs the first Ctrl-C ends the training after the step under way."""

        def ask(number: int, frame: Any) -> None:
            if self._ending:
                raise KeyboardInterrupt
            self._ending = True
            said = "ending after this step, with a checkpoint; Ctrl-C again ends at once, without one"
            self.run.notes.print(said, soft_wrap=True)

        before = signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self._ending:
            raise KeyboardInterrupt


class _Trainer(GRPOTrainer):  # type: ignore[misc]  # TRL is not typed
    """TRL's, with whole checkpoints, and with ratios to the distribution that was sampled from."""

    loop: _Loop

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
        return batch

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        more_than_advantages = self.beta or self._entropy_bonus_enabled or self.aux_loss_enabled
        if not more_than_advantages and not inputs["advantages"].any():
            # Of groups that all solved or all failed: the passes through the model would end in gradients of zero.
            return 0.0 * sum(weight.sum() for weight in model.parameters() if weight.requires_grad)
        return super().compute_loss(model, _trimmed(inputs), *args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: a checkpoint is no publication."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        root = Path(self.args.output_dir)
        directory = root / f"{_CHECKPOINT}{self.state.global_step}"
        shutil.rmtree(directory, ignore_errors=True)  # Of a run that was killed while it wrote it.
        try:
            super()._save_checkpoint(model, trial)
            self.loop.save(directory)
            sync_all(directory)
            (directory / _COMPLETE).touch()
        except (OSError, RuntimeError, SafetensorError, InputError) as error:  # All of them are words for a full disk.
            shutil.rmtree(directory, ignore_errors=True)
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
            raise InputError(
                f"{directory}: {reason}; make room, and --resume goes on from the last checkpoint"
            ) from error
        for old in _checkpoints(root)[: -self.loop.run.settings.optimization.keep]:
            shutil.rmtree(old, ignore_errors=True)


def trl_config(settings: TrainingSettings, output: Path) -> GRPOConfig:
    """TRL's settings. Raises InputError for what ``[trl]`` may not say."""
    optimization, rollouts = settings.optimization, settings.rollouts
    chosen: dict[str, Any] = {
        "output_dir": str(output / "checkpoints"),
        "per_device_train_batch_size": optimization.rows,
        "gradient_accumulation_steps": settings.rollouts_per_step // optimization.rows,
        "num_generations": rollouts.group,
        "temperature": rollouts.temperature,
        "learning_rate": optimization.learning_rate,
        "max_steps": optimization.steps,
        "seed": optimization.seed,
        "save_strategy": "steps",
        "save_steps": optimization.checkpoint_every,
        "logging_steps": 1,
        "report_to": [name for name in optimization.report_to if name != "tensorboard"],
        "shuffle_dataset": False,  # The stream is.
    }
    known = get_type_hints(GRPOConfig)
    for name, value in settings.trl.items():
        if name in chosen or name in _RELIED_ON:
            raise InputError(f"[trl] {name}: is set by the other sections; leave it out here")
        if name not in known:
            remedy = did_you_mean(name, known, "its documentation has them all")
            raise InputError(f"[trl] {name}: TRL's GRPOConfig has no such key; {remedy}")
        try:
            TypeAdapter(known[name]).validate_python(value)
        except ValidationError as error:
            raise InputError(f"[trl] {name} = {value!r:.100}: {error.errors()[0]['msg']}") from None
        if name in _NAMES and isinstance(value, str) and value not in _NAMES[name]:
            remedy = did_you_mean(value, _NAMES[name], f"it takes {', '.join(_NAMES[name])}")
            raise InputError(f"[trl] {name} = {value!r:.100}: is nothing that TRL has; {remedy}")
    defaults: dict[str, Any] = {
        "lr_scheduler_type": "constant",
        "max_completion_length": rollouts.max_context,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "log_level": "error",
        "dataloader_pin_memory": False,
    }
    try:
        with quiet():  # Of what is old in transformers.
            return GRPOConfig(**(defaults | settings.trl | chosen))
    except (ValueError, TypeError) as error:
        raise InputError(f"[trl]: {' '.join(str(error).split())}") from None


def _trainer(config: GRPOConfig, trainable: Trainable, loop: _Loop, trackers: Sequence[TrainerCallback]) -> _Trainer:
    trainer = _Trainer(
        trainable.model,
        loop.rewards,
        config,
        Dataset.from_list([{"prompt": task.id} for task in loop.stream]),
        processing_class=trainable.tokenizer,
        rollout_func=loop.collect,
        callbacks=[*trackers, loop],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.loop = loop
    return trainer


def task_stream(tasks: Sequence[Task], settings: TrainingSettings) -> list[Task]:
    """The tasks of all steps, in order: shuffled anew for each pass over them. A longer training begins as a shorter
    one, and all of it is one epoch to TRL, so that going on in the middle is exact."""
    random = Random(settings.optimization.seed)
    wanted = settings.optimization.steps * settings.rollouts.tasks_per_step
    stream: list[Task] = []
    while len(stream) < wanted:
        stream += random.sample(tasks, len(tasks))
    return stream[:wanted]


def _trackers(names: Sequence[str], output: Path) -> list[TrainerCallback]:
    if "tensorboard" not in names:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(output / "tensorboard")))]


def _threads(settings: TrainingSettings) -> int:
    """For learning."""
    collecting = settings.rollouts.ahead > 0 and not settings.policy.server
    return settings.optimization.threads or (1 if collecting else len(os.sched_getaffinity(0)))


def _row(result: TrajectoryLine | Failure, end: int) -> dict[str, Any]:
    """What TRL learns from a rollout. One that broke is a token that is not learned."""
    if isinstance(result, Failure):
        return {"prompt_ids": [end], "completion_ids": [end], "logprobs": [0.0], "env_mask": [0], "reward": None}
    first = result.mask.index(1)
    return {
        "prompt_ids": result.tokens[:first],
        "completion_ids": result.tokens[first:],
        "logprobs": result.logprobs[first:],
        "env_mask": result.mask[first:],
        "reward": result.reward,
    }


def _trimmed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Without the columns that are padding in every row: rows come padded to the longest of the step."""
    prompt, completion = inputs["prompt_mask"], inputs["completion_mask"]
    first = prompt.shape[1] - int(prompt.sum(1).max())
    last = int(completion.sum(1).max())
    trimmed = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            if name in ("prompt_ids", "prompt_mask"):
                trimmed[name] = value[:, first:]
            elif value.shape[1] == completion.shape[1]:
                trimmed[name] = value[:, :last]
    return trimmed


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


# Going on.


def newest_checkpoint(output: Path) -> Path | None:
    """The last one that is whole."""
    return next(reversed(_checkpoints(output / "checkpoints")), None)


def _checkpoints(root: Path) -> list[Path]:
    """Those that are whole, oldest first."""
    return sorted((path for path in root.glob(f"{_CHECKPOINT}*") if (path / _COMPLETE).exists()), key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_CHECKPOINT))


def _decisive(settings: TrainingSettings) -> dict[str, Any]:
    """The settings that determine what is learned; the others may change where a run goes on."""
    said = dataclasses.asdict(settings)
    free = {
        "rollouts": ("concurrency", "seats", "latency", "attempts"),
        "policy": ("server",),
        "optimization": (
            "steps",
            "threads",
            "evaluate_every",
            "evaluation_samples",
            "checkpoint_every",
            "keep",
            "report_to",
        ),
        "tasks": ("held_out",),
    }
    del said["speculation"]
    for section, names in free.items():
        for name in names:
            del said[section][name]
    return {f"{section}.{name}": value for section, values in said.items() for name, value in values.items()}


def _check_resumable(output: Path, settings: TrainingSettings, resume: bool) -> None:
    file = output / "settings.toml"
    if not file.exists():
        if resume:
            raise InputError(f"--output {output}: holds no training; leave --resume out to begin one")
        return
    if not resume:
        raise InputError(f"--output {output}: holds a training already; add --resume or choose another directory")
    try:
        before = _decisive(read_settings(file, {}))
    except InputError:
        raise InputError(f"{file}: is not what `obsspec train` wrote; choose another directory") from None
    check_same(file, before, _decisive(settings))
