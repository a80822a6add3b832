"""From a decision to its row, its commit and train.py: every step may be repeated after a kill.

The decision is in the run's record before anything is done. `apply_decision` then does what is
missing: the commit on the branch (for a keep), the row, train.py in the checkout, the folder's
final name.
"""

import contextlib
import shutil
import time

from harness.common import say
from harness.git import GitError
from harness.judging import decide
from harness.log import METRICS, RECORD_KEYS
from harness.measure import Result, record_score
from harness.merge import forget_base, note_base
from harness.process import end_orphans
from harness.repository import RUN_REFS, HookRefused, one_line, subject_and_body
from harness.workspace import Run, Workspace

INTERRUPTED = Result("crash", "interrupted", "interrupted")


def make_row(run: Run, result: Result, decision: dict) -> dict:
    """A row in the key order of the log's other readers; run, segment, confidence come later."""
    record, settings, data = run.record, result.settings, result.record
    metrics = {name: result.metrics.get(name, 0) for name in METRICS}
    row = {
        "run": 0,
        "commit": record["commit"][:7],
        "metric": result.score,
        "metrics": metrics,
        "status": decision["status"],
        "description": record["description"],
        "timestamp": time.time_ns() // 1_000_000,
        "segment": 0,
        "confidence": None,
        "asi": record["asi"],
    }
    row |= {"reason": "", "detail": result.detail} | decision
    metrics["millibits"] = round(1000 * row["metric"], 3)  # some readers show two decimals only
    row |= {name: data.get(name, settings.get(name)) for name in RECORD_KEYS}
    row |= {"data": settings.get("data"), "device_type": settings.get("device")}
    row |= {"on": settings.get("on"), "node": settings.get("node")}
    row["seconds"] = result.seconds
    row["commit_id"] = record["commit"]
    row["code"] = run.workspace.repository.train_blob(record["commit"])
    row["id"] = run.id
    if record["kind"] == "candidate":
        row["ref"] = RUN_REFS + run.id
    return row


def finish(run: Run, **decision) -> dict:
    """Decide a run and act on it; returns its row. The caller holds the lock.

    Args:
        decision: status, reason, and what else belongs into the row.
    """
    run.make_room()
    run.save(decision=decision)
    return apply_decision(run)


def apply_decision(run: Run) -> dict:
    """Do what is missing of a decided run; returns its row. The caller holds the lock."""
    workspace = run.workspace
    rows = workspace.rows()
    row = row_of(rows, run)
    if row is None:
        result = Result(**run.record["result"])
        row = make_row(run, result, run.record["decision"])
        if row["status"] == "keep" and run.record["kind"] == "candidate":
            row |= commit_kept(run, row, len(rows) + 1)
        row = workspace.append(row, new_segment=run.record["kind"] == "baseline")
    if run.record["kind"] == "candidate":
        (run.folder / "train.diff").write_text(
            workspace.repository.diff(run.record["commit"]), errors="surrogateescape"
        )
        bring_train(run, row)
    run.close(workspace.folder_of(row).name)
    return row


def row_of(rows: list[dict], run: Run) -> dict | None:
    """The row of a run, None if it has none yet."""
    return next((row for row in rows if row["id"] == run.id), None)


def commit_kept(run: Run, row: dict, number: int) -> dict:
    """Add the kept train.py to the branch; returns what it changes in the row.

    Where that is impossible the row says so, and the code stays reachable by the run's ref.
    """
    repository, record = run.workspace.repository, run.record
    branch, candidate = record["branch"], record["commit"]
    if repository.tip_of(branch) is None:
        return not_committed(run, "no branch", f"the branch {branch} is gone")
    if repository.find_kept(branch, record["parent"], run.id):
        return {}
    trailers = {"Val-bpb": f"{row['metric']:.6f}"}
    if row.get("floor"):
        trailers["Noise-floor"] = f"{row['floor']:.6f} ({row['floor_source']})"
    trailers["Run"] = f"{number} {RUN_REFS}{run.id}"
    message = subject_and_body(record["description"], trailers)
    try:
        repository.commit_kept(run.checkout(candidate), branch, candidate, message)
    except HookRefused as refusal:
        return not_committed(run, "hook", str(refusal))
    return {}


