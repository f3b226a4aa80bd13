"""Decode speed of this project beside its peers: rounds A B C A B C …, medians, ratios, and the machine's
limit.

Knows prompts, rounds and numbers; how a peer runs is `peers`' business, how it looks is `cli`'s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from jaxlamina.bench.machine import MatmulRate, ReadBandwidth
from jaxlamina.bench.peers import OURS, Decoded, PeerJob, load, title
from jaxlamina.bench.processes import PeerError, PeerProcess
from jaxlamina.bench.prompts import prompts
from jaxlamina.bench.rounds import ratios
from jaxlamina.bench.shapes import n_weights, weight_bytes
from jaxlamina.errors import UserError
from jaxlamina.models.causal_lm import CausalLM

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class PeerResult:
    """One peer at one batch size. Speeds in tokens a second, one per round, and their median.

    same_tokens: rows whose tokens all equal the first measured peer's; None for that peer itself.
    of_roofline: median speed over `DecodeReport.roofline`.
    """

    peer: str
    batch: int
    tokens_per_s: float
    rounds_tokens_per_s: tuple[float, ...]
    ms_per_step: float
    prefill_s: float
    of_roofline: float
    same_tokens: int | None

    @property
    def title(self) -> str:
        return title(self.peer)


@dataclass(frozen=True)
class Ratio:
    """`ours` over `peer` at one batch size: the median of the rounds' own ratios, so a slow spell hits
    both."""

    batch: int
    ours: str
    peer: str
    ratio: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class DecodeReport:
    """Everything `jaxlamina bench decode` found."""

    model: str
    n_prompt_tokens: int
    n_steps: int
    n_rounds: int
    prompt_kind: str
    read_bandwidth_bytes_per_s: float
    matmul_flop_per_s: float
    step_bytes: dict[int, int]
    step_flop: dict[int, int]
    results: tuple[PeerResult, ...]
    ratios: tuple[Ratio, ...]
    notes: dict[str, str]
    left_out: dict[str, str]
    peak_memory_bytes: dict[str, int]

    def roofline(self, batch: int) -> float:
        """Tokens a second if a step took no longer than reading its bytes, or than its matrix products."""
        return min(self.read_limit(batch), self.matmul_limit(batch))

    def read_limit(self, batch: int) -> float:
        return batch * self.read_bandwidth_bytes_per_s / self.step_bytes[batch]

    def matmul_limit(self, batch: int) -> float:
        return batch * self.matmul_flop_per_s / self.step_flop[batch]

    def to_dict(self) -> dict[str, Any]:
        rooflines = {batch: self.roofline(batch) for batch in self.step_bytes}
        return asdict(self) | {"roofline_tokens_per_s": rooflines}


def step_bytes(
    model: CausalLM, batch: int, n_prompt: int, n_steps: int, itemsize: int = FLOAT32_BYTES
) -> int:
    """Bytes a mean decode step must touch: the weights once, each row's earlier K and V, and the new K and
    V."""
    tokens = _attended(model, n_prompt, n_steps)  # the new ones among them
    touched = sum(
        2 * itemsize * heads * width * n for (heads, width), n in zip(model.kv, tokens, strict=True)
    )
    return weight_bytes(model, itemsize) + round(batch * touched / n_steps)


def step_flop(model: CausalLM, batch: int, n_prompt: int, n_steps: int) -> int:
    """Floating-point operations of a mean decode step's matrix products: every weight, and q·k and
    weights·v."""
    matrices = n_weights(model)  # norms and biases are among it, and are nothing beside it
    tokens = _attended(model, n_prompt, n_steps)
    each = zip(model.heads, model.kv, tokens, strict=True)
    attention = sum(4 * heads * width * n for heads, (_, width), n in each)
    return batch * round(2 * matrices + attention / n_steps)


def _attended(model: CausalLM, n_prompt: int, n_steps: int) -> list[int]:
    """Tokens that one row's queries meet in each layer over all steps: its earlier ones and the new one."""
    lengths = range(n_prompt + 1, n_prompt + n_steps + 1)
    return [sum(n if window is None else min(n, window) for n in lengths) for window in model.windows]


