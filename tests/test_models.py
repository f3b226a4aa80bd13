"""The decoder against transformers on small random models, and what a slicer needs of its trace."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlamina.errors import UserError
from jaxlamina.models import Decoder, ModelConfig, abstract_params, apply, random_params
from jaxlamina.models.rope import inverse_frequencies, rotary_tables
from jaxlamina.weights.fused import fused
from splitter import split

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed: pip install -e '.[dev]'")

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = SMALL | {
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
LLAMA = GATED | {"model_type": "llama"}
OPT = SMALL | {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32}


def scaled(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": rope_type, **values}}


LLAMA3_ROPE = scaled(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-multi-head": LLAMA | {"num_key_value_heads": 4},
    "llama-head-dim": LLAMA | {"head_dim": 16},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-linear": LLAMA | scaled("linear", factor=2.5),
    "llama-dynamic": LLAMA | scaled("dynamic", factor=3.0) | {"max_position_embeddings": 12},
    "llama-llama3": LLAMA | LLAMA3_ROPE,
    "llama-yarn": LLAMA | scaled("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama-yarn-mscale": LLAMA
    | scaled(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=1.2,
        mscale_all_dim=0.7,
        beta_fast=8.0,
        beta_slow=2.0,
        truncate=False,
    ),
    "llama-v5": {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    "mistral-window": GATED | {"model_type": "mistral", "sliding_window": 5},
    "mistral": GATED | {"model_type": "mistral", "sliding_window": None},
    "qwen2": GATED | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": GATED
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": GATED | {"model_type": "qwen3", "head_dim": 16},
    "qwen3-biases": GATED | {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
    "phi3": GATED
    | {"model_type": "phi3", "sliding_window": 7, "partial_rotary_factor": 0.75, "pad_token_id": 0},
    "phi3-longrope": GATED
    | {
        "model_type": "phi3",
        "pad_token_id": 0,
        "original_max_position_embeddings": 21,  # greedy tokens go past it
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.2, 1.5, 2.0],
            "long_factor": [1.5, 3.0, 5.0, 8.0],
        },
    },
    "gemma": GATED | {"model_type": "gemma", "head_dim": 16},
    "gemma2": GATED
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "sliding_window": 5,
    },
    "gemma3": GATED
    | {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 4,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "granite": GATED
    | {
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
    },
    "smollm3": GATED | {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": 0},
    "mixtral": GATED | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3-moe": GATED
    | {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3-moe-plain-shares": GATED
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_local_experts": 4,  # transformers 5's word for it
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "opt": OPT,
    "opt-gelu-untied": OPT | {"activation_function": "gelu", "tie_word_embeddings": False},
    "opt-post-norm": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "opt-plain": OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    "opt-no-final-norm": OPT | {"_remove_final_layer_norm": True},
}
# Others of a family have the same slices and the same attention but for a table, a bias or a factor, which this
# file compares with transformers' whole models: where models are split, these are slow tests.
VARIANTS = (
    *("llama-tied", "llama-biases", "llama-linear", "llama-yarn", "llama-v5", "mistral"),
    *("qwen3-biases", "opt-gelu-untied", "opt-plain", "opt-no-final-norm"),
)

ROWS = np.random.default_rng(7).integers(3, SMALL["vocab_size"], size=(2, 19), dtype=np.int32)


def positions_of(tokens: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)


@lru_cache(maxsize=1)
def runner(config: ModelConfig) -> Callable[..., jax.Array]:
    return jax.jit(partial(apply, config))


def reference(hf: dict[str, Any], params: dict[str, jax.Array]) -> Any:
    """The transformers model of the same config, with our weights; any tensor left over or missing fails."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**copy.deepcopy(hf))  # it writes into nested dicts
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    weights = {
        name: torch.from_numpy(np.array(x)) for name, x in fused(ModelConfig.from_hf(hf), params).items()
    }
    result = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if "lm_head.weight" not in params else set()
    assert set(result.missing_keys) <= tied and not result.unexpected_keys, result
    return model


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.float().numpy()


