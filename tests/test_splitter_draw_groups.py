"""Which equations the drawings show as one operator, and under which name."""

from __future__ import annotations

import pytest
from draw_examples import MODELS, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from splitter.draw import to_svg
from splitter.draw.groups import Bundle, Flow, Operation, group_operations
from splitter.draw.model import KV, ModelView, Q
from splitter.draw.names import path_of, short_name


@pytest.mark.parametrize("name", MODELS)
def test_every_equation_is_in_exactly_one_group(name):
    model = drawn(name)
    view = ModelView(model)
    members = sorted(i for group in view.groups for i in group.members)
    assert members == list(range(len(model.traced.jaxpr.eqns)))
    for s in model.slices:
        shown = {i for part in (Q, KV) for g in view.part(s.index, part) for i in view.groups[g].members}
        assert shown == set(s.eqn_positions), "a slice shows just the equations it runs"


def slice_titles(name: str, i: int) -> list[tuple[str, str]]:
    view = ModelView(drawn(name))
    return [(view.groups[g].title, view.groups[g].detail) for part in (Q, KV) for g in view.part(i, part)]


def test_a_llama_layer_reads_as_a_person_would_name_it():
    assert slice_titles("llama", 0) == [
        ("Embed", "embed"), ("RMSNorm", "norm1"), ("q", ""), ("Rotary tables", ""), ("Rotary", ""),
        ("k", ""), ("Rotary tables", ""), ("Rotary", ""), ("v", ""),
    ]  # fmt: skip
    assert slice_titles("llama", 1)[:7] == [
        ("o", ""), ("Add", ""), ("RMSNorm", "norm2"), ("MLP", "gate · up · down"), ("Add", ""),
        ("RMSNorm", "norm1"), ("q", ""),
    ]  # fmt: skip
    assert slice_titles("llama", 4)[-2:] == [("RMSNorm", "norm"), ("LM head", "embed")]
    # Stacked weights are views into the same parameters: the same names.
    assert slice_titles("scan", 1) == slice_titles("llama", 1)


def test_other_models_are_named_by_their_own_parameters():
    titles = slice_titles("flax", 1)
    assert titles[:5] == [
        ("out", ""), ("Add", ""), ("LayerNorm", "norm2"), ("MLP", "up · down"), ("Add", ""),
    ]  # fmt: skip
    assert [t for t, _ in titles[-3:]] == ["query", "key", "value"]
    assert ("Embed", "wte") in slice_titles("gpt2", 0) and ("Embed", "wpe") in slice_titles("gpt2", 0)
    assert ("MLP", "c_fc · c_out") in slice_titles("gpt2", 1)
    assert [t for t, _ in slice_titles("parallel", 1)].count("Add") == 1, "x + attention + MLP is one sum"


def test_a_cache_stays_with_its_attention():
    view = ModelView(drawn("flax"))
    sites = [g for g in view.groups if g.kind == "attention"]
    assert len(sites) == 3 and all(len(g.members) == 3 for g in sites), "two cache writes and the operator"
    assert "writes its own cache" in to_svg(drawn("flax"))


def op(name, reads, writes, **kw):
    return Operation(name, tuple(reads), tuple(writes), frozenset({kw.pop("place", "here")}), **kw)


def test_unknown_operators_keep_their_scope_or_primitive():
    flow = Flow(
        operations=(
            op("dot_general", [0, 1], [2], scope="model/router"),
            op("top_k", [2], [3, 4], scope="model/router"),
            op("fft", [3], [5]),
            op("xor", [4, 5], [6], scope="mixer"),
        ),
        weights={1: "params['gate']['kernel']"},
        free=frozenset({1}),
        outputs=frozenset({6}),
    )
    got = [(g.kind, g.title) for g in group_operations(flow)]
    assert got == [("projection", "gate"), ("other", "router"), ("other", "fft"), ("other", "mixer")]


def test_places_are_never_mixed_and_bundles_stay_whole():
    pool = Bundle("operands", "Mask", "of inputs")
    flow = Flow(
        operations=(
            op("mul", [0], [1], place="a"),
            op("exp", [1], [2], place="b", bundle=pool),
            op("add", [2], [3], place="b"),
            op("neg", [1], [4], place="c", bundle=pool),
        ),
    )
    groups = group_operations(flow)
    assert [g.members for g in groups] == [(0,), (1, 3), (2,)]
    assert (groups[1].kind, groups[1].title, groups[1].detail) == ("operands", "Mask", "of inputs")


