"""A causal language model as its author wrote it, as a function that the runtime can cut and run for any
batch.

`find_attention` traces the model for one row of tokens, finds its attentions (`regions`), proves what they
compute (`prove`), and puts `splitter.attention` in their place. Outside of attention a token is computed by
itself, so a batch ``[B, T]`` runs as one row of B·T tokens at the positions it is given; only attention sees
rows. Knows nothing of KV, pools or requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, tree_util
from jaxtyping import Float, Int32

from pallas_kernels import compat
from splitter.block import Block, variables
from splitter.find import prove
from splitter.find.facts import Facts, View, view_of
from splitter.find.lengths import TOKENS, Learned, Table, learn
from splitter.find.places import Places, row_indices, table_of
from splitter.find.regions import Problem, Region, find_regions, is_routed, reads
from splitter.operator import attention, attention_p
from splitter.program import canonical
from splitter.trace import SplitError, flattened

Params = Mapping[str, Any]


@dataclass(frozen=True)
class FoundAttention:
    """One attention of a model: where it is, and what was proven of it.

    where: of its product of queries and keys, in the user's code. eqns: how many equations it was written in.
    """

    index: int
    name: str | None
    where: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    eqns: int

    def __str__(self) -> str:
        heads = f"{self.n_heads} heads of {self.head_dim}"
        if self.n_kv_heads != self.n_heads:
            heads += f", {self.n_kv_heads} of keys and values"
        if self.v_head_dim != self.head_dim:
            heads += f", values of {self.v_head_dim}"
        sees = "causal" if self.window is None else f"causal within {self.window} tokens"
        cap = "" if self.softcap is None else f", scores capped at {self.softcap:g}"
        return (
            f"attention {self.index} at {self.where}: {heads}; {sees}; scale {self.scale:.6g}{cap}; read "
            f"from {self.eqns} equations"
        )


@dataclass(frozen=True)
class _Site:
    """An attention to be put in: its operands' views, and its result's."""

    q: View
    k: View
    v: View
    out: View
    end: Any
    position: int  # of the equation that made its result
    eqns: frozenset[int]
    found: FoundAttention


class FoundModel:
    """The model with its attention found, of parameters by name, for any batch: what the runtime cuts and
    runs.

    ``sites``: its attentions, in order.
    """

    def __init__(
        self, facts: Facts, sites: Sequence[_Site], param_names: Sequence[str], max_len: int
    ) -> None:
        self._facts, self._sites, self.param_names, self.max_len = (
            facts,
            tuple(sites),
            tuple(param_names),
            max_len,
        )
        self.sites = tuple(site.found for site in sites)
        self._indices = row_indices(facts)
        self._tables: dict[Any, Any] = {}
        self._site_at = {site.position: site for site in sites}
        self._before = self._needed([site.end for site in sites])
        before = set(self._before)
        self._after = [p for p in self._needed(facts.learned.jaxpr.outvars) if p not in before]

    def __call__(
        self,
        params: Params,
        tokens: Int32[Array, "B T"],
        positions: Int32[Array, "B T"],
        logits_at: Int32[Array, " B"] | None = None,
    ) -> Float[Array, "B _ V"]:
        """Logits ``[B, T, V]``, or ``[B, 1, V]`` after each row's token ``logits_at``. All that follows the
        last attention is then computed for these tokens alone."""
        b, t = tokens.shape
        given = [params[name] for name in self.param_names]
        rows = None if logits_at is None or not self._crosses_by_token else jnp.arange(b) * t + logits_at
        row = positions.reshape(1, b * t)
        env: dict[Any, Any] = {self._facts.learned.jaxpr.invars[-2]: tokens.reshape(1, b * t)}
        self._run(self._before, env, self._places(row, given), (b, t))
        if rows is not None:
            env = {v: self._rows(v, env[v], rows) for v in self._crossing}
            row = jnp.take(row, rows, axis=1, mode="clip")
        places = self._places(row, given)
        self._run(self._after, env, places, (b, t))
        [logits] = self._facts.learned.jaxpr.outvars
        out = env[logits].reshape(b, -1, logits.aval.shape[-1])
        return (
            jnp.take_along_axis(out, logits_at[:, None, None], axis=1)
            if rows is None and logits_at is not None
            else out
        )

    @property
    def looked_up(self) -> tuple[str, ...]:
        """The parameters of which rows are taken, and nothing else is done with them."""
        facts = self._facts
        variables_of = zip(self.param_names, facts.learned.jaxpr.invars, strict=False)
        readers = {name: [facts.eqns[p] for p in facts.readers.get(v, ())] for name, v in variables_of}
        return tuple(
            name for name, eqns in readers.items() if eqns and all(e.primitive.name == "gather" for e in eqns)
        )

    @cached_property
    def routes(self) -> bool:
        """Whether weights choose by integers where tokens go, as a router of experts does."""
        facts = self._facts
        made = (v for p in facts.live for v in facts.eqns[p].outvars)
        return any(facts.learned.token_dims(v) and is_routed(facts, v) for v in made)

    @cached_property
    def fingerprint(self) -> str:
        """What models that compute the same of their parameters have in common."""
        facts = self._facts
        learned = facts.learned
        consts = [x.values if isinstance(x, Table) else x for x in learned.consts]
        arrays = list(map(np.asarray, consts))
        hashes = [(x.shape, str(x.dtype), hashlib.sha256(x.tobytes()).hexdigest()) for x in arrays]
        parts = (
            self.max_len,  # tables of positions are as long
            canonical(Block.of(learned.jaxpr)),
            learned.lengths,
            learned.varying(),
            hashes,
            self.sites,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _places(self, row: Any, params: Sequence[Any]) -> Places:
        return Places(self._facts, self._indices, row, params, self._table)

    def _table(self, v: Any) -> Any:
        if v not in self._tables:
            self._tables[v] = table_of(self._facts, v, self.max_len)
        return self._tables[v]

    def _needed(self, wanted: Sequence[Any]) -> list[int]:
        """Positions of equations of tokens, with a site's last one for all of it."""
        facts, found = self._facts, set()
        wanted, ends = list(wanted), {site.end: site for site in self._sites}
        seen: set[Any] = set()
        while wanted:
            v = wanted.pop()
            if isinstance(v, compat.Literal) or v in seen or not facts.of_tokens(v):
                continue
            seen.add(v)
            if v in ends:
                site = ends[v]
                found.add(site.position)
                wanted += [site.q.source, site.k.source, site.v.source]
            elif v in facts.producer:
                found.add(facts.producer[v])
                wanted += variables(facts.eqns[facts.producer[v]].invars)
        return sorted(found)

    @cached_property
    def _crossing(self) -> list[Any]:
        """Values of tokens that what follows the last attention reads of what comes before."""
        facts = self._facts
        made = {v for p in self._before for v in facts.eqns[p].outvars} | {facts.learned.jaxpr.invars[-2]}
        read = {v for p in self._after for v in variables(facts.eqns[p].invars)}
        return [v for v in dict.fromkeys([*read, *variables(facts.learned.jaxpr.outvars)]) if v in made]

    @cached_property
    def _crosses_by_token(self) -> bool:
        learned = self._facts.learned
        dims = [[learned.dims(v)[i] for i in learned.token_dims(v)] for v in self._crossing]
        return all(of == [TOKENS] for of in dims)

    def _rows(self, v: Any, x: Any, rows: Any) -> Any:
        [d] = self._facts.learned.token_dims(v)
        return jnp.take(x, rows, axis=d, mode="clip")

    def _run(
        self, positions: Iterable[int], env: dict[Any, Any], places: Places, batch: tuple[int, int]
    ) -> None:
        facts = self._facts

        def read(atom: Any, p: int) -> Any:
            is_of_tokens = not isinstance(atom, compat.Literal) and facts.of_tokens(atom)
            return env[atom] if is_of_tokens else places.read(atom, p)

        for p in positions:
            if p in self._site_at:
                site = self._site_at[p]
                env[site.end] = self._attend(site, env, batch)
                continue
            eqn = facts.eqns[p]
            args = [read(a, p) for a in eqn.invars]
            try:
                outs = facts.learned.run(p, args, places.n)
            except (TypeError, ValueError) as error:  # a number of its own that so many tokens do not allow
                where = f"{compat.where(eqn)}: {eqn.primitive.name}"
                raise SplitError(f"{where} cannot be computed for {places.n} tokens: {error}") from error
            env.update(zip(eqn.outvars, outs, strict=True))

    def _attend(self, site: _Site, env: Mapping[Any, Any], batch: tuple[int, int]) -> Any:
        b, t = batch
        views = (site.q, site.k, site.v)
        dtype = jnp.result_type(*(env[view.source].dtype for view in views))
        found, n = site.found, b * t
        width = max(found.head_dim, found.v_head_dim)
        with compat.context_of(self._facts.eqns[site.position]):
            q, k, v = (view.of(env[view.source].astype(dtype), n) for view in views)
            k, v = (_repeated(x, found.n_kv_heads) for x in (k, v))
            q, k, v = (_padded(x, width).reshape(b, t, *x.shape[1:-1], width) for x in (q, k, v))
            out = attention(
                q, k, v, scale=found.scale, window=found.window, softcap=found.softcap, name=found.name
            )  # fmt: skip
            out = out.reshape(n, found.n_heads, width)[..., : found.v_head_dim]
            shape = self._facts.learned.shape_at(site.end, n)
            return site.out.back(out, n, shape).astype(site.end.aval.dtype)


