"""A shell whose sandbox breaks."""

from pathlib import Path
from typing import Any

from verl.tools.schemas import ToolResponse

from obsspec.integrations import verl_sandbox


class Shell(verl_sandbox.Shell):
    """Once, for whichever sample calls it first while the file ``config["broken"]`` is not there."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if self._is_first():
            verl_sandbox._room.get()._environment._process.kill()  # type: ignore[attr-defined]
        return await super().execute(instance_id, parameters, **kwargs)

    def _is_first(self) -> bool:
        try:
            Path(self.config["broken"]).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
