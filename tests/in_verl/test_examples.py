"""The examples, without their GPUs: verl reads every setting as its own, and the commands have the flags they use."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import pytest
import typer
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.tools.tool_registry import initialize_tools_from_config
from verl.trainer import main_ppo, main_ppo_v0
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn

from obsspec.cli import app
from obsspec.integrations.verl import Speculation
from obsspec.integrations.verl_sandbox import SandboxAgentLoop, Shell, _task

EXAMPLES = Path(__file__).parents[2] / "examples"
VERL = EXAMPLES / "verl"
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))


@dataclass(frozen=True)
class Launched:
    """What verl would have run."""

    config: DictConfig
    runner: object


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the data of a few tasks in it."""
    directory = tmp_path_factory.mktemp("run")
    tasks = ("--train", "generated:logs,text/easy/0-1", "--test", "generated:logs/easy/9")
    subprocess.run([sys.executable, VERL / "dataset.py", *tasks, "--output", directory], check=True)
    return directory


@pytest.fixture(scope="module", autouse=True)
def variables(directory: Path) -> Iterator[None]:
    """As launch.sh sets them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OBSSPEC_EXAMPLE", str(VERL))
        patch.setenv("OBSSPEC_RUN", str(directory))
        patch.setenv("OBSSPEC_WORLD_MODELS", "http://node1:8001,http://node2:8001")
        patch.setenv("OBSSPEC_TRANSITIONS", "http://node1:8100")
        yield


@pytest.fixture(scope="module", params=["one_node", "two_nodes"])
def launched(request: pytest.FixtureRequest, base: str, directory: Path, variables: None) -> Launched:
    """By verl's own entry, which composes and checks all settings, up to where it would ask Ray for GPUs."""
    came: list[Launched] = []
    with pytest.MonkeyPatch.context() as patch:
        overrides = (f"actor_rollout_ref.model.path={base}", f"hydra.run.dir={directory / 'hydra'}")
        patch.setattr(sys, "argv", ["main_ppo", "--config-path", str(VERL), "--config-name", request.param, *overrides])
        patch.setattr(
            main_ppo, "run_ppo", lambda config, task_runner_class: came.append(Launched(config, task_runner_class))
        )
        main_ppo.main()
    return came[0]


def test_verl_takes_it(launched: Launched) -> None:
    config = launched.config
    OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    parts = [config.algorithm, *(config.actor_rollout_ref[name] for name in ("model", "actor", "rollout"))]
    algorithm, _, actor, rollout = map(omega_conf_to_dataclass, parts)
    assert algorithm.adv_estimator == "grpo"
    assert rollout.n == actor.rollout_n == 16
    assert rollout.multi_turn.max_assistant_turns == 32
    # The manager of the trainer before version 1, which is the one that is run.
    assert issubclass(load_class_from_fqn(rollout.agent.agent_loop_manager_class, ""), AgentLoopManager)
    assert launched.runner is main_ppo_v0.TaskRunner


def test_its_sizes_go_together(launched: Launched) -> None:
    config = launched.config
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    batch, gpus = config.data.train_batch_size, config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert batch % rollout.agent.num_workers == 0, "workers take whole groups"
    assert batch % actor.ppo_mini_batch_size == 0
    assert actor.ppo_mini_batch_size * rollout.n % gpus == 0
    assert rollout.prompt_length + rollout.response_length <= actor.ppo_max_token_len_per_gpu


@pytest.mark.parametrize("name", ["common", "one_node", "two_nodes"])
def test_verl_knows_every_key(name: str) -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        defaults = compose("ppo_trainer")
    config = OmegaConf.to_container(OmegaConf.load(VERL / f"{name}.yaml"))
    unknown = list(_unknown({key: config[key] for key in config.keys() - {"hydra", "defaults"}}, defaults))
    assert not unknown
    assert list(_unknown({"trainer": {"nodes": 2}, "algorithm": {"adv": "grpo"}}, defaults)) == ["nodes", "adv"]


def _unknown(config: dict[str, Any], defaults: DictConfig) -> Iterator[str]:
    """Keys that are neither among verl's defaults nor fields of what verl makes of them."""
    fields = hydra.utils.get_class(defaults._target_).__dataclass_fields__ if "_target_" in defaults else {}
    for key, value in config.items():
        if key not in defaults and key not in fields:
            yield key
        elif isinstance(value, dict) and defaults[key]:  # What is empty there is free.
            yield from _unknown(value, defaults[key])


def test_its_tools_and_loops_are_ours(launched: Launched) -> None:
    rollout = launched.config.actor_rollout_ref.rollout
    (shell,) = initialize_tools_from_config(rollout.multi_turn.tool_config_path)
    assert isinstance(shell, Shell)
    loops = {}
    for entry in OmegaConf.load(rollout.agent.agent_loop_config_path):
        keys = OmegaConf.to_container(entry, resolve=True)
        name, target = keys.pop("name"), keys.pop("_target_")
        assert hydra.utils.get_class(target) is SandboxAgentLoop
        loops[name] = Speculation(**keys)
    assert loops[rollout.agent.default_agent_loop].world_model == "http://node1:8001,http://node2:8001"
    assert loops["plain"] == Speculation(depth=0)


def test_its_rows_say_which_task_they_are(launched: Launched) -> None:
    data, model = launched.config.data, omega_conf_to_dataclass(launched.config.actor_rollout_ref.model)
    train, test = (
        create_rl_dataset(files, data, model.tokenizer, None) for files in (data.train_files, data.val_files)
    )
    assert (len(train), len(test)) == (4, 1)
    for index in range(len(train)):
        row = train[index]
        task = _task(row["extra_info"])
        assert row["raw_prompt"][-1] == {"role": "user", "content": task.instruction}
        assert row["index"] == index
        assert "agent_name" not in row, "the loop could not be chosen in the configuration"
    assert _task(test[0]["extra_info"]).id == "logs/easy/9"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_commands_have_the_flags_they_use(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text().replace("\\\n", " ")
    lines = re.findall(r'^(?:.* )?(?:obsspec|"\$cotraining") ((?:rollout|world-model) .*) &$', text, re.MULTILINE)
    assert lines
    for line in lines:
        command: Any = typer.main.get_command(app)
        words = [word for word in shlex.split(line) if word != "$@"]
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(script.name, words)
