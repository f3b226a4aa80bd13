"""JaxLamina: LLM decoding with model-attention disaggregation on JAX.

A model is cut at its attention operators; a compute pool runs the slices and holds the weights, a memory
pool holds the KV and runs attention (the Lamina papers, 2024 and 2025).

    from jaxlamina import LLM, SamplingParams

    llm = LLM("smollm2-135m-instruct")
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)

- `LLM`: a model ready to write. `generate`, `chat` and `stream` take prompts; `help(jaxlamina.LLM)` lists its
  options.
- `FlaxModel`: a model of yours, in plain JAX or Flax, for `LLM`.
- `SamplingParams`: how a text is chosen: temperature, max_tokens, stop, n, logprobs, beam search and more.
- `StructuredOutputs`: what all of a text must be: a JSON schema, a regex, a choice.
- `RequestOutput`, `CompletionOutput`, `Logprob`: what comes back.
- `UserError`: what is raised for input that cannot be served, in one line that says what to do.

All else in this package is how they are made. The command line is `jaxlamina --help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlamina.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxlamina.errors import UserError
    from jaxlamina.flax_model import FlaxModel
    from jaxlamina.llm import LLM
    from jaxlamina.sampling.params import SamplingParams
    from jaxlamina.sampling.structured import StructuredOutputs

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "FlaxModel",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "UserError",
    "__version__",
]

_HOMES = {
    "CompletionOutput": "jaxlamina.engine.outputs",
    "FlaxModel": "jaxlamina.flax_model",
    "LLM": "jaxlamina.llm",
    "Logprob": "jaxlamina.engine.outputs",
    "RequestOutput": "jaxlamina.engine.outputs",
    "SamplingParams": "jaxlamina.sampling.params",
    "StructuredOutputs": "jaxlamina.sampling.structured",
    "UserError": "jaxlamina.errors",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: `jaxlamina --help` and `jaxlamina doctor` need no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, for `help` and completion; they are imported when they are looked at."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
