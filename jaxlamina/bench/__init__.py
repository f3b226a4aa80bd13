"""Measurements that the project's claims rest on: `jaxlamina bench split` and `jaxlamina bench decode`.

Every bench prints what it measured and against which limit, and ends with one line of JSON. Nothing here is imported
by the rest of the package but by the command line.
"""
