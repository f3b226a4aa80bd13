"""The Mosaic GPU kernel: a warp's program, what it runs on (a GPU, or numpy), and the plan that deals out
work."""
