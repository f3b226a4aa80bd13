"""As how many staggered batches decode steps go where that is found by running them (``n_batches="auto"``):
which numbers are tried, and what people are told of what was found.

`jaxlamina.run.staggering` tries them; here it is decided whether there is anything to try, by the weights and
the KV that steps read and by what the cost model predicts. Knows the group, the layout and buckets; no slot
and no program.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxlamina.job.group import Group
from jaxlamina.run.balance import MAY_PAY
from jaxlamina.run.modelled import ModelledSteps
from jaxlamina.run.staggering import Choice
from jaxlamina.steps.layout import Layout
from jaxlamina.workers.model_worker import ModelWorker
from jaxlamina.workers.spec import AttentionSpec
from jaxlamina.workers.workspace import tree_bytes

_log = logging.getLogger("uvicorn.error")  # the server's log


def _say_choice(
    bucket: tuple[int, int], seconds: Mapping[int, float], verb: str = "go", of_what: str = "measured"
) -> None:
    times = ", ".join(f"{1000 * s:.2f} ms as {n}" for n, s in sorted(seconds.items()))
    n = min(seconds, key=seconds.__getitem__)
    as_what = "one batch" if n == 1 else f"{n} staggered batches"
    _log.info("decode steps of batch %d, context %d %s as %s: %s: %s", *bucket, verb, as_what, of_what, times)


_say_begun = partial(_say_choice, verb="begin", of_what="predicted")


class AutoStaggering:
    """``choice``: what tries ``numbers`` of staggered batches out; buckets are (rows, context).
    ``modelled``: predicts steps, where it knows the devices."""

    def __init__(
        self,
        group: Group,
        layout: Layout,
        model: ModelWorker,
        specs: Sequence[AttentionSpec],
        modelled: ModelledSteps | None,
        numbers: Sequence[int],
    ) -> None:
        self._group, self._layout, self._model, self._specs = group, layout, model, specs
        self._modelled = modelled
        self.choice = Choice(
            numbers,
            on_chosen=_say_choice,
            predict=lambda bucket, n_rows: self._predicted_s(*bucket),
            on_begun=_say_begun,
        )

    def candidates(self, n_rows: int, context: int) -> tuple[int, ...]:
        """The numbers that are tried for a step of so many rows and earlier tokens a row."""
        return self.choice.possible(n_rows) if self._may_pay(n_rows, context) else (1,)

    def _predicted_s(self, n_rows: int, context: int) -> Mapping[int, float] | None:
        """Seconds of such a step by how many staggered batches, where the cost model knows them."""
        if self._modelled is None:
            return None
        return self._modelled.by_n_batches(n_rows, context, self.choice.possible(n_rows))

    def _may_pay(self, n_rows: int, context: int) -> bool:
        """Over copies or stages of the model it may. Elsewhere, where steps are predicted, unless one batch
        is predicted to be much faster. Else:

        Staggered batches read all weights once each. On one model worker beside attention workers of its
        kind that pays only where attention, and the exchanges, would be waited for as long: not where all the
        KV that a step can read is less than half of the weights. Over MPI exchanges may take any time: a link
        between hosts may be slow, and staggered batches use both of its directions at once."""
        cluster = self._group.cluster
        if self._layout.n_replicas > 1 or self._layout.stages:
            return True
        predicted = self._predicted_s(n_rows, context)
        if predicted and len(predicted) > 1:
            return min(s for n, s in predicted.items() if n > 1) < MAY_PAY * predicted[1]
        if not cluster.is_one_platform or self._group.transport.name == "mpi":
            return True
        kv_bytes = n_rows * context * sum(spec.slot_bytes for spec in self._specs) / len(self._group.workers)
        return kv_bytes > tree_bytes(self._model.params) / 2

    def found(self) -> list[dict[str, Any]]:
        """Of each bucket what was chosen, by what, and the seconds of a step by number of batches."""
        buckets = []
        for (batch, context), (n, medians) in sorted(self.choice.found().items()):
            predicted = self.choice.predicted((batch, context))
            by = "measurement" if n is not None else "prediction" if predicted else None
            if by == "prediction":
                n = min(predicted, key=predicted.__getitem__)
            times = {"step_s": medians, "predicted_s": dict(predicted)}
            buckets.append({"batch": batch, "context": context, "n_batches": n, "by": by, **times})
        return buckets
