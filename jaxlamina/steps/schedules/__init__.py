"""Who runs what when in a decode step, as data: `make_schedule` makes it, `check` proves it, `bubbles` weighs
it.

`balanced` shares slices out among a pipeline's stages.
"""

from jaxlamina.steps.schedules.check import Bubbles, Shares, bubbles, check
from jaxlamina.steps.schedules.stages import balanced
from jaxlamina.steps.schedules.staggered import (
    MODES,
    AttentionRun,
    Durations,
    LocalRun,
    Migration,
    Operator,
    PoolExchange,
    Schedule,
    SliceRun,
    make_schedule,
)

__all__ = [
    "MODES",
    "AttentionRun",
    "Bubbles",
    "Durations",
    "LocalRun",
    "Migration",
    "Operator",
    "PoolExchange",
    "Schedule",
    "Shares",
    "SliceRun",
    "balanced",
    "bubbles",
    "check",
    "make_schedule",
]
