"""What verl needs to run the policy that comes with the package: a server that runs it, and what its messages mean."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from typing import Any

import ray
import torch
from scripted import Endpoint
from transformers import AutoModelForCausalLM
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.workers.rollout.replica import TokenOutput

from obsspec.chat import ChatFormat, TerminalChat
from obsspec.integrations.verl_sandbox import SandboxAgentLoop
from obsspec.types import Action, Generation

LONGEST = 80


@ray.remote(num_cpus=0)
class Server(Endpoint):
    """Samples from a model. The seed is the prompt's, so that a prompt is always continued alike."""

    def __init__(self, model: str) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    async def answer(self, prompt: list[int], sampling: dict[str, Any], priority: int) -> TokenOutput:
        cancelled = threading.Event()
        try:
            return await asyncio.to_thread(self._sample, prompt, sampling["temperature"], cancelled)
        finally:
            cancelled.set()

    @torch.inference_mode()
    def _sample(self, prompt: list[int], temperature: float, cancelled: threading.Event) -> TokenOutput:
        seed = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed))
        end = self._model.generation_config.eos_token_id
        tokens, logprobs, read, cache = list[int](), list[float](), prompt, None
        while len(tokens) < LONGEST and not cancelled.is_set():
            output = self._model(torch.tensor([read]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            likely = torch.log_softmax(output.logits[0, -1] / temperature, dim=-1)
            token = int(torch.multinomial(likely.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(likely[token]))
            read = [token]
            if token == end:
                break
        return TokenOutput(token_ids=tokens, log_probs=logprobs, stop_reason="completed")


@ToolParser.register("fenced")
class FencedCommands(ToolParser):
    """A message's one fenced command is a call of the shell."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._chat = TerminalChat(ChatFormat(tokenizer))

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: list[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        generation = Generation(tuple(responses_ids), finish="stop")
        step, text = self._chat.parse(generation), self._chat.text(generation)
        if not isinstance(step, Action):
            return text, []
        return text, [FunctionCall(name="shell", arguments=json.dumps({"command": step.command}))]


class Loop(SandboxAgentLoop):
    """Where verl finds this module, and so how messages are read."""
