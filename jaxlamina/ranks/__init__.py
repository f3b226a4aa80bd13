"""A job over real ranks: model ranks, attention ranks and prefill workers, each a process with one program a step.

`join` makes this process rank 0 and gives its `Group`, for `jaxlamina.LLM(group=…)`; `serve` makes it one of the others
until rank 0 is done. Who starts the processes is `launch`'s affair.
"""

from jaxlamina.ranks.attention_rank import serve
from jaxlamina.ranks.executor import RanksExecutor
from jaxlamina.ranks.group import Group, current, join

__all__ = ["Group", "RanksExecutor", "current", "join", "serve"]
