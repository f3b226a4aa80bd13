"""Which equations of a traced model a reader would call one operator, as policy on plain data.

A layer is some sixty equations; a reader sees a norm, a projection, rotary embedding, an MLP.
`group_operations` puts every operation in exactly one group and names it, by what it computes and by the
parameters it reads. It works on any model: what it does not recognise keeps its scope's or its primitive's
name. Knows nothing of JAX or of drawing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from splitter.draw.names import (
    ACTIVATIONS,
    ARITHMETIC,
    FEATURES,
    HEAD_WORDS,
    JOINT_TITLES,
    LAYOUT,
    LIGHT,
    LOOKUPS,
    PRODUCTS,
    TURNS,
    joined,
    shared_name,
    short_name,
)


@dataclass(frozen=True)
class Bundle:
    """What a group that is not of a slice is for. `which` tells bundles of one kind apart."""

    kind: str
    title: str
    detail: str
    which: Hashable = None


@dataclass(frozen=True)
class Operation:
    """One equation. `reads` and `writes` are value numbers, literals left out.

    place: where it runs, e.g. in parts of slices; operations of different places never share a group.
    scope: its `jax.named_scope` path.
    bundle: operations with one bundle form one group whatever they compute.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    place: frozenset[Hashable] = frozenset()
    scope: str = ""
    bundle: Bundle | None = None


@dataclass(frozen=True)
class Flow:
    """A model's operations in order of execution, and what is known of its values.

    weights: value -> path of the parameter it is, or is a view of. outputs: the model's results.
    free: values of parameters and constants alone.
    given: values of inputs and constants alone (positions, masks, rotary tables).
    """

    operations: tuple[Operation, ...]
    weights: Mapping[int, str] = field(default_factory=dict)
    free: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DrawnGroup:
    """Operations shown as one. `members` index `Flow.operations`; `weights` are the parameters they read."""

    kind: str
    title: str
    detail: str
    members: tuple[int, ...]
    place: frozenset[Hashable]
    weights: tuple[str, ...]


def group_operations(flow: Flow) -> tuple[DrawnGroup, ...]:
    """Every operation in exactly one group; groups in the order of their first operations.

    The groups of one place form no cycle: a group never needs a result of another that needs its own.
    """
    return _Grouping(flow).groups()


