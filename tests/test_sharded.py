"""Unsplit steps over several devices by `jax.sharding`, which benchmarks compare with, against one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_CODE = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jaxlamina.bench import step_bench as sb
from jaxlamina.models.config_files import model_config
from jaxlamina.bench.split_bench import with_layers
from jaxlamina.models import apply
from jaxlamina.weights.dummy import random_weights
from jaxlamina.bench.sharded import ShardedExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from dataclasses import replace
config = with_layers(replace(model_config("smollm2-135m"), num_attention_heads=8, num_key_value_heads=4, head_dim=64), 2)
params, case = random_weights(config, jnp.float32), sb.StepCase(3, 16)
n_slots = 64
fn, batch = partial(apply, config), sb.shuffled_batch(case, n_slots, config.vocab_size)
one = UnsplitExecutor(fn, params, n_slots=n_slots, device=jax.devices()[0])
two = ShardedExecutor(fn, params, n_slots=n_slots, devices=jax.devices())
rounds = [[np.asarray(x.decode(batch)) for _ in range(2)] for x in (one, two)]
worst = max(float(abs(a - b).max() / abs(a).max()) for a, b in zip(*rounds))
pools = [np.asarray(a) - np.asarray(b) for a, b in zip(one.kv.k + one.kv.v, two.kv.k + two.kv.v)]
import gc, weakref
made, alive = [], []
def noting(kind):
  def make(*args, **options):
    gc.collect()
    alive.append(sum(x() is not None for x in made))
    found = kind(*args, **options)
    made.append(weakref.ref(found))
    return found
  return make
sb.UnsplitExecutor, sb.ShardedExecutor = noting(UnsplitExecutor), noting(ShardedExecutor)
found, _ = sb.measure(sb.source_of(config), sb.StepOptions([sb.StepCase(4, 16)], jnp.float32, 1, n_devices=2))
print(json.dumps({"ways": {r.way: (r.max_difference, r.floor_ms) for r in found}, "worst": worst, "alive": alive, "pools": max(float(abs(x).max()) for x in pools),
  "n_devices": [len(x.kv.k[0].sharding.device_set) for x in (one, two)],
  "own_bytes": max(s.data.nbytes for s in two.kv.k[0].addressable_shards) / one.kv.k[0].nbytes}))
"""


def test_two_devices_give_what_one_gives():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _CODE],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["worst"] < 1e-5 and found["pools"] < 1e-5
    assert found["n_devices"] == [1, 2] and found["own_bytes"] == 0.5
    assert found["alive"] == [0, 0]  # of executors when one is made: each has all of the memory
    ways = found["ways"]
    assert list(ways) == ["unsplit", "unsplit, 2 devices by requests", "unsplit, 2 devices by weights"]
    assert ways["unsplit, 2 devices by requests"][0] is None  # other requests than the others'
    assert ways["unsplit, 2 devices by weights"][0] < 1e-5
    assert (
        ways["unsplit, 2 devices by requests"][1]
        < ways["unsplit"][1]
        == ways["unsplit, 2 devices by weights"][1]
    )
