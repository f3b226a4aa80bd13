"""Benches on tiny models: that they measure what they say, in the form they say. No test looks at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain_models
import pytest
import safetensors.numpy
from benches import bench, refused

from jaxlamina.bench import (
    decode_bench,
    kernel_peers,
    kernels_bench,
    machine,
    peers,
    processes,
    shapes,
    split_bench,
    step_bench,
    step_ways,
)
from jaxlamina.bench.chosen_share import choices
from jaxlamina.bench.prompts import prompts
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.models import ModelConfig, abstract_params, apply, random_params
from jaxlamina.models.causal_lm import decoder
from jaxlamina.ranks.cluster_layout import layout_of, partition_of
from jaxlamina.run.balance import Balance, Speeds
from jaxlamina.weights.dummy import Drawn
from splitter import split

TINY = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at how many steps a round of step bench has."""
    monkeypatch.setattr(step_bench, "_ROUND_S", 0.02)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a random two-layer llama, without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    config = ModelConfig.from_hf(TINY)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    weights = {name: np.asarray(x) for name, x in random_params(config, 1).items()}
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


def greedy_by_whole_passes(prompt: list[int], n_tokens: int) -> list[int]:
    """The oracle: no KV at all, the whole sequence again for each token. Rows are filled up behind, which a
    causal model does not see: one length, one program."""
    config = ModelConfig.from_hf(TINY)
    params = random_params(config, 1)
    run = jax.jit(partial(apply, config))
    n = len(prompt)
    tokens = np.array([*prompt, *[0] * n_tokens], np.int32)[None]
    positions = np.arange(n + n_tokens, dtype=np.int32)[None]
    for at in range(n, n + n_tokens):
        tokens[0, at] = run(params, tokens, positions)[0, at - 1].argmax()
    return tokens[0, n:].tolist()


# ---- split bench


def test_split_bench_measures_each_layer_count() -> None:
    config = ModelConfig.from_hf(TINY)
    found = split_bench.measure(config, [3, 7], batch_size=2, dtype=jnp.float32, every_slice=True)
    assert [t.n_layers for t in found] == [3, 7]
    for t in found:
        assert t.n_slices == t.n_layers + 1
        assert t.n_programs == len(t.programs) == 3
        assert sum(shared_by for _, shared_by, _ in t.programs) == t.n_slices
        assert t.compile_s == pytest.approx(sum(seconds for _, _, seconds in t.programs))
        assert min(t.trace_s, t.split_s, t.compile_s) > 0
        assert t.every_slice_s is not None and t.every_slice_s > 0
        # q 4 heads and out 4 heads, k and v 2 heads each, of 4 float32
        assert t.exchanged_bytes_per_token == t.n_layers * (4 + 4 + 2 + 2) * 4 * 4
    layer = found[1].n_params - found[0].n_params
    assert layer == 4 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16 + 2 * 16)


def test_split_bench_compiles_every_distinct_slice_once() -> None:
    config = ModelConfig.from_hf(TINY).with_layers(4)
    step = jnp.zeros((1, 1), jnp.int32)
    model = split(
        lambda p, tokens, positions: apply(config, p, tokens, positions), abstract_params(config), step, step
    )
    found = list(split_bench.distinct(model))
    assert [first for _, first, _ in found] == [0, 1, 4]
    assert [n for _, _, n in found] == [1, 3, 1]
    assert [name for name, _, _ in found] == ["slice 0", "slices 1–3", "slice 4"]


def test_with_layers_repeats_the_window_pattern() -> None:
    windowed = TINY | {"model_type": "mistral", "sliding_window": 8}
    config = ModelConfig.from_hf(windowed).with_layers(5)
    assert config.num_hidden_layers == 5 and config.windows == (8,) * 5


# ---- prompts


def test_text_prompts_have_the_length_asked_for_and_differ() -> None:
    made = prompts(5, 3000, vocab_size=256, encode=lambda text: list(text.encode()))
    assert [len(p) for p in made] == [3000] * 5
    assert len({tuple(p[:40]) for p in made}) == 5
    assert bytes(made[0]).decode().startswith("A lighthouse keeper on a rocky island")


