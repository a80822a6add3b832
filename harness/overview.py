"""What the user and the agent read of a session: the verdict of a run, and the state of all."""

import statistics
import sys
import time
from collections.abc import Sequence

from harness.common import UserError, say
from harness.finish import recover
from harness.judging import floor_of, incumbent, scores_of_row
from harness.log import current
from harness.progress import read_progress
from harness.repository import one_line
from harness.runlog import last_lines
from harness.scores import Scores
from harness.session import Session
from harness.verdict import kept
from harness.workspace import Run, Workspace

COMMAND = "bash autoresearch.sh"
WORDS = {"keep": "kept", "discard": "dropped", "checks_failed": "failed"}
# Ends of a run that are no fault of the idea's code.
OWN_WORDS = ("interrupted", "refused")
IN_A_ROW = 3  # ideas that were not kept, before the advice to change the direction
MIN_ID = 4  # characters of an id that a command accepts


def recovered_rows(workspace: Workspace) -> list[dict]:
    """Finish what killed commands left, and read the log. Where that fails, it says so."""
    if workspace.repository.git_or_none("rev-parse", "-q", "--verify", "HEAD") is not None:
        try:
            with workspace.lock():
                recover(workspace)
        except (UserError, OSError) as error:
            say(f"a run that was cut off can't be finished now: {error}")
    return workspace.rows()


# ---- which run is meant ----


def find_finished(rows: list[dict], name: str) -> dict | None:
    """The row of a run by its number or id, None if there is none."""
    for row in reversed(rows):
        if name == str(row["run"]) or (len(name) >= MIN_ID and row["id"].startswith(name)):
            return row
    return None


def find_row(rows: list[dict], name: str) -> dict:
    """The row of a run by its number or id. Raises UserError if there is none."""
    row = find_finished(rows, name)
    if row is None:
        raise UserError(f"there is no run {name}. hint: '{COMMAND} status' lists the last ones")
    return row


def find_open(workspace: Workspace, name: str) -> Run | None:
    """A candidate or series that is under way, by its id."""
    found = main_runs(workspace) if len(name) >= MIN_ID else []
    return next((run for run in found if run.id.startswith(name)), None)


def main_runs(workspace: Workspace) -> list[Run]:
    """What was asked for and is under way, without the runs that belong to it."""
    return [*workspace.open_runs("candidate"), *workspace.open_runs("series")]


def newest_run(workspace: Workspace, rows: list[dict]) -> str:
    """The id of what was started last and is under way, else the number of the last row."""
    if runs := main_runs(workspace):
        return max(runs, key=opened).id
    if not rows:
        raise UserError(f'there is no run yet. hint: {COMMAND} try "what it changes"')
    return str(rows[-1]["run"])


def opened(run: Run) -> float:
    """When a run was opened."""
    return run.record["opened"]


# ---- one run ----


def print_verdict(workspace: Workspace, row: dict) -> int:
    """Print the verdict with its numbers and what to do next; returns the exit code."""
    print("run", row_line(row).strip())
    if row["metric"]:
        print(score_line(row))
    print(speed_line(row))
    if len(row.get("repeats") or []) > 1:
        print("scores", " ".join(f"{s:.6f}" for s in row["repeats"]), "(their mean is judged)")
    for name in ("detail", "marks", "unlike"):
        if row.get(name):
            print(f"{name}: {row[name]}")
    folder = workspace.folder_of(row)
    print(f"folder {folder.relative_to(workspace.root)}")
    rows = workspace.rows()
    for hint in hints(workspace, rows, row):
        print(hint)
    log = folder / "run.log"
    if row["status"] == "crash" and log.exists():
        say(f"last lines of {log}:")
        print("\n".join(last_lines(log, 20)), file=sys.stderr)
    return int(row["status"] in ("crash", "checks_failed"))


def row_line(row: dict, width: int = 60) -> str:
    """A row on one line."""
    score = f"{row['metric']:.6f}" if row["metric"] else "-"
    word = WORDS.get(row["status"], "crashed")
    reason = row["reason"]
    if row["status"] == "crash" and reason in OWN_WORDS:
        word, reason = reason, ""
    text = one_line(row["description"], width) + (f" ({reason})" if reason else "")
    return f"{row['run']:>4} {score:>9} {word:<11} {text}"


def score_line(row: dict) -> str:
    """The score, and what it was compared with."""
    text = f"val_bpb {row['metric']:.6f}"
    if not row.get("parent_metric"):
        return text
    change = row["metric"] - row["parent_metric"]
    runs = row.get("parent_runs") or 1
    text += f", incumbent {row['parent_metric']:.6f} (mean of {runs}), change {change:+.6f}"
    if row.get("runs"):
        text += f", z {row.get('z', 0):.1f} after {row['runs']} runs" if row["runs"] > 1 else ""
    return text + f"; noise floor {row['floor']:.6f} ({row['floor_source']})"


