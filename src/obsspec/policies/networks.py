"""From token ids to next-token logits, in process, on a CPU.

A network reads a sequence chunk by chunk and keeps what attention needs of it (keys and values) in a ``Memory`` that
the caller owns. ``HubNetwork`` runs any Hugging Face causal model with the model's own weights. ``Int8Llama`` runs the
Llama family with eight-bit weights and is the fast one: fetching the weights is what a CPU spends decoding on.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer

from obsspec.errors import InputError
from obsspec.models import DEFAULT_CACHE, load_model
from obsspec.policies import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from obsspec.context import Tokens


class Memory(Protocol):
    """What a network keeps of the tokens that it has read."""

    @property
    def bytes(self) -> int:
        """Size of the tensors held."""

    @property
    def croppable(self) -> bool:
        """Whether ``fork`` can leave out the last tokens; recurrent and sliding-window layers cannot."""

    def fork(self, length: int) -> Memory:
        """An independent memory of the first ``length`` tokens; of all of them, where it is not croppable."""


class Network(Protocol):
    """Reads tokens and predicts the next. Calls for different memories may run in different threads at once."""

    def memory(self) -> Memory:
        """A memory of no tokens."""

    def read(self, tokens: Tokens, memory: Any) -> Tensor:
        """Append ``tokens``, at least one, to a memory of this network.

        Returns the float32 logits, shape (vocabulary,), of the token that follows them.
        """


def load_network(
    name: str, adapter: str | Path | None = None, precision: Precision = "int8", cache: Path = DEFAULT_CACHE
) -> tuple[Network, PreTrainedTokenizerBase]:
    """A network for a ``LocalPolicy``, and its tokenizer; the arguments are those of ``load_model``.

    ``int8`` is the fastest on a CPU and is for Llama models; ``bfloat16`` is slow on processors without instructions
    for it. Raises InputError as ``load_model`` does.
    """
    if precision != "int8":
        model, tokenizer = load_model(name, adapter, precision, cache)
        return HubNetwork(model), tokenizer
    model, tokenizer = load_model(name, adapter, "float32", cache)
    return Int8Llama(model), tokenizer


class HubNetwork:
    """Any Hugging Face causal language model, through its own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval()
        # Renamed in transformers 5.24; the old name warns at every call there.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def memory(self) -> HubMemory:
        return HubMemory(self._model.config)

    def read(self, tokens: Tokens, memory: HubMemory) -> Tensor:
        ids = torch.tensor([tokens], device=self._model.device)
        cache = {self._cache_argument: memory.cache}
        logits: Tensor = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache).logits[0, -1]
        return logits.float()


