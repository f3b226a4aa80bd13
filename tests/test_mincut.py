"""The minimum cuts against an independent brute force and against scipy's maximum flow."""

from __future__ import annotations

from itertools import product

import numpy as np
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import maximum_flow

from splitter.mincut import CutGraph, MaxFlow, Op, plan_cuts


@st.composite
def cut_graphs(draw):
    """Random models: a few operators and 1 to 3 attentions in a topological order, values of random bytes."""
    n_inputs = draw(st.integers(1, 2))
    values = [draw(st.integers(1, 20)) for _ in range(n_inputs)]
    level = {v: -1 for v in range(n_inputs)}
    cheap = {v: True for v in range(n_inputs)}
    ops, reads, writes = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 3))):
            used = tuple(
                draw(st.lists(st.sampled_from(range(len(values))), min_size=1, max_size=3, unique=True))
            )
            recomputable = draw(st.booleans()) and all(level[v] < 0 and cheap[v] for v in used)
            new = tuple(range(len(values), len(values) + draw(st.integers(1, 2))))
            values += [draw(st.integers(1, 20)) for _ in new]
            ops.append(Op(used, new, max(level[v] for v in used), recomputable))
            for v in new:
                level[v], cheap[v] = ops[-1].level, recomputable
        qkv = tuple(draw(st.lists(st.sampled_from(range(len(values))), min_size=1, max_size=3, unique=True)))
        reads.append(qkv)
        writes.append(len(values))
        level[len(values)], cheap[len(values)] = len(reads) - 1, False
        values.append(draw(st.integers(1, 20)))
    used = (writes[-1], *draw(st.lists(st.sampled_from(range(len(values))), max_size=2, unique=True)))
    ops.append(Op(tuple(dict.fromkeys(used)), (len(values),), len(reads) - 1, False))
    values.append(1)
    return CutGraph(
        tuple(ops), tuple(values), tuple(range(n_inputs)), tuple(reads), tuple(writes), (len(values) - 1,)
    )


def brute_force_bytes(g: CutGraph, site: int) -> int:
    """The least bytes that must be kept at one attention, over every legal choice of which operators run
    before it.

    Independent of the solver: tries all sets S of operators. S must hold what q, k, v of attentions up to
    this one need, must be closed under what its operators need, and may hold nothing that depends on this
    attention or a later one. The bytes are those of the values that what remains reads, where a recomputable
    operator counts as remaining only if what remains reads its result.
    """
    producer = {v: o for o, op in enumerate(g.ops) for v in op.writes}
    open_ops = [o for o, op in enumerate(g.ops) if op.level < site]
    best = None
    for choice in product([False, True], repeat=len(open_ops)):
        before = {o for o, chosen in zip(open_ops, choice, strict=True) if chosen}
        ready = (
            set(g.inputs)
            | {g.site_writes[j] for j in range(site)}
            | {v for o in before for v in g.ops[o].writes}
        )

        def computable(v, ready=ready):
            """From what is there, recomputing cheap operators where needed."""
            if v in ready:
                return True
            o = producer.get(v)
            return o is not None and g.ops[o].recomputable and all(computable(w) for w in g.ops[o].reads)

        if not all(computable(v) for o in before for v in g.ops[o].reads):
            continue
        if not all(computable(v) for j in range(site + 1) for v in g.site_reads[j]):
            continue
        carried: set[int] = set()
        stack = [v for o, op in enumerate(g.ops) if o not in before and not op.recomputable for v in op.reads]
        stack += [v for j in range(site + 1, len(g.site_reads)) for v in g.site_reads[j]] + list(g.outputs)
        seen = set()
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            if v in ready:
                carried.add(v)
            elif v in producer and g.ops[producer[v]].recomputable:
                stack.extend(g.ops[producer[v]].reads)
        cost = sum(g.value_bytes[v] for v in carried)
        best = cost if best is None else min(best, cost)
    assert best is not None
    return best


@given(cut_graphs())
@settings(max_examples=300, deadline=None)
def test_every_cut_is_as_small_as_brute_force_finds(g):
    for site, cut in enumerate(plan_cuts(g)):
        assert cut.context_bytes == sum(g.value_bytes[v] for v in cut.context)
        assert cut.context_bytes == brute_force_bytes(g, site)


@given(cut_graphs())
@settings(max_examples=200, deadline=None)
def test_each_slice_can_be_computed_from_the_context_before_it(g):
    producer = {v: o for o, op in enumerate(g.ops) for v in op.writes}
    cuts = plan_cuts(g)
    known = set(g.inputs)
    for site in range(len(cuts) + 1):
        targets = [*g.site_reads[site], *cuts[site].context] if site < len(cuts) else list(g.outputs)
        stack, seen = list(targets), set()
        while stack:
            v = stack.pop()
            if v in known or v in seen:
                continue
            seen.add(v)
            assert v in producer, f"slice {site} needs value {v}, which is neither carried nor computable"
            stack.extend(g.ops[producer[v]].reads)
        if site < len(cuts):
            known = {*cuts[site].context, g.site_writes[site]}


@given(
    st.integers(2, 7).flatmap(
        lambda n: st.lists(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), st.integers(0, 30)),
            min_size=1,
            max_size=20,
        ).map(lambda edges: (n, edges))
    )
)
@settings(max_examples=200, deadline=None)
def test_max_flow_agrees_with_scipy(problem):
    n, edges = problem
    flow = MaxFlow()
    for _ in range(n - 2):
        flow.node()
    dense = np.zeros((n, n), np.int32)
    for a, b, capacity in edges:
        if a != b:
            flow.edge(a, b, capacity)
            dense[a, b] += capacity
    side = flow.source_side()
    cut = sum(int(dense[a, b]) for a in side for b in range(n) if b not in side)
    assert 0 in side and 1 not in side
    assert cut == maximum_flow(sp.csr_matrix(dense), 0, 1).flow_value


def test_capacities_beyond_32_bits():
    huge = 1 << 40
    g = CutGraph((Op((0,), (1,), -1), Op((1, 2), (3,), 0)), (huge, huge + 1, 5, 1), (0,), ((1,),), (2,), (3,))
    assert plan_cuts(g)[0].context_bytes == huge + 1


def test_a_value_read_twice_is_charged_once():
    # value 1 is read by two operators after the attention; carrying it costs its 10 bytes once.
    g = CutGraph(
        (Op((0,), (1,), -1), Op((1, 2), (3,), 0), Op((1, 3), (4,), 0)),
        (99, 10, 1, 1, 1),
        (0,),
        ((1,),),
        (2,),
        (4,),
    )
    assert plan_cuts(g)[0].context == (1,)
