"""What a step is: its rows as padded arrays, and the sizes its programs are compiled for. Pure: no device, no
model, no rank.

Import from the modules: `step` (what an executor is asked to run), `batch` (rows as arrays), `shape` (sizes).
"""
