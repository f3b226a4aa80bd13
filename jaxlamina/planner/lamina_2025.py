"""Lamina 2025 (Chen et al., *Efficient Heterogeneous Large Language Model Decoding with Model-Attention
Disaggregation*): the tables and figures that formulas and traces give, beside what is printed.

Pages are those of the PDF. No curve was read off: of figures only numbers that the text states are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from jaxlamina.models import ModelConfig
from jaxlamina.models.config_files import model_config
from jaxlamina.planner import equal_cost, roofline, traces
from jaxlamina.planner.comparison import Axes, ComparedRow, Curve, How, Printed, Reproduction
from jaxlamina.planner.hardware import GIB, Hardware

TITLE = (
    "Lamina 2025, Efficient Heterogeneous Large Language Model Decoding with Model-Attention Disaggregation"
)

_NO_CURVE = "The curves of the paper's figure were not read off; what its text states is compared."
_ROOFLINE = "Ours is the roofline: a limit. Measured times are longer, so measured utilisation is lower."

_DEVICES = {"H100": "h100", "H20": "h20", "TPU v6e": "tpu-v6e"}
# Heading, unit, field, what the printed number is multiplied by, the table's line.
_SPECIFICATIONS = (
    ("BF16", "TFLOP/s", "tflops_bf16", 1.0, "| BF16 TFLOPs | 989 | 148 | 918 |"),
    ("memory", "GB", "memory_gib", 1.0, "| Memory capacity | 80 GB | 96 GB | 32 GB |"),
    ("memory bandwidth", "TB/s", "bandwidth_gb_s", 1e-3,
     "| Memory bandwidth | 3.35 TB/s | 4.0 TB/s | 1.64 TB/s |"),
    ("power", "W", "power_w", 1.0, "| Power rating | 700 W | 400 W | unlisted |"),
    ("link between chips", "GB/s", "chip_link_gb_s", 1.0,
     "| Inter-chip bandwidth | 450 GB/s | 450 GB/s | 448 GB/s |"),
    ("network", "Gbit/s", "network_gbit_s", 1.0, "| Network bandwidth | 400 Gbps | 400 Gbps | 200 Gbps |"),
    ("price", "$/h", "price_usd_h", 1.0, r"| Price per chip [2] | \$11.06/hr | \$4.63/hr * | \$2.70/hr |"),
)  # fmt: skip


def _number(cell: str) -> str:
    """The number of a table's cell."""
    return cell.strip().lstrip("\\$").split(" ")[0].split("/")[0]


def table_1() -> Reproduction:
    devices = {name: Hardware.load(file) for name, file in _DEVICES.items()}

    def rows() -> Iterator[ComparedRow]:
        for heading, unit, key, scale, line in _SPECIFICATIONS:
            for (name, device), cell in zip(devices.items(), line.strip("| ").split("|")[1:], strict=True):
                value = getattr(device, key)
                if value is not None:
                    printed = Printed(_number(cell), "Table 1, page 2", line)
                    yield ComparedRow(f"{name}: {heading}", unit, value * scale, "given", printed)
        h100, h20 = devices["H100"], devices["H20"]
        link = 100 * h100.known("network_gbit_s") / 8 / h100.known("chip_link_gb_s")
        quote = "which provide only ~10% of the bandwidth of *inter-chip interconnects*"
        yield ComparedRow(
            "network over link between chips, H100",
            "%",
            link,
            "formula",
            Printed("10", "§1.2, page 2", quote, "about"),
        )
        share = 100 * h20.known("tflops_bf16") / h100.known("tflops_bf16")
        quote = "H20, which delivers only 15% of the TFLOPs of the H100"
        yield ComparedRow(
            "TFLOP/s of H20 over H100", "%", share, "formula", Printed("15", "§2.2.2, page 4", quote)
        )
        for name, device in devices.items():
            price = device.known("price_usd_h")
            yield ComparedRow(
                f"{name}: TFLOP/s for a $/h", "TFLOP/s", device.known("tflops_bf16") / price, "formula"
            )
            yield ComparedRow(
                f"{name}: bandwidth for a $/h", "GB/s", device.bandwidth_gb_s / price, "formula"
            )
            yield ComparedRow(f"{name}: memory for a $/h", "GB", device.memory_gib / price, "formula")

    remarks = [
        "Memory of so many GB is taken as GiB, as it is made.",
        (
            'The paper says that devices are cheaper than the H100 in arithmetic or in bandwidth, "but not '
            'both". By these prices TPU v6e is cheaper in both.'
        ),
    ]
    return Reproduction("H100, H20 and TPU v6e", [*rows()], remarks)


