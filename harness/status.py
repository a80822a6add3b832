"""`status`, `resume`, `check`, `note` and `curve`: short answers for an agent without memory."""

import argparse
import contextlib
import json
from pathlib import Path

from harness.checks import (
    check_disk,
    check_edits,
    check_environment,
    check_git,
    check_idea,
    check_python,
)
from harness.common import UserError
from harness.fixed import FIXED, check_fixed
from harness.log import change_row, current, strict_json
from harness.overview import (
    COMMAND,
    find_row,
    main_runs,
    recovered_rows,
    row_line,
    summary,
    under_way,
)
from harness.repository import RUN_REFS, one_line
from harness.verdict import kept
from harness.workspace import Workspace

LAST = 15  # rows that `resume` shows with their notes
ROOM = 3900  # characters of `resume`
CURVE_LINES = 30
BAR = 40  # characters


def add_parser(commands) -> None:
    """Register the commands of this module."""
    for name, words, function in (
        ("status", "the state of the session on one screen", status_command),
        ("resume", "all that an agent without memory needs to go on", resume_command),
        ("check", "the checks of `try`; exit code 0 if it would start", check_command),
    ):
        parser = commands.add_parser(name, help=words, description=words)
        parser.set_defaults(func=function)
    words = "add what was understood about a run; `resume` shows it"
    parser = commands.add_parser("note", help=words, description=words)
    parser.add_argument("run", metavar="RUN", help="number or id")
    parser.add_argument("text", help='"learned ..."')
    parser.set_defaults(func=note_command)
    words = f"the loss curve of a run in {CURVE_LINES} lines"
    parser = commands.add_parser("curve", help=words, description=words)
    parser.add_argument("run", metavar="RUN", help="number or id")
    parser.set_defaults(func=curve_command)


def status_command(args: argparse.Namespace) -> int:
    """Print the summary, the last five rows and what is under way."""
    workspace = Workspace(args.root)
    rows = recovered_rows(workspace)
    print(*summary(workspace, rows), *map(row_line, rows[-5:]), sep="\n")
    for run in main_runs(workspace):
        print(under_way(workspace, run))
    return 0


def resume_command(args: argparse.Namespace) -> int:
    """All that an agent without memory needs, in under 4,000 characters."""
    workspace = Workspace(args.root)
    rows = recovered_rows(workspace)
    branch = workspace.repository.branch_name()
    head = [
        "GOAL  lower val_bpb (bits per byte) within the fixed time budget. Rules: program.md.",
        f"RULES edit train.py only; one idea a run; never edit {', '.join(FIXED)};",
        "      doubtful gains are repeated automatically; as good and shorter counts (--simpler);",
        "      never stop by yourself.",
        f"CODE  train.py on branch {branch} is the best one. Code of any other run:",
        f"      git show {RUN_REFS}ID (the ID is at the end of its line)",
        *summary(workspace, rows),
        *[under_way(workspace, run) for run in main_runs(workspace)],
    ]
    tail = f'NEXT  edit train.py, then: {COMMAND} try "what it changes" '
    tail += '--asi \'{"hypothesis": "..."}\''
    room = ROOM - len("\n".join([*head, tail]))
    print("\n".join([*head, *tried(rows, room), tail]))
    return 0


