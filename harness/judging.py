"""The verdict on a measured candidate, from the log and from all scores of the session."""

import statistics
from collections import Counter

from harness.log import current
from harness.measure import Result
from harness.scores import read_scores, scores_of
from harness.session import Session
from harness.verdict import judge, kept, noise_floor, pooled_spread
from harness.workspace import Run, Workspace


def session_scores(workspace: Workspace, rows: list[dict]) -> list[dict]:
    """All scores of the present session, [] without one."""
    session = Session.of(rows)
    return read_scores(workspace.scores, rows, session.key) if session else []


def floor_of(workspace: Workspace, rows: list[dict]) -> tuple[float, str]:
    """(noise floor, its source) from the code that was measured most often."""
    entries = session_scores(workspace, rows)
    counts = Counter(entry["code"] for entry in entries).most_common(1)
    return noise_floor(pooled_spread([scores_of(entries, counts[0][0])] if counts else []))


def incumbent(rows: list[dict]) -> dict | None:
    """The row of the code to beat: the last one that was kept in this session."""
    return next(reversed(kept(current(rows))), None)


def decide(run: Run, rows: list[dict]) -> dict:
    """What to do with a measured candidate: status, reason and the numbers behind them."""
    workspace, record = run.workspace, run.record
    result = Result(**record["result"])
    lines = workspace.repository.changed_lines(record["commit"])
    floor, source = floor_of(workspace, rows)
    top = incumbent(rows)
    facts = {"parent_metric": None, "floor": floor, "floor_source": source, "lines": list(lines)}
    if top:
        scores = scores_of(session_scores(workspace, rows), top.get("code") or "")
        facts["parent_metric"] = round(statistics.mean(scores or [top["metric"]]), 6)
    if result.status != "scored":
        status = "discard" if result.status == "marked" else result.status
        return facts | {"status": status, "reason": result.reason}
    if not top:
        return facts | {"status": "discard", "reason": "no baseline"}
    simpler = record["options"]["simpler"]
    status, reason = judge(result.score, facts["parent_metric"], floor, lines, simpler)
    return facts | {"status": status, "reason": reason}
