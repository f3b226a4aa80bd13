"""Every attention backend against the float64 reference, on inputs that are new every run.

XLA runs as it is, the others in interpret mode on a CPU, or compiled where their device is there (marker
gpu). The seed is in a failure's output; JAXLAMINA_TEST_SEED brings it back.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    FORMS,
    TOLERANCE,
    Case,
    Shape,
    check,
    check_outputs,
    check_probabilities,
    combined,
    partials_of_others,
)
from kernel_sweep import emulated
from native_levels import each_level  # noqa: F401  # a fixture

import pallas_kernels as pk
from pallas_kernels import compat, cpu, dispatch, reference
from pallas_kernels.order import tied
from pallas_kernels.quantized import values_of

# What a backend must do itself, so that a new refusal is noticed.
SERVES = {
    "xla": FORMS,
    "native": FORMS,
    "mosaic_tpu": ("bfloat16", "float32", "int8", "int8-channel"),
    "mosaic_gpu": ("bfloat16", "float16", "int8", "int8-channel"),
    "triton": ("bfloat16", "float16", "float32", "int8", "int8-channel"),
}


ALL = [
    *(
        Shape(n, k, h, form)
        for n, k in ((6, 2), (4, 4))
        for h in (64, 80, 96, 128, 256)
        for form in FORMS[:3]
    ),
    *(Shape(h=h, form=form) for h in (64, 80, 128) for form in FORMS[3:]),
    *(Shape(form=form, tq=3, among=True, window=5, softcap=8.0) for form in FORMS),
    *(Shape(form=form, window=9) for form in FORMS),
    *(Shape(form=form, softcap=4.0) for form in FORMS),
    *(Shape(form=form, q_dtype="float32") for form in FORMS[3:]),
    Shape(9, 3, 64, "float32", (256, 70, 3), tq=2),
    Shape(16, 8, 64, "bfloat16", (0, 0)),
    Shape(8, 1, 32, "float32", (130, 5)),
]
# KV heads that no group of several divides: Hopper's groups overlap where a head's row is whole lines.
APART = [
    Shape(11, 11, 64, "bfloat16", (20, 0, 3)),
    Shape(26, 13, 64, "float16", (18, 5), tq=3, among=True),
    Shape(9, 9, 128, "int8", (17, 2)),
    Shape(11, 11, 64, "int8", (17, 2)),  # of half lines: one by one
]
ALL += APART
# What native code does in pieces: tokens of long contexts, queries of chunks.
LONG = [
    Shape(9, 3, 64, form, (700, 300, 0, 1000), tq=40, among=among, window=window, softcap=softcap)
    for form in FORMS
    for among, window, softcap in ((False, None, None), (True, 200, 8.0))
] + [
    Shape(9, 3, 64, "float32", (9000, 3)),
    Shape(32, 4, 128, "bfloat16", (600, 257), tq=4, among=True, window=300),
    *(Shape(6, 2, h, "bfloat16", (20, 30)) for h in (1, 7, 20, 72, 112)),
]
# Interpreters take seconds to compile a case: what differs between kernels is spread over these.
FEW = [
    Shape(9, 3, 64, "bfloat16", (150, 0, 3)),
    Shape(4, 4, 80, "float32", (20, 1)),
    Shape(8, 2, 96, "bfloat16", tq=3, among=True, window=5),
    Shape(8, 1, 128, "float16", softcap=4.0),
    Shape(6, 2, 128, "float32", (0, 40), tq=3, among=True, window=5, softcap=8.0),
    Shape(6, 2, 256, "bfloat16", (17, 5), window=9),
    Shape(6, 2, 64, "int8", window=9),
    Shape(4, 4, 128, "int8", tq=2, among=True, q_dtype="float32", softcap=4.0),
    Shape(6, 2, 80, "int8-channel"),
]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("JAXLAMINA_TEST_SEED", np.random.SeedSequence().entropy))  # type: ignore[arg-type]
    print(f"JAXLAMINA_TEST_SEED={seed}")
    return np.random.default_rng(seed)


def run(backend: str, case: Case, *, compiled: bool, return_mass: bool = False) -> tuple[Any, ...]:
    module = dispatch._module(backend)
    attend = functools.partial(
        module.partial_attention, return_mass=return_mass, interpret=not compiled, **case.options
    )
    return jax.jit(attend)(*case.args(), case.positions)


def serve(backend: str, shape: Shape, rng: np.random.Generator, *, compiled: bool) -> None:
    """The case is computed, or refused by name where the backend is known not to do it."""
    case = Case(shape, rng)
    reason = dispatch.why_not(backend, case.q, case.k, return_mass=False)
    if reason is None:
        check(case, *run(backend, case, compiled=compiled), backend)
        return
    assert shape.form not in SERVES[backend] or shape.q_dtype, reason
    with pytest.raises(ValueError, match=f"{backend} .*xla"):
        pk.partial_attention(*case.args(), backend=backend, **case.options)


def missing(name: str) -> Any:
    found = importlib.util.find_spec(f"pallas_kernels.{name}") is not None
    return pytest.mark.skipif(not found, reason=f"pallas_kernels.{name} is not in this build")


@pytest.mark.parametrize("shape", ALL, ids=lambda s: s.name)
def test_xla(shape: Shape, rng: np.random.Generator) -> None:
    serve("xla", shape, rng, compiled=True)


native = pytest.mark.skipif(cpu.loaded().library is None, reason=f"no native kernels: {cpu.loaded().reason}")


@native
@pytest.mark.parametrize("shape", [*ALL, *LONG], ids=lambda s: s.name)
def test_native(shape: Shape, level: str, rng: np.random.Generator) -> None:
    serve("native", shape, rng, compiled=True)


@native
def test_native_results_depend_on_the_request_alone(level: str, rng: np.random.Generator) -> None:
    """To the bit: who else is in the batch, and so how the work is dealt to threads, changes nothing."""
    case = Case(Shape(9, 3, 64, "float32", (700, 5, 1300, 0, 256, 257)), rng)
    out, lse = run("native", case, compiled=True)
    for row in range(len(case.lengths)):
        alone = pk.partial_attention(
            case.q[row : row + 1], case.k, case.v, case.table[row : row + 1], case.lengths[row : row + 1],
            backend="native", **case.options,
        )  # fmt: skip
        np.testing.assert_array_equal(alone[0][0], out[row])
        np.testing.assert_array_equal(alone[1][0], lse[row])


@native
def test_native_in_many_calls_at_once(rng: np.random.Generator) -> None:
    """Callers share the pool's threads; none waits for another."""
    case = Case(Shape(9, 3, 64, "float32", (700, 5, 1300)), rng)
    attend = jax.jit(functools.partial(pk.partial_attention, backend="native", **case.options))
    want = [np.asarray(x) for x in attend(*case.args())]
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: attend(*case.args()), range(64)):
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y)


