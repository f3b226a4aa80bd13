"""Attention found in models of other hands, and what is refused.

The models of `tests/flax_models` are plain Flax and know nothing of this project. What is found of each is
compared with its own function: cut, a prompt, chunks and single tokens give the same logits.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_models import nnx_mha, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_models import NAMES, flax_model
from written import FORMS, NEAR_MISSES, Written

from jaxlamina import FlaxModel
from pallas_kernels.compat import COMPILED_QUICKLY
from splitter import SplitError
from splitter.draw import to_svg
from splitter.find import check_found, find_attention
from splitter.slices import split

N_LAYERS = {
    "linen_parallel_block": 3,
    "moe": 3,
    "nnx_einsum_gqa": 3,
    "nnx_scan_layers": 3,
    "soft_cap_window": 3,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_model_is_found_and_cut(name: str):
    model = flax_model(name)
    difference = model.check()
    assert len(model.found.sites) == N_LAYERS.get(name, 2)
    # In bfloat16, sums in another order: as much as its rounding, times a few layers.
    assert difference < (0.03 if name == "qk_norm_bf16" else 1e-5)


def test_windows_and_caps_are_read():
    sites = flax_model("soft_cap_window").found.sites
    assert [s.window for s in sites] == [7, None, 7] and {s.softcap for s in sites} == {5.0}
    assert {(s.n_heads, s.n_kv_heads, s.head_dim) for s in sites} == {(4, 2, 16)}


def test_padding_without_numbers_is_told():
    """Token 0's row of zeros, and a norm without an epsilon."""
    own, params = nnx_mha.build()

    def normed(params: Any, tokens: Any, positions: Any) -> Any:
        one = jnp.where(tokens == 0, 0.0, params["size"])
        return own(params["own"], tokens, positions) + (one / jnp.abs(one))[..., None]

    model = FlaxModel(
        normed,
        {"own": params, "size": np.ones((), np.float32)},
        vocab_size=nnx_mha.VOCAB_SIZE,
        max_model_len=nnx_mha.MAX_LEN,
    )
    with pytest.raises(SplitError, match="for token 0 at position 0, with which batches are filled up"):
        model.check()


def test_the_drawing_says_where_each_attention_was_found():
    model = flax_model("soft_cap_window")
    row = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    picture = to_svg(split(model.found, model.params, row, row), layers=slice(None))
    line = re.search(r"soft_cap_window.py:\d+", model.found.sites[0].where)
    assert line and picture.count(f">found at {line[0]}<") == 3 and "sliding window 7" in picture


# --- What is refused ---

REFUSED = {
    "bidirectional_mask": "there is no mask: every token sees all others",
    "prefix_lm_mask": "its mask is not causal: the token at place 0 sees the one at 1",
    "softmax_over_queries": "what it computes is not softmax attention",
    "probabilities_used_elsewhere": "its scores are used elsewhere too, at",
    "scores_used_elsewhere": "its scores are used elsewhere too, at",
    "causal_convolution": "pad mixes tokens: attention is the only thing that may",
    "cumulative_mean": "cumsum mixes tokens: attention is the only thing that may",
    "relative_position_bias": r"something besides q·k that is learned \(a bias, a sink or a scale",
    "attention_sink": r"something besides q·k that is learned \(a bias, a sink or a scale",
    "values_of_memory": "its values are not made of the tokens",
}


def model_that_is_refused(name: str) -> FlaxModel:
    fn, params = getattr(refused, name)()
    return FlaxModel(fn, params, vocab_size=refused.VOCAB_SIZE, max_model_len=refused.MAX_LEN)


@pytest.mark.parametrize("name", REFUSED)
def test_what_attention_over_kv_cannot_give_is_refused_with_its_line(name: str):
    with pytest.raises(SplitError, match=REFUSED[name]) as error:
        _ = model_that_is_refused(name).found
    text = str(error.value)
    assert text.startswith("decoder.<locals>.fn cannot be cut:\n- "), text
    lines = [int(n) for n in re.findall(r"refused\.py:(\d+)", text)]
    source, first = inspect.getsourcelines(getattr(refused, name))
    shared = [inspect.getsourcelines(f) for f in (refused.scores_of, refused.masked_attention)]
    ranges = [range(start, start + len(of)) for of, start in ((source, first), *shared)]
    assert lines and all(any(n in r for r in ranges) for n in lines), text


