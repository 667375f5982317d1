"""From a directory of new weights to the servers that sample from them.

The server reads the directory itself, so both machines must have it under the same path. Of several servers each needs
a publisher of its own, behind a router too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio

from obsspec.errors import InputError
from obsspec.policies.http import NotFound, Server
from obsspec.policies.versions import WORLD_MODEL, versioned, versions
from obsspec.types import PolicyError

_RESUME_SECONDS = 30.0


class Publisher(Protocol):
    """Whatever brings new weights to where they are sampled from.

    ``publish`` returns when later requests get the weights in ``directory``, which must stay as it is until two newer
    versions have been published. ``version`` counts up; one that was published before, by a trainer that has been
    restarted since, replaces what has its number or a higher one. Raises PolicyError for a failure that may pass, such
    as a server that is restarting, and InputError for one that will not, with the remedy.
    """

    async def publish(self, version: int, directory: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class VllmAdapters:
    """LoRA adapters, as PEFT saves them, on a vLLM server: each version under a name of its own. A ``Publisher``.

    The version before stays, for the requests that are on their way. ``server`` is open, and was started with
    ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``.
    """

    server: Server
    name: str = WORLD_MODEL

    async def publish(self, version: int, directory: Path) -> None:
        flags = "--enable-lora, a --max-lora-rank of at least the adapter's and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        await _publish_adapter(self.server, "/v1", self.name, version, directory, flags)


@dataclass(frozen=True, slots=True)
class SglangAdapters:
    """The same on an SGLang server, started with ``--enable-lora``. A ``Publisher``."""

    server: Server
    name: str = WORLD_MODEL

    async def publish(self, version: int, directory: Path) -> None:
        flags = "--enable-lora, a --max-lora-rank of at least the adapter's and --lora-target-modules all"
        await _publish_adapter(self.server, "", self.name, version, directory, flags)


@dataclass(frozen=True, slots=True)
class VllmWeights:
    """All weights of a model, as ``save_pretrained`` writes them, in place of a vLLM server's. A ``Publisher``.

    Requests that are on their way wait, and go on with the new weights after reading their tokens again. ``server`` is
    open, and was started with ``VLLM_SERVER_DEV_MODE=1``. Versions have no names there: the caller has to tell policies
    (`VllmPolicy.weight_version`).
    """

    server: Server

    async def publish(self, version: int, directory: Path) -> None:
        where = await anyio.Path(directory).resolve()
        with _refusals(directory, "VLLM_SERVER_DEV_MODE=1 in its environment"):
            await self.server.ask("GET", "/v1/models")  # One that hangs fails here, in seconds.
            await self.server.tell("/pause?mode=keep")
            try:
                kwargs = {"weights_path": str(where)}
                await self.server.tell("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
                # What the old weights computed is of no use to the new ones, that of running requests included.
                await self.server.tell("/reset_prefix_cache?reset_running_requests=true")
            finally:
                with anyio.move_on_after(_RESUME_SECONDS, shield=True):
                    await self.server.tell("/resume")


@dataclass(frozen=True, slots=True)
class SglangWeights:
    """The same on an SGLang server, which lets the requests that are on their way end before. A ``Publisher``.

    The server says the version with every token from then on.
    """

    server: Server

    async def publish(self, version: int, directory: Path) -> None:
        where = await anyio.Path(directory).resolve()
        with _refusals(directory, "the same kind of model"):
            await self.server.ask("GET", "/v1/models")  # One that hangs fails here, in seconds.
            weights = {"model_path": str(where), "weight_version": str(version)}
            await self.server.tell("/update_weights_from_disk", weights)


async def _publish_adapter(server: Server, prefix: str, name: str, version: int, directory: Path, flags: str) -> None:
    """``prefix``: what the routes of the two engines differ in. ``flags``: what they need."""

    async def unload(number: int) -> None:
        with suppress(NotFound):  # Somebody else was quicker.
            await server.tell(f"{prefix}/unload_lora_adapter", {"lora_name": versioned(name, number)})

    where = await anyio.Path(directory).resolve()
    with _refusals(directory, flags):
        cards = (await server.ask("GET", "/v1/models"))["data"]
        loaded = versions(name, (card["id"] for card in cards))
        older = [number for number in loaded if number < version]
        for number in loaded:
            if number >= version:  # Of a trainer before this one. Whoever asks for the highest would stay with it.
                await unload(number)
        await server.tell(
            f"{prefix}/load_lora_adapter", {"lora_name": versioned(name, version), "lora_path": str(where)}
        )
        for number in older[:-1]:
            await unload(number)


@contextmanager
def _refusals(directory: Path, flags: str) -> Iterator[None]:
    """Around the requests of a publisher: what will not pass is an InputError. ``flags``: what the server must have."""
    remedy = f"start it with {flags}, where it can read {directory}"
    try:
        yield
    except ValueError as error:
        raise InputError(f"{error}; {remedy}") from error
    except (LookupError, TypeError) as error:
        raise InputError(f"the server answers what no such server does; {remedy}") from error
    except PolicyError as error:
        # vLLM says these with the status of what may pass.
        if "LoRA is not enabled" in str(error) or "max_lora_rank" in str(error):
            raise InputError(f"{error}; {remedy}") from error
        raise
