"""The text of a compiled program (``compiled.as_text()``) as instructions.

Pure text in, plain data out. Knows how HLO is written, by CPUs and by GPUs; knows no JAX, and not what an
instruction is for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT\s+)?%?([\w.\-]+) = ")
_BRACKET = re.compile(r"[()\[\]{}]")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_LAYOUT = re.compile(r"\]\{([\d,]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')

_DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"s{n}": f"int{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (2, 4, 8, 16, 32, 64)},
    "c64": "complex64",
    "c128": "complex128",
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """``shape``: as it is written, with layouts. ``rest``: the line from the bracket of its operands on; most
    are never looked into."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def arrays(self) -> list[tuple[tuple[int, ...], str]]:
        """The shapes and dtypes of its arrays: a tuple's all, in order; no tokens."""
        found = ((dtype, sizes) for dtype, sizes in _ARRAY.findall(self.shape) if dtype != "token")
        return [
            (tuple(int(n) for n in sizes.split(",") if n), _DTYPES.get(t, t.replace("f8", "float8_", 1)))
            for t, sizes in found
        ]

    @property
    def layouts(self) -> list[list[int]]:
        """Of its arrays the dimensions from that with neighbours in memory on, where they are written."""
        return [[int(n) for n in found.split(",")] for found in _LAYOUT.findall(self.shape)]

    @property
    def operands(self) -> list[str]:
        """Names of instructions of the same computation."""
        inside = self.rest[1 : _end(self.rest, 0) - 1]
        return [part.split()[-1].lstrip("%") for part in _parts(inside) if part.strip()]

    @property
    def attributes(self) -> str:
        """All that is written after its operands."""
        return self.rest[_end(self.rest, 0) :]

    @property
    def op_name(self) -> str | None:
        """The path of the JAX function that it was traced in, such as
        ``jit(step)/slice.3.batch.0/dot_general``."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else None

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations in these attributes, in the order of the text."""
        found = re.findall(rf"[,\s](?:{'|'.join(attributes)})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest)
        names = (name.strip().lstrip("%") for text in found for name in text.strip("{}").split(","))
        return [name for name in names if name]


@dataclass(frozen=True)
class Module:
    """A program. Instructions are in the order of the text, which is that of execution if
    ``is_scheduled``."""

    name: str
    is_scheduled: bool
    entry: str
    computations: dict[str, list[Instruction]]

    def instructions(self) -> Iterator[Instruction]:
        """Of all computations."""
        for instructions in self.computations.values():
            yield from instructions


@lru_cache(maxsize=1)  # several questions about one text come in a row
def read_module(hlo: str) -> Module:
    """``ValueError`` if the text is not of a compiled program."""
    first = re.match(r"HloModule ([\w.\-]+).*", hlo)
    if not first:
        raise ValueError("the text must be of a compiled program: compiled.as_text() of a jitted function")
    computations: dict[str, list[Instruction]] = {}
    entry: str | None = None
    current: list[Instruction] | None = None
    for line in hlo.splitlines()[1:]:
        if line[:1].isspace():
            if current is not None and (instruction := _instruction(line)):
                current.append(instruction)
        elif header := _HEADER.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        else:
            current = None
    if entry is None:
        raise ValueError("the text holds no ENTRY computation")
    return Module(first[1], "is_scheduled=true" in first[0], entry, computations)


def _instruction(line: str) -> Instruction | None:
    start = _INSTRUCTION.match(line)
    if not start:
        return None
    at = _end(line, start.end()) if line[start.end()] == "(" else line.find(" ", start.end())
    opcode = _OPCODE.match(line, at)
    if at < 0 or not opcode:
        return None
    return Instruction(start[1], line[start.end() : at], opcode[1], line[opcode.end() - 1 :])


def _end(line: str, at: int) -> int:
    """Where the bracket that opens at ``at`` is closed, one past it."""
    depth = 0
    for found in _BRACKET.finditer(line, at):
        depth += 1 if found[0] in "([{" else -1
        if depth == 0:
            return found.end()
    return len(line)


def _parts(text: str) -> Iterator[str]:
    """Split at commas outside brackets, without comments."""
    text = re.sub(r"/\*.*?\*/", "", text)
    depth = start = 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]