def test_random_prompts_stay_in_the_vocabulary_and_repeat_with_the_seed() -> None:
    made = prompts(3, 50, vocab_size=7, encode=None)
    assert {len(p) for p in made} == {50}
    assert set(np.ravel(made)) <= set(range(7))
    assert made == prompts(3, 50, vocab_size=7, encode=None)
    assert made != prompts(3, 50, vocab_size=7, encode=None, seed=1)


# ---- what a step must read


def test_weight_bytes_leave_out_looked_up_tables() -> None:
    model = decoder(ModelConfig.from_hf(TINY))
    everything = sum(4 * x.size for x in abstract_params(ModelConfig.from_hf(TINY)).values())
    assert shapes.weight_bytes(model) == everything - 4 * 61 * 16  # embed_tokens; lm_head stays
    tied = decoder(ModelConfig.from_hf(TINY | {"tie_word_embeddings": True}))
    assert shapes.weight_bytes(tied) == shapes.weight_bytes(model)  # now it is the head
    own = plain_models.flax_model("nnx_mha").model
    table = own.like(own.any_dtype)[own.looked_up[0]]
    assert table.shape[0] >= own.vocab_size
    assert (
        shapes.weight_bytes(own)
        < 4 * sum(x.size for x in own.like(own.any_dtype).values()) - 4 * table.size + 1
    )


def test_step_bytes_count_kv_of_each_row() -> None:
    model = decoder(ModelConfig.from_hf(TINY))
    one_token = 2 * 2 * 4 * 4  # K and V, 2 heads of 4 float32
    alone = decode_bench.step_bytes(model, 1, 10, 3)
    # earlier tokens 10, 11, 12: 11 in the mean, and the new one; two layers
    assert alone - shapes.weight_bytes(model) == 2 * one_token * (11 + 1)
    assert decode_bench.step_bytes(model, 5, 10, 3) - shapes.weight_bytes(model) == 5 * 2 * one_token * 12
    windowed = decoder(ModelConfig.from_hf(TINY | {"model_type": "mistral", "sliding_window": 8}))
    assert decode_bench.step_bytes(windowed, 1, 10, 3) - shapes.weight_bytes(windowed) == 2 * one_token * 8


def test_step_flop_count_weights_and_attended_tokens() -> None:
    model = decoder(ModelConfig.from_hf(TINY))
    weights = shapes.weight_bytes(model, itemsize=1)
    attention = 2 * 4 * 4 * 4 * 12  # layers, two products of two operations, N, H, tokens in the mean
    assert decode_bench.step_flop(model, 3, 10, 3) == 3 * (2 * weights + attention)


# ---- choosing peers


def test_peers_by_name_and_unknown_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.chosen("unsplit, split,split") == (["unsplit", "split"], {})
    with pytest.raises(UserError, match="'vllm' is not one of auto, split"):
        peers.chosen("split,vllm")
    with pytest.raises(UserError, match="empty"):
        peers.chosen(",")
    monkeypatch.setitem(peers._NEEDS, "llama.cpp", (("no_such_module", "no-such-package"),))
    names, left_out = peers.chosen("auto")
    assert "llama.cpp" not in names and names[:2] == ["split", "unsplit"]
    assert left_out["llama.cpp"] == "not installed: pip install no-such-package"
    with pytest.raises(UserError, match="pip install no-such-package"):
        peers.chosen("llama.cpp")


# ---- decode bench


def decoded(model: Any, peers: list[str], **changes: Any) -> decode_bench.DecodeReport:
    """What `decode_bench` measures of a few steps of the tiny model."""
    given: dict[str, Any] = {"batches": [1], "n_prompt": 4, "n_steps": 2, "n_rounds": 1, "encode": None}
    return decode_bench.measure(str(model), decoder(ModelConfig.from_hf(TINY)), peers, **(given | changes))


