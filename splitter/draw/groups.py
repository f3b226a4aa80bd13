"""Which equations of a traced model a reader would call one operator, as policy on plain data.

A layer is some sixty equations; a reader sees a norm, a projection, rotary embedding, an MLP. `group_operations` puts
every operation in exactly one group and names it, by what it computes and by the parameters it reads. It works on
any model: what it does not recognise keeps its scope's or its primitive's name. Knows nothing of JAX or of drawing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from splitter.draw.names import (
    ARITHMETIC,
    HEAD_WORDS,
    JOINT_TITLES,
    LAYOUT,
    LIGHT,
    LOOKUPS,
    PRODUCTS,
    joined,
    shared_name,
    short_name,
)


@dataclass(frozen=True)
class Operation:
    """One equation. `reads` and `writes` are value numbers, literals left out.

    place: where it runs; operations of different places never share a group. scope: its `jax.named_scope` path.
    bundle: operations with one bundle form one group whatever they compute, under the title in `Flow.bundles`.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    place: Hashable = None
    scope: str = ""
    bundle: Hashable | None = None


@dataclass(frozen=True)
class Flow:
    """A model's operations in order of execution, and what is known of its values.

    weights: value -> path of the parameter it is, or is a view of. free: values of parameters and constants alone.
    given: values of inputs and constants alone (positions, masks, rotary tables). outputs: the model's results.
    bundles: bundle -> (kind, title, detail).
    """

    operations: tuple[Operation, ...]
    weights: Mapping[int, str] = field(default_factory=dict)
    free: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    bundles: Mapping[Hashable, tuple[str, str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class DrawnGroup:
    """Operations shown as one. `members` index `Flow.operations`; `weights` are the parameters they read."""

    kind: str
    title: str
    detail: str
    members: tuple[int, ...]
    place: Hashable
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
        self.kind: dict[int, str] = {}  # by representative
        self.producer = {v: i for i, op in enumerate(self.ops) for v in op.writes}
        self.consumers: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            for v in dict.fromkeys(op.reads):
                self.consumers.setdefault(v, []).append(i)
        self.role = [self._role(op) for op in self.ops]
        self.root: dict[int, int] = {}  # operation -> the operation its only source of activations is
        self.joint: set[int] = set()
        self.settled: set[int] = set()  # light operations that are part of a heavy one
        self._trace_roots()
        self._settle_heads()
        self._connect()
        self._absorb()
        self._join_sums()
        self._place_free()
        self.kind = {g: self._kind(g, members) for g, members in self._members().items()}
        self._find_mlps()
        self._join_unknown()
        self._break_cycles()

    # --- basics ---

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def union(self, i: int, j: int) -> int:
        a, b = sorted((self.find(i), self.find(j)))
        self.parent[b] = a
        return a

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

    def _used_only_by(self, v: int, i: int) -> bool:
        return self.consumers.get(v) == [i] and v not in self.flow.outputs

    # --- step 1: light operations belong to the one activation they derive from ---

    def _trace_roots(self) -> None:
        bundles: dict[Hashable, int] = {}
        for i, op in enumerate(self.ops):
            if self.role[i] == "bundle":
                self.root[i] = self.union(bundles.setdefault(op.bundle, i), i)
            elif self.role[i] == "heavy":
                self.root[i] = i
            elif self.role[i] == "light":
                self._root_of_light(i, op)

    def _root_of_light(self, i: int, op: Operation) -> None:
        sources = self._activations(op)
        roots = {self.root[self.producer[v]] for v in sources if v in self.producer}
        if len(roots) != 1:
            self.root[i] = i
            self.joint.add(i)
            return
        (root,) = roots
        self.root[i] = root
        # A bias, a scale, a reshape straight behind a product and read by nothing else is part of it.
        tail = (
            len(sources) == 1
            and op.name in LAYOUT | ARITHMETIC
            and self.find(self.producer[sources[0]]) == self.find(root)
            and self._used_only_by(sources[0], i)
            and op.place == self.ops[root].place
            and self.role[root] != "bundle"
            and not any(v in self.flow.given for v in op.reads)
        )
        if tail:
            self.union(root, i)
            self.settled.add(i)

    def _settle_heads(self) -> None:
        """A change of layout for the sake of one product, lookup, … is part of that."""
        for i in reversed(range(len(self.ops))):
            op = self.ops[i]
            readers = {c for v in op.writes for c in self.consumers.get(v, ())}
            if (
                self.role[i] != "light"
                or op.name not in LAYOUT
                or i in self.joint | self.settled
                or len(readers) != 1
            ):
                continue
            (reader,) = readers
            is_heavy = self.role[reader] == "heavy" or reader in self.settled
            if is_heavy and self.ops[reader].place == op.place and not self.flow.outputs & set(op.writes):
                self.union(reader, i)
                self.settled.add(i)

    # --- step 2: connected light operations with one root, or of inputs alone, are one group ---

    def _connect(self) -> None:
        for i, op in enumerate(self.ops):
            for v in op.reads:
                j = self.producer.get(v)
                if j is None or self.ops[j].place != op.place or self.role[j] != self.role[i]:
                    continue
                same_root = (
                    self.role[i] == "light"
                    and self.root[i] == self.root[j]
                    and not {i, j} & self.settled
                    and self.root[i] not in (i, j)
                )
                if same_root or self.role[i] == "given":
                    self.union(i, j)

    def _features(self, members: Iterable[int]) -> list[str]:
        """What a group of light operations computes, as titles; empty for mere layout and arithmetic."""
        members = list(members)
        names = {self.ops[i].name for i in members}
        own = {v for i in members for v in self.ops[i].writes}
        reads_given = any(v in self.flow.given and v not in own for i in members for v in self.ops[i].reads)
        turns = "mul" in names and names & {"concatenate", "slice", "split", "select_n", "neg", "rev"}
        found = []
        if names & {"rsqrt", "sqrt", "pow"} and names & {"reduce_sum"}:
            ordered = [self.ops[i].name for i in sorted(members)]
            root = min(ordered.index(n) for n in ("rsqrt", "sqrt", "pow") if n in names)
            found.append("LayerNorm" if ordered[:root].count("reduce_sum") > 1 else "RMSNorm")
        if "exp" in names and "reduce_sum" in names:
            found.append("Softmax")
        if names & {"cos", "sin"}:
            found.append("Rotary tables")
        elif reads_given and turns:
            found.append("Rotary")
        if "logistic" in names:
            found.append("SiLU" if "mul" in names else "Sigmoid")
        elif names & {"erf", "erfc"} or ("tanh" in names and names & {"integer_pow", "pow"}):
            found.append("GELU")
        elif "tanh" in names:
            found.append("Soft cap" if names & {"mul", "div"} else "Tanh")
        elif "log1p" in names:
            found.append("Softplus")
        elif names & {"max", "clamp"} and not found:
            found.append("ReLU" if "max" in names else "Clamp")
        if names & {"argmax", "argmin"}:
            found.append("Argmax" if "argmax" in names else "Argmin")
        if names & {"iota", "lt", "le", "gt", "ge"} and "select_n" not in names and not found:
            found.append("Mask")
        return found

    # --- step 3: layout and arithmetic of no name of its own goes to its neighbour ---

    def _absorb(self) -> None:
        for g, members in self._members().items():
            if any(self.role[i] not in ("light", "given") or self.root.get(i) == i for i in members):
                continue
            if self._features(members):
                continue
            root = self.root.get(g)
            if root is not None and self.ops[root].place == self.ops[g].place and self.role[root] != "bundle":
                self.union(root, g)
                continue
            readers = self._readers(members)
            if len(readers) == 1 and not any(
                v in self.flow.outputs for i in members for v in self.ops[i].writes
            ):
                (reader,) = readers
                if self.ops[reader].place == self.ops[g].place and self.role[reader] != "bundle":
                    self.union(reader, g)

    def _readers(self, members: Iterable[int]) -> set[int]:
        own = set(members)
        return {
            self.find(c)
            for i in own
            for v in self.ops[i].writes
            for c in self.consumers.get(v, ())
            if c not in own
        }

    def _join_sums(self) -> None:
        """`x + a + b` is one sum."""
        for i in sorted(self.joint):
            op = self.ops[i]
            for v in self._activations(op) if op.name == "add" else ():
                j = self.producer.get(v, i)
                if (
                    j in self.joint
                    and self.ops[j].name == "add"
                    and self.ops[j].place == op.place
                    and self._used_only_by(v, i)
                ):
                    self.union(i, j)

    def _place_free(self) -> None:
        """What only prepares weights (a broadcast, a cast) belongs to whoever reads the result."""
        for i in reversed(range(len(self.ops))):
            if self.role[i] != "free":
                continue
            readers = [c for v in self.ops[i].writes for c in self.consumers.get(v, ())]
            same = [c for c in readers if self.ops[c].place == self.ops[i].place and self.role[c] != "bundle"]
            if same:
                self.union(i, same[0])

    # --- step 4: names, MLPs, the rest ---

    def _weights(self, members: Iterable[int]) -> tuple[str, ...]:
        names: dict[str, None] = {}
        stack = [v for i in sorted(members, reverse=True) for v in reversed(self.ops[i].reads)]
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

    def _kind(self, g: int, members: Sequence[int]) -> str:
        roles = {self.role[i] for i in members}
        if "bundle" in roles:
            return "bundle"
        heavy = [self.ops[i].name for i in members if self.role[i] == "heavy"]
        if heavy:
            if heavy[0] in PRODUCTS:
                return "projection" if self._weights(members) else "product"
            if heavy[0] not in LOOKUPS or not self._weights(members):
                return "other"
            chosen = [v for i in members if self.role[i] == "heavy" for v in self._activations(self.ops[i])]
            return "lookup" if chosen else "embedding"
        if roles == {"free"}:
            return "weights"
        features = self._features(members)
        if "given" in roles:
            return "tables" if "Rotary tables" in features else "given"
        if self.joint & set(members):
            names = {self.ops[i].name for i in self.joint & set(members)}
            return "add" if names == {"add"} else "multiply" if names == {"mul"} else "other"
        if any(f in ("RMSNorm", "LayerNorm") for f in features):
            return "norm"
        if features in (["SiLU"], ["GELU"], ["ReLU"], ["Sigmoid"], ["Tanh"]):
            return "activation"
        return "rotary" if features == ["Rotary"] else "other"

    def _find_mlps(self) -> None:
        """Products with an activation function between them, one value in and one out, are one MLP."""
        members = self._members()
        for g in [g for g, kind in self.kind.items() if kind == "projection"]:
            if self.find(g) != g or self.kind[g] != "projection":
                continue
            inside, entries, stack = {g}, set(), [g]
            while stack:
                for v in self._reads(members[stack.pop()]):
                    h = self.find(self.producer[v]) if v in self.producer else -1
                    if h in inside:
                        continue
                    if self._within_mlp(h, g, inside, members):
                        inside.add(h)
                        stack.append(h)
                    else:
                        entries.add(v)
            kinds = [self.kind[h] for h in inside]
            entries -= {v for h in inside for i in members[h] for v in self.ops[i].writes}
            if "activation" in kinds and kinds.count("projection") >= 2 and len(entries) <= 1:
                for h in inside:
                    self.union(g, h)
                self.kind[self.find(g)] = "mlp"

    def _reads(self, members: Sequence[int]) -> list[int]:
        own = {v for i in members for v in self.ops[i].writes}
        return [v for i in members for v in self._activations(self.ops[i]) if v not in own]

    def _within_mlp(self, h: int, g: int, inside: set[int], members: Mapping[int, list[int]]) -> bool:
        """Whether group h, which feeds an MLP that ends in g, is part of it: nothing else reads its results."""
        if h < 0 or self.kind[h] not in ("projection", "activation", "multiply"):
            return False
        leaves = any(v in self.flow.outputs for i in members[h] for v in self.ops[i].writes)
        return self.ops[h].place == self.ops[g].place and not leaves and self._readers(members[h]) <= inside

    def _join_unknown(self) -> None:
        """Neighbouring light operations of no known kind and of one scope are one group."""
        for i, op in enumerate(self.ops):
            for v in self._activations(op):
                j = self.producer.get(v, i)
                a, b = self.find(i), self.find(j)
                if (
                    a != b
                    and self.kind[a] == self.kind[b] == "other"
                    and self.role[i] == self.role[j] == "light"
                    and (self.ops[j].place, self.ops[j].scope) == (op.place, op.scope)
                    and self._used_only_by(v, i)
                ):
                    self.kind[self.union(a, b)] = "other"

    def _break_cycles(self) -> None:
        """Should groups need each other, their operations stand alone: a picture must flow one way."""
        while cyclic := self._in_cycles():
            members = self._members()
            for i in [i for g in cyclic for i in members[g]]:
                self.parent[i] = i
                self.kind[i] = self._kind(i, [i])

    def _in_cycles(self) -> set[int]:
        """Groups that lie on a cycle, or between two."""
        members = self._members()
        after = {g: self._readers(ms) for g, ms in members.items()}
        before: dict[int, set[int]] = {g: set() for g in members}
        for g, readers in after.items():
            for r in readers:
                before[r].add(g)
        left = set(members)
        for towards, away in ((before, after), (after, before)):
            waiting = {g: len(towards[g] & left) for g in left}
            ready = [g for g in left if not waiting[g]]
            while ready:
                g = ready.pop()
                left.discard(g)
                for r in away[g] & left:
                    waiting[r] -= 1
                    if not waiting[r]:
                        ready.append(r)
        return {g for g in left if len(members[g]) > 1 and self.kind[g] != "bundle"}

    # --- step 5: names ---

    def groups(self) -> tuple[DrawnGroup, ...]:
        embeddings = {
            w for g, ms in self._members().items() if self.kind[g] == "embedding" for w in self._weights(ms)
        }
        made = []
        for g, members in sorted(self._members().items()):
            kind, weights = self.kind[g], self._weights(members)
            if kind == "bundle":
                kind, title, detail = self.flow.bundles[self.ops[g].bundle]
            else:
                title, detail = self._title(kind, members, weights)
                if kind == "projection" and self._is_head(members, weights, embeddings):
                    kind, title, detail = "head", "LM head", title
            made.append(DrawnGroup(kind, title, detail, tuple(members), self.ops[g].place, weights))
        return tuple(made)

    def _is_head(self, members: Sequence[int], weights: Sequence[str], embeddings: set[str]) -> bool:
        ends = any(v in self.flow.outputs for i in members for v in self.ops[i].writes)
        return ends and any(w in embeddings or HEAD_WORDS.search(short_name(w)) for w in weights)

    def _title(self, kind: str, members: Sequence[int], weights: Sequence[str]) -> tuple[str, str]:
        names = shared_name(weights)
        if kind == "projection":
            return names, ""
        if kind == "embedding":
            return "Embed", names
        if kind == "lookup":
            return "Lookup", names
        if kind == "mlp":
            return "MLP", names.replace("_proj", "")
        if kind == "weights":
            return "Weights", names
        if kind == "product":
            return "Product", self._scope(members)
        features = self._features(i for i in members if self.role[i] != "free")
        if features:
            return " · ".join(features), names
        wanted = [i for i in members if self.role[i] == "heavy"] or [i for i in members if i in self.joint]
        primitives = list(
            dict.fromkeys(self.ops[i].name for i in wanted or members if self.role[i] != "free")
        )
        scope = self._scope(members)
        if kind not in ("add", "multiply") and scope:
            return scope, joined(primitives)
        return joined([JOINT_TITLES.get(p, p) for p in primitives]), names

    def _scope(self, members: Sequence[int]) -> str:
        """The last part of the scope that all members share, or nothing."""
        scopes = {self.ops[i].scope for i in members if self.role[i] != "free"}
        return scopes.pop().rsplit("/", 1)[-1] if len(scopes) == 1 else ""
