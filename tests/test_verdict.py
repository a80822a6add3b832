"""The rules by which runs are judged, against closed forms, tables and simulation."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from harness import verdict
from harness.verdict import Spread, decide_next, disturbance


def row(metric, status="discard"):
    return {"metric": metric, "status": status}


# ---- rows ----


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


# ---- spread and floor ----


def test_spreads_are_pooled_within_codes():
    spread = verdict.pooled_spread([[1.0, 1.2], [5.0, 5.1, 5.2], [9.0], []])
    assert spread.degrees == 3
    assert spread.sd == pytest.approx(math.sqrt((0.02 + 0.02) / 3))  # 2 * 0.1**2 each


@pytest.mark.parametrize(("degrees", "chi_square"), [(4, 1.0636), (10, 4.8652), (30, 20.599)])
def test_upper_bound_of_the_spread_agrees_with_tables(degrees, chi_square):
    expected = math.sqrt(degrees / chi_square)  # 10% quantiles as tables of chi-square give them
    assert Spread(1.0, degrees).upper == pytest.approx(expected, rel=0.002)


def test_upper_bound_covers_the_true_spread_in_nine_of_ten_samples():
    samples = np.random.default_rng(0).standard_normal((4000, 5))
    upper = [Spread(float(sample.std(ddof=1)), 4).upper for sample in samples]
    assert np.mean(np.array(upper) > 1) == pytest.approx(0.9, abs=0.015)


def test_floor_is_that_of_a_difference_and_a_guess_without_repeats():
    spread = Spread(0.01, 4)
    floor, source = verdict.noise_floor(spread, 5)
    assert floor == pytest.approx(2.5 * spread.upper * math.sqrt(1 + 1 / 5))
    assert source == "measured, 4 degrees of freedom"
    assert verdict.noise_floor(Spread())[0] == verdict.FLOOR_GUESS


@pytest.mark.parametrize(
    ("t", "degrees", "tail"), [(2.132, 4, 0.05), (3.747, 4, 0.01), (2.764, 10, 0.01)]
)
def test_normal_z_has_the_tail_of_student_t(t, degrees, tail):
    z = verdict.normal_z(t, 1.0, degrees)
    assert 0.5 * math.erfc(z / math.sqrt(2)) == pytest.approx(tail, rel=0.05)
    assert verdict.normal_z(-t, 1.0, degrees) == -z


def test_one_outlier_moves_the_robust_mean_by_a_bounded_amount():
    assert verdict.robust_mean([1.0, 3.0], 0.1) == 2.0
    usual = [1.00, 1.01, 0.99, 1.02, 0.98]
    assert verdict.robust_mean(usual, 0.02) == pytest.approx(1.0)
    assert verdict.robust_mean([*usual[:4], 9.0], 0.02) == pytest.approx(1.01, abs=0.01)


# ---- the next step ----

KNOWN = Spread(0.01, 40)
FIVE = (1.0, 1.01, 0.99, 1.005, 0.995)


def test_a_clear_gain_is_kept_at_once_and_a_clear_loss_discarded():
    kept = decide_next([0.92], FIVE, KNOWN)
    assert (kept.action, kept.reason) == ("keep", "better")
    assert kept.gain == pytest.approx(0.08)
    assert kept.error == pytest.approx(0.01 * math.sqrt(1 + 1 / 5))
    lost = decide_next([1.05], FIVE, KNOWN)
    assert (lost.action, lost.reason) == ("discard", "worse")


def test_no_gain_is_discarded_at_once():
    decision = decide_next([1.0], FIVE, KNOWN)
    assert (decision.action, decision.reason) == ("discard", "within noise")


def test_a_doubtful_gain_asks_for_more_runs_up_to_five():
    candidate = [0.985]
    actions = []
    incumbent = list(FIVE)
    while (step := decide_next(candidate, incumbent, KNOWN)).action.startswith("run"):
        actions.append(step.action)
        (candidate if step.action == "run_candidate" else incumbent).append(
            0.985 if step.action == "run_candidate" else 1.0
        )
    assert step.action == "keep"
    assert actions.count("run_candidate") <= 4


@pytest.mark.parametrize("gain", [0.012, 0.009, 0.006])
def test_it_always_ends(gain):
    candidate, incumbent = [1 - gain], list(FIVE)
    for _ in range(20):
        step = decide_next(candidate, incumbent, KNOWN)
        if step.action in ("keep", "discard"):
            break
        side = candidate if step.action == "run_candidate" else incumbent
        side.append(1 - gain if step.action == "run_candidate" else 1.0)
    assert step.action in ("keep", "discard")
    assert len(candidate) <= 5 and len(incumbent) <= 9


def test_a_spread_from_few_repeats_needs_a_larger_gain():
    candidate = [0.965, 0.965]
    assert decide_next(candidate, FIVE, Spread(0.01, 40)).action == "keep"
    assert decide_next(candidate, FIVE, Spread(0.01, 4)).action != "keep"


def test_without_any_repeat_the_incumbent_is_run_first():
    assert decide_next([0.5], [1.0], Spread()).action == "run_incumbent"


def test_scores_that_never_vary_are_judged_as_they_are():
    exact = Spread(0.0, 4)
    assert decide_next([0.999], [1.0] * 5, exact).action == "keep"
    assert decide_next([1.0], [1.0] * 5, exact).action == "discard"
    assert decide_next([1.001], [1.0] * 5, exact).reason == "worse"


def test_an_incumbent_known_by_lucky_scores_only_is_run_again_before_a_discard():
    incumbent = [1.0, 1.0]
    assert decide_next([1.0], incumbent, KNOWN, selected=2).action == "run_incumbent"
    assert decide_next([1.0], incumbent, KNOWN, selected=0).action == "discard"
    assert decide_next([1.02], incumbent, KNOWN, selected=2).action == "discard"  # clear anyway


def test_once_decides_on_the_scores_that_there_are():
    assert decide_next([0.985], FIVE, KNOWN, once=True).action == "discard"
    assert decide_next([0.9], FIVE, KNOWN, once=True).action == "keep"
    assert decide_next([1.1], FIVE, KNOWN, once=True).reason == "worse"


def test_once_a_gain_of_exactly_the_floor_is_none():
    assert verdict.FLOOR_GUESS == 0.002
    assert decide_next([0.998], [1.0], Spread(), once=True).reason == "within noise"
    assert decide_next([0.9979], [1.0], Spread(), once=True).reason == "better"


def test_a_simplification_may_be_equal_within_half_a_standard_deviation():
    options = {"simpler": True, "lines": (1, 9)}
    assert decide_next([1.002], FIVE, KNOWN, **options).action == "run_candidate"
    kept = decide_next([1.002] * 3, FIVE, KNOWN, **options)
    assert (kept.action, kept.reason) == ("keep", "simpler")
    assert decide_next([1.008] * 3, FIVE, KNOWN, **options).action == "discard"


def test_what_removes_no_lines_is_no_simplification():
    assert decide_next([1.002] * 3, FIVE, KNOWN, simpler=True, lines=(9, 9)).action == "discard"


def test_a_series_of_simplifications_cannot_give_back_the_gain():
    best_mean = score = 1.0
    for _ in range(20):
        worse = score + 0.004  # each within the tolerance of the one before it
        options = {"simpler": True, "lines": (0, 1), "best_mean": best_mean}
        if decide_next([worse] * 3, [score] * 3, KNOWN, **options).action == "keep":
            score = worse
    assert score - best_mean <= 0.5 * KNOWN.sd


# ---- error rates, by simulation ----


@dataclass
class Rates:
    """What became of the edits of many simulated sessions."""

    false_keeps: float  # neutral edits kept per session
    runs: float  # per candidate, further runs of the incumbent included
    kept_2: float  # share of the edits that gain two standard deviations
    kept_3: float  # three


def simulate(draw, shares, sessions, edits=60):
    """Sessions of `edits` edits, judged by decide_next; the spread is the session's own.

    Args:
        draw: draw(count) gives scores with mean 0 and standard deviation 1.
        shares: {gain in standard deviations: share of the edits}.
    """
    random = np.random.default_rng(1)
    pool = iter(draw(sessions * edits * 4 + sessions * 20).tolist())
    tried = dict.fromkeys(shares, 0)
    kept = dict.fromkeys(shares, 0)
    runs = 0
    for _ in range(sessions):
        level, selected, incumbent = 0.0, 0, [next(pool) for _ in range(5)]
        squares, degrees = 0.0, 0  # within the codes that are neither candidate nor incumbent
        for gain in random.choice(list(shares), p=list(shares.values()), size=edits):
            candidate = [level - gain + next(pool)]
            runs += 1
            while True:
                total = squares + sum_of_squares(candidate) + sum_of_squares(incumbent)
                count = degrees + len(candidate) - 1 + len(incumbent) - 1
                spread = Spread(math.sqrt(total / count), count)
                action = decide_next(candidate, incumbent, spread, selected=selected).action
                if action == "run_candidate":
                    candidate.append(level - gain + next(pool))
                elif action == "run_incumbent":
                    incumbent.append(level + next(pool))
                else:
                    break
                runs += 1
            tried[gain] += 1
            kept[gain] += action == "keep"
            leaves = incumbent if action == "keep" else candidate
            squares += sum_of_squares(leaves)
            degrees += len(leaves) - 1
            if action == "keep":
                level, selected, incumbent = level - gain, len(candidate), candidate
    share = {gain: kept[gain] / max(1, tried[gain]) for gain in shares}
    return Rates(
        kept[0] / sessions, runs / sessions / edits, share.get(2, math.nan), share.get(3, math.nan)
    )


def sum_of_squares(scores):
    """Of the deviations from the mean."""
    mean = sum(scores) / len(scores)
    return sum((score - mean) ** 2 for score in scores)


def normal(count):
    return np.random.default_rng(2).standard_normal(count)


def heavy_tailed(count):
    """Student's t with 4 degrees of freedom, which has the standard deviation sqrt(2)."""
    return np.random.default_rng(3).standard_t(4, count) / math.sqrt(2)


