"""Every JAX version difference and every import of `jax.extend` or `jax._src`, in one place.

JAX 0.10.2 has `ClosedJaxpr` beside `Jaxpr`; from 0.11 they are one class. The rest of the project asks the
functions below and never looks at the version itself. Knows nothing of attention, models or slices.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.util
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import config, source_info_util
from jax._src.lib import cuda_versions
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir, partial_eval

Primitive = jex_core.Primitive
Literal = jex_core.Literal
Var = jex_core.Var
JaxprEqn = jex_core.JaxprEqn
Jaxpr = jex_core.Jaxpr
Atom: TypeAlias = Var | Literal
ShapedArray = jax.core.ShapedArray

# Whether a Mosaic GPU kernel may write to what it is given (`jax.new_ref`): JAX 0.10 loses the write on the
# way.
KERNELS_WRITE_ARGUMENTS = jax.__version_info__ >= (0, 11)

# XLA's options for a program on a CPU that is compiled for longer than it runs. JAX 0.10 can be told to emit
# fusions without MLIR, which takes two thirds of what is left; newer ones end at an option they do not know.
COMPILED_QUICKLY: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": "1",
}
if jax.__version_info__ < (0, 11):
    COMPILED_QUICKLY["xla_cpu_use_fusion_emitters"] = False

# What the GPU kernels emit instructions with: a tenth of a second to import, and for nobody else.
arith: Any
ir: Any
llvm: Any
scf: Any
_MLIR = {"ir": "jaxlib.mlir.ir"} | {name: f"jaxlib.mlir.dialects.{name}" for name in ("arith", "llvm", "scf")}


def __getattr__(name: str) -> Any:
    if name not in _MLIR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(_MLIR[name])


_JAXPR_TYPES = (jex_core.Jaxpr, jex_core.ClosedJaxpr)


def is_jaxpr(x: object) -> bool:
    """Whether `x` is a jaxpr, closed over its constants or not."""
    return isinstance(x, _JAXPR_TYPES)


def open_jaxpr(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """A jaxpr and the values of its constants; a jaxpr without constants gives an empty tuple.

    From 0.11 there is one class, which has both `.jaxpr` and `.consts`; in 0.10.2 only the closed one has.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return inner, tuple(getattr(jaxpr, "consts", ()))


def without_dead(jaxpr: Any) -> Any:
    """A jaxpr without the equations that its results do not need, in nested jaxprs, too; of the same
    arguments."""
    return partial_eval.dce_jaxpr(jaxpr, True, instantiate=True)[0]


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """The jaxprs in an equation's parameters (a `jit`'s body, a `cond`'s branches, …)."""
    for value in eqn.params.values():
        for leaf in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(leaf):
                yield leaf


