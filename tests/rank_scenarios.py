"""What rank 0 of `rank_job` runs: each scenario a model over the ranks beside the same model unsplit in its own
process. A model is a name of `test_models`, or a name and what is changed of it, or a name of `plain_models`, or a
file's path.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import msgspec
import numpy as np
import plain_models
from rank_job import held_bytes

from jaxlamina import LLM, SamplingParams
from jaxlamina.errors import UserError
from jaxlamina.job.control import messages as m
from jaxlamina.kv.kept import KeptWanted
from jaxlamina.models import random_params
from jaxlamina.models.causal_lm import built
from jaxlamina.process.descendants import descendants
from jaxlamina.run import set_up
from jaxlamina.weights.sources import InMemoryModel

# Of mixed lengths; the third begins as the first does, so that it follows stored tokens.
SHARED = [5, 9, 11, 3, 4, 17, 8, 2, 1, 6, 12, 40, 41, 50, 51, 52, 53]
PROMPTS = ([*SHARED, 54, 55], [7, 8], [*SHARED, 33, 34, 35, 36])


def source(model: str | list[Any]) -> Any:
    if model == "smollm2-135m-instruct" or (isinstance(model, str) and os.path.isabs(model)):
        return model
    name, changes = (model, {}) if isinstance(model, str) else model
    if name in plain_models.NAMES:
        return built(f"plain_models:{name}")  # so that other model ranks can make it, too
    from test_models import MODELS

    from jaxlamina.models import ModelConfig

    long_enough = {"max_position_embeddings": 128}
    config = ModelConfig.from_hf(MODELS[name] | long_enough | changes)
    return InMemoryModel(config, random_params(config, seed=3))


def unsplit(
    what: list[Any], tokens_of: Callable[[LLM], list[list[int]]], model: Any, limits: dict[str, Any]
) -> list[list[int]]:
    """The same model's tokens, unsplit in this process; or kept from another job of this run of the tests,
    which needed the same."""
    folder = os.environ.get("JAXLAMINA_TEST_REFERENCES")
    name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    kept = Path(folder) / f"{name}.json" if folder else None
    if kept is not None and kept.exists():
        return json.loads(kept.read_bytes())
    found = tokens_of(LLM(source(model), split=False, **limits))
    if kept is not None:
        begun = kept.with_suffix(f".{os.getpid()}")
        begun.write_text(json.dumps(found))
        begun.replace(kept)  # whole, or not there
    return found


def greedy(
    group: Any, model: Any, n_tokens: int = 64, fourth: int = 0, most_each: int | None = None, **options: Any
) -> dict[str, Any]:
    """The same tokens as unsplit? The first prompt once before all together, so that two of them find a
    prefix. ``fourth``: tokens of one prompt more. ``most_each``: of KV, as if attention workers had no memory
    for more."""
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    limits = {"max_num_seqs": 4, "max_model_len": 96} | options
    prompts = [*PROMPTS, *([[(7 * i) % 50 + 3 for i in range(fourth)]] if fourth else [])]

    def tokens_of(llm: LLM) -> list[list[int]]:
        alone = llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=1, ignore_eos=True))
        together = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        llm.engine.check_integrity()
        return [list(o.outputs[0].token_ids) for o in (*alone, *together)]

    def with_less(setup: Any, layout: Any, found: Sequence[int], *more: Any) -> Any:
        n = len(layout.workers)
        return room(setup, layout, [*(min(x, most_each or x) for x in found[:n]), *found[n:]], *more)

    room = set_up._room
    with patch.object(set_up, "_room", with_less):
        over_ranks = LLM(source(model), group=group, **limits)
    found = tokens_of(over_ranks)
    stats = over_ranks.stats()
    return {
        "same": found == unsplit([model, prompts, n_tokens, limits], tokens_of, model, limits),
        "n_tokens": [len(x) for x in found],
        "n_prefix_hit_tokens": stats["n_prefix_hit_tokens"],
        "programs": sorted(stats["compilations"]),
        "staggering": stats["staggering"],
        "local_attention": stats.get("local_attention"),
        "n_moved_in_tokens": stats["n_moved_in_tokens"],
        "n_preemptions": stats["n_preemptions"],
        "ahead": over_ranks.engine.async_scheduling,
        "n_kept": group.transport.n_kept,
        "n_prompt_tokens_own_pace": stats["n_prompt_tokens_own_pace"],
    }


def short_prompts(group: Any, model: Any) -> dict[str, Any]:
    """Several in one call, from their first tokens on and after stored ones: the tokens of an unsplit model
    that computes them one by one?"""
    prompts = [*([5 + i, 9, 11 + i] for i in range(5)), *([*SHARED, 50 + i] for i in range(5))]
    limits = {"max_num_seqs": 8, "max_model_len": 96}

    def tokens_of(llm: LLM) -> list[list[int]]:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        llm.engine.check_integrity()
        return [list(o.outputs[0].token_ids) for o in found]

    over_ranks = LLM(source(model), group=group, prompt_batch_tokens=128, **limits)
    found = tokens_of(over_ranks)
    one_by_one = limits | {"prompt_batch_tokens": 0}
    return {
        "same": found == unsplit([model, prompts, one_by_one], tokens_of, model, one_by_one),
        "programs": sorted(over_ranks.stats()["compilations"]),
    }


def held_worker(group: Any, model: str, folder: str, n_steps: int = 3) -> dict[str, Any]:
    """Decode steps that end between a chunk's beginning and its intake, of each chunk that is begun while a
    request is decoded: the prefill worker is held (`rank_job.hold_prompts`) until there are ``n_steps``. One
    request is aborted while its prompt is computed."""
    llm = LLM(source(model), group=group, max_num_seqs=4, max_model_len=96)
    executor, engine = llm.executor, llm.engine
    long, greedy = (
        [(7 * i) % 50 + 3 for i in range(20)],
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    )
    at_beginning: dict[int, int] = {}  # by chunk
    meanwhile: list[int] = []
    begin, run = executor.begin_prompt, executor.run

    def begun(part: Any) -> None:
        begin(part)
        at_beginning[group.chunks.n] = engine.stats.n_decode_steps

    def ran(step: Any) -> Any:
        if any(part.ready for part in step.prompts):
            meanwhile.append(engine.stats.n_decode_steps - at_beginning[group.chunks.n])
        return run(step)

    tokens: dict[str, list[int]] = {}
    names: list[str] = []
    for i in (1, 2, 3):  # programs are compiled by then: decode steps do not wait for that either
        (Path(folder) / f"{i}").touch()
    llm.generate({"prompt_token_ids": long[::-1]}, SamplingParams(max_tokens=2, ignore_eos=True))
    with patch.object(executor, "begin_prompt", begun), patch.object(executor, "run", ran):
        first = engine.add_request([7, 8], SamplingParams(max_tokens=90, ignore_eos=True))
        while not engine.idle:
            for event in engine.step():
                tokens.setdefault(event.request_id, []).append(event.token_id)
            if first in tokens and not names:
                names = [engine.add_request([*prompt], greedy) for prompt in ([*long, 4], long)]
            if names and group.chunks.n == 5:
                engine.abort(names[0])
            n_since = engine.stats.n_decode_steps - at_beginning.get(group.chunks.n, 0)
            if group.chunks.n == 4 or n_since >= n_steps:
                (Path(folder) / f"{group.chunks.n}").touch()
        engine.check_integrity()
    alone = LLM(source(model), split=False, max_num_seqs=4, max_model_len=96)
    [want] = alone.generate({"prompt_token_ids": long}, greedy)
    return {"same": tokens[names[1]] == list(want.outputs[0].token_ids), "n_decodes_meanwhile": meanwhile}


def updated(group: Any, model: Any) -> dict[str, Any]:
    """Other weights over ranks: the tokens of both, compared with those of the same models unsplit."""
    limits = {"max_num_seqs": 4, "max_model_len": 96}
    a = source(model)
    b = InMemoryModel(a.config, random_params(a.config, seed=4))
    over_ranks = LLM(a, group=group, **limits)
    asked = [{"prompt_token_ids": p} for p in PROMPTS]

    def tokens_of(llm: LLM) -> list[list[int]]:
        found = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        return [list(o.token_ids) for o in found]

    before, n = tokens_of(over_ranks), over_ranks.stats()["n_compilations"]
    over_ranks.update_weights(dict(b.params))
    after = tokens_of(over_ranks)
    over_ranks.update_weights(a)
    again = tokens_of(over_ranks)
    of_a, of_b = (tokens_of(LLM(x, split=False, **limits)) for x in (a, b))
    return {
        "same_before": before == of_a,
        "same_after": after == of_b,
        "same_again": again == of_a,
        "differ": of_a != of_b,
        "n_compiled": over_ranks.stats()["n_compilations"] - n,
    }


def ahead(group: Any, model: str) -> dict[str, Any]:
    """How long the host launched steps and how long it waited for results, where attention ranks are slow: of
    some runs the one with least to compile, which goes by where tokens fall."""
    llm = LLM(source(model), group=group, max_num_seqs=4, max_model_len=96)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    asked = [{"prompt_token_ids": p} for p in PROMPTS]
    stats = [llm.stats()]
    for _ in range(3):
        llm.generate(asked, params)
        stats.append(llm.stats())
    names = "launch_s", "wait_s", "n_steps"
    runs = [{name: b[name] - a[name] for name in names} for a, b in pairwise(stats)]
    return min(runs, key=lambda run: run["launch_s"])


def as_written(group: Any, model: str, n_tokens: int = 64, **options: Any) -> dict[str, Any]:
    """The tokens that a plain Flax model's own function says?"""
    params = SamplingParams(max_tokens=n_tokens, temperature=0, ignore_eos=True)
    llm = LLM(source(model), group=group, **({"max_num_seqs": 4, "max_model_len": 96} | options))
    prompts = [{"prompt_token_ids": p} for p in plain_models.PROMPTS]
    found = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    llm.engine.check_integrity()
    expected = plain_models.greedy_of_the_function(model, n_tokens=n_tokens)
    return {"model": model, "same": found == expected, "n_tokens": [len(x) for x in found]}