def test_attention_to_what_is_not_of_the_row_stays_in_the_slice():
    """Cross attention to a memory of parameters mixes no tokens."""
    model = model_that_is_refused("cross_attention")
    assert model.check() < 1e-5 and len(model.found.sites) == refused.LAYERS


def test_all_places_are_said_at_once():
    with pytest.raises(SplitError) as error:
        _ = model_that_is_refused("causal_convolution").found
    assert len(str(error.value).splitlines()) >= 3


def fixed_length(params: Any, tokens: Any, positions: Any) -> Any:
    return params["embed"][tokens] + jnp.zeros((1, 64, 1))


def decided_by_data(params: Any, tokens: Any, positions: Any) -> Any:
    if tokens[0, 0] > 3:
        return params["embed"][tokens]
    return params["embed"][positions]


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (fixed_length, "TypeError: add got incompatible shapes"),
        (decided_by_data, "TracerBoolConversionError"),
    ],
)
def test_a_function_of_one_length_or_of_tokens_values_is_told_with_its_line(fn: Any, says: str):
    params = {"embed": np.ones((9, 4), np.float32)}
    with pytest.raises(SplitError, match=f"{fn.__name__} cannot be traced for a row of 11 tokens") as error:
        find_attention(fn, params, max_len=64)
    line = inspect.getsourcelines(fn)[1] + 1
    assert says in str(error.value) and f"test_find.py:{line} ({fn.__name__})" in str(error.value)
    assert "\n" not in str(error.value)


def sharded(params: Any, tokens: Any, positions: Any) -> Any:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    fn, _ = nnx_mha.build()
    everywhere = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec())
    return jax.lax.with_sharding_constraint(fn(params, tokens, positions), everywhere)


def test_a_models_own_sharding_is_refused_with_its_line():
    _, params = nnx_mha.build()
    with pytest.raises(SplitError, match=r"test_find.py:\d+ \(sharded\).*lays out values over a mesh"):
        find_attention(sharded, params, max_len=64)


def test_a_line_within_flax_is_told_as_its_callers():
    for name in ("nnx_mha", "linen_mhdpa"):
        assert all(f"{name}.py" in site.where for site in flax_model(name).found.sites)


# --- Forms ---


@settings(max_examples=16)
@given(st.fixed_dictionaries({axis: st.sampled_from(forms) for axis, forms in FORMS.items()}))
def test_any_composition_of_forms_is_found_and_means_the_same(form: dict[str, Any]):
    written = Written(**form)
    found = find_attention(written, written.params, max_len=64)
    assert len(found.sites) == 1
    [site] = found.sites
    assert (site.window, site.softcap) == (written.window, written.softcap)
    assert site.n_kv_heads == written.n_kv_heads
    agrees(found, written)


@settings(max_examples=16)
@given(
    st.fixed_dictionaries({axis: st.sampled_from(forms) for axis, forms in FORMS.items()}),
    st.sampled_from(NEAR_MISSES),
)
def test_near_misses_are_refused(form: dict[str, Any], miss: str):
    written = Written(**form, miss=miss)
    with pytest.raises(SplitError):
        find_attention(written, written.params, max_len=64)


# What a few tokens do not show: a row must be looked at as far as it may go.
FAR_MASKS = {
    "floats": lambda behind: behind.astype(jnp.float32) < 200.0,
    "sums": lambda behind: behind - 100 - 100 < 0,
    "beyond the row": lambda behind: behind - 50_000 < -49_800,
    "products": lambda behind: behind * 0.5 < 100,
    "doubles": lambda behind: behind < sum([jnp.zeros_like(behind) + 50] * 4),
}
FAR_MISSES = {
    "a factor of late tokens": (lambda s, at: s * jnp.where(at < 200, 1.0, 1.5)[:, None], "depends on a token's place"),
    "a bias of late keys": (lambda s, at: s + jnp.where(at < 200, 0.0, 1.5)[None, :], "depends on a token's place"),
    "a factor of how many": (lambda s, at: s * jnp.maximum(jnp.ones(at.shape).sum(), 200.0), "or on how many"),
    "clipped": (lambda s, at: jnp.clip(s, -400, 400), "clipped, or compared"),
    "does not see one": (lambda s, at: jnp.where((at == 400)[:, None] & (at == 9)[None], -jnp.inf, s), "mask is n"),
    "places in few bits": (lambda s, at: jnp.where(at.astype(jnp.int8)[:, None] > 120, 0.0, s), "mask is n"),
    "from a length on": (lambda s, at: s * 2 if len(at) > 400 else s, r"another number of tokens \(traced for 11, 13"),
}  # fmt: skip


