"""A tool of verl's other kind, which has a state."""

import asyncio
import random
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Diary(BaseTool):
    """Answers by the sample that it is called for, and by how far that has come; each call is rewarded."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return kwargs["create_kwargs"]["sample"], ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        await asyncio.sleep(random.uniform(0.0, 0.03))
        messages = len(kwargs["agent_data"].messages)
        return ToolResponse(text=f"{parameters['note']} of {instance_id} after {messages}"), 0.5, {}