@native
def test_native_in_loops_maps_and_derivatives(rng: np.random.Generator) -> None:
    """Within scan and vmap; a chunk's attention has XLA's derivative."""
    case = Case(Shape(lengths=(40, 9)), rng)
    args, options = case.args(), case.options | {"backend": "native"}
    want, _ = pk.partial_attention(*args, **options)
    queries = jnp.stack([case.q, case.q])
    scanned = jax.jit(
        lambda qs: jax.lax.scan(lambda c, q: (c, pk.partial_attention(q, *args[1:], **options)[0]), 0, qs)[1]
    )(queries)
    mapped = jax.vmap(lambda q: pk.partial_attention(q, *args[1:], **options)[0])(queries)
    for got in (scanned, mapped):
        np.testing.assert_allclose(got, jnp.stack([want, want]), atol=1e-6)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 7, n, 16)), jnp.float32) for n in (4, 2, 2))

    def loss(q: Any) -> Any:
        return jnp.sum(pk.causal_attention(q, k, v, scale=0.3) ** 2)

    native = jax.grad(loss)(q)
    with pk.use_backend("xla"):
        np.testing.assert_allclose(native, jax.grad(loss)(q), atol=1e-4)


@native
@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("window,lengths", [(None, None), (100, (300, 77))])
def test_a_chunks_own_partial_by_native_code(
    form: str, window: int | None, lengths: tuple[int, ...] | None, level: str, rng: np.random.Generator
) -> None:
    q, k, v = (jnp.asarray(rng.normal(size=(2, 300, n, 64)), form) for n in (6, 2, 2))
    ends = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    out, lse = jax.jit(functools.partial(pk.causal_partial, scale=0.125, window=window))(q, k, v, ends)
    want, want_lse = reference.causal_partial(q, k, v, ends, scale=0.125, window=window)
    assert np.isfinite(out).all() and np.isfinite(lse).all()  # a pad's NaN would spread
    for row in range(2):
        real = slice(0, 300 if lengths is None else lengths[row])
        check_outputs(out[row, real], want[row, real], TOLERANCE[form])
        np.testing.assert_allclose(lse[row, real], want_lse[row, real], atol=3 * TOLERANCE[form])


@native
def test_a_library_for_a_newer_jax_is_not_registered(monkeypatch: Any) -> None:
    """XLA would refuse to start."""
    monkeypatch.setattr(compat, "ffi_version", lambda: 1)
    found = cpu.loaded.__wrapped__()
    assert found.library is None and "newer JAX" in found.reason


