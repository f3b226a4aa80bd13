"""How long a stored token's attention takes on this rank: measured on its own pools, when KV is allocated.

Knows pools and a clock; what is made of it, `jaxlamina.run.balance` decides.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.ranks.rank_kv import RankKV
from jaxlamina.workers.capacity import is_accelerator
from jaxlamina.workers.spec import AttentionSpec
from pallas_kernels import partial_attention

_ROWS, _MOST_TOKENS, _N_TIMES = 32, 262_144, 7
_N_AHEAD = 8  # calls that an accelerator has before one is waited for: else launch and wait count, too


def seconds_per_token(kv: RankKV, specs: Sequence[AttentionSpec], n_query_heads: Sequence[int]) -> float:
    """Of all of the rank's layers, as decode steps have it. 0 where there is too little room to measure
    it."""
    n_each = min(kv.n_slots, _MOST_TOKENS) // _ROWS
    if not n_each:
        return 0.0
    layers = list(zip(specs, n_query_heads, strict=True))
    found = 0.0
    for (spec, n_heads), count in Counter(layers).items():
        i = layers.index((spec, n_heads))
        found += count * _seconds(kv, i, spec, n_heads, n_each) / (_ROWS * n_each)
    return found


def _seconds(kv: RankKV, i: int, spec: AttentionSpec, n_heads: int, n_each: int) -> float:
    """Of one layer's attention of so many tokens a row."""
    pools = kv.plain
    table = np.arange(_ROWS * n_each, dtype=np.int32).reshape(_ROWS, n_each)
    q = jnp.zeros((_ROWS, 1, n_heads, spec.head_dim), spec.dtype)
    attend = jax.jit(partial(partial_attention, **spec.scoring))
    device = pools.device
    n_ahead = _N_AHEAD if is_accelerator(device) else 1
    given = jax.device_put((q, table, np.full(_ROWS, n_each, np.int32)), device)
    with jax.default_device(device):

        def run() -> float:
            began = time.perf_counter()
            found = [attend(given[0], pools.k[i], pools.v[i], *given[1:]) for _ in range(n_ahead)]
            jax.block_until_ready(found)
            return (time.perf_counter() - began) / n_ahead

        run()
        return statistics.median(run() for _ in range(_N_TIMES))
