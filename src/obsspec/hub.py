"""Files of models, in a directory or from the model hub, and the tokenizer in them. Needs no PyTorch."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from obsspec.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")


def load_tokenizer(name: str, remedy: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model by its directory or its name at the model hub; its weights are not fetched.

    Raises InputError where it cannot be had: what is wrong, then ``remedy``.
    """
    try:
        import jinja2  # noqa: F401 -- which chat templates are written for

        with quiet():
            from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(f"a tokenizer needs {error.name}: pip install 'obsspec[server]'") from None
    path = find(f"tokenizer {name}", name, TOKENIZER_FILES, remedy)
    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # Whatever is odd in its files: there is no end to what they may hold.
        raise InputError(f"tokenizer {name}: none in {path} ({first_line(error)}); {remedy}") from error
    return tokenizer


def find(what: str, name: str, files: Sequence[str], remedy: str) -> Path:
    """The directory ``name``, or one with the ``files`` of that name at the model hub, fetched before or now.

    Raises InputError where there is neither: ``what`` it was for, why, and ``remedy``.
    """
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError) as error:  # A name that is too long; a user that is unknown.
        raise InputError(f"{what}: {first_line(error)}; {remedy}") from None
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(f"{what}: no such directory; {remedy}")
    import huggingface_hub

    try:
        httpx.head(huggingface_hub.constants.ENDPOINT, timeout=10)
        reachable = True
    except httpx.HTTPError:
        reachable = False  # the hub's own client would find this out in a minute, and print its attempts
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[*files], local_files_only=not reachable))
    except Exception as error:  # Of its own kinds, and of those of more than one HTTP client.
        why = first_line(error) if reachable else "which cannot be reached"
        raise InputError(
            f"{what}: no such directory, and not to be had from the model hub ({why}); {remedy}"
        ) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or warnings from transformers: loading takes seconds, and what matters is raised."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # All logs, as even the import below warns where PyTorch is missing.
    try:
        from transformers.utils import logging as bars

        shown = bars.is_progress_bar_enabled()
        bars.disable_progress_bar()
        try:
            with warnings.catch_warnings(action="ignore"):
                yield
        finally:
            if shown:
                bars.enable_progress_bar()
    finally:
        logging.disable(disabled)
