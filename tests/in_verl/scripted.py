"""verl as it is, from its manager of agent loops down to the actors of its servers, which follow a script."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle

from obsspec.integrations.verl import SpeculativeAgentLoopManager

HERE = Path(__file__).parent
TRAINING = HERE.parents[1] / ".venv" / "bin"
"""Of the environment that trains, and makes models: verl's has Transformers that are too old for that."""
ROLLOUT = "actor_rollout_ref.rollout"

COMMANDS = ["ls", "ls -l long", "cat a.txt", "make fail", "wc -c a.txt"]


class Endpoint:
    """What verl asks of a server's actor. ``answer`` is what differs."""

    running = 0
    """Requests."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        priority: int = 0,
        **media: Any,
    ) -> TokenOutput:
        self.running += 1
        try:
            return await self.answer(prompt_ids, sampling_params, priority)
        finally:
            self.running -= 1

    async def answer(self, prompt: list[int], sampling: dict[str, Any], priority: int) -> TokenOutput:
        raise NotImplementedError

    async def now(self) -> int:
        """Requests that are running."""
        return self.running


@ray.remote(num_cpus=0)
class Server(Endpoint):
    """Stands for a server of the policy: what it writes depends on the prompt and on nothing else."""

    def __init__(self, model: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._seconds = 0.01
        self.figures = {"requests": 0, "aborted": 0, "speculative": 0}

    async def answer(self, prompt: list[int], sampling: dict[str, Any], priority: int) -> TokenOutput:
        figures = self.figures
        figures["requests"] += 1
        figures["speculative"] += priority > 0
        try:
            # verl's own complaints name the tools' module by where this directory is: that is to change nothing.
            seen = re.sub(r"_verl_function\w+", "", self._tokenizer.decode(prompt))
            chosen = random.Random(json.dumps([seen, sampling], sort_keys=True))
            tokens = self._tokenizer.encode(self._message(prompt, chosen), add_special_tokens=False)
            await asyncio.sleep(self._seconds * random.uniform(0.5, 1.5))
        except asyncio.CancelledError:
            figures["aborted"] += 1
            raise
        logprobs = [-chosen.random() for _ in tokens]
        return TokenOutput(
            token_ids=tokens,
            log_probs=logprobs,
            stop_reason="completed",
            num_preempted=1,
            extra_fields={"global_steps": len(prompt) // 300},
        )

    async def take(self, seconds: float) -> None:
        """From now on, for a generation."""
        self._seconds = seconds

    async def counted(self) -> dict[str, int]:
        return self.figures

    def _message(self, prompt: list[int], chosen: random.Random) -> str:
        turns = self._tokenizer.decode(prompt).count("<|im_start|>assistant")
        kind = chosen.random()
        shell = {"name": "shell", "arguments": {"command": f"{chosen.choice(COMMANDS)} {turns}"}}
        if turns > 5 or kind < 0.1:
            return "That is all.<|im_end|>"
        if kind < 0.15:
            return 'Odd.<tool_call>{"name": "shell", "arguments": "{"}</tool_call><|im_end|>'
        if kind < 0.2:
            return 'Unknown.<tool_call>{"name": "teapot", "arguments": {}}</tool_call><|im_end|>'
        if kind < 0.3:
            other = {"name": "lookup", "arguments": {"name": "x", "most": chosen.randrange(3)}}
            return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in (shell, other)) + "<|im_end|>"
        if kind < 0.5:
            shell = {"name": "diary", "arguments": {"note": f"note {turns}"}}
        return f"Next.<tool_call>{json.dumps(shell)}</tool_call><|im_end|>"


class Verl:
    """verl's manager with two workers, and two servers of the kind above. It takes some 20 s to start."""

    def __init__(self, model: str, loops: str, *settings: str, server: Any = Server) -> None:
        """``settings``: verl's own, as on its command line. ``server``: another kind of server."""
        with initialize_config_module("verl.trainer.config", version_base=None):
            self.config = compose(
                "ppo_trainer",
                [
                    f"actor_rollout_ref.model.path={model}",
                    f"{ROLLOUT}.name=vllm",
                    f"{ROLLOUT}.mode=async",
                    f"{ROLLOUT}.scheduling_policy=priority",
                    f"{ROLLOUT}.prompt_length=600",
                    f"{ROLLOUT}.response_length=2400",
                    f"{ROLLOUT}.calculate_log_probs=true",
                    f"{ROLLOUT}.multi_turn.max_parallel_calls=2",
                    f"{ROLLOUT}.multi_turn.tool_config_path={HERE}/tools.yaml",
                    f"{ROLLOUT}.multi_turn.function_tool_path={HERE}/function_tools.py",
                    f"{ROLLOUT}.agent.num_workers=2",
                    f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
                    *settings,
                ],
            )
        self.servers = [server.remote(model) for _ in range(2)]
        router = get_router_handle({f"server{place}": actor for place, actor in enumerate(self.servers)})
        self.client = LLMServerClient(self.config, router)
        self.manager = SpeculativeAgentLoopManager.create(self.config, self.client)

    def samples(self, agent: str, prompts: int, of_each: int, task: str = "") -> DataProto:
        """What verl makes of so many samples. ``task``: of each of them, for agents that want one."""
        rows = [(prompt, each) for prompt in range(prompts) for each in range(of_each)]
        return self.run(
            agent,
            raw_prompt=[[{"role": "user", "content": f"Do task {prompt}."}] for prompt, _ in rows],
            extra_info=[{"task": task}] * len(rows),
            index=[prompt for prompt, _ in rows],
            tools_kwargs=[{"diary": {"create_kwargs": {"sample": f"{prompt}.{each}"}}} for prompt, each in rows],
        )

    def run(self, agent: str, **columns: list[Any]) -> DataProto:
        """What verl makes of such rows of a dataset, a sample of each."""
        columns["agent_name"] = [agent] * len(columns["index"])
        arrays = {name: _objects(values) for name, values in columns.items()}
        return self.manager.generate_sequences(DataProto.from_dict(tensors={}, non_tensors=arrays))

    def take(self, seconds: float) -> None:
        """So long takes a generation from now on, on average."""
        ray.get([server.take.remote(seconds) for server in self.servers])

    def counted(self) -> dict[str, int]:
        """The servers' own figures, summed."""
        figures = ray.get([server.counted.remote() for server in self.servers])
        return {name: sum(each[name] for each in figures) for name in figures[0]}


def figures(samples: DataProto) -> dict[str, float]:
    return {name: sum(values) for name, values in samples.non_tensor_batch.items() if name.startswith("obsspec_")}


def assert_equal(plain: DataProto, ahead: DataProto) -> None:
    """Every field of every sample but the name of the loop, and what ours counts."""
    assert plain.batch.keys() == ahead.batch.keys()
    for name in plain.batch.keys():  # noqa: SIM118 -- a TensorDict iterates over rows
        assert torch.equal(plain.batch[name], ahead.batch[name]), name
    assert (
        ahead.non_tensor_batch.keys() - figures(ahead).keys() == plain.non_tensor_batch.keys() - figures(plain).keys()
    )
    for name in plain.non_tensor_batch.keys() - figures(plain).keys() - {"agent_name"}:
        assert np.array_equal(plain.non_tensor_batch[name], ahead.non_tensor_batch[name]), name


def assert_idle(verl: Verl) -> None:
    """No server goes on with what nobody waits for."""
    for _ in range(100):
        if not any(ray.get([server.now.remote() for server in verl.servers])):
            return
        time.sleep(0.05)
    raise AssertionError("a server still generates")


def _objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