def _repeated(x: Any, heads: int) -> Any:
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def _padded(x: Any, width: int) -> Any:
    return x if x.shape[-1] == width else jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1])))


def find_attention(
    fn: Callable[..., Any], params: Any, *, max_len: int, name: str | None = None
) -> FoundModel:
    """The model that ``fn(params, tokens [B, T], positions [B, T]) -> logits [B, T, V]`` is.

    params: its weights, a pytree of arrays or of `jax.ShapeDtypeStruct`; integers and booleans among them,
    such as stored masks, must be closed over instead. max_len: tokens that a row may have at most. name: of
    the model, for messages.

    Raises:
      SplitError: an attention that is not found, or not proven to be causal softmax attention; something else
      that mixes tokens; a function that does other things for other numbers of tokens. All places at once,
      each with the line of the model.
    """
    n_params = len(tree_util.tree_leaves(params))
    facts = Facts.of(_learned(fn, params, max_len, name or _name(fn)), n_params, max_len)
    readings, problems = find_regions(facts)
    proven: dict[str, prove.Meaning | prove.Refuted] = {}
    sites: list[_Site] = []
    for ways in readings:
        best: prove.Refuted | None = None
        for region in ways:
            leaves, of_region = reads(facts, region)
            if of_region:
                problems += [] if best else of_region
                best = best or prove.Refuted("")
                continue
            try:
                sites.append(_site(facts, region, _meaning(facts, region, leaves, max_len, proven)))
                best = None
                break
            except prove.Refuted as why:
                best = best or why
        if best is not None and str(best):
            where = compat.where(facts.eqns[ways[0].scores])
            problems.append(
                Problem(
                    where, f"{best}. Its product with values is at {compat.where(facts.eqns[ways[0].mix])}"
                )
            )
    sites += [_own_site(facts, p) for p in sorted(facts.live) if facts.eqns[p].primitive is attention_p]
    problems += [_own_sharding(facts, p) for p in sorted(facts.live) if _is_sharding(facts.eqns[p])]
    if problems:
        raise SplitError(_message(name or _name(fn), problems))
    if not sites:
        raise SplitError(
            f"no attention found in {name or _name(fn)}: no product of two values over tokens (queries and "
            "keys) that a product with values over tokens follows"
        )
    sites = [_numbered(s, i) for i, s in enumerate(sorted(sites, key=lambda s: s.position))]
    return FoundModel(facts, sites, leaf_names(params), max_len)


