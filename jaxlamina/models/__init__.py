"""Models: what they look like (`ModelConfig`), what they compute (`Decoder`, `apply`), what they are made of.

Every model is a flat dict of arrays under Hugging Face tensor names and a pure function over it.
"""

from jaxlamina.models.config import ModelConfig
from jaxlamina.models.decoder import Decoder, abstract_params, apply, random_params
from jaxlamina.models.rope_config import RopeConfig

__all__ = ["Decoder", "ModelConfig", "RopeConfig", "abstract_params", "apply", "random_params"]
