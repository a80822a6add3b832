"""What the scores of a session say about a candidate: the next step, or the verdict."""

import statistics

from harness.log import MACHINE_KEYS, current
from harness.measure import Result
from harness.scores import Scores
from harness.verdict import Decision, decide_next, kept, noise_floor
from harness.workspace import Run, Workspace


def incumbent(rows: list[dict]) -> dict | None:
    """The row of the code to beat: the last one that was kept in this session."""
    return next(reversed(kept(current(rows))), None)


def floor_of(workspace: Workspace, rows: list[dict]) -> tuple[float, str]:
    """(noise floor, its source) for one run against the incumbent."""
    scores, top = Scores.of(workspace, rows), incumbent(rows)
    runs = len(scores_of_row(top, scores)) if top else 1
    return noise_floor(scores.spread(), runs)


def scores_of_candidate(run: Run, scores: Scores) -> list[float]:
    """All scores of a candidate's code."""
    code = run.workspace.repository.train_blob(run.record["commit"])
    return scores.of_code(code) or [run.record["result"]["score"]]


def scores_of_row(row: dict, scores: Scores) -> list[float]:
    """All scores of a row's code; a row of an older version has no code, only its score."""
    return scores.of_code(row.get("code")) or [row["metric"]]


def next_step(run: Run, rows: list[dict], top: dict, once: bool) -> Decision:
    """What to do next with a candidate that has a score: keep, discard, or one more run."""
    scores = Scores.of(run.workspace, rows)
    means = [statistics.mean(scores_of_row(row, scores)) for row in kept(current(rows))]
    return decide_next(
        scores_of_candidate(run, scores),
        scores_of_row(top, scores),
        scores.spread(),
        selected=top.get("runs") or 0,
        lines=run.workspace.repository.changed_lines(run.record["commit"]),
        simpler=run.record["options"]["simpler"],
        best_mean=min(means),
        once=once,
    )


def facts_of(run: Run, rows: list[dict], step: Decision | None) -> dict:
    """The numbers behind a verdict, for the row."""
    workspace, top = run.workspace, incumbent(rows)
    scores = Scores.of(workspace, rows)
    floor, source = floor_of(workspace, rows)
    lines = workspace.repository.changed_lines(run.record["commit"])
    facts = {"parent_metric": None, "floor": floor, "floor_source": source, "lines": list(lines)}
    if top:
        others = scores_of_row(top, scores)
        facts["parent_metric"] = round(statistics.mean(others), 6)
        facts["parent_steps"] = top["metrics"].get("num_steps")
        facts["parent_runs"] = len(others)
        facts["unlike"] = unlike(run.record["result"]["record"], top)
    if step:
        own = scores_of_candidate(run, scores)
        facts |= {"metric": round(step.candidate_mean, 6), "runs": len(own), "repeats": own}
        facts |= {"parent_metric": round(step.incumbent_mean, 6), "z": finite(step.z)}
    return facts


def unlike(record: dict, top: dict) -> str:
    """How a run was set up otherwise than the incumbent: "compiled: False, incumbent True"."""
    values = {name: (record.get(name), top.get(name)) for name in MACHINE_KEYS}
    return "; ".join(
        f"{name}: {ours}, incumbent {theirs}"
        for name, (ours, theirs) in values.items()
        if ours is not None and theirs is not None and ours != theirs
    )


def finite(z: float) -> float:
    """A number that JSON can hold: without any spread z is infinite."""
    return round(max(-99.0, min(99.0, z)), 2)


def decide(run: Run, rows: list[dict], failure: str = "") -> dict:
    """The verdict on a measured candidate by the scores that there are.

    Args:
        failure: why it could not be run again although it had to be.
    """
    result, top = Result(**run.record["result"]), incumbent(rows)
    if result.status != "scored":
        words = {"marked": "discard", "disturbed": "checks_failed"}
        status = words.get(result.status, result.status)
        return facts_of(run, rows, None) | {"status": status, "reason": result.reason}
    if not top:
        return facts_of(run, rows, None) | {"status": "discard", "reason": "no baseline"}
    step = next_step(run, rows, top, run.record["options"]["once"])
    facts = facts_of(run, rows, step)
    if step.action in ("keep", "discard"):
        return facts | {"status": step.action, "reason": step.reason}
    detail = failure or "interrupted before the verdict was clear"
    return facts | {"status": "discard", "reason": "undecided", "detail": detail}
