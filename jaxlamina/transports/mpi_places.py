"""MPI's communicators, types and operations by their places in a table, so that a program that calls MPI is
good for other processes, too.

mpi4jax writes into a program how MPI calls them in this process: addresses, with Open MPI. Here a program
that was lowered gets their places instead. It calls a function of the native library
(`pallas_kernels/native/forward.cc`), which looks them up and goes on to mpi4jax's own. Knows no message.
"""

from __future__ import annotations

import copyreg
import ctypes
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from jaxlamina.transports.exchanges import OURS
from pallas_kernels import compat, cpu

_CALLS = ("mpi_send", "mpi_recv", "mpi_sendrecv", "mpi_allreduce")
_TYPES = (
    "FLOAT", "DOUBLE", "INT8_T", "INT16_T", "INT32_T", "INT64_T",
    "UINT8_T", "UINT16_T", "UINT32_T", "UINT64_T",
)  # fmt: skip
_BY_PLACE = ("comm", "dtype", "sendtype", "recvtype", "op")


class MpiPlaces:
    """For programs of ``device`` that use these communicators, in this order, and sums."""

    def __init__(self, device: jax.Device, communicators: Sequence[Any]) -> None:
        """`LookupError` that says why there are no such programs: mpi4jax writes for this device in another
        way, or there is no native library."""
        from mpi4jax._src import decorators, utils, xla_bridge
        from mpi4py import MPI

        library = cpu.loaded().library
        if library is None:
            raise LookupError(cpu.loaded().reason)
        platform = {"gpu": "cuda"}.get(device.platform, device.platform)
        bridge = getattr(xla_bridge, f"mpi_xla_bridge_{platform}", None)
        if bridge is None or not set(_CALLS) <= bridge.ffi_targets.keys():
            raise LookupError(f"mpi4jax has no calls for {platform} that are known here")
        if platform == "cuda":
            # Whether MPI takes a GPU's memory: mpi4jax tells its calls when it first lowers one. A process
            # whose programs all come from disk lowers none, and MPI would read that memory as the host's.
            decorators.setup_cuda_mpi()
        self.made_by = MPI.Get_library_version(), metadata.version("mpi4jax")
        values = [x.handle for x in (*communicators, *(getattr(MPI, name) for name in _TYPES), MPI.SUM)]
        self._places = {_signed(x): place for place, x in reversed([*enumerate(values)])}
        self._handlers = {f"{name}_ffi": len(values) + i for i, name in enumerate(_CALLS)}
        values += [_address(bridge.ffi_targets[name]) for name in _CALLS]
        library.jaxlamina_forward_place.argtypes = [ctypes.c_int, ctypes.c_int64]
        for place, value in enumerate(values):
            library.jaxlamina_forward_place(place, _signed(value))
        forward = jax.ffi.pycapsule(library.jaxlamina_forward)
        for name in self._handlers:
            jax.ffi.register_ffi_target(
                OURS + name, forward, platform={"cuda": "CUDA"}.get(platform, platform)
            )
        # One that was read from a file is this process's own: programs are ordered by which effect it is.
        copyreg.pickle(type(utils.ordered_effect), lambda _: "ordered_effect")

    def put_into(self, lowered: jax.stages.Lowered) -> None:
        """Changes what was lowered. `LookupError` for a call that has something else."""
        ir = compat.ir
        module: Any = lowered.compiler_ir("stablehlo")

        def put(operation: Any) -> Any:
            attributes = operation.attributes
            if operation.name == "stablehlo.custom_call":
                name = ir.StringAttr(attributes["call_target_name"]).value
                if name in self._handlers:
                    said = {x.name: x.attr for x in ir.DictAttr(attributes["mhlo.backend_config"])}
                    said |= {
                        key: self._place(ir.IntegerAttr(said[key]).value) for key in said.keys() & _BY_PLACE
                    }
                    said["to"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), self._handlers[name])
                    attributes["mhlo.backend_config"] = ir.DictAttr.get(said)
                    attributes["call_target_name"] = ir.StringAttr.get(OURS + name)
            return ir.WalkResult.ADVANCE

        with module.context:
            module.operation.walk(put)

    def _place(self, value: int) -> Any:
        ir = compat.ir
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(32), self._places[value])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _address(capsule: Any) -> int:
    get, name = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    found: int = get(capsule, name(capsule))
    return found