@native
def test_attention_without_the_library_is_xlas(monkeypatch: Any) -> None:
    monkeypatch.setattr(cpu, "loaded", lambda: cpu.NativeLibrary(None, "the library is not built"))
    q, pool = jnp.zeros((1, 1, 2, 8)), jnp.zeros((4, 2, 8))
    assert dispatch.pick(q, pool, return_mass=False).__name__ == "pallas_kernels.xla"
    with pytest.raises(ValueError, match="native .*not built.* use xla"):
        dispatch.pick(q, pool, return_mass=False, backend="native")


@pytest.mark.parametrize("shape", FEW, ids=lambda s: s.name)
def test_mosaic_tpu_interpreted(shape: Shape, rng: np.random.Generator) -> None:
    serve("mosaic_tpu", shape, rng, compiled=False)


@missing("triton")
@pytest.mark.parametrize("shape", FEW, ids=lambda s: s.name)
def test_triton_interpreted(shape: Shape, rng: np.random.Generator) -> None:
    serve("triton", shape, rng, compiled=False)


@pytest.fixture
def few_idle(monkeypatch: Any) -> None:
    """A GPU of 16 multiprocessors: more than a case has tiles, so that each has one tile or none, as on an
    H200's 132, whose idle ones took two thirds of the time in numpy."""
    monkeypatch.setattr(dispatch._module("mosaic_gpu"), "multiprocessors", lambda: 16)


@missing("mosaic_gpu")
@pytest.mark.usefixtures("few_idle")
@pytest.mark.parametrize(
    "shape",
    [
        *(
            pytest.param(s, marks=[pytest.mark.slow] * (i in (0, 5, 7))) for i, s in enumerate(FEW)
        ),  # seconds each
        *APART[:2],
    ],
    ids=lambda s: s.name,
)
def test_mosaic_gpu_interpreted(shape: Shape, rng: np.random.Generator) -> None:
    serve("mosaic_gpu", shape, rng, compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mosaic_tpu", "triton", "mosaic_gpu"])
@pytest.mark.parametrize("shape", ALL, ids=lambda s: s.name)
def test_interpreted_in_full(backend: str, shape: Shape, rng: np.random.Generator) -> None:
    serve(backend, shape, rng, compiled=False)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["mosaic_gpu", "triton", "xla"])
@pytest.mark.parametrize("shape", ALL, ids=lambda s: s.name)
def test_on_a_gpu(backend: str, shape: Shape, rng: np.random.Generator) -> None:
    if backend not in dispatch.candidates(jax.devices()[0]):
        pytest.skip(f"{backend} does not serve {jax.devices()[0].device_kind}")
    serve(backend, shape, rng, compiled=True)


OWN = [
    Shape(8, 2, 64, "bfloat16", (37, 0, 1, 20)),
    Shape(6, 6, 80, "bfloat16", (3, 0)),
    Shape(16, 2, 128, "bfloat16", (0, 0)),
    Shape(6, 2, 256, "bfloat16", (17, 5), window=9),
    Shape(8, 1, 96, "bfloat16", (130, 5), softcap=4.0),
    Shape(6, 2, 64, "int8", (20, 33), window=7),
    Shape(9, 9, 64, "bfloat16", (20, 1)),
]


