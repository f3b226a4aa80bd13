"""The Mosaic GPU backend of partial attention, for Hopper and later: `gpu.partial` as Pallas kernels.

Two kernels: partials of equal stretches of the batch's tokens, then their combination, in a decode step with
the token that is not stored yet, and with what others computed of other tokens meanwhile. Knows arrays; who
picks this backend is `dispatch`. With `interpret=True` the same warp programs run in numpy, for tests without
a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import BFloat16, Float, Float32, Int32

from pallas_kernels import compat
from pallas_kernels.dispatch import default_device
from pallas_kernels.gpu.combine import Combination, OwnToken
from pallas_kernels.gpu.partial import PartialAttention
from pallas_kernels.gpu.plan import make_plan
from pallas_kernels.gpu.spec import LINE, Memory, Spec, Tuning
from pallas_kernels.gpu.tunings import tuned
from pallas_kernels.gpu.warp_numpy import Cta, WarpMachine
from pallas_kernels.quantized import ChannelQuantizedPool, Like, Pool, PoolLike, QuantizedPool, values_of

_KINDS = {"bfloat16": "bf16", "float16": "f16", "int8": "int8"}
_COMBINE_WARPS = 8
# Empty, or each request's own token, bfloat16: q [B, 1, N, H], k and v [B, 1, K, H]; and if it is to be
# stored: slots [B], k_pool and v_pool [S, K, H].
Own = dict[str, Any]
_POOLS = ("k_pool", "v_pool")
_INPUTS = ("q", "k", "v", "k_lines", "v_lines", "k_scales", "v_scales", "table", "plan", "q_positions")

# A kernel is part of what `Begun` is made of: structure, not data.
jax.tree_util.register_static(Spec)


class _Parts(NamedTuple):
    """What the first program leaves to the second. Of partials (`Spec.partial_shape`) only those are written
    that the plan has."""

    plan: Int32[Array, " plan"]
    out: Float32[Array, "parts ways heads rows H"]
    lse: Float32[Array, "parts ways heads rows"]  # log2 of the softmax mass


def supports(q: Float[Like, "B Tq N H"], k_pool: PoolLike, *, return_mass: bool = False) -> str | None:
    """None if this backend computes the case, else why not."""
    values = values_of(k_pool)
    kind = _KINDS.get(jnp.dtype(values.dtype).name)
    if kind is None:
        return f"keys of {jnp.dtype(values.dtype).name}: tensor cores would round them"
    if return_mass:
        return "attention mass is not returned"
    if q.shape[-1] % 16 or not 16 <= q.shape[-1] <= 256:
        return f"head dim {q.shape[-1]} is not a multiple of 16 up to 256"
    return None


def partial_attention(
    q: Float[Array, "B Tq N H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    q_positions: Int32[Array, "B Tq"] | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    return_mass: bool = False,
    interpret: bool = False,
    tuning: Tuning | None = None,
    plan: Int32[Array, " plan"] | None = None,
) -> tuple[Float32[Array, "B Tq N H"], Float32[Array, "B Tq N"]]:
    """As `pallas_kernels.partial_attention`; `plan` as `plan_for` gives it, made here if there is none."""
    reason = supports(q, k_pool, return_mass=return_mass)
    if reason is not None:
        raise ValueError(
            f"the mosaic_gpu backend does not do this case ({reason}): use backend triton or xla"
        )
    spec, given = _given(
        q, k_pool, v_pool, slot_table, lengths, q_positions, scale, window, softcap, tuning, plan
    )
    out, lse = _combined(spec, _attended(spec, given, interpret), {}, (), interpret)
    if isinstance(v_pool, ChannelQuantizedPool):
        out = out * jnp.repeat(v_pool.scales, spec.G, axis=0)
    return out, lse


def supports_own_token(q: Float[Array, "B Tq N H"], k_pool: Pool) -> bool:
    """Whether `attention_with_own` does the case."""
    by_channel = isinstance(k_pool, ChannelQuantizedPool)
    return q.dtype == jnp.bfloat16 and q.shape[1] == 1 and not by_channel and supports(q, k_pool) is None


def attention_with_own(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
    tuning: Tuning | None = None,
) -> BFloat16[Array, "B 1 N H"]:
    """As `pallas_kernels.attention_with_own`, where `supports_own_token`: the second kernel attends the own
    token."""
    spec, given = _given(q, k_pool, v_pool, slot_table, lengths, None, scale, window, softcap, tuning, None)
    return _combined(spec, _attended(spec, given, interpret), _own(q, k, v), (), interpret)[0]


def supports_decode(q: Float[Array, "B Tq N H"], k_pool: Pool) -> bool:
    """Whether `decode_attention`, or its two calls, do the case."""
    plain = not isinstance(k_pool, QuantizedPool) and values_of(k_pool).dtype == jnp.bfloat16
    return plain and compat.KERNELS_WRITE_ARGUMENTS and supports_own_token(q, k_pool)


def decode_attention(
    q: Float[Array, "B 1 N H"],
    k_new: Float[Array, "B 1 K H"],
    v_new: Float[Array, "B 1 K H"],
    k_pool: Float[Array, "S K H"],
    v_pool: Float[Array, "S K H"],
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    new_slots: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
    tuning: Tuning | None = None,
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"], Float[Array, "B 1 N H"]]:
    """As `pallas_kernels.decode_attention`, where `supports_decode`: the second kernel stores the new tokens,
    too."""
    scoring: Any = {"scale": scale, "softcap": softcap}
    begun = begin_decode_attention(
        q, k_pool, v_pool, slot_table, lengths, **scoring, window=window, interpret=interpret, tuning=tuning
    )
    return end_decode_attention(
        *begun, q, k_new, v_new, k_pool, v_pool, new_slots, (), **scoring, interpret=interpret
    )


def begin_decode_attention(
    q: Float[Array, "B 1 N H"],
    k_pool: Float[Array, "S K H"],
    v_pool: Float[Array, "S K H"],
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interpret: bool = False,
    tuning: Tuning | None = None,
) -> tuple[
    Float32[Array, "parts ways heads rows H"],
    Float32[Array, "parts ways heads rows"],
    Int32[Array, " plan"],
    Spec,
]:
    """As `pallas_kernels.begin_decode_attention`, where `supports_decode`, and what `Begun` is made of: the
    first kernel."""
    spec, given = _given(q, k_pool, v_pool, slot_table, lengths, None, scale, window, softcap, tuning, None)
    plan, out, lse = _attended(spec, given, interpret)
    return out, lse, plan, spec


def end_decode_attention(
    out: Float32[Array, "parts ways heads rows H"],
    lse: Float32[Array, "parts ways heads rows"],
    plan: Int32[Array, " plan"],
    spec: Spec,
    q: Float[Array, "B 1 N H"],
    k_new: Float[Array, "B 1 K H"],
    v_new: Float[Array, "B 1 K H"],
    k_pool: Float[Array, "S K H"],
    v_pool: Float[Array, "S K H"],
    new_slots: Int32[Array, " B"],
    others: Sequence[Float32[Array, "B 1 N H1"]],
    *,
    scale: float,
    softcap: float | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "S K H"], Float[Array, "S K H"], Float[Array, "B 1 N H"]]:
    """As `pallas_kernels.end_decode_attention`, of what `begin_decode_attention` gave: the second kernel."""
    assert (spec.scale, spec.softcap) == (float(scale), softcap), "scored otherwise than at the beginning"
    own = _own(q, k_new, v_new) | {"slots": new_slots.astype(jnp.int32), "k_pool": k_pool, "v_pool": v_pool}
    found, *pools = _combined(spec, _Parts(plan, out, lse), own, tuple(others), interpret)
    return pools[0], pools[1], found


def _own(q: Array, k: Array, v: Array) -> Own:
    return {name: x.astype(jnp.bfloat16) for name, x in (("q", q), ("k", k), ("v", v))}


def _given(
    q: Float[Array, "B Tq N H"],
    k_pool: Pool,
    v_pool: Pool,
    slot_table: Int32[Array, "B C"],
    lengths: Int32[Array, " B"],
    q_positions: Int32[Array, "B Tq"] | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    tuning: Tuning | None,
    plan: Array | None,
) -> tuple[Spec, dict[str, Array]]:
    """The kernel, and the first program's arrays by name."""
    if slot_table.shape[1] == 0:  # nothing is stored; the kernel wants something to point at
        slot_table = jnp.zeros((slot_table.shape[0], 1), jnp.int32)
    spec = spec_for(q, k_pool, slot_table, q_positions, scale, window, softcap, tuning)
    if plan is None:
        plan = plan_for(spec, lengths, q_positions)
    dtype = jnp.bfloat16 if spec.product == "bf16" else jnp.float16
    if isinstance(k_pool, ChannelQuantizedPool):
        by = jnp.repeat(k_pool.scales, spec.G, axis=0)
        q = q.astype(jnp.float32) * by
    arrays = {"q": q.astype(dtype), "k": _lines(spec, k_pool), "v": _lines(spec, v_pool)}
    if spec.slot_scales:
        assert isinstance(k_pool, QuantizedPool) and isinstance(v_pool, QuantizedPool)
        arrays |= {"k_scales": k_pool.scales, "v_scales": v_pool.scales}
    arrays |= {"table": slot_table.astype(jnp.int32), "plan": plan}
    if spec.positions or spec.window is not None:
        arrays["q_positions"] = _positions(spec, lengths, q_positions)
    return spec, arrays


