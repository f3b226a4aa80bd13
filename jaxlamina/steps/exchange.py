"""A message of a compiled program, as ranks compare them before a step is run. Pure data."""

from __future__ import annotations

from typing import Literal

import msgspec


class Exchange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor that a program sends to or receives from another rank; "all" is a collective of all ranks,
    peer -1. What is "put" into a peer's memory and there taken ("take") is an exchange for which the sender
    does not wait."""

    op: Literal["send", "recv", "all", "put", "take"]
    peer: int
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        what = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.op == "all":
            return f"collective of all ranks on {what}"
        sends = self.op in ("send", "put")
        return f"{'send' if sends else 'receive'} {what} {'to' if sends else 'from'} rank {self.peer}"
