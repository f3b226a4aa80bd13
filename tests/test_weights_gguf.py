"""GGUF files written here with the gguf package: every quantisation, both row orders, metadata, broken files.

K-quant blocks are checked against the block layout written out by hand from ggml-quants.c (`k_block`), not
only against the package that the loader itself calls.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_examples import LLAMA, QWEN2, QWEN3, host_params
from gguf import GGMLQuantizationType as Q
from hypothesis import given
from hypothesis import strategies as st

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig
from jaxlamina.weights import open_checkpoint
from jaxlamina.weights.fused import fused
from jaxlamina.weights.gguf_file import SUPPORTED, decoder, read_gguf

HIDDEN, FFN = 256, 512  # K-quants come in blocks of 256
SIZES = {"hidden_size": HIDDEN, "intermediate_size": FFN, "vocab_size": 96}

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
EXPERT_STACKS = {
    f"model.layers.{i}.mlp.experts.{m}_proj": f"blk.{i}.ffn_{m}_exps.weight"
    for i in range(2)
    for m in ("gate", "up", "down")
}
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN_NAMES = {
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gemma2": FOUR_NORMS,
    "gemma3": FOUR_NORMS,
}


def gguf_name(name: str, arch: str = "llama") -> str:
    if name in EXPERT_STACKS:
        return EXPERT_STACKS[name]
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{(GGUF_NAMES | OWN_NAMES.get(arch, {}))[part]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def llamacpp_permute(w: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k (LlamaModel.permute in
    convert_hf_to_gguf.py)."""
    return w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(path, hf, params, *, quantise=None, meta=None, extra=None, permute=True):
    """A llama.cpp file of a Hugging Face model: metadata as its converter names it, q and k permuted for
    what its converter makes as it makes llama, 1 added to the norms of Gemma."""
    arch = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}.get(
        hf["model_type"], hf["model_type"]
    )
    if "num_experts_per_tok" not in hf:
        params = fused(ModelConfig.from_hf(hf), params)
    writer = gguf.GGUFWriter(path, arch)
    writer.data_alignment = (meta or {}).get("general.alignment", 32)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    if "head_dim" in hf:
        writer.add_key_length(hf["head_dim"])
        writer.add_value_length(hf["head_dim"])
    for key, value in (meta or {}).items():
        key = key.replace("ARCH", arch)
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, w in (params | (extra or {})).items():
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            w = w + 1
        if permute and arch in ("llama", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
            w = llamacpp_permute(w, hf["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        kind = quantise(name, w) if quantise else Q.F32
        target = name if name in (extra or {}) else gguf_name(name, arch)
        if kind is Q.F32:
            writer.add_tensor(target, np.ascontiguousarray(w, np.float32))
        elif kind is Q.F16:
            writer.add_tensor(target, w.astype(np.float16))
        else:
            writer.add_tensor(target, packed(w, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed(w: np.ndarray, kind: Q) -> np.ndarray:
    try:
        return gguf.quantize(np.ascontiguousarray(w), kind)
    except NotImplementedError:  # K-quants: the package cannot make them, so blocks are drawn
        return random_blocks(kind, w.shape, int(abs(w).sum() * 1000))


def random_blocks(kind: Q, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Raw blocks with random contents and scales that are finite numbers."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (int(np.prod(shape)) // block, block_bytes), dtype=np.uint8)
    scales = {Q.Q2_K: (80, 84), Q.Q3_K: (108, 110), Q.Q6_K: (208, 210), Q.IQ4_NL: (0, 2)}.get(kind, (0, 4))
    n = (scales[1] - scales[0]) // 2
    raw[:, slice(*scales)] = rng.uniform(0.001, 0.01, (len(raw), n)).astype(np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], shape[-1] // block * block_bytes)


def k_block(kind: Q, b: bytes) -> list[float]:
    """One 256-element block of a K-quant, element by element, as dequantize_row_q*_K in ggml-quants.c reads
    it."""

    def half(i: int) -> np.float32:
        return np.frombuffer(b[i : i + 2], np.float16)[0].astype(np.float32)

    def scale_and_min(j: int, q: bytes) -> tuple[int, int]:  # get_scale_min_k4
        if j < 4:
            return q[j] & 63, q[j + 4] & 63
        return (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4)

    out: list[float] = [0.0] * 256
    if kind is Q.Q6_K:
        low, high, scales, d = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8), half(208)
        for n in range(2):
            for i in range(32):
                for quarter in range(4):
                    nibble = low[64 * n + i + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
                    q = nibble | ((high[32 * n + i] >> (2 * quarter) & 3) << 4)
                    scale = scales[8 * n + i // 16 + 2 * quarter]
                    out[128 * n + 32 * quarter + i] = d * np.float32(scale) * np.float32(q - 32)
        return out
    if kind is Q.Q2_K:
        scales, quarters, d, dmin = b[:16], b[16:80], half(80), half(82)
        for i in range(256):
            scale = scales[i // 16]
            q = quarters[32 * (i // 128) + i % 32] >> (2 * (i % 128 // 32)) & 3
            out[i] = d * np.float32(scale & 15) * np.float32(q) - dmin * np.float32(scale >> 4)
        return out
    if kind is Q.Q3_K:
        mask, quarters, packed_scales, d = b[:32], b[32:96], b[96:108], half(108)
        for i in range(256):
            j = i // 16  # of the scales, 6 bits each: four low ones in 8 bytes, two high ones in 4
            low = packed_scales[j % 8] >> (4 * (j // 8)) & 15
            scale = (low | (packed_scales[8 + j % 4] >> (2 * (j // 4)) & 3) << 4) - 32
            q = quarters[32 * (i // 128) + i % 32] >> (2 * (i % 128 // 32)) & 3
            q -= 0 if mask[i % 32] >> (i // 32) & 1 else 4
            out[i] = d * np.float32(scale) * np.float32(q)
        return out
    d, dmin, scales = half(0), half(2), b[4:16]
    high, low = (b[16:48], b[48:176]) if kind is Q.Q5_K else (bytes(32), b[16:144])
    for j in range(8):
        scale, minimum = scale_and_min(j, scales)
        for i in range(32):
            q = low[32 * (j // 2) + i] >> (4 * (j % 2)) & 15
            q += 16 * (high[i] >> j & 1)
            out[32 * j + i] = d * np.float32(scale) * np.float32(q) - dmin * np.float32(minimum)
    return out


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda kind: kind.name)
def test_k_quants_follow_ggml_element_by_element(kind):
    raw = random_blocks(kind, (4, 512), seed=1)
    expected = [x for block in raw.reshape(8, -1) for x in k_block(kind, block.tobytes())]
    np.testing.assert_allclose(decoder(kind.name)(raw.reshape(-1)), np.array(expected, np.float32), rtol=1e-6)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0, Q.Q4_1], ids=lambda kind: kind.name)
def test_simple_quants_follow_their_definition(kind):
    w = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    raw = gguf.quantize(w, kind)
    expected = []
    for b in raw.reshape(12, -1):
        half = b[:4].view(np.float16).astype(np.float32)
        if kind is Q.Q8_0:
            expected += list(half[0] * b[2:].view(np.int8))
            continue
        nibbles = b[4:] if kind is Q.Q4_1 else b[2:]
        q = np.concatenate([nibbles & 15, nibbles >> 4]).astype(np.float32)
        expected += list(half[0] * q + half[1] if kind is Q.Q4_1 else half[0] * (q - 8))
    found = decoder(kind.name)(raw.reshape(-1))
    np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=1e-6)
    assert np.abs(found.reshape(w.shape) - w).max() < (0.02 if kind is Q.Q8_0 else 0.4)


@pytest.mark.parametrize("kind", [Q.Q5_0, Q.Q5_1], ids=lambda kind: kind.name)
def test_five_bits_follow_their_definition(kind):
    """d, for Q5_1 the minimum, 32 fifth bits, 32 nibbles: dequantize_row_q5_* in ggml-quants.c."""
    w = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    raw = gguf.quantize(w, kind)
    expected = []
    for b in raw.reshape(12, -1):
        half, rest = b[:4].view(np.float16).astype(np.float32), b[4:] if kind is Q.Q5_1 else b[2:]
        fifth = int.from_bytes(rest[:4].tobytes(), "little")
        for i in range(32):
            q = np.float32(int(rest[4 + i % 16]) >> (4 * (i // 16)) & 15 | (fifth >> i & 1) << 4)
            expected.append(half[0] * q + half[1] if kind is Q.Q5_1 else half[0] * (q - 16))
    found = decoder(kind.name)(raw.reshape(-1))
    np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=1e-6)
    assert np.abs(found.reshape(w.shape) - w).max() < 0.2


def test_iq4_nl_looks_its_numbers_up():
    table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # kvalues_iq4nl
    raw = random_blocks(Q.IQ4_NL, (6, 64), seed=1)
    expected = []
    for b in raw.reshape(12, -1):
        d = b[:2].view(np.float16).astype(np.float32)[0]
        expected += [d * np.float32(table[b[2 + i % 16] >> (4 * (i // 16)) & 15]) for i in range(32)]
    np.testing.assert_array_equal(decoder("IQ4_NL")(raw.reshape(-1)), np.array(expected, np.float32))


KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.IQ4_NL]
KINDS += [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K]


def test_what_is_supported_is_tested():
    assert {kind.name for kind in KINDS} == set(SUPPORTED)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_whole_model_in_each_quantisation(tmp_path, kind):
    hf = LLAMA | SIZES
    params = host_params(hf)
    path = write_gguf(
        tmp_path / "m.gguf", hf, params, quantise=lambda name, w: kind if w.ndim == 2 else Q.F32
    )
    loaded = open_checkpoint(path).load("float32")
    assert loaded.keys() == params.keys()
    heads = {"q_proj": 4, "k_proj": 2}
    for name, w in params.items():
        n_heads = next((n for part, n in heads.items() if part in name), None)
        stored = w if n_heads is None else llamacpp_permute(w, n_heads)
        if w.ndim == 2:
            stored = gguf.dequantize(packed(stored, kind), kind) if kind is not Q.F32 else stored
        found = np.asarray(loaded[name])
        np.testing.assert_array_equal(
            found if n_heads is None else llamacpp_permute(found, n_heads), stored, name
        )


@pytest.mark.parametrize("chunk_bytes", [1, 70_000, 4 << 20])
def test_float32_comes_back_exactly_whatever_the_chunk(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr("jaxlamina.weights.streaming.CHUNK_BYTES", chunk_bytes)
    hf = LLAMA | SIZES
    params = host_params(hf)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", hf, params))
    assert checkpoint.kind == "gguf" and checkpoint.path == tmp_path / "m.gguf"
    assert checkpoint.config == ModelConfig.from_hf(hf | {"bos_token_id": None, "eos_token_id": None})
    for name, found in checkpoint.load().items():
        np.testing.assert_array_equal(np.asarray(found), params[name], err_msg=name)


def test_without_the_permutation_q_and_k_would_differ(tmp_path):
    """The test above can fail: rows that llama.cpp never permuted come back in another order."""
    hf = LLAMA | SIZES
    params = host_params(hf)
    loaded = open_checkpoint(write_gguf(tmp_path / "m.gguf", hf, params, permute=False)).load()
    changed = {name for name, x in loaded.items() if not np.array_equal(np.asarray(x), params[name])}
    assert changed == {name for name in params if "q_proj" in name or "k_proj" in name}


@pytest.mark.parametrize("hf", [QWEN2, QWEN3], ids=lambda hf: hf["model_type"])
def test_qwen_is_not_permuted(tmp_path, hf):
    params = host_params(hf)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", hf, params))
    assert checkpoint.config == ModelConfig.from_hf(hf | {"bos_token_id": None, "eos_token_id": None})
    loaded = checkpoint.load()
    assert loaded.keys() == params.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), x, err_msg=name)


def test_biases_of_llama_are_permuted_too(tmp_path):
    hf = LLAMA | {"attention_bias": True, "mlp_bias": True}
    params = host_params(hf)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", hf, params))
    assert checkpoint.config.qkv_bias and checkpoint.config.mlp_bias
    for name, x in checkpoint.load().items():
        np.testing.assert_array_equal(np.asarray(x), params[name], err_msg=name)


# --- metadata ---


def config_of(tmp_path, hf=LLAMA, meta=None, extra=None) -> ModelConfig:
    params = host_params(hf)
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", hf, params, meta=meta, extra=extra)).config


def test_a_sliding_window_makes_a_mistral(tmp_path):
    config = config_of(tmp_path, meta={"ARCH.attention.sliding_window": 32})
    assert config.model_type == "mistral" and config.windows == (32, 32)


def test_linear_and_yarn_rope(tmp_path):
    meta = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0}
    rope = config_of(tmp_path, meta=meta).rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)
    meta = {
        "ARCH.rope.scaling.type": "yarn",
        "ARCH.rope.scaling.factor": 4.0,
        "ARCH.rope.scaling.original_context_length": 32,
    }
    rope = config_of(tmp_path, meta=meta).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)
    rope = config_of(tmp_path, meta={"ARCH.rope.scaling.type": "none"}).rope
    assert rope.rope_type == "default"


def llama3_divisors(head_dim, theta, factor, low=1.0, high=4.0, original=8192):
    """The loop of llama.cpp's converter (LlamaModel.generate_extra_tensors)."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_rope_freqs_become_llama3_scaling(tmp_path):
    hf = LLAMA | {"head_dim": 128, "rope_theta": 500_000.0}
    extra = {"rope_freqs.weight": llama3_divisors(128, 500_000.0, 32.0)}
    assert len(np.unique(extra["rope_freqs.weight"])) > 3
    rope = config_of(tmp_path, hf, extra=extra).rope
    assert (rope.rope_type, rope.factor, rope.theta) == ("llama3", 32.0, 500_000.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings) == (
        1,
        4,
        8192,
    )


@pytest.mark.parametrize("change", [{"high": 5.0}, {"original": 4096}, {"theta": 1e6}])
def test_other_rope_freqs_are_an_error_that_names_them(tmp_path, change):
    hf = LLAMA | {"head_dim": 128, "rope_theta": 500_000.0}
    extra = {
        "rope_freqs.weight": llama3_divisors(**{"head_dim": 128, "theta": 500_000.0, "factor": 8.0} | change)
    }
    with pytest.raises(UserError, match="rope_freqs.weight is not the llama3 rope scaling"):
        config_of(tmp_path, hf, extra=extra)


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ({"ARCH.rope.scaling.type": "longrope"}, r"rope.scaling.type='longrope' is not supported"),
        ({"ARCH.expert_shared_count": 1}, r"llama.expert_shared_count=1 is not supported"),
        ({"ARCH.logit_scale": 0.5}, r"llama.logit_scale=0.5 is not supported"),
        ({"split.count": 3}, r"is one of 3 parts; join them first: llama-gguf-split --merge"),
        ({"ARCH.rope.dimension_count": 8}, r"rope.dimension_count=8 .* must equal the head size 16"),
    ],
    ids=range(5),
)
def test_metadata_that_changes_the_result_is_an_error(tmp_path, meta, problem):
    with pytest.raises(UserError, match=problem) as error:
        config_of(tmp_path, meta=meta)
    assert "m.gguf" in str(error.value) and "\n" not in str(error.value)


def test_another_architecture_is_an_error(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="architecture 'mamba'; supported in GGUF: llama, qwen2, qwen3"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_missing_size_is_an_error(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"llama\.embedding_length is missing"):
        open_checkpoint(tmp_path / "m.gguf")


def test_every_misfit_is_listed_at_once(tmp_path):
    params = host_params(LLAMA)
    del params["model.norm.weight"]
    params["model.layers.1.mlp.up_proj.weight"] = np.zeros((8, 64), np.float32)
    with pytest.raises(UserError) as error:
        config_of_params(tmp_path, params, {"blk.0.odd.weight": np.zeros(4, np.float32)})
    text = str(error.value)
    assert "missing: model.norm.weight [64]" in text
    assert "unexpected: blk.0.odd.weight [4]" in text
    assert "wrong shape: model.layers.1.mlp.up_proj.weight is [8, 64] and must be [96, 64]" in text
    assert "\n" not in text


def test_a_tensor_in_two_spellings_is_an_error(tmp_path):
    params = host_params(LLAMA)
    norm = params.pop("model.norm.weight")
    with pytest.raises(UserError, match="model.norm.weight is there twice, under two names"):
        config_of_params(tmp_path, params, {"output_norm.weight": norm, "model.norm.weight": norm + 1})


def config_of_params(tmp_path, params, extra):
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA, params, extra=extra)).config


def test_a_quantisation_that_is_not_supported_is_named(tmp_path):
    hf = LLAMA | SIZES
    params = host_params(hf)
    quantise = lambda name, w: Q.TQ1_0 if "up_proj" in name else Q.F32
    with pytest.raises(UserError, match="tensors of type TQ1_0; supported: F32, F16"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", hf, params, quantise=quantise))


# --- broken files ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    meta = {"tokenizer.ggml.tokens": ["a", "b", "é"], "tokenizer.ggml.scores": [0.5, 1.0], "general.on": True}
    return write_gguf(path, LLAMA, {"model.norm.weight": np.ones(40, np.float32)}, meta=meta)


def test_metadata_reads_as_the_package_reads_it(whole):
    ours, theirs = read_gguf(whole), gguf.GGUFReader(whole)
    fields = {key: f.contents() for key, f in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.metadata["tokenizer.ggml.tokens"] == ["a", "b", "é"]
    (tensor,) = theirs.tensors
    found = ours.tensors[tensor.name]
    assert (found.offset_bytes, found.n_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_a_cut_at_any_byte_is_an_error_that_names_the_file(whole, tmp_path):
    raw = whole.read_bytes()
    end = max(t.offset_bytes + t.n_bytes for t in read_gguf(whole).tensors.values())
    path = tmp_path / "cut.gguf"
    for n in range(end):
        path.write_bytes(raw[:n])
        with pytest.raises(UserError, match=r"cut\.gguf is (truncated: \d+ bytes|not a GGUF file)") as error:
            read_gguf(path)
        assert "\n" not in str(error.value)


def test_a_cut_in_the_data_says_how_much_is_missing(tmp_path):
    params = host_params(LLAMA)
    path = write_gguf(tmp_path / "m.gguf", LLAMA, params)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size // 2)
    with pytest.raises(
        UserError, match=rf"m\.gguf is truncated: \d+ bytes expected, {size // 2} present"
    ) as error:
        open_checkpoint(path)
    assert f"of {len(params)} tensors are cut off" in str(error.value)


def with_offset(path, tensor, change):
    """A small model's file, in which one tensor begins elsewhere."""
    raw = bytearray(write_gguf(path, LLAMA, host_params(LLAMA)).read_bytes())

    def place(name):  # behind the name: the number of axes, their sizes, the type
        at = raw.index(len(name).to_bytes(8, "little") + name.encode()) + 8 + len(name)
        return at + 4 + 8 * raw[at] + 4

    at = place(tensor)
    others = place("blk.0.ffn_gate.weight")
    new = change(*(int.from_bytes(raw[i : i + 8], "little") for i in (at, others)))
    raw[at : at + 8] = (new % 2**64).to_bytes(8, "little")
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda own, other: other,
        lambda own, other: own + 1,
        lambda own, other: own - 32,
        lambda own, other: own + 32,
        lambda own, other: -32,
    ],
    ids=["overlap", "unaligned", "earlier", "later", "far"],
)
def test_tensors_that_do_not_lie_one_after_the_other_are_an_error(tmp_path, change):
    path = with_offset(tmp_path / "m.gguf", "blk.0.ffn_up.weight", change)
    with pytest.raises(UserError, match=r"m\.gguf is corrupt: tensor 'blk\..* begins at byte \d+, not \d+"):
        open_checkpoint(path)


def test_a_file_of_another_alignment_loads(tmp_path):
    params = host_params(LLAMA)
    path = write_gguf(tmp_path / "m.gguf", LLAMA, params, meta={"general.alignment": 1024})
    for name, found in open_checkpoint(path).load().items():
        np.testing.assert_array_equal(np.asarray(found), params[name], err_msg=name)


@pytest.mark.timeout(30)
def test_a_pipe_and_a_device_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", Path("/dev/zero")):
        with pytest.raises(UserError, match=f"{path} is no file"):
            open_checkpoint(path)


@given(position=st.integers(0, 700), byte=st.integers(0, 255))
def test_a_flipped_byte_never_escapes_as_another_error(whole, position, byte):
    raw = bytearray(whole.read_bytes())
    raw[position % len(raw)] = byte
    path = whole.with_name("flipped.gguf")
    path.write_bytes(raw)
    try:
        found = read_gguf(path)
    except UserError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    assert all(t.offset_bytes + t.n_bytes <= len(raw) for t in found.tensors.values())


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\3\4" + bytes(100), b"GGUF\1\0\0\0" + bytes(40)])
def test_something_else_is_no_gguf(tmp_path, content):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.gguf is (not a GGUF file|GGUF version 1)"):
        open_checkpoint(path)