def not_committed(run: Run, reason: str, why: str) -> dict:
    """The row of a result that would be kept, but could not be committed."""
    say(
        f"a better result could not be committed: {why}\n"
        f"hint: its code stays in {RUN_REFS}{run.id}; when the cause is removed, "
        f"'git restore -s {RUN_REFS}{run.id} train.py' brings it back"
    )
    return {"status": "checks_failed", "reason": reason, "detail": one_line(why, 300)}


def bring_train(run: Run, row: dict) -> None:
    """Bring train.py to the branch's tip, unless the user edited it meanwhile."""
    repository, record = run.workspace.repository, run.record
    if repository.tip_of(record["branch"]) is None:
        return
    committed = repository.commits_of_train(record["parent"], record["branch"])
    known = [record["commit"], record["parent"], *committed]
    if repository.bring_train(record["branch"], {repository.train_blob(c) for c in known}):
        forget_base(run.workspace)
        return
    edited = repository.edited_blob()
    others = [other for other in run.workspace.open_runs("candidate") if other.id != run.id]
    commits = [other.record["commit"] for other in others]
    if edited in {repository.train_blob(commit) for commit in commits if commit}:
        return  # it is the code of a run that is still under way
    if committed and record.get("detached"):  # else the edits began with this run's train.py
        note_base(run.workspace, record["parent"])
    say(
        "train.py was edited during the run: your edits stay. "
        f"hint: 'git diff train.py' shows them; the code of run {row['run']} is in {row['ref']}"
    )


# ---- after a kill ----


def recover(workspace: Workspace) -> None:
    """Finish what killed commands left open; runs whose process lives are left alone.

    The caller holds the lock.
    """
    end_orphans(workspace.root)
    for folder in workspace.open_folders():
        if not (folder / "record.json").exists():  # killed before anything was done
            shutil.rmtree(folder)
            continue
        run = Run(workspace, folder)
        if run.adopt():
            recover_run(run)


def recover_run(run: Run, detail: str = "interrupted") -> None:
    """Finish a run that ended halfway, from any point of it. The caller holds the lock."""
    workspace, record = run.workspace, run.record
    if row_of(workspace.rows(), run) or record.get("decision"):
        apply_decision(run)
    elif record["kind"] != "candidate":
        if record.get("result"):
            record_score(run)
        run.close(f"interrupted-{run.id}")
    elif not record.get("begun"):  # it was not run: the user's edit is still in train.py
        abandon(run, f"{detail} before it began")
    else:
        if record.get("result"):
            record_score(run)
        else:
            run.save(result=vars(INTERRUPTED) | {"detail": detail})
        row = finish(run, **decide(run, workspace.rows()))
        say(
            f"run {row['run']} ({one_line(row['description'], 60)!r}) was {detail}; logged as "
            f"{row['status']}. hint: 'git restore -s {row['ref']} train.py' brings its code back"
        )


def abandon(run: Run, why: str, exit_code: int = 2) -> None:
    """Close a candidate that was not run: no row. The caller holds the lock.

    Its edit is still in train.py; that of a detached one stays reachable by its ref.
    """
    if run.record.get("detached"):
        why += f". hint: 'git restore -s {RUN_REFS}{run.id} train.py' brings its code back"
        say(f"{run.id} ({one_line(run.record['description'], 60)!r}): {why}")
    else:
        with contextlib.suppress(GitError):
            run.workspace.repository.drop_candidate(run.id)
    run.save(ended=why, exit_code=exit_code)
    run.close(f"refused-{run.id}")
