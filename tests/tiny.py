"""Models and tokenizers small enough to make on the spot, of the same kinds as real ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = ["user\n\n\n  assistant\n\nls -l the file\n    done ```bash\n```", "  \n\n a  b   c\n\n"] * 20


def tokenizer(chat_template: str = CHATML, vocab_size: int = 330) -> Any:
    """A byte-level tokenizer with a few merges, newlines and spaces among them, and three control tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    core.add_tokens([AddedToken("<think>", special=False)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
    )


def llama(**changes: Any) -> Any:
    """A Llama of random weights, wide enough apart that its samples vary."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes))).eval()
