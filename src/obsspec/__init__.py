"""ObsSpec: observation speculation for the rollouts of tool-using agents.

While a tool runs, a predictor drafts what it will print and the policy generates on the draft; the work is kept only
if draft and observation are exactly equal. See `Speculator` for a loop of your own, `rollouts` for whole tasks.
"""

from obsspec.budget import Seats
from obsspec.context import Context, Segment, Tokens
from obsspec.errors import InputError
from obsspec.gate import Bet, ExpectedValue, Gate, Threshold
from obsspec.rollout import Failure, rollout, rollouts
from obsspec.speculation import Rollout, Settings, Speculator
from obsspec.types import (
    Action,
    Chat,
    Chunk,
    Done,
    Draft,
    Environment,
    Exchange,
    Generation,
    Malformed,
    Observation,
    Policy,
    PolicyError,
    Predictor,
    Query,
    Request,
    Sampling,
    Task,
    Trajectory,
    Turn,
)

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Bet",
    "Chat",
    "Chunk",
    "Context",
    "Done",
    "Draft",
    "Environment",
    "Exchange",
    "ExpectedValue",
    "Failure",
    "Gate",
    "Generation",
    "InputError",
    "Malformed",
    "Observation",
    "Policy",
    "PolicyError",
    "Predictor",
    "Query",
    "Request",
    "Rollout",
    "Sampling",
    "Seats",
    "Segment",
    "Settings",
    "Speculator",
    "Task",
    "Threshold",
    "Tokens",
    "Trajectory",
    "Turn",
    "rollout",
    "rollouts",
]
