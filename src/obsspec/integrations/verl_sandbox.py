"""Our sandbox in verl: a shell as its tool, one for each sample, and the task's own reward.

The tool is in verl's file of tools (``multi_turn.tool_config_path``), the loop in its file of agent loops:

    tools:
      - class_name: obsspec.integrations.verl_sandbox.Shell
        config: {type: native}

    - name: obsspec_sandbox
      _target_: obsspec.integrations.verl_sandbox.SandboxAgentLoop

A row of the dataset says in ``extra_info.task`` which task its sample is, as `obsspec.tasks.parse_tasks` has it:
``generated:logs/easy/3``, or the directory of one.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from functools import cache
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from obsspec.environments.sandbox import open_sandbox
from obsspec.errors import InputError
from obsspec.integrations.verl import SpeculativeToolAgentLoop
from obsspec.tasks import parse_tasks
from obsspec.types import Environment, Task

_log = logging.getLogger(__name__)

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command in a bash that stays open, and says what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}


class _Room:
    """The sandbox of a sample."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._one_at_a_time = asyncio.Lock()
        self.broken: Exception | None = None

    async def execute(self, command: str) -> str:
        async with self._one_at_a_time:
            try:
                return (await self._environment.execute(command)).text
            except Exception as error:
                self.broken = error
                raise

    async def score(self) -> float | None:
        """None where the sandbox has broken."""
        if self.broken is None:
            try:
                return await self._environment.score()
            except Exception as error:
                self.broken = error
        return None


_room: ContextVar[_Room] = ContextVar("_room")
"""Of the sample whose loop is running."""


class Shell(BaseTool):  # type: ignore[misc]
    """The sandbox's shell, for samples of `SandboxAgentLoop`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        """``tool_schema``: another name or description for it, where the policy knows it by those."""
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(_SCHEMA))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """See verl. What it returns is what the policy reads, but for verl's own cut."""
        command = parameters.get("command")
        if not isinstance(command, str):
            return ToolResponse(text=f"{self.name}: give a command"), 0.0, {}
        return ToolResponse(text=await _room.get().execute(command)), 0.0, {}


class SandboxAgentLoop(SpeculativeToolAgentLoop):
    """Runs each sample in a sandbox of its own, and has the task's check reward it.

    A sample whose sandbox breaks is rewarded with 0, and none of its tokens is learned from: verl would otherwise end
    the whole batch.
    """

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """See verl. Raises InputError where the row names no task, or this machine cannot run sandboxes."""
        async with open_sandbox(_task(kwargs.get("extra_info"))) as environment:
            room = _Room(environment)
            _room.set(room)
            output = await super().run(sampling_params, priority=priority, **kwargs)
            reward = await room.score()
        if reward is None:
            _log.warning("agent loop obsspec: a sandbox broke, so its sample teaches nothing: %s", room.broken)
            output.response_mask = [0] * len(output.response_mask)
        output.reward_score = reward or 0.0
        return output


def _task(extra_info: Any) -> Task:
    name = extra_info.get("task") if isinstance(extra_info, dict) else None
    if not isinstance(name, str):
        raise InputError(
            "agent loop obsspec: a row of the dataset has no extra_info.task, such as generated:logs/easy/3"
        )
    return _parsed(name)


@cache
def _parsed(name: str) -> Task:
    tasks = parse_tasks(name)
    if len(tasks) != 1:
        raise InputError(f"agent loop obsspec: extra_info.task {name}: is {len(tasks)} tasks; give one")
    return tasks[0]
