"""Publishing new weights, against stand-ins for the servers. What a real vLLM does with them is in test_vllm.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from http_server import Exchange, serve
from obsspec.errors import InputError
from obsspec.policies.http import Server
from obsspec.policies.versions import newest, versions
from obsspec.training.publishing import Publisher, SglangAdapters, SglangWeights, VllmAdapters, VllmWeights
from obsspec.types import PolicyError


class FakeServer:
    """Holds adapters, as vLLM and SGLang do: a name that is loaded cannot be loaded again."""

    def __init__(self, *loaded: str) -> None:
        self.adapters = dict.fromkeys(loaded, "/before")
        self.told: list[tuple[str, Any]] = []
        self.refusals: dict[str, tuple[int, Any]] = {}
        """By path: the status, and the body."""

    async def __call__(self, exchange: Exchange) -> None:
        self.told.append((exchange.path, exchange.body))
        status, reply = self.refusals.get(exchange.path) or self._answer(exchange)
        await exchange.json(reply, status)

    def _answer(self, exchange: Exchange) -> tuple[int, Any]:
        if exchange.path == "/v1/models":
            return 200, {"data": [{"id": "base"}, *({"id": name} for name in self.adapters)]}
        if exchange.path.endswith("/load_lora_adapter"):
            if exchange.body["lora_name"] in self.adapters:
                return 400, {"error": {"message": "already loaded"}}
            self.adapters[exchange.body["lora_name"]] = exchange.body["lora_path"]
        elif exchange.path.endswith("/unload_lora_adapter") and not self.adapters.pop(exchange.body["lora_name"], None):
            return 404, {"error": {"message": "cannot be found"}}
        return 200, "Success"


ADAPTERS = pytest.mark.parametrize(("kind", "prefix"), [(VllmAdapters, "/v1"), (SglangAdapters, "")])


@pytest.mark.anyio
@ADAPTERS
async def test_each_version_has_a_name_and_the_one_before_stays(
    tmp_path: Path, kind: Callable[..., Publisher], prefix: str
) -> None:
    fake = FakeServer("other", "other-v9", "world-model-v07")
    async with serve(fake) as url, Server(url) as server:
        publisher = kind(server)
        for version in (1, 2, 3):
            await publisher.publish(version, tmp_path / str(version))
        mine = {name: path for name, path in fake.adapters.items() if path != "/before"}
        assert mine == {f"world-model-v{version}": str(tmp_path / str(version)) for version in (2, 3)}
        assert {path for path, _ in fake.told} == {
            "/v1/models",
            f"{prefix}/load_lora_adapter",
            f"{prefix}/unload_lora_adapter",
        }
        # A trainer that was restarted: the same version again, then an older one.
        await publisher.publish(3, tmp_path / "again")
        assert (fake.adapters["world-model-v3"], fake.adapters["world-model-v2"]) == (
            str(tmp_path / "again"),
            str(tmp_path / "2"),
        )
        await publisher.publish(1, tmp_path / "1")
        assert versions("world-model", fake.adapters) == [1]
        await kind(server, "other").publish(10, tmp_path)
    assert set(fake.adapters) == {"other", "other-v9", "other-v10", "world-model-v07", "world-model-v1"}


@pytest.mark.anyio
@ADAPTERS
async def test_what_will_not_pass_is_said_with_the_remedy(
    tmp_path: Path, kind: Callable[..., Publisher], prefix: str
) -> None:
    fake = FakeServer()
    async with serve(fake) as url, Server(url) as server:

        async def refused(status: int, reply: Any) -> str:
            fake.refusals = {f"{prefix}/load_lora_adapter": (status, reply)}
            with pytest.raises(InputError) as error:
                await kind(server).publish(1, tmp_path)
            assert "\n" not in str(error.value)
            return str(error.value)

        message = await refused(404, {"detail": "Not Found"})
        assert message.startswith(f"server {url}: 404 Not Found; start it with --enable-lora")
        assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in message) == (kind is VllmAdapters)
        assert "400 LoRA is off" in await refused(400, {"success": False, "error_message": "LoRA is off"})
        for why in ("LoRA is not enabled. Use --enable-lora", "LoRA rank 64 is greater than max_lora_rank 16"):
            assert why in await refused(500, {"error": {"message": f"Call to add_lora method failed: {why}"}})

        fake.refusals = {f"{prefix}/load_lora_adapter": (503, {"error": "Restarting"})}
        with pytest.raises(PolicyError, match="503 Restarting"):
            await kind(server).publish(1, tmp_path)
    with pytest.raises(PolicyError, match="Connect call failed"):
        async with Server(url) as server:
            await kind(server).publish(1, tmp_path)


@pytest.mark.anyio
async def test_whole_weights_on_vllm(tmp_path: Path) -> None:
    fake = FakeServer()
    async with serve(fake) as url, Server(url) as server:
        await VllmWeights(server).publish(1, tmp_path)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        done = [
            ("/v1/models", None),
            ("/pause?mode=keep", None),
            ("/collective_rpc", reload),
            ("/reset_prefix_cache?reset_running_requests=true", None),
            ("/resume", None),
        ]
        assert fake.told == done

        # Whatever happens, the server does not stay paused.
        fake.told, fake.refusals = [], {"/collective_rpc": (500, {"error": {"message": "No such file"}})}
        with pytest.raises(PolicyError, match="No such file"):
            await VllmWeights(server).publish(2, tmp_path)
        assert fake.told[-1] == ("/resume", None)

        fake.refusals = {"/pause?mode=keep": (404, {"detail": "Not Found"})}
        with pytest.raises(InputError, match="404 Not Found; start it with VLLM_SERVER_DEV_MODE=1"):
            await VllmWeights(server).publish(2, tmp_path)


@pytest.mark.anyio
async def test_whole_weights_on_sglang(tmp_path: Path) -> None:
    fake = FakeServer()
    async with serve(fake) as url, Server(url) as server:
        await SglangWeights(server).publish(7, tmp_path)
        update = ("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "7"})
        assert fake.told == [("/v1/models", None), update]
        fake.refusals = {"/update_weights_from_disk": (400, {"success": False, "message": "No weights there"})}
        with pytest.raises(InputError, match="400 No weights there; start it with"):
            await SglangWeights(server).publish(8, tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [VllmAdapters, SglangAdapters, VllmWeights, SglangWeights])
async def test_a_server_that_hangs_is_found_before_it_is_told_anything(
    tmp_path: Path, kind: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("obsspec.policies.http._ANSWER_SECONDS", 0.1)
    asked: list[str] = []

    async def hang(exchange: Exchange) -> None:
        asked.append(exchange.path)
        await anyio.sleep_forever()

    async with serve(hang) as url, Server(url) as server:
        with anyio.fail_after(10), pytest.raises(PolicyError, match="TimeoutError"):
            await kind(server).publish(1, tmp_path)
    assert asked == ["/v1/models"]


@pytest.mark.anyio
async def test_a_server_that_hangs_on_what_it_is_told_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("obsspec.policies.http._TELL_SECONDS", 0.1)
    fake = FakeServer()

    async def hang(exchange: Exchange) -> None:
        await (anyio.sleep_forever() if exchange.path == "/v1/load_lora_adapter" else fake(exchange))

    async with serve(hang) as url, Server(url) as server:
        with anyio.fail_after(10), pytest.raises(PolicyError, match="TimeoutError"):
            await VllmAdapters(server).publish(1, tmp_path)


def test_versions_count() -> None:
    names = (
        "world-model-v9",
        "world-model-v10",
        "world-model",
        "world-model-v1a",
        "a.c-v2",
        "abc-v3",
        "world-model-v٣",
    )
    assert versions("world-model", names) == [9, 10]
    assert newest("world-model", names) == "world-model-v10"
    assert newest("a.c", names) == "a.c-v2"
    assert newest(None, names) == "world-model-v10"
    assert newest("policy", names) == "policy"  # which may come
    assert newest(None, ["base", "world-model"]) == "world-model"
    assert newest(None, ["base", "other"]) == "base"
    assert newest(None, []) is None