def check_own(shape: Shape, rng: np.random.Generator, *, compiled: bool) -> None:
    """The kernel's output over stored tokens and each request's own, within what bfloat16 can say."""
    module = dispatch._module("mosaic_gpu")
    case = Case(shape, rng)
    k, v = (
        jnp.asarray(rng.normal(size=(len(shape.lengths), 1, shape.k, shape.h)), shape.dtype) for _ in "kv"
    )
    assert module.supports_own_token(case.q, case.k)
    options = {"interpret": not compiled, **case.options}
    got = jax.jit(functools.partial(module.attention_with_own, **options))(case.q, k, v, *case.args()[1:])
    assert got.dtype == case.q.dtype and got.shape == case.q.shape
    if shape.form == "bfloat16" and (compat.KERNELS_WRITE_ARGUMENTS or not compiled):
        # The last request is padding: its token is stored nowhere. Another's goes to a slot that nobody has.
        slots = rng.permutation(case.poisoned)[: len(shape.lengths)].astype(np.int32)
        slots[-1] = len(case.k)
        stored = pk.append(case.k, case.v, k[:, 0], v[:, 0], jnp.asarray(slots))
        store = jax.jit(functools.partial(module.decode_attention, **options), donate_argnums=(3, 4))
        *pools, out = store(case.q, k, v, case.k.copy(), case.v.copy(), case.table, case.lengths, slots)
        for pool, like in zip(pools, stored, strict=True):
            np.testing.assert_array_equal(_bits(pool), _bits(like))
        np.testing.assert_array_equal(_bits(out), _bits(got))
    own = reference.causal_partial(case.q, k, v, scale=case.options["scale"], softcap=shape.softcap)
    want = reference.combine(*zip(case.stored, own, strict=True))[0]
    error = np.linalg.norm(np.asarray(got, np.float64) - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() <= 1.5 * TOLERANCE["bfloat16"], f"{error.max()=:.2e}"


def _bits(x: Any) -> np.ndarray:
    return np.asarray(x).reshape(-1).view(np.uint8)


@pytest.mark.usefixtures("few_idle")
@pytest.mark.parametrize(
    "shape",
    [OWN[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in OWN[1:5]), *OWN[5:]],
    ids=lambda s: s.name,
)
def test_own_token_interpreted(shape: Shape, rng: np.random.Generator) -> None:
    check_own(shape, rng, compiled=False)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", OWN, ids=lambda s: s.name)
def test_own_token_on_a_gpu(shape: Shape, rng: np.random.Generator) -> None:
    check_own(shape, rng, compiled=True)


OTHERS = [
    (Shape(8, 2, 64, "bfloat16", (37, 0, 1, 20), window=9), 2),
    (Shape(2, 2, 128, "bfloat16", (3, 0, 18)), 1),
    (Shape(8, 2, 128, "bfloat16", (0, 0), softcap=4.0), 2),
    (Shape(3, 3, 64, "bfloat16", (5, 40)), 1),
    (Shape(4, 1, 96, "bfloat16", (0, 7)), 0),
]


def check_two_calls(shape: Shape, n_others: int, rng: np.random.Generator, *, compiled: bool) -> None:
    """Each a program of its own. With no others, and with others that have nothing, to the bit what
    `decode_attention` does."""
    module, case = dispatch._module("mosaic_gpu"), Case(shape, rng)
    b, how = len(shape.lengths), {"interpret": not compiled}
    k, v = (jnp.asarray(rng.normal(size=(b, 1, shape.k, shape.h)), shape.dtype) for _ in "kv")
    slots = jnp.asarray([*case.poisoned[: b - 1], len(case.k)], jnp.int32)
    others = partials_of_others(shape, n_others, rng)
    begun = jax.jit(functools.partial(module.begin_decode_attention, **how, **case.options))(*case.args())
    scoring = {name: case.options[name] for name in ("scale", "softcap")}
    end = jax.jit(functools.partial(module.end_decode_attention, **how, **scoring), donate_argnums=(7, 8))

    def ended(others: list[Any]) -> Any:
        return end(*begun, case.q, k, v, case.k.copy(), case.v.copy(), slots, others)

    *pools, out = ended(others)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    for pool, like in zip(pools, pk.append(case.k, case.v, k[:, 0], v[:, 0], slots), strict=True):
        np.testing.assert_array_equal(_bits(pool), _bits(like))
    own = reference.causal_partial(case.q, k, v, scale=case.options["scale"], softcap=shape.softcap)
    check_outputs(out, combined((case.stored, own), others), 1.5 * TOLERANCE["bfloat16"])
    once = jax.jit(functools.partial(module.decode_attention, **how, **case.options))
    *_, want = once(case.q, k, v, *case.args()[1:], slots)
    nothing = jnp.zeros((b, 1, shape.n, shape.h + 1)).at[..., -1].set(-jnp.inf)
    for of_nobody in ([], [nothing] * n_others):
        np.testing.assert_array_equal(_bits(ended(of_nobody)[2]), _bits(want))


@pytest.mark.usefixtures("few_idle")
@pytest.mark.parametrize(
    "shape,n_others",
    [*OTHERS[:2], *(pytest.param(*given, marks=pytest.mark.slow) for given in OTHERS[2:])],
    ids=lambda x: getattr(x, "name", x),
)
def test_two_calls_interpreted(shape: Shape, n_others: int, rng: np.random.Generator) -> None:
    check_two_calls(shape, n_others, rng, compiled=False)


@pytest.mark.gpu
@pytest.mark.skipif(not compat.KERNELS_WRITE_ARGUMENTS, reason="this JAX's kernels do not write to arguments")
@pytest.mark.parametrize("shape,n_others", OTHERS, ids=lambda x: getattr(x, "name", x))
def test_two_calls_on_a_gpu(shape: Shape, n_others: int, rng: np.random.Generator) -> None:
    check_two_calls(shape, n_others, rng, compiled=True)


@pytest.mark.usefixtures("unchecked")
def test_two_calls_in_one_program_are_the_kernels_where_they_can(rng: np.random.Generator) -> None:
    """As picked. What is needed between them is an array; the kernel itself is structure."""
    shape = Shape(2, 1, 64, "bfloat16", (3, 0))
    case, [other] = Case(shape, rng), partials_of_others(shape, 1, rng)
    k, v = (jnp.asarray(rng.normal(size=(2, 1, 1, 64)), jnp.bfloat16) for _ in "kv")

    @jax.jit
    def both(q: Any, *stored: Any) -> Any:
        by: Any = {"scale": case.options["scale"], "backend": "mosaic_gpu"}
        begun = pk.begin_decode_attention(q, *stored, **by)
        assert begun.kernel is not None and len(jax.tree.leaves(begun)) == 3
        waiting = tied(other, begun.done)
        return pk.end_decode_attention(begun, q, k, v, *stored[:2], case.lengths + 99, [waiting], **by)

    with emulated():
        *_, out = both(*case.args())
    own = reference.causal_partial(case.q, k, v, scale=case.options["scale"])
    check_outputs(out, combined((case.stored, own), [other]), 1.5 * TOLERANCE["bfloat16"])


@missing("mosaic_gpu")
@pytest.mark.parametrize(
    "shape",
    [
        Shape(9, 3, 64, "int8", (20, 3)),
        Shape(8, 2, 128, "bfloat16", window=5),
        Shape(3, 1, 48, "float16", tq=3),
        Shape(13, 13, 128, "bfloat16"),
    ],
    ids=lambda s: s.name,
)
def test_mosaic_gpu_lowers_without_a_gpu(shape: Shape, rng: np.random.Generator) -> None:
    """With every JAX: emulation knows nothing of how Mosaic takes a program."""
    module, case = dispatch._module("mosaic_gpu"), Case(shape, rng)
    k = v = jnp.zeros((len(shape.lengths), 1, shape.k, shape.h), shape.dtype)
    calls = [(module.partial_attention, (*case.args(), None))]
    if module.supports_own_token(case.q, case.k):
        calls.append((module.attention_with_own, (case.q, k, v, *case.args()[1:])))
    if module.supports_decode(case.q, case.k):
        calls.append((module.decode_attention, (case.q, k, v, *case.args()[1:], case.lengths)))
        calls.append((_in_two_calls, (case.q, k, v, *case.args()[1:], case.lengths)))
    for function, args in calls:
        traced = jax.jit(functools.partial(function, **case.options)).trace(*args)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def _in_two_calls(q: Any, k: Any, v: Any, *stored: Any, window: int | None, **scoring: Any) -> Any:
    *given, new_slots = stored
    module = dispatch._module("mosaic_gpu")
    begun = module.begin_decode_attention(q, *given, window=window, **scoring)
    other = jnp.zeros((*q.shape[:-1], q.shape[-1] + 1))
    return module.end_decode_attention(*begun, q, k, v, *given[:2], new_slots, [other] * 2, **scoring)


def test_own_token_is_the_kernels_only_where_it_can() -> None:
    module = dispatch._module("mosaic_gpu")
    q = jnp.zeros((1, 1, 4, 64), jnp.bfloat16)
    pool = jnp.zeros((4, 2, 64), jnp.bfloat16)
    assert module.supports_own_token(q, pool)
    assert not module.supports_own_token(q.astype(jnp.float32), pool)
    assert not module.supports_own_token(jnp.zeros((1, 2, 4, 64), jnp.bfloat16), pool)
    by_channel = pk.ChannelQuantizedPool(pool.astype(jnp.int8), jnp.ones((2, 64)))
    assert not module.supports_own_token(q, by_channel)


def check_mass(backend: str, shape: Shape, rng: np.random.Generator, *, compiled: bool) -> None:
    """Each entry's probability; together as much as there are queries and heads that see anything."""
    case = Case(shape, rng)
    out, lse, mass = run(backend, case, compiled=compiled, return_mass=True)
    check(case, out, lse, backend)
    check_probabilities(case, mass, lse, backend)


MASS = [Shape(6, 2, 64, form, (20, 0, 5), tq=3, among=True, window=7) for form in FORMS]


@pytest.mark.parametrize("k", [2, 8])  # the XLA backend has two ways, by the number of heads
@pytest.mark.parametrize("shape", MASS, ids=lambda s: s.name)
def test_mass_is_the_probability_of_each_entry(shape: Shape, k: int, rng: np.random.Generator) -> None:
    check_mass("xla", replace(shape, n=3 * k, k=k), rng, compiled=True)


@native
@pytest.mark.parametrize("shape", [*MASS, Shape(9, 3, 72, "int8", (700, 5), tq=40)], ids=lambda s: s.name)
def test_mass_of_native(shape: Shape, level: str, rng: np.random.Generator) -> None:
    check_mass("native", shape, rng, compiled=True)


@missing("triton")
@pytest.mark.parametrize("shape", MASS[1:4], ids=lambda s: s.name)
def test_mass_interpreted(shape: Shape, rng: np.random.Generator) -> None:
    check_mass("triton", shape, rng, compiled=False)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("shape", MASS, ids=lambda s: s.name)
def test_mass_on_a_gpu(backend: str, shape: Shape, rng: np.random.Generator) -> None:
    check_mass(backend, shape, rng, compiled=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 9])
