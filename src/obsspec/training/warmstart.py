"""Training an adapter on expert runs, so that a small base model becomes a policy or a world model.

The loop is plain PyTorch rather than a framework's trainer, because three things then are a line each: rows are never
padded (gradients of single rows are added up), the vocabulary, costly on a CPU, is only predicted where a label is, and
every choice is a function of the seed and the step, so that a checkpoint of a few tensors is all that going on needs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from rich.console import Console
from safetensors.torch import save_file
from torch.nn import functional

from obsspec.chat import ChatFormat
from obsspec.errors import InputError
from obsspec.models import DEFAULT_MODEL, load_model
from obsspec.reports.tables import counting
from obsspec.training.trajectories import IGNORED, ExpertRun, Role, Row, rows

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHECKPOINT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that determines the adapter, besides the base model and the runs."""

    tokens: int = 300_000
    """How many tokens are read in all; the runs are gone through again where they hold fewer."""
    rows_per_step: int = 4
    learning_rate: float = 5e-4
    """At its highest: it rises over the first twentieth of the steps and then falls to zero along a cosine."""
    rank: int = 16
    """Of the low-rank update of every linear layer but the output layer."""
    longest: int = 1536
    """Rows are cut to this many tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "rows_per_step", "learning_rate", "rank", "longest"):
            if getattr(self, name) <= 0:
                raise InputError(f"warm start: {name} must be more than 0, not {getattr(self, name)}")
        if not self.learning_rate <= 1:
            raise InputError(f"warm start: learning_rate must be at most 1, not {self.learning_rate}")


def warmstart(
    role: Role,
    runs: Sequence[ExpertRun],
    output: Path,
    recipe: Recipe = Recipe(),
    base: str = DEFAULT_MODEL,
    notes: Console | None = None,
) -> None:
    """Trains an adapter that gives the model ``base`` its ``role``.

    ``output`` becomes a directory for `load_model`: PEFT's format, in bfloat16, and ``training.json``, which says what
    trained it. It is renewed every two minutes, together with a checkpoint beside it (``output`` + ``.checkpoint``), so
    a crash loses no more than that, and the same call goes on. For a given number of PyTorch threads the adapter is the
    same however often it was interrupted. Progress goes to ``notes``, stderr if None.
    Raises InputError where ``output`` cannot be written or another training is under way there.
    """
    notes = notes or Console(stderr=True)
    runs = sorted(runs, key=lambda run: run.task)  # They were collected in whatever order they ended.
    network, tokenizer = load_model(base)
    chat_format = ChatFormat(tokenizer)
    data = [row.cut(recipe.longest) for run in runs for row in rows(role, run, chat_format)]
    data = [row for row in data if any(label != IGNORED for label in row.labels)]
    if not data:
        raise InputError("warm start: there is nothing to learn in the expert runs; collect some that solve their task")
    steps = schedule([len(row.tokens) for row in data], recipe)
    torch.manual_seed(recipe.seed)
    lora = LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a name that transformers has replaced.
        model = get_peft_model(network, lora)
    training = _Training(model, recipe, len(steps), _fingerprint(role, base, recipe, data))
    directory = _Directory(output, {"role": role, "base": base, "recipe": asdict(recipe), "tasks": _tasks(runs)})
    directory.resume(training)
    if training.step:
        notes.print(f"{role}: going on after step {training.step} of {len(steps)}")

    with counting(notes, role, len(steps), training.step) as advance:
        saved = began = time.monotonic()
        tokens_before = training.tokens
        while training.step < len(steps):
            training.advance([data[index] for index in steps[training.step]])
            advance(f", loss {training.recent_loss:.3f}")
            now = time.monotonic()
            if now - saved > _CHECKPOINT_SECONDS or training.step == len(steps):
                directory.save(training)
                saved = now
                rate = (training.tokens - tokens_before) / (now - began)
                notes.print(
                    f"{role}: step {training.step} of {len(steps)}, {training.tokens:,} tokens, "
                    f"loss {training.recent_loss:.4f}, {rate:.0f} tokens/s"
                )


@dataclass(frozen=True, slots=True)
class Score:
    """How many of the spans that a model is to write it writes exactly."""

    exact: int
    total: int


def evaluate(
    role: Role,
    model: PreTrainedModel | PeftModel,
    runs: Sequence[ExpertRun],
    tokenizer: PreTrainedTokenizerBase,
    finished: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """By family: how many commands (``done`` counted) or observations greedy decoding writes exactly, token for token.

    Each is asked for after the expert's own history. Of the policy, commands that are mistakes are not asked for; of
    the world model, observations longer than it drafts. ``finished`` is called after each run, for progress.
    """
    chat_format = ChatFormat(tokenizer)
    exact: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for run in runs:
        for row in rows(role, run, chat_format):
            spans = _spans(row)
            with torch.inference_mode():
                right = _logits(model, row).argmax(-1).cpu() == torch.tensor(_targets(row))
            total[run.family] += len(spans)
            exact[run.family] += sum(bool(span.all()) for span in right.split(spans))
        finished()
    return {family: Score(exact[family], total[family]) for family in sorted(total)}


def schedule(lengths: Sequence[int], recipe: Recipe) -> list[list[int]]:
    """Which rows each step takes: shuffled, all of them before any comes again, until they hold ``recipe.tokens``."""
    random = Random(recipe.seed)
    order: list[int] = []
    left = recipe.tokens
    while left > 0:
        for index in random.sample(range(len(lengths)), len(lengths)):
            if left > 0:
                order.append(index)
                left -= lengths[index]
    return [order[first : first + recipe.rows_per_step] for first in range(0, len(order), recipe.rows_per_step)]


class _Training:
    """An adapter, its optimizer, and how far they have come."""

    def __init__(self, model: PeftModel, recipe: Recipe, steps: int, fingerprint: str) -> None:
        self.model = model.train()
        self.fingerprint = fingerprint
        self.step = 0
        self.tokens = 0
        self.losses: list[float] = []
        """Of each step, a mean over the learned tokens, in nats."""
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, weight_decay=0.0)
        self._recipe = recipe
        self._steps = steps

    @property
    def recent_loss(self) -> float:
        recent = self.losses[-20:]
        return sum(recent) / len(recent)

    def advance(self, batch: Sequence[Row]) -> None:
        """One step of the optimizer."""
        learned = sum(len(_targets(row)) for row in batch)
        loss = 0.0
        for row in batch:
            logits = _logits(self.model, row)
            targets = torch.tensor(_targets(row), device=logits.device)
            share = functional.cross_entropy(logits.float(), targets, reduction="sum") / learned
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * _warmth(self.step, self._steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        self.tokens += sum(len(row.tokens) for row in batch)
        self.losses.append(loss)

    def state(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "step": self.step,
            "tokens": self.tokens,
            "losses": self.losses,
            "adapter": get_peft_model_state_dict(self.model, save_embedding_layers=False),
            "optimizer": self._optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.step, self.tokens, self.losses = state["step"], state["tokens"], state["losses"]
        set_peft_model_state_dict(self.model, state["adapter"])
        self._optimizer.load_state_dict(state["optimizer"])


def _warmth(step: int, steps: int) -> float:
    """The share of the highest learning rate at a step."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _logits(model: PreTrainedModel | PeftModel, row: Row) -> torch.Tensor:
    """What ``model`` expects at each learned token, shape (learned tokens, vocabulary)."""
    before = [place - 1 for place, label in enumerate(row.labels) if label != IGNORED]
    ids = torch.tensor([row.tokens], device=model.device)
    logits: torch.Tensor = model(
        input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(before, device=model.device)
    ).logits
    return logits[0]


