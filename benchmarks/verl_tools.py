"""The tool of verl_loop.py: a command such as ``0.35 known 3`` takes that long, and always prints the same."""

import asyncio
import random

from verl.tools.function_tool import function_tool


@function_tool
async def shell(command: str) -> str:
    """Runs a command.

    Args:
        command: The command to run.
    """
    seconds, kind, _ = command.split()
    await asyncio.sleep(float(seconds))
    return f"printed by {command}" if kind == "known" else str(random.random())
