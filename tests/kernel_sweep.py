"""Attention kernels against the float64 reference over a covering design of shapes; for a GPU, rehearsed on a
CPU.

    python tests/kernel_sweep.py --cases 300 --seconds 540
    python tests/kernel_sweep.py --first 17 --cases 1 --seed 3    # one case again

Cases are drawn so that every pair of two factors' levels comes early. A case has fresh random arrays with
poison in all that must not be read, and is computed by the public function without a backend and by each
backend that says it can. It is named before it runs, with its number, so that a case that ends the process,
hangs or spoils the device is known.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import (
    Case,
    Shape,
    check,
    check_outputs,
    check_probabilities,
    combined,
    partials_of_others,
    tolerance_of,
)

import pallas_kernels as pk
from pallas_kernels import dispatch, mosaic_gpu, reference
from pallas_kernels.quantized import values_of

PUBLIC, EMULATED = "public", "emulated"
FACTORS: dict[str, tuple[Any, ...]] = {
    "h": (16, 32, 48, 64, 72, 80, 96, 112, 128, 192, 256),
    "k": tuple(range(1, 17)),
    "g": (1, 2, 3, 4, 5, 7, 8, 16),
    # the pool's form, and q's type where it is another than the form says
    "form": (
        ("float32", ""),
        ("bfloat16", ""),
        ("float16", ""),
        ("int8", ""),
        ("int8", "float32"),
        ("int8", "float16"),
        ("int8-channel", ""),
        ("int8-channel", "float32"),
    ),
    "window": (None, 1, 9, 100),
    "softcap": (None, 8.0),
    "call": ("partial", "several", "among", "mass", "mass among", "own", "decode", "read first", "two calls"),
    "contexts": ("one", "short", "edges", "ragged", "long"),
    "batch": (1, 2, 5, 20, 33),
}
QUERIES = {"several": 2, "among": 3, "mass among": 5}
EDGES = (15, 16, 17, 31, 33, 47, 48, 49, 79, 80, 81, 127, 128, 129, 255, 256, 257, 511, 512, 513)
LONGEST = 70_000


@dataclass(frozen=True)
class Limits:
    """What a case may be at most; longer contexts and larger batches are cut."""

    elements: int = 2**24  # of a pool
    rows: int = 2**20  # queries, times heads
    tokens: int = LONGEST  # of a request

    @classmethod
    def of(cls, platform: str) -> Limits:
        return cls() if platform in ("gpu", "cuda") else cls(2**18, 2**9, 2_000)


EMULATION = Limits(2**15, 2**8, 300)


def design(seed: int) -> Iterator[dict[str, Any]]:
    """Cases without end: each has as many new pairs of levels as one of a few dozen draws; after all pairs,
    again."""
    rng = np.random.default_rng(seed)
    names = list(FACTORS)
    every = [
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(FACTORS[a]))
        for j in range(len(FACTORS[b]))
    ]
    missing: set[Any] = set()
    while True:
        if not missing:
            missing = set(every)
            order = [every[i] for i in rng.permutation(len(every))]
        while order[-1] not in missing:
            order.pop()
        draws = []
        for _ in range(30):
            row = {name: int(rng.integers(len(FACTORS[name]))) for name in names} | dict(order[-1])
            draws.append((row, missing & set(itertools.combinations(row.items(), 2))))
        row, new = max(draws, key=lambda draw: len(draw[1]))
        missing -= new
        yield {name: FACTORS[name][level] for name, level in row.items()}


def shape_of(row: dict[str, Any], limits: Limits, rng: np.random.Generator) -> Shape:
    form, q_dtype = row["form"]
    k, h, n, batch = row["k"], row["h"], row["k"] * row["g"], row["batch"]
    tq = QUERIES.get(row["call"], 1)
    batch = max(1, min(batch, limits.rows // (n * tq)))
    drawn = {
        "one": lambda: np.ones(batch),
        "short": lambda: rng.integers(0, 40, batch),
        "edges": lambda: rng.choice(EDGES, batch),
        "ragged": lambda: np.exp(rng.uniform(0, np.log(4_000), batch)),
        "long": lambda: rng.integers(0, 40, batch),
    }
    most = limits.elements // (k * h)
    lengths = np.minimum(drawn[row["contexts"]](), limits.tokens).astype(int)
    if row["contexts"] == "ragged" and batch > 1:
        lengths[-1] = 0
    if row["contexts"] == "long":
        lengths[0] = max(1, min(limits.tokens, most - lengths[1:].sum()))
    fitting = np.cumsum(lengths) <= most
    kept = lengths[fitting] if fitting[0] else np.array([most])
    among = "among" in row["call"]
    return Shape(n, k, h, form, tuple(map(int, kept)), tq, among, row["window"], row["softcap"], q_dtype)


def named(row: dict[str, Any], shape: Shape) -> str:
    lengths = shape.lengths
    text = ",".join(map(str, lengths[:4])) + (f",… {len(lengths)}" if len(lengths) > 4 else "")
    return f"{row['call'].replace(' ', '-')}-{shape.name}-{row['contexts']}[{text}]"


class Trial:
    """One case, and what every way of computing it is compared with."""

    def __init__(self, row: dict[str, Any], shape: Shape, rng: np.random.Generator) -> None:
        self.call, self.case = row["call"], Case(shape, rng)
        self.mass = self.call.startswith("mass")
        self.own = self.call in ("own", "decode", "read first", "two calls")
        if not self.own:
            return
        case, b = self.case, len(shape.lengths)
        token = (b, 1, shape.k, shape.h)
        self.k, self.v = (jnp.asarray(rng.normal(size=token), shape.dtype) for _ in "kv")
        # The last request of several is padding: its token is stored nowhere. Others' go to slots that nobody
        # has.
        slots = rng.permutation(case.poisoned)[:b].astype(np.int32)
        slots[1:][-1:] = len(values_of(case.k)) + 3
        self.slots = jnp.asarray(slots)
        owned = reference.causal_partial(
            case.q, self.k, self.v, scale=case.options["scale"], softcap=shape.softcap
        )
        n_others = int(rng.integers(3)) if self.call == "two calls" else 0
        self.others = partials_of_others(shape, n_others, rng)
        self.want = combined((case.stored, owned), self.others)

    def refused(self, backend: str) -> str | None:
        return dispatch.why_not(backend, self.case.q, self.case.k, return_mass=self.mass)

    def run(self, backend: str | None) -> float:
        """Computed and compared; the worst error as a share of what is tolerated. None: whichever is
        picked."""
        case = self.case
        picked = dispatch.pick(case.q, case.k, return_mass=self.mass, backend=backend)
        options = case.options | {"backend": backend}
        by = next(name for name in dispatch.BACKENDS if dispatch._MODULES[name] == picked.__name__)
        if self.own:
            return self._run_own(by, options)
        attend = jax.jit(
            lambda *args: pk.partial_attention(
                *args[:-1], q_positions=args[-1], return_mass=self.mass, **options
            )
        )
        out, lse, *mass = attend(*case.args(), case.positions)
        if mass:
            check_probabilities(case, mass[0], lse, by)
        return check(case, out, lse, by)

    def _run_own(self, by: str, options: dict[str, Any]) -> float:
        case = self.case
        pools = case.k, case.v
        if self.call == "own":
            run = jax.jit(partial(pk.attention_with_own, **options))
            out = run(case.q, self.k, self.v, *pools, case.table, case.lengths)
        elif self.call == "two calls":
            begun = jax.jit(partial(pk.begin_decode_attention, **options))(*case.args())
            options = {name: x for name, x in options.items() if name != "window"}
            end = jax.jit(partial(pk.end_decode_attention, **options), donate_argnums=(4, 5))
            copies = jax.tree.map(jnp.copy, pools)
            *stored, out = end(begun, case.q, self.k, self.v, *copies, self.slots, self.others)
            self._check_stored(stored)
        else:
            read_first = self.call == "read first"
            run = jax.jit(
                partial(pk.decode_attention, read_first=read_first, **options), donate_argnums=(3, 4)
            )
            copies = jax.tree.map(jnp.copy, pools)
            args = case.q, self.k, self.v, *copies, case.table, case.lengths, self.slots
            *stored, out = run(*args)
            self._check_stored(stored)
        assert out.dtype == case.q.dtype and out.shape == case.q.shape
        # one rounding more than a partial has: the result is of q's type
        return check_outputs(out, self.want, 2 * tolerance_of(case, by))

    def _check_stored(self, pools: Any) -> None:
        """To the bit what `append` stores, which has tests of its own; every other slot as it was, poison
        too."""
        case = self.case
        like = pk.append(case.k, case.v, self.k[:, 0], self.v[:, 0], self.slots)
        for got, want in zip(jax.tree.leaves(pools), jax.tree.leaves(tuple(like)), strict=True):
            np.testing.assert_array_equal(_bits(got), _bits(want))


def _bits(x: Any) -> np.ndarray:
    return np.asarray(x).reshape(-1).view(np.uint8)


@contextlib.contextmanager
def emulated(n_ctas: int = 3) -> Iterator[None]:
    """The Hopper kernels' own programs run on numpy, on a GPU of a few multiprocessors."""
    names = ("partial_attention", "attention_with_own", "decode_attention")
    names += ("begin_decode_attention", "end_decode_attention")
    shim = SimpleNamespace(**vars(mosaic_gpu))
    for name in names:
        setattr(shim, name, partial(getattr(mosaic_gpu, name), interpret=True))
    find = dispatch._module
    with (
        mock.patch.object(mosaic_gpu, "multiprocessors", lambda: n_ctas),
        mock.patch.object(mosaic_gpu.compat, "KERNELS_WRITE_ARGUMENTS", True),
        mock.patch.object(dispatch, "_module", lambda name: shim if name == "mosaic_gpu" else find(name)),
    ):
        yield