def answer(group: Any, model: str, prompt: str) -> dict[str, Any]:
    """What a model writes after a text."""
    llm = LLM(source(model), group=group, max_num_seqs=1, max_model_len=64)
    [out] = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0))
    return {"text": out.text}


def branches(group: Any, model: str, **options: Any) -> dict[str, Any]:
    """Samples of one prompt with KV in common, and beams, whose KV is copied when they part."""
    limits = {"max_num_seqs": 8, "max_model_len": 64} | options
    drawn = SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=5, ignore_eos=True)
    beams = SamplingParams(max_tokens=8, temperature=0, use_beam_search=True, beam_width=3, n=2)

    def tokens_of(llm: LLM) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS[:2]], [drawn, beams])
        return [list(c.token_ids) for o in outputs for c in o.outputs]

    over_ranks = LLM(source(model), group=group, **limits)
    found = tokens_of(over_ranks)
    same = found == unsplit(["branches", model, limits], tokens_of, model, limits)
    return {"same": same, "n": len(found), "n_preemptions": over_ranks.stats()["n_preemptions"]}


def held(group: Any, model: Any) -> dict[str, Any]:
    """What arrays this process holds of a model that was loaded for its executor alone."""
    loaded = source(model)
    loaded = InMemoryModel(loaded.config, {name: np.array(x) for name, x in loaded.params.items()})
    llm = LLM(loaded, group=group, max_num_seqs=4, max_model_len=32)
    llm.generate({"prompt_token_ids": PROMPTS[1]}, SamplingParams(max_tokens=4, ignore_eos=True))
    return {"held_bytes": held_bytes()}