def table_2() -> Reproduction:
    config = model_config("llama-3-70b")
    lines = {
        "N": "| N | Number of parameters in LLM. | 70 billion |",
        "d": "| d | Hidden dimension. | 8192 |",
        "L": "| L | Layers of the LLM. | 80 |",
        "G": "| G | GQA group size. | 8 |",
        "e": "| e | Bytes per element. | 2 |",
    }

    def printed(key: str, text: str, about: bool = False) -> Printed:
        return Printed(text, "Table 2, page 3", lines[key], "about" if about else "=")

    rows = [
        ComparedRow(
            "LLaMA3-70B: N", "10⁹", roofline.n_params(config) / 1e9, "formula", printed("N", "70", about=True)
        ),
        ComparedRow("LLaMA3-70B: d", "", config.hidden_size, "formula", printed("d", "8192")),
        ComparedRow("LLaMA3-70B: L", "", config.num_hidden_layers, "formula", printed("L", "80")),
        ComparedRow("LLaMA3-70B: G", "", roofline.group_size(config), "formula", printed("G", "8")),
        ComparedRow("e, of BF16", "bytes", roofline.ELEMENT_BYTES, "formula", printed("e", "2")),
    ]
    return Reproduction("Notation, with the values of LLaMA3-70B", rows)


_MODELS = {
    "LLaMA-33B": ("llama-33b", "| LLaMA-33B | 64.7 GB | 60 | 6656 | 1 |", "64.7"),
    "LLaMA-65B": ("llama-65b", "| LLaMA-65B | 130.1 GB | 80 | 8192 | 1 |", "130.1"),
    "LLaMA3-70B": ("llama-3-70b", "| LLaMA3-70B | 137.5 GB | 80 | 8192 | 8 |", "137.5"),
}


def table_3() -> Reproduction:
    where = "Table 3, page 9"

    def rows() -> Iterator[ComparedRow]:
        for name, (file, line, size) in _MODELS.items():
            config = model_config(file)
            without = roofline.n_step_params(config) * roofline.ELEMENT_BYTES / 1e9
            reason = (
                "The printed number is nearest that of LLaMA-2-70B, whose vocabulary is 32,000 and not "
                "128,256: see its row."
                if name == "LLaMA3-70B"
                else _REST
            )
            printed = Printed(size, where, line)
            if printed.agrees(without):
                reason = ""
            yield ComparedRow(
                f"{name}: parameters without the input embedding", "GB", without, "formula", printed, reason
            )
            yield ComparedRow(
                f"{name}: all parameters",
                "GB",
                roofline.n_params(config) * roofline.ELEMENT_BYTES / 1e9,
                "formula",
            )
            yield ComparedRow(
                f"{name}: L",
                "",
                config.num_hidden_layers,
                "formula",
                Printed(str(config.num_hidden_layers), where, line),
            )
            yield ComparedRow(
                f"{name}: d", "", config.hidden_size, "formula", Printed(str(config.hidden_size), where, line)
            )
            yield ComparedRow(
                f"{name}: G",
                "",
                roofline.group_size(config),
                "formula",
                Printed(str(roofline.group_size(config)), where, line),
            )
        second = roofline.n_step_params(model_config("llama-2-70b")) * roofline.ELEMENT_BYTES / 1e9
        printed = Printed("137.5", where, _MODELS["LLaMA3-70B"][1])
        yield ComparedRow(
            "LLaMA-2-70B: parameters without the input embedding", "GB", second, "formula", printed, _REST
        )

    remark = "The paper does not say what it counts. Ours is nearest without the input embedding."
    return Reproduction("Models, in 16-bit numbers", [*rows()], [remark])