def tried(rows: list[dict], room: int) -> list[str]:
    """What was tried, in at most `room` characters: the last ones, kept ones, other directions."""
    if not rows:
        return ["TRIED nothing yet"]
    segment = current(rows)
    last, earlier = segment[-LAST:], segment[:-LAST]
    kept_before = kept(earlier)
    others = [row for row in earlier if row not in kept_before]
    before = [short_line(row) for row in reversed(kept_before)]
    if before:
        before.insert(0, "kept before that:")
    bare = [line_with_notes(row, 0) for row in last]
    left = room - len("\n".join([*bare, *before])) - 300
    width = max(0, min(100, left // len(last)))
    lines = ["TRIED (newest first)"]
    lines += [line_with_notes(row, width) for row in reversed(last)]
    lines += before
    if others:
        lines.append("other directions, not kept:")
        lines += direction_lines(others)
    return fitting(lines, room - 80, f"  ... all rows: {COMMAND} report --tsv ({len(rows)})")


def direction_lines(rows: list[dict]) -> list[str]:
    """A line for each direction, the newest first: what stands before a colon in a description."""
    directions = {}
    for row in reversed(rows):
        directions.setdefault(row["description"].partition(":")[0], []).append(row)
    lines = []
    for name, ideas in directions.items():
        if len(ideas) == 1:
            lines.append(short_line(ideas[0]))
            continue
        scores = [row["metric"] for row in ideas if row["metric"]]
        best = f", best {min(scores):.4f}" if scores else ", none scored"
        lines.append(f"  {one_line(name, 30)}: {len(ideas)} ideas{best}")
    return lines


def short_line(row: dict) -> str:
    """A row in about forty characters."""
    score = f" {row['metric']:.4f}" if row["metric"] else ""
    return f"  {row['run']}{score} {one_line(row['description'], 30)}"


def line_with_notes(row: dict, width: int) -> str:
    """A row, its id, and what was learned from it or expected of it, cut to the width."""
    ident = f" {row['id']}" if row.get("ref") else ""
    asi = row["asi"]
    notes = asi.get("learned") or asi.get("hypothesis") or (json.dumps(asi) if asi else "")
    notes = f" | {one_line(notes, width)}" if notes and width else ""
    return row_line(row, 36) + notes + ident


def fitting(lines: list[str], room: int, more: str) -> list[str]:
    """As many of the lines as fit into `room` characters, and `more` where some do not."""
    used = 0
    for count, line in enumerate(lines):
        used += len(line) + 1
        if used > room:
            return [*lines[:count], more]
    return lines


# ---- check ----


def check_fixed_files(workspace: Workspace) -> str:
    """The fixed files are those with which the session began."""
    return check_fixed(workspace.root) or "unchanged since the session began"


def check_command(args: argparse.Namespace) -> int:
    """The checks that `try` begins with; exit code 0 only if it would start."""
    workspace = Workspace(args.root)
    recovered_rows(workspace)
    code = 0
    checks = {
        "settings": check_environment,
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


# ---- note ----


def note_command(args: argparse.Namespace) -> int:
    """Add a note to a row; all other bytes of the log stay as they are."""
    workspace = Workspace(args.root)
    text = args.text.encode(errors="replace").decode().strip()
    if not text:
        raise UserError("the note is empty")
    recovered_rows(workspace)
    with workspace.lock():
        row = find_row(workspace.rows(), args.run)

        def add_note(found: dict) -> dict:
            return with_note(found, text)

        change_row(workspace.log, row["run"], add_note)
    print(line_with_notes(find_row(workspace.rows(), args.run), 90).strip())
    return 0


def with_note(row: dict, text: str) -> dict:
    """The row with the text at the end of what was learned."""
    asi = row["asi"] if isinstance(row.get("asi"), dict) else {}
    before = f"{asi['learned']}; " if asi.get("learned") else ""
    return row | {"asi": asi | {"learned": before + text.removeprefix("learned ")}}


# ---- curve ----


def curve_command(args: argparse.Namespace) -> int:
    """Print the training loss of a run as a chart of lines."""
    workspace = Workspace(args.root)
    row = find_row(recovered_rows(workspace), args.run)
    points = read_curve(workspace.folder_of(row) / "steps.jsonl")
    if not points:
        raise UserError(f"run {row['run']} left no steps. hint: its folder may have been deleted")
    count = min(CURVE_LINES - 1, len(points))
    chosen = [points[round((i + 1) * len(points) / count) - 1] for i in range(count)]
    losses = [loss for _, _, loss in chosen]
    low, high = min(losses), max(losses)
    print("seconds   step     loss")
    for seconds, step, loss in chosen:
        bar = "#" * round(BAR * (loss - low) / (high - low or 1))
        print(f"{seconds:7.1f} {step:6.0f} {loss:8.4f} {bar}")
    return 0


def read_curve(path: Path) -> list[tuple[float, float, float]]:
    """(seconds, step, loss) of each line of a steps.jsonl; what is no such line is skipped."""
    points = []
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            step = strict_json(line)
            points.append((float(step["elapsed"]), float(step["step"]), float(step["loss"])))
    return points
