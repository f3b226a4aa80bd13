"""Do the tensors of a file fit the model? Compares names and shapes; knows no format and reads no data."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from jaxlamina.errors import UserError

Shape = tuple[int, ...]
T = TypeVar("T")

# Buffers that old exports carry along; every implementation computes them from the config.
_BUFFERS = re.compile(
    r"(\.rotary_emb\.inv_freq|\.attn\.(masked_)?bias|^model\.decoder\.version|^decoder\.version)$"
)


def is_buffer(name: str) -> bool:
    """True for a tensor that is no parameter and that a loader may drop without a word."""
    return _BUFFERS.search(name) is not None


def model_names(found: Iterable[str], expected: Collection[str]) -> dict[str, str]:
    """Name in the file -> name in the model, for names that lack the leading `model.` of a base-model
    export."""
    return {
        name: f"model.{name}" if name not in expected and f"model.{name}" in expected else name
        for name in found
    }


def unique(named: Iterable[tuple[str, T]], where: str) -> dict[str, T]:
    """By the model's names; `UserError` if files have one of them in two spellings."""
    result: dict[str, T] = {}
    for name, value in named:
        if name in result:
            raise UserError(f"{where}: {name[:200]} is there twice, under two names; remove one")
        result[name] = value
    return result


def check_fit(expected: Mapping[str, Shape], found: Mapping[str, Shape], where: str) -> None:
    """Raise one `UserError` that lists every missing, unexpected and mis-shaped tensor, or return None."""
    missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found]
    unexpected = [f"{name} {list(shape)}" for name, shape in found.items() if name not in expected]
    misshaped = [
        f"{name} is {list(found[name])} and must be {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{len(lines)} {kind}: {', '.join(folded(lines))}"
        for kind, lines in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshaped))
        if lines
    ]
    if problems:
        raise UserError(
            f"{where}: the tensors do not fit the model's config; {'; '.join(problems)}. "
            "Check that config and weights belong together"
        )


def folded(lines: Iterable[str], at_least: int = 9) -> list[str]:
    """Lines that differ in the layer number alone become one, `model.layers.{0-79}.…`, from `at_least` on."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for line in lines:
        match = re.search(r"layers\.(\d+)\.", line)
        key = line if match is None else f"{line[: match.start(1)]}{{}}{line[match.end(1) :]}"
        groups.setdefault(key, []).append((int(match.group(1)) if match else 0, line))
    result: list[str] = []
    for key, members in groups.items():
        if len(members) < at_least:
            result += [line for _, line in members]
        else:
            result.append(key.replace("{}", "{" + _ranges([number for number, _ in members]) + "}", 1))
    return result


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
