"""How a run is judged: pure functions of scores and rows, without files, git or clocks.

Scores are val_bpb, bits per byte, and lower is better. A row is one line of autoresearch.jsonl as
harness/log.py reads it; a metric of 0 marks a run without a score.
"""

import math
import statistics
from collections.abc import Sequence

FLOOR_GUESS = 0.002  # bits per byte; taken for noise until repeats have measured it


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


def noise_floor(scores: Sequence[float]) -> tuple[float, str]:
    """(floor, its source) from repeated runs of one train.py on different seeds.

    The floor is twice the standard deviation of one run. A sample's s is low on average, by
    c4(n) = sqrt(2 / (n-1)) * gamma(n/2) / gamma((n-1)/2) for normal scores (NIST/SEMATECH
    e-Handbook of Statistical Methods, 6.3.2), 11% at n = 3: the floor is 2 * s / c4(n).
    """
    n = len(scores)
    if n < 2:
        return FLOOR_GUESS, "a guess: 'noise' measures it"
    c4 = math.sqrt(2 / (n - 1)) * math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2))
    return 2 * statistics.stdev(scores) / c4, f"measured, n={n}"


def judge(
    score: float,
    reference: float,
    floor: float,
    lines: tuple[int, int] = (0, 0),
    simpler: bool = False,
) -> tuple[str, str]:
    """(status, reason). `lines` is (added, removed); a gain of exactly the floor is none."""
    gain = round(reference - score, 9)  # 1 - 0.998 is a little more than 0.002 in floating point
    if gain > floor:
        return "keep", "better"
    if simpler and lines[1] > lines[0] and gain >= -floor:
        return "keep", "simpler"
    return "discard", "within noise" if gain >= -floor else "worse"


def confirmed(pairs: Sequence[tuple[float, float]], floor: float) -> tuple[str, str]:
    """(status, reason) on the means of n (candidate, incumbent) pairs.

    A mean of n runs varies by 1/sqrt(n) of one run.
    """
    candidate, incumbent = (statistics.mean(side) for side in zip(*pairs, strict=True))
    status, reason = judge(candidate, incumbent, floor / math.sqrt(len(pairs)))
    return status, "confirmed" if status == "keep" else f"{reason}, confirmed"
