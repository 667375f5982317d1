"""Writes ObsSpec's tasks as verl's data: train.parquet and test.parquet.

Which agent loop runs them is not in the data, but verl's own setting (`agent.default_agent_loop`), so that the same
files serve with speculation and without.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from obsspec.errors import InputError
from obsspec.tasks import Instance, parse_instances

SYSTEM = "You work in a Linux shell. Run commands until the task is done and you have seen that it is; then say so."


def row(instance: Instance, index: int, split: str) -> dict[str, Any]:
    task = instance.task
    return {
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.instruction}],
        "data_source": "obsspec",
        # The task's own check rewards a sample, in its sandbox.
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"task": f"generated:{task.id}", "index": index, "split": split},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default="generated:all/easy,medium/0-99", help="tasks, as for `obsspec rollout`")
    parser.add_argument("--test", default="generated:all/easy,medium/5000-5003", help="the same, to evaluate on")
    parser.add_argument("--output", type=Path, required=True, help="directory for both files")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        try:
            instances = parse_instances(getattr(arguments, split))
        except InputError as error:
            parser.error(f"--{split}: {error}")
        rows = [row(instance, index, split) for index, instance in enumerate(instances)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), arguments.output / f"{split}.parquet")
        print(f"{len(rows)} tasks in {arguments.output / split}.parquet")


if __name__ == "__main__":
    main()