def measure(
    model: str,
    shape: CausalLM,
    peers: Sequence[str],
    *,
    batches: Sequence[int],
    n_prompt: int,
    n_steps: int,
    n_rounds: int,
    encode: Callable[[str], Sequence[int]] | None,
    left_out: dict[str, str] | None = None,
    async_scheduling: bool = True,
    quantized: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda *_: None,
) -> DecodeReport:
    """Times greedy decoding by every peer at every batch size, in interleaved rounds. ``quantized``: with a
    GGUF's matrices as they are stored; ``shape`` says so, too.

    A peer that fails is left out from then on, with its error as the reason. ``async_scheduling``: of our
    engine. ``on_progress``: is told what is done next, how many things are done, and how many there are.
    `UserError` if none of the peers could be measured, or the sequence is longer than the model's.
    """
    length = n_prompt + n_steps
    if length + 1 > shape.max_len:
        raise UserError(
            f"--prompt {n_prompt} and --tokens {n_steps} make {length + 1} tokens, "
            f"{model} has {shape.max_len} positions: lower one of them"
        )
    texts = prompts(max(batches), n_prompt, vocab_size=shape.vocab_size, encode=encode)
    bandwidth, matmul = ReadBandwidth(weight_bytes(shape)), MatmulRate()
    n_begun, n_all = itertools.count(), len(peers) * (1 + len(batches) * (1 + n_rounds))
    missing = dict(left_out or {})
    runs: dict[tuple[str, int], list[Decoded]] = {}
    with ExitStack() as stack:
        processes: dict[str, PeerProcess] = {}
        job = PeerJob(model, max(batches), length, async_scheduling, quantized)
        for name in peers:
            on_progress(f"loading {name}", next(n_begun), n_all)
            try:
                processes[name] = stack.enter_context(PeerProcess(name, partial(load, name, job)))
            except PeerError as e:
                missing[name] = str(e)
        notes = {name: p.note for name, p in processes.items()}
        for batch in batches:
            # Round 0 warms up: compilation, page faults, threads.
            for round_ in range(n_rounds + 1):
                bandwidth.measure()
                matmul.measure()
                for name in list(processes):
                    what = f"round {round_}" if round_ else "warm-up"
                    on_progress(f"batch {batch}, {what}: {name}", next(n_begun), n_all)
                    try:
                        run = processes[name].ask("decode", texts[:batch], n_steps)
                    except PeerError as e:
                        missing[name] = str(e)
                        del processes[name]
                        continue
                    if round_:
                        runs.setdefault((name, batch), []).append(run)
        peaks = {name: p.peak_memory_bytes() for name, p in processes.items()}
    if not processes:
        raise UserError("no peer could be measured: " + "; ".join(missing.values()))
    names = list(processes)
    complete = {key: found for key, found in runs.items() if key[0] in names}
    report = DecodeReport(
        model=model,
        n_prompt_tokens=n_prompt,
        n_steps=n_steps,
        n_rounds=n_rounds,
        prompt_kind="text" if encode is not None else "random token ids",
        read_bandwidth_bytes_per_s=bandwidth.best,
        matmul_flop_per_s=matmul.best,
        step_bytes={batch: step_bytes(shape, batch, n_prompt, n_steps) for batch in batches},
        step_flop={batch: step_flop(shape, batch, n_prompt, n_steps) for batch in batches},
        results=(),
        ratios=tuple(_ratios(complete, names, batches)),
        notes={name: notes[name] for name in names},
        left_out=missing,
        peak_memory_bytes=peaks,
    )
    rooflines = {batch: report.roofline(batch) for batch in batches}
    return replace(report, results=tuple(_results(complete, names, n_steps, rooflines)))


def _results(
    runs: dict[tuple[str, int], list[Decoded]],
    peers: Sequence[str],
    n_steps: int,
    rooflines: dict[int, float],
) -> list[PeerResult]:
    made = []
    for batch, roofline in rooflines.items():
        reference = runs[peers[0], batch][0].tokens
        for name in peers:
            found = runs[name, batch]
            speeds = tuple(batch * n_steps / run.decode_s for run in found)
            same = sum(a == b for a, b in zip(found[0].tokens, reference, strict=True))
            made.append(
                PeerResult(
                    peer=name,
                    batch=batch,
                    tokens_per_s=median(speeds),
                    rounds_tokens_per_s=speeds,
                    ms_per_step=1000 * batch / median(speeds),
                    prefill_s=median(run.prefill_s for run in found),
                    of_roofline=median(speeds) / roofline,
                    same_tokens=None if name == peers[0] else same,
                )
            )
    return made


def _ratios(
    runs: dict[tuple[str, int], list[Decoded]], peers: Sequence[str], batches: Sequence[int]
) -> list[Ratio]:
    made = []
    for batch in batches:
        for ours in (name for name in peers if name in OURS):
            for peer in (name for name in peers if name not in OURS or (ours, name) == ("split", "unsplit")):
                mine, theirs = ([run.decode_s for run in runs[name, batch]] for name in (ours, peer))
                found = ratios(theirs, mine)
                made.append(Ratio(batch, ours, peer, median(found), min(found), max(found)))
    return made