def _meaning(
    facts: Facts, region: Region, leaves: Sequence[Any], max_len: int, proven: dict[str, Any]
) -> prove.Meaning:
    """Equal regions are proven once."""
    sources = [region.q.source, region.k.source, region.v.source]
    positions = facts.needed([region.end], sources)
    jaxpr = facts.learned.jaxpr
    block = Block(
        (*sources, *jaxpr.constvars, jaxpr.invars[-1]), tuple(facts.eqns[p] for p in positions), (region.end,)
    )
    used = {v for p in positions for v in variables(facts.eqns[p].invars)}
    consts = tuple(id(c) for v, c in zip(jaxpr.constvars, facts.learned.consts, strict=True) if v in used)
    views = tuple((v.sizes, v.order, v.shape) for v in (region.q, region.k, region.v, region.out))
    key = canonical(block, extra=(consts, views, facts.learned.varying(positions)))
    if key not in proven:
        try:
            proven[key] = prove.meaning(facts, region, leaves, max_len)
        except prove.Refuted as why:
            proven[key] = why
    if isinstance(proven[key], prove.Refuted):
        raise proven[key]
    found: prove.Meaning = proven[key]
    return found


def _site(facts: Facts, region: Region, meaning: prove.Meaning) -> _Site:
    product = facts.eqns[region.scores]
    where = compat.where(product)
    place = where.split(" (")[0]  # drawings and messages name it so
    found = FoundAttention(
        index=0,
        name=f"found at {PurePath(place).name}" if place != where else compat.name_stack(product) or None,
        where=where,
        n_heads=region.n_heads,
        n_kv_heads=region.n_kv_heads,
        head_dim=region.q.shape[1],
        v_head_dim=region.v.shape[1],
        scale=meaning.scale,
        window=meaning.window,
        softcap=meaning.softcap,
        eqns=len(region.eqns),
    )
    position = facts.producer[region.end]
    return _Site(region.q, region.k, region.v, region.out, region.end, position, region.eqns, found)


