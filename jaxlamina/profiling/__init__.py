"""Timelines of a job: what each rank's device does when, by slice, layer and staggered batch.

`collect` records on a rank, `scopes` and `spans` make sense of it, `timeline` puts the ranks together,
`perfetto` writes.
"""

from jaxlamina.profiling.spans import Event, Span
from jaxlamina.transports.scopes import KINDS, Kind, Scope

__all__ = ["KINDS", "Event", "Kind", "Scope", "Span"]
