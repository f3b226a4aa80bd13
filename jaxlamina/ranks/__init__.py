"""A job over real ranks: model ranks, attention ranks and prefill workers, each a process with one program a
step.

`join` makes this process rank 0 and gives its `Group`, for `jaxlamina.LLM(group=…)`; `serve` makes it one of
the others until rank 0 is done. Who starts the processes is `launch`'s affair.
"""

from jaxlamina.job.group import Group, current, join
from jaxlamina.ranks.serve import serve

__all__ = ["Group", "current", "join", "serve"]