def keeps(group: Any, model: str, most_behind: int = 24) -> dict[str, Any]:
    """Ranks say what they have kept, or nothing would be any more once so many tokens are on their way: a
    model after another one, too."""
    found = []
    for n_tokens in (40, 20):
        llm = LLM(source(model), group=group, max_num_seqs=4, max_model_len=96, kept_kv_slots=400)
        llm.engine.scheduler.room.kept._most_behind = most_behind
        params = SamplingParams(max_tokens=n_tokens, temperature=0.0, ignore_eos=True)
        behind: list[int] = []
        llm.generate(
            [{"prompt_token_ids": p} for p in PROMPTS],
            params,
            on_token=lambda event, llm=llm, behind=behind: behind.append(llm.executor.n_behind),
        )
        until = time.monotonic() + 30
        while llm.executor.n_behind and time.monotonic() < until:
            time.sleep(0.01)
        kept = llm.stats()["n_kept_tokens"]
        found.append({"most": max(behind), "least": llm.executor.n_behind, "kept": kept})
    return {"found": found}


def full(group: Any, model: str) -> dict[str, Any]:
    """The same tokens as unsplit where one of the ranks has no memory for more kept KV: it says what it lost,
    and nobody is given what is not there."""
    limits = {"max_num_seqs": 4, "max_model_len": 96, "prefix_caching": False}
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    def tokens_of(llm: LLM, step: int = 1) -> list[list[int]]:
        prompts = [{"prompt_token_ids": p[::step]} for p in PROMPTS]
        return [list(o.token_ids) for o in llm.generate(prompts, params)]

    def of_both(llm: LLM) -> list[list[int]]:
        return tokens_of(llm) + tokens_of(llm, -1)

    expected = unsplit(["full", model, limits], of_both, model, limits)
    llm = LLM(source(model), group=group, **limits, kept_kv_slots=400)
    same = [of_both(llm) == expected]
    pid, most = next(found for pid in descendants(os.getppid()) if (found := (pid, kept_bytes(pid)))[1])
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, hard))
    more = [{"prompt_token_ids": [i, *p, *p]} for i in (3, 4) for p in PROMPTS]
    llm.generate(more, params)
    same += [of_both(llm) == expected for _ in range(3)]
    llm.engine.check_integrity()
    stats = llm.stats()
    return {"same": all(same), "lost": stats["n_kept_lost_tokens"], "hits": stats["n_kept_hit_tokens"]}