def test_tokens_in_blocks_are_the_same(
    form: str, window: int | None, rng: np.random.Generator, monkeypatch: Any
) -> None:
    """XLA takes the tokens of a batch block by block: to rounding, what it takes at once. Where entries end
    within a block, and where a row has none at all. Weights are rounded to KV's dtype, each block's by its
    own maximum."""
    shape = Shape(form=form, tq=2, among=True, window=window, lengths=(41, 0, 16, 17, 1))
    case = Case(shape, rng)
    whole = run("xla", case, compiled=True, return_mass=True)  # the mass is had by taking all at once
    for block in (4, 16):
        monkeypatch.setattr("pallas_kernels.xla._block_tokens", lambda *_, block=block: block)
        parts = run("xla", case, compiled=True)
        check(case, *parts)
        atol = {"bfloat16": 2e-2, "float16": 2e-3}.get(form, 1e-5)
        for x, y in zip(whole[:2], parts, strict=True):
            np.testing.assert_allclose(x, y, atol=atol)


def test_what_xla_does_goes_by_the_tokens_there_are(rng: np.random.Generator) -> None:
    """Room for more changes no bit: blocks nobody has tokens in are not looked at."""
    case = Case(Shape(form="float32", lengths=(300, 5, 120)), rng)
    table = np.asarray(case.table)
    wide = np.pad(table, ((0, 0), (0, 3000)))
    few, many = (
        pk.partial_attention(case.q, case.k, case.v, jnp.asarray(t), case.lengths, scale=0.1, backend="xla")
        for t in (table, wide)
    )
    for x, y in zip(few, many, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("backend", ["xla", pytest.param("native", marks=native)])
@pytest.mark.parametrize("form", FORMS)
def test_what_lies_outside_the_lists_changes_nothing(
    backend: str, form: str, rng: np.random.Generator
) -> None:
    """To the bit: the poison is replaced by numbers, and the results are the same."""
    case = Case(Shape(form=form), rng)
    before = run(backend, case, compiled=True)

    def cured(pool: pk.Pool) -> pk.Pool:
        if isinstance(pool, pk.QuantizedPool):
            return pool._replace(scales=pool.scales.at[case.poisoned].set(1))
        if isinstance(pool, pk.ChannelQuantizedPool):
            return pool._replace(values=pool.values.at[case.poisoned].set(99))
        return pool.at[case.poisoned].set(1)

    case.k, case.v = cured(case.k), cured(case.v)
    for x, y in zip(before, run(backend, case, compiled=True), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("n_others", [0, 2])
@pytest.mark.parametrize("form", [*FORMS, "zeros"])
def test_two_calls_of_xla(form: str, n_others: int, rng: np.random.Generator) -> None:
    """Each a program of its own; queries are where they are said to be. Zero points are in others' outputs as
    in ours."""
    shape = Shape(12, 2, 32, "int8-channel" if form == "zeros" else form, (12, 0, 3), window=5)
    case = Case(shape, rng)
    if form == "zeros":
        zeros = jnp.asarray(rng.normal(size=(2, 32)), jnp.float32)
        case.k, case.v = (pool._replace(zeros=by * zeros) for pool, by in ((case.k, 1), (case.v, -2)))
    case.positions = case.lengths[:, None] + jnp.asarray([[0], [2], [1]], jnp.int32)
    k, v = (jnp.asarray(rng.normal(size=(3, 1, 2, 32)), shape.dtype) for _ in "kv")
    slots = jnp.asarray([*case.poisoned[:2], 10**6], jnp.int32)
    others = partials_of_others(shape, n_others, rng)
    begin = jax.jit(lambda at, *args: pk.begin_decode_attention(*args, q_positions=at, **case.options))
    begun = begin(case.positions, *case.args())
    assert begun.kernel is None and begun.done.shape == case.q.shape
    end = jax.jit(functools.partial(pk.end_decode_attention, scale=case.options["scale"]))
    *pools, out = end(begun, case.q, k, v, case.k, case.v, slots, others)
    assert out.dtype == case.q.dtype
    own = reference.causal_partial(case.q, k, v, scale=case.options["scale"])
    check_outputs(out, combined((case.stored, own), others), 2 * TOLERANCE[shape.dtype])
    stored = jax.jit(pk.append)(case.k, case.v, k[:, 0], v[:, 0], slots)
    for got, want in zip(jax.tree.leaves(pools), jax.tree.leaves(stored), strict=True):
        np.testing.assert_array_equal(_bits(got), _bits(want))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [2, 6])
def test_decode_stores_and_attends(form: str, k: int, rng: np.random.Generator) -> None:
    case = Case(Shape(12, k, 32, form, (12, 0, 3)), rng)
    k_new, v_new = (jnp.asarray(rng.normal(size=(3, 1, k, 32)), case.shape.dtype) for _ in range(2))
    new_slots = jnp.asarray([*case.poisoned[:2], 10**6], jnp.int32)
    args = (case.q, k_new, v_new, case.k, case.v, case.table, case.lengths, new_slots)
    k_pool, v_pool, out = jax.jit(functools.partial(pk.decode_attention, **case.options))(*args)
    assert out.dtype == case.q.dtype
    k_want, v_want, want = reference.decode_attention(*args, **case.options)
    # One rounding more than a partial has: the result is of q's dtype.
    tolerance = 2 * TOLERANCE[case.shape.dtype]
    error = np.linalg.norm(np.asarray(out, np.float64) - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() <= tolerance
    step = 0.0 if not form.startswith("int8") else 2e-2 * np.abs(k_new).max()  # a tie may round either way
    for pool, expected in ((k_pool, k_want), (v_pool, v_want)):
        got, stored = reference.dequantise(pool), np.asarray(new_slots[:2])
        np.testing.assert_allclose(got[stored], expected[stored], atol=float(step))
        others = np.setdiff1d(np.arange(len(got)), stored)
        np.testing.assert_array_equal(got[others], expected[others])


@pytest.mark.parametrize("lengths", [None, (5, 1)])
@pytest.mark.parametrize("window", [None, 3])
def test_a_chunks_own_partial(
    lengths: tuple[int, ...] | None, window: int | None, rng: np.random.Generator, monkeypatch: Any
) -> None:
    monkeypatch.setattr("pallas_kernels.causal._Q_BLOCK", 4)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 7, n, 16)), jnp.float32) for n in (4, 2, 2))
    ends = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    options: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": 5.0}
    out, lse = jax.jit(functools.partial(pk.causal_partial, **options))(q, k, v, ends)
    want = reference.causal_partial(q, k, v, ends, **options)
    assert out.dtype == lse.dtype == jnp.float32
    assert (
        np.isfinite(out).all() and np.isfinite(lse).all()
    )  # a pad's NaN would spread as a later layer's value
    for row in range(2):
        real = slice(0, 7 if lengths is None else lengths[row])
        np.testing.assert_allclose(out[row, real], want[0][row, real], atol=1e-5)
        np.testing.assert_allclose(lse[row, real], want[1][row, real], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("form", ["bfloat16", "float16", "float32"])  # the last is XLA's
@pytest.mark.parametrize("lengths", [None, (300, 77)])
def test_a_chunks_own_partial_on_a_gpu(
    form: str, window: int | None, lengths: tuple[int, ...] | None, rng: np.random.Generator
) -> None:
    """cuDNN's where it serves: the same numbers, and the same from `causal_attention`."""
    q, k, v = (jnp.asarray(rng.normal(size=(2, 300, n, 64)), form) for n in (6, 2, 2))
    options: dict[str, Any] = {"scale": 0.125, "window": window}
    ends = None if lengths is None else jnp.asarray(lengths, jnp.int32)
    run = jax.jit(functools.partial(pk.causal_partial, **options))
    served = "fmha" in run.lower(q, k, v, ends).as_text()
    assert served == (form != "float32")
    out, lse = run(q, k, v, ends)
    want, want_lse = reference.causal_partial(q, k, v, ends, **options)
    assert out.dtype == lse.dtype == jnp.float32
    for row in range(2):
        real = slice(0, 300 if lengths is None else lengths[row])
        got = np.asarray(out, np.float64)[row, real]
        error = np.linalg.norm(got - want[row, real], axis=-1) / np.linalg.norm(want[row, real], axis=-1)
        assert error.max() <= 1.5 * TOLERANCE[form]  # cuDNN's result is rounded to its inputs' dtype
        np.testing.assert_allclose(lse[row, real], want_lse[row, real], atol=1e-2)
    if lengths is None:
        whole = pk.causal_attention(q, k, v, **options)
        np.testing.assert_allclose(np.asarray(whole, np.float32), out, atol=2e-2)


def test_a_chunk_after_stored_tokens_is_the_whole(rng: np.random.Generator) -> None:
    """Its own partial and that of what is stored before it, combined."""
    q, k, v = (jnp.asarray(rng.normal(size=(1, 9, n, 16)), jnp.float32) for n in (4, 2, 2))
    whole = reference.causal_attention(q, k, v, scale=0.25, window=6)
    table, lengths = jnp.arange(5, dtype=jnp.int32)[None], jnp.full((1,), 5, jnp.int32)
    options: dict[str, Any] = {"scale": 0.25, "window": 6}
    stored = pk.partial_attention(q[:, 5:], k[0, :5], v[0, :5], table, lengths, **options)
    own = pk.causal_partial(q[:, 5:], k[:, 5:], v[:, 5:], **options)
    out, _ = pk.combine(*zip(stored, own, strict=True))
    np.testing.assert_allclose(out, whole[:, 5:], atol=1e-5)


def test_what_the_table_in_the_docs_says_is_served() -> None:
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    table = {cells[0].strip(" `"): [c.strip() for c in cells[2:]] for cells in rows}
    forms = {f: {"int8-channel": "int8"}.get(f, f) for f in FORMS}
    for backend in dispatch.BACKENDS:
        kv, queries, dims, mass, own = table[backend]
        for form, dtype in forms.items():
            h = 128 if dims != "any" else 8
            q, pool = jnp.zeros((1, 1, 2, h), jnp.bfloat16), jnp.zeros((4, 2, h), dtype)
            if form == "int8":
                pool = pk.QuantizedPool(pool, jnp.ones((4, 2), jnp.bfloat16))
            elif form == "int8-channel":
                pool = pk.ChannelQuantizedPool(pool, jnp.ones((2, h)))
            for asked in (False, True):
                served = form in kv.split(", ") and (mass == "yes" or not asked)
                assert (dispatch.why_not(backend, q, pool, return_mass=asked) is None) == served
            half = q.astype(jnp.float16)
            if form in kv.split(", "):
                served = "float16" in queries.split(", ") or queries.startswith("any")
                assert (dispatch.why_not(backend, half, pool, return_mass=False) is None) == served
        assert hasattr(dispatch._module(backend), "decode_attention") == (own == "attended and stored")


def gpu(capability: str) -> Any:
    return SimpleNamespace(platform="gpu", compute_capability=capability)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "device,names",
    [
        (SimpleNamespace(platform="cpu"), ("native", "xla")),
        (SimpleNamespace(platform="tpu"), ("mosaic_tpu", "xla")),
        (gpu("9.0"), ("mosaic_gpu", "triton", "xla")),
        (gpu("10.0"), ("mosaic_gpu", "triton", "xla")),
        (gpu("8.6"), ("triton", "xla")),
        (SimpleNamespace(platform="gpu"), ("triton", "xla")),  # not NVIDIA's
    ],
)
def test_candidates_by_device(device: Any, names: tuple[str, ...]) -> None:
    assert dispatch.candidates(device) == names


