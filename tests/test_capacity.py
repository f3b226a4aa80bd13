"""KV slots that fit: free memory, less a measured workspace, over one device or several."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from test_models import MODELS

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig, apply, random_params
from jaxlamina.ranks.attention_programs import attention_workspace_bytes
from jaxlamina.run.local import LocalExecutor
from jaxlamina.run.unsplit import UnsplitExecutor
from jaxlamina.workers import AttentionSpec, capacity
from jaxlamina.workers.capacity import host_slots_that_pay, resolve_slots, slots_that_fit, spread_over
from jaxlamina.workers.workspace import LargestStep, pool_shapes, program_bytes, tree_bytes
from pallas_kernels.dispatch import use_backend

DEVICE = jax.devices("cpu")[0]
SPEC = AttentionSpec(2, 16, np.dtype(np.float32), 0.25, None, None)

pytestmark = pytest.mark.usefixtures("unchecked")  # devices are stand-ins


class Device:
    """As much of a device as is asked about capacity."""

    platform = "gpu"

    def __init__(self, name: str, limit: int, used: int = 0) -> None:
        self.name, self.stats = name, {"bytes_limit": limit, "bytes_in_use": used}

    def memory_stats(self) -> dict[str, int]:
        return self.stats

    def __str__(self) -> str:
        return self.name


def test_the_workspace_is_left_free_and_named_when_it_is_too_much():
    device = Device("gpu:0", 1100 * 1024, used=100 * 1024)
    assert SPEC.slot_bytes == 256
    fit = partial(slots_that_fit, [SPEC] * 4, device, most=10_000, least=1)
    # Of 850 and 1,700 that there is room for: a few bytes less at the next start are as many slots.
    assert fit() == 848 and fit(workspace_bytes=50 * 1024) == 800
    assert fit(share=0.5) == 1696 and slots_that_fit([SPEC] * 4, device, most=30, least=1) == 30
    with pytest.raises(UserError, match="less 1 MiB that the largest step needs, hold 31 KV slots"):
        slots_that_fit([SPEC] * 4, device, 10_000, 32, workspace_bytes=819 * 1024)
    with pytest.raises(UserError, match="hold 0 KV slots"):
        slots_that_fit([SPEC] * 4, device, 10_000, 1, workspace_bytes=2000 * 1024)


def test_host_slots_are_as_many_as_the_devices_as_far_as_a_quarter_of_the_host_goes(monkeypatch):
    monkeypatch.setattr(capacity, "host_free_bytes", lambda: 400 * 1024)
    gpu = Device("gpu:0", 1100 * 1024)
    assert host_slots_that_pay([SPEC] * 4, [gpu], 10_000) == 100
    assert host_slots_that_pay([SPEC] * 4, [gpu], 30) == 30
    assert host_slots_that_pay([SPEC] * 4, [gpu], 10_000, n_sharing=2) == 50
    assert (
        host_slots_that_pay([SPEC] * 4, [DEVICE], 10_000)
        == 0
        == host_slots_that_pay([SPEC], [gpu, DEVICE], 9)
    )


def test_several_workers_hold_what_the_fullest_device_does():
    roomy, full = Device("roomy", 1000 * 1024), Device("full", 300 * 1024)
    fit = partial(slots_that_fit, most=100_000, least=1)
    alone = resolve_slots(fit, [SPEC] * 4, [roomy])
    assert alone == 848
    assert resolve_slots(fit, [SPEC] * 4, [roomy, roomy]) == alone  # they share its memory
    assert resolve_slots(fit, [SPEC] * 4, [roomy, full]) == 2 * 255
    assert resolve_slots(fit, [SPEC] * 4, [roomy, full], lambda d: 55 * 1024 if d is full else 0) == 400
    assert resolve_slots(7, [SPEC], [full]) == 7


def test_int8_slots_are_smaller():
    bf16, int8, channel = (
        AttentionSpec(8, 128, np.dtype(jax.numpy.bfloat16), 1.0, None, None, kv)
        for kv in ("auto", "int8", "int8-channel")
    )
    assert (bf16.slot_bytes, int8.slot_bytes, channel.slot_bytes) == (4096, 2080, 2048)
    assert int8.slot_bytes <= 0.53 * bf16.slot_bytes
    for spec in (bf16, int8):
        per_slot = 2 * tree_bytes(pool_shapes(spec)) / 64
        assert per_slot == spec.slot_bytes


def test_workers_are_spread_over_the_devices_there_are(monkeypatch):
    a, b, c = (Device(name, 1) for name in "abc")
    monkeypatch.setattr("jax.local_devices", lambda backend=None: [a, b, c])
    assert spread_over(1, b, a) == [b]
    assert spread_over(2, b, a) == [b, c]
    assert spread_over(3, b, a) == [b, c, b]  # not on the model worker's own
    assert spread_over(3, a, a) == [a, b, c]
    monkeypatch.setattr("jax.local_devices", lambda backend=None: [a])
    assert spread_over(2, a, a) == [a, a]


def test_a_program_is_measured_beside_its_arguments():
    x = jax.ShapeDtypeStruct((256, 256), np.float32)
    assert program_bytes(jax.jit(lambda a: a + 1), x) == 256 * 256 * 4
    assert program_bytes(jax.jit(lambda a: a + 1, donate_argnums=0), x) == 0  # in place
    product = jax.jit(lambda a: jax.numpy.sort(a @ a, axis=0).sum())  # a sum, but by way of a matrix
    assert program_bytes(product, x) >= 256 * 256 * 4


def test_a_larger_step_needs_more():
    def needed(backend: str | None) -> list[int]:
        jax.clear_caches()  # what is traced already keeps its backend
        with use_backend(backend):
            steps = (LargestStep(b, c, 8) for b, c in ((1, 32), (16, 512)))
            return [attention_workspace_bytes([SPEC], [4], DEVICE, step) for step in steps]

    small, large = needed(None)
    assert 0 < small < large
    small, large = needed("xla")
    assert 0 < small < large
    # Scores and gathered keys of 16 x 512 tokens; the pools themselves (64 slots here) are not counted twice.
    assert large > 16 * 512 * 4 * 4


@pytest.mark.parametrize("kind", ["split", "unsplit"])
def test_executors_leave_a_measured_workspace_on_an_accelerator(kind: str, monkeypatch):
    config = ModelConfig.from_hf(MODELS["llama"])
    params = random_params(config, seed=3)

    def make(largest: LargestStep | None) -> int:
        monkeypatch.setattr(capacity, "host_free_bytes", lambda: 40 << 20)
        n_slots = partial(slots_that_fit, most=10**9, least=1)
        if kind == "unsplit":
            made = UnsplitExecutor(
                partial(apply, config), params, n_slots=n_slots, device=DEVICE, largest=largest
            )
        else:
            made = LocalExecutor(
                partial(apply, config),
                params,
                n_slots=n_slots,
                model_device=DEVICE,
                attention_device=DEVICE,
                largest=largest,
            )
        return made.n_slots

    largest = LargestStep(4, 256, 16)
    everything = make(None)
    assert make(largest) == everything  # a host: its fraction is small enough
    monkeypatch.setattr(capacity, "is_accelerator", lambda device: True)
    assert 0 < make(largest) < everything


def test_a_step_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a prompt of 2 at least"):
        LargestStep(1, 1, 1)