def kept_bytes(pid: int) -> int:
    """How far another process has written what it keeps KV in, a file without a name; 0: it keeps none."""
    for file in Path(f"/proc/{pid}/fd").iterdir() if pid != os.getpid() else ():
        with suppress(OSError):
            if "jaxlamina-kept-" in os.readlink(file):
                n = int(np.fromfile(file, np.uint64, 1)[0])
                head = 4096 + n * 8
                row_bytes = (os.stat(file).st_size - head) // n
                marks = np.fromfile(file, np.uint64, n, offset=4096)
                return head + row_bytes * int(1 + np.flatnonzero(marks).max())
    return 0


def moves(group: Any, model: str) -> dict[str, Any]:
    """KV that is copied among slots, and out to the host and back into other slots: the next logits are the
    same."""
    from functools import partial

    from jaxlamina.models import apply
    from jaxlamina.run.ranks import RanksExecutor
    from jaxlamina.steps.buckets import Buckets
    from jaxlamina.workers import DecodeBatch, PrefillBatch
    from jaxlamina.workers.workspace import LargestStep

    in_memory, n = (
        source(model),
        96,
    )  # a worker has room for a row and its copy: parts on two are added up otherwise
    executor = RanksExecutor(
        partial(apply, in_memory.config), in_memory.params, group=group, kv_slots=n, most_slots=n,
        least_slots=2, largest=LargestStep(2, 32, 16), n_host_slots=32, source=in_memory.model,
    )  # fmt: skip
    buckets = Buckets(batch=(2,), prompt=(16,), context=(16,))
    rows = [list(range(13)), list(range(20, 22))]
    for tokens, slots in zip((SHARED[:13], PROMPTS[1]), rows, strict=True):
        executor.prefill(PrefillBatch.build([tokens], [slots], buckets, n))

    def after(slots: list[list[int]]) -> np.ndarray:
        batch = DecodeBatch.build([3, 4], [row + [40 + i] for i, row in enumerate(slots)], buckets, n)
        return np.asarray(executor.decode(batch))

    wanted = after(rows)
    executor.copy_slots(rows[0], list(range(24, 37)))
    copied = after([list(range(24, 37)), rows[1]])
    executor.move_out(rows[0] + rows[1], list(range(3, 18)))
    executor.release(rows[0] + rows[1])
    executor.prefill(
        PrefillBatch.build([PROMPTS[2][:11]], [list(range(11))], buckets, n)
    )  # in their old places
    back = [list(range(47, 41, -1)) + list(range(11, 18)), [18, 19]]
    executor.move_in(list(range(3, 18)), back[0] + back[1])
    moved = after(back)
    exact = bool((copied == wanted).all() and (moved == wanted).all())
    differences = {
        name: float(np.abs(x - wanted).max()) for name, x in (("copied", copied), ("moved", moved))
    }
    return {"same": exact, "differences": differences}


def crosses(group: Any, model: Any, n_own: int = 40) -> dict[str, Any]:
    """KV that comes back from the host, or from where it is kept, to another worker than it was on, since
    that one is full: from what model ranks keep to an attention worker, and back. The next logits are the same.
    ``n_own``: as if model ranks had memory for so many tokens; by requests each of two attention workers has
    room for half of all."""
    from functools import partial

    from jaxlamina.models import apply
    from jaxlamina.run.ranks import RanksExecutor
    from jaxlamina.steps.buckets import Buckets
    from jaxlamina.workers import DecodeBatch, PrefillBatch
    from jaxlamina.workers.workspace import LargestStep

    in_memory, n = source(model), 64
    with patch("jaxlamina.ranks.kv_room.slots_up_to", lambda *_: n_own):
        executor = RanksExecutor(
            partial(apply, in_memory.config), in_memory.params, group=group, kv_slots=n, most_slots=n,
            least_slots=2, largest=LargestStep(2, 32, 16), n_host_slots=32, source=in_memory.model,
        )  # fmt: skip
    buckets = Buckets(batch=(2,), prompt=(16,), context=(16,))
    rows = [list(range(13)), [13, 14]]
    for tokens, slots in zip((SHARED[:13], PROMPTS[1]), rows, strict=True):
        executor.prefill(PrefillBatch.build([tokens], [slots], buckets, n))
    placement = executor.pool.placement
    assert placement is not None
    all_, host = np.arange(15), list(range(15))

    def after() -> np.ndarray:
        batch = DecodeBatch.build([3, 4], [[*slots, 15 + i] for i, slots in enumerate(rows)], buckets, n)
        logits = np.asarray(executor.decode(batch))
        executor.release([15, 16])
        return logits

    def back(bring: Callable[[], None]) -> None:
        """They go from where the first request is, whose worker is somebody else's then, and come back."""
        full = placement.worker[0]
        executor.release(all_)
        others = np.arange(17, 17 + placement.n_free[full])
        placement.place(others, np.full(len(others), full))
        bring()
        executor.release(others)
        ways.append([int(full), *np.unique(placement.worker[rows[0]]).tolist()])
        differences.append(float(np.abs(after() - wanted).max()))

    def swap() -> None:
        executor.move_out(all_, host)
        back(lambda: executor.move_in(host, all_))

    def kept_and_brought() -> None:
        bounds = np.cumsum([0, *found.capacities])
        places = bounds[executor.keepers_of(all_)] + all_
        executor.keep(all_, places, np.ones(15, np.uint64))
        back(lambda: executor.bring(places, all_))

    wanted = after()
    found = executor.open_kept(KeptWanted(None, "one", None))
    ways: list[list[int]] = []
    differences: list[float] = []
    for go in (swap, swap, kept_and_brought, kept_and_brought):
        go()
    return {"ways": ways, "differences": differences}


