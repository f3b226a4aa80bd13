"""How ranks get their roles. Today: `roles`, the map from rank to pool for DOP (a, b). Starts no process yet."""

from launch.roles import Pools, Role

__all__ = ["Pools", "Role"]
