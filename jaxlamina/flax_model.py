"""``FlaxModel``: a causal language model in plain JAX or Flax, as its author wrote it, for `LLM` and the
commands.

Its attention is found by `splitter.find`; from then on it is a `CausalLM` like ours. Knows Flax's two ways of
keeping parameters; nothing of how a model is cut or run.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import tree_util

from jaxlamina import dtypes
from jaxlamina.errors import UserError
from jaxlamina.models.causal_lm import CausalLM, HasModel
from jaxlamina.text.tokenizer import Tokenizer, tokenizer_from_folder
from splitter.find import FoundModel, check_found, find_attention, leaf_names


class FlaxModel(HasModel):
    """A model of yours.

    - ``fn(params, tokens [B, T] int32, positions [B, T] int32) -> logits [B, T, V]``: causal, and without a
      cache. It may make its positions itself, and then ignores the argument.
    - ``params``: its weights, a pytree of arrays. Integers and booleans among them count as constants.
    - ``max_model_len``: tokens that a request may have, prompt included.
    - ``tokenizer``: a folder with tokenizer.json, that file, or a `jaxlamina.text.tokenizer.Tokenizer`;
      without one the model takes and gives token ids.
    - ``name``: what messages call the model; the function's or the module's name.

    docs/your-own-model.md says what is understood. ``UserError`` for arguments that are none of these.
    """

    in_memory: ClassVar[bool] = True

    def __init__(
        self,
        fn: Callable[..., Any],
        params: Any,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: str | Path | Tokenizer | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(fn):
            raise UserError(
                "FlaxModel's first argument must be a function of (params, tokens, positions), not "
                f"{fn!r:.60}"
            )
        sizes: tuple[tuple[str, Any], ...] = ("vocab_size", vocab_size), ("max_model_len", max_model_len)
        for size, value in sizes:
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 2:
                raise UserError(f"{size}={value!r} must be an integer of at least 2")
        given: Any = eos_token_ids
        if not isinstance(given, Iterable) or not all(_is_token(x, vocab_size) for x in given):
            raise UserError(f"eos_token_ids={given!r} must be a list of token ids below {vocab_size}")
        leaves, tree = tree_util.tree_flatten(params)
        if not any(_is_weight(x) for x in leaves):
            raise UserError("FlaxModel's params hold no floating-point array: give the weights that fn reads")
        self.name = name or getattr(fn, "__qualname__", None) or type(fn).__name__
        self._fn, self._leaves, self._tree = fn, leaves, tree
        self.vocab_size, self.max_model_len = int(vocab_size), int(max_model_len)
        self._tokenizer = _opened(tokenizer, eos_token_ids)
        own = self._tokenizer.eos_token_ids if self._tokenizer is not None else ()
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *own]))
        # Stored masks, ids and the like: known while tracing, so that what they mean can be proven.
        self._constants = {i: x for i, x in enumerate(leaves) if not _is_weight(x)}
        names = leaf_names(params)
        self.params = {names[i]: jnp.asarray(x) for i, x in enumerate(leaves) if i not in self._constants}

    @classmethod
    def from_nnx(
        cls,
        module: Any,
        *,
        arguments: Mapping[str, Any] | None = None,
        logits: Callable[[Any], Any] | None = None,
        **more: Any,
    ) -> FlaxModel:
        """Of an ``nnx.Module`` as it is: ``module(tokens)`` or ``module(tokens, positions)``.

        ``arguments``: its other arguments by name; what is a function of (tokens, positions) is called with
        these. ``logits``: takes the logits out of what the module gives, where that is not all. ``more``: as
        of `FlaxModel`.
        """
        from flax import nnx

        if not isinstance(module, nnx.Module):
            raise UserError(f"from_nnx wants an nnx.Module, not a {type(module).__name__}")
        graph, state = nnx.split(module)

        def call(state: Any, *given: Any, **named: Any) -> Any:
            merged = nnx.merge(graph, state)
            merged.eval()  # no dropout, no statistics of a batch
            return merged(*given, **named)

        fn = _bound(call, module, arguments, logits)
        return cls(fn, state, **{"name": type(module).__name__, **more})

    @classmethod
    def from_linen(
        cls,
        module: Any,
        variables: Mapping[str, Any],
        *,
        arguments: Mapping[str, Any] | None = None,
        logits: Callable[[Any], Any] | None = None,
        **more: Any,
    ) -> FlaxModel:
        """Of a Linen module and its variables ``{"params": …}``; the rest as of `from_nnx`."""

        def call(variables: Any, *given: Any, **named: Any) -> Any:
            return module.apply(variables, *given, **named)

        fn = _bound(call, module, arguments, logits)
        return cls(fn, variables, **{"name": type(module).__name__, **more})

    @cached_property
    def found(self) -> FoundModel:
        """The model with its attention found. ``SplitError`` says all places at once that keep it from being
        cut."""
        return find_attention(self._of_weights, self.params, max_len=self.max_model_len, name=self.name)

    @cached_property
    def model(self) -> CausalLM:
        like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in self.params.items()}
        found = self.found
        row = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        n_logits = jax.eval_shape(self._of_weights, like, row, row).shape[-1]
        if n_logits < self.vocab_size:
            raise UserError(f"vocab_size={self.vocab_size}, and the model gives {n_logits} logits")
        return CausalLM(
            fn=found,
            vocab_size=self.vocab_size,
            max_len=self.max_model_len,
            kv=tuple((site.n_kv_heads, max(site.head_dim, site.v_head_dim)) for site in found.sites),
            heads=tuple(site.n_heads for site in found.sites),
            windows=tuple(site.window for site in found.sites),
            looked_up=found.looked_up,
            like=lambda dtype: like,
            origin=None if self.code is None else {"code": self.code},
            name=found.fingerprint,
            description={
                "model_type": "own",
                "vocab_size": self.vocab_size,
                "num_hidden_layers": len(found.sites),
            },
            dtype=self.own_dtype,
        )

    def _of_weights(self, params: Mapping[str, Any], tokens: Any, positions: Any) -> Any:
        weights = iter(params[name] for name in self.params)
        leaves = [
            self._constants[i] if i in self._constants else next(weights) for i in range(len(self._leaves))
        ]
        out = self._fn(tree_util.tree_unflatten(self._tree, leaves), tokens, positions)
        # A head may be padded to a round size; no token is what lies beyond the vocabulary.
        padded = getattr(out, "ndim", 0) == 3 and out.shape[-1] > self.vocab_size
        return out[..., : self.vocab_size] if padded else out

    @property
    def own_dtype(self) -> str | None:
        """What most of the parameters are."""
        return dtypes.most_common_dtype((x.dtype.name, x.nbytes) for x in self.params.values())

    def load(self, dtype: Any, device: Any = None, progress: Any = None) -> dict[str, jax.Array]:
        """The parameters on ``device``, in their own dtypes."""
        return {name: jax.device_put(x, device) for name, x in self.params.items()}

    def tokenizer(self) -> Any:
        return self._tokenizer

    def check(self) -> float:
        """Runs the model as it is and cut, on random tokens: a prompt, what follows it in chunks, and single
        tokens of rows of different lengths. Gives the largest difference of logits, relative to the largest
        logit. ``UserError`` where that is more than rounding."""
        difference = check_found(self.found, self._of_weights, self.params, self.vocab_size)
        # Accelerators' products of float32 have the digits of TF32 or bfloat16 where the model does not ask
        # for more.
        exact = 1e-4 if jax.default_backend() == "cpu" else 0.02
        most = exact if self.own_dtype == "float32" else 0.1
        if not difference <= most:
            raise UserError(
                "the model does not give the same when it is cut: on random tokens logits differ by "
                f"{difference:.2g} of the largest (at most {most:g} is rounding). Either its tokens see one "
                "another outside of attention (a convolution or sum over tokens, a capacity of experts), "
                "or its positions are not what they seem: FlaxModel.found.sites says how it was read"
            )
        return difference


def _is_token(x: object, vocab_size: int) -> bool:
    return isinstance(x, numbers.Integral) and 0 <= int(x) < vocab_size


def _is_weight(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _bound(
    call: Callable[..., Any],
    module: Any,
    arguments: Mapping[str, Any] | None,
    logits: Callable[[Any], Any] | None,
) -> Callable[..., Any]:
    given = dict(arguments or {})
    return partial(_called, call, _takes_positions(type(module), given), given, logits)


def _takes_positions(module: type, arguments: Mapping[str, Any]) -> bool:
    """Whether a module takes positions beside tokens, by position or by that name. `UserError` if it needs
    something else that ``arguments`` do not have."""
    others = list(inspect.signature(module.__call__).parameters.values())[2:]  # behind self and tokens
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in others if p.kind in by_name and p.default is p.empty]
    missing = [name for name in needed if name not in ("positions", *arguments)]
    if missing:
        raise UserError(
            f"{module.__name__} takes {', '.join(missing)} beside tokens: give it by name, for example "
            f"arguments={{{missing[0]!r}: lambda tokens, positions: positions}}"
        )
    return "positions" in {p.name for p in others}


def _called(
    call: Callable[..., Any],
    takes_positions: bool,
    arguments: Mapping[str, Any],
    logits: Callable[[Any], Any] | None,
    params: Any,
    tokens: Any,
    positions: Any,
) -> Any:
    named = {name: x(tokens, positions) if callable(x) else x for name, x in arguments.items()}
    if takes_positions and "positions" not in named:
        named["positions"] = positions
    found = call(params, tokens, **named)
    return found if logits is None else logits(found)


def _opened(tokenizer: str | Path | Tokenizer | None, eos_token_ids: Iterable[int]) -> Tokenizer | None:
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    path = Path(tokenizer).expanduser()
    if path.name == "tokenizer.json":
        path = path.parent
    if not (path / "tokenizer.json").is_file():
        raise UserError(f"tokenizer={str(tokenizer)!r} must be a folder with a tokenizer.json, or that file")
    return tokenizer_from_folder(path, tuple(eos_token_ids))