def with_chunk(
    group: Any, model: str, partition: str, dtype: str = "float32", second: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A long prompt in three chunks, each alongside a decode step of two requests, then a decode step of all
    three: beside decode steps and prefills by themselves, unsplit in this process. Batch and chunks are
    padded, all but the second chunk, for whose step ``second`` are the executor's attributes."""
    from functools import partial

    import jax.numpy as jnp

    from jaxlamina.models import apply
    from jaxlamina.models.causal_lm import decoder
    from jaxlamina.run.ranks import RanksExecutor
    from jaxlamina.run.unsplit import UnsplitExecutor
    from jaxlamina.workers.workspace import LargestStep

    config, n = source(model).config, 64
    params = random_params(config, seed=3, dtype=jnp.dtype(dtype))
    fn = partial(apply, config)
    over_ranks = RanksExecutor(
        fn, params, group=group, kv_slots=n, most_slots=n, least_slots=2, largest=LargestStep(4, 32, 16), source=decoder(config),
    )  # fmt: skip
    alone = UnsplitExecutor(fn, params, n_slots=n, device=group.device)
    # Slots of three requests, by position.
    slots = np.random.default_rng(5).permutation(n)[:60].reshape(3, 20).tolist()
    differences, tokens, used = chunked_beside_decodes(over_ranks, alone, slots, second or {})
    found = {"difference": max(differences), "finite": bool(np.isfinite(differences).all()), "tokens": tokens}
    if partition == "heads":  # a slot is the same on every worker
        found["stray"] = stray(group, sorted(set(range(n)) - used))
    shapes = [shape for shape in over_ranks.matched.shapes if shape.kind == "decode" and shape.n_batches == 1]
    counts = {str(shape): len(over_ranks.matched.of(shape).exchanges()) for shape in shapes if shape.q_first}
    return found | {"programs": sorted(over_ranks.programs.counts), "n_exchanges": counts}


def chunked_beside_decodes(
    over_ranks: Any, alone: Any, slots: list[list[int]], second: dict[str, Any]
) -> tuple[list[float], tuple[list[Any], list[Any]], set[int]]:
    """Logits' differences relative to the largest, both executors' greedy tokens, and the slots in use."""
    from jaxlamina.steps.buckets import Buckets
    from jaxlamina.steps.step import PromptPart, Step
    from jaxlamina.workers import DecodeBatch, PrefillBatch

    n, buckets = alone.n_slots, Buckets(batch=(4,), prompt=(13,), context=(32,))
    rows = [[*SHARED[:13]], [7, 8]]
    for row, own in zip(rows, slots, strict=False):
        batch = PrefillBatch.build([row], [own[: len(row)]], buckets, n)
        first = [np.asarray(executor.prefill(batch), np.float32) for executor in (over_ranks, alone)]
        row.append(int(first[1].argmax()))
    long: list[int] = [(7 * i) % 50 + 3 for i in range(19)]
    differences: list[float] = []
    tokens: tuple[list[Any], list[Any]] = [], []

    def compare(got: Any, want: Any, n_rows: int) -> list[int]:
        got, want = (np.asarray(x, np.float32)[:n_rows] for x in (got, want))
        differences.append(float(np.abs(got - want).max() / np.abs(want).max()))
        for of, logits in zip(tokens, (got, want), strict=True):
            of.append(logits.argmax(-1).tolist())
        return want.argmax(-1).tolist()

    def decode_batch(rows: list[list[int]]) -> Any:
        own = [of_row[: len(row)] for row, of_row in zip(rows, slots, strict=False)]
        return DecodeBatch.build([row[-1] for row in rows], own, buckets, n)

    usual = {name: getattr(over_ranks, name) for name in second}
    for start, stop in ((0, 3), (3, 16), (16, 19)):
        batch = decode_batch(rows)
        own = [long[start:stop]], [slots[2][start:stop]]
        chunk = PrefillBatch.build(*own, buckets, n, [slots[2][:start]])
        for name, value in (second if start == 3 else usual).items():
            setattr(over_ranks, name, value)
        of_rows, [of_chunk] = over_ranks.run(Step(batch, (PromptPart(chunk),)))
        for row, token in zip(rows, compare(of_rows, alone.decode(batch), 2), strict=True):
            row.append(token)
        following = compare(of_chunk, alone.prefill(chunk), 1)
    rows.append([*long, *following])
    batch = decode_batch(rows)
    compare(over_ranks.decode(batch), alone.decode(batch), 3)
    return (
        differences,
        tokens,
        {slot for row, own in zip(rows, slots, strict=True) for slot in own[: len(row)]},
    )


def step_bench(
    group: Any,
    model: Any,
    prefill: int = 0,
    shares: Sequence[Any] = (),
    partitions: Sequence[str] = (),
    staggered: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Every way of `bench step`, with its logits' largest difference from unsplit."""
    import jax.numpy as jnp

    from jaxlamina.bench import step_bench, step_ways

    options = step_ways.StepOptions(
        [step_ways.StepCase(2, 8)], jnp.float32, 1, prefill=prefill,
        staggered=([2] if group.workers else []) if staggered is None else staggered,
        local_attention=shares, partitions=partitions,
    )  # fmt: skip
    found, _ = step_bench.measure(source(model), options, group=group)
    prompts = {r.way: [r.n_prompt_tokens, r.ratio_to_decode, r.prompt_tokens_per_s] for r in found}
    own = {r.way: [*r.own_pace.tokens_per_s, *r.own_pace.alone_tokens_per_s] for r in found if r.own_pace}
    differences = [r.max_difference for r in found if r.max_difference is not None]
    return {"difference": max(differences), "ways": prompts, "own_pace": own}


def stray(group: Any, unused: list[int]) -> float:
    """The largest of what attention workers have in slots that nothing was stored in."""
    found = [0.0]
    for rank in group.workers:
        group.send(rank, m.TakeRows(m.Array.of(np.asarray(unused, np.int32))))
        found += [float(np.abs(x.numpy().astype(np.float32)).max()) for x in group.receive(rank, m.Rows).rows]
    return max(found)


def warmed(
    group: Any,
    model: Any,
    max_model_len: int = 64,
    chunk: int = 16,
    prompts: Sequence[list[int]] = PROMPTS,
    alone: bool = False,
) -> dict[str, Any]:
    """Every program once before there is a request, and steps of padding alone; then requests, each twice:
    the programs that they need more, and whether their tokens are those of the unsplit model. ``ahead``: of
    ``n_todo``, how many of this rank's another thread had compiled before they were run. ``alone``: first the
    programs that attention workers have no part in, then the others as a server compiles them behind."""
    from jaxlamina.engine import sizes_to_compile, warm_up

    limits = {"max_num_seqs": 2, "max_model_len": max_model_len, "max_num_batched_tokens": chunk}
    llm = LLM(source(model), group=group, **limits)
    sizes = {"max_model_len": max_model_len, "max_chunk": chunk}
    can = llm.engine.capabilities
    workers = {
        name: getattr(can, name) for name in ("n_prefill_workers", "own_pace_tokens", "local_prefill_tokens")
    }
    todo = sizes_to_compile.shapes(llm.buckets, **sizes, **workers)
    done: list[int] = []
    ahead: list[str] = []  # threads that compiled a program before it was to be run
    compile_later = llm.executor.compile_later

    def noted(*parts: Any, **how: Any) -> Any:
        compiles = compile_later(*parts, **how)

        def run() -> None:
            ahead.append(threading.current_thread().name)
            compiles()

        return compiles and run

    assert llm.executor.stay_alone(alone) == alone
    with patch.object(llm.executor, "compile_later", noted):
        warm_up.warm_up(llm.engine, todo, done.append, lambda: False)
    if alone:
        first, behind = sorted(llm.stats()["compilations"]), list[int]()
        thread = warm_up.Behind(llm.engine, [], behind.append, lambda call: call(), 1, todo)
        thread.start()
        assert thread.join(200) and len(behind) == len(todo) and not llm.executor.attention_share.is_alone  # type: ignore[attr-defined]
        assert not any("rows" in name for name in first), first
    for shape in sizes_to_compile.shapes(llm.buckets, **sizes):
        batch: Any = warm_up._empty_batch(shape, llm.executor.n_slots, max_model_len)
        run = llm.executor.decode if shape.kind == "decode" else llm.executor.prefill
        assert np.isfinite(run(batch)).all()
    known, n_sampler = llm.stats()["compilations"], llm.engine.sampler.n_programs
    params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2, repetition_penalty=1.2, temperature=0)
    found = []
    for each in (llm, LLM(source(model), split=False, **limits)):
        outputs = [
            o for _ in range(2) for o in each.generate([{"prompt_token_ids": p} for p in prompts], params)
        ]
        found.append([o.token_ids for o in outputs])
    now = llm.stats()["compilations"]
    return {
        "same": found[0] == found[1],
        "n_done": len(done) - len(todo),
        "ahead": len(ahead),
        "n_todo": len(todo),
        "all_by_others": all(name.startswith("compile") for name in ahead),
        "more": sorted(name for name in now if now[name] != known.get(name)),
        "more_of_sampler": llm.engine.sampler.n_programs - n_sampler,
        "programs": sorted(now),
    }


def rests(group: Any, model: Any, at: str, n_at_once: int, kept: bool = True) -> dict[str, Any]:
    """What rank 0 begins of programs that it compiles behind, ``n_at_once``, once they are to rest, from when it is
    ``at`` one of these parts: lower, compile, read, keep. Requests are answered meanwhile, ``more`` programs compiled
    for them. ``kept``: or programs have no name to be kept by."""
    from jax.experimental import serialize_executable

    from jaxlamina.engine import sizes_to_compile, warm_up
    from jaxlamina.transports import mpi, xla

    limits = {"max_num_seqs": 1, "max_model_len": 64}  # so that no program that draws is compiled beside them
    llm = LLM(source(model), group=group, **limits)
    todo = sizes_to_compile.shapes(llm.buckets, max_model_len=64, max_chunk=None)
    warm_up.warm_up(llm.engine, todo[:1], lambda n: None, lambda: False)
    behind = warm_up.Behind(llm.engine, todo[1:], lambda n: None, lambda call: call(), n_at_once)
    begun, since, rests_now = Counter[str](), Counter[str](), threading.Event()

    def noted_calls(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **how: Any) -> Any:
            (since if rests_now.is_set() else begun)[name] += 1
            if name == at and not rests_now.is_set():
                behind.rest(3600)
                rests_now.set()
            return call(*args, **how)

        return noted

    side, lowered = llm.executor.matched._side, jax.stages.Lowered  # type: ignore[attr-defined]
    transport, read = (xla, "xla_exchanges") if group.transport.name == "xla" else (mpi, "mpi_exchanges")
    parts = (
        ("lower", side, "compile_later"),
        ("compile", lowered, "compile"),
        ("read", transport, read),
        ("keep", serialize_executable, "serialize"),
    )
    with ExitStack() as stack:
        stack.enter_context(patch.object(side, "kept", lambda *_: None))
        if not kept:
            stack.enter_context(patch.object(side, "_keep", lambda *_: None))
        for name, of, what in parts:
            stack.enter_context(patch.object(of, what, noted_calls(name, getattr(of, what))))
        behind.start()
        assert rests_now.wait(60), begun
        ended, begun_since = behind.join(1), dict(since)
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        found = [o.token_ids for o in llm.generate([{"prompt_token_ids": PROMPTS[1]}], params)]
        behind.stop()
        assert behind.join(60)
    whole = LLM(source(model), split=False, **limits)
    same = found == [o.token_ids for o in whole.generate([{"prompt_token_ids": PROMPTS[1]}], params)]
    return {"same": same, "ended": ended, "since": begun_since, "more": since["lower"]}


def scored(group: Any, model: str, **options: Any) -> dict[str, Any]:
    """How likely prompts are, in chunks, one that nobody asks about first, against the unsplit model."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=2, temperature=0)
    prompts, asked = [[7] * 21, *PROMPTS], [replace(params, prompt_logprobs=None), *[params] * len(PROMPTS)]
    limits = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 8} | options
    found, tokens, programs = [], [], []
    for where in ({"group": group}, {"split": False}):
        llm = LLM(source(model), **where, **limits)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], asked)
        tokens.append([o.token_ids for o in outputs])
        entries = [entry for o in outputs for entry in (o.prompt_logprobs or ())[1:]]
        found.append(np.asarray([next(iter(entry.values())).logprob for entry in entries if entry]))
        programs.append(sorted(llm.stats()["compilations"]))
    return {
        "n": len(found[0]),
        "difference": float(np.abs(found[0] - found[1]).max()),
        "same": bool(np.allclose(*found, atol=1e-4)) and tokens[0] == tokens[1],
        "programs": programs[0],
    }


def recorded(group: Any, model: str) -> dict[str, Any]:
    """Decode steps that are recorded while tokens are written: one that another rank cannot read, one that
    this one cannot begin, one of all."""
    llm = LLM(source(model), group=group, recording=True, max_num_seqs=2, max_model_len=32)
    executor: Any = llm.executor
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    errors: list[str] = []
    tokens = []
    for fails in ("there", "here", ""):
        with tempfile.TemporaryDirectory() as folder:
            if fails == "here":
                jax.profiler.start_trace(folder)
            executor.record_later(1, 2, lambda error: errors.append(str(error)))
            [out] = llm.generate({"prompt_token_ids": PROMPTS[1]}, params)
            tokens.append(list(out.token_ids))
            if fails == "here":
                jax.profiler.stop_trace()
        assert (executor.recorded is None) == bool(fails)
    plain = LLM(source(model), split=False, max_num_seqs=2, max_model_len=32)
    [out] = plain.generate({"prompt_token_ids": PROMPTS[1]}, params)
    shares = executor.recorded.shares(group.workers)
    under_load = observed(llm, params)
    return {
        "same": tokens == [list(out.token_ids)] * 3,
        "errors": errors,
        "attention": shares["attention"],
        "under_load": under_load,
    }


def observed(llm: LLM, params: SamplingParams) -> dict[str, Any]:
    """What all ranks' devices do while tokens are written, and that a second recording gives the same kind of
    answer."""
    from jaxlamina.profiling.under_load import LoadObserver

    found = []
    for _ in range(2):
        observer = LoadObserver(llm.engine)
        observer.begin()
        llm.generate({"prompt_token_ids": PROMPTS[1]}, params)
        found.append(observer.end().to_dict())
    assert [r["rank"] for r in found[0]["ranks"]] == [r["rank"] for r in found[1]["ranks"]]
    return found[1]


def ended(group: Any, model: str) -> dict[str, Any]:
    """The first token ends it, when the next step has been launched: nobody wants that one."""
    llm = LLM(source(model), group=group, max_num_seqs=2, max_model_len=32)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop_token_ids=range(96))
    [out] = llm.generate({"prompt_token_ids": PROMPTS[1]}, params)
    return {"n_tokens": len(out.token_ids), "n_steps": group.n_steps}


def refused(group: Any, model: str) -> dict[str, Any]:
    try:
        LLM(source(model), group=group, max_model_len=32)
    except UserError as error:
        return {"line": str(error)}
    return {"line": None}


class Altered:
    """Rank 0's transport, of which ``send_each`` sends one thing more, and which counts the programs that are
    run."""

    def __init__(self, transport: Any, more: bool) -> None:
        self._transport, self._more = transport, more
        self.n_runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_each(self, xs: Any, to: Any, after: Any = None) -> Any:
        tie = self._transport.send_each(xs, to, after)
        return self._transport.send_each([x[:1] for x in xs], to, tie) if self._more else tie

    def name_of(self, *what: Any) -> None:
        return None  # what it sends is not what the name would say

    def compile(self, *args: Any, **options: Any) -> Any:
        program = self._transport.compile(*args, **options)
        return Counted(program, self)


class Counted:
    def __init__(self, program: Any, altered: Altered) -> None:
        self._program, self._altered = program, altered
        self.exchanges = program.exchanges

    def __call__(self, *args: Any) -> Any:
        self._altered.n_runs += 1
        return self._program(*args)


def mismatch(group: Any, model: str, what: str, caught: bool = True) -> dict[str, Any]:
    """Rank 0's program is not what the others' are for: one send more, or the others were told of other
    heads."""
    own, send, told = group.transport, group.send, Counter()

    def counting(rank: int, message: Any) -> None:
        told[type(message).__name__] += 1
        if what == "heads" and type(message).__name__ == "Setup":
            layers = [msgspec.structs.replace(x, n_kv_heads=2 * x.n_kv_heads) for x in message.layers]
            message = msgspec.structs.replace(message, layers=tuple(layers))
        send(rank, message)

    group.transport, group.send = Altered(own, what == "more"), counting
    began, line = time.perf_counter(), None
    try:
        llm = LLM(source(model), group=group, max_num_seqs=2, max_model_len=32, kv_slots=64)
        # A prompt's own program, which exchanges k and v alone.
        llm.engine.sizes.buckets = replace(llm.engine.sizes.buckets, prefills=True)
        llm.generate({"prompt_token_ids": PROMPTS[1]}, SamplingParams(max_tokens=4, ignore_eos=True))
    except UserError as error:
        if not caught:
            raise
        line = str(error)
    n_runs = group.transport.n_runs
    group.transport = own
    del group.send  # the class's own again
    seconds = time.perf_counter() - began
    return {"line": line, "told": dict(told), "n_runs": n_runs, "n_steps": group.n_steps, "s": seconds}


SCENARIOS = {
    f.__name__: f
    for f in (
        greedy, updated, ahead, as_written, answer, branches, full, held, keeps, moves, crosses, with_chunk, step_bench, warmed, scored, recorded, ended, rests, refused, mismatch, held_worker, short_prompts,
    )
}  # fmt: skip
