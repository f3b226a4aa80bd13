"""How ranks get started: `python -m launch` is one rank, `python -m launch.local` starts all of them on this
host.

Knows how processes are started and ended and which rank does what; what a rank does is `jaxlamina.ranks`'.
"""

from launch.roles import Place, Pools, Role, place

__all__ = ["Place", "Pools", "Role", "place"]
