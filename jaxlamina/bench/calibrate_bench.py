"""Measures on the device at hand what the planner's terms are fitted to. Minutes.

Decode steps of few stored tokens and several numbers of rows, for products; one layer's attention over
several contexts; exchanges between two ranks of this host, or steps split over a job's ranks; whole steps.

Knows the other benches' parts and the fit; nothing of how results are shown."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxlamina.bench import exchange_bench, kernels_bench, machine, step_bench, step_ways
from jaxlamina.bench.exchange_ranks import RankError
from jaxlamina.errors import UserError
from jaxlamina.job.cluster import Cluster
from jaxlamina.models import ModelConfig
from jaxlamina.planner import inputs
from jaxlamina.planner.calibration import DeviceCalibration
from jaxlamina.planner.fit import Evidence, fit
from jaxlamina.planner.hardware import Hardware
from jaxlamina.planner.points import ExchangePoint, KernelPoint, StepPoint
from jaxlamina.ranks import Group

_SIZES_BYTES = (4096, 65536, 1 << 20, 4 << 20)
# Of a platform: the first that the device has.
_KERNELS = {"cpu": ("native", "xla"), "gpu": ("mosaic_gpu", "triton"), "tpu": ("mosaic_tpu",)}
_HOPPER_TILE = 64


@dataclass(frozen=True)
class CalibrationSizes:
    """What is measured: ``rows`` of steps with ``few_tokens`` stored tokens each; ``cases``, (rows, stored
    tokens) of whole steps and of attention alone."""

    dtype: str
    layers: int | None
    few_tokens: int
    rows: tuple[int, ...]
    cases: tuple[tuple[int, int], ...]

    @property
    def steps(self) -> list[step_ways.StepCase]:
        few = [(rows, self.few_tokens) for rows in self.rows]
        return [step_ways.StepCase(*case) for case in (*few, *self.cases)]


ON_CPU = CalibrationSizes("float32", None, 16, (1, 8, 32), ((1, 1024), (8, 288), (16, 1024)))
ON_GPU = CalibrationSizes("bfloat16", 12, 256, (8, 32, 64, 128, 256), ((16, 2048), (64, 4096), (128, 4096)))


@dataclass(frozen=True)
class Calibrated:
    """``evidence``: what was measured. ``left_out``: what could not be, and why."""

    calibration: DeviceCalibration
    evidence: Evidence
    left_out: dict[str, str]
    took_s: float


def sizes_of(device: jax.Device) -> CalibrationSizes:
    return ON_CPU if device.platform == "cpu" else ON_GPU


def measure(
    name: str,
    shape: ModelConfig,
    *,
    n_rounds: int = 3,
    group: Group | None = None,
    sizes: CalibrationSizes | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Calibrated:
    """``shape``: of the model ``name`` with the layers that are measured. With a group its steps are split
    over it, by heads; without one two ranks of this host exchange messages if it has two devices, or CPUs.
    ``UserError`` where the device cannot run the steps, and for a group of whose steps no price is known."""
    began = time.perf_counter()
    device = jax.local_devices()[0] if group is None else group.device
    sizes, where = sizes or sizes_of(device), machine.describe(("mpi4jax",))
    if group is not None and not _can_split(group.cluster):
        raise UserError(
            "bench calibrate splits steps over one replica of the model, without a pipeline, and attention "
            "workers: start such ranks, or none for unsplit steps alone"
        )
    left_out: dict[str, str] = {}
    found, read = _steps(name, shape, sizes, where, group, n_rounds, left_out, on_progress)
    if not found:
        raise UserError(f"no step could be measured on {device.device_kind}: {'; '.join(left_out.values())}")
    kernels = _kernels(shape, sizes, n_rounds, left_out, on_progress)
    exchanges = [] if group is not None else _exchanges(n_rounds, left_out, on_progress)
    on_progress("fitting")
    evidence = Evidence(
        _hardware(device, where, read, on_progress), found, kernels, (), exchanges,
        product_tile=_HOPPER_TILE if device.platform == "gpu" else 1,
    )  # fmt: skip
    fitted = fit(evidence)
    points = tuple(str(point) for point in found)
    calibration = DeviceCalibration(
        fitted.terms, fitted.links, _device_name(device, where), where.versions, where.date, points
    )
    return Calibrated(calibration, evidence, left_out, time.perf_counter() - began)


def _can_split(cluster: Cluster) -> bool:
    return cluster.pipeline_parallel == cluster.n_replicas == 1 and cluster.n_attention > 0


def _device_name(device: jax.Device, where: machine.Machine) -> str:
    return where.device if device.platform == "cpu" else device.device_kind


def _steps(
    name: str,
    shape: ModelConfig,
    sizes: CalibrationSizes,
    where: machine.Machine,
    group: Group | None,
    n_rounds: int,
    left_out: dict[str, str],
    on_progress: Callable[[str], None],
) -> tuple[list[StepPoint], float]:
    """(unsplit ones, and over the group with all KV in the pool; bytes/s of one long array)."""

    def failed(line: str) -> None:
        left_out[line.partition(": ")[0]] = line

    dtype = step_bench.dtype_of(sizes.dtype)
    whole = () if group is None else (0.0,)
    options = step_ways.StepOptions(
        sizes.steps, dtype, n_rounds, local_attention=whole, partitions=("heads",)
    )
    results, read = step_bench.measure(
        step_bench.source_of(shape), options, group=group, on_progress=on_progress, on_failure=failed
    )
    by_case = {str(case): case for case in sizes.steps}
    found = []
    for result in results:
        case = by_case[result.case]
        point = StepPoint(
            "bench calibrate", where.date[:10], where.device, name, shape.num_hidden_layers, case.batch,
            case.context, tuple(result.ahead_ms), element_bytes=jnp.dtype(dtype).itemsize,
        )  # fmt: skip
        if result.way == "unsplit":
            found.append(point)
        elif group is not None:
            cluster, how = group.cluster, group.link_name
            dop, q_first = (cluster.n_model, cluster.n_attention), how == "nccl"
            shards = cluster.tensor_parallel
            found.append(replace(point, dop=dop, transport=how, tensor_parallel=shards, q_first=q_first))
    return found, read


def _kernels(
    shape: ModelConfig,
    sizes: CalibrationSizes,
    n_rounds: int,
    left_out: dict[str, str],
    on_progress: Callable[[str], None],
) -> list[KernelPoint]:
    """One layer's attention, by the first of our kernels that the device has."""
    heads = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    dtype = step_bench.dtype_of(sizes.dtype)
    chosen = [kernels_bench.KernelCase(f"{b} x {n}", (n,) * b, *heads) for b, n in sizes.cases]
    missing: dict[str, str] = {}
    for peer in _KERNELS.get(jax.default_backend(), ()):
        on_progress(f"attention: {peer}")
        results, missing, _ = kernels_bench.measure(
            chosen, [peer], n_rounds=n_rounds, seed=0, dtype=dtype, on_progress=on_progress
        )
        if results:
            break
    else:
        left_out |= missing
    by_name = {case.name: case for case in chosen}
    return [
        KernelPoint(
            f"bench calibrate, {result.peer}", by_name[result.case].n_tokens, heads[1], heads[2],
            result.time_us, element_bytes=jnp.dtype(dtype).itemsize,
        )
        for result in results
    ]  # fmt: skip