def _own_site(facts: Facts, p: int) -> _Site:
    """Of a call of `splitter.attention`."""
    eqn = facts.eqns[p]
    n = facts.learned.lengths[0]
    views: list[View] = []
    for atom in (*eqn.invars, *eqn.outvars):
        b, t, heads, width = compat.like_of(atom).shape
        view = view_of(atom, np.arange(t * heads * width).reshape(t, heads, width), (heads, width))
        if b != 1 or t != n or view is None:
            raise SplitError(
                f"{compat.where(eqn)}: splitter.attention is called with {atom.aval}, not [B, T, N, H]"
            )
        views.append(view)
    q, k, v, out = views
    p_ = eqn.params
    found = FoundAttention(
        0, p_["name"], compat.where(eqn), q.shape[0], k.shape[0], q.shape[1], v.shape[1],
        p_["scale"], p_["window"], p_["softcap"], 1,
    )  # fmt: skip
    return _Site(q, k, v, out, eqn.outvars[0], p, frozenset([p]), found)


def _is_sharding(eqn: compat.JaxprEqn) -> bool:
    return eqn.primitive.name in ("sharding_constraint", "reshard", "mesh_cast", "shard_map")


def _own_sharding(facts: Facts, p: int) -> Problem:
    eqn = facts.eqns[p]
    return Problem(
        compat.where(eqn),
        f"{eqn.primitive.name} lays out values over a mesh of the model's own: pass the model without it, "
        "since weights and values are placed by the layout that it is served on",
    )


def _numbered(site: _Site, index: int) -> _Site:
    from dataclasses import replace

    return replace(site, found=replace(site.found, index=index))


def _learned(fn: Callable[..., Any], params: Any, max_len: int, name: str) -> Learned:
    lengths = _lengths(params, max_len)
    leaves, tree = tree_util.tree_flatten(params)
    likes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

    def of_length(n: int) -> tuple[Any, Sequence[Any]]:
        row = jax.ShapeDtypeStruct((1, n), jnp.int32)

        def flat(*args: Any) -> Any:
            params = tree_util.tree_unflatten(tree, args[:-2])
            try:
                out = fn(params, *args[-2:])
            except SplitError:
                raise
            except Exception as error:  # whatever a user's own code raises
                said = str(error).strip().splitlines()
                raise SplitError(
                    f"{name} cannot be traced for a row of {n} tokens, as it must be for any number of them "
                    f"whatever they are: {compat.where_raised(error)}: {type(error).__name__}: "
                    f"{said[0] if said else ''}"
                ) from error
            shape = getattr(out, "shape", None)
            if shape is None or len(shape) != 3 or shape[:2] != (1, n):
                raise SplitError(
                    f"{name} must give logits [B, T, V] alone; for tokens [1, {n}] it gives "
                    f"{shape if shape is not None else type(out).__name__}"
                )
            return out

        return flattened(flat, [*likes, row, row], lambda eqn: _is_over_tokens(eqn, n))

    traces = [of_length(n) for n in lengths]
    return learn([j for j, _ in traces], [c for _, c in traces], lengths, lambda: of_length(max_len)[1])


def _is_over_tokens(eqn: compat.JaxprEqn, n: int) -> bool:
    """Whether an equation is attention's, or a part of it."""
    if eqn.primitive is attention_p:
        return True
    if eqn.primitive.name != "dot_general":
        return False
    [contracted, _] = eqn.params["dimension_numbers"]
    return any(v.aval.shape[d] == n for v, dims in zip(eqn.invars, contracted, strict=True) for d in dims)  # type: ignore[attr-defined]


_LONGEST_TRACE = 4100  # tokens: beyond most windows and most lengths from which a model does something else


def _lengths(params: Any, max_len: int) -> tuple[int, int, int]:
    """Three numbers of tokens that no size of the model can be taken for: two short ones, and a long one, for
    models that have an `if` on the number of tokens."""
    sizes = {s for x in tree_util.tree_leaves(params) for s in jnp.shape(x)}

    def fits(p: int) -> bool:
        return all(s % p for s in sizes) and all(p % d for d in range(2, int(p**0.5) + 1))

    short = [p for p in range(11, min(max_len, 200)) if fits(p)][:2]
    long = next((p for p in range(min(max_len, _LONGEST_TRACE) - 1, 0, -1) if fits(p)), 0)
    if len(short) < 2 or long <= short[1]:
        raise SplitError(
            f"a model of at most {max_len} tokens is too short to find attention in: 24 or more are needed"
        )
    return short[0], short[1], long


def leaf_names(params: Any) -> list[str]:
    """A name for each of a pytree's leaves."""
    paths = [path for path, _ in tree_util.tree_flatten_with_path(params)[0]]
    return [tree_util.keystr(path, simple=True, separator=".") or "params" for path in paths]


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _message(name: str, problems: Sequence[Problem]) -> str:
    lines = list(dict.fromkeys(map(str, problems)))
    more = [f"… and {len(lines) - 12} more places"] if len(lines) > 12 else []
    return f"{name} cannot be cut:\n" + "\n".join(f"- {line}" for line in [*lines[:12], *more])
