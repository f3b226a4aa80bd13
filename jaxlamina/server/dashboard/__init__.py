"""The live page: its files (`page`), the numbers it draws (`state`), and the questions it asks (`routes`).

Its addresses are here, for who needs no more of it.
"""

PAGE = "/dashboard"
STATE = "/dashboard/state"
RECORD, WATCH = "/dashboard/record", "/dashboard/watch"
"""What holds a server up for a moment: asked for by who may operate it."""