_REST = "Ours is less by under 0.1 GB. The paper does not say what else it counts."

# Name in the paper, in the package, requests, prompt, output, and the table's line.
_TRACES = (
    ("Azure-Conv", "azure-conversation", ("19366", "1154.7", "211.1"),
     "| Azure-Conv | 19366 | 1154.7 | 211.1 |"),
    ("Azure-Code", "azure-code", ("8819", "2047.8", "27.9"),
     "| Azure-Code | 8819 | 2047.8 | 27.9 |"),
    ("Kimi-Conv", "kimi-conversation", ("12031", "12035.1", "342.6"),
     "| Kimi-Conv | 12031 | 12035.1 | 342.6 |"),
    ("Kimi-TA", None, ("23608", "8560.0", "182.1"),
     "| Kimi-TA | 23608 | 8560.0 | 182.1 |"),
)  # fmt: skip
_QUANTITIES = (("requests", ""), ("mean prompt, lp", "tokens"), ("mean output, lg", "tokens"))


def table_4() -> Reproduction:
    def rows() -> Iterator[ComparedRow]:
        for name, ours, numbers, line in _TRACES:
            values: tuple[float | None, ...] = (None, None, None)
            if ours is not None:
                trace = traces.load(ours)
                values = len(trace), float(trace.n_prompt.mean()), float(trace.n_output.mean())
            for (what, unit), value, text in zip(_QUANTITIES, values, numbers, strict=True):
                printed = Printed(text, "Table 4, page 9", line)
                how: How | None = None if value is None else "trace"
                reason = "This trace does not come with the package." if value is None else ""
                yield ComparedRow(f"{name}: {what}", unit, value, how, printed, reason)

    return Reproduction("Request traces", [*rows()])


def table_5() -> Reproduction:
    where = "Table 5, page 9"
    h100, h20 = (Hardware.load(name).known("price_usd_h") for name in ("h100", "h20"))
    lines = {
        (1, 2): r"| (\$20.32/hr) | (\$22.12/hr) |",
        (2, 4): r"| LLaMA-65B, LLaMA3-70B | (\$40.64/hr) | (\$44.24/hr) |",
    }
    texts = {(1, 2): ("20.32", "22.12"), (2, 4): ("40.64", "44.24")}
    rows = []
    for (a, b), line in lines.items():
        split, whole = a * h100 + b * h20, 2 * a * h100
        rows += [
            ComparedRow(
                f"Lamina, DOP=({a},{b}): {a} × H100, {b} × H20",
                "$/h",
                split,
                "formula",
                Printed(texts[a, b][0], where, line),
            ),
            ComparedRow(
                f"vLLM, {2 * a} × H100", "$/h", whole, "formula", Printed(texts[a, b][1], where, line)
            ),
            ComparedRow(f"DOP=({a},{b}) over {2 * a} × H100", "%", 100 * split / whole, "formula"),
        ]
    return Reproduction(
        "Equal-cost hardware",
        rows,
        ["The two are not equal: Lamina's hardware costs 8 % less, by the table's own prices."],
    )


_MANY = (1, *range(8, 1025, 8))  # as Table 2 has it


