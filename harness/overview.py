"""What the user and the agent read: the verdict, `status`, `resume` and `check`."""

import argparse
import json
import statistics
import sys

from harness.checks import check_disk, check_edits, check_git, check_idea, check_python
from harness.common import UserError, say
from harness.finish import recover
from harness.fixed import FIXED, check_fixed
from harness.judging import floor_of, incumbent
from harness.log import current
from harness.repository import RUN_REFS, one_line
from harness.runlog import last_lines
from harness.session import Session
from harness.verdict import confidence, kept
from harness.workspace import Run, Workspace

COMMAND = "bash autoresearch.sh"


def add_parser(commands) -> None:
    """Register the commands `status`, `resume` and `check`."""
    for name, words, function in (
        ("status", "the state of the session on one screen", status_command),
        ("resume", "all that an agent without memory needs to go on", resume_command),
        ("check", "the checks of `try`; exit code 0 if it would start", check_command),
    ):
        parser = commands.add_parser(name, help=words, description=words)
        parser.set_defaults(func=function)


# ---- after a run ----


def print_verdict(workspace: Workspace, row: dict) -> int:
    """Print the verdict with its numbers; returns the exit code."""
    print("run", row_line(row).strip())
    if row["metric"] and row.get("parent_metric"):
        print(
            f"val_bpb {row['metric']:.6f}, incumbent {row['parent_metric']:.6f}, "
            f"change {row['metric'] - row['parent_metric']:+.6f}, "
            f"noise floor {row['floor']:.6f} ({row['floor_source']})"
        )
    for name in ("detail", "marks"):
        if row.get(name):
            print(f"{name}: {row[name]}")
    folder = workspace.folder_of(row)
    print(f"folder {folder.relative_to(workspace.root)}")
    if row.get("ref") and row["status"] != "keep":
        print(f"train.py is the kept one; this code: git restore -s {row['ref']} train.py")
    failed = row["status"] in ("crash", "checks_failed")
    log = folder / "run.log"
    if row["status"] == "crash" and log.exists():
        say(f"last lines of {log}:")
        print("\n".join(last_lines(log, 20)), file=sys.stderr)
    return int(failed)


def row_line(row: dict, width: int = 60) -> str:
    """A row on one line."""
    score = f"{row['metric']:.6f}" if row["metric"] else "-"
    text = f"{one_line(row['description'], width)} ({row['reason']})"
    return f"{row['run']:>4} {row['commit']} {score:>9} {row['status']:<7} {text}"


# ---- status, resume, check ----


def look(workspace: Workspace) -> list[dict]:
    """Finish what killed commands left, and read the log."""
    if workspace.repository.git_or_none("rev-parse", "-q", "--verify", "HEAD") is not None:
        with workspace.lock():
            recover(workspace)
    return workspace.rows()


def summary(workspace: Workspace, rows: list[dict]) -> list[str]:
    """The state of the session in a few lines."""
    segment, top = current(rows), incumbent(rows)
    if not top:
        return [f"no scored run yet. hint: {COMMAND} try baseline"]
    first = kept(segment)[0]["metric"]
    floor, source = floor_of(workspace, rows)
    gain = first - top["metric"]
    lines = [
        f"best     {top['metric']:.6f} (run {top['run']}, {top['commit']}): "
        f"{one_line(top['description'], 60)}",
        f"baseline {first:.6f}, gain {gain:.6f} ({100 * gain / first:.2f}%), "
        f"confidence {confidence(segment) or '-'}",
        f"runs     {len(segment)}, kept {len(kept(segment))} (all sessions: {len(rows)})",
        f"floor    {floor:.6f} ({source})",
    ]
    if session := Session.of(rows):
        lines.append(f"settings {session.summary()}")
    recent = [row for row in segment[-20:] if row["seconds"]]
    if recent:
        seconds = statistics.mean(row["seconds"] for row in recent)
        lines.append(f"time     {seconds:.0f} s per run")
        hours = (recent[-1]["timestamp"] - recent[0]["timestamp"]) / 3_600_000
        lines[-1] += f", {(len(recent) - 1) / hours:.1f} runs per hour" if hours > 0 else ""
    if len(segment) > 3 and not kept(segment[-3:]):
        lines.append("three runs in a row were not kept: step back, try another direction")
    return lines


def status_command(args: argparse.Namespace) -> int:
    """Print the summary, the last five rows and what is under way."""
    workspace = Workspace(args.root)
    rows = look(workspace)
    print(*summary(workspace, rows), *map(row_line, rows[-5:]), sep="\n")
    for folder in workspace.open_folders():
        print(f"under way: {one_line(Run(workspace, folder).record['description'], 60)!r}")
    return 0


def resume_command(args: argparse.Namespace) -> int:
    """All that an agent without memory needs, in under 4,000 characters."""
    workspace = Workspace(args.root)
    rows = look(workspace)
    branch = workspace.repository.branch_name()
    lines = [
        "GOAL  lower val_bpb (bits per byte) within the fixed time budget. Rules: program.md.",
        f"RULES edit train.py only; one idea a run; never edit {', '.join(FIXED)};",
        "      a gain below the noise floor is none; equal and shorter is one (--simpler);",
        "      never stop by yourself.",
        f"CODE  train.py on branch {branch} is the best one; the code of any other run:",
        f"      git show {RUN_REFS}ID (the ID is at the end of its line)",
        *summary(workspace, rows),
        "TRIED (newest first)" if rows else "TRIED nothing yet",
    ]
    for row in reversed(rows):
        if len("\n".join(lines)) > 3300:
            lines.append(f"     ... older ones: {COMMAND} report --tsv ({len(rows)} rows)")
            break
        notes = f" {json.dumps(row['asi'])[:200]}" if row["asi"] else ""
        ident = f" {row['id']}" if row.get("ref") else ""
        lines.append(row_line(row, 80) + notes + ident)
    lines.append(
        f'NEXT  edit train.py, then: {COMMAND} try "what it changes" '
        '--asi \'{"hypothesis": "..."}\''
    )
    print("\n".join(lines))
    return 0


def check_fixed_files(workspace: Workspace) -> str:
    """The fixed files are those with which the session began."""
    return check_fixed(workspace.root) or "unchanged since the session began"


def check_command(args: argparse.Namespace) -> int:
    """The checks that `try` begins with; exit code 0 only if it would start."""
    workspace = Workspace(args.root)
    look(workspace)
    code = 0
    checks = {
        "python": check_python,
        "disk": check_disk,
        "git": check_git,
        "fixed": check_fixed_files,
        "edits": check_edits,
        "idea": check_idea,
    }
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check(workspace)}")
        except UserError as error:
            print(f"FAIL  {name}: {error}")
            code = 2
            if name == "git":
                break  # the rest would only repeat it
    return code