def _targets(row: Row) -> list[int]:
    return [label for label in row.labels if label != IGNORED]


def _spans(row: Row) -> list[int]:
    """Lengths of the runs of learned tokens."""
    grouped = itertools.groupby(row.labels, lambda label: label != IGNORED)
    return [len(list(labels)) for learned, labels in grouped if learned]


def _tasks(runs: Sequence[ExpertRun]) -> dict[str, str]:
    """The seeds of the runs' tasks, for each family and level."""
    seeds: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        seeds[f"{run.family}/{run.level}"].append(run.task.rpartition("/")[2])
    return {name: " ".join(seeds[name]) for name in sorted(seeds)}


def _fingerprint(role: Role, base: str, recipe: Recipe, data: Sequence[Row]) -> str:
    """The same for trainings that give the same adapter."""
    return hashlib.sha256(repr((role, base, recipe, data)).encode()).hexdigest()


class _Directory:
    """Where an adapter goes, with its checkpoint beside it. Files are replaced whole."""

    def __init__(self, output: Path, description: dict[str, Any]) -> None:
        self._output = output.resolve()
        if not self._output.name:
            raise InputError(f"{output}: cannot hold an adapter; choose a directory in it")
        self._checkpoint = self._output.with_name(self._output.name + ".checkpoint")
        self._description = description

    def resume(self, training: _Training) -> None:
        """Takes ``training`` to where the checkpoint is, if there is one."""
        with self._writable():
            self._output.mkdir(parents=True, exist_ok=True)
            if not self._checkpoint.exists():
                return
        try:
            state = torch.load(self._checkpoint, weights_only=True)
            matching = state["fingerprint"] == training.fingerprint
            if matching:
                training.restore(state)
        except Exception as error:  # PyTorch says in many ways that a file is not what it wrote.
            raise InputError(
                f"{self._checkpoint}: damaged ({type(error).__name__}); remove it to start afresh"
            ) from error
        if not matching:
            raise InputError(
                f"{self._checkpoint}: is of a training of other runs, or by another recipe; remove it to start afresh"
            )

    def save(self, training: _Training) -> None:
        state = training.state()
        adapter = {name: weight.bfloat16().contiguous() for name, weight in state["adapter"].items()}
        config = training.model.peft_config["default"]
        config.base_model_name_or_path = self._description["base"]
        config.target_modules = sorted(config.target_modules)
        reached = {
            "step": training.step,
            "tokens": training.tokens,
            "losses": [round(loss, 4) for loss in training.losses],
        }
        with self._writable(), tempfile.TemporaryDirectory(dir=self._output.parent, prefix="saving-") as scratch:
            new = Path(scratch)
            config.save_pretrained(new)
            save_file(adapter, new / "adapter_model.safetensors", metadata={"format": "pt"})
            (new / "training.json").write_text(json.dumps(self._description | reached, indent=1) + "\n")
            for file in sorted(new.iterdir()):
                file.replace(self._output / file.name)
            torch.save(state, new / "checkpoint")
            (new / "checkpoint").replace(self._checkpoint)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self._output}: {error.strerror or error}; make room or choose a directory that can be written"
            ) from None