def figure_2() -> Reproduction:
    """Products of LLaMA3-70B on 2, 4 and 8 H100."""
    config, h100 = model_config("llama-3-70b"), Hardware.load("h100")
    # From the roofline's bend on, arithmetic is the limit: 2NB / F = e(N + 2Bd) / W.
    n, d, e, rates = roofline.n_step_params(config), config.hidden_size, roofline.ELEMENT_BYTES, h100.rates()
    bend = e * n / (2 * n / rates.ridge - 2 * e * d)
    passes = next(b for b in range(1, 1000) if roofline.roofline_mfu(config, b, rates) > 0.2)
    quote = "For small batch sizes (less than 100), the workload is bandwidth-bound"
    low = "In this regime, the MFU remains below 20%"
    where = "§2.2.1, page 4"
    rows = [
        ComparedRow(
            "batch from which arithmetic is the limit",
            "requests",
            bend,
            "formula",
            Printed("100", where, quote, ">"),
        ),
        ComparedRow(
            "MFU at a batch of 99",
            "%",
            100 * roofline.roofline_mfu(config, 99, rates),
            "formula",
            Printed("20", where, low, "<"),
            f"{_ROOFLINE} On the roofline, MFU is above 20 % from a batch of {passes} on.",
            decimals=1,
        ),
    ]
    for gpus in (2, 4, 8):
        for batch in (1, 64, 256, 1024):
            time_s = roofline.model_time_s(config, batch, h100.rates(gpus))
            rows.append(
                ComparedRow(f"{gpus} × H100: MTIME({batch})", "ms", 1e3 * time_s, "formula", decimals=2)
            )
    for batch in (1, 64, 256, 1024):
        rows.append(
            ComparedRow(
                f"MFU at a batch of {batch}",
                "%",
                100 * roofline.roofline_mfu(config, batch, rates),
                "formula",
            )
        )
    curves = [
        Curve(f"{k} × H100", _MANY, [1e3 * roofline.model_time_s(config, b, h100.rates(k)) for b in _MANY])
        for k in (2, 4, 8)
    ]
    remarks = [
        _NO_CURVE,
        "The figure has measured times, too, which need a device.",
        "The text does not name the figure's tensor parallelisms. Ours have no time for exchanges.",
    ]
    axes = Axes("batch, requests", "MTIME of LLaMA3-70B by the roofline, ms", log_x=True, log_y=True)
    return Reproduction("Time and MFU of non-attention operators, LLaMA3-70B", rows, remarks, curves, axes)


_LENGTHS = (4096, 8192)


def figure_3() -> Reproduction:
    """Attention of LLaMA3-70B on one H100 and one H20."""
    config = model_config("llama-3-70b")
    devices = {name: Hardware.load(file) for name, file in _DEVICES.items() if name != "TPU v6e"}
    where, h100 = "§2.2.2, page 4", devices["H100"]
    quote = "the full memory of an H100 can only hold KV caches for about 30 requests"
    fits = Printed("30", where, quote, "about")
    above = Printed(
        "70",
        where,
        "utilization of attention operators remains above 70% even for small batch sizes, such as 20",
        ">",
    )
    rows = [
        ComparedRow(
            "requests of 8,192 tokens whose KV fits an H100, of 80 GiB",
            "requests",
            _fits(config, h100.memory_gib * GIB),
            "formula",
            fits,
        ),
        ComparedRow(
            "the same, of 80·10⁹ bytes", "requests", _fits(config, h100.memory_gib * 1e9), "formula", fits
        ),
        ComparedRow(
            "bandwidth utilisation at a batch of 20",
            "%",
            None,
            None,
            above,
            "It is measured: it needs a device.",
        ),
        ComparedRow(
            "FLOP per byte of attention, G = 8", "FLOP/B", roofline.attention_intensity(config), "formula"
        ),
    ]
    for name, device in devices.items():
        rows.append(
            ComparedRow(
                f"{name}: FLOP per byte above which arithmetic is the limit",
                "FLOP/B",
                device.rates().ridge,
                "formula",
            )
        )
    for name, device in devices.items():
        for length in _LENGTHS:
            for batch in (1, 20, 30):
                time_s = roofline.attention_time_s(config, batch, length, device.rates())
                rows.append(
                    ComparedRow(
                        f"{name}, l = {length}: ATIME({batch})", "ms", 1e3 * time_s, "formula", decimals=2
                    )
                )
    batches = range(1, 31)
    curves = [
        Curve(
            f"l = {length}, {name}",
            batches,
            [1e3 * roofline.attention_time_s(config, b, length, device.rates()) for b in batches],
        )
        for name, device in devices.items()
        for length in _LENGTHS
    ]
    remarks = [
        _NO_CURVE,
        (
            "Attention's FLOP per byte are far below both devices' limits, so ours is the "
            "time of reading KV at 100 %."
        ),
        "At the 70 % that the text states as the least, times are 1.43 of ours at most.",
    ]
    axes = Axes("batch, requests", "ATIME of LLaMA3-70B by the roofline, ms")
    return Reproduction("Time of attention operators, LLaMA3-70B", rows, remarks, curves, axes)


