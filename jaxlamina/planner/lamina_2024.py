"""Lamina 2024 (Chen et al., *Efficient and Economic Large Language Model Inference with Attention
Offloading*): the tables and figures that formulas give, beside what is printed.

No curve was read off: of figures only numbers that the text states are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from jaxlamina.models.config_files import model_config
from jaxlamina.planner import roofline
from jaxlamina.planner.comparison import Axes, ComparedRow, Curve, Printed, Reproduction
from jaxlamina.planner.hardware import Hardware

TITLE = "Lamina 2024, Efficient and Economic Large Language Model Inference with Attention Offloading"

_GB = (
    "A device's memory of so many GB is GiB in our tables, as it is made. Here it "
    "counts as the paper prints it."
)
_NO_CURVE = "The curve of the paper's figure was not read off; what its text states is compared."

# Device, price, capacity, bandwidth, and the two printed costs; the table's line has tabs.
_COSTS = (
    ("a100-80g", "A100-80G\t17500\t80\t1935\t219\t9.04"),
    ("h100", "H100\t36500\t80\t3350\t456\t10.90"),
    ("rtx-3090", "RTX 3090\t1600\t24\t936.2\t67\t1.71"),
    ("rx-7900-xtx", "RX 7900 XTX\t1000\t24\t960\t42\t1.04"),
    ("arc-a770", "Arc A770\t350\t16\t560\t22\t0.63"),
)


def table_1() -> Reproduction:
    exact: dict[str, tuple[float, float]] = {}
    rounded: dict[str, tuple[float, float]] = {}

    def rows() -> Iterator[ComparedRow]:
        where = "Table 1"
        for file, line in _COSTS:
            name, price, capacity, bandwidth, per_gb, per_gb_s = line.split("\t")
            device = Hardware.load(file)
            paid = device.known("price_usd")
            exact[file] = paid / device.memory_gib, paid / device.bandwidth_gb_s
            rounded[file] = float(per_gb), float(per_gb_s)
            yield ComparedRow(f"{name}: price", "$", paid, "given", Printed(price, where, line))
            yield ComparedRow(
                f"{name}: memory", "GB", device.memory_gib, "given", Printed(capacity, where, line)
            )
            yield ComparedRow(
                f"{name}: bandwidth", "GB/s", device.bandwidth_gb_s, "given", Printed(bandwidth, where, line)
            )
            yield ComparedRow(
                f"{name}: cost of memory", "$/GB", exact[file][0], "formula", Printed(per_gb, where, line)
            )
            yield ComparedRow(
                f"{name}: cost of bandwidth",
                "$/(GB/s)",
                exact[file][1],
                "formula",
                Printed(per_gb_s, where, line),
            )
        yield from alphas()

    def alphas() -> Iterator[ComparedRow]:
        quote = r"the value of  $\alpha$  lies in  $3.27 \times -17.3 \times$  in real-world scenarios"
        least, most = (Printed(text, "§4.1", quote) for text in ("3.27", "17.3"))
        a100, h100, rtx, arc = "a100-80g", "h100", "rtx-3090", "arc-a770"
        early = "The paper divides the table's rounded numbers: see the next row."
        for what, which, dear, cheap, printed in (
            ("least α: memory of A100 over RTX 3090", 0, a100, rtx, least),
            ("most α: bandwidth of H100 over Arc A770", 1, h100, arc, most),
        ):
            ours = exact[dear][which] / exact[cheap][which]
            yield ComparedRow(what, "", ours, "formula", printed, early)
            ours = rounded[dear][which] / rounded[cheap][which]
            yield ComparedRow("the same from rounded numbers", "", ours, "formula", printed)
        yield ComparedRow(
            "α of bandwidth, A100 over Arc A770", "", exact[a100][1] / exact[arc][1], "formula", decimals=2
        )
        yield ComparedRow(
            "α of memory, H100 over Arc A770", "", exact[h100][0] / exact[arc][0], "formula", decimals=2
        )
        quote = (
            "more than 3× more memory capacity and bandwidth per dollar compared to their "
            "high-end counterparts"
        )
        three = Printed("3", "§1", quote, ">")
        ratios = [
            exact[dear][i] / exact[cheap][i]
            for dear in (a100, h100)
            for cheap in (rtx, "rx-7900-xtx", arc)
            for i in (0, 1)
        ]
        yield ComparedRow(
            "memory or bandwidth for a dollar, consumer over enterprise, least",
            "×",
            min(ratios),
            "formula",
            three,
            decimals=2,
        )

    remarks = [
        _GB,
        "The paper takes α against the A100. But 17.3 is the H100 over Arc A770, by bandwidth.",
    ]
    return Reproduction("Memory and its cost", [*rows()], remarks)


def table_2() -> Reproduction:
    config = model_config("llama-13b")
    where = "Table 2"
    lines = {
        "N": "$\\overline{N}$\tNumber of parameters in LLM.\t13 billion",
        "d": "d\tDimension of the embeddings.\t5120",
        "L": "L\tLayers of the LLM.\t40",
        "e": "e\tBytes per element.\t2",
    }
    rows = [
        ComparedRow(
            "LLaMA-13B: N",
            "10⁹",
            roofline.n_params(config) / 1e9,
            "formula",
            Printed("13", where, lines["N"]),
            decimals=2,
        ),
        ComparedRow("LLaMA-13B: d", "", config.hidden_size, "formula", Printed("5120", where, lines["d"])),
        ComparedRow(
            "LLaMA-13B: L", "", config.num_hidden_layers, "formula", Printed("40", where, lines["L"])
        ),
        ComparedRow(
            "e, of BF16", "bytes", roofline.ELEMENT_BYTES, "formula", Printed("2", where, lines["e"])
        ),
    ]
    return Reproduction("Notation, with the values of LLaMA-13B", rows)


_BATCHES = (128, 256, 512, 1024)
# Model, A100s, and the table's line.
_BANDWIDTHS = (
    ("llama-13b", 1, "LLaMA-13B @A100\t4.90\t8.12\t9.08\t10.06"),
    ("llama-33b", 2, "LLaMA-33B @2×A100\t5.94\t9.31\t11.56\t12.53"),
    ("llama-65b", 4, "LLaMA-65B @4×A100\t7.55\t11.78\t13.92\t15.90"),
)


def _implied_mfu(file: str, gpus: int, gb_s: float) -> float:
    """MFU at which the formula gives ``gb_s``."""
    return (
        gb_s
        * 1e9
        / roofline.least_bandwidth_2024(model_config(file), 1.0, Hardware.load("a100-80g").rates(gpus))
    )


def table_3() -> Reproduction:
    a100 = Hardware.load("a100-80g")

    def rows() -> Iterator[ComparedRow]:
        reason = (
            "The formula needs MFU(B) as the authors measured it. The paper prints no MFU. Ours has the "
            "most that the roofline allows, so it is the most that the formula can give."
        )
        most = 0.0
        for file, gpus, line in _BANDWIDTHS:
            name, *texts = line.split("\t")
            config, rates = model_config(file), a100.rates(gpus)
            for batch, text in zip(_BATCHES, texts, strict=True):
                utilisation = roofline.roofline_mfu(config, batch, rates)
                ours = roofline.least_bandwidth_2024(config, utilisation, rates) / 1e9
                most = max(most, ours)
                yield ComparedRow(
                    f"{name}, B = {batch}", "GB/s", ours, "formula", Printed(text, "Table 3", line), reason
                )
        for file, gpus, line in _BANDWIDTHS:
            name, *texts = line.split("\t")
            for batch, text in zip(_BATCHES, texts, strict=True):
                share = 100 * _implied_mfu(file, gpus, float(text))
                yield ComparedRow(
                    f"{name}, B = {batch}: MFU at which the formula gives the printed value",
                    "%",
                    share,
                    "formula",
                )
        quote = "the required interconnect bandwidth does not exceed 20GB/s, even when dealing"
        yield ComparedRow(
            "the most of all", "GB/s", most, "formula", Printed("20", "§4.2", quote, "<"), reason, decimals=1
        )

    remarks = [
        (
            "The paper's formula, 2edL·MFU/N, must mean FLOP/s by MFU: ours is MFU times "
            "312 TFLOP/s of each A100."
        ),
        (
            "The MFU that follows from the printed values grows with the batch and falls "
            "with the number of A100s."
        ),
        "A measured MFU would do so, too. That fits the formula, and does not prove it.",
    ]
    return Reproduction("Least bandwidth between the pools", [*rows()], remarks)


def table_4() -> Reproduction:
    where = "Table 4"
    lines = {
        "llama-13b": "LLaMA-13B\t25.7 GB\t40\t5120",
        "llama-33b": "LLaMA-33B\t64.6 GB\t60\t6656",
    }

    def rows() -> Iterator[ComparedRow]:
        for file, line in lines.items():
            name, size, layers, hidden = line.split("\t")
            config = model_config(file)
            without = roofline.n_step_params(config) * roofline.ELEMENT_BYTES / 1e9
            printed = Printed(size.split()[0], where, line)
            yield ComparedRow(
                f"{name}: parameters without the input embedding", "GB", without, "formula", printed
            )
            yield ComparedRow(
                f"{name}: all parameters",
                "GB",
                roofline.n_params(config) * roofline.ELEMENT_BYTES / 1e9,
                "formula",
            )
            yield ComparedRow(
                f"{name}: layers", "", config.num_hidden_layers, "formula", Printed(layers, where, line)
            )
            yield ComparedRow(
                f"{name}: hidden size", "", config.hidden_size, "formula", Printed(hidden, where, line)
            )

    remark = "The paper does not say what it counts. Without the input embedding both rows agree."
    return Reproduction("Models, in BF16", [*rows()], [remark])


_MANY = (*range(1, 64), *range(64, 2049, 8))


def figure_3() -> Reproduction:
    config, rates = model_config("llama-13b"), Hardware.load("a100-80g").rates()
    bend = next(b for b in range(1, 4096) if roofline.roofline_mfu(config, b, rates) >= 1 - 1e-9)
    quote = "demonstrating a rapid increase in MFU up to a batch size of 2048"
    reason = (
        "On the roofline MFU is 100 % as soon as arithmetic takes longer than reading the weights. Measured "
        "products come near their limit only with far larger batches."
    )
    rows = [
        ComparedRow(
            "batch up to which MFU rises",
            "requests",
            bend,
            "formula",
            Printed("2048", "§3.1", quote),
            reason,
            decimals=0,
        ),
        *(
            ComparedRow(
                f"MFU at a batch of {b}", "%", 100 * roofline.roofline_mfu(config, b, rates), "formula"
            )
            for b in (1, 16, 64, *_BATCHES)
        ),
    ]
    _, *texts = _BANDWIDTHS[0][2].split("\t")
    for batch, text in zip(_BATCHES, texts, strict=True):
        implied = 100 * _implied_mfu("llama-13b", 1, float(text))
        rows.append(ComparedRow(f"MFU at a batch of {batch} that Table 3 implies", "%", implied, "formula"))
    curves = [
        Curve(
            "LLaMA-13B, A100, roofline", _MANY, [100 * roofline.roofline_mfu(config, b, rates) for b in _MANY]
        )
    ]
    remarks = [
        _NO_CURVE,
        "The figure has measured MFU. If Table 3 was made with it, Table 3 gives four points of it.",
    ]
    axes = Axes("batch, requests", "MFU without attention, %", log_x=True)
    return Reproduction("MFU of an A100, LLaMA-13B, without attention", rows, remarks, curves, axes)


def figure_4() -> Reproduction:
    config, rates = model_config("llama-13b"), Hardware.load("a100-80g").rates()

    def share(batch: int, length: float, model_time_s: float | None = None) -> float:
        attention = roofline.attention_time_s(config, batch, length, rates)
        model = roofline.model_time_s(config, batch, rates) if model_time_s is None else model_time_s
        return 100 * attention / (attention + model)

    quote = "attention operations dominate (exceeding 80% of the time) when the context length surpasses 1500"
    printed = Printed("80", "§3.1", quote, ">")
    _, *texts = _BANDWIDTHS[0][2].split("\t")
    rows = []
    for batch in (128, 512):
        rows.append(
            ComparedRow(
                f"B = {batch}, l = 1,500: attention's share of the time",
                "%",
                share(batch, 1500),
                "formula",
                printed,
                decimals=1,
            )
        )
        passes = next(l for l in range(1, 8192) if share(batch, l) > 80)
        rows.append(
            ComparedRow(
                f"B = {batch}: context from which it is above 80 %", "tokens", passes, "formula", decimals=0
            )
        )
    reason = (
        "Two statements of the paper do not go together here. With products as slow as the MFU of "
        "Table 3 says, and attention at full bandwidth, attention has less than 80 % of the time. "
        "Slower attention has more."
    )
    for batch in (128, 512):
        implied = _implied_mfu("llama-13b", 1, float(texts[_BATCHES.index(batch)]))
        model = 2 * roofline.n_step_params(config) * batch / (implied * rates.flop_s)
        value = share(batch, 1500, model)
        why = "" if printed.agrees(value) else reason
        rows.append(
            ComparedRow(
                f"B = {batch}, l = 1,500, products at the MFU that Table 3 implies",
                "%",
                value,
                "formula",
                printed,
                why,
                decimals=1,
            )
        )
    lengths = range(64, 4097, 64)
    curves = [Curve(f"B = {b}", lengths, [share(b, n) for n in lengths]) for b in (128, 512)]
    axes = Axes("context, tokens", "attention's share of the time by the roofline, %")
    return Reproduction("Share of the time in attention, LLaMA-13B, A100", rows, [_NO_CURVE], curves, axes)


def figure_5() -> Reproduction:
    rtx, a100 = Hardware.load("rtx-4080"), Hardware.load("a100-80g")
    config = model_config("llama-7b")
    one, four = (roofline.model_time_s(config, 1, rtx.rates(n)) for n in (1, 4))
    quote = "a single RTX 4080 GPU is capable of delivering merely 31.2% of the TFLOPs offered by A100"
    speedup = "can achieve only 1.41× speedup against using only one GPU"
    rows = [
        ComparedRow(
            "TFLOP/s of RTX 4080 over A100",
            "%",
            100 * rtx.rates().flop_s / a100.rates().flop_s,
            "formula",
            Printed("31.2", "§3.2", quote),
            decimals=2,
        ),
        ComparedRow(
            "LLaMA-7B on four RTX 4080 over one",
            "×",
            one / four,
            "formula",
            Printed("1.41", "§3.2", speedup),
            "Ours is the roofline, without the exchanges of tensor parallelism, which the figure is "
            "about. They need measurements.",
        ),
    ]
    return Reproduction("Scalability of RTX 4080, LLaMA-7B", rows, [_NO_CURVE])


def figure_6() -> Reproduction:
    config, rates = model_config("llama-13b"), Hardware.load("a100-80g").rates()
    intensity = roofline.attention_intensity(config)
    low = "its MFU is generally limited to less than 5% in most scenarios"
    high = "achieve high (>80%) model bandwidth utilization (MBU) for this operator"
    rows = [
        ComparedRow("FLOP per byte of attention, any batch, G = 1", "FLOP/B", intensity, "formula"),
        ComparedRow(
            "FLOP per byte above which arithmetic is the limit, A100", "FLOP/B", rates.ridge, "formula"
        ),
        ComparedRow(
            "most MFU of attention",
            "%",
            100 * intensity / rates.ridge,
            "formula",
            Printed("5", "§3.1", low, "<"),
            decimals=2,
        ),
        ComparedRow(
            "bandwidth utilisation of attention",
            "%",
            None,
            None,
            Printed("80", "§3.1", high, ">"),
            "It is measured: it needs a device.",
        ),
    ]
    remarks = [
        _NO_CURVE,
        "The figure has measured utilisation by batch. By the roofline it is 100 % at any batch.",
    ]
    return Reproduction("Bandwidth utilisation of attention", rows, remarks)


ITEMS: Mapping[str, Callable[[], Reproduction]] = {
    "table-1": table_1,
    "table-2": table_2,
    "table-3": table_3,
    "table-4": table_4,
    "figure-3": figure_3,
    "figure-4": figure_4,
    "figure-5": figure_5,
    "figure-6": figure_6,
}

_GPUS = "measurements on several A100 with RDMA"
NOT_YET: Mapping[str, tuple[str, str]] = {
    "figure-1": (
        "throughput per cost at the best hardware",
        "the planner's search; the paper does not say which models, batches and pipelining it searched over",
    ),
    "figure-12": ("throughput by batch", _GPUS + ", or the simulator with calibrated times"),
    "figure-13": ("throughput per cost", _GPUS + ", or the simulator with calibrated times"),
    "figure-14": ("latency breakdown", _GPUS + " (`bench breakdown` measures it here)"),
    "figure-15": ("networking overhead", _GPUS + " (`bench exchange` measures it here)"),
    "figure-16": (
        "what overlapping messages and attention gains",
        _GPUS + " (`bench step` measures it here)",
    ),
    "figure-17": ("latency and throughput with ShareGPT", "the ShareGPT texts and " + _GPUS),
}
