"""What the agent loop for verl hides and costs in verl's own workers, and what the lab predicts for the same times.

    .venv-verl/bin/python benchmarks/verl_loop.py --json verl_loop.json      (`make environments` makes .venv-verl)

Two workers of verl's with a rollout server that writes by a script. verl's own loop and ours run the same samples,
interleaved, several times; ratios are of one repeat.

hides: no sample waits for a seat. Tools take 0.5 s on average; two thirds of the commands print what they printed
before, which memory learns in a first batch that does not count, and one third what nobody knows. Target: at least
80 % of the seconds that the lab hides, where the drafts are exact as often.

costs: four times as many samples as the server has seats, and no command prints what it printed before, so that
every draft is wrong. Target: at most 2 % more time for the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import ray
from hydra import compose, initialize_config_module
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle

from obsspec.integrations.verl import SpeculativeAgentLoopManager
from obsspec.lab.run import simulate
from obsspec.lab.workload import validated

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
import tiny  # noqa: E402

ROLLOUT = "actor_rollout_ref.rollout"
TURNS, GENERATION_SECONDS, PROMPTS, OF_EACH, SEATS = 8, 0.5, 4, 8, 8
TOOL_SECONDS = [round(0.5 * random.Random(place).lognormvariate(-0.32, 0.8), 3) for place in range(64)]


@ray.remote(num_cpus=0)
class Server:
    """Writes commands by the tokens of the prompt, each in the same time, so many at once, the most urgent first."""

    def __init__(self, model: str, seats: int | None, known: float) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._free = seats
        self._known = known
        self._waiting: list[tuple[int, int, asyncio.Event]] = []
        self._came = count()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, priority: int = 0, **media: Any
    ) -> TokenOutput:
        text = self._tokenizer.decode(prompt_ids)
        turn, chosen = text.count("<|im_start|>assistant"), random.Random(text.partition("assistant")[0])
        kinds = [chosen.random() < self._known for _ in range(TURNS)]
        seconds = chosen.sample(TOOL_SECONDS, TURNS)
        async with self._seat(priority):
            await asyncio.sleep(GENERATION_SECONDS)
        message = "That is all."
        if turn <= TURNS:
            command = f"{seconds[turn - 1]} {'known' if kinds[turn - 1] else 'unknown'} {turn}"
            call = {"name": "shell", "arguments": {"command": command}}
            message = f"<tool_call>{json.dumps(call)}</tool_call>"
        tokens = self._tokenizer.encode(f"{message}<|im_end|>", add_special_tokens=False)
        return TokenOutput(token_ids=tokens, log_probs=[0.0] * len(tokens), stop_reason="completed", num_preempted=0)

    @asynccontextmanager
    async def _seat(self, priority: int) -> AsyncIterator[None]:
        if self._free is None:
            yield
            return
        granted = asyncio.Event()
        place = (priority, next(self._came), granted)
        heapq.heappush(self._waiting, place)
        self._grant()
        try:
            await granted.wait()
            yield
        finally:
            if granted.is_set():
                self._free += 1
            else:
                self._waiting.remove(place)
                heapq.heapify(self._waiting)
            self._grant()

    def _grant(self) -> None:
        assert self._free is not None
        while self._free and self._waiting:
            heapq.heappop(self._waiting)[2].set()
            self._free -= 1


class Verl:
    def __init__(self, model: str, loops: Path, seats: int | None, known: float) -> None:
        settings = [
            *(f"actor_rollout_ref.model.path={model}", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.mode=async"),
            *(f"{ROLLOUT}.scheduling_policy=priority", f"{ROLLOUT}.calculate_log_probs=true"),
            *(f"{ROLLOUT}.prompt_length=600", f"{ROLLOUT}.response_length=4000", f"{ROLLOUT}.agent.num_workers=2"),
            f"{ROLLOUT}.multi_turn.function_tool_path={HERE / 'verl_tools.py'}",
            f"{ROLLOUT}.agent.agent_loop_config_path={loops}",
        ]
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", settings)
        self._server = Server.remote(model, seats, known)  # Kept, or Ray would end it.
        client = LLMServerClient(config, get_router_handle({"server": self._server}))
        self._manager = SpeculativeAgentLoopManager.create(config, client)

    def seconds(self, agent: str) -> tuple[float, dict[str, float]]:
        """Of a batch, and what our loop counted of it."""
        rows = [(prompt, each) for prompt in range(PROMPTS) for each in range(OF_EACH)]
        columns: dict[str, list[Any]] = {
            "raw_prompt": [[{"role": "user", "content": f"Do task {prompt}."}] for prompt, _ in rows],
            "agent_name": [agent] * len(rows),
            "index": [prompt for prompt, _ in rows],
        }
        arrays = {name: np.fromiter(values, dtype=object, count=len(rows)) for name, values in columns.items()}
        batch = DataProto.from_dict(tensors={}, non_tensors=arrays)
        began = time.perf_counter()
        came = self._manager.generate_sequences(batch)
        took = time.perf_counter() - began
        counted = came.non_tensor_batch
        return took, {name: float(sum(each)) for name, each in counted.items() if name.startswith("obsspec_")}


def compared(verl: Verl, repeats: int) -> tuple[float, dict[str, float]]:
    """Ours to verl's own, the median; and what ours counted in all repeats."""
    verl.seconds("obsspec")
    verl.seconds("tool_agent")
    ratios, figures = [], dict[str, float]()
    for _ in range(repeats):
        own, _ = verl.seconds("tool_agent")
        ours, counted = verl.seconds("obsspec")
        ratios.append(ours / own)
        figures = {name: figures.get(name, 0.0) + value for name, value in counted.items()}
    return statistics.median(ratios), figures


