"""Python's garbage collection while steps are run: what lives as long as the process is not looked through again and again.

A traced and compiled model is some hundred thousand Python objects. Going through them takes a tenth of a second or more, in
which no step is launched, and Python does so whenever enough has been made since.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Leaves what there is out of collections to come, once what is garbage of it is gone. For a process that runs steps and
    nothing else: cycles among what there is are not found any more."""
    gc.collect()
    gc.freeze()


def unsettle() -> None:
    """Before what there was is given up for something else."""
    gc.unfreeze()