@dataclass
class Score:
    """Of one backend and form."""

    good: int = 0
    refused: int = 0
    wrong: int = 0
    worst: float = 0.0


@dataclass
class Results:
    """What was found."""

    scores: dict[tuple[str, str], Score] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def of(self, way: str, form: str) -> Score:
        return self.scores.setdefault((way, form), Score())

    def print(self, seed: int, n_cases: int, seconds: float) -> None:
        print(f"\n{'way':12} {'form':14} {'right':>6} {'refused':>8} {'wrong':>6}  worst error/tolerance")
        for (way, form), s in sorted(self.scores.items()):
            print(f"{way:12} {form:14} {s.good:6} {s.refused:8} {s.wrong:6}  {s.worst:.2f}")
        for reason, n in self.reasons.most_common():
            print(f"refused {n:4} times: {reason}")
        for failure in self.failures:
            print(f"FAILED {failure}")
        summary = {
            "seed": seed,
            "cases": n_cases,
            "failures": len(self.failures),
            "seconds": round(seconds, 1),
        }
        print(json.dumps(summary), flush=True)


def served_by(way: str) -> str:
    """The backend that must serve a case for it to be tried this way."""
    return {PUBLIC: "xla", EMULATED: "mosaic_gpu"}.get(way, way)


def try_way(trial: Trial, way: str) -> float:
    if way == EMULATED:
        with emulated():
            return trial.run("mosaic_gpu")
    return trial.run(None if way == PUBLIC else way)


