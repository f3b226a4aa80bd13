"""The instruction sets of native kernels, for tests that run with each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pallas_kernels import cpu


@pytest.fixture(name="level", params=["avx512", "avx2", "sse2", "neon", "portable"])
def each_level(request: Any) -> Iterator[str]:
    """Each instruction set that this processor has, in turn."""
    library, before = cpu.loaded().library, cpu.instructions()
    assert library is not None
    if library.jaxlamina_instructions(request.param.encode()) is None:
        pytest.skip(f"this processor, or the library, has no {request.param}")
    yield request.param
    library.jaxlamina_instructions(before.encode())