def spec_for(
    q: Float[Array, "B Tq N H"],
    k_pool: Pool,
    slot_table: Int32[Array, "B C"],
    q_positions: Int32[Array, "B Tq"] | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    tuning: Tuning | None = None,
) -> Spec:
    """The kernel for these shapes; without `tuning` the one that `gpu.tunings` has for the device."""
    values = values_of(k_pool)
    b, tq, n, h = q.shape
    spec = Spec(
        B=b, Tq=tq, N=n, K=values.shape[1], H=h, C=slot_table.shape[1],
        kind=_KINDS[jnp.dtype(values.dtype).name],
        scale=float(scale), window=window, softcap=softcap,
        slot_scales=isinstance(k_pool, QuantizedPool),
        positions=q_positions is not None,
        tuning=tuning or Tuning(n_ctas=multiprocessors()),
    )  # fmt: skip
    return spec if tuning is not None else replace(spec, tuning=tuned(spec, default_device().device_kind))


def multiprocessors() -> int:
    """Of the GPU that is traced for, or an H200's where there is none."""
    device = default_device()
    return int(getattr(device, "core_count", 132)) if device.platform == "gpu" else 132


def plan_for(
    spec: Spec, lengths: Int32[Array, " B"], q_positions: Int32[Array, "B Tq"] | None
) -> Int32[Array, " plan"]:
    """The plan of a step; equal for all layers of equal spec, and XLA then computes it once."""
    first, end = jnp.zeros_like(lengths), lengths
    if spec.positions or spec.window is not None:
        at = _positions(spec, lengths, q_positions)
        end = jnp.minimum(lengths, jnp.max(at, axis=1) + 1)
        if spec.window is not None:
            first = jnp.maximum(0, jnp.min(at, axis=1) - spec.window + 1)
    return make_plan(spec.layout, first, end, tile_tokens=spec.tile_tokens)