def bind_eqn(eqn: JaxprEqn, args: Sequence[Any], changed: Mapping[str, Any] | None = None) -> list[Any]:
    """Run one equation on `args` as `jax.core.eval_jaxpr` does; always a list of results.

    The equation's own context (compute type, partitioning) and source position are kept. ``changed``:
    parameters in place of the equation's own.
    """
    params = eqn.primitive.get_bind_params({**eqn.params, **changed} if changed else eqn.params)
    with context_of(eqn):
        out = eqn.primitive.bind(*args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


@contextlib.contextmanager
def context_of(eqn: JaxprEqn) -> Iterator[None]:
    """What is traced inside counts as the equation's: its names, its source position, its context."""
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    # What a library's function holds has no line of the user's: it counts as its caller's.
    own = info.traceback if source_info_util.user_frame(info.traceback) else _caller.get() or info.traceback
    with source_info_util.user_context(own, name_stack=name_stack), eqn.ctx.manager:
        yield


_caller: contextvars.ContextVar[Any] = contextvars.ContextVar("caller", default=None)


@contextlib.contextmanager
def called_by(eqn: JaxprEqn) -> Iterator[None]:
    """Equations of a call's body that are run inside count as the call's where they have no line of their
    own."""
    info = eqn.source_info
    token = _caller.set(info.traceback if source_info_util.user_frame(info.traceback) else _caller.get())
    try:
        yield
    finally:
        _caller.reset(token)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a `scan` equation's operands are constants, and how many are carried; the rest is scanned
    over."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(list, eqn.params["ft_in"].unpack())
    return len(consts), len(carry)


def where(eqn: JaxprEqn) -> str:
    """`file:line (function)` of the user's code that made an equation, with its name stack where there is
    one. Flax's own lines are passed over for those that call it."""
    frames = [*source_info_util.user_frames(eqn.source_info.traceback)]
    own = [f for f in frames if not f.file_name.startswith(_flax_folder())] or frames
    places = [f"{f.file_name}:{f.start_line} ({f.function_name})" for f in own[:1]]
    stack = str(eqn.source_info.name_stack)
    return " ".join([*places, *([f"[{stack}]"] if stack else [])]) or "a line that JAX does not tell"


def where_raised(error: BaseException) -> str:
    """`file:line (function)` of the innermost line of the user's that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if source_info_util.is_user_filename(f.filename)]
    last = ([f for f in own if not f.filename.startswith(_flax_folder())] or own or frames)[-1]
    return f"{last.filename}:{last.lineno} ({last.name})"


@lru_cache(maxsize=1)
def _flax_folder() -> str:
    spec = importlib.util.find_spec("flax")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else "no flax"


def name_stack(eqn: JaxprEqn) -> str:
    """The `jax.named_scope` path of an equation, or an empty string."""
    return str(eqn.source_info.name_stack)


def itemsize_bytes(dtype: jax.typing.DTypeLike) -> float:
    """Bytes of one element. Half a byte for 4-bit types, which NumPy reports as one; keys count their
    words."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return float(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size * 4)
    name = np.dtype(dtype).name
    if name in ("int4", "uint4", "float4_e2m1fn"):
        return 0.5
    if name in ("int2", "uint2"):
        return 0.25
    return float(np.dtype(dtype).itemsize)


_itemsize_bytes = lru_cache(maxsize=64)(itemsize_bytes)


def like_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array-valued variable or constant of a jaxpr."""
    aval: Any = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def nbytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype, rounded up."""
    return math.ceil(math.prod(aval.shape) * _itemsize_bytes(aval.dtype))


def ffi_version() -> int:
    """The version of XLA's FFI that this JAX has: 1000 times the major number, and the minor one. JAX 0.10.2
    has 0.3, and 0.12 has 0.5."""
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (
        int(re.findall(rf"#define XLA_FFI_API_{part} (\d+)", text)[0]) for part in ("MAJOR", "MINOR")
    )
    return 1000 * major + minor


def has_cudnn() -> bool:
    """Whether JAX found cuDNN here."""
    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # JAX's plugin is there, NVIDIA's library is not
        return False


def has_tpu_race(run: Callable[[], object]) -> bool:
    """Whether a Pallas TPU kernel that is interpreted with `detect_races` has one: JAX 0.12 raises, others
    set a flag."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # slow to import, and for tests only

    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        if "RACE DETECTED" not in str(error):
            raise
        return True
    races = interpret_pallas_call.races
    return races is not None and bool(races.races_found)


def not_written_to_cache() -> contextlib.AbstractContextManager[None]:
    """Within it, in this thread, JAX does not write what is compiled to its cache on disk, and reads there as
    ever."""
    return config.persistent_cache_min_compile_time_secs(float("inf"))


def with_effects(compiled: jax.stages.Compiled) -> Callable[..., Any]:
    """Calls of a program with ordered effects, as those of MPI are. When it is called by itself a second
    time, JAX (0.10 to 0.12) leaves out the tokens that order them, and XLA refuses the call."""
    return lambda *args: compiled.call(compiled._params, *args)[0]


def find_gpu_runtime() -> None:
    """Tells XLA where the functions are that Mosaic GPU kernels call, as lowering one does: for programs with
    such kernels that come from disk into a process that has lowered none."""
    import jax.experimental.mosaic.gpu  # noqa: F401


def transposed_ref(ref: Any) -> Any:
    """A two-dimensional reference in a Mosaic GPU kernel with its axes exchanged."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.transpose_ref(ref, (1, 0))


def store_to_gpu(ref: Any, value: Any) -> None:
    """Stores registers to global memory in a Mosaic GPU kernel.

    `ref[...] = value` also reads what was there; JAX 0.12 refuses that where it isn't read in whole sectors.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if (store := getattr(plgpu, "store", None)) is not None:
        store(ref, value, optimized=False)
    else:
        ref[...] = value


def lowered_for_tpu(jitted: jax.stages.Wrapped, *args: Any) -> str:
    """The StableHLO of a jitted function for a TPU v5e, on a machine that has none."""
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return str(jitted.trace(*args).lower(lowering_platforms=("tpu",)).as_text())


def define_primitive(
    name: str,
    run: Callable[..., Any],
    abstract: Callable[..., Any],
    batch: Callable[..., Any],
) -> Primitive:
    """A primitive with one result that runs, compiles, differentiates and batches.

    `run(*arrays, **params)` is its meaning in plain JAX: the lowering, and the derivative, come from it.
    `abstract` gives the result's aval; `batch(args, dims, **params)` follows the batching-rule protocol.
    """
    prim = Primitive(name)

    @prim.def_impl
    def _impl(*args: Any, **params: Any) -> Any:
        return jax.jit(run, static_argnames=tuple(params))(*args, **params)

    prim.def_abstract_eval(abstract)
    mlir.register_lowering(prim, mlir.lower_fun(run, multiple_results=False))

    def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(lambda *xs: run(*xs, **params), tuple(primals), tuple(tangents))

    ad.primitive_jvps[prim] = _jvp
    batching.primitive_batchers[prim] = batch
    return prim


def profile_events(path: str) -> Iterator[tuple[str, str, str, int, int, dict[str, Any]]]:
    """A trace's events: plane, line, name, start and duration in nanoseconds since the trace began, and
    statistics.

    JAX 0.11.2 warns of its own statistics' type when they are read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                for e in line.events:
                    stats: Any = e.stats
                    yield plane.name, line.name, e.name, round(e.start_ns), round(e.duration_ns), dict(stats)
