"""`jaxlamina bench calibrate`: measures this device for the planner, and writes what it found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jaxlamina.bench.flags import AsJson, Rounds, option, shape_of
from jaxlamina.bench.report import Columns, Part, progress, table, tell, warning
from jaxlamina.console.outputs import check_output
from jaxlamina.errors import UserError

if TYPE_CHECKING:
    from jaxlamina.bench.calibrate_bench import Calibrated

MEASURED: Columns = (
    ("what", lambda row: row[0], "<"),
    ("measured, ms", lambda row: row[1], ".3f"),
    ("by the terms, ms", lambda row: row[2], ".3f"),
    ("error", lambda row: row[2] / row[1] - 1, "+.1%"),
)


def calibrate_command(
    out: Annotated[Path, option("The file that is written: a calibration, as JSON.")] = Path(
        "calibration.json"
    ),
    config: Annotated[
        str | None,
        option(
            "A model shape, with random weights, whose steps are measured. Default: llama-3-8b, 12 layers of "
            "it; on a CPU smollm2-135m."
        ),
    ] = None,
    rounds: Rounds = 3,
    as_json: AsJson = False,
) -> None:
    """Measure products, attention, exchanges and steps on this device, and write the planner's calibration.

    The planner's terms are fitted to what was measured. Takes minutes."""
    check_output(out, "--out")
    import jax

    from jaxlamina import ranks
    from jaxlamina.bench import calibrate_bench, machine

    group = ranks.current()
    device = jax.local_devices()[0] if group is None else group.device
    name = config or ("smollm2-135m" if device.platform == "cpu" else "llama-3-8b")
    whole = shape_of(name, None)
    if isinstance(whole, str):
        raise UserError(f"--config {name}: a model of yours has operators of which no price is known")
    layers = calibrate_bench.sizes_of(device).layers
    shape = whole if layers is None else shape_of(name, min(layers, whole.num_hidden_layers))
    where = machine.describe(("mpi4jax",))
    with progress() as on_progress:
        found = calibrate_bench.measure(name, shape, n_rounds=rounds, group=group, on_progress=on_progress)
    record = found.calibration.to_dict() | {"out": str(out), "took_s": found.took_s}
    record |= {"measured": calibrate_bench.numbers_of(found), "left_out": found.left_out}
    tell("calibrate", record, where, _parts(found, out), as_json=as_json)
    found.calibration.save(out)


def _parts(found: Calibrated, out: Path) -> Iterator[Part]:
    from jaxlamina.bench import calibrate_bench

    terms = found.calibration.terms
    yield table(calibrate_bench.numbers_of(found), MEASURED, f"{found.calibration.device}, what was measured")
    yield (
        f"products read {terms.product_bytes_s / 1e9:.4g} GB/s and multiply "
        f"{terms.product_flop_s / 1e12:.4g} TFLOP/s; attention reads {terms.attention_bytes_s / 1e9:.4g} GB/s"
    )
    yield (
        f"fixed: a slice {1e6 * terms.slice_fixed_s:.1f} µs, a product {1e6 * terms.product_fixed_s:.1f}, "
        f"attention of a layer {1e6 * terms.attention_fixed_s:.1f}, a step {1e6 * terms.step_fixed_s:.0f}"
    )
    for name, link in found.calibration.links.items():
        yield f"messages by {name}: {1e6 * link.fixed_s:.1f} µs, and {link.bytes_s / 1e9:.4g} GB/s"
    yield from (warning(f"left out: {line}") for line in found.left_out.values())
    yield f"measured in {found.took_s:.0f} s, and written to {out}"