def far(score: Any, visible: Any) -> tuple[Any, Any]:
    """A model of one attention with something done to its scores ``[B, N, T, T]`` and its mask."""
    written = Written(**{axis: forms[0] for axis, forms in FORMS.items()})

    def fn(params: Any, tokens: Any, positions: Any) -> Any:
        x = params["embed"][tokens] + jnp.sin(positions)[..., None]
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
        at = jnp.arange(tokens.shape[1])
        behind = at[:, None] - at[None, :]
        scores = score(jnp.einsum("bqnh,bknh->bnqk", q, k), at)
        weights = jax.nn.softmax(jnp.where((behind >= 0) & visible(behind), scores, -jnp.inf), axis=-1)
        y = jnp.einsum("btnh,nhd->btd", jnp.einsum("bnqk,bknh->bqnh", weights, v), params["o"])
        return (x + y) @ params["embed"].T

    return fn, written.params


@pytest.mark.parametrize("max_len", [600, 4500])
@pytest.mark.parametrize("name", FAR_MASKS)
def test_a_window_that_begins_far_from_the_rows_beginning_is_read(name: str, max_len: int):
    [site] = find_attention(*far(lambda s, at: s, FAR_MASKS[name]), max_len=max_len).sites
    assert site.window == 200


def many_heads(window: Any, heads: int = 32) -> Any:
    """What is found of as many heads as real models with long windows have; ``window(behind)`` is added to scores."""
    shapes = {"embed": (40, 8), "q": (8, heads, 4), "k": (8, 1, 4), "v": (8, 1, 4), "o": (heads, 4, 8)}
    params = {k: np.random.default_rng(0).standard_normal(s).astype(np.float32) for k, s in shapes.items()}

    def fn(params: Any, tokens: Any, positions: Any) -> Any:
        x = params["embed"][tokens] + jnp.sin(positions)[..., None]
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
        at = jnp.arange(tokens.shape[1])
        behind = at[:, None] - at[None, :]
        scores = jnp.einsum("bqnh,bkh->bnqk", q, k[:, :, 0])
        weights = jax.nn.softmax(jnp.where(behind >= 0, scores + window(behind), -1e30), axis=-1)
        y = jnp.einsum("btnh,nhd->btd", jnp.einsum("bnqk,bkh->bqnh", weights, v[:, :, 0]), params["o"])
        return (x + y) @ params["embed"].T

    [site] = find_attention(fn, params, max_len=4500).sites
    return site


def test_a_long_window_of_many_heads_is_found():
    """32 heads and 4,096 tokens, as Mistral has them: all scores at once would be 2 GB."""
    for window in (4096, 4095):
        site = many_heads(lambda behind, w=window: jnp.where(behind < w, 0.0, -1e30))
        assert (site.window, site.n_heads) == (window, 32)


def test_what_is_no_long_window_of_many_heads_is_refused():
    with pytest.raises(SplitError, match="what it computes is not softmax attention"):  # hides too little
        many_heads(lambda behind: jnp.where(behind < 4096, 0.0, -1.0))
    with pytest.raises(SplitError, match="not the same for all heads"):
        per_head = np.array([100] * 31 + [101])[:, None, None]
        many_heads(lambda behind: jnp.where(behind < per_head, 0.0, -1e30))


def test_a_mask_without_its_diagonal_is_told():
    def fn(params: Any, tokens: Any, positions: Any) -> Any:
        x = params["embed"][tokens] + jnp.sin(positions)[..., None]
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
        mask = jnp.tril(jnp.ones((x.shape[1],) * 2, bool), -1).at[0, 0].set(True)
        y = jax.nn.dot_product_attention(q, k, v, mask=mask)
        return (x + jnp.einsum("btnh,nhd->btd", y, params["o"])) @ params["embed"].T

    _, params = changed(lambda x, *_: x)
    with pytest.raises(SplitError, match="its mask hides each token from itself"):
        find_attention(fn, params, max_len=64)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_table_that_is_cut_from_its_end_is_refused(dynamic: bool):
    def from_end(x: Any, *_: Any) -> Any:
        table = jnp.sin(jnp.arange(64.0))[:, None] * jnp.ones(x.shape[-1])
        n = x.shape[1]
        return x + (jax.lax.dynamic_slice(table, (64 - n, 0), (n, x.shape[-1])) if dynamic else table[-n:])

    fn, params = changed(from_end)
    with pytest.raises(SplitError, match=r"test_find.py:\d+ .* depends on how many tokens there are"):
        found, row = find_attention(fn, params, max_len=64), jnp.arange(9)[None]
        found(dict(zip(found.param_names, jax.tree.leaves(params), strict=True)), row, row)