class HubMemory:
    """The model's own cache, of whatever kinds its layers want."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.cache = DynamicCache(config=config)
        self.cache.layers = [_GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.cache.layers]

    @property
    def bytes(self) -> int:
        values = (value for layer in self.cache.layers for value in vars(layer).values() if isinstance(value, Tensor))
        storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, values)}
        return sum(storages.values())

    @property
    def croppable(self) -> bool:
        return all(isinstance(layer, _GrowingLayer) for layer in self.cache.layers)

    def fork(self, length: int) -> HubMemory:
        twin = HubMemory(self._config)
        twin.cache.layers = [
            layer.fork(length) if isinstance(layer, _GrowingLayer) else copy.deepcopy(layer)
            for layer in self.cache.layers
        ]
        return twin


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """Keys and values with room to grow: the plain layer copies all its past for every new token."""

    keys: Tensor
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        end = start + keys.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.key_room, self.value_room = _room(keys, end), _room(values, end)
        if end > self.key_room.shape[-2]:
            self.key_room, self.value_room = _grown(self.keys, end), _grown(self.values, end)
        self.key_room[..., start:end, :] = keys
        self.value_room[..., start:end, :] = values
        self.keys, self.values = self.key_room[..., :end, :], self.value_room[..., :end, :]
        return self.keys, self.values

    def fork(self, length: int) -> _GrowingLayer:
        twin = _GrowingLayer()
        if self.is_initialized and length:
            twin.update(self.keys[..., :length, :], self.values[..., :length, :])
        return twin


def _room(like: Tensor, length: int) -> Tensor:
    """An uninitialised tensor shaped like ``like``, for ``length`` and some more in the last dimension but one."""
    return like.new_empty((*like.shape[:-2], -(-(length + 1) // 256) * 256, like.shape[-1]))


def _grown(past: Tensor, length: int) -> Tensor:
    """A copy of ``past`` with room for at least ``length``."""
    room = _room(past, length)
    room[..., : past.shape[-2], :] = past
    return room


class Int8Llama:
    """A Llama with eight-bit weights, one scale a row, and activations in about fourteen bits.

    Written for one sequence on one CPU thread: projections of the same input are one matrix, keys and values are
    written in place, and no framework code runs between the layers. Raises InputError for other architectures.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        if type(model).__name__ != "LlamaForCausalLM" or config.attention_bias or config.mlp_bias:
            raise InputError(
                f"precision int8 is for Llama models without biases, not {type(model).__name__}; "
                "use float32 or bfloat16"
            )
        rotary = model.model.rotary_emb
        if rotary.rope_type not in ("default", "linear", "llama3", "yarn"):
            raise InputError(f"precision int8 cannot do rotary embeddings of type {rotary.rope_type}; use float32")
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise InputError("precision int8 needs an x86 processor; use float32 or bfloat16")
        self._head_size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._key_heads = int(config.num_key_value_heads)
        self._query_heads = int(config.num_attention_heads)
        self._frequencies = rotary.inv_freq.float()
        self._score_scale = torch.tensor(self._head_size**-0.5)
        self._rotary_scale = torch.tensor(float(rotary.attention_scaling))
        self._embedding = model.model.embed_tokens.weight.detach()
        self._layers = [_Int8Layer(layer, self._head_size) for layer in model.model.layers]
        self._norm = _Norm(model.model.norm)
        self._head = _Int8Matrix(model.lm_head.weight)

    def memory(self) -> LlamaMemory:
        return LlamaMemory(torch.empty(len(self._layers), 2, self._key_heads, 0, self._head_size))

    def read(self, tokens: Tokens, memory: LlamaMemory) -> Tensor:
        start, end = memory.length, memory.length + len(tokens)
        layers_past = memory.extended(len(tokens))
        angles = torch.outer(torch.arange(start, end, dtype=torch.float32), self._frequencies)
        rotation = torch.polar(self._rotary_scale.expand_as(angles), angles).unsqueeze(1)
        mask = None
        if len(tokens) > 1:
            mask = torch.full((len(tokens), end), -torch.inf).triu_(start + 1)
        hidden = self._embedding[torch.tensor(tokens)].float()
        for layer, past in zip(self._layers, layers_past, strict=True):
            hidden = hidden + self._attend(layer, layer.attention_norm(hidden), past, rotation, mask)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate).mul_(up))
        return self._head(self._norm(hidden[-1:]))[0]

    def _attend(self, layer: _Int8Layer, hidden: Tensor, past: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of (tokens, width) to ``past`` and to itself; writes keys and values at the end of ``past``."""
        count = len(hidden)
        end = past.shape[-2]
        heads = layer.query_key_value(hidden).view(count, -1, self._head_size)
        rotated, values = heads.split([self._query_heads + self._key_heads, self._key_heads], dim=1)
        rotated = torch.view_as_real(torch.view_as_complex(rotated.unflatten(-1, (-1, 2))) * rotation).flatten(-2)
        queries, keys = rotated.split([self._query_heads, self._key_heads], dim=1)
        past[0, :, end - count :] = keys.transpose(0, 1)
        past[1, :, end - count :] = values.transpose(0, 1)
        # Query heads that share a key head become more rows of one product.
        grouped = queries.transpose(0, 1).reshape(self._key_heads, -1, self._head_size)
        scores = torch.matmul(grouped, past[0].transpose(1, 2)).mul_(self._score_scale)
        if mask is not None:
            scores.view(self._key_heads, -1, count, end).add_(mask)
        mixed = torch.matmul(scores.softmax(-1), past[1])
        return layer.output(mixed.view(self._query_heads, count, -1).transpose(0, 1).reshape(count, -1))


class LlamaMemory:
    """Keys and values of all layers in one tensor: (layers, 2, key heads, tokens, head size)."""

    def __init__(self, past: Tensor) -> None:
        self.length = past.shape[-2]
        self._room = _grown(past, self.length)

    @property
    def bytes(self) -> int:
        return int(self._room.nbytes)

    @property
    def croppable(self) -> bool:
        return True

    def fork(self, length: int) -> LlamaMemory:
        return LlamaMemory(self._room[..., :length, :])

    def extended(self, count: int) -> tuple[Tensor, ...]:
        """For each layer its keys and values, the last ``count`` tokens of which are to be filled in."""
        end = self.length + count
        if end > self._room.shape[-2]:
            self._room = _grown(self._room[..., : self.length, :], end)
        self.length = end
        return tuple(self._room[..., :end, :].unbind())


class _Int8Layer:
    """One decoder layer's weights."""

    def __init__(self, layer: Any, head_size: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        query, key = (_interleaved(matrix.weight, head_size) for matrix in (attention.q_proj, attention.k_proj))
        self.query_key_value = _Int8Matrix(torch.cat([query, key, attention.v_proj.weight]))
        self.output = _Int8Matrix(attention.o_proj.weight)
        self.gate_up = _Int8Matrix(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.down = _Int8Matrix(mlp.down_proj.weight)
        self.attention_norm = _Norm(layer.input_layernorm)
        self.mlp_norm = _Norm(layer.post_attention_layernorm)


def _interleaved(weight: Tensor, head_size: int) -> Tensor:
    """Rows reordered so that the two coordinates that a rotary embedding turns together are neighbours.

    They are then the parts of one complex number. Queries and keys are reordered alike, so their products stay.
    """
    return weight.view(-1, 2, head_size // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


class _Norm:
    """Root-mean-square normalisation, x / sqrt(mean(x^2) + epsilon) * weight, in four operations."""

    def __init__(self, norm: Any) -> None:
        width = norm.weight.numel()
        self._weight = norm.weight.detach().float() * width**0.5
        self._least = torch.tensor((width * float(norm.variance_epsilon)) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        return (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._least)).mul_(self._weight)


class _Int8Matrix:
    """``x @ weight.T`` with the weight in eight bits and ``x`` in about fourteen.

    The kernel takes ``x`` in seven bits, which alone ruins a small language model. But for few rows its time is that
    of fetching the weight, whatever it does with it. So ``x`` goes in as two rows, its rounded value and 126 times the
    rest, and comes out as their sum. Rows have scales of their own: none depends on its neighbours.
    """

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach().float()
        scales = weight.abs().amax(1).clamp_min(1e-12).double() / 127
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor, torch.quantize_per_channel", UserWarning)
            quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        engine = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"  # the engine that has the kernel used below
        try:
            self._weight = torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = engine

    def __call__(self, x: Tensor) -> Tensor:
        scale = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).add_(_TINY).div_(_LEVELS)
        scaled = x / scale
        rounded = scaled.round()
        rows = torch.cat([rounded, scaled.sub_(rounded).mul_(_REFINEMENT)])
        # Scale 1 and zero point 64: the kernel rounds to whole numbers in -63..63, for which its sums cannot overflow.
        high, low = _INT8_PRODUCT(rows, 1.0, 64, self._weight).chunk(2)
        return high.add_(low.div_(_REFINEMENT)).mul_(scale)


# As tensors, because a Python number costs a conversion at each use.
_TINY, _LEVELS, _REFINEMENT = torch.tensor(1e-30), torch.tensor(63.0), torch.tensor(126.0)
_INT8_PRODUCT = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
