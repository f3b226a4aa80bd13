"""JaxLamina: LLM decoding with model-attention disaggregation on JAX.

A model is cut at its attention operators; a compute pool runs the slices and holds the weights, a memory
pool holds the KV and runs attention (the Lamina papers, 2024 and 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlamina.errors import UserError
    from jaxlamina.llm import LLM
    from jaxlamina.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxlamina.sampling import SamplingParams
    from jaxlamina.structured import StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "UserError",
    "__version__",
]

_HOMES = {
    "CompletionOutput": "jaxlamina.outputs",
    "LLM": "jaxlamina.llm",
    "Logprob": "jaxlamina.outputs",
    "RequestOutput": "jaxlamina.outputs",
    "SamplingParams": "jaxlamina.sampling",
    "StructuredOutputs": "jaxlamina.structured",
    "UserError": "jaxlamina.errors",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: `jaxlamina --help` and `jaxlamina doctor` need no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
