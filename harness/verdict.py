"""How a run is judged: pure functions of scores, without files, git or clocks. See docs/verdict.md.

Scores are val_bpb, bits per byte, and lower is better. A row is one line of autoresearch.jsonl as
harness/log.py reads it; a metric of 0 marks a run without a score.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# ---- rows of the log ----


def kept(rows: Sequence[dict]) -> list[dict]:
    """The kept rows with a score, in order."""
    return [row for row in rows if row["status"] == "keep" and row["metric"] > 0]


def best(rows: Sequence[dict]) -> dict | None:
    """The kept row with the lowest score, or None."""
    return min(kept(rows), key=lambda row: row["metric"], default=None)


def confidence(rows: Sequence[dict]) -> float | None:
    """|best kept - baseline| / median absolute deviation of the scores.

    None with fewer than three scores, without a kept row, or without spread or gain. Only other
    readers of the log use it.
    """
    scores = [row["metric"] for row in rows if row["metric"] > 0]
    if len(scores) < 3 or not kept(rows):
        return None
    middle = statistics.median(scores)
    deviation = statistics.median(abs(score - middle) for score in scores)
    gain = abs(best(rows)["metric"] - kept(rows)[0]["metric"])
    return round(gain / deviation, 3) if deviation and gain else None


# ---- the spread of one run, and the noise floor ----

FLOOR_GUESS = 0.002  # bits per byte; taken for noise until repeats have measured it
FLOOR_Z = 2.5  # standard deviations of a difference: 0.6% of normal differences are larger
UPPER_Z = 1.2816  # one-sided 90% bound of a normal variable


@dataclass(frozen=True)
class Spread:
    """The standard deviation of one run, pooled over every code that ran more than once."""

    sd: float = 0.0  # bits per byte
    degrees: int = 0  # of freedom: runs minus codes

    @property
    def upper(self) -> float:
        """The upper 90% confidence bound of the standard deviation; infinite if unknown.

        s * sqrt(v / q), where q is the 10% quantile of chi-square with v degrees of freedom
        (NIST/SEMATECH e-Handbook of Statistical Methods, 7.2.3.1). The quantile is that of Wilson
        and Hilferty (Proc. Natl. Acad. Sci. 17, 1931): 0.3% too small at v = 4, 7% at v = 2, so
        that the bound errs upwards.
        """
        if not self.degrees:
            return math.inf
        part = 2 / (9 * self.degrees)
        quantile = self.degrees * (1 - part - UPPER_Z * math.sqrt(part)) ** 3
        return self.sd * math.sqrt(self.degrees / quantile)


def pooled_spread(groups: Iterable[Sequence[float]]) -> Spread:
    """The spread within groups of scores; a group holds all scores of one and the same train.py.

    sqrt(sum of squared deviations from each group's mean / sum of (n - 1)), the "within" mean
    square of NIST/SEMATECH, e-Handbook of Statistical Methods, 7.4.3.3. Groups of one add nothing.
    """
    squares = 0.0
    degrees = 0
    for scores in groups:
        if len(scores) > 1:
            mean = sum(scores) / len(scores)
            squares += sum((score - mean) ** 2 for score in scores)
            degrees += len(scores) - 1
    return Spread(math.sqrt(squares / degrees) if degrees else 0.0, degrees)


def noise_floor(spread: Spread, incumbent_runs: int = 1) -> tuple[float, str]:
    """(floor, its source): a gain of a single run below the floor may be noise.

    The floor is FLOOR_Z times the upper bound of the spread times sqrt(1 + 1/n): one run of the
    candidate is compared with the mean of n runs of the incumbent.
    """
    if not spread.degrees:
        return FLOOR_GUESS, "a guess: 'noise' measures it"
    floor = FLOOR_Z * spread.upper * math.sqrt(1 + 1 / max(1, incumbent_runs))
    return floor, f"measured, {spread.degrees} degrees of freedom"


# ---- the verdict on one or more runs of a candidate ----

MAX_RUNS = 5  # of a candidate
# After 1, 2, ... runs of the candidate: keep it above the first bound, discard it below the second.
KEEP_ABOVE = (5.0, 2.9, 2.3, 2.2, 2.1)
DISCARD_BELOW = (0.35, 0.85, 1.15, 1.5, 2.1)
WORSE_BELOW = -2.0  # a discarded candidate below this is "worse", else "within noise"
# The scores on which a code was kept are lucky ones. Until it has FRESH_RUNS others, a candidate
# is compared with it leniently: the second list is lower by LENIENCE.
FRESH_RUNS = 2
LENIENCE = 1.1
INCUMBENT_RATIO = 1.75  # runs of the incumbent for each of a doubtful candidate
CLIP = 1.75  # standard deviations from the median at which a score's pull on the mean ends
SIMPLER_RUNS = 3  # of a simplification before it is kept as equal
SIMPLER_TOLERANCE = 0.5  # of a single run's standard deviation


@dataclass(frozen=True)
class Decision:
    """What to do next with a candidate, and the numbers for the message."""

    action: str  # keep, discard, run_candidate, run_incumbent
    reason: str  # better, simpler, within noise, worse; of one more run: why
    gain: float  # of the candidate over the incumbent, bits per byte: above 0 is better
    error: float  # standard error of the gain
    z: float  # gain / error, as for a known spread; see normal_z
    candidate_mean: float
    incumbent_mean: float


def decide_next(
    candidate: Sequence[float],
    incumbent: Sequence[float],
    spread: Spread,
    *,
    selected: int = 0,
    lines: tuple[int, int] = (0, 0),
    simpler: bool = False,
    best_mean: float | None = None,
    once: bool = False,
) -> Decision:
    """The next step for a candidate: keep it, discard it, run it again, or run the incumbent again.

    Call it after every run until the action is keep or discard; docs/verdict.md has error rates.

    Args:
        candidate: all scores of the candidate's code so far, one or more.
        incumbent: all scores of the incumbent's code, repeats included, one or more.
        spread: pooled_spread() over all codes of the session, these two included.
        selected: how many of the incumbent's scores were there when it was kept; 0 for a baseline.
        lines: lines (added, removed) by the candidate.
        simpler: where it removes more lines than it adds, it may be worse than `best_mean` by
            SIMPLER_TOLERANCE of a run's standard deviation.
        best_mean: the lowest mean of any kept code, so that simplifications cannot give back a
            gain bit by bit. Default: the incumbent's mean.
        once: decide on the scores that there are, by the noise floor.
    """
    candidate_mean = robust_mean(candidate, spread.sd)
    incumbent_mean = robust_mean(incumbent, spread.sd)
    gain = round(incumbent_mean - candidate_mean, 9)
    error = spread.sd * math.sqrt(1 / len(candidate) + 1 / len(incumbent))
    z = normal_z(gain, error, spread.degrees)

    def decision(action: str, reason: str) -> Decision:
        return Decision(action, reason, gain, error, z, candidate_mean, incumbent_mean)

    limit = min(incumbent_mean, best_mean or math.inf) + SIMPLER_TOLERANCE * spread.sd
    as_good = simpler and lines[1] > lines[0] and candidate_mean <= limit
    if once:
        floor, _ = noise_floor(spread, len(incumbent))
        return decision(*decide_once(gain, floor, as_good))
    if not spread.degrees:
        return decision("run_incumbent", "the spread of a run is not known yet")
    runs = min(len(candidate), MAX_RUNS)
    fresh = len(incumbent) - selected >= FRESH_RUNS
    if z > KEEP_ABOVE[runs - 1]:
        return decision("keep", "better")
    if as_good:
        if runs >= SIMPLER_RUNS:
            return decision("keep", "simpler")
        return decision("run_candidate", "it may be as good, and is simpler")
    if z < DISCARD_BELOW[runs - 1] - (0 if fresh else LENIENCE):
        return decision("discard", "worse" if z < WORSE_BELOW else "within noise")
    if not fresh:
        return decision("run_incumbent", "the incumbent has only the scores it was kept on")
    if len(incumbent) < INCUMBENT_RATIO * runs:
        return decision("run_incumbent", "doubtful")
    if len(candidate) < MAX_RUNS:
        return decision("run_candidate", "doubtful")
    return decision("discard", "within noise")


def decide_once(gain: float, floor: float, as_good: bool) -> tuple[str, str]:
    """(action, reason) without more runs: a gain of exactly the floor is none."""
    if gain > floor:
        return "keep", "better"
    if as_good:
        return "keep", "simpler"
    return "discard", "within noise" if gain >= -floor else "worse"


def robust_mean(scores: Sequence[float], sd: float) -> float:
    """The mean, but a score pulls at it no more than one that lies CLIP * sd from the median.

    One step of Huber's M-estimator from the median (Ann. Math. Stat. 35, 1964): one run that went
    wrong cannot decide alone. It is the plain mean of one or two scores.
    """
    middle = statistics.median(scores)
    bound = CLIP * sd if len(scores) > 2 else math.inf
    return middle + sum(max(-bound, min(bound, score - middle)) for score in scores) / len(scores)


def normal_z(gain: float, error: float, degrees: int) -> float:
    """gain / error as a standard normal variable, where the error is from an estimated spread.

    The ratio has Student's t distribution; a spread known from few repeats makes large values
    common. Wallace's approximation (Ann. Math. Stat. 30, 1959) gives the normal variable that is
    exceeded as rarely: (8v+1)/(8v+3) * sqrt(v * log(1 + t^2/v)), within 0.02 for v >= 4, t <= 4.
    """
    if not gain:
        return 0.0
    if not error or not degrees:
        return math.copysign(math.inf, gain)
    t = gain / error
    shrink = (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(shrink * math.sqrt(degrees * math.log1p(t * t / degrees)), t)


# ---- runs that the machine disturbed ----

USUAL_RUNS = 15  # the latest runs of a session say what is usual
MIN_USUAL = 3
SLOW_PROBE = 0.85  # of the usual speed
LESS_CPU = 0.85  # of the usual CPU time
MIN_LOST_CPU = 0.05  # CPUs; a run that computes nothing here cannot lose any
TAKEN_PART = 0.5  # of the missing CPU time that must have gone to others


def disturbance(run: dict, session: Sequence[dict]) -> str:
    """Why this run got less of the machine than usual, in words; "" if it did not, or none can say.

    The speed of training itself is not looked at: an edit may be slow, and is then judged. An edit
    that uses fewer cores is told from a busy machine by what others took more than usual.

    Args:
        run: what the machine gave this run. Each key may be missing: probe_tflops, [before, after],
            the speed of a fixed small product around training; and in CPU seconds per second cpu
            (the run's processes), others (all other processes), steal (the hypervisor) and
            throttled (a container's CPU limit), see harness.machine_load.
        session: the same of the session's runs before it, in order, disturbed ones included: so
            that a lasting change of the machine becomes the usual state after some runs.
    """
    earlier = list(session)[-USUAL_RUNS:]
    speed, usual = with_usual(probe_speed, run, earlier)
    if speed < SLOW_PROBE * usual:
        percent = 100 * (1 - speed / usual)
        return f"a fixed product ran {percent:.0f}% slower than usual ({speed:.3g} TFLOP/s)"
    cpu, usual_cpu = with_usual(own_cpu, run, earlier)
    taken, usual_taken = with_usual(taken_cpu, run, earlier)
    lost = usual_cpu - cpu
    is_less = cpu < LESS_CPU * usual_cpu and lost > MIN_LOST_CPU
    if is_less and taken - usual_taken > TAKEN_PART * lost:
        return (
            f"it had {cpu:.2f} CPUs, {usual_cpu:.2f} is usual; others took {taken:.2f}, "
            f"{usual_taken:.2f} is usual"
        )
    return ""


def with_usual(
    measure: Callable[[dict], float | None], run: dict, session: Sequence[dict]
) -> tuple[float, float]:
    """(value of this run, median of the session); zeros if one of them is not known."""
    values = [value for value in map(measure, session) if value is not None]
    value = measure(run)
    if value is None or len(values) < MIN_USUAL:
        return 0.0, 0.0
    return value, statistics.median(values)


def probe_speed(telemetry: dict) -> float | None:
    """The faster of the probes before and after training, TFLOP/s.

    Both are as short as a disturbance that does not matter; a slow machine slows both.
    """
    return max((value for value in telemetry.get("probe_tflops") or [] if value), default=None)


def own_cpu(telemetry: dict) -> float | None:
    """CPU seconds of the run per second."""
    return telemetry.get("cpu")


def taken_cpu(telemetry: dict) -> float | None:
    """CPU seconds per second that the run could not have."""
    parts = [telemetry.get(name) for name in ("others", "steal", "throttled")]
    known = [part for part in parts if part is not None]
    return sum(known) if known else None
