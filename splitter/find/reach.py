"""How far along a row a mask must be looked at to know all of it: beyond every number that places are
compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels import compat
from splitter.find.facts import Facts

COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_LINEAR = frozenset(
    [
        *COMPARED, "iota", "add", "sub", "neg", "and", "or", "not", "xor", "select_n", "broadcast_in_dim",
        "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "slice", "max", "min",
        "copy", "stop_gradient",
    ]
)  # fmt: skip


def largest_compared(facts: Facts, wanted: Sequence[Any]) -> float | None:
    """The largest number that sums and differences of places are compared with: beyond it a mask goes on as
    it is. None where it is made of anything else, such as a table, a product, or places in few bits."""
    most = 0.0
    # Of each value, the sum of all numbers that it is made of, and whether it depends on places.
    made_of: dict[Any, tuple[float, bool]] = {facts.learned.jaxpr.invars[-1]: (0.0, True)}
    for v in facts.learned.jaxpr.constvars:
        if max(compat.like_of(v).shape, default=0) <= 1:
            made_of[v] = (_size(facts.learned.const(facts.learned.jaxpr.constvars.index(v), 1)), False)
    for p in facts.needed(wanted):
        eqn = facts.eqns[p]
        name = eqn.primitive.name
        known = [
            (_size(a.val), False) if isinstance(a, compat.Literal) else made_of.get(a) for a in eqn.invars
        ]
        of = [x for x in known if x is not None]
        places = name == "iota" or any(x[1] for x in of)
        if len(of) < len(known) or name not in _LINEAR or (places and _loses(eqn)):
            return None
        sizes = [x[0] for x in of]
        size = sum(sizes) if name in ("add", "sub", *COMPARED) else max(sizes, default=0.0)
        if name in COMPARED:
            most, size, places = max(most, size if places else 0.0), 1.0, False
        made_of.update(dict.fromkeys(eqn.outvars, (size, places)))
    return most


def _size(x: Any) -> float:
    x = np.abs(np.asarray(x, np.float64))
    return float(np.where(np.isfinite(x), x, 0).max(initial=0))  # nothing is beyond the infinite


def _loses(eqn: compat.JaxprEqn) -> bool:
    """Whether places are no longer themselves: in few bits, their bits, or counted from another."""
    p, name = eqn.params, eqn.primitive.name
    if name == "slice":
        return any(p["start_indices"]) or any(s != 1 for s in p["strides"] or ())
    dtypes = [np.dtype(compat.like_of(v).dtype) for v in (*eqn.invars, *eqn.outvars)]
    if name in ("and", "or", "not", "xor"):
        return any(d.kind != "b" for d in dtypes)
    return any(d.kind != "b" and d.itemsize < 4 for d in dtypes)