def test_an_mlp_is_not_taken_over_a_value_that_others_read():
    """gate's result also leaves the block, so hiding it inside one box would be wrong."""
    operations = (
        op("dot_general", [0, 10], [1]),
        op("tanh", [1], [2]),
        op("dot_general", [2, 11], [3]),
        op("add", [3, 1], [4]),
    )
    weights = {10: "params['up']", 11: "params['down']"}
    free, outputs = frozenset(weights), frozenset({4})
    titles = [g.title for g in group_operations(Flow(operations, weights, free, outputs=outputs))]
    assert titles == ["up", "Tanh", "down", "Add"]
    alone = Flow(operations[:3], weights, free, outputs=frozenset({3}))
    assert [(g.title, g.detail) for g in group_operations(alone)] == [("MLP", "up · down")]


def test_a_change_of_layout_for_one_product_is_part_of_it():
    """As where every projection transposes its own copy of the input: still one value into one MLP."""
    operations = (
        op("rsqrt", [0], [1]),
        op("transpose", [1], [2]),
        op("dot_general", [2, 10], [3]),
        op("logistic", [3], [4]),
        op("transpose", [1], [5]),
        op("dot_general", [5, 11], [6]),
        op("mul", [4, 6], [7]),
        op("dot_general", [7, 12], [8]),
    )
    weights = {10: "params['gate']", 11: "params['up']", 12: "params['down']"}
    groups = group_operations(Flow(operations, weights, frozenset(weights), outputs=frozenset({8})))
    assert [(g.title, g.members) for g in groups] == [("rsqrt", (0,)), ("MLP", (1, 2, 3, 4, 5, 6, 7))]


@st.composite
def flows(draw):
    """Random graphs of operations, with weights, inputs, places and bundles."""
    n_values = 4
    weights = {0: "params['a']", 1: "params['b'].weight"}
    free, given_values = {0, 1}, {2}
    operations = []
    names = [
        "add",
        "mul",
        "reshape",
        "rsqrt",
        "reduce_sum",
        "dot_general",
        "tanh",
        "cos",
        "concatenate",
        "gather",
        "sort",
    ]
    touched = {0, 1, 3}
    for _ in range(draw(st.integers(1, 14))):
        reads = draw(st.lists(st.integers(0, n_values - 1), min_size=1, max_size=3))
        place = draw(st.sampled_from(["q", "q", "kv"]))
        operations.append(op(draw(st.sampled_from(names)), reads, [n_values], place=place))
        if set(reads) <= free:
            free.add(n_values)
        elif not set(reads) & touched:
            given_values.add(n_values)
        if set(reads) & touched:
            touched.add(n_values)
        n_values += 1
    return Flow(
        tuple(operations), weights, frozenset(free), frozenset(given_values), frozenset({n_values - 1})
    )


@settings(max_examples=150, deadline=None)
@given(flows())
def test_groups_are_a_partition_without_cycles(flow):
    groups = group_operations(flow)
    assert sorted(i for g in groups for i in g.members) == list(range(len(flow.operations)))
    group_of = {i: k for k, g in enumerate(groups) for i in g.members}
    producer = {v: i for i, o in enumerate(flow.operations) for v in o.writes}
    after: dict[int, set[int]] = {k: set() for k in range(len(groups))}
    for i, o in enumerate(flow.operations):
        assert flow.operations[i].place == groups[group_of[i]].place
        for v in o.reads:
            if v in producer and group_of[producer[v]] != group_of[i]:
                after[group_of[producer[v]]].add(group_of[i])
    left = set(after)
    while ends := {k for k in left if not after[k] & left}:
        left -= ends
    assert not left, "groups need each other"
    assert all(g.title for g in groups)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("params['model.layers.0.self_attn.q_proj.weight']", "q_proj"),
        ("params['layers'][3]['q']", "q"),
        ("params['layers']['q'][3]", "q"),
        ("params['blocks'][0]['attention']['value']['kernel'].value", "value"),
        ("params['norm1']['scale'].value", "norm1"),
        ("params['it\\'s']['bias']", "it's"),
        ("params[2]", "parameter 2"),
        ("constant 0", "constant 0"),
    ],
)
def test_short_names_of_parameters(name, short):
    assert short_name(name) == short


def test_paths_of_parameters():
    assert path_of("params['layers'][0]['attn.q_proj'].value") == ("layers", "0", "attn", "q_proj", "value")