def test_decode_bench_end_to_end(tiny_folder: Path) -> None:
    report = decoded(tiny_folder, ["split", "unsplit"], batches=[1, 3], n_prompt=9, n_steps=4, n_rounds=2)
    assert [(r.batch, r.peer) for r in report.results] == [
        (batch, peer) for batch in (1, 3) for peer in ("split", "unsplit")
    ]
    for r in report.results:
        assert len(r.rounds_tokens_per_s) == 2 and min(r.rounds_tokens_per_s) > 0
        assert r.same_tokens == (None if r.peer == "split" else r.batch)
        limit_s = max(
            report.step_bytes[r.batch] / report.read_bandwidth_bytes_per_s,
            report.step_flop[r.batch] / report.matmul_flop_per_s,
        )
        assert r.of_roofline == pytest.approx(limit_s / (r.ms_per_step / 1000))
        assert r.tokens_per_s == pytest.approx(r.batch / (r.ms_per_step / 1000))
    assert [(x.batch, x.ours, x.peer) for x in report.ratios] == [
        (1, "split", "unsplit"),
        (3, "split", "unsplit"),
    ]
    for x in report.ratios:
        assert x.lowest <= x.ratio <= x.highest
    assert report.left_out == {} and set(report.peak_memory_bytes) == {"split", "unsplit"}
    assert json.loads(json.dumps(report.to_dict()))["n_rounds"] == 2


@pytest.mark.parametrize("name", [pytest.param("split", marks=pytest.mark.slow), "unsplit", "transformers"])
def test_peers_write_the_greedy_tokens(tiny_folder: Path, name: str) -> None:
    why = peers.why_not(name)
    if why is not None:
        pytest.skip(f"{name} is {why}")
    given = prompts(3, 9, vocab_size=61, encode=None)
    job = peers.PeerJob(str(tiny_folder), 3, 15)
    with processes.PeerProcess(name, partial(peers.load, name, job)) as peer:
        for batch in (1, 3):  # twice on one peer: nothing may be left over from the first run
            run = peer.ask("decode", given[:batch], 6)
            assert run.tokens == [greedy_by_whole_passes(p, 7) for p in given[:batch]]
            assert run.prefill_s > 0 and run.decode_s > 0


def test_a_failing_peer_is_left_out_with_its_reason(tiny_folder: Path) -> None:
    missing = {"transformers": "not installed"}
    report = decoded(tiny_folder, ["llama.cpp", "unsplit"], left_out=missing)
    assert [r.peer for r in report.results] == ["unsplit"]
    assert report.results[0].same_tokens is None
    assert report.left_out.keys() == {"transformers", "llama.cpp"}
    assert report.left_out["llama.cpp"].startswith("llama.cpp: ")


def test_no_peer_left_is_an_error(tiny_folder: Path) -> None:
    with pytest.raises(UserError, match="no peer could be measured: .*no-such-folder"):
        decoded("no-such-folder", ["unsplit"])


def test_a_sequence_past_the_models_length_is_an_error() -> None:
    with pytest.raises(UserError, match="--prompt 60 and --tokens 10 make 71 tokens"):
        decoded("unused", ["unsplit"], n_prompt=60, n_steps=10)


# ---- the F32 copy


