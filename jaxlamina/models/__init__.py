"""Models: what they look like (`ModelConfig`), what they compute (`Decoder`, `apply`), what they are made of.

Every model is a flat dict of arrays under Hugging Face tensor names and a pure function over it. What a model
looks like can be read without JAX, which is imported with what it computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxlamina.models.config import ModelConfig
from jaxlamina.models.rope_config import RopeConfig

if TYPE_CHECKING:
    from jaxlamina.models.decoder import Decoder, abstract_params, apply, random_params

__all__ = ["Decoder", "ModelConfig", "RopeConfig", "abstract_params", "apply", "random_params"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxlamina.models import decoder

    return getattr(decoder, name)
