"""What a split came to, as plain data: slices, what crosses each cut, what the two pools exchange.

Knows nothing of how it is shown; the CLI prints it, `draw` draws it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pallas_kernels import compat

if TYPE_CHECKING:
    from splitter.slices import SplitModel


@dataclass(frozen=True)
class ContextValue:
    """One value that crosses a cut on the model worker: where it comes from, its shape and dtype, its bytes.

    name: the input's name, or the operator that made the value; `is_input` tells which.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    is_input: bool

    def text(self) -> str:
        """E.g. `positions int32[1, 1]`; a computed value shows its type alone."""
        typed = f"{self.dtype}{list(self.shape)}"
        return f"{self.name} {typed}" if self.is_input else typed


@dataclass(frozen=True)
class CutReport:
    """One attention operator and the cut at it. Bytes are for the whole batch of the trace."""

    attention: str
    context: tuple[ContextValue, ...]
    context_bytes: int
    q_bytes: int
    kv_bytes: int
    out_bytes: int

    @property
    def exchanged_bytes(self) -> int:
        """Bytes between the pools at this operator: q, k, v one way, the output back."""
        return self.q_bytes + self.kv_bytes + self.out_bytes


@dataclass(frozen=True)
class SplitReport:
    """A split model in numbers.

    n_tokens: tokens in the traced step (batch size times tokens a request), to which all bytes belong.
    aux_outputs, state_outputs: outputs that depend on no attention (computed beside slice 0), and those that
    are the attention side's state.
    """

    n_attention: int
    n_slices: int
    n_programs: int
    n_tokens: int
    cuts: tuple[CutReport, ...]
    aux_outputs: tuple[str, ...]
    state_outputs: tuple[str, ...]

    @property
    def exchanged_bytes(self) -> int:
        """Bytes between the pools in one step."""
        return sum(c.exchanged_bytes for c in self.cuts)

    @property
    def exchanged_bytes_per_token(self) -> float:
        """Bytes between the pools for each token of the step."""
        return self.exchanged_bytes / self.n_tokens

    def line(self) -> str:
        """One line for people: how many slices, and what crosses each cut."""
        seen: dict[str, int] = {}
        for c in self.cuts:
            values = " + ".join(v.text() for v in c.context) or "nothing"
            text = f"{values} ({c.context_bytes:,} bytes)"
            seen[text] = seen.get(text, 0) + 1
        crossing = "; ".join(f"{text} at {n} of {len(self.cuts)} cuts" for text, n in seen.items())
        if len(seen) == 1:
            crossing = f"{next(iter(seen))} at every cut"
        elif len(seen) > 4:
            sizes = sorted(c.context_bytes for c in self.cuts)
            crossing = f"{sizes[0]:,} to {sizes[-1]:,} bytes a cut"
        return (
            f"{self.n_slices} slices ({self.n_programs} distinct programs) at {self.n_attention} attention "
            f"operators; context kept at a cut: {crossing}; exchanged with the memory pool: "
            f"{self.exchanged_bytes_per_token:,.0f} bytes a token (q, k, v out, attention back)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {
            "exchanged_bytes": self.exchanged_bytes,
            "exchanged_bytes_per_token": self.exchanged_bytes_per_token,
        }


def make_report(model: SplitModel) -> SplitReport:
    """The report of a split model; its cuts' values in the order in which the next slice takes them."""
    a, traced = model.analysis, model.traced
    names = dict(zip(traced.jaxpr.invars[traced.n_params :], traced.input_names, strict=True))

    def value(v: Any) -> ContextValue:
        name = names[v] if v in names else _describe(a.eqns[a.producer[v]])
        return ContextValue(name, tuple(v.aval.shape), str(v.aval.dtype), compat.nbytes(v.aval), v in names)

    cuts = []
    for i, site in enumerate(model.sites):
        context = tuple(value(v) for v in model.slices[i + 1].context_vars)
        cuts.append(
            CutReport(
                attention=site.name,
                context=context,
                context_bytes=sum(c.size_bytes for c in context),
                q_bytes=compat.nbytes(site.q),
                kv_bytes=compat.nbytes(site.k) + compat.nbytes(site.v),
                out_bytes=compat.nbytes(site.out),
            )
        )
    outputs = list(zip(traced.output_names, a.kinds, strict=True))
    q = model.sites[0].q.shape
    return SplitReport(
        n_attention=model.n,
        n_slices=model.n + 1,
        n_programs=model.n_programs,
        n_tokens=max(1, _product(q[:-2])),
        cuts=tuple(cuts),
        aux_outputs=tuple(name for name, kind in outputs if kind == "aux"),
        state_outputs=tuple(name for name, kind in outputs if kind == "state"),
    )


def _describe(eqn: compat.JaxprEqn) -> str:
    stack = compat.name_stack(eqn)
    return f"{stack}/{eqn.primitive.name}" if stack else eqn.primitive.name


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