def test_f32_copy_holds_the_same_numbers_and_metadata(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the F32 copy is written with the gguf package")
    from jaxlamina.bench.gguf_f32 import f32_gguf

    source = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(source, arch="llama")
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    matrix = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    quantised = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("norm", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    copy = f32_gguf(source, tmp_path / "cache")
    reader = gguf.GGUFReader(copy)
    tensors = {t.name: t for t in reader.tensors}
    assert {t.tensor_type for t in reader.tensors} == {gguf.GGMLQuantizationType.F32}
    expected = gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(tensors["weight"].data, expected)
    np.testing.assert_array_equal(tensors["norm"].data, np.arange(3, dtype=np.float32))
    assert reader.fields["llama.block_count"].contents() == 1
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    before = copy.stat().st_mtime_ns
    assert f32_gguf(source, tmp_path / "cache") == copy and copy.stat().st_mtime_ns == before
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [copy.name]  # no unfinished file stays behind


# ---- machine


def test_machine_says_where_and_when() -> None:
    where = machine.describe(["numpy", "no-such-package"])
    assert where.versions["numpy"] == np.__version__ and "no-such-package" not in where.versions
    assert where.n_cores >= 1 and where.device
    assert json.loads(json.dumps(where.to_dict()))["date"].endswith("+00:00")


def test_busy_machines_are_told() -> None:
    idle = machine.Machine("cpu", 2, 8.0, 0.1, "2026-01-01", {})
    assert idle.busy() is None
    assert "load average was 3.0" in str(machine.Machine("cpu", 2, 8.0, 3.0, "2026-01-01", {}).busy())


@pytest.mark.parametrize("make", [lambda: machine.ReadBandwidth(1), lambda: machine.MatmulRate(64)])
def test_measured_limits_keep_their_best(make: Callable[[], Any]) -> None:
    limit = make()
    first = limit.measure(passes=1)
    assert limit.best == first > 0
    assert limit.measure(passes=1) == limit.best >= first


# ---- commands


@pytest.mark.parametrize("only_json", [False, True])
def test_split_command_ends_with_json(tmp_path: Path, only_json: bool) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    options = ["--config", str(file), "--layers", "2,3", *(["--json"] if only_json else [])]
    record, shown = bench("split", *options)
    assert record["bench"] == "split" and [r["n_layers"] for r in record["results"]] == [2, 3]
    assert {"device", "versions", "date"} <= record.keys()
    assert (len(shown.splitlines()) == 1) == only_json
    if not only_json:
        assert "limit 2 s" in shown and "(1 is flat)" in shown
        assert " parameters " in shown and re.search(r" 2 +\d+\.\d k ", shown), "as large as it is"


def test_decode_command_ends_with_json(tiny_folder: Path) -> None:
    options = ["--model", str(tiny_folder), "--batch", "2", "--prompt", "5", "--tokens", "3"]
    record, shown = bench("decode", *options, "--rounds", "1", "--peers", "unsplit")
    assert record["bench"] == "decode" and record["prompt_kind"] == "random token ids"
    assert [r["peer"] for r in record["results"]] == ["unsplit"]
    assert record["roofline_tokens_per_s"].keys() == {"2"}
    assert {"device", "versions", "date"} <= record.keys()
    assert "roofline at batch 2" in shown


@pytest.mark.parametrize("text", ["", "0", "1,x", "-3", "1,,2"])
def test_bad_counts_are_named(text: str) -> None:
    assert "--layers" in refused("split", "--layers", text)


# ---- kernels bench
def test_conversation_lengths_are_the_traces() -> None:
    lengths = kernels_bench.conversation_lengths(512, seed=1)
    assert len(lengths) == 512
    assert 1 <= min(lengths) < max(lengths) <= 14089, "the trace's longest request"
    assert lengths == kernels_bench.conversation_lengths(512, seed=1)
    assert lengths != kernels_bench.conversation_lengths(512, seed=2)


def test_inputs_have_every_slot_once_in_random_order() -> None:
    case = kernels_bench.KernelCase("small", (5, 0, 70, 12), 4, 2, 16)
    inputs = kernels_bench.make_inputs(case, jnp.float32, seed=3)
    rows = [np.asarray(inputs.table[b, :n]) for b, n in enumerate(case.lengths)]
    assert np.array_equal(np.concatenate(rows), inputs.slots)
    assert len(set(inputs.slots.tolist())) == case.n_tokens
    assert (np.diff(inputs.slots) != 1).any()
    assert case.kv_bytes(2) == 2 * 87 * 2 * 16 * 2


def test_the_check_notices_a_wrong_output() -> None:
    case = kernels_bench.KernelCase("small", (33,), 4, 2, 16)
    inputs = kernels_bench.make_inputs(case, jnp.float32, seed=4)
    prepared = kernel_peers.PEERS["xla"](inputs)
    out = prepared.output(prepared.call())
    assert kernels_bench.check(inputs, out) < 1e-5
    assert kernels_bench.check(inputs, out[:, ::-1]) > kernels_bench.ERROR_LIMIT


def test_kernels_command_ends_with_json() -> None:
    options = ["--case", "demo", "--rounds", "1", "--seed", "5", "--peers", "xla,xla int8"]
    record, _ = bench("kernels", *options)
    assert record["seed"] == 5
    assert [r["peer"] for r in record["results"]] == ["xla", "xla int8"]
    for r in record["results"]:
        assert r["error"] < kernels_bench.ERROR_LIMIT
        assert r["bytes_per_s"] == pytest.approx(r["bytes_read"] / r["time_us"] * 1e6)
    full, int8 = (r["bytes_read"] for r in record["results"])
    assert int8 / full == (64 + 2) / (4 * 64), "a byte an element and two a scale, for four an element"
    assert record["kv"]["slot_operations_per_s"] > 0


def test_unknown_kernels_and_cases_are_named() -> None:
    for options in (["--peers", "xla,wrong"], ["--case", "wrong"]):
        assert "wrong" in refused("kernels", *options)


def test_tuning_needs_a_gpu() -> None:
    assert "GPU" in refused("kernels", "--tune", "--case", "demo")


# ---- prefix bench
def test_prefix_command_ends_with_json(tiny_folder: Path) -> None:
    options = ["--model", str(tiny_folder), "--shared", "24", "--own", "4", "--rounds", "1", "--json"]
    record, _ = bench("prefix", *options)
    assert (record["n_computed_first"], record["n_computed_second"]) == (28, 4)
    assert record["same_tokens"]
    assert record["ratio"] == pytest.approx(record["second_s"][0] / record["first_s"][0])


def test_prefix_bench_says_that_nothing_was_cached(tiny_folder: Path) -> None:
    options = ["--model", str(tiny_folder), "--shared", "1", "--own", "1", "--rounds", "1"]
    record, shown = bench("prefix", *options)
    assert record["same_tokens"] and record["n_cached_tokens"] == 0
    assert "the same tokens as without" in shown and "nothing was cached" in shown


# ---- step bench


def test_prompt_tokens_go_beside_steps_of_whole_batches() -> None:
    options = step_ways.StepOptions([], jnp.float32, 1, prefill=4, n_devices=2)
    names = [way.name for way in step_ways.ways_of("unsplit", options)]
    two = "unsplit, 2 devices by requests"
    assert names == ["unsplit", two, "unsplit, with 4 alongside", "unsplit, then 4"]


def test_shares_of_step_bench() -> None:
    shares = step_ways.shares_of("0,0.5,1,auto")
    assert shares == [0.0, 0.5, 1.0, "auto"] and step_ways.shares_of("") == []
    for wrong in ("0,half", "1.5", "0,"):
        with pytest.raises(UserError, match="--shares"):
            step_ways.shares_of(wrong)
    options = step_ways.StepOptions([], jnp.float32, 1, staggered=[2], local_attention=shares)
    ways = step_ways.ways_of("split by tokens", options)
    assert [(way.local_share, way.options.get("n_batches")) for way in ways] == [
        ("auto", None), (0.5, 1), (0.5, 2), (1.0, 1),
    ]  # fmt: skip
    ways = step_ways.ways_of("split by tokens, 0 local", options)
    assert [(way.local_share, way.options["n_batches"]) for way in ways] == [(None, 1), (None, 2)]


@pytest.mark.parametrize(
    ("asked", "n_kv_heads", "shares", "found"),
    [
        (["heads", "tokens"], 3, [0.0], {"heads, 0 local": 0.0, "tokens, 0 local": 0.0}),
        ([], 3, [0.0], {"tokens, 0 local": 0.0}),  # what the job's "auto" stands for
        ([], 4, [0.0, 0.5], {"heads, 0 local": 0.0, "heads, 0.5 local": 0.5}),
        (["tokens"], 4, [0.5, "auto"], {"tokens": "auto"}),
        (["requests"], 4, [0.0, 0.5], {"requests": "auto", "requests, 0 local": 0.0}),
    ],
)
def test_every_split_executor_of_step_bench_is_laid_out_as_it_is_named(
    asked: list[str], n_kv_heads: int, shares: list[Any], found: dict[str, Any]
) -> None:
    cluster, options = Cluster(dop=(1, 2)), step_ways.StepOptions([], jnp.float32, 1)
    options = replace(options, local_attention=shares, partitions=asked)
    layouts = dict(step_ways.layouts(options, cluster, [n_kv_heads]))
    assert {name: changes["local_attention"] for name, changes in layouts.items()} == {
        f"split by {name}": share for name, share in found.items()
    }
    for name, changes in layouts.items():
        changed = replace(cluster, **changes)
        layout = layout_of(changed, partition_of(changed, [n_kv_heads]))
        assert layout.partition == name.removeprefix("split by ").partition(",")[0]
        assert layout.attends_locally == (changes["local_attention"] != 0)


def test_partitions_without_shares_are_refused() -> None:
    assert "--shares" in refused("step", "--local", "--partitions", "heads")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--staggered", "2"), ("--mini-batches", "2"), ("--shares", "0,0.5")],
)
def test_options_of_a_split_are_refused_without_ranks(option: str, value: str) -> None:
    found = refused("step", "--config", "smollm2-135m", "--case", "4x16", option, value)
    assert found.startswith(f"{option} is about attention workers")


def test_the_floor_of_staggered_pools_has_the_kv_where_it_is_kept() -> None:
    """Weights of 10 bytes in all batches, KV of 100, over one model rank and two attention workers."""
    floors = [step_bench.pools_floor(10, 100, kept, 1, 2) for kept in (0, 0.2, 0.5, 1)]
    assert floors == [50, 40, 60, 110], "attention workers, attention workers, model rank, model rank"
    assert step_bench.pools_floor(10, 100, 0.5, 2, 2) == 30


def test_what_auto_comes_to_on_one_load() -> None:
    """The balance is told of steps only with the shares that it wants; these have slices of 2 ms."""
    balance, wanted = Balance(Speeds(1e-6, 2e-6, 1e-4), (1, 2)), []

    def run(share: float) -> int:
        wanted.append(share)
        for n in (1, 2):
            local, remote = share * 3e-3, (1 - share) * 6e-3 + n * 1e-4
            seconds = 2e-3 + max(local, remote) if n == 1 else max(3.9e-3 + local, remote)
            balance.took(8, n, share * 3000, (1 - share) * 3000, seconds)
        return 1

    found = choices(balance, 8, 3000, run)
    assert [x.share for x in found] == wanted and all(x.n_batches == 1 for x in found)
    assert found[0].predicted_s is None and found[-1].share == pytest.approx(6.1 / 9)
    assert len(found) < 4


def test_step_bench_leaves_out_what_a_device_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One way fails when it is compiled, another in its second round: the others are measured, and it is
    said."""
    run, n_runs = step_bench._run, {"slice by slice": 0}

    def failing(executor: Any, way: Any, *args: Any) -> Any:
        if way.name == "unsplit, with 4 alongside":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")
        n_runs[way.name] = n_runs.get(way.name, 0) + 1
        if way.name == "slice by slice" and n_runs[way.name] > 9:
            raise jax.errors.JaxRuntimeError("lost")
        return run(executor, way, *args)

    monkeypatch.setattr(step_bench, "_run", failing)
    failed: list[str] = []
    options = step_ways.StepOptions([step_ways.StepCase(2, 8)], jnp.float32, 2, local=True, prefill=4)
    found, _ = step_bench.measure(Drawn(ModelConfig.from_hf(TINY)), options, on_failure=failed.append)
    local = ["slice by slice, with 4 alongside", "slice by slice, then 4"]
    assert [r.way for r in found] == ["unsplit", "unsplit, then 4", *local]
    assert [r.ratio_to_decode is None for r in found] == [True, False, True, True]
    assert all(len(r.ahead_ms) == 2 for r in found)
    assert failed == [
        "B 2, 8 tokens, unsplit, with 4 alongside: RESOURCE_EXHAUSTED: Out of memory",
        "B 2, 8 tokens, slice by slice: lost",
    ]


def test_step_bench_with_prompt_tokens() -> None:
    cases = [step_ways.StepCase(3, 8), step_ways.StepCase(2, 8)]
    options = step_ways.StepOptions(cases, jnp.float32, 2, local=True, prefill=4)
    found, _ = step_bench.measure(Drawn(ModelConfig.from_hf(TINY)), options)
    ways = {r.way: r for r in found}
    local = ["slice by slice", "slice by slice, with 4 alongside", "slice by slice, then 4"]
    assert list(ways) == ["unsplit", "unsplit, with 4 alongside", "unsplit, then 4", *local]
    assert len(found) == 2 * len(ways)
    for way in ("unsplit, with 4 alongside", "unsplit, then 4"):
        r = ways[way]
        assert (r.n_prompt_tokens, r.n_stored_tokens, r.decode_ms) == (4, 4, ways["unsplit"].ahead_ms)
        ratios = [a / b for a, b in zip(r.ahead_ms, ways["unsplit"].ahead_ms, strict=True)]
        assert r.to_dict()["ratio_to_decode"] == pytest.approx(np.median(ratios))
        assert r.to_dict()["prompt_tokens_per_s"] == pytest.approx(4e3 / np.median(r.ahead_ms))
        assert r.floor_ms > ways["unsplit"].floor_ms
    assert ways["unsplit"].ratio_to_decode is None and ways["unsplit"].prompt_tokens_per_s is None
    # The second case's slots hold what the first case's steps have stored, the same in all ways.
    assert all(r.max_difference < 1e-5 for r in found)
