"""What outlives a serving job: the API's port, the requests and their tokens so far, and the job's life.

`jaxlamina serve --supervise` is a small process that runs the server proper, over ranks or not, as a process
below it, at a Unix socket of its own. Whatever of that dies or falls silent, the job is started again, every
request goes on after the tokens that it had, and its client sees a pause. Knows HTTP and processes; nothing
of models and steps, and no JAX.

`journal` keeps requests on disk, `child` the job's processes, `leaving` waits for their end, `requests` has
each request through all processes that work at it, `front` is what clients see, and `run` puts them together.
"""
