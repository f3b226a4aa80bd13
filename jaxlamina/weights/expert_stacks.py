"""Experts' weights, which files hold one by one and models in one stack per matrix.

Knows the names and the shapes of both, and a third form: transformers 5 can save stacks, gate and up in one.
Knows no format and no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxlamina.errors import UserError
from jaxlamina.models import ModelConfig
from jaxlamina.weights.fit import Shape, unique
from jaxlamina.weights.streaming import Stored, StoredStack, StoredTensor

# What mixtral's files say -> what its model says.
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_STACK = re.compile(r"(.*\.)mlp\.experts\.(gate_proj|up_proj|down_proj)")

Entry = tuple[str, StoredTensor]  # an element type, and where the tensor lies


def stacked(config: ModelConfig, found: Mapping[str, Entry], where: str) -> dict[str, tuple[str, Stored]]:
    """A file's tensors under the model's names, experts in stacks.

    `UserError` names the expert of which a stack's matrix is missing or has another shape than the others',
    and what is there twice.
    """
    if not config.n_experts:
        return dict(found)
    result: list[tuple[str, tuple[str, Stored]]] = []
    stacks: dict[str, dict[int, Entry]] = {}
    for name, (kind, tensor) in found.items():
        own = name.replace(".block_sparse_moe.", ".mlp.")
        if match := re.fullmatch(r"(.*\.mlp\.experts)\.(\d{1,6})\.(\w+)\.weight", own):
            stem, expert, matrix = match.groups()
            stack = stacks.setdefault(f"{stem}.{_MIXTRAL.get(matrix, matrix)}", {})
            if int(expert) in stack:
                raise UserError(f"{where}: {name} is there twice, under two names; remove one")
            stack[int(expert)] = kind, tensor
        elif own.endswith(".mlp.experts.gate_up_proj") and _has_halves(tensor.shape, config.n_experts):
            for matrix, part in zip(("gate_proj", "up_proj"), _halves(tensor), strict=True):
                result.append((own.replace("gate_up_proj", matrix), (kind, part)))
        else:
            result.append((own, (kind, tensor)))
    result += [(name, _stack(config.n_experts, name, stack, where)) for name, stack in stacks.items()]
    return unique(result, where)


def _stack(n_experts: int, name: str, stack: Mapping[int, Entry], where: str) -> tuple[str, StoredStack]:
    missing = [e for e in range(n_experts) if e not in stack]
    if missing or len(stack) != n_experts:
        which = f"expert {missing[0]} is missing" if missing else f"there is an expert {max(stack)}"
        raise UserError(f"{where}: {name} must have {n_experts} experts, and {which}; fetch it again")
    kinds = {kind for kind, _ in stack.values()}
    shapes = {tensor.shape for _, tensor in stack.values()}
    if len(kinds) > 1 or len(shapes) > 1 or len(min(shapes)) != 2:
        raise UserError(
            f"{where}: the experts of {name} must be matrices of one shape and one element type, and are "
            f"{sorted(map(list, shapes))[:3]} of {', '.join(sorted(kinds)[:3])}; fetch it again"
        )
    return min(kinds), StoredStack(tuple(stack[e][1] for e in range(n_experts)))


def _has_halves(shape: Shape, n_experts: int) -> bool:
    """Else the tensor fits no model; a header of a few bytes may claim millions of experts."""
    return len(shape) == 3 and shape[0] == n_experts and min(shape) > 0


def _halves(tensor: StoredTensor) -> tuple[StoredStack, StoredStack]:
    """[E, 2F, D] -> two of [E, F, D]."""
    n_experts, rows, _ = tensor.shape
    starts = range(0, n_experts * rows, rows)
    flat = tensor.flat()
    gate = [flat.part(slice(start, start + rows // 2)) for start in starts]
    up = [flat.part(slice(start + rows // 2, start + rows)) for start in starts]
    return StoredStack(tuple(gate)), StoredStack(tuple(up))


def unstacked(config: ModelConfig, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, np.ndarray]]:
    """A model's tensors as files name and hold them, whatever release of transformers reads them."""
    for name, array in tensors:
        names = _file_names(config, name)
        yield from zip(names, array if _STACK.fullmatch(name) else [array], strict=True)


def unstacked_shapes(config: ModelConfig, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes that `unstacked` gives."""
    return {
        own: shape[1:] if _STACK.fullmatch(name) else shape
        for name, shape in shapes.items()
        for own in _file_names(config, name)
    }


def _file_names(config: ModelConfig, name: str) -> list[str]:
    mixtral = config.model_type == "mixtral"
    if match := _STACK.fullmatch(name):
        stem, matrix = match.groups()
        if mixtral:
            block, matrix = "block_sparse_moe", next(w for w, own in _MIXTRAL.items() if own == matrix)
        else:
            block = "mlp"
        return [f"{stem}{block}.experts.{e}.{matrix}.weight" for e in range(config.n_experts)]
    return [name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if mixtral else name]
