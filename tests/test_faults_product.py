"""Faults by who × what × when × how many ranks × transport (`faults_product`): the product is made, its cover has
all pairs, and the cover is run.

`make test` runs a part of the cover, another one with each commit, `make test-all` all of it. `FAULTS=all` runs the
whole product; `FAULTS="who=prefill what=stop"` a part of it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest
from checkpoint_examples import tiny_words_folder
from conftest import why_no_mpi
from fault_runs import Run, why_no_small_disk
from faults_product import AXES, cover, every, scenario, selected, why_not
from launch_hosts import why_no_hosts
from serving import ROOT
from supervised import DEADLINE_S

PARTS = 16
POSSIBLE = [fault for fault in every() if why_not(fault) is None]


def test_each_combination_is_a_scenario_or_a_reason():
    assert len(every()) == 6 * 6 * 7 * 4 * 2 and len(set(map(str, every()))) == len(every())
    for fault in every():
        if (reason := why_not(fault)) is None:
            made = scenario(fault)
            assert made.events and made.slow and made.mpi == (fault.transport == "mpi")
            whom = [event.whom for event in made.events if event.whom]
            assert fault.whom in whom, "it strikes nobody"
            assert not made.hosts or (min(made.hosts) >= 1 and sum(made.hosts) == fault.n_ranks)
        else:
            assert reason.count("\n") == 0
            with pytest.raises(ValueError, match="-"):
                scenario(fault)


def test_each_value_of_an_axis_can_be():
    for axis, values in AXES.items():
        assert {getattr(fault, axis) for fault in POSSIBLE} == set(values)


def test_every_pair_that_can_be_is_in_the_cover():
    chosen = cover()
    assert set().union(*(f.pairs for f in chosen)) == set().union(*(f.pairs for f in POSSIBLE))
    assert set(chosen) <= set(POSSIBLE) and len(chosen) == len(set(chosen)) < 80
    assert chosen == cover()


def test_a_part_of_the_product():
    assert selected("") == selected("cover") == cover() and selected("all") == POSSIBLE
    some = selected("who=prefill what=stop,kill dop=1x2 transport=xla")
    assert {(f.who, f.dop, f.transport) for f in some} == {("prefill", "1x2", "xla")} and len(some) == 2 * 7
    assert selected(str(POSSIBLE[7])) == [POSSIBLE[7]]
    for wrong in ("who", "who=me", "where=here", "what=kill,die", "dop=1,2"):
        with pytest.raises(ValueError, match="take all, a name, or axes"):
            selected(wrong)
    with pytest.raises(ValueError, match="no such fault"):
        selected("who=model1 dop=1x1")


def part_of_this_commit() -> int:
    """Of `PARTS`: the next one with each commit, so that as many in a row run the whole cover. 0 where no
    repository is, or no git."""
    words = ["git", "-c", f"safe.directory={ROOT}", "rev-list", "--count", "HEAD"]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout) % PARTS
    return 0


def asked_for(asked):
    """Of the cover all but this commit's part are for `make test-all`; whatever else is asked for is."""
    part = None if asked else part_of_this_commit()
    return [
        pytest.param(fault, marks=[pytest.mark.slow] * (i % PARTS != part))
        for i, fault in enumerate(selected(asked))
    ]


def test_parts_are_the_whole_cover(monkeypatch):
    found = []
    for part in range(PARTS):
        monkeypatch.setitem(globals(), "part_of_this_commit", lambda part=part: part)
        found += [param.values[0] for param in asked_for("") if not param.marks]
    assert sorted(found) == sorted(cover())
    assert all(param.marks for param in asked_for("cover"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_words_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize("fault", asked_for(os.environ.get("FAULTS", "")), ids=str)
def test_nothing_is_lost(fault, tiny, tmp_path):
    made = scenario(fault)
    reasons = (
        made.mpi and why_no_mpi(), made.hosts and why_no_hosts(), made.full_disk and why_no_small_disk()
    )  # fmt: skip
    if reason := next(filter(None, reasons), None):
        pytest.skip(reason)
    with contextlib.ExitStack() as cleanups:
        Run(made, tiny, tmp_path, cleanups).run()
