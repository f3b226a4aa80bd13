"""The sweep over kernels' shapes: its design, a few cases on this machine, the Hopper kernels' programs on
numpy.

The arrays are new every run; JAXLAMINA_TEST_SEED, which is in a failure's output, brings them back.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

import jax
import kernel_sweep
import numpy as np
import pytest
from kernel_cases import Shape
from kernel_sweep import (
    EMULATED,
    EMULATION,
    FACTORS,
    PUBLIC,
    Limits,
    Trial,
    design,
    served_by,
    shape_of,
    try_way,
)

from pallas_kernels import dispatch

ROWS = list(itertools.islice(design(seed=15), 200))
ON_HOPPER = [
    i
    for i, row in enumerate(ROWS)
    if "mass" not in row["call"] and row["form"][0] != "float32" and row["h"] % 16 == 0
]


def fresh() -> np.random.Generator:
    seed = int(os.environ.get("JAXLAMINA_TEST_SEED", np.random.SeedSequence().entropy))  # type: ignore[arg-type]
    print(f"JAXLAMINA_TEST_SEED={seed}")
    return np.random.default_rng(seed)


def run_case(number: int, limits: Limits, ways: list[str]) -> None:
    row, rng = ROWS[number], fresh()
    trial = Trial(row, shape_of(row, limits, rng), rng)
    serving = [way for way in ways if trial.refused(served_by(way)) is None]
    assert serving
    for way in serving:
        try_way(trial, way)
    jax.clear_caches()


def test_every_pair_of_levels_is_drawn() -> None:
    seen = {pair for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    for a, b in itertools.combinations(FACTORS, 2):
        for pair in itertools.product(FACTORS[a], FACTORS[b]):
            assert ((a, pair[0]), (b, pair[1])) in seen


@pytest.mark.parametrize("limits", [Limits(), EMULATION], ids=["gpu", "emulation"])
def test_cases_keep_to_their_limits(limits: Limits) -> None:
    rng = np.random.default_rng(0)
    shapes = [shape_of(row, limits, rng) for row in ROWS]
    for s in shapes:
        assert sum(s.lengths) * s.k * s.h <= limits.elements and max(s.lengths) <= limits.tokens
        assert len(s.lengths) * s.tq * s.n <= max(limits.rows, s.tq * s.n)
    assert max(max(s.lengths) for s in shapes) == limits.tokens, "the longest context is among them"


@pytest.mark.parametrize("number", range(4))
def test_a_case_here(number: int) -> None:
    run_case(number, Limits(2**16, 2**8, 500), [PUBLIC])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "number", [*ON_HOPPER[:6], *(pytest.param(i, marks=pytest.mark.slow) for i in ON_HOPPER[6:])]
)
def test_the_hopper_kernels_programs(number: int) -> None:
    run_case(number, EMULATION, [EMULATED])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("k,form", [(3, "int8"), (5, "int8"), (3, "int8-channel")])
def test_tiles_that_are_no_multiple_of_a_warp(k: int, form: str) -> None:
    """Sixteen warps over 3 or 5 heads: tiles of 80 and 48 tokens. Once the last of them were never copied."""
    rng = fresh()
    shape = Shape(3 * k, k, 64, form, (90, 17, 0, 1))
    try_way(Trial({"call": "own"}, shape, rng), EMULATED)


@pytest.mark.gpu
@pytest.mark.parametrize("call", ["own", "decode"])
@pytest.mark.parametrize("k", [3, 5])
def test_such_tiles_on_a_gpu(k: int, call: str) -> None:
    """K = 3 with 20 requests is the demo model's decode step."""
    try_way(Trial({"call": call}, Shape(3 * k, k, 64, "int8", tuple(range(400, 420))), fresh()), PUBLIC)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(16))
def test_a_case_on_a_gpu(number: int) -> None:
    """What is picked, and Triton's; compiling is nearly all of the time (`python tests/kernel_sweep.py` has
    more)."""
    ways = [PUBLIC, "triton"] if "triton" in dispatch.candidates(jax.devices()[0]) else [PUBLIC]
    run_case(number, Limits(2**20), ways)


def options(**given: Any) -> argparse.Namespace:
    limits = {"elements": 2**12, "rows": 64, "tokens": 50}
    plain = {"cases": 2, "first": 0, "seed": 1, "seconds": 100, "case_seconds": 300, "ways": "xla"}
    return argparse.Namespace(**(limits | plain | {"emulate": False} | given))


def test_a_sweep_ends_with_its_table(capsys: Any) -> None:
    assert kernel_sweep.sweep(options()) == 0
    out = capsys.readouterr().out
    assert "case 0 " in out and "case 1 " in out and '"cases": 2, "failures": 0' in out


def test_a_wrong_kernel_is_found_and_named(capsys: Any, monkeypatch: Any) -> None:
    right = dispatch._module("xla").partial_attention
    monkeypatch.setattr(
        "pallas_kernels.xla.partial_attention",
        lambda *a, **o: (1.05 * right(*a, **o)[0], *right(*a, **o)[1:]),
    )
    assert kernel_sweep.sweep(options(first=2)) == 1
    assert "FAILED case 2 " in capsys.readouterr().out


def test_a_spoilt_device_ends_the_sweep(capsys: Any, monkeypatch: Any) -> None:
    def crash(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr("pallas_kernels.xla.partial_attention", crash)
    monkeypatch.setattr(kernel_sweep, "device_works", lambda: False)
    assert kernel_sweep.sweep(options(first=5)) == 2
    out = capsys.readouterr().out
    assert "FAILED case 5 " in out and "--first 6" in out