@needs_torch
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_transformers(name: str) -> None:
    hf = MODELS[name]
    config = ModelConfig.from_hf(hf)
    params = random_params(config, seed=3)
    model = reference(hf, params)
    run = runner(config)

    steps, start = 5, ROWS.shape[1]
    # One program for all lengths: pads on the right, whose position repeats the last valid one.
    tokens = np.zeros((len(ROWS), start + steps), np.int32)
    tokens[:, :start] = ROWS
    for length in range(start, start + steps):
        positions = np.minimum(positions_of(tokens), length - 1)
        ours = np.asarray(run(params, tokens, positions))[:, :length]
        theirs = reference_logits(model, tokens[:, :length])
        assert ours.dtype == np.float32
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
        chosen = ours[:, -1].argmax(-1)
        assert (chosen == theirs[:, -1].argmax(-1)).all()
        tokens[:, length] = chosen


@needs_torch
@pytest.mark.parametrize("name", [n for n, hf in MODELS.items() if hf["model_type"] != "opt"])
def test_inverse_frequencies_equal_transformers(name: str) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wide = copy.deepcopy(MODELS[name]) | {"head_dim": 64, "hidden_size": 256, "rope_theta": 500000.0}
    scaling = wide.get("rope_scaling") or {}
    scaling |= {key: value * 8 for key, value in scaling.items() if isinstance(value, list)}
    ours_of = ModelConfig.from_hf(wide)
    rope, kind = ours_of.rope, {"layer_type": "full_attention"} if ours_of.local_rope else {}
    assert rope is not None
    config = transformers.AutoConfig.for_model(**copy.deepcopy(wide))
    if rope.rope_type == "default":
        theirs, factor = (
            transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding.compute_default_rope_parameters(config)
        )
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[rope.rope_type](config, **kind)
    ours, our_factor = inverse_frequencies(rope, 64)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=3e-7)
    assert our_factor == pytest.approx(factor, rel=1e-12)


@needs_torch
@pytest.mark.parametrize("name", ["llama", "llama-llama3", "llama-yarn"])
def test_angles_of_far_positions_equal_transformers(name: str) -> None:
    """One unit in the last place of the first frequencies would be an error of 0.01 at position 131,071."""
    import torch
    import transformers

    sizes = {"head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    wide = copy.deepcopy(MODELS[name] | sizes)
    if "rope_scaling" in wide:
        wide["rope_scaling"]["original_max_position_embeddings"] = 8192
    rope = ModelConfig.from_hf(wide).rope
    assert rope is not None
    positions = np.array([[0, 1, 100, 4095, 8191, 65535, 131071]], np.int32)
    config = transformers.AutoConfig.for_model(**copy.deepcopy(wide))
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    theirs = module(torch.zeros(1), torch.from_numpy(positions).long())
    ours = rotary_tables(rope, 64, jnp.asarray(positions), jnp.float32)
    for table, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(table[:, :, 0], expected.numpy()[..., :32], rtol=0, atol=5e-5)


@needs_torch
@pytest.mark.parametrize("name", ["qwen3", "gemma", "mixtral", "opt-post-norm"])
def test_bfloat16_stays_near_transformers_float32(name: str) -> None:
    hf = MODELS[name]
    config = ModelConfig.from_hf(hf)
    narrow = random_params(config, seed=3, dtype=jnp.bfloat16)
    model = reference(hf, {key: array.astype(jnp.float32) for key, array in narrow.items()})
    ours = runner(config)(narrow, jnp.asarray(ROWS), jnp.asarray(positions_of(ROWS)))
    theirs = reference_logits(model, ROWS)
    assert ours.dtype == jnp.float32
    assert np.abs(np.asarray(ours) - theirs).max() <= 0.05 * np.abs(theirs).max()


@needs_torch
def test_tensor_names_and_shapes_are_those_of_transformers() -> None:
    import transformers

    for name, hf in MODELS.items():
        config = ModelConfig.from_hf(hf)
        shapes = {key: spec.shape for key, spec in abstract_params(config).items()}
        ours = {key: x.shape for key, x in fused(config, {k: np.empty(s) for k, s in shapes.items()}).items()}
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**copy.deepcopy(hf))
        )
        theirs = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        if "lm_head.weight" not in ours:
            theirs.pop("lm_head.weight", None)  # transformers lists the tied tensor under both names
        assert ours == theirs, name


