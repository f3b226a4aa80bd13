"""Equal cost: Lamina's pools against H100 unsplit, and that the page has what the planner says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxlamina.planner import equal_cost
from jaxlamina.planner.comparison import Printed

ROOT = Path(__file__).resolve().parents[1]
ALL = [(model, trace) for model in equal_cost.MODELS for trace in equal_cost.TRACES]


@pytest.mark.parametrize(("model", "trace"), ALL)
def test_a_gain_is_the_product_of_its_two_factors(model, trace):
    for is_roofline in (False, True):
        one = equal_cost.equal_cost(model, trace, is_roofline)
        assert one.gain == pytest.approx(one.by_batch * one.at_same_batch)
        assert one.by_both >= 1 and one.split.n_rows > one.whole.n_rows
        a, b = equal_cost.DOPS[model]
        assert (one.split.setup.n_model, one.split.setup.n_attention, one.whole.setup.n_model) == (
            a,
            b,
            2 * a,
        )
        assert one.split.usd_h == pytest.approx({1: 20.32, 2: 40.64}[a])  # Table 5
        assert one.whole.usd_h == pytest.approx({1: 22.12, 2: 44.24}[a])


def test_what_the_papers_text_states_is_compared():
    stated = [row for row in equal_cost.figure_10().rows if row.printed]
    assert [row.printed.text for row in stated] == ["16.1", "90.1", "2.39"]
    assert all((row.agrees is False) == bool(row.reason) for row in stated)
    [batch] = [row for row in equal_cost.figure_11().rows if row.printed]
    assert isinstance(batch.printed, Printed) and batch.printed.text == "800"


@pytest.mark.slow
def test_equal_gpus_gain_nothing_and_the_page_has_what_the_planner_says(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import when_to_split

    page = when_to_split.PAGE.read_text(encoding="utf-8")
    assert when_to_split.with_tables(page) == page, "run: python docs/when_to_split.py"
    gains = {row.what: row.ours for row in equal_cost.beyond().rows}
    assert len(gains) == 15 and all(gain < 0 for what, gain in gains.items() if "equal GPUs" in what)
    sys.modules.pop("when_to_split", None)
