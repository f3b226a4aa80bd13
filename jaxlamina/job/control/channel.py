"""The control channel of a group: rank 0 listens (`ControlServer`), every other rank connects
(`ControlClient`).

It forms the group (all there, all with the same configuration and versions), carries messages both ways, and
makes the first bad news of any rank known to all, once. A ``line`` of bad news is fit to be shown as ``error:
{line}``.
"""

from __future__ import annotations

from jaxlamina.job.control.client import ControlClient, hello_of
from jaxlamina.job.control.faults import ControlError
from jaxlamina.job.control.server import ControlServer

__all__ = ["ControlClient", "ControlError", "ControlServer", "hello_of"]