def _fits(config: ModelConfig, memory_bytes: float) -> int:
    return roofline.batch_that_fits(config, 8192, memory_bytes)


def figure_4() -> Reproduction:
    """The least bandwidth between H100 and H20 for LLaMA3-70B, α = 0.2."""
    config, h100, h20 = model_config("llama-3-70b"), Hardware.load("h100"), Hardware.load("h20")

    def gb_s(dop: tuple[int, int], batch: float, length: int) -> float:
        a, b = dop
        return roofline.least_bandwidth_2025(config, batch, length, h100.rates(a), h20.rates(b)) / 1e9

    quote = "the required interconnect bandwidth does not exceed 30 GB/s, even when dealing"
    printed = Printed("30", "§3.1, page 5, with batches up to 300", quote, "<")
    reason = (
        "The paper measured MTIME and ATIME, and prints neither. Ours are rooflines, the shortest "
        "times that can be, so ours is the most that the formula can ask for."
    )
    rows = []
    dops = ((2, 2), (2, 4), (4, 4))
    for dop in dops:
        for length in _LENGTHS:
            total = gb_s(dop, 300, length)
            for what, value in (("all H100 together", total), ("each H100", total / dop[0])):
                why = "" if printed.agrees(value) else reason
                rows.append(
                    ComparedRow(
                        f"DOP={dop}, l = {length}, B = 300, {what}",
                        "GB/s",
                        value,
                        "formula",
                        printed,
                        why,
                        decimals=1,
                    )
                )
    for dop in dops[:1]:
        for length in _LENGTHS:
            rows += [
                ComparedRow(
                    f"DOP={dop}, l = {length}, B = {b}, all H100 together",
                    "GB/s",
                    gb_s(dop, b, length),
                    "formula",
                )
                for b in (1, 50, 100, 200)
            ]
    longest = 1 << 17
    enough = next(l for l in range(1024, longest, 1024) if gb_s((2, 2), 300, l) < 30)
    rows.append(
        ComparedRow(
            "context from which DOP=(2, 2) needs under 30 GB/s at B = 300",
            "tokens",
            enough,
            "formula",
            decimals=0,
        )
    )
    batches = (1, *range(5, 301, 5))
    curves = [
        Curve(f"DOP={dop}, l = {length}", batches, [gb_s(dop, b, length) for b in batches])
        for dop in dops
        for length in _LENGTHS
    ]
    remarks = [
        _NO_CURVE,
        "The text does not say which DOPs and lengths the panels have. Those here are ours.",
        (
            "Nor does it say whether its GB/s are of one GPU or of the pool. It gives each "
            "GPU a NIC of 400 Gbit/s."
        ),
        (
            "At B = 300 the KV of 4,096 tokens a request is 403 GB, more than two H20 "
            "hold. The formula ignores memory."
        ),
    ]
    axes = Axes("batch, requests", "least bandwidth, all H100 together, GB/s")
    return Reproduction("Required network bandwidth, LLaMA3-70B, α = 0.2", rows, remarks, curves, axes)


ITEMS: Mapping[str, Callable[[], Reproduction]] = {
    "table-1": table_1,
    "table-2": table_2,
    "table-3": table_3,
    "table-4": table_4,
    "table-5": table_5,
    "figure-2": figure_2,
    "figure-3": figure_3,
    "figure-4": figure_4,
    "figure-10": equal_cost.figure_10,
    "figure-11": equal_cost.figure_11,
    "equal-cost": equal_cost.beyond,
}

NOT_YET: Mapping[str, tuple[str, str]] = {
    "figure-12": (
        "latency breakdown",
        "measurements on two kinds of GPU (`bench breakdown` measures it here)",
    ),
    "figure-13": (
        "network round trip and bandwidth",
        "two hosts with RDMA (`bench exchange` measures it here)",
    ),
    "figure-14": (
        "what sending q first gains",
        "measurements on two kinds of GPU (`bench step` measures it here)",
    ),
}
