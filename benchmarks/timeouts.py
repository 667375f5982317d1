"""What predicting time-outs saves: the engine and its gate in virtual time, with the tool times of a real agent.

    python benchmarks/timeouts.py --json timeouts.json

Tools and generations take as long as in the lab's workload ``local-exec`` (mini-swe-agent on Terminal-Bench, a limit of
30 s that 8.6 % of the calls ran into), drawn for each call on its own, so that commands do not tell which will be slow.
No observation is ever predicted but that of a time-out, with nothing printed before. The bound is an oracle that knows
from the start which commands will run out of time, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random

import trio
import trio.testing
from rich.console import Console
from rich.table import Table

from obsspec import Draft, Observation, Query, Sampling, Settings, Speculator, Task, Trajectory, rollouts
from obsspec.analysis.savings import Source
from obsspec.context import Tokens
from obsspec.predictors import TimeOuts
from obsspec.testing import ScriptedChat, ScriptedEnvironment, ScriptedPolicy, decode
from obsspec.types import Predictor

ROLLOUTS, TURNS, LIMIT = 64, 12, 30.0
TOKENS = 4
"""Of a generation, which take as long together as the real one did."""
TEXT = "(no output)\n[timed out after 30 s]"


class Foreseen:
    """Knows which commands will run out of time: their first letter says so."""

    async def predict(self, query: Query, propose: Callable[[Draft], None]) -> None:
        if query.command.startswith("s"):
            propose(Draft(f"@{TEXT}", 1.0, "oracle"))

    async def prepare(self, query: Query) -> None:
        pass

    def learn(self, query: Query, observation: Observation) -> None:
        pass


def run(predictor: Predictor | None, seed: int) -> tuple[float, int, int]:
    """Mean agent latency of a rollout in seconds, how many commands timed out, and how many of those were hits."""
    source = Source.of("local-exec")

    def uniform(kind: str, rollout: int, turn: int) -> float:
        return Random(f"{seed}/{kind}/{rollout}/{turn}").random()

    def seconds(rollout: int, turn: int) -> float:
        return source.tool_seconds(uniform("tool", rollout, turn))

    def place(context: Tokens) -> tuple[int, int]:
        """Rollout and turn."""
        text = decode(context)
        return int(text.split("\n")[0]), text.count("@")

    def write(context: Tokens, _: int) -> str:
        return ("s" if seconds(*place(context)) >= LIMIT else "f") + "a" * (TOKENS - 2)

    def token_seconds(context: Tokens, position: int) -> float:
        return source.generation_seconds(uniform("generation", *place(context))) / TOKENS

    def execute(rollout: int, turn: int) -> Observation:
        took = seconds(rollout, turn)
        return Observation(f"@{TEXT}", LIMIT, timed_out=True) if took >= LIMIT else Observation(f"@{turn}", took, 0)

    settings = Settings(Sampling(max_tokens=TOKENS), depth=int(predictor is not None), max_turns=TURNS)
    speculator = Speculator(ScriptedPolicy(write, token_seconds), ScriptedChat(), predictor, settings)
    jobs = [(Task(str(number), str(number)), number) for number in range(ROLLOUTS)]

    def environment(task: Task):
        number = int(task.id)
        return ScriptedEnvironment(lambda executed: execute(number, len(executed) - 1)).open(task)

    async def main() -> list[Trajectory]:
        return await rollouts(speculator, jobs, environment, ROLLOUTS)

    trajectories = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    slow = [turn for turn in turns if turn.observation and turn.observation.timed_out]
    latency = statistics.mean(trajectory.seconds for trajectory in trajectories)
    return latency, len(slow), sum(turn.outcome == "hit" for turn in slow)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="sets of rollouts; each starts without knowledge")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    table = Table("predictor", "latency s", "saved", "lowest", "highest", "hits", "of time-outs")
    base = [run(None, seed)[0] for seed in range(arguments.seeds)]
    for name, make in (("none", None), ("timeouts", TimeOuts), ("known before", Foreseen)):
        results = [run(make and make(), seed) for seed in range(arguments.seeds)]
        saved = [1 - own[0] / without for own, without in zip(results, base, strict=True)]
        row = {
            "predictor": name,
            "latency": statistics.median(own[0] for own in results),
            "saved": statistics.median(saved),
            "lowest": min(saved),
            "highest": max(saved),
            "hits": sum(own[2] for own in results),
            "time_outs": sum(own[1] for own in results),
        }
        rows.append(row)
        shares = (f"{row[key]:.1%}" for key in ("saved", "lowest", "highest"))
        table.add_row(name, f"{row['latency']:.1f}", *shares, f"{row['hits']}", f"{row['time_outs']}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rollouts": ROLLOUTS, "turns": TURNS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