@pytest.mark.parametrize("name", ["qwen3-biases", "gemma3", "opt-post-norm"])
def test_every_parameter_matters(name: str) -> None:
    """No parameter is dead: changing any of them changes the logits (so parity does test every one)."""
    config = ModelConfig.from_hf(MODELS[name])
    params = random_params(config, seed=1)
    tokens, positions = jnp.asarray(ROWS), jnp.asarray(positions_of(ROWS))
    gradients = jax.jit(jax.grad(lambda params: jnp.square(apply(config, params, tokens, positions)).mean()))(
        params
    )
    # A bias on the keys moves all scores of a query alike, which softmax undoes, unless the rotation follows
    # it.
    inert = {key for key in params if config.rope is None and key.endswith("k_proj.bias")}
    dead = {key for key, gradient in gradients.items() if float(jnp.abs(gradient).max()) < 1e-9}
    assert dead - inert == set()


@pytest.mark.parametrize("name", ["llama-dynamic", "opt"])
def test_right_padding_changes_nothing(name: str) -> None:
    config = ModelConfig.from_hf(MODELS[name])
    params = random_params(config, seed=3)
    n = 14
    short = ROWS[:1, :n]
    padded = np.concatenate([short, np.full((1, 5), 77, np.int32)], axis=1)
    positions = np.minimum(positions_of(padded), n - 1)
    alone = runner(config)(params, jnp.asarray(short), jnp.asarray(positions_of(short)))
    beside = runner(config)(params, jnp.asarray(padded), jnp.asarray(positions))[:, :n]
    np.testing.assert_allclose(alone, beside, rtol=1e-5, atol=1e-5)


def test_dynamic_rope_looks_at_each_row_alone() -> None:
    config = ModelConfig.from_hf(MODELS["llama-dynamic"])
    assert config.rope is not None
    short, long = np.arange(8, dtype=np.int32), np.arange(24, 32, dtype=np.int32)
    both = rotary_tables(config.rope, 8, jnp.asarray(np.stack([short, long])), jnp.float32)
    for row, positions in enumerate((short, long)):
        alone = rotary_tables(config.rope, 8, jnp.asarray(positions[None]), jnp.float32)
        for ours, theirs in zip(both, alone, strict=True):
            np.testing.assert_array_equal(ours[row], theirs[0])
    plain = ModelConfig.from_hf(LLAMA).rope
    assert plain is not None
    np.testing.assert_allclose(
        both[0][0], rotary_tables(plain, 8, jnp.asarray(short[None]), jnp.float32)[0][0], rtol=1e-5, atol=1e-6
    )