def predicted(accuracy: float) -> float:
    """The share of the tools' seconds that the lab hides."""
    content = {
        "turns": TURNS,
        "rollouts": PROMPTS * OF_EACH,
        "schedule": "obsspec",
        "depth": 1,
        "tool": {"seconds": {"recorded": TOOL_SECONDS}},
        "generation": {"seconds": GENERATION_SECONDS},
        "predictor": {"accuracy": accuracy, "delay_seconds": 0.0, "concentration": 0.01},
        "server": {"step_seconds": 0.02, "step_seconds_per_sequence": 0.0},
    }
    figures = simulate(validated(content, "this benchmark"))
    return figures.hidden_seconds / figures.tool_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as scratch:
        tiny.tokenizer().save_pretrained(scratch)
        tiny.llama(vocab_size=len(tiny.tokenizer())).save_pretrained(scratch)  # verl reads its configuration.
        loops = Path(scratch) / "loops.yaml"
        loops.write_text("- {name: obsspec, _target_: obsspec.integrations.verl.SpeculativeToolAgentLoop}\n")
        hides, hidden = compared(Verl(scratch, loops, seats=None, known=0.664), arguments.repeats)
        costs, lost = compared(Verl(scratch, loops, seats=SEATS, known=0.0), arguments.repeats)
    ray.shutdown()
    exact = hidden["obsspec_hits"] / hidden["obsspec_tool_calls"]
    measured, foretold = hidden["obsspec_hidden_seconds"] / hidden["obsspec_tool_seconds"], predicted(exact)
    table = Table("", "batch, of verl's own", "hits of calls", "hidden", "the lab's", "of that")
    shares = [f"{measured:.1%}", f"{foretold:.1%}", f"{measured / foretold:.2f}"]
    table.add_row("hides", f"{hides:.3f}", f"{exact:.1%}", *shares)
    table.add_row("costs", f"{costs:.3f}", f"{lost['obsspec_hits'] / lost['obsspec_tool_calls']:.1%}", "", "", "")
    Console().print(table)
    if arguments.json:
        figures = {"hides": hidden | {"ratio": hides, "predicted": foretold}, "costs": lost | {"ratio": costs}}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