def speed_line(row: dict) -> str:
    """Steps and tokens per second, with the incumbent's steps."""
    metrics = row["metrics"]
    if not metrics.get("num_steps"):
        return f"{row['seconds']:.0f} s"
    text = f"steps {metrics['num_steps']:.0f}"
    if row.get("parent_steps"):
        text += f" (incumbent {row['parent_steps']:.0f})"
    if metrics.get("training_seconds"):
        rate = 1e6 * metrics.get("total_tokens_m", 0) / metrics["training_seconds"]
        text += f", {rate:,.0f} tokens/s"
    return text + f", {row['seconds']:.0f} s in all"


def hints(workspace: Workspace, rows: list[dict], row: dict) -> list[str]:
    """What to do after this verdict."""
    found = []
    if row.get("ref") and row["status"] != "keep":
        found.append(f"train.py is the kept one; this code: git restore -s {row['ref']} train.py")
    near = row["reason"] in ("within noise", "undecided", "disturbed")
    if near and row["status"] != "keep" and is_gain(row):
        low, high = minutes(row["seconds"]), minutes(4 * row["seconds"])
        found.append(f"if you believe in it: {COMMAND} confirm {row['run']} ({low} to {high})")
    if rows and rows[-1]["run"] == row["run"] and needs_direction(current(rows)):
        found.append(f"{IN_A_ROW} ideas in a row were not kept: step back, try another direction")
    return found


def is_gain(row: dict) -> bool:
    """Whether the score is better than the incumbent's, by however little."""
    return bool(row["metric"]) and row["metric"] < (row.get("parent_metric") or 0)


def needs_direction(segment: Sequence[dict]) -> bool:
    """Whether the last ideas that were judged were all dropped; typos and crashes do not count."""
    judged = [row for row in segment if row["metric"] and row["status"] in ("keep", "discard")]
    return len(judged) > IN_A_ROW and not kept(judged[-IN_A_ROW:])


def minutes(seconds: float) -> str:
    """A duration in words."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


# ---- what is under way ----


def under_way(workspace: Workspace, run: Run) -> str:
    """What a run is doing, how far it is, and when the verdict can be there."""
    record = run.record
    words = f"under way: {run.id} {one_line(record['description'], 60)!r}: {stage(workspace, run)}"
    usual = usual_seconds(workspace.rows())
    if record.get("planned") and usual:
        left = max(0.0, record["stage_began"] + record["planned"] * usual - time.time())
        clock = time.strftime("%H:%M", time.localtime(time.time() + left))
        words += f"; verdict about {clock} (in {minutes(left)}), later if it is doubtful"
    return words


def stage(workspace: Workspace, run: Run) -> str:
    """The present step of a run, and how far the training that belongs to it is."""
    name = run.record.get("stage") or "waiting for the device"
    if name.startswith("waiting"):
        return name
    folders = [*workspace.open_folders("probe"), *workspace.open_folders("baseline")]
    if on := run.record.get("options", {}).get("on"):
        return f"{name} on {on}"  # its steps come home at the end
    training = run.folder if name == "measuring" else next(iter(folders), None)
    return f"{name}, {read_progress(training)}" if training else name


def usual_seconds(rows: list[dict]) -> float:
    """Mean seconds of a run in the present session, 0 without one."""
    seconds = [row["seconds"] for row in current(rows)[-20:] if row["seconds"] and row["metric"]]
    return statistics.mean(seconds) if seconds else 0.0


# ---- the session ----


def summary(workspace: Workspace, rows: list[dict]) -> list[str]:
    """The state of the session in a few lines."""
    segment, top = current(rows), incumbent(rows)
    if not top:
        return [f"no scored run yet. hint: {COMMAND} try baseline"]
    scores = Scores.of(workspace, rows)
    first, best = kept(segment)[0], mean_of(scores, top)
    gain = mean_of(scores, first) - best
    floor, source = floor_of(workspace, rows)
    kept_ones = len(kept(segment)) - 1
    lines = [
        f"best     {best:.6f} (run {top['run']}): {one_line(top['description'], 60)}",
        f"baseline {mean_of(scores, first):.6f}, gain {gain:.6f} ({100 * gain / best:.2f}%)",
        f"ideas    {len(segment) - 1}, kept {kept_ones} (all sessions: {len(rows)} runs)",
        f"floor    {floor:.6f} ({source}): a smaller gain of one run may be noise",
    ]
    if session := Session.of(rows):
        lines.append(f"settings {session.summary()}")
    if seconds := usual_seconds(rows):
        lines.append(f"time     {minutes(seconds)} a run")
    if needs_direction(segment):
        lines.append(f"{IN_A_ROW} ideas in a row were not kept: step back, try another direction")
    return lines


def mean_of(scores: Scores, row: dict) -> float:
    """The mean of all scores of a row's code."""
    return statistics.mean(scores_of_row(row, scores))
