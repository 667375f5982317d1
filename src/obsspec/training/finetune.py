"""Fine-tuning a causal language model, whole or by an adapter, on rows of tokens some of which are learned.

The loop is plain PyTorch rather than a framework's trainer, because four things then are a line each: rows are never
padded (gradients of single rows are added up, however many a step has), the vocabulary, costly on a CPU, is only
predicted where something is learned, every choice is a function of the seed and the step, so that a checkpoint of a few
tensors is all that going on needs, and a service can train a little, look, and train on. Accelerate finds the device,
and adds up the gradients of the processes that ``accelerate launch`` starts.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import Accelerator
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.nn import functional

from obsspec.errors import InputError
from obsspec.models import adapted, load_model
from obsspec.reports.tables import counting
from obsspec.training.trajectories import Row
from obsspec.training.versions import LOCK, only_process

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CHECKPOINT_SECONDS = 120.0
_SAVING = "saving-"


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that determines what comes of a training, besides the model that it starts from and the rows."""

    tokens: int = 300_000
    """How many tokens are read in all; the rows are gone through again where they hold fewer."""
    rows_per_step: int = 4
    learning_rate: float = 5e-4
    """At its highest: it rises over the first twentieth of the steps and then falls to zero along a cosine."""
    rank: int | None = 16
    """Of the low-rank update of every linear layer but the output layer; None trains the whole model."""
    longest: int = 1536
    """Rows are cut to this many tokens."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the products; weights and their gradients are in float32."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "rows_per_step", "learning_rate", "rank", "longest"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"training: {name} must be more than 0, not {value}")
        if not self.learning_rate <= 1:
            raise InputError(f"training: learning_rate must be at most 1, not {self.learning_rate}")
        if self.precision not in ("float32", "bfloat16"):
            raise InputError(f"training: precision must be float32 or bfloat16, not {self.precision}")


@dataclass(frozen=True, slots=True)
class Trainable:
    """A model whose weights, or whose adapter's, can be trained."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    base: str
    """The name of the model that was loaded."""