@pytest.mark.parametrize("max_len", [600, 4500])
@pytest.mark.parametrize("name", FAR_MISSES)
def test_what_differs_far_from_the_rows_beginning_is_refused(name: str, max_len: int):
    score, says = FAR_MISSES[name]
    with pytest.raises(SplitError, match=says):
        find_attention(*far(score, lambda behind: behind >= 0), max_len=max_len)


def lagged(x: Any, at: Any) -> Any:
    """Beyond 20 tokens each sees the one so far before it."""
    return x + jnp.where((at >= 20)[:, None], x[:, jnp.maximum(at - 20, 0)], 0)


def by_routers(x: Any, n_best: int) -> Any:
    """Each of four experts takes the tokens that fit it best."""
    best, index = jax.lax.top_k(jnp.swapaxes(x[..., :4], 1, 2), n_best)
    return x.at[0, index[0]].add(best[0][..., None])


def shifted(x: Any) -> Any:
    """Each token and the one 16 before it."""
    return x + jnp.pad(x, ((0, 0), (16, 0), (0, 0)))[:, : x.shape[1]]


def summed(x: Any) -> Any:
    """A recurrence along tokens."""
    _, y = jax.lax.scan(lambda c, xt: (0.9 * c + xt,) * 2, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(y, 0, 1)


def windowed(x: Any) -> Any:
    """Each token and the one 16 before it."""
    sizes = (1, 2, 1), (1, 1, 1), ((0, 0), (16, 0), (0, 0))
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, *sizes, window_dilation=(1, 16, 1))


def late_in_a_body(x: Any) -> Any:
    """A scan's body that numbers tokens."""
    late = lambda x: jnp.where(jnp.arange(x.shape[1])[:, None] >= 20, 2 * x, x)
    return jax.lax.scan(lambda x, _: (late(x), None), x, None, length=2)[0]


# Of x [B, T, D], tokens, places of the row: what a run on few random tokens does not show.
MIXES = {
    "how many of an id": (lambda x, tokens, at: x + jnp.cumsum(tokens == 7, 1)[..., None], "cumsum mixes"),
    "since an id": (lambda x, tokens, at: x + jax.lax.cummax((tokens == 7) * at, 1)[..., None], "cummax mixes"),
    "an id in the row": (lambda x, tokens, at: x + (tokens == 7).any(1)[:, None, None], "reduce_or mixes"),
    "counts of ids": (lambda x, tokens, at: x + jnp.bincount(tokens[0], length=9)[3], "scatter-add mixes"),
    "an id before": (lambda x, tokens, at: x + jnp.roll(tokens, 3, 1)[..., None], "slice mixes"),
    "a lag": (lambda x, tokens, at: lagged(x, at), "gather mixes"),
    "a place that is set": (lambda x, tokens, at: x.at[:, 40].set(0.0), "scatter mixes"),
    "the first": (lambda x, tokens, at: x + x[:, :1], "slice mixes"),
    "a prefix": (lambda x, tokens, at: jnp.concatenate([jnp.ones_like(x[:, :1] * 0), x], 1)[:, :-1], "mixes tokens"),
    "expert choice": (lambda x, tokens, at: by_routers(x, 2), "top_k mixes"),
    "sorted": (lambda x, tokens, at: jnp.sort(x, 1), "sort mixes"),
    "the best by routers": (lambda x, tokens, at: jax.lax.top_k(x.mT, x.shape[1])[0].mT, "top_k mixes"),
    "set elsewhere": (lambda x, tokens, at: jnp.zeros_like(x).at[:, at + 16].set(x), "scatter mixes"),
    "pairs": (lambda x, tokens, at: (x[:, :, None] * x[:, None])[:, :, at[0]], "mixes tokens"),
    "a window": (lambda x, tokens, at: windowed(x), "reduce_window_sum mixes"),
    "in a cond": (lambda x, tokens, at: jax.lax.cond(x[0, 0, 0] > 9, lambda x: x, shifted, x), "pad mixes"),
    "in a scan": (lambda x, tokens, at: jax.lax.scan(lambda x, _: (shifted(x), 0), x, None, 2)[0], "pad mixes"),
    "in a while": (
        lambda x, tokens, at: jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, shifted(s[1])), (0, x))[1],
        "pad mixes",
    ),
    "in a while's end": (
        lambda x, tokens, at: jax.lax.while_loop(lambda x: (x > 9).any(), lambda x: x / 2, x), "decides for all tokens"
    ),
    "in a remat of a scan": (
        lambda x, tokens, at: jax.lax.scan(lambda x, _: (jax.checkpoint(shifted)(x), 0), x, None, 2)[0], "pad mixes"
    ),
    "a recurrence": (lambda x, tokens, at: summed(x), "a scan over tokens carries a value"),
    "numbered in a body": (lambda x, tokens, at: late_in_a_body(x), "numbered or counted within a scan"),
}  # fmt: skip
# Of all positions of a row, or how many there are: found when it is cut.
OF_ROWS = {
    "the last": lambda x, positions: x * jnp.where(jnp.max(positions) >= 20, 2.0, 1.0),
    "the newest": lambda x, positions: x + positions[:, -1:, None],
    "since the first": lambda x, positions: x + (positions - positions[:, :1])[..., None],
    "how many": lambda x, positions: x * jnp.where(jnp.asarray(x.shape[1]) > 20, 2.0, 1.0),
}


