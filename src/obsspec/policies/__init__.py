"""Whatever samples the next tokens."""

from typing import Literal

Precision = Literal["int8", "float32", "bfloat16"]
"""Of a local policy's weights. It stands here because the command line needs it without PyTorch."""
