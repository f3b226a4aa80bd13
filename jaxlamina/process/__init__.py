"""What a process has: caches, compiled programs, memory, GPUs and the garbage collector. Knows no model and
no request."""
