"""Unsplit steps over several devices by `jax.sharding`, which benchmarks compare with, against one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_CODE = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jaxlamina.bench import step_bench as sb, step_ways
from jaxlamina.models.config_files import model_config
from jaxlamina.models import apply
from jaxlamina.weights.dummy import Drawn, random_weights
from jaxlamina.run.sharded import ShardedExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from dataclasses import replace
config = replace(model_config("smollm2-135m"), num_attention_heads=8, num_key_value_heads=4, head_dim=64, hidden_size=128, intermediate_size=256, vocab_size=2048).with_layers(2)
params, case = random_weights(config, jnp.float32), step_ways.StepCase(3, 16)
n_slots = 64
fn, batch = partial(apply, config), sb.shuffled_batch(case, n_slots, config.vocab_size)
one = UnsplitExecutor(fn, params, n_slots=n_slots, device=jax.devices()[0])
later = Drawn(config).later(jnp.float32)  # drawn in parts, and equal to what is drawn whole
two = ShardedExecutor(fn, later, n_slots=n_slots, devices=jax.devices())
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
sb._ROUND_S = 0.02
found, _ = sb.measure(sb.source_of(config), step_ways.StepOptions([step_ways.StepCase(4, 16)], jnp.float32, 1, n_devices=2))
print(json.dumps({"ways": {r.way: (r.max_difference, r.floor_ms) for r in found}, "worst": worst, "alive": alive, "pools": max(float(abs(x).max()) for x in pools),
  "n_devices": [len(x.kv.k[0].sharding.device_set) for x in (one, two)],
  "own_bytes": max(s.data.nbytes for s in two.kv.k[0].addressable_shards) / one.kv.k[0].nbytes}))
"""


_ENGINE = """
import json
import numpy as np
from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.weights.sources import InMemoryModel
from jaxlamina.models import ModelConfig, random_params
from test_models import MODELS

config = ModelConfig.from_hf(MODELS["llama"] | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 128})
params = random_params(config, seed=1)
rng = np.random.default_rng(0)
shared = rng.integers(1, 131, 40).tolist()
prompts = [shared + rng.integers(1, 131, n).tolist() for n in (1, 3, 9, 20, 2, 31)] + [[5, 6, 7]]
asked = [SamplingParams(max_tokens=n, temperature=t, seed=3, ignore_eos=True) for n, t in zip((9, 5, 12, 20, 30, 3, 8), (0, 1, 0, 0.7, 0, 1, 0))]

def run(options, **more):
  llm = LLM(InMemoryModel(config, params), split=False, max_num_seqs=4, max_model_len=128, kv_slots=84, kv_headroom=0.0, max_num_batched_tokens=16, **options, **more)
  found = [o.token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)]
  again = [o.token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)]
  llm.update_weights({name: 2 * x for name, x in params.items()})
  other = [o.token_ids for o in llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)]
  kinds = {len(x.sharding.device_set) for x in [*llm.executor.params.values(), *llm.executor.kv.k]}
  return [found, again, other], llm.stats(), kinds, llm.executor.kv.k[0].addressable_shards[0].data.shape

one, two = run({}), run({"tensor_parallel": 2})
kept, moved = run({"tensor_parallel": 2}, kept_kv_slots=300), run({"tensor_parallel": 2}, host_kv_slots=200)
said = []
for wrong in ({"tensor_parallel": 3}, {"tensor_parallel": 2, "split": True}, {"tensor_parallel": 2, "kv_dtype": "int8"}):
  try:
    LLM(InMemoryModel(config, params), **({"split": False, "max_model_len": 64} | wrong))
    said.append("")
  except UserError as error:
    said.append(str(error))
print(json.dumps({"one": one[0], "two": two[0], "kept": kept[0], "moved": moved[0], "n_preempted": [x[1]["n_preemptions"] for x in (one, two)], "n_moved": moved[1]["n_moved_in_tokens"], "kinds": [sorted(x[2]) for x in (one, two)], "own": [x[3] for x in (one, two)], "said": said}))
"""


_START = """
import json
from jaxlamina import LLM, SamplingParams
from jaxlamina.engine.warm_up import warm_up
from jaxlamina.models import ModelConfig, random_params
from jaxlamina.process.jax_cache import keep_programs
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.steps.buckets import StepSizes
from jaxlamina.weights.sources import InMemoryModel
from test_models import MODELS

keep_programs()
config = ModelConfig.from_hf(MODELS["llama"] | {"num_attention_heads": 4, "num_key_value_heads": 2})
llm = LLM(InMemoryModel(config, random_params(config, seed=1)), split=False, tensor_parallel=2, max_num_seqs=2, max_model_len=64)
n_traced, program = [], UnsplitExecutor._program
UnsplitExecutor._program = lambda self, step: n_traced.append(1) or program(self, step)
todo = [StepSizes("decode", 2, 1, 64), StepSizes("prefill", 1, 32, 0)]
warm_up(llm.engine, todo, lambda n: None, lambda: False, all_of_drawing=False)
outputs = llm.generate([[3, 5, 7, 9], [4, 8]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
print(json.dumps({"tokens": [o.token_ids for o in outputs], "n_traced": len(n_traced)}))
"""


def _two_devices(code: str, **environment: str) -> Any:
    """What the code prints last, as JSON, in a process with two devices."""
    here = str(Path(__file__).parent)
    both = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    flags = {"XLA_FLAGS": both, "JAX_PLATFORMS": "cpu"}
    paths = os.pathsep.join([here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | flags | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_engine_over_two_devices_writes_what_one_writes():
    """Prompts in chunks alongside rows, shared prefixes, preemptions, other weights, kept KV."""
    found = _two_devices(_ENGINE)
    assert found["two"] == found["one"] == found["kept"] == found["moved"]
    assert found["one"][0] == found["one"][1] != found["one"][2]
    assert found["n_preempted"][0] == found["n_preempted"][1] > 0
    assert found["kinds"] == [[1], [2]] and found["own"][0][1] == 2 * found["own"][1][1]
    more, split, int8 = found["said"]
    assert "needs as many devices, and there are 2" in more and "give split=False" in split
    assert "for one device" in int8 and found["n_moved"] > 0


@pytest.mark.slow
def test_a_second_start_over_two_devices_traces_no_step(tmp_path: Path):
    first, second = (_two_devices(_START, JAX_COMPILATION_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert first["tokens"] == second["tokens"] and (first["n_traced"], second["n_traced"]) == (2, 0)


def test_two_devices_give_what_one_gives():
    found = _two_devices(_CODE)
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
