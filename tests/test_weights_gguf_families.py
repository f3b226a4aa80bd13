"""GGUF files of the families whose tensor names, metadata or stored norms are their own, written with the gguf
package as llama.cpp's converter writes them."""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import numpy as np
import pytest
from checkpoint_examples import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GRANITE,
    LLAMA,
    MIXTRAL,
    PHI3,
    QWEN3_MOE,
    SMOLLM3,
    byte_tokens,
    host_params,
    write_folder,
)
from gguf import GGMLQuantizationType as Q
from test_weights_gguf import SIZES, config_of, write_gguf

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig
from jaxlamina.weights import open_checkpoint
from jaxlamina.weights.expert_stacks import unstacked
from jaxlamina.weights.gguf_file import read_gguf
from jaxlamina.weights.gguf_io import hf_config
from jaxlamina.weights.gguf_tokenizer import tokenizer_from_gguf

GRANITE_META = {
    "ARCH.attention.scale": 0.015625,
    "ARCH.embedding_scale": 12.0,
    "ARCH.residual_scale": 0.22,
    "ARCH.logit_scale": 8.0,
    "ARCH.rope.dimension_count": 16,
    "ARCH.vocab_size": 288,
}
MIXTRAL_META = {"ARCH.expert_count": 4, "ARCH.expert_used_count": 2, "ARCH.rope.dimension_count": 16}
QWEN3_MOE_META = {
    "ARCH.expert_count": 6,
    "ARCH.expert_used_count": 2,
    "ARCH.expert_feed_forward_length": 32,
}
GEMMA2_META = {
    "ARCH.attn_logit_softcapping": 50.0,
    "ARCH.final_logit_softcapping": 30.0,
    "ARCH.attention.sliding_window": 16,
}


@pytest.mark.parametrize(
    ("hf", "meta"),
    [
        (GRANITE, GRANITE_META),
        (SMOLLM3, {"ARCH.rope.dimension_count": 16}),
        (PHI3, {"ARCH.rope.dimension_count": 8, "ARCH.attention.sliding_window": 0}),
        (GEMMA, {}),
        (MIXTRAL, MIXTRAL_META),
        (QWEN3_MOE, QWEN3_MOE_META),
        (GEMMA2, GEMMA2_META),
        (GEMMA3, {"ARCH.attention.sliding_window": 16}),
    ],
    ids=lambda x: x.get("model_type", ""),
)
def test_families_with_metadata_of_their_own(tmp_path, hf, meta):
    params = host_params(hf)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", hf, params, meta=meta))
    wanted = hf | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if hf is PHI3:
        wanted["original_max_position_embeddings"] = 128
    assert checkpoint.config == ModelConfig.from_hf(wanted)
    loaded = checkpoint.load()
    assert loaded.keys() == params.keys()
    for name, x in params.items():
        if "gemma" in hf["model_type"] and name.endswith("norm.weight"):
            np.testing.assert_allclose(np.asarray(loaded[name]), x, rtol=0, atol=3e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(np.asarray(loaded[name]), x, err_msg=name)


def test_phi3_in_blocks_comes_apart_at_its_rows(tmp_path):
    hf = PHI3 | SIZES
    params = host_params(hf)
    path = write_gguf(
        tmp_path / "m.gguf", hf, params, quantise=lambda name, w: Q.Q8_0 if w.ndim == 2 else Q.F32
    )
    for name, x in open_checkpoint(path).load().items():
        stored = gguf.dequantize(gguf.quantize(params[name], Q.Q8_0), Q.Q8_0) if x.ndim == 2 else params[name]
        np.testing.assert_array_equal(np.asarray(x), stored, err_msg=name)


@pytest.mark.parametrize(("hf", "meta"), [(MIXTRAL, MIXTRAL_META), (QWEN3_MOE, QWEN3_MOE_META)])
def test_experts_of_a_gguf_file_are_those_of_the_folder(tmp_path, hf, meta):
    params = host_params(hf)
    held = dict(unstacked(ModelConfig.from_hf(hf), params.items()))
    folder = open_checkpoint(write_folder(tmp_path / "m", hf, held))
    file = open_checkpoint(write_gguf(tmp_path / "m.gguf", hf, params, meta=meta))
    wanted, found = folder.load(), file.load()
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(x), err_msg=name)


def test_quantised_experts(tmp_path):
    hf = MIXTRAL | SIZES
    params = host_params(hf)
    path = write_gguf(
        tmp_path / "m.gguf",
        hf,
        params,
        meta=MIXTRAL_META | {"ARCH.rope.dimension_count": 64},
        quantise=lambda name, w: Q.Q8_0 if w.ndim > 1 else Q.F32,
    )
    loaded = open_checkpoint(path).load()
    for name in (n for n in params if "experts" in n):
        stored = gguf.dequantize(gguf.quantize(params[name], Q.Q8_0), Q.Q8_0)
        np.testing.assert_array_equal(np.asarray(loaded[name]), stored, err_msg=name)


def test_longrope_of_phi3(tmp_path):
    meta = {
        "ARCH.rope.scaling.original_context_length": 32,
        "ARCH.rope.scaling.attn_factor": 1.25,
        "ARCH.rope.dimension_count": 8,
    }
    extra = {
        "rope_factors_short.weight": np.array([1, 1.1, 1.2, 1.3], np.float32),
        "rope_factors_long.weight": np.array([1, 2, 4, 8.5], np.float32),
    }
    config = config_of(tmp_path, PHI3, meta, extra)
    rope = config.rope
    assert (rope.rope_type, rope.factor, rope.attention_factor) == ("longrope", 4.0, 1.25)
    assert (rope.short_factor, rope.long_factor) == ((1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 4.0, 8.5))
    assert (rope.original_max_position_embeddings, config.max_length) == (32, 32)
    del extra["rope_factors_short.weight"]
    with pytest.raises(UserError, match="rope_factors_short.weight is missing"):
        config_of(tmp_path, PHI3, meta, extra)


