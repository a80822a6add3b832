"""The rules by which runs are judged, against closed forms, tables and simulation."""

import pytest

from harness import verdict


def row(metric, status="discard"):
    return {"metric": metric, "status": status}


def test_a_gain_must_exceed_the_floor():
    assert verdict.judge(0.989, 1.0, 0.01) == ("keep", "better")
    assert verdict.judge(0.5, 1.0, 0.5) == ("discard", "within noise")  # exactly the floor
    assert verdict.judge(0.998, 1.0, 0.002)[0] == "discard"  # a little more in floating point


def test_best_is_the_lowest_kept_score():
    rows = [row(1.0, "keep"), row(0.5), row(0.9, "keep"), row(0.95, "keep"), row(0, "keep")]
    assert verdict.best(rows)["metric"] == 0.9
    assert len(verdict.kept(rows)) == 3
    assert verdict.best([]) is None


def test_confidence_is_gain_over_median_deviation():
    rows = [row(1.0, "keep"), row(0.9, "keep"), row(0.97), row(0, "crash")]
    assert verdict.confidence(rows) == 3.333  # median 0.97, deviations 0.03, 0.07, 0


@pytest.mark.parametrize("rows", [[], [row(1.0, "keep"), row(0.9)], [row(1.0, "keep")] * 5])
def test_confidence_needs_three_scores_a_gain_and_a_spread(rows):
    assert verdict.confidence(rows) is None


def test_noise_floor_uses_the_tabulated_c4():
    floor, source = verdict.noise_floor([1.0, 1.01, 1.02])
    assert floor == pytest.approx(2 * 0.01 / 0.886227)  # c4(3)
    assert source == "measured, n=3"
    assert verdict.noise_floor([1.0])[0] == verdict.FLOOR_GUESS
