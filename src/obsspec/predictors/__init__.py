"""Whatever guesses observations: rules, memory, a language model, and combinations of them."""

from obsspec.predictors.cascade import Cascade
from obsspec.predictors.harness import SANDBOX, Harness
from obsspec.predictors.language_model import LanguageModel, Limits, Prompts
from obsspec.predictors.memory import Memory
from obsspec.predictors.oracle import Oracle, recorded
from obsspec.predictors.rules import Rules
from obsspec.predictors.timeouts import TimeOuts

__all__ = [
    "SANDBOX",
    "Cascade",
    "Harness",
    "LanguageModel",
    "Limits",
    "Memory",
    "Oracle",
    "Prompts",
    "Rules",
    "TimeOuts",
    "recorded",
]