def _positions(spec: Spec, lengths: Array, q_positions: Array | None) -> Array:
    if q_positions is None:
        q_positions = lengths[:, None] + jnp.arange(spec.Tq, dtype=jnp.int32)
    return q_positions.astype(jnp.int32)


def _lines(spec: Spec, pool: Pool) -> Array:
    """The pool's values as the copy engine takes them: a slot's row in lines of 128 bytes, where it has whole
    ones."""
    values = values_of(pool)
    return values.reshape(values.shape[0], -1, LINE // values.dtype.itemsize) if spec.swizzled else values


def _memory(given: dict[str, Any], out: Any, lse: Any) -> Memory:
    return Memory(**(dict.fromkeys(_INPUTS) | given), out=out, lse=lse)


def _part_types(spec: Spec) -> tuple[jax.ShapeDtypeStruct, ...]:
    part = spec.partial_shape
    return jax.ShapeDtypeStruct((*part, spec.H), jnp.float32), jax.ShapeDtypeStruct(part, jnp.float32)


def _results(spec: Spec, own: Own) -> tuple[Any, ...]:
    """What the second program makes; not the pools, which it writes to."""
    shape = (spec.B, spec.Tq, spec.N, spec.H)
    if own:
        return (jax.ShapeDtypeStruct(shape, jnp.bfloat16),)
    return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)