def device_works() -> bool:
    try:
        return float(jnp.ones(3).sum()) == 3
    except Exception:  # noqa: BLE001 - whatever is raised, nothing more can be learnt here
        return False


def compute(trial: Trial, ways: list[str], name: str, results: Results) -> bool:
    """One case in every way that serves it. False: the device is spoilt."""
    form = trial.case.shape.form
    for way in ways:
        print(f"  {way}", end="", flush=True)
        score, backend = results.of(way, form), served_by(way)
        if (reason := trial.refused(backend)) is not None:
            score.refused += 1
            results.reasons[f"{backend}: {reason}"] += 1
            print(" -", end="", flush=True)
            continue
        try:
            share = try_way(trial, way)
        except Exception as error:  # noqa: BLE001 - reported, and the sweep goes on
            score.wrong += 1
            text = " ".join(str(error).split())[:400]
            results.failures.append(f"case {name}: {way}: {type(error).__name__}: {text}")
            print(f" FAILED\n{results.failures[-1]}", end="", flush=True)
            if not device_works():
                print("\nthe device is spoilt", flush=True)
                return False
        else:
            score.good, score.worst = score.good + 1, max(score.worst, share)
            print(f" {share:.2f}", end="", flush=True)
    print(flush=True)
    return True


def sweep(args: argparse.Namespace) -> int:
    """0: all right. 1: something was wrong. 2: the device could not be used any more."""
    device = jax.devices()[0]
    limits = Limits.of(device.platform)
    limits = Limits(args.elements or limits.elements, args.rows or limits.rows, args.tokens or limits.tokens)
    ways = [PUBLIC, *dispatch.candidates(device), *[EMULATED] * args.emulate]
    if args.ways:
        ways = [way for way in ways if way in args.ways.split(",")]
    print(f"JAX {jax.__version__} on {device.device_kind}; seed {args.seed}; {limits}; {', '.join(ways)}")
    results, began, number, works = Results(), time.monotonic(), args.first, True
    for row in itertools.islice(design(args.seed), args.first, args.first + args.cases):
        seconds = time.monotonic() - began
        if seconds > args.seconds or not works:
            break
        rng = np.random.default_rng((args.seed, number))
        shape = shape_of(row, EMULATION if ways == [EMULATED] else limits, rng)
        name = f"{number} {named(row, shape)}"
        number += 1
        print(f"{seconds:6.1f} s  case {name}", end="", flush=True)
        faulthandler.dump_traceback_later(args.case_seconds, exit=True, file=sys.__stderr__)
        try:
            works = compute(Trial(row, shape, rng), ways, name, results)
        finally:
            faulthandler.cancel_dump_traceback_later()
        jax.clear_caches()
    if number < args.first + args.cases:
        print(f"to go on: --seed {args.seed} --first {number}")
    results.print(args.seed, number - args.first, time.monotonic() - began)
    return 1 if works and results.failures else 0 if works else 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the design and the arrays")
    parser.add_argument("--seconds", type=float, default=540, help="no case begins after them")
    parser.add_argument(
        "--case-seconds", type=float, default=120, help="a case that takes longer ends the sweep"
    )
    parser.add_argument("--ways", help=f"some of {PUBLIC}, {EMULATED} and the backends, with commas")
    parser.add_argument("--emulate", action="store_true", help="the Hopper kernels on numpy, too")
    parser.add_argument("--elements", type=int, help="of a pool, at most")
    parser.add_argument("--rows", type=int, help="queries times heads, at most")
    parser.add_argument("--tokens", type=int, help="of a request, at most")
    return sweep(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