def test_what_llamacpp_knows_of_gemma_and_no_key_says(tmp_path):
    assert config_of(tmp_path, GEMMA2, GEMMA2_META).attention_scale == 32**-0.5
    largest = {"num_hidden_layers": 46, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    assert config_of(tmp_path, GEMMA2 | largest, GEMMA2_META).attention_scale == 2**-0.5
    window = {"ARCH.attention.sliding_window": 16}
    config = config_of(tmp_path, GEMMA3, window)
    assert config.windows == (16,) * 5 + (None, 16)
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert config_of(tmp_path, GEMMA3).windows == (None,) * 7
    given = window | {"ARCH.attention.sliding_window_pattern": [True, False] * 3 + [True]}
    scaled = given | {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 8.0}
    config = config_of(tmp_path, GEMMA3, scaled | {"ARCH.rope.freq_base_swa": 5e3})
    assert config.windows == (16, None) * 3 + (16,)
    assert (config.rope.factor, config.local_rope.factor, config.local_rope.theta) == (8.0, 1.0, 5e3)


@pytest.mark.parametrize(
    ("hf", "meta", "problem"),
    [
        (GRANITE, {"ARCH.rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned=False"),
        (GRANITE, {"ARCH.attention.sliding_window": 16}, "granite.attention.sliding_window=16"),
        (SMOLLM3, {"ARCH.attention.sliding_window": 16}, "smollm3.attention.sliding_window=16"),
        (GRANITE, {"ARCH.expert_count": 8}, "granite.expert_count=8"),
        (MIXTRAL, {"ARCH.expert_count": 4}, "llama.expert_used_count is missing"),
        (QWEN3_MOE, {}, "qwen3moe.expert_count is missing"),
        (QWEN3_MOE, QWEN3_MOE_META | {"ARCH.expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale=2.5"),
        (GEMMA3, {"ARCH.attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping=50.0"),
        (GEMMA, {"ARCH.rope.dimension_count": 16}, "must equal the head size 32"),
    ],
)
def test_metadata_that_another_family_reads_is_an_error(tmp_path, hf, meta, problem):
    with pytest.raises(UserError, match=problem):
        config_of(tmp_path, hf, meta)


YARN_META = {
    "ARCH.rope.scaling.type": "yarn",
    "ARCH.rope.scaling.factor": 4.0,
    "ARCH.rope.scaling.original_context_length": 64,
    "ARCH.rope.scaling.attn_factor": 1.5,
    "ARCH.rope.scaling.yarn_beta_fast": 32.0,
    "split.count": 1,
}
VOCABULARY = {
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [*byte_tokens(), "<s>", "</s>", *(f"t{i}" for i in range(30))],
    "tokenizer.ggml.token_type": [1] * 256 + [3, 3] + [1] * 30,
    "tokenizer.ggml.merges": ["t h"],
    "tokenizer.ggml.scores": [float(-i) for i in range(288)],
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
STRANGE = ["abc", "", -1, 0, 3, 2**63, float("nan"), float("inf"), -1.5, 0.0, 1e39, True, False]
STRANGE += [[], [1], ["a", "b"], [1.5, 2.5], [True, False], [2**40] * 2]


@pytest.mark.parametrize(
    ("hf", "meta"),
    [
        (LLAMA, YARN_META | VOCABULARY | {"tokenizer.ggml.model": "gpt2"}),
        (LLAMA, YARN_META | VOCABULARY | {"tokenizer.ggml.model": "llama"}),
        (GRANITE, GRANITE_META),
        (PHI3, {"ARCH.rope.dimension_count": 8, "ARCH.attention.sliding_window": 16}),
        (MIXTRAL, MIXTRAL_META),
        (QWEN3_MOE, QWEN3_MOE_META),
        (GEMMA2, GEMMA2_META),
        (GEMMA3, {"ARCH.attention.sliding_window": 16, "ARCH.rope.freq_base_swa": 1e4}),
        (GEMMA3, {"ARCH.attention.sliding_window": 16, "ARCH.attention.sliding_window_pattern": 6}),
    ],
)
def test_a_strange_value_of_any_key_is_one_line_or_none(tmp_path, hf, meta):
    file = read_gguf(write_gguf(tmp_path / "m.gguf", hf, host_params(hf), meta=meta))
    n_refused = 0
    for key in file.metadata:
        for value in STRANGE:
            changed = replace(file, metadata=file.metadata | {key: value})
            try:
                config = ModelConfig.from_hf(hf_config(changed))
                if "tokenizer.ggml.model" in meta:
                    tokenizer_from_gguf(changed.metadata, "m.gguf").encode("hello")
                assert math.isfinite(config.norm_eps), (key, value)
            except UserError as error:
                assert "\n" not in str(error) and len(str(error)) < 1000, (key, value)
                n_refused += 1
    assert n_refused > 9 * len(file.metadata) / 2


def test_a_value_of_another_type_names_its_key(tmp_path):
    meta = {"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.factor": "four"}
    with pytest.raises(
        UserError, match=r"m\.gguf: llama.rope.scaling.factor is 'four' \(Expected float, got"
    ):
        config_of(tmp_path, LLAMA, meta)