def load_trainable(base: str, recipe: Recipe, adapter: str | None = None) -> Trainable:
    """The model ``base``, to be trained as the recipe says, from ``adapter`` on where one is given.

    They are named as for `load_model`. An adapter that is trained further keeps its rank; where the whole model is
    trained it is merged first. Raises InputError as `load_model` does.
    """
    torch.manual_seed(recipe.seed)
    if Path(base).is_dir():
        base = str(Path(base).resolve())  # What is trained will be used elsewhere.
    if recipe.rank is None:
        model, tokenizer = load_model(base, adapter)
        return Trainable(model, tokenizer, base)
    network, tokenizer = load_model(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a name that transformers has replaced.
        if adapter is not None:
            return Trainable(adapted(network, base, adapter, trainable=True), tokenizer, base)
        lora = LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return Trainable(get_peft_model(network, lora), tokenizer, base)


class Learner:
    """A model in training, and its optimizer.

    Weights are what is trained, by name: an adapter's, or all of the model's.
    """

    def __init__(self, trainable: Trainable, recipe: Recipe) -> None:
        self.processes = Accelerator()
        self.model = trainable.model.to(self.processes.device).train()
        self._trainable = trainable
        self._recipe = recipe
        self._trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._optimizer = self._fresh_optimizer()

    @property
    def longest(self) -> int:
        """Tokens to which rows are cut."""
        return min(self._recipe.longest, _positions(self.model))

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._trained, weight_decay=0.0)

    def learn(self, rows: Sequence[Row], rate: float = 1.0) -> float:
        """One step of the optimizer at ``rate`` times the recipe's learning rate.

        The processes of a launch take their shares of the rows. Returns the mean loss of the learned tokens, weighted,
        in nats; NaN where the gradients are no numbers, and then the weights stay as they are.
        """
        learned = sum(span.end - span.start for row in rows for span in row.spans)
        loss = torch.zeros((), device=self.model.device)
        for row in rows[self.processes.process_index :: self.processes.num_processes]:
            with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._recipe.precision == "bfloat16"):
                logits = _logits(self.model, row)
            losses = functional.cross_entropy(logits.float(), _targets(row, logits.device), reduction="none")
            share = (losses * _weights(row, logits.device)).sum() / learned
            share.backward()
            loss += share.detach()
        if self.processes.num_processes > 1:
            for weight in self._trained:
                gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
                weight.grad = self.processes.reduce(gradient, "sum")
            loss = self.processes.reduce(loss, "sum")
        norm = torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            return math.nan
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy."""
        return {name: weight.detach().cpu().clone() for name, weight in self._state().items()}

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError where they are of another model."""
        if weights.keys() != self._state().keys():
            raise ValueError("weights of another model")
        if isinstance(self.model, PeftModel):
            set_peft_model_state_dict(self.model, dict(weights))
        else:
            self.model.load_state_dict(weights)

    def state(self) -> dict[str, Any]:
        """What `restore` goes on from."""
        return {"weights": self._state(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.set_weights(state["weights"])
        self._optimizer.load_state_dict(state["optimizer"])

    def restart(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Goes on from other weights, with nothing left of the optimizer's past."""
        self.set_weights(weights)
        self._optimizer = self._fresh_optimizer()

    def save(self, directory: Path) -> None:
        """As `save_weights` does, in bfloat16."""
        save_weights(self._trainable, directory)

    def _state(self) -> dict[str, torch.Tensor]:
        return _adapter_weights(self.model) if isinstance(self.model, PeftModel) else dict(self.model.state_dict())


def save_weights(trainable: Trainable, directory: Path, precision: torch.dtype = torch.bfloat16) -> None:
    """Writes the adapter as PEFT does, or the whole model and its tokenizer as transformers does.

    Raises OSError where it cannot be written.
    """
    try:
        if isinstance(trainable.model, PeftModel):
            _save_adapter(trainable.model, trainable.base, directory, precision)
        else:
            _save_whole(trainable.model, trainable.tokenizer, directory, precision)
    except SafetensorError as error:  # Its word for a disk that is full.
        raise OSError(f"cannot be written ({error})") from None


def _save_adapter(model: PeftModel, base: str, directory: Path, precision: torch.dtype) -> None:
    config = model.peft_config["default"]
    config.base_model_name_or_path = base
    config.target_modules = sorted(config.target_modules)
    config.inference_mode = True
    config.save_pretrained(directory)
    config.inference_mode = False
    adapter = {name: weight.to(precision).contiguous() for name, weight in _adapter_weights(model).items()}
    save_file(adapter, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_model.safetensors").chmod(0o644)  # A server may read it that is another user's.


def _save_whole(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path, precision: torch.dtype
) -> None:
    whole = {name: weight.to(precision) for name, weight in model.state_dict().items()}
    model.save_pretrained(directory, state_dict=whole)
    tokenizer.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    name = str(precision).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config | {"dtype": name}, indent=2) + "\n")


def _adapter_weights(model: PeftModel) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return weights


def finetune(
    what: str,
    trainable: Trainable,
    rows: Sequence[Row],
    output: Path,
    recipe: Recipe,
    description: Mapping[str, Any],
    notes: Console | None = None,
) -> None:
    """Trains on the rows, which must hold a span each.

    ``output`` becomes a directory for `load_model`, the adapter's or the whole model's, in bfloat16, with
    ``training.json``, which says what trained it, ``description`` included. It is renewed every two minutes, together
    with a checkpoint beside it (``output`` + ``.checkpoint``), so a crash loses no more than that, and the same call
    goes on. For a given number of PyTorch threads and processes the result is the same however often it was
    interrupted. Progress goes to ``notes``, stderr if None, under the name ``what``. Raises InputError where ``output``
    cannot be written or another training is under way there.
    """
    learner = Learner(trainable, recipe)
    rows = [cut for row in rows if (cut := row.cut(learner.longest)).spans]
    if not rows:
        raise InputError(f"training: all that is to be learned comes after {learner.longest} tokens; nothing is left")
    first = learner.processes.is_main_process
    notes = (notes or Console(stderr=True)) if first else Console(quiet=True)
    steps = schedule([len(row.tokens) for row in rows], recipe)
    progress = _Progress(_fingerprint(trainable.base, recipe, description, rows))
    directory = _Directory(output, {**description, "base": trainable.base, "recipe": asdict(recipe)})
    with directory.alone(first):
        directory.resume(learner, progress)
        if progress.step:
            notes.print(f"{what}: going on after step {progress.step} of {len(steps)}")
        with counting(notes, what, len(steps), progress.step) as advance:
            saved = began = time.monotonic()
            tokens_before = progress.tokens
            while progress.step < len(steps):
                batch = [rows[index] for index in steps[progress.step]]
                loss = learner.learn(batch, _warmth(progress.step, len(steps)))
                if not math.isfinite(loss):
                    raise InputError(
                        f"{what}: gradients are no numbers at step {progress.step}; lower the learning rate"
                    )
                progress.add(loss, batch)
                advance(f", loss {progress.recent_loss:.3f}")
                now = time.monotonic()
                if now - saved > _CHECKPOINT_SECONDS or progress.step == len(steps):
                    if first:
                        directory.save(learner, progress)
                    saved = now
                    rate = (progress.tokens - tokens_before) / (now - began)
                    notes.print(
                        f"{what}: step {progress.step} of {len(steps)}, {progress.tokens:,} tokens, "
                        f"loss {progress.recent_loss:.4f}, {rate:.0f} tokens/s"
                    )
    learner.processes.wait_for_everyone()


def save_state(state: Mapping[str, Any], file: Path) -> None:
    """Writes a checkpoint. Raises OSError where it cannot be written."""
    try:
        torch.save(state, file)
    except (RuntimeError, OSError) as error:
        file.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):  # PyTorch's word for a disk that is full.
            raise OSError("cannot be written, perhaps because the disk is full") from None
        raise


def exact_spans(model: PreTrainedModel | PeftModel, row: Row) -> list[bool]:
    """Of each span, whether greedy decoding after what precedes it writes exactly its tokens.

    That is the case where each of them is the likeliest one after those before it, so one reading of the row tells.
    """
    read = row.cut(_positions(model))
    exact = []
    if read.spans:
        with torch.inference_mode():
            right = _logits(model, read).argmax(-1) == _targets(read, model.device)
        lengths = [span.end - span.start for span in read.spans]
        exact = [bool(span.all()) for span in right.cpu().split(lengths)]
    return exact + [False] * (len(row.spans) - len(exact))  # What is too far on to be read is not foretold.


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


@dataclass(slots=True)
class _Progress:
    """How far a training has come."""

    fingerprint: str
    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    """Of each step."""

    @property
    def recent_loss(self) -> float:
        recent = self.losses[-20:]
        return sum(recent) / len(recent)

    def add(self, loss: float, rows: Sequence[Row]) -> None:
        self.step += 1
        self.tokens += sum(len(row.tokens) for row in rows)
        self.losses.append(loss)


def _warmth(step: int, steps: int) -> float:
    """The share of the highest learning rate at a step."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _positions(model: PreTrainedModel | PeftModel) -> int:
    """Tokens that the model can read, where there is a limit."""
    return int(getattr(model.config, "max_position_embeddings", None) or sys.maxsize)


def _logits(model: PreTrainedModel | PeftModel, row: Row) -> torch.Tensor:
    """What ``model`` expects at each learned token, shape (learned tokens, vocabulary)."""
    before = [place - 1 for span in row.spans for place in range(span.start, span.end)]
    ids = torch.tensor([row.tokens], device=model.device)
    logits: torch.Tensor = model(
        input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(before, device=model.device)
    ).logits
    return logits[0]


def _targets(row: Row, device: torch.device) -> torch.Tensor:
    return torch.tensor([token for span in row.spans for token in row.tokens[span.start : span.end]], device=device)


def _weights(row: Row, device: torch.device) -> torch.Tensor:
    return torch.tensor([span.weight for span in row.spans for _ in range(span.start, span.end)], device=device)


def _fingerprint(base: str, recipe: Recipe, description: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The same for trainings that give the same weights."""
    return hashlib.sha256(repr((base, recipe, description, rows)).encode()).hexdigest()


class _Directory:
    """Where the weights go, with their checkpoint beside them. Files are replaced whole."""

    def __init__(self, output: Path, description: dict[str, Any]) -> None:
        self._output = output.resolve()
        if not self._output.name:
            raise InputError(f"{output}: cannot hold a model; choose a directory in it")
        self._checkpoint = self._output.with_name(self._output.name + ".checkpoint")
        self._description = description

    @contextmanager
    def alone(self, first: bool) -> Iterator[None]:
        """Around a training. ``first``: whether this is the process that writes. Raises InputError where the directory
        has anything that is not of this training, or another process trains there."""
        with ExitStack() as held:
            if first:
                held.enter_context(only_process(self._output))
                for left in self._output.glob(f"{_SAVING}*"):
                    shutil.rmtree(left, ignore_errors=True)
                others = [path.name for path in self._output.iterdir() if path.name != LOCK]
                if others and not self._checkpoint.exists():
                    raise InputError(f"{self._output}: holds {min(others)} already; choose another directory")
            yield

    def resume(self, learner: Learner, progress: _Progress) -> None:
        """Takes both to where the checkpoint is, if there is one."""
        if not self._checkpoint.exists():
            return
        try:
            state = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
            matching = state["fingerprint"] == progress.fingerprint
            if matching:
                learner.restore(state["learner"])
                progress.step, progress.tokens, progress.losses = state["step"], state["tokens"], state["losses"]
        except Exception as error:  # PyTorch says in many ways that a file is not what it wrote.
            raise InputError(
                f"{self._checkpoint}: damaged ({type(error).__name__}); remove it and the model to start afresh"
            ) from error
        if not matching:
            raise InputError(
                f"{self._checkpoint}: is of a training on other runs, or by another recipe; remove it and the model to "
                "start afresh"
            )

    def save(self, learner: Learner, progress: _Progress) -> None:
        reached = {
            "step": progress.step,
            "tokens": progress.tokens,
            "losses": [round(loss, 4) for loss in progress.losses],
        }
        with self._writable(), tempfile.TemporaryDirectory(dir=self._output, prefix=_SAVING) as scratch:
            new = Path(scratch)
            learner.save(new)
            (new / "training.json").write_text(json.dumps(self._description | reached, indent=1) + "\n")
            for file in sorted(new.iterdir()):
                file.replace(self._output / file.name)
            save_state(asdict(progress) | {"learner": learner.state()}, new / "checkpoint")
            (new / "checkpoint").replace(self._checkpoint)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self._output}: {error.strerror or error}; make room or choose a directory that can be written"
            ) from None