def changed(change: Any) -> tuple[Any, Any]:
    """A model with something done to what its attention takes in."""
    written = Written(**{axis: forms[0] for axis, forms in FORMS.items()})

    def fn(params: Any, tokens: Any, positions: Any) -> Any:
        x = change(params["embed"][tokens] + jnp.sin(positions)[..., None], tokens, positions)
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return (x + jnp.einsum("btnh,nhd->btd", y, params["o"])) @ params["embed"].T

    return fn, written.params


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_tokens_is_refused_however_seldom_it_shows(name: str):
    change, says = MIXES[name]
    with pytest.raises(SplitError, match=rf"test_find.py:\d+ .*{says}"):
        find_attention(*changed(lambda x, tokens, _: change(x, tokens, jnp.arange(x.shape[1]))), max_len=64)


@pytest.mark.parametrize("name", OF_ROWS)
def test_what_all_positions_of_a_row_make_is_refused(name: str):
    fn, params = changed(lambda x, _, positions: OF_ROWS[name](x, positions))
    found = find_attention(fn, params, max_len=64)
    row = jnp.arange(9)[None]
    with pytest.raises(SplitError, match=r"test_find.py:\d+ .* is made of all positions of a row"):
        found(params, row, row)


def test_what_is_taken_from_its_own_place_is_not_mixed():
    fn, params = changed(lambda x, *_: x[:, jnp.arange(x.shape[1])].at[:, jnp.arange(x.shape[1])].mul(2.0))
    found = find_attention(fn, params, max_len=64)
    assert check_found(found, fn, params, 40) < 1e-5


APART = {
    "map": lambda x: jax.lax.map(
        lambda xt: xt * jnp.tanh(xt).mean(-1, keepdims=True), x.swapaxes(0, 1)
    ).swapaxes(0, 1),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x + jnp.tanh(x) * i, x),
    "while": lambda x: jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1],
    "cond": lambda x: jax.lax.cond(x.shape[2] > jnp.ones(()), jax.nn.silu, lambda x: x, x),
    "scan over experts": lambda x: jax.lax.scan(
        lambda y, w: (y + jax.checkpoint(jnp.tanh)(x @ w), None), x, jnp.ones((3, *x.shape[-1:] * 2))
    )[0],
    "window over features": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, 1, 2), (1, 1, 1), "SAME"
    ),
    "best features": lambda x: x + jax.lax.top_k(x, 3)[0].sum(-1, keepdims=True),
    "spread": lambda x: jnp.zeros_like(x).at[:, jnp.arange(x.shape[1])].set(x),
}