class _Grouping:
    """The groups of one flow as a union-find over its operations, refined in steps."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.ops = flow.operations
        self.parent = list(range(len(self.ops)))
        self.producer = {v: i for i, op in enumerate(self.ops) for v in op.writes}
        self.consumers: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            for v in dict.fromkeys(op.reads):
                self.consumers.setdefault(v, []).append(i)
        self.role = [self._role(op) for op in self.ops]
        self.root: dict[int, int] = {}  # operation -> the operation its only source of activations is
        self.joint: set[int] = set()  # light operations of more than one source
        self.heads: set[int] = set()  # light operations that prepare the operand of one heavy operation
        self._find_heads()
        self._connect()
        self._absorb()
        self._place_free()
        self._find_mlps()
        self._break_cycles()

    # --- basics ---

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def union(self, i: int, j: int) -> None:
        a, b = sorted((self.find(i), self.find(j)))
        self.parent[b] = a

    def _members(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for i in range(len(self.ops)):
            members.setdefault(self.find(i), []).append(i)
        return members

    def _role(self, op: Operation) -> str:
        if op.bundle is not None:
            return "bundle"
        if all(v in self.flow.free for v in op.writes):
            return "free"
        if op.name not in LIGHT:
            return "heavy"
        return "given" if all(v in self.flow.given for v in op.writes) else "light"

    def _activations(self, op: Operation) -> list[int]:
        return [v for v in dict.fromkeys(op.reads) if v not in self.flow.free and v not in self.flow.given]

    def _sole_reader(self, v: int, i: int) -> bool:
        return self.consumers.get(v) == [i] and v not in self.flow.outputs

    def _leaves(self, members: Sequence[int]) -> bool:
        return any(v in self.flow.outputs for i in members for v in self.ops[i].writes)

    def _readers(self, members: Sequence[int]) -> set[int]:
        """Groups that read what `members` write, without their own."""
        found = {self.find(c) for i in members for v in self.ops[i].writes for c in self.consumers.get(v, ())}
        return found - {self.find(i) for i in members}

    # --- what belongs together ---

    def _find_heads(self) -> None:
        """A change of layout for the sake of one product, lookup, … is part of that."""
        for i, op in reversed([*enumerate(self.ops)]):
            readers = {c for v in op.writes for c in self.consumers.get(v, ())}
            if self.role[i] != "light" or op.name not in LAYOUT or len(readers) != 1 or self._leaves([i]):
                continue
            (c,) = readers
            if self.ops[c].place == op.place and (self.role[c] == "heavy" or c in self.heads):
                self.heads.add(i)
                self.union(c, i)

    def _connect(self) -> None:
        """Light operations that derive from one activation and are connected are one group."""
        bundles: dict[Bundle, int] = {}
        tails: set[int] = set()
        for i, op in enumerate(self.ops):
            role = self.role[i]
            if op.bundle is not None:
                self.root[i] = bundles.setdefault(op.bundle, i)
                self.union(self.root[i], i)
            if role == "heavy":
                self.root[i] = i
            if role not in ("light", "given"):
                continue
            sources = self._activations(op)
            roots = {self.root[self.producer[v]] for v in sources if v in self.producer}
            self.root[i] = roots.pop() if len(roots) == 1 else i
            if role == "light" and self.root[i] == i:
                self.joint.add(i)
            for v in op.reads:
                j = self.producer.get(v, i)
                if i == j or i in self.heads or self.ops[j].place != op.place:
                    continue
                if i in self.joint:  # x + a + b is one sum
                    together = (
                        j in self.joint and op.name == self.ops[j].name == "add" and self._sole_reader(v, i)
                    )
                elif self.role[j] == "heavy" or j in tails:
                    # A bias, a scale or a reshape that alone reads a product is part of it.
                    together = op.name in LAYOUT | ARITHMETIC and sources == [v] and self._sole_reader(v, i)
                    together = together and not any(u in self.flow.given for u in op.reads)
                    tails |= {i} if together else set()
                else:
                    together = self.role[j] == role and (role == "given" or self.root[i] not in (i, j))
                if together:
                    self.union(i, j)

    def _absorb(self) -> None:
        """Layout and arithmetic of no name of its own goes to what it derives from, or to its only reader."""
        for g, members in self._members().items():
            light = all(self.role[i] in ("light", "given") and i not in self.joint for i in members)
            if not light or self._features(members):
                continue
            readers = set() if self._leaves(members) else self._readers(members)
            for other in (self.root[g], *(readers if len(readers) == 1 else ())):
                if other != g and self.ops[other].place == self.ops[g].place and self.role[other] != "bundle":
                    self.union(other, g)
                    break

    def _place_free(self) -> None:
        """What only prepares weights (a broadcast, a cast) belongs to whoever reads the result."""
        for i in reversed(range(len(self.ops))):
            readers = [c for v in self.ops[i].writes for c in self.consumers.get(v, ())]
            for c in readers if self.role[i] == "free" else ():
                if self.ops[c].place == self.ops[i].place and self.role[c] != "bundle":
                    self.union(i, c)
                    break

    def _find_mlps(self) -> None:
        """Products with an activation function between them, one value in and one out, are one MLP."""
        members = self._members()
        kind = {g: self._describe(ms)[0] for g, ms in members.items()}
        reads = {g: {v for i in ms for v in self._activations(self.ops[i])} for g, ms in members.items()}
        writes = {g: {v for i in ms for v in self.ops[i].writes} for g, ms in members.items()}
        for g in [g for g in members if kind[g] == "projection"]:
            inside, entries, stack = [g], set[int](), [g]
            while stack:
                for v in reads[stack.pop()] - {w for h in inside for w in writes[h]}:
                    h = self.find(self.producer[v]) if v in self.producer else -1
                    fits = kind.get(h) in ("projection", "activation", "multiply")
                    fits = fits and self.ops[h].place == self.ops[g].place and not self._leaves(members[h])
                    if fits and self._readers(members[h]) <= {*inside}:  # nothing else reads it
                        inside.append(h)
                        stack.append(h)
                        entries -= writes[h]
                    else:
                        entries.add(v)
            kinds = [kind[h] for h in inside]
            if "activation" in kinds and kinds.count("projection") >= 2 and len(entries) <= 1:
                for h in inside:
                    self.union(g, h)

    def _break_cycles(self) -> None:
        """Should groups need each other, their operations stand alone: a picture must flow one way."""
        while True:
            members = {g: ms for g, ms in self._members().items() if self.role[g] != "bundle"}
            after = {g: self._readers(ms) & members.keys() for g, ms in members.items()}
            try:
                TopologicalSorter(after).prepare()
                return
            except CycleError as error:
                for g in error.args[1][1:]:
                    for i in members[g]:
                        self.parent[i] = i

    # --- names ---

    def groups(self) -> tuple[DrawnGroup, ...]:
        rows = [(self._describe(ms), self._weights(ms), ms) for _, ms in sorted(self._members().items())]
        embeddings = {w for (kind, _, _), weights, _ in rows if kind == "embedding" for w in weights}
        made = []
        for (kind, title, detail), weights, members in rows:
            named = any(w in embeddings or HEAD_WORDS.search(short_name(w)) for w in weights)
            if kind == "projection" and named and self._leaves(members):
                kind, title, detail = "head", "LM head", title
            place = self.ops[members[0]].place
            made.append(DrawnGroup(kind, title, detail, tuple(members), place, weights))
        return tuple(made)

    def _describe(self, members: Sequence[int]) -> tuple[str, str, str]:
        """Kind, title and detail of a group."""
        names = shared_name(self._weights(members))
        heavy = [i for i in members if self.role[i] == "heavy"]
        bound = [i for i in members if self.role[i] != "free"]
        if not bound:
            return "weights", "Weights", names
        if (bundle := self.ops[bound[0]].bundle) is not None:
            return bundle.kind, bundle.title, bundle.detail
        scopes = {self.ops[i].scope for i in bound}
        scope = scopes.pop().rsplit("/", 1)[-1] if len(scopes) == 1 else ""
        features = self._features(bound)
        if heavy and self.ops[heavy[0]].name in PRODUCTS:
            if len(heavy) > 1:
                return "mlp", "MLP", names.replace("_proj", "")
            return ("projection", names, "") if names else ("product", "Product", scope)
        if heavy and self.ops[heavy[0]].name in LOOKUPS and names:
            computed = any(self._activations(self.ops[i]) for i in heavy)
            return ("lookup", "Lookup", names) if computed else ("embedding", "Embed", names)
        joint = [i for i in members if i in self.joint]
        primitives = list(dict.fromkeys(self.ops[i].name for i in heavy or joint or bound))
        kind = "other"
        if not heavy and joint:
            kind = {"add": "add", "mul": "multiply"}.get(" ".join(primitives), kind)
        elif not heavy and self.role[bound[0]] == "given":
            kind = "given"
        elif features and not heavy and features[0] in ACTIVATIONS:
            kind = "activation"
        if features:
            return kind, " · ".join(features), names
        if scope and kind not in ("add", "multiply"):
            return kind, scope, joined(primitives)
        return kind, joined([JOINT_TITLES.get(p, p) for p in primitives]), names

    def _features(self, members: Sequence[int]) -> list[str]:
        """What light operations compute, as titles; empty for mere layout and arithmetic."""
        ordered = [self.ops[i].name for i in members]
        names = set(ordered)
        own = {v for i in members for v in self.ops[i].writes}
        reads_given = any(v in self.flow.given and v not in own for i in members for v in self.ops[i].reads)
        found = []
        if (roots := names & {"rsqrt", "sqrt", "pow"}) and "reduce_sum" in names:
            root = min(ordered.index(n) for n in roots)
            found.append("LayerNorm" if ordered[:root].count("reduce_sum") > 1 else "RMSNorm")
        if "exp" in names and "reduce_sum" in names:
            found.append("Softmax")
        if names & {"cos", "sin"}:
            found.append("Rotary tables")
        elif reads_given and "mul" in names and names & TURNS:
            found.append("Rotary")
        return found or [title for needed, title in FEATURES if needed <= names][:1]

    def _weights(self, members: Sequence[int]) -> tuple[str, ...]:
        """Parameters that a group reads, also through what only prepares them."""
        names: dict[str, None] = {}
        stack = [v for i in reversed(members) for v in reversed(self.ops[i].reads)]
        seen: set[int] = set()
        while stack:
            v = stack.pop()
            if v in seen or v not in self.flow.free:
                continue
            seen.add(v)
            if v in self.flow.weights:
                names[self.flow.weights[v]] = None
            elif v in self.producer:
                stack.extend(self.ops[self.producer[v]].reads)
        return tuple(names)
