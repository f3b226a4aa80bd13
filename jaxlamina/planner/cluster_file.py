"""A plan as a cluster file, which `jaxlamina launch --config` takes as it is."""

from __future__ import annotations

import json
from pathlib import Path

from jaxlamina.planner.candidates import SHARE_OF_MEMORY
from jaxlamina.planner.search import PoolPlan, describe


def cluster_toml(plan: PoolPlan, model: str, line: str) -> str:
    """``model``: a name in `configs/models`, of which a job has random weights, or a config.json in a folder
    with the weights. ``line``: what was said of the plan, for a comment."""
    setup = plan.setup
    devices = setup.compute, setup.memory or setup.compute
    platforms = [_platform(terms.hardware.name) for terms in devices]
    of_split = {
        "partition": setup.partition,
        "local_attention": setup.local_share,
        "n_batches": setup.n_batches,
    }
    values: dict[str, object] = {
        "dop": [setup.n_model, setup.n_attention],
        **_weights(model),
        "transport": "xla" if platforms[0] == platforms[1] else "mpi",
        **(of_split if setup.is_split else {}),
        "dtype": "bfloat16",
        "max_num_seqs": plan.n_rows,
    }
    if setup.n_replicas > 1:
        values["pipelining"] = setup.mode
    if setup.tensor_parallel > 1:
        values["tensor_parallel"] = setup.tensor_parallel
    if plan.n_prefill:
        values["prefill_workers"] = plan.n_prefill
    for key, platform in zip(("model_platform", "attention_platform"), platforms, strict=True):
        if platform is not None:
            values[key] = platform
    if platforms[0] == "cuda":
        values["gpu_memory_utilization"] = SHARE_OF_MEMORY
    copies = f"One of {plan.copies} such jobs. " if plan.copies > 1 else ""
    comments = [
        f"jaxlamina plan: {line}",
        f"{copies}{describe(plan)}; ranks 0 … {setup.n_model - 1} are {setup.compute.hardware.name}.",
        "On several hosts add control and coordinator, the address of rank 0's host.",
    ]
    if "load_format" in values:
        comments.append("Weights are random: name a folder or org/name as model, and leave load_format out.")
    return "".join(
        [
            *(f"# {comment}\n" for comment in comments),
            *(f"{k} = {json.dumps(v)}\n" for k, v in values.items()),
        ]
    )


def _weights(model: str) -> dict[str, object]:
    path = Path(model)
    if path.name == "config.json":
        return {"model": str(path.parent)}
    return {"model": model, "load_format": "dummy"}


def _platform(name: str) -> str | None:
    """As a cluster file says it; None: left to JAX."""
    words = name.split()
    if words[0] == "NVIDIA":
        return "cuda"
    return "tpu" if "TPU" in words else None
