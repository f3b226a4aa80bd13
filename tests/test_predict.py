"""Terms fitted to measured steps: the data, the calibration of the package, and its errors."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from jaxlamina.cli.main import main
from jaxlamina.errors import UserError
from jaxlamina.planner import points, prediction
from jaxlamina.planner.calibration import DeviceCalibration, calibration_names, for_device
from jaxlamina.planner.costs import Terms
from jaxlamina.planner.fit import fit, sums
from jaxlamina.planner.hardware import Hardware, hardware_names
from jaxlamina.planner.points import measured

KNOWN = for_device("h200")


def test_a_third_of_the_counted_points_calibrate_and_the_rule_is_the_order():
    found = measured()
    assert len(found.steps) > 150
    assert len(found.calibrating) <= len(found.counted) / 3
    assert found.calibrating == tuple(point for point in found.counted if not point.later)[2::3]
    assert all(point.table and point.date and point.measured_ms > 0 for point in found.steps)
    sums = tuple(point for point in found.counted if point.later and point.is_sharded)
    assert found.calibrating_sums == sums[2::3] and len(sums) >= 20
    used = (*found.calibrating, *found.calibrating_sums)
    assert set(KNOWN.points) == {f"{point.table}: {point}" for point in used}


def test_points_that_do_not_repeat_themselves_are_not_counted():
    found = measured()
    assert all(p.spread <= points.SPREAD_LIMIT for p in found.counted)
    assert any(p.spread > points.SPREAD_LIMIT for p in found.steps)
    fields = {"table": "t", "date": "d", "device": "h200", "model": "llama-3-8b", "layers": 32, "rows": 1}
    assert points.point_of({**fields, "context": 1, "ms": [10.0, 10.5, 11.0]}).left_out.startswith(
        "its rounds"
    )
    assert not points.point_of({**fields, "context": 1, "ms": [10.0, 10.2, 15.0]}).left_out


def test_held_out_steps_are_predicted_within_the_aims():
    found = prediction.predicted(measured(), KNOWN)
    held_out = [one for one in found if one.is_held_out and not one.point.later]
    assert len(held_out) >= 2 * sum(one.was_fitted and not one.point.later for one in found)
    errors = prediction.Errors.of("held out", held_out)
    assert errors.median <= prediction.MEDIAN_AIM
    assert errors.worst <= prediction.WORST_AIM
    assert errors.met


def test_steps_whose_sums_are_xlas_are_predicted_within_a_tenth():
    """Two numbers were fitted to a third of them."""
    found = [
        one for one in prediction.predicted(measured(), KNOWN) if one.point.is_sharded and one.is_held_out
    ]
    assert len(found) >= 14 and {one.point.tensor_parallel for one in found} == {2, 4}
    errors = sorted(abs(one.error) for one in found)
    assert errors[-1] <= prediction.WORST_AIM and errors[int(0.8 * len(errors))] <= 0.085
    by_memory = KNOWN.links["memory"]
    terms, links = KNOWN.terms, {"memory": by_memory, "sharded": by_memory}
    as_ours = [1e3 * one.point.predicted(terms, links).step_s / one.point.measured_ms - 1 for one in found]
    assert min(as_ours) < -0.25, "priced as this project's sums they are a quarter too fast"


def test_steps_that_were_measured_later_are_predicted_within_the_aims_but_for_one():
    later = [one for one in prediction.predicted(measured(), KNOWN) if one.is_held_out and one.point.later]
    assert len(later) >= 20 and not any(one.was_fitted for one in later)
    assert prediction.Errors.of("later", later).median <= prediction.MEDIAN_AIM
    assert [str(one.point) for one in later if abs(one.error) > prediction.WORST_AIM] == [
        "llama-3-8b, B 66 x 4096, DOP (2, 1), memory, split, staggered, 3 batches"
    ]


def test_the_layout_that_is_predicted_to_be_fastest_is_nearly_so():
    found = prediction.predicted(measured(), KNOWN)
    ranked = prediction.rankings(found)
    assert len(ranked) == 22 and all(len(one.layouts) > 1 for one in ranked)
    assert sum("2 GPUs" in one.name for one in ranked) == 17
    assert sum(one.agrees for one in ranked) == 20 and sum(one.loss == 0 for one in ranked) == 18
    assert max(one.loss for one in ranked) < 0.05
    every = prediction.rankings(found, with_left_out=True)
    assert len(every) == 30 and sum(one.agrees for one in every) == 25
    [first] = [one for one in ranked if one.name == "llama-3-8b, B 64 x 4096, 2 GPUs, memory"]
    assert first.chosen == first.best and first.best[:2] == ("2 unsplit copies", 9.12)


def test_rankings_by_hand():
    fields = {"table": "t", "date": "d", "device": "h200", "model": "llama-3-8b", "layers": 32, "context": 1}

    def point(ms, predicted, rows, **how):
        one = points.point_of({**fields, "ms": ms, "rows": rows} | how)
        return prediction.Predicted(one, predicted, was_fitted=False)

    found = [point(10.0, 9.0, 8, dop=[1, 1]), point(9.0, 9.5, 8, dop=[1, 1], n_batches=2), point(8.0, 9.9, 4)]
    [one] = prediction.rankings(found)
    assert [name for name, *_ in one.layouts] == [
        "DOP (1, 1), split",
        "DOP (1, 1), split, staggered, 2 batches",
        "2 unsplit copies",
    ]
    assert one.chosen[0] == "DOP (1, 1), split" and one.best[0] == "2 unsplit copies"
    assert one.loss == pytest.approx(0.25) and not one.agrees
    assert prediction.rankings(found[:1]) == [] and prediction.rankings(found[1:])[0].loss == 9.0 / 8.0 - 1


def test_one_step_is_measured_several_times_and_the_hosts_are_apart():
    repeated = {one.name: one.apart for one in prediction.repeated(measured())}
    assert len(repeated) >= 5
    assert 0.02 < repeated["llama-3-8b, B 64 x 4096, unsplit"] < 0.05


@pytest.mark.slow  # 12 s of arithmetic
def test_the_packages_calibration_is_what_its_points_give():
    again = sums(measured().calibrating_sums, fit(prediction.evidence_of(measured())))
    found = DeviceCalibration(again.terms, again.links, "", {}, "")
    pairs = zip(prediction.predicted(measured(), KNOWN), prediction.predicted(measured(), found), strict=True)
    assert all(a.ms == pytest.approx(b.ms, rel=2e-3) for a, b in pairs)


@pytest.mark.slow
def test_a_model_that_was_left_out_is_predicted_as_well():
    known = measured()
    [errors] = [e for e in prediction.leave_one_out(known, KNOWN, lambda p: p.model) if e.name == "llama-7b"]
    assert errors.median <= prediction.MEDIAN_AIM
    assert errors.worst <= prediction.WORST_AIM


def test_every_device_has_terms_and_scaled_ones_say_so():
    assert calibration_names() == ["h200"]
    assert Terms.load("h200").scaled_from is None
    for name in hardware_names():
        if name == "h200":
            continue
        hardware = Hardware.load(name)
        try:
            found = Terms.load(name)
        except UserError as error:
            assert "tflops" in str(error)
            continue
        assert found.scaled_from == "NVIDIA H200"
        assert found.hardware == hardware
        ratio = hardware.bandwidth_gb_s / KNOWN.terms.hardware.bandwidth_gb_s
        assert found.product_bytes_s == pytest.approx(ratio * KNOWN.terms.product_bytes_s)
        assert found.slice_fixed_s == KNOWN.terms.slice_fixed_s
    links = for_device("h100").links
    assert links == KNOWN.links  # both data sheets say 450 GB/s
    with pytest.raises(UserError, match="no messages by 'mpi' were measured"):
        KNOWN.link("mpi")


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "here.json"
    KNOWN.save(path)
    assert DeviceCalibration.load(path) == KNOWN
    own = replace(KNOWN, terms=replace(KNOWN.terms, hardware=replace(KNOWN.terms.hardware, name="mine")))
    own.save(path)
    assert DeviceCalibration.load(path) == own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("terms"), "its keys must be"),
        (lambda d: d["terms"].update(colour=1.0), "unknown term 'colour'"),
        (lambda d: d["terms"].update(product_bytes_s="fast"), "could not convert"),
        (lambda d: d["terms"].update(product_bytes_s=-1), "product_bytes_s=-1.0 must be above 0"),
        (lambda d: d["terms"].pop("step_fixed_s"), "step_fixed_s"),
        (lambda d: d["links"]["memory"].update(bytes_s=0), "link 'memory' must have"),
        (lambda d: d["links"]["memory"].pop("bytes_s"), "bytes_s"),
        (lambda d: d["links"]["memory"].update(bytes_s=math.inf), "link 'memory' must have"),
        (lambda d: d["links"]["memory"].update(is_rendezvous="no"), "must be true or false"),
        (lambda d: d.update(hardware="h99"), "no device 'h99'"),
        (lambda d: d.update(hardware={"colour": "red"}), "colour"),
        (lambda d: d.update(date=3), "must be texts"),
        (lambda d: d.update(links=[1]), "is no calibration"),
    ],
)
def test_a_file_that_is_no_calibration_says_why(tmp_path, change, message):
    found = KNOWN.to_dict()
    change(found)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=message) as error:
        DeviceCalibration.load(path)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        DeviceCalibration.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("no")
    with pytest.raises(UserError, match="is not JSON"):
        DeviceCalibration.load(tmp_path / "text.json")
    with pytest.raises(UserError, match="cannot write"):
        KNOWN.save(tmp_path / "none" / "x.json")


def test_bench_predict_prints_the_table(capsys):
    main(["bench", "predict", "--no-leave-one-out"])
    out = capsys.readouterr().out
    record = json.loads(out.splitlines()[-1])
    assert record["bench"] == "predict"
    assert len(record["points"]) == len(measured().steps)
    [held_out] = [e for e in record["errors"] if e["name"] == "held out"]
    assert f"{held_out['median']:.1%}" in out
    assert "median at most 2.5%, met" in out


def test_bench_predict_wants_one_of_two_files(capsys, tmp_path):
    wanted = ["--calibration", str(tmp_path / "a.json"), "--out", str(tmp_path / "b.json")]
    assert main(["bench", "predict", *wanted]) == 2
    assert "leave --calibration out" in capsys.readouterr().err