# 60 edits a session: four of five are neutral, half of the others help.
SHARES = {0: 0.8, 2: 0.05, 3: 0.05, -2: 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("draw", [normal, heavy_tailed])
def test_error_rates_of_a_session(draw):
    rates = simulate(draw, SHARES, sessions=1500)
    assert rates.false_keeps <= 0.5
    assert rates.kept_2 >= 0.70
    assert rates.kept_3 >= 0.95
    assert rates.runs <= 1.8


@pytest.mark.parametrize("draw", [normal, heavy_tailed])
def test_neutral_edits_alone_are_rarely_kept(draw):
    rates = simulate(draw, {0: 1.0}, sessions=400)
    assert rates.false_keeps <= 0.5
    assert rates.runs <= 1.5


# ---- disturbed runs ----


def telemetry(speed=0.40, cpu=1.95, others=0.02, steal=0.0):
    """What a machine with two cores gave."""
    probes = [speed, speed * 1.01]
    return {"probe_tflops": probes, "cpu": cpu, "others": others, "steal": steal}


USUAL = [telemetry(0.40 + 0.01 * (n % 3), 1.95 - 0.02 * (n % 2)) for n in range(6)]


def test_a_usual_run_is_not_disturbed():
    assert disturbance(telemetry(), USUAL) == ""
    assert disturbance(telemetry(speed=0.37), USUAL) == ""  # the scatter of an idle machine


def test_a_run_slowed_by_a_third_is_disturbed():
    words = disturbance(telemetry(speed=0.27), USUAL)
    assert "34% slower than usual" in words


def test_a_run_that_computes_nothing_here_loses_nothing():
    usual = [telemetry(cpu=0.004, others=0.3)] * 5
    assert disturbance(telemetry(cpu=0.001, others=1.9), usual) == ""
    usual = [telemetry(cpu=1.0, others=0.3)] * 5  # as one that waits for a GPU
    assert "others took 1.90" in disturbance(telemetry(cpu=0.8, others=1.9), usual)


def test_one_slow_probe_of_two_is_no_disturbance():
    hiccup = telemetry() | {"probe_tflops": [0.07, 0.40]}  # seen on an idle machine
    assert disturbance(hiccup, USUAL) == ""
    assert "83% slower" in disturbance(hiccup | {"probe_tflops": [0.07, 0.07]}, USUAL)


def test_a_busy_loop_beside_the_training_only_is_seen_by_the_cpu_shares():
    words = disturbance(telemetry(cpu=1.33, others=0.67), USUAL)
    assert words == "it had 1.33 CPUs, 1.94 is usual; others took 0.67, 0.02 is usual"
    assert "others took 0.67" in disturbance(telemetry(cpu=1.33, others=0, steal=0.67), USUAL)


def test_an_edit_that_is_slower_itself_is_judged():
    slow = telemetry() | {"num_steps": 100}
    assert disturbance(slow, [usual | {"num_steps": 400} for usual in USUAL]) == ""
    assert disturbance(telemetry(cpu=1.0), USUAL) == ""  # it uses one core: nobody took the other


def test_other_programs_that_do_not_slow_the_run_are_no_disturbance():
    assert disturbance(telemetry(others=0.3), USUAL) == ""


@pytest.mark.parametrize(
    "run", [{}, {"probe_tflops": []}, {"probe_tflops": [None, None]}, {"cpu": None}]
)
def test_missing_telemetry_disturbs_nothing(run):
    assert disturbance(run, USUAL) == ""
    assert disturbance(telemetry(speed=0.1), [run] * 9) == ""


def test_a_first_run_cannot_be_compared():
    assert disturbance(telemetry(speed=0.1), USUAL[:2]) == ""


def test_a_machine_that_stays_slower_becomes_the_usual_one():
    session = list(USUAL)
    flagged = 0
    for _ in range(20):
        flagged += bool(disturbance(telemetry(speed=0.25), session))
        session.append(telemetry(speed=0.25))
    assert flagged < 10
    assert disturbance(telemetry(speed=0.25), session) == ""
