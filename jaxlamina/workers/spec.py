"""What a layer's attention is like, as both pools and those who count bytes need it. Knows no arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32

from jaxlamina.errors import UserError
from jaxlamina.steps.buckets import Cut
from pallas_kernels.dispatch import candidates, why_not
from splitter import AttentionSite

KVDType = Literal["auto", "int8", "int8-channel", "int8-channel-asymmetric"]
KV_DTYPES: tuple[str, ...] = get_args(KVDType)
CALIBRATED_KV_DTYPES = ("int8-channel", "int8-channel-asymmetric")  # with fixed scales


class ChannelScales(NamedTuple):
    """Fixed scales of one layer's int8 K and V pools, and zero points where they are not 0 (ALISA §V.B);
    None for other storage."""

    k: Float32[Array, "K H"] | None
    v: Float32[Array, "K H"] | None
    k_zeros: Float32[Array, "K H"] | None = None
    v_zeros: Float32[Array, "K H"] | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention is like: heads, and how scores are made. Equal specs share their programs.

    ``kv``: how KV is stored. "auto" as the model's ``dtype``; "int8" with a scale for each slot and KV head;
    "int8-channel" with a fixed scale a channel, "int8-channel-asymmetric" with a fixed zero point a channel,
    too.
    """

    n_kv_heads: int
    head_dim: int
    dtype: np.dtype
    scale: float
    window: int | None
    softcap: float | None
    kv: str = "auto"

    @classmethod
    def of(cls, site: AttentionSite, kv: str = "auto") -> AttentionSpec:
        """``UserError`` for an operator other than ``splitter.attention``: its mask is not known here."""
        if site.scale is None:
            raise UserError(
                f"attention {site.index} ({site.name}) is a {site.kind}; this runtime runs "
                f"splitter.attention operators: call that in the model"
            )
        if kv not in KV_DTYPES:
            raise UserError(f"kv_dtype={kv!r} must be one of {', '.join(KV_DTYPES)}")
        _, _, n_kv_heads, head_dim = site.k.shape
        return cls(n_kv_heads, head_dim, np.dtype(site.k.dtype), site.scale, site.window, site.softcap, kv)

    @property
    def kv_dtype(self) -> np.dtype:
        """What K and V are stored as."""
        return self.dtype if self.kv == "auto" else np.dtype(np.int8)

    @property
    def rounds(self) -> bool:
        """Whether K and V lose bits as they are stored."""
        return self.kv != "auto"

    @property
    def by_channel(self) -> bool:
        """Whether int8 has fixed scales, which must be calibrated."""
        return self.kv in CALIBRATED_KV_DTYPES

    @property
    def zero_points(self) -> tuple[bool, bool]:
        """Whether keys, and values, have fixed zero points. Not keys whose scores are capped: softmax would
        change."""
        asymmetric = self.kv == "int8-channel-asymmetric"
        return asymmetric and self.softcap is None, asymmetric

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's K and V in this layer, scales a slot included."""
        scale_bytes = jnp.dtype(jnp.bfloat16).itemsize if self.kv == "int8" else 0
        return 2 * self.n_kv_heads * (self.head_dim * self.kv_dtype.itemsize + scale_bytes)

    @property
    def scoring(self) -> dict[str, Any]:
        """The keyword arguments that the attention functions of ``pallas_kernels`` take."""
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap}


def specs_of(sites: Iterable[AttentionSite], kv: str, heads_over: int = 1) -> tuple[AttentionSpec, ...]:
    """Of a model's attention operators; of all heads, where these have one of ``heads_over`` equal shares of
    them. ``UserError`` as `AttentionSpec.of`."""
    own = (AttentionSpec.of(site, kv) for site in sites)
    return tuple(replace(spec, n_kv_heads=heads_over * spec.n_kv_heads) for spec in own)


def windows_of(specs: Sequence[AttentionSpec]) -> list[int]:
    """The sliding windows that there are among a model's attention operators."""
    return sorted({spec.window for spec in specs if spec.window is not None})


def bucket_cut(specs: Iterable[AttentionSpec], device: jax.Device, *, whole_steps: bool = True) -> Cut:
    """How finely sizes are cut for attention that runs on ``device``: the Mosaic GPU kernel and XLA on a CPU
    look at the tokens that there are, others at all that there is room for. ``whole_steps``: whether a step
    is one program, compiled in seconds, or its slices are programs of their own."""
    if device.platform == "cpu":
        return "few"
    if candidates(device)[0] == "mosaic_gpu" and all(map(_suits_mosaic_gpu, specs)):
        return "doubling"
    return "coarse" if whole_steps else "fine"


def _suits_mosaic_gpu(spec: AttentionSpec) -> bool:
    heads = (1, spec.n_kv_heads, spec.head_dim)
    q = jax.ShapeDtypeStruct((1, *heads), spec.dtype)
    pool = jax.ShapeDtypeStruct(heads, spec.kv_dtype)  # it is looked at for its values' dtype alone
    return why_not("mosaic_gpu", q, pool, return_mass=False) is None