@pytest.mark.parametrize("name", APART)
def test_what_keeps_tokens_apart_is_let_through_in_bodies_too(name: str):
    fn, params = changed(lambda x, *_: APART[name](x))
    assert check_found(find_attention(fn, params, max_len=64), fn, params, 40) < 1e-5


@pytest.mark.parametrize("capacity", [16, 400])
def test_a_capacity_of_experts_is_found_by_running(capacity: int):
    """400: more than a row may have, and not more than rows that are computed together."""

    def expert(x: Any, *_: Any) -> Any:
        chosen = jax.nn.one_hot(jnp.argmax(x[..., :4], -1), 4, dtype=jnp.int32)
        place = jnp.sum(jnp.cumsum(chosen, 1) * chosen, -1)
        return jnp.where((place <= capacity)[..., None], 2 * x, x)

    fn, params = changed(expert)
    assert check_found(find_attention(fn, params, max_len=64), fn, params, 40) > 0.01


def test_a_number_that_is_the_traced_length_is_not_taken_for_it():
    """The first trace has 11 tokens: a window of 11 and one of all look the same there."""

    def fn(params: Any, tokens: Any, positions: Any) -> Any:
        x = params["embed"][tokens] + jnp.sin(positions)[..., None]
        at = jnp.arange(x.shape[1])
        behind = at[:, None] - at
        for window in (11, x.shape[1]):
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, params[name]) for name in "qkv")
            y = jax.nn.dot_product_attention(q, k, v, mask=(behind >= 0) & (behind < window))
            x += jnp.einsum("btnh,nhd->btd", y, params["o"])
        return x @ params["embed"].T

    _, params = changed(lambda x, *_: x)
    found = find_attention(fn, params, max_len=64)
    assert found._facts.learned.lengths[0] == 11 and [s.window for s in found.sites] == [11, None]

    def first(n: Any) -> Any:
        return find_attention(*changed(lambda x, *_: x * jnp.where(jnp.arange(x.shape[1]) < n(x), 1, 2)[:, None]),
                              max_len=64)  # fmt: skip

    assert first(lambda x: 11).fingerprint != first(lambda x: x.shape[1]).fingerprint


def agrees(found: Any, written: Any) -> None:
    """Rows of several tokens, and the same as the same tokens at places behind others."""
    params = {name: jnp.asarray(x) for name, x in written.params.items()}
    tokens = np.random.default_rng(1).integers(0, written.vocab_size, (2, 9)).astype(np.int32)
    places = np.broadcast_to(np.arange(9, dtype=np.int32), tokens.shape)
    expected, given_ = (
        np.asarray(jax.jit(fn, compiler_options=COMPILED_QUICKLY)(params, tokens, places))
        for fn in (written, found)
    )
    np.testing.assert_allclose(given_, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


# --- Layers ---


def test_eighty_layers_are_three_programs():
    """In a scan over stacked weights and in a Python loop."""
    for scanned in (True, False):
        fn, params = eighty(scanned)
        found = find_attention(fn, params, max_len=64)
        assert len(found.sites) == 80
        row = jax.ShapeDtypeStruct((2, 1), jnp.int32)
        model = split(found, dict(zip(found.param_names, jax.tree.leaves(params), strict=True)), row, row)
        assert model.n_programs <= 3


def eighty(scanned: bool, layers: int = 80) -> tuple[Any, Any]:
    d, heads, width = 16, 2, 8
    draw = iter(np.random.default_rng(0).standard_normal((400, d, d)).astype(np.float32) / 4)
    names = ("q", "k", "v", "o", "up")
    stacked = {name: np.stack([next(draw) for _ in range(layers)]) for name in names}
    embed = np.random.default_rng(1).standard_normal((32, d)).astype(np.float32)

    def layer(x: Any, p: Any) -> Any:
        b, t, _ = x.shape
        q, k, v = ((x @ p[n]).reshape(b, t, heads, width) for n in "qkv")
        mask = jnp.tril(jnp.ones((t, t), bool))
        scores = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k) * width**-0.5, -1e30)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v).reshape(b, t, d)
        x = x + out @ p["o"]
        return x + jnp.tanh(x @ p["up"])

    def fn(params: Any, tokens: Any, positions: Any) -> Any:
        x = params["embed"][tokens] + jnp.sin(positions)[..., None]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            for i in range(layers):
                x = layer(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        return x @ params["embed"].T

    return fn, {"embed": embed, "layers": stacked}
