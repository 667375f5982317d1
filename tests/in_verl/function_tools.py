"""Tools of verl's functional kind: they sleep for a while, and answer by their arguments."""

import asyncio
import random

from verl.tools.function_tool import function_tool


@function_tool
async def shell(command: str) -> str:
    """Runs a command.

    Args:
        command: The command to run.
    """
    await asyncio.sleep(random.uniform(0.0, 0.04))
    if "fail" in command:
        raise RuntimeError(f"{command} has failed")
    return f"ran {command}\n" * (40 if "long" in command else 1)


@function_tool
def lookup(name: str, most: int) -> dict:
    """Looks a name up.

    Args:
        name: The name.
        most: Most results.
    """
    return {"name": name, "results": list(range(most))}
