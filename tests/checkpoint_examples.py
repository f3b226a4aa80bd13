"""Small models, Hugging Face folders and tokenizers that the tests of weights and tokenizers share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from jaxlamina.models import ModelConfig, random_params
from jaxlamina.models.config_files import model_config
from jaxlamina.text.tokenizer import Tokenizer
from jaxlamina.weights import open_checkpoint
from jaxlamina.weights.convert import _write_side_files
from jaxlamina.weights.safetensors_io import write_safetensors
from jaxlamina.weights.sources import InMemoryModel

LLAMA = {
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
PHI3 = {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5, "pad_token_id": 0}
GRANITE = {
    **LLAMA,
    "model_type": "granite",
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "num_hidden_layers": 4, "tie_word_embeddings": True}
GEMMA = {**LLAMA, "model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True}
GEMMA2 = {
    **GEMMA,
    "model_type": "gemma2",
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 16,
}
GEMMA3 = {
    **GEMMA,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 32,
    "num_hidden_layers": 7,
    "sliding_window": 16,
    "rope_theta": 1000000.0,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 288,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 64,
    "eos_token_id": 2,
}


def host_params(hf: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of a model; norms and biases are random too, so that none can be mixed up."""
    drawn = random_params(ModelConfig.from_hf(hf), seed, jnp.float32)
    rng = np.random.default_rng(seed)
    return {
        name: np.array(x) if x.ndim > 1 else rng.normal(1.0, 0.3, x.shape).astype(np.float32)
        for name, x in drawn.items()
    }


def write_folder(
    folder: Path,
    hf: dict[str, Any],
    params: dict[str, np.ndarray],
    *,
    n_shards: int = 1,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """A Hugging Face folder written with the safetensors package, not with ours."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if n_shards == 1:
        save_file(params, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        weight_map: dict[str, str] = {}
        names = list(params)
        for i in range(n_shards):
            file = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
            part = {name: params[name] for name in names[i::n_shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def byte_tokens() -> list[str]:
    """GPT-2's stand-in character of every byte, byte b at place b (written out from its definition)."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = iter(range(256, 512))
    return [chr(b) if b in visible else chr(next(unseen)) for b in range(256)]


def byte_model(**changes: Any) -> InMemoryModel:
    """`LLAMA` with ``changes`` and random weights, which reads and writes bytes."""
    config = ModelConfig.from_hf(LLAMA | changes)
    return InMemoryModel(config, random_params(config, seed=1), Tokenizer(byte_tokenizer()))


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level tokenizer without merges: id = byte; 256 and 257 are special."""
    inner = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(byte_tokens())}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    return inner


def tiny_words_folder(folder: Path, max_position_embeddings: int) -> Path:
    """A Hugging Face folder, and its shape as tiny.toml, of a model with two layers, random weights and 64
    words."""
    (folder / "tiny.toml").write_text(
        'model_type = "llama"\nvocab_size = 64\nhidden_size = 32\nintermediate_size = 64\nnum_hidden_layers '
        "= 2\nnum_attention_heads = 4\nnum_key_value_heads = 2\nrms_norm_eps = 1e-5\nrope_theta = 10000.0\n"
        f'max_position_embeddings = {max_position_embeddings}\nhidden_act = "silu"\ntie_word_embeddings = '
        f"true\n"
    )
    config = model_config(folder / "tiny.toml")
    params = random_params(config, 0, "float32")
    shapes = {name: tuple(array.shape) for name, array in params.items()}
    write_safetensors(folder, shapes, iter(params.items()), np.dtype("float32"), 10**9)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return folder


def few_layers_folder(folder: Path, n_layers: int = 3) -> Path:
    """A Hugging Face folder of the demo model's first layers, its words and its template: what it writes means
    little, and its programs are made in a fraction of the time."""
    checkpoint = open_checkpoint("smollm2-135m-instruct")
    config = checkpoint.config.with_layers(n_layers)
    params = {
        name: array
        for name, array in checkpoint.host_tensors("float32", None)
        if not (layer := re.match(r"model\.layers\.(\d+)\.", name)) or int(layer[1]) < n_layers
    }
    shapes = {name: tuple(array.shape) for name, array in params.items()}
    write_safetensors(folder, shapes, iter(params.items()), np.dtype("float32"), 10**9)
    _write_side_files(folder, checkpoint, "float32")
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder
