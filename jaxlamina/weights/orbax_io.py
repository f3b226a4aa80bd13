"""Orbax checkpoints: the flat dict of a model as one PyTree, config.json and tokenizer.json beside it.

Restoring goes from TensorStore straight to the target device or sharding. Knows the folder's layout
(`params/` is Orbax's own) and nothing of the arrays' meaning.

`params.files.json` lists the sizes of Orbax's files. With a file cut short Orbax fails tensor by tensor in
threads that print tracebacks of their own; the list tells beforehand, in one line. A folder without it loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlamina.dtypes import most_common_dtype
from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig
from jaxlamina.weights.checkpoint import Checkpoint, Placement, expected_shapes, read_json
from jaxlamina.weights.fit import check_fit
from jaxlamina.weights.streaming import Progress, target_dtype, too_large

PARAMS = "params"
FILE_LIST = "params.files.json"
_FLOATS = {"float64", "float32", "float16", "bfloat16"}
_MARKS = ("_METADATA", "_CHECKPOINT_METADATA")


def is_orbax_folder(path: Path) -> bool:
    return any((path / PARAMS / mark).exists() for mark in _MARKS)


class OrbaxCheckpoint(Checkpoint):
    """A folder that `convert(…, to="orbax")` wrote."""

    kind = "orbax"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = ModelConfig.from_hf(read_json(path / "config.json"))
        _check_files(path)
        check_fit(expected_shapes(self.config), {n: s for n, (s, _) in self._stored.items()}, str(path))
        strange = sorted({kind.name for _, kind in self._stored.values()} - _FLOATS)
        if strange:
            raise UserError(
                f"{path} stores weights as {', '.join(strange)}, which is not supported; supported: "
                f"{', '.join(sorted(_FLOATS))}"
            )

    @property
    def own_dtype(self) -> str | None:
        sizes = self._stored.values()
        return most_common_dtype((kind.name, int(np.prod(shape)) * kind.itemsize) for shape, kind in sizes)

    @cached_property
    def _stored(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        with _checkpointer() as checkpointer:
            try:
                metadata = checkpointer.metadata((self.path / PARAMS).resolve())
            except Exception as error:  # noqa: BLE001 (Orbax and TensorStore raise what they like)
                raise self._broken(error) from None
        tree = getattr(metadata, "item_metadata", metadata)
        tree = getattr(tree, "tree", tree)
        if not isinstance(tree, Mapping) or any(
            getattr(leaf, "shape", None) is None for leaf in tree.values()
        ):
            raise UserError(
                f"{self.path / PARAMS} cannot be read as an Orbax checkpoint of one flat dict of tensors; "
                f"write it with jaxlamina convert"
            )
        return {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in tree.items()}

    def _restore(self, names: list[str], dtype: np.dtype, device: Placement | None) -> dict[str, jax.Array]:
        import orbax.checkpoint as ocp

        where = jax.devices()[0] if device is None else device
        sharding = jax.sharding.SingleDeviceSharding(where) if isinstance(where, jax.Device) else where
        args = {
            name: ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype, global_shape=self._stored[name][0])
            for name in names
        }
        item = {name: jax.ShapeDtypeStruct(self._stored[name][0], dtype, sharding=sharding) for name in names}
        with _checkpointer() as checkpointer:
            try:
                restored = checkpointer.restore(
                    (self.path / PARAMS).resolve(),
                    args=ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True),
                )
            except Exception as error:  # noqa: BLE001 (Orbax and TensorStore raise what they like)
                raise self._broken(error) from None
        for name, x in restored.items():
            is_narrower = jnp.finfo(dtype).max < jnp.finfo(self._stored[name][1]).max
            if is_narrower and jnp.isinf(x).any():  # TensorStore's cast says nothing
                raise too_large(self.path / PARAMS, dtype)
        return dict(restored)

    def load(
        self, dtype: Any = "float32", device: Placement | None = None, progress: Progress | None = None
    ) -> dict[str, jax.Array]:
        dtype = target_dtype(dtype)
        return dict(self._groups(dtype, device, progress))

    def host_tensors(self, dtype: Any, progress: Progress | None = None) -> Iterator[tuple[str, np.ndarray]]:
        cpu = jax.local_devices(backend="cpu")[0]
        for name, array in self._groups(target_dtype(dtype), cpu, progress):
            yield name, np.asarray(array)

    def _groups(
        self, dtype: np.dtype, device: Placement | None, progress: Progress | None
    ) -> Iterator[tuple[str, jax.Array]]:
        """Every tensor, restored some hundred megabytes at a time, so that there is progress to report."""
        sizes = {name: int(np.prod(shape)) * kind.itemsize for name, (shape, kind) in self._stored.items()}
        total, done = sum(sizes.values()), 0
        if progress is not None:
            progress(0, total)
        names = list(sizes)
        while names:
            group: list[str] = []
            while names and (not group or sum(map(sizes.get, group)) + sizes[names[0]] <= 512 << 20):  # type: ignore[arg-type]
                group.append(names.pop(0))
            yield from self._restore(group, dtype, device).items()
            done += sum(sizes[name] for name in group)
            if progress is not None:
                progress(done, total)

    def _broken(self, error: Exception) -> UserError:
        reason = " ".join(str(error).split())[:160]
        return UserError(
            f"{self.path / PARAMS} cannot be read as an Orbax checkpoint ({reason}); write it again"
        )


def write_orbax(folder: Path, params: Mapping[str, jax.Array]) -> None:
    """Save the flat dict under `folder`; Orbax writes to a temporary folder and renames it."""
    import orbax.checkpoint as ocp

    with _checkpointer() as checkpointer:
        checkpointer.save((folder / PARAMS).resolve(), args=ocp.args.PyTreeSave(dict(params)))
    (folder / FILE_LIST).write_text(json.dumps(_file_sizes(folder), indent=2) + "\n", encoding="utf-8")


def _file_sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in (folder / PARAMS).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _check_files(folder: Path) -> None:
    if not (folder / FILE_LIST).is_file():
        return
    present = _file_sizes(folder)
    wrong = [
        f"{name} ({size} bytes expected, {present[name]} present)" if name in present else f"{name} (missing)"
        for name, size in read_json(folder / FILE_LIST).items()
        if present.get(name) != size
    ]
    if wrong:
        raise UserError(f"{folder} is truncated: {', '.join(wrong)}; fetch it again, or convert it again")


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # half a second, for those who need it

    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
