"""The Hopper kernel's plan and layout: work dealt out whole and evenly, tunings that fit; no GPU needed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpu import tunings
from pallas_kernels.gpu.orders import Orders
from pallas_kernels.gpu.plan import PlanLayout, make_plan
from pallas_kernels.gpu.spec import LINE, Memory, Spec, Tuning
from pallas_kernels.gpu.warp_numpy import Cta, WarpMachine


def walk(plan: np.ndarray, layout: PlanLayout, cta: int) -> list[tuple[int, int, int]]:
    """(request, item, tile) of a CTA's stretch, as the planning warp goes through it."""

    def field(name: str, i: int = 0) -> int:
        return int(plan[layout.at(name) + i])

    start = cta * field("tiles_per_cta")
    n = max(0, min(start + field("tiles_per_cta"), field("total_tiles")) - start)
    b = field("cta_request", cta)
    item, tile = divmod(start - field("tile_start", b), max(field("n_tiles", b), 1))
    out = []
    for _ in range(n):
        out.append((b, item, tile))
        tile += 1
        if tile == field("n_tiles", b):
            tile, item = 0, item + 1
            if item == layout.items_per_request:
                b, item = field("next", b), 0
    return out


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=9),
    skipped=st.integers(0, 20),
    items=st.integers(1, 3),
    n_ctas=st.integers(1, 7),
)
def test_every_tile_is_dealt_to_one_cta_in_order(
    lengths: list[int], skipped: int, items: int, n_ctas: int
) -> None:
    layout = PlanLayout(len(lengths), items, n_ctas)
    first = jnp.minimum(jnp.asarray(lengths), skipped)
    plan = np.asarray(make_plan(layout, first, jnp.asarray(lengths), tile_tokens=16))
    stretches = [walk(plan, layout, cta) for cta in range(n_ctas)]
    wanted = [
        (b, item, tile)
        for b, n in enumerate(lengths)
        for item in range(items)
        for tile in range(-(-max(n - skipped, 0) // 16))
    ]
    assert [place for stretch in stretches for place in stretch] == wanted
    longest = max(len(s) for s in stretches)
    assert longest == -(-len(wanted) // n_ctas), "no CTA has more than its share"
    # the number c + i of a partial: nobody else's, and within the array
    numbers = [
        c + b * items + item for c, s in enumerate(stretches) for b, item in dict.fromkeys(x[:2] for x in s)
    ]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers, default=0) < layout.n_partials


def spec(kind: str = "bf16", n: int = 32, k: int = 8, h: int = 128, tuning: Tuning | None = None) -> Spec:
    return Spec(4, 1, n, k, h, 64, kind, 1.0, None, None, kind == "int8", False, tuning or Tuning())


@pytest.mark.parametrize("kind", ["bf16", "f16", "int8"])
@pytest.mark.parametrize("group", [4, 16])
def test_every_shape_has_a_tuning_that_fits(kind: str, group: int) -> None:
    """Of all that `supports` lets through, which does not look at shared memory."""
    for k, h in itertools.product([*range(1, 18), 32, 71], range(16, 257, 16)):
        fits(spec(kind, group * k, k, h))


def fits(wanted: Spec) -> None:
    for tuning in tunings.candidates(wanted):
        s = replace(wanted, tuning=tuning)
        assert s.shared_bytes <= 227 * 1024
        assert s.heads_at_once * s.ways <= tuning.n_warps
        firsts = [int(s.first_head(np, group)) for group in range(s.head_groups)]
        groups = [range(first, first + s.heads_at_once) for first in firsts]
        assert {head for group in groups for head in group} == {*range(s.K)}
        assert all(head in groups[head // s.heads_at_once] for head in range(s.K)), "where it is looked for"
        assert not s.swizzled or all(first * s.row_bytes % LINE == 0 for first in firsts)
        assert s.stage_bytes % 1024 == 0, "or the swizzle's pattern would differ from stage to stage"


@pytest.mark.parametrize("n_warps", [4, 8, 12, 16])
@pytest.mark.parametrize("k", range(1, 18))
def test_every_token_of_a_tile_is_one_lanes(k: int, n_warps: int) -> None:
    """Tiles of 48, 80 and 112 tokens are no multiple of a warp's 32 lanes."""
    s = spec("int8", 2 * k, k, tuning=Tuning(1, n_warps))
    memory = Memory(*[None] * 12)
    orders = Orders(WarpMachine({}, Cta(0, 1), 0, 0), s, memory, 0)
    mine = orders.my_tokens()
    assert sorted(t for tokens, there in mine for t in tokens[there]) == list(range(s.tile_tokens))
    assert all(0 <= t < s.tile_tokens for tokens, _ in mine for t in tokens), "idle lanes look there, too"


def test_a_table_is_read_as_it_was_written(tmp_path) -> None:
    key = tunings.Key("NVIDIA H200", "bf16", 8, 128, 1)
    path = tmp_path / "tunings.toml"
    tunings.write({key: (8, 2)}, path)
    assert tunings.table(path) == {key: (8, 2)}
    path.write_text(path.read_text() + "colour = 3\n")
    tunings.table.cache_clear()
    with pytest.raises(ValueError, match="colour"):
        tunings.table(path)


def test_what_is_in_the_repository_fits() -> None:
    for key, (n_warps, n_stages) in tunings.table().items():
        s = spec(key.kind, key.K, key.K, key.H, Tuning(132, n_warps, n_stages))
        assert s.shared_bytes <= 227 * 1024, key


def test_tunings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        Tuning(n_warps=6)
    with pytest.raises(ValueError, match="at least 2"):
        Tuning(n_stages=1)
    with pytest.raises(ValueError, match="at least 1"):
        Tuning(n_ctas=0)