def test_a_token_of_experts_depends_on_no_other() -> None:
    """Few rows are computed one by one, many in blocks; pads and other rows are sorted in between."""
    config = ModelConfig.from_hf(MODELS["qwen3-moe"])
    params = random_params(config, seed=3)
    rows = np.random.default_rng(1).integers(3, SMALL["vocab_size"], size=(5, 40), dtype=np.int32)
    rows[3:] = 9
    many = runner(config)(params, rows, positions_of(rows))
    for row in (0, 4):
        few = rows[row : row + 1, :2]
        alone = runner(config)(params, few, positions_of(few))
        np.testing.assert_allclose(alone[0], many[row, :2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_rows", [2, 9, 100])
def test_both_ways_to_compute_experts_agree(n_rows: int) -> None:
    experts = Decoder(ModelConfig.from_hf(MODELS["mixtral"])).model.layers[0].mlp.experts
    rng = np.random.default_rng(0)
    x, shares = rng.standard_normal((n_rows, 32), np.float32), rng.random((n_rows, 2), np.float32)
    chosen = np.stack([np.arange(n_rows) % 2, np.full(n_rows, 3)], axis=1)  # expert 2 has no row
    ours, theirs = (
        jax.jit(lambda *xs, f=f: f(*xs))(x, shares, chosen) for f in (experts.only_chosen, experts.every)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "opt-post-norm"])
def test_logits_at_picks_one_token_of_each_row(name: str) -> None:
    config = ModelConfig.from_hf(MODELS[name])
    params = random_params(config, seed=3)
    tokens, positions = jnp.asarray(ROWS), jnp.asarray(positions_of(ROWS))
    everywhere = runner(config)(params, tokens, positions)
    picked = runner(config)(params, tokens, positions, jnp.asarray([4, 18], jnp.int32))
    assert picked.shape == (2, 1, config.vocab_size)
    np.testing.assert_allclose(picked[:, 0], everywhere[np.arange(2), [4, 18]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-tied", "opt"])
def test_module_and_pure_function_agree(name: str) -> None:
    config = ModelConfig.from_hf(MODELS[name])
    decoder = Decoder(config, rngs=nnx.Rngs(5))
    params = {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(decoder))
    }
    assert {k: (v.shape, v.dtype) for k, v in params.items()} == {
        k: (v.shape, v.dtype) for k, v in abstract_params(config).items()
    }
    tokens, positions = jnp.asarray(ROWS), jnp.asarray(positions_of(ROWS))
    np.testing.assert_array_equal(decoder(tokens, positions), apply(config, params, tokens, positions))


def test_seventy_billion_parameters_have_shapes_without_memory() -> None:
    hf = LLAMA | {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    config = ModelConfig.from_hf(hf)
    params = abstract_params(config, jnp.bfloat16)
    assert sum(int(np.prod(spec.shape)) for spec in params.values()) == 70_553_706_496
    step = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    out = jax.eval_shape(lambda *args: apply(config, *args), params, step, step)
    assert (out.shape, out.dtype) == ((2, 1, 128256), jnp.float32)


def test_random_params_are_equal_for_equal_seeds() -> None:
    config = ModelConfig.from_hf(LLAMA)
    first, again, other = (random_params(config, seed=seed) for seed in (1, 1, 2))
    assert all((first[key] == again[key]).all() for key in first)
    assert not any((first[key] == other[key]).all() for key in first)


def test_parameters_that_do_not_fit_are_named() -> None:
    config = ModelConfig.from_hf(LLAMA)
    params = random_params(config)
    params["model.norm.bias"] = params.pop("model.norm.weight")
    tokens, positions = jnp.asarray(ROWS), jnp.asarray(positions_of(ROWS))
    with pytest.raises(UserError, match=r"missing \['model.norm.weight'\].*not known \['model.norm.bias'\]"):
        apply(config, params, tokens, positions)


@pytest.mark.parametrize("name", MODELS)
def test_queries_are_traced_before_keys_and_values(name: str) -> None:
    """A slice sends q early only if q's projection needs nothing of k's and v's: their order in the trace."""
    config = ModelConfig.from_hf(MODELS[name])
    params = abstract_params(config)
    step = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    names = sorted(params)
    jaxpr = jax.make_jaxpr(lambda flat, *args: apply(config, dict(zip(names, flat, strict=True)), *args))(
        [params[key] for key in names], step, step
    )
    of_var = dict(zip(jaxpr.jaxpr.invars, names, strict=False))
    order = []
    for equation in jaxpr.jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            order += [of_var[var] for var in equation.invars if not hasattr(var, "val") and var in of_var]
    layer = [key for key in order if ".layers.1." in key and "self_attn" in key]
    assert [key.split(".")[-2][0] for key in layer] == ["q", "k", "v", "o"]


@pytest.mark.parametrize("name", [n for n, hf in MODELS.items() if hf["model_type"] != "opt"])
def test_rotary_tables_are_cheap_to_recompute(name: str) -> None:
    """Elementwise only: such values are recomputed in every slice, a gather or a product is carried."""
    config = ModelConfig.from_hf(MODELS[name])
    rope = config.rope
    assert rope is not None
    jaxpr = jax.make_jaxpr(lambda p: rotary_tables(rope, config.head_dim, p, jnp.float32))(
        jax.ShapeDtypeStruct((2, 1), jnp.int32)
    )
    used = {equation.primitive.name for equation in jaxpr.jaxpr.eqns}
    allowed = {
        "convert_element_type",
        "broadcast_in_dim",
        "reshape",
        "mul",
        "div",
        "add",
        "sub",
        "ge",
        "select_n",
        "max",
        "pow",
    }
    assert used <= allowed | {"cos", "sin", "reduce_max", "jit", "pjit"}


@pytest.mark.parametrize("name", MODELS)
def test_slices_are_few_and_carry_the_residual_and_at_most_the_positions(name: str) -> None:
    config = ModelConfig.from_hf(MODELS[name] | {"num_hidden_layers": 5})
    step = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    model = split(partial(apply, config), abstract_params(config), step, step)
    # A slice is a program of its own before a layer without positions, and after one without experts;
    # two bases are one, with two constants.
    assert (model.n, model.n_programs) == (5, 4 if config.no_rope_layers or config.dense_layers else 3)
    assert [site.window for site in model.sites] == list(config.windows)
    for cut in model.report().cuts:
        carried = sorted((value.shape, value.dtype) for value in cut.context)
        residual, positions = ((2, 1, 32), "float32"), ((2, 1), "int32")
        assert carried in ([residual], [positions, residual])