@pytest.mark.usefixtures("unchecked")
def test_pick_passes_over_what_cannot(monkeypatch: Any) -> None:
    monkeypatch.setattr(dispatch, "default_device", lambda: SimpleNamespace(platform="tpu"))
    q, pool = jnp.zeros((1, 1, 2, 8), jnp.bfloat16), jnp.zeros((4, 2, 8), jnp.bfloat16)
    assert dispatch.pick(q, pool, return_mass=False).__name__ == "pallas_kernels.tpu"
    assert dispatch.pick(q, pool, return_mass=True).__name__ == "pallas_kernels.xla"


def test_forcing_a_backend(monkeypatch: Any) -> None:
    """Argument before context manager before environment; a context ends where it ends."""
    assert dispatch.forced_backend() is None
    monkeypatch.setenv(dispatch.ENV_VAR, "triton")
    assert dispatch.forced_backend() == "triton"
    with pk.use_backend("mosaic_tpu"):
        assert dispatch.forced_backend() == "mosaic_tpu"
        assert dispatch.forced_backend("xla") == "xla"
    assert dispatch.forced_backend() == "triton"
    monkeypatch.setenv(dispatch.ENV_VAR, "auto")
    assert dispatch.forced_backend() is None


def test_an_unknown_backend_is_named(monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="'cuda' must be one of xla, triton"), pk.use_backend("cuda"):
        pass
    monkeypatch.setenv(dispatch.ENV_VAR, "tpu")
    case = Case(Shape(), np.random.default_rng(0))
    with pytest.raises(ValueError, match="JAXLAMINA_ATTENTION_BACKEND='tpu' must be one of"):
        pk.partial_attention(*case.args(), **case.options)


def test_a_forced_backend_that_cannot_says_why_and_what_can() -> None:
    case = Case(Shape(), np.random.default_rng(0))
    with pytest.raises(ValueError, match="mosaic_tpu .*mass is not returned.* use .*xla"):
        pk.partial_attention(*case.args(), return_mass=True, backend="mosaic_tpu", **case.options)


def test_a_forced_backend_is_the_one_that_runs(monkeypatch: Any) -> None:
    case = Case(Shape(), np.random.default_rng(0))
    module = dispatch._module("mosaic_tpu")
    seen: list[Any] = []

    def spy(q: Any, *args: Any, **options: Any) -> Any:
        seen.append(values_of(args[0]).shape)
        return q, q

    monkeypatch.setattr(module, "partial_attention", spy)
    with pk.use_backend("mosaic_tpu"):
        pk.partial_attention(*case.args(), **case.options)
    assert seen == [case.k.shape]


def test_the_default_device_decides() -> None:
    """A CPU beside an accelerator gets its own backend under `jax.default_device`."""
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.default_device().platform == "cpu"
    with jax.default_device("cpu"):
        assert dispatch.default_device().platform == "cpu"