def _exchanges(
    n_rounds: int, left_out: dict[str, str], on_progress: Callable[[str], None]
) -> list[ExchangePoint]:
    """Between two ranks of this host, by each transport that is installed."""
    platform = exchange_bench.platforms("auto")
    if platform[0] == "cpu" and jax.default_backend() != "cpu":
        left_out["exchange"] = "exchange: one accelerator has nobody to exchange messages with"
        return []
    peers, missing = exchange_bench.installed()
    names = {peer.label: peer.label if peer.transport == "mpi" else "gloo" for peer in peers}
    if platform[0] != "cpu":
        by_nccl = exchange_bench.ExchangePeer.parse("xla:JAXLAMINA_PEER_MEMORY=0")
        peers = [*peers, by_nccl]
        names |= {"xla": "memory", by_nccl.label: "nccl"}
    left_out |= {label: f"{label}: {why}" for label, why in missing.items()}
    try:
        report = exchange_bench.measure(
            peers, _SIZES_BYTES, n_rounds=n_rounds, platform=platform, on_progress=on_progress
        )
    except (RankError, UserError) as error:
        left_out["exchange"] = f"exchange: {error}"
        return []
    left_out |= {label: f"{label}: {why}" for label, why in report.left_out.items()}
    return [ExchangePoint(p.size_bytes, names[p.peer], p.round_trip_us) for p in report.points]


def _hardware(
    device: jax.Device, where: machine.Machine, read: float, on_progress: Callable[[str], None]
) -> Hardware:
    """The data sheet's of a device that has one here; else what was measured."""
    if (name := inputs.matching(device.device_kind)) is not None:
        return Hardware.load(name)
    on_progress("products' FLOP/s")
    flop_s = machine.MatmulRate().measure() if device.platform == "cpu" else _matmul_flop_s()
    stats = device.memory_stats() or {}
    memory = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    of = "float32" if device.platform == "cpu" else "bfloat16"
    source = f"measured by jaxlamina bench calibrate ({of}), {where.date[:10]}"
    numbers = {"memory_gib": memory / 2**30, "bandwidth_gb_s": read / 1e9, "tflops_bf16": flop_s / 1e12}
    return Hardware(_device_name(device, where), **numbers, source=dict.fromkeys(numbers, source))


def _matmul_flop_s(n: int = 8192) -> float:
    """Of large products in bfloat16."""
    x = jnp.ones((n, n), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    return 2 * n**3 / kernels_bench.timed(lambda: product(x, x), kernels_bench.repeats(lambda: product(x, x)))


def numbers_of(found: Calibrated) -> Sequence[tuple[str, float, float]]:
    """(what was measured, ms, ms by the fitted terms) of all that was."""
    terms, links = found.calibration.terms, found.calibration.links
    rows = [(str(p), p.measured_ms, 1e3 * p.predicted(terms, links).step_s) for p in found.evidence.steps]
    rows += [
        (f"attention over {p.tokens} tokens, a layer", p.us / 1e3, p.predicted_us(terms) / 1e3)
        for p in found.evidence.kernels
    ]
    rows += [
        (f"{p.bytes} bytes there and back, {p.link}", p.us / 1e3, p.predicted_us(links) / 1e3)
        for p in found.evidence.exchanges
    ]
    return rows
