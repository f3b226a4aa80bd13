"""What one partial-attention kernel is: shapes, storage, scoring, and how it is laid over a GPU and its
shared memory.

Plain data and arithmetic on it; knows no instruction and no array but by its shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pallas_kernels.gpu.plan import PlanLayout

LOG2E = math.log2(math.e)
# Stands in for a maximum of -inf, so that no -inf is subtracted from itself.
LOWEST = -1e30
LINE = 128  # bytes of shared memory's 32 banks
SWIZZLE_PERIOD = 8 * LINE
TOKENS = 16  # of a warp's product: rows of its left operand
QUERIES = 8  # columns of its right operand
MOST_QUERIES = 16  # that a warp takes through the keys at once
FEW_HEADS = 3  # of a CTA, from which on their rows are read fast enough
ORDERS = 8  # tiles that are planned ahead
ORDER_WORDS = 5


@dataclass(frozen=True)
class Tuning:
    """How the kernel is laid over a GPU.

    `n_ctas` CTAs of `n_warps` warps that compute (a multiple of 4) and 4 more, of which one plans and two
    copy; `n_stages` tiles a ring.
    """

    n_ctas: int = 132
    n_warps: int = 8
    n_stages: int = 3

    def __post_init__(self) -> None:
        if self.n_ctas < 1:
            raise ValueError(f"{self.n_ctas=} must be at least 1")
        if self.n_warps < 4 or self.n_warps % 4:
            raise ValueError(f"{self.n_warps=} must be a positive multiple of 4, a warp group")
        if self.n_stages < 2:
            raise ValueError(f"{self.n_stages=} must be at least 2: one tile in use and one on its way")


@dataclass(frozen=True)
class Spec:
    """One kernel: shapes (axis letters as everywhere), storage kind "bf16", "f16" or "int8", and scoring.

    `slot_scales`: int8 with a bfloat16 scale a slot and KV head. `positions`: queries have positions of their
    own (else they follow the stored tokens); `first` in the plan then bounds what the window leaves to any of
    them.
    """

    B: int
    Tq: int
    N: int
    K: int
    H: int
    C: int
    kind: str
    scale: float
    window: int | None
    softcap: float | None
    slot_scales: bool
    positions: bool
    tuning: Tuning

    @property
    def G(self) -> int:
        return self.N // self.K

    @property
    def product(self) -> str:
        return "bf16" if self.kind == "bf16" else "f16"

    @property
    def row_bytes(self) -> int:
        """Of one token and KV head."""
        return self.H * (1 if self.kind == "int8" else 2)

    @property
    def token_bytes(self) -> int:
        """Of one token's row of all the CTA's heads."""
        return self.heads_at_once * self.row_bytes

    @property
    def swizzled(self) -> bool:
        """Whether a token's row is whole lines of 128 bytes, and is copied as such.

        The copy engine then writes line by line, and exchanges a line's 16-byte pieces by the line's number,
        so that eight rows of a matrix lie in different banks. Other rows are moved apart by 16 bytes to that
        end, which costs the engine a tenth of its speed: it cuts every line in two.
        """
        return self.token_bytes % LINE == 0

    @property
    def pitch_bytes(self) -> int:
        """From one token to the next in shared memory."""
        return self.token_bytes + (LINE if self.swizzled else 16)

    @property
    def tile_bytes(self) -> int:
        return -(-self.tile_tokens * self.pitch_bytes // SWIZZLE_PERIOD) * SWIZZLE_PERIOD

    @property
    def stage_bytes(self) -> int:
        """Keys, then values."""
        return 2 * self.tile_bytes

    @property
    def barrier_bytes(self) -> int:
        """Two barriers a half stage and two an order, then the orders; all after the ring."""
        return 32 * self.tuning.n_stages + 16 * ORDERS + ORDERS * self.order_bytes

    @property
    def order_bytes(self) -> int:
        return 4 * (ORDER_WORDS + self.tile_tokens)

    @property
    def shared_bytes(self) -> int:
        """The ring begins where a swizzle's period does, which may not be where the array does."""
        return SWIZZLE_PERIOD + self.tuning.n_stages * self.stage_bytes + self.barrier_bytes

    @property
    def heads_at_once(self) -> int:
        """KV heads a CTA takes: the most that divide K. Where these are few, such as 1 of 13, as many as make
        the fewest groups of one size, of which the last two overlap.

        Short rows are read slowly, and what two groups have is read twice (docs/benchmarks.md has both
        speeds). A group begins at any head where a head's row is whole lines.
        """
        most = min(self.tuning.n_warps, self.K)
        dividing = max(h for h in range(1, most + 1) if self.K % h == 0)
        if dividing >= FEW_HEADS or dividing == self.K or self.row_bytes % LINE:
            return dividing
        return -(-self.K // -(-self.K // most))

    @property
    def head_groups(self) -> int:
        return -(-self.K // self.heads_at_once)

    def first_head(self, w: Any, group: Any) -> Any:
        """Of a group: the last one ends with the last head."""
        first = group * self.heads_at_once
        return first if self.K % self.heads_at_once == 0 else w.minimum(first, self.K - self.heads_at_once)

    @property
    def ways(self) -> int:
        """Warps that share a head of a CTA, each with its 16 tokens of a tile."""
        return self.tuning.n_warps // self.heads_at_once

    @property
    def blocks(self) -> int:
        """Blocks of 8 queries that a warp takes through the keys at once."""
        return 1 if self.G * self.Tq <= QUERIES else MOST_QUERIES // QUERIES

    @property
    def row_groups(self) -> int:
        """Groups of queries of one KV head."""
        return -(-self.G * self.Tq // (QUERIES * self.blocks))

    @property
    def items_per_request(self) -> int:
        return self.head_groups * self.row_groups

    @property
    def rows(self) -> int:
        """Rows of a partial that are kept."""
        return min(QUERIES * self.blocks, self.G * self.Tq)

    @property
    def tile_tokens(self) -> int:
        return TOKENS * self.ways

    @property
    def layout(self) -> PlanLayout:
        return PlanLayout(self.B, self.items_per_request, self.tuning.n_ctas)

    @property
    def partial_shape(self) -> tuple[int, int, int, int]:
        """[partials, ways, heads of a CTA, rows]; outputs have H after it."""
        return self.layout.n_partials, self.ways, self.heads_at_once, self.rows


@dataclass(frozen=True)
class Memory:
    """Addresses of the arrays; `None` where the spec has none."""

    q: Any  # [B, Tq, N, H] bf16 or f16
    k: Any  # [S, K, H]
    v: Any
    k_lines: Any  # [S, K * row bytes / 128, 128 bytes]: the same as the copy engine sees it
    v_lines: Any
    k_scales: Any  # [S, K] bf16
    v_scales: Any
    table: Any  # [B, C] i32
    plan: Any  # i32
    q_positions: Any  # [B, Tq] i32
    out: Any  # partials, float32
    lse: Any  # their log2 of the softmax mass, float32
