"""Reading config.json: published files, both forms of rotary parameters, one clear line for the rest."""

from __future__ import annotations

import copy
import importlib.util
import json
from typing import Any

import pytest
from published_configs import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GRANITE,
    LLAMA_2,
    LLAMA_31,
    LONGROPE,
    MISTRAL,
    MIXTRAL,
    OPT_125M,
    OPT_350M,
    PHI3,
    PHI3_LONG,
    PHI4_MINI,
    PUBLISHED,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    SMOLLM2,
    SMOLLM3,
    YARN,
)

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, abstract_params


def error_of(hf: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf(hf)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_round_trip(name: str) -> None:
    config = ModelConfig.from_hf(PUBLISHED[name])
    again = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_reads_what_we_write(name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install -e '.[dev]'")
    import transformers

    theirs = transformers.AutoConfig.for_model(**ModelConfig.from_hf(PUBLISHED[name]).to_hf())
    direct = transformers.AutoConfig.for_model(
        **copy.deepcopy(PUBLISHED[name])
    )  # it writes into nested dicts
    # What transformers 5 writes for the published file is also what we must read.
    assert ModelConfig.from_hf(theirs.to_dict()) == ModelConfig.from_hf(direct.to_dict())
    assert ModelConfig.from_hf(direct.to_dict()) == ModelConfig.from_hf(PUBLISHED[name])


def test_sizes_of_the_demo_model() -> None:
    config = ModelConfig.from_hf(SMOLLM2)
    assert (config.head_dim, config.num_key_value_heads, config.num_hidden_layers) == (64, 3, 30)
    assert config.rope is not None and config.rope.theta == 100000.0 and config.rope.rope_type == "default"
    assert config.tie_word_embeddings and not config.qkv_bias and config.windows == (None,) * 30
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)
    assert config.norm_eps == 1e-5


def test_several_end_tokens_and_none() -> None:
    assert ModelConfig.from_hf(LLAMA_31).eos_token_ids == (128001, 128008, 128009)
    assert ModelConfig.from_hf(LLAMA_2 | {"eos_token_id": None}).eos_token_ids == ()


def test_families_differ_where_their_authors_did() -> None:
    qwen2, qwen3 = ModelConfig.from_hf(QWEN2), ModelConfig.from_hf(QWEN3)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    biased = ModelConfig.from_hf(LLAMA_2 | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    old, small = ModelConfig.from_hf(OPT_125M), ModelConfig.from_hf(OPT_350M)
    assert (old.norm_first, old.final_norm, old.embed_dim, old.rope) == (True, True, None, None)
    assert (small.norm_first, small.final_norm, small.embed_dim) == (False, False, 512)
    assert old.tie_word_embeddings  # opt's files leave it out and mean true


def test_granite_multiplies_and_smollm3_leaves_positions_out() -> None:
    granite = ModelConfig.from_hf(GRANITE)
    assert (granite.embed_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.attention_scale, granite.logits_divisor) == (0.015625, 8.0)
    without = {key: value for key, value in GRANITE.items() if "multiplier" not in key}
    assert ModelConfig.from_hf(without).attention_scale == 1.0  # transformers' default; not head_dim ** -0.5
    config = ModelConfig.from_hf(SMOLLM3)
    assert config.no_rope_layers == tuple(range(3, 32, 4))
    assert [rope is None for rope in config.ropes] == [False, False, False, True] * 8
    by_interval = {key: value for key, value in SMOLLM3.items() if key != "no_rope_layers"}
    assert ModelConfig.from_hf(by_interval) == config
    windows = ModelConfig.from_hf(PUBLISHED["smollm3-window"]).windows
    assert windows == (None, None, None, 128) * 8


def test_experts_are_where_their_authors_put_them() -> None:
    mixtral, qwen = ModelConfig.from_hf(MIXTRAL), ModelConfig.from_hf(QWEN3_MOE)
    assert (mixtral.n_experts, mixtral.experts_per_token, mixtral.expert_size) == (8, 2, 14336)
    assert (qwen.n_experts, qwen.experts_per_token, qwen.expert_size) == (128, 8, 768)
    assert mixtral.norm_topk_prob and qwen.norm_topk_prob and qwen.qk_norm
    without = {key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"}
    assert not ModelConfig.from_hf(without).norm_topk_prob
    assert all(config.has_experts(i) for config in (mixtral, qwen) for i in range(config.num_hidden_layers))
    some = ModelConfig.from_hf(PUBLISHED["qwen3-moe-dense-layers"])
    assert [some.has_experts(i) for i in range(7)] == [False, False, False, False, False, True, False]
    assert qwen.windows == (None,) * 48
    assert ModelConfig.from_hf(PUBLISHED["qwen3-moe-window"]).windows == (4096,) * 48
    for hf, n_parameters in ((MIXTRAL, 46_702_792_704), (QWEN3_MOE, 30_532_122_624)):
        assert sum(x.size for x in abstract_params(ModelConfig.from_hf(hf)).values()) == n_parameters


def test_gemmas_differ_where_their_authors_did() -> None:
    one, two, three = (ModelConfig.from_hf(hf) for hf in (GEMMA, GEMMA2, GEMMA3))
    assert {c.norm_plus_one for c in (one, two, three)} == {True}
    assert [c.embed_scale for c in (one, two, three)] == [2048**0.5, 4608**0.5, 1152**0.5]
    assert {c.hidden_act for c in (one, two, three)} == {"gelu_pytorch_tanh"}
    assert [(c.post_norms, c.qk_norm) for c in (one, two, three)] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert [c.attention_scale for c in (one, two, three)] == [None, 1 / 12, 1 / 16]
    assert (two.attention_softcap, two.logits_softcap) == (50.0, 30.0)
    assert (three.attention_softcap, three.logits_softcap) == (None, None)
    assert two.windows == (4096, None) * 23
    assert three.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert two.local_rope is None and three.rope is not None and three.local_rope is not None
    assert (three.rope.theta, three.local_rope.theta) == (1e6, 1e4)


def test_gemma3_reads_both_forms_of_its_two_bases() -> None:
    scaling = {"factor": 8.0, "rope_type": "linear"}
    old = GEMMA3 | {"rope_scaling": scaling}
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {
        "full_attention": scaling | {"rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    config = ModelConfig.from_hf(old)
    assert ModelConfig.from_hf(new) == config
    assert config.rope is not None and config.local_rope is not None
    assert (config.rope.rope_type, config.local_rope.rope_type) == ("linear", "default")
    assert "full_attention and sliding_attention" in error_of(new | {"rope_parameters": scaling})
    assert "rope_parameters" in error_of(new | {"rope_scaling": scaling})


def test_phi3_turns_a_part_of_a_head_and_takes_two_factors() -> None:
    plain, long, mini = (ModelConfig.from_hf(hf) for hf in (PHI3, PHI3_LONG, PHI4_MINI))
    assert (plain.max_length, long.max_length, mini.max_length) == (4096, 4096, 4096)
    assert set(plain.windows) == {2047}
    assert plain.rope is not None and long.rope is not None and mini.rope is not None
    assert (plain.rope.rope_type, plain.rope.rotary_dim(96)) == ("default", 96)
    assert (long.rope.factor, long.rope.long_factor) == (32.0, (1.0, 40.0) * 24)
    assert (mini.head_dim, mini.rope.rotary_dim(128)) == (128, 96)
    assert ModelConfig.from_hf(PHI3_LONG | {"rope_scaling": LONGROPE | {"type": "su"}}) == long


def test_sliding_windows_of_each_family() -> None:
    assert set(ModelConfig.from_hf(MISTRAL).windows) == {4096}
    assert set(ModelConfig.from_hf(MISTRAL | {"sliding_window": None}).windows) == {None}
    without = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert set(ModelConfig.from_hf(without).windows) == {4096}  # transformers' default for mistral
    assert set(ModelConfig.from_hf(QWEN2).windows) == {None}
    used = ModelConfig.from_hf(QWEN2 | {"use_sliding_window": True, "sliding_window": 128})
    assert used.windows == (None,) * 21 + (128,) * 3
    listed = QWEN2 | {"use_sliding_window": True, "sliding_window": 128, "num_hidden_layers": 2}
    listed["layer_types"] = ["sliding_attention", "full_attention"]
    assert ModelConfig.from_hf(listed).windows == (128, None)


def test_both_forms_of_rotary_parameters_mean_the_same() -> None:
    for scaling in (LLAMA_31["rope_scaling"], {"type": "linear", "factor": 2.0}, YARN):
        old = LLAMA_31 | {"rope_scaling": scaling}
        new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
        new["rope_parameters"] = scaling | {"rope_theta": 500000.0}
        assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    rope = ModelConfig.from_hf(LLAMA_31).rope
    assert rope is not None
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("llama3", 8.0, 8192)


def test_yarn_derives_what_is_left_out() -> None:
    rope = ModelConfig.from_hf(LLAMA_31 | {"rope_scaling": {"rope_type": "yarn", "factor": 4}}).rope
    assert rope is not None
    assert (rope.original_max_position_embeddings, rope.beta_fast, rope.beta_slow) == (131072, 32.0, 1.0)
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 32768}
    rope = ModelConfig.from_hf(LLAMA_31 | {"rope_scaling": scaling}).rope
    assert rope is not None and rope.factor == 4.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "gpt_neox"}, "model_type='gpt_neox'"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "32000"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"num_attention_heads": 31, "num_key_value_heads": 31}, "num_attention_heads=31"),
        ({"head_dim": 127}, "head_dim=127"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config is not supported (quant_method='awq')",
        ),
        ({"quantization_config": [4]}, "quantization_config"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "rope_type='nonsense'"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "factor=-1.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 3.0}}, "alpha"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor, low_freq_factor"),
        ({"rope_scaling": LLAMA_31["rope_scaling"] | {"low_freq_factor": 9.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            "rope_scaling",
        ),
    ],
)
def test_llama_fields_that_are_not_supported_are_named(change: dict[str, Any], field: str) -> None:
    assert field in error_of(LLAMA_2 | change)


@pytest.mark.parametrize(
    ("hf", "field"),
    [
        (OPT_125M | {"activation_function": "swish"}, "activation_function='swish'"),
        (OPT_125M | {"ffn_dim": None}, "ffn_dim"),
        (OPT_125M | {"rope_theta": 1e4}, "rope_theta"),
        (OPT_125M | {"num_attention_heads": 7}, "num_attention_heads=7"),
        (QWEN2 | {"attention_bias": True}, "attention_bias"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 24}, "layer_types"),
        (QWEN2 | {"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers"),
        (QWEN3 | {"layer_types": ["chunked_attention"] * 28}, "chunked_attention"),
        (QWEN3 | {"num_experts": 128}, "num_experts=128"),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"] * 16}, "layer_types"),
        (MISTRAL | {"sliding_window": -1}, "sliding_window=-1"),
        (
            MIXTRAL | {"num_experts_per_tok": 9},
            "num_experts_per_tok=9 must be at most the number of experts 8",
        ),
        (MIXTRAL | {"num_local_experts": 10**9}, "num_local_experts=1000000000 must be at most 4096"),
        (MIXTRAL | {"num_experts": 8}, "num_experts=8"),
        (QWEN3_MOE | {"num_experts": 0}, "num_experts=0"),
        (QWEN3_MOE | {"num_local_experts": 4}, "num_local_experts=4"),
        (QWEN3_MOE | {"mlp_only_layers": "0"}, "mlp_only_layers='0'"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob=1"),
        (QWEN3_MOE | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        (PHI3 | {"rope_scaling": LONGROPE | {"type": "yarn"}}, "rope_type='yarn'"),
        (PHI3 | {"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, "short_factor has 1 numbers"),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [0.0] * 48}}, "long_factor"),
        (PHI3 | {"rope_scaling": LONGROPE | {"long_factor": 2.0}}, "long_factor"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (PHI3 | {"attention_bias": True}, "attention_bias=True"),
        (PHI3 | {"lm_head_bias": True}, "lm_head_bias=True"),
        (GEMMA | {"hidden_act": "silu"}, "hidden_act='silu'"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GRANITE | {"logits_scaling": 0}, "logits_scaling=0"),
        (GRANITE | {"no_rope_layers": [1]}, "no_rope_layers=[1]"),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
    ],
)
def test_fields_of_other_families_are_named(hf: dict[str, Any], field: str) -> None:
    assert field in error_of(hf)


def test_unknown_fields_without_a_value_and_harmless_ones_pass() -> None:
    plain = ModelConfig.from_hf(LLAMA_2)
    assert (
        ModelConfig.from_hf(LLAMA_2 | {"something_new": None, "temperature": 0.6, "id2label": {"0": "x"}})
        == plain
    )


def test_error_lists_every_unknown_field() -> None:
    message = error_of(LLAMA_2 | {"residual_multiplier": 0.22, "embedding_multiplier": 12.0})
    assert "residual_multiplier" in message and "embedding_multiplier" in message