def _combine_ctas(spec: Spec) -> int:
    rows = spec.B * spec.Tq * spec.N
    return min(8 * spec.tuning.n_ctas, -(-rows // _COMBINE_WARPS))


def _attended(spec: Spec, arrays: dict[str, Array], interpret: bool) -> _Parts:
    """The first program."""
    run = _attended_in_numpy if interpret else _attended_compiled
    out, lse = run(spec, tuple(arrays), *arrays.values())
    return _Parts(arrays["plan"], out, lse)


def _combined(
    spec: Spec, parts: _Parts, own: Own, others: tuple[Array, ...], interpret: bool
) -> tuple[Any, ...]:
    """The second program: its results, and the pools if it stored something. ``others``: packed partials
    `[B, 1, N, H + 1]`."""
    assert all(x.shape == (spec.B, 1, spec.N, spec.H + 1) and x.dtype == jnp.float32 for x in others)
    return (_combined_in_numpy if interpret else _combined_compiled)(spec, parts, own, others)


def _combine(w: Any, spec: Spec, pointers: Sequence[Any], own: Own) -> None:
    """The second program of a warp. Pointers: `_Parts`, what there is of own tokens, others' partials, and
    the results."""
    plan, part_out, part_lse, *rest = pointers
    memory = _memory({"plan": plan}, part_out, part_lse)
    program = Combination(w, spec, memory, _COMBINE_WARPS, _combine_ctas(spec))
    if not own:
        program.run_partials(*rest)
        return
    given, (*others, out) = dict(zip(own, rest, strict=False)), rest[len(own) :]
    n_slots = own["k_pool"].shape[0] if "k_pool" in own else 0
    program.run_with_own(OwnToken(**given, out=out, n_slots=n_slots, others=others))


def _kernel(body: Any, **options: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(body, compiler_params=params, grid_names=("cta",), thread_name="warpgroup", **options)


def _attended_compiled(spec: Spec, names: tuple[str, ...], *arrays: Array) -> tuple[Array, Array]:
    """The first program as a Mosaic GPU kernel."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.gpu.warp_mosaic import MosaicWarp, global_pointer, lines_of, shared_pointer

    n = len(arrays)

    def attend(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
        def program(context: Any, *refs: Any) -> None:
            *globals_, shared = refs
            pointers = [global_pointer(r) for r in globals_]
            given = dict(zip(names, pointers, strict=False))
            if spec.swizzled:
                n_lines = spec.token_bytes // LINE
                given |= {f"{n}_lines": lines_of(context, refs[names.index(n)], n_lines) for n in ("k", "v")}
            memory = _memory(given, *pointers[n:])
            PartialAttention(MosaicWarp(), spec, memory, shared_pointer(shared)).run()

        program(*refs)

    out, lse = _kernel(
        attend,
        out_type=_part_types(spec),
        scratch_types=(plgpu.SMEM((spec.shared_bytes,), jnp.int8),),
        grid=(spec.tuning.n_ctas,),
        num_threads=spec.tuning.n_warps // 4 + 1,
    )(*arrays)
    return out, lse


def _combined_compiled(spec: Spec, parts: _Parts, own: Own, others: tuple[Array, ...]) -> tuple[Any, ...]:
    """The second program as a Mosaic GPU kernel."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.gpu.warp_mosaic import MosaicWarp, global_pointer

    pools = {name: jax.new_ref(own[name]) for name in _POOLS if name in own}

    def combine(*refs: Any) -> None:
        @plgpu.inline_mgpu(arg_types=tuple(plgpu.RefType() for _ in refs))
        def program(_ctx: Any, *refs: Any) -> None:
            _combine(MosaicWarp(), spec, [global_pointer(r) for r in refs], own)

        program(*refs)

    results = _kernel(
        combine,
        out_type=_results(spec, own),
        grid=(_combine_ctas(spec),),
        num_threads=_COMBINE_WARPS // 4,
    )(*parts, *(own | pools).values(), *others)
    return (*results, *(jax.freeze(pool) for pool in pools.values()))


def _attended_in_numpy(spec: Spec, names: tuple[str, ...], *arrays: Array) -> tuple[Array, Array]:
    types = _part_types(spec)
    found: tuple[Array, Array] = jax.pure_callback(partial(_run_attended, spec, names), types, *arrays)
    return found


def _run_attended(spec: Spec, names: tuple[str, ...], *arrays: Any) -> tuple[np.ndarray, ...]:
    """Every warp of the first program in numpy, CTA by CTA. Unwritten results stay NaN."""
    types = dict(zip(("out", "lse"), _part_types(spec), strict=True))
    memory = _bytes_of(dict(zip(names, arrays, strict=True)), types)
    given: dict[str, Any] = {name: name for name in names}
    if spec.swizzled:
        given |= {f"{n}_lines": (n, spec.K * spec.row_bytes // LINE) for n in ("k", "v")}
    pointers = _memory(given, "out", "lse")
    n_warps = spec.tuning.n_warps + 4
    for index in range(spec.tuning.n_ctas):
        cta = Cta(spec.shared_bytes, n_warps)
        warps = [WarpMachine(memory, cta, index, warp) for warp in range(n_warps)]
        cta.run([PartialAttention(w, spec, pointers, 0).run for w in warps])
    return _arrays_of(memory, types)


def _combined_in_numpy(spec: Spec, parts: _Parts, own: Own, others: tuple[Array, ...]) -> tuple[Any, ...]:
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in own.items()}
    types = (*_results(spec, own), *(shapes[name] for name in _POOLS if name in own))
    run = partial(_run_combined, spec, shapes, types)
    found: tuple[Any, ...] = jax.pure_callback(run, types, *parts, *own.values(), *others)
    return found


def _run_combined(spec: Spec, own: Own, types: Sequence[Any], *arrays: Any) -> tuple[np.ndarray, ...]:
    """Every warp of the second program in numpy, CTA by CTA; the pools among its results are those that it
    was given."""
    given = dict(zip((*_Parts._fields, *own), arrays, strict=False))
    given |= {f"other {i}": x for i, x in enumerate(arrays[len(given) :])}
    pools = [name for name in _POOLS if name in own]
    results = {f"result {i}": t for i, t in enumerate(types[: len(types) - len(pools)])}
    memory = _bytes_of(given, results)
    for index in range(_combine_ctas(spec)):
        cta = Cta(0, _COMBINE_WARPS)
        for warp in range(_COMBINE_WARPS):
            _combine(WarpMachine(memory, cta, index, warp), spec, [*given, *results], own)
    return _arrays_of(memory, results | {name: own[name] for name in pools})


def _bytes_of(given: dict[str, Any], results: dict[str, Any]) -> dict[str, np.ndarray]:
    """Global memory: copies of arrays by name, and room for results, NaN in every format."""
    memory = {name: np.array(x).view(np.uint8).reshape(-1) for name, x in given.items()}
    sizes = {name: math.prod(t.shape) * t.dtype.itemsize for name, t in results.items()}
    return memory | {name: np.full(size, 0xFF, np.uint8) for name, size in sizes.items()}


def _arrays_of(memory: dict[str, np.ndarray], types: dict[str, Any]) -> tuple[np.ndarray, ...]:
    return tuple(memory[name].view(t.dtype).reshape(t.shape) for name, t in types.items())
