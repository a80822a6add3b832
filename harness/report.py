"""The report of a session: progress.png, and report.html, one self-contained file.

`bash autoresearch.sh report` writes both from the log. --tsv prints the log as a table; --watch
rewrites them after every run, and the page reloads itself.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from harness import chart
from harness.common import write_atomic
from harness.log import comparison_key, number, read_log, strict_json
from harness.scores import read_scores
from harness.verdict import kept

PAGE = Path(__file__).with_name("page.html")
SIZES = ((336, 360), (680, 420), (1040, 480))  # of the chart: a phone, a tablet, a desktop; pixels
PICTURE_SIZE = (1040, 480)
CURVE_POINTS = 150
DIFF_LENGTH = 8000  # characters of a run's diff in the page
WATCH_SECONDS = 2
PAGE_KEYS = (
    "run", "commit", "metric", "status", "reason", "description", "seconds", "parent_metric",
    "floor", "asi",
)  # fmt: skip


def add_parser(commands) -> None:
    """Register the command `report`."""
    words = "draw progress.png and report.html from the log"
    parser = commands.add_parser("report", help=words, description=words)
    parser.add_argument("--tsv", action="store_true", help="print the log as a table instead")
    parser.add_argument("--watch", action="store_true", help="rewrite them after every run")
    parser.set_defaults(func=report_command)


def report_command(args: argparse.Namespace) -> int:
    """Write the report; with --watch until interrupted."""
    log = args.root / "autoresearch.jsonl"
    rows = read_log(log)
    if args.tsv:
        print_table(rows)
        return 0
    write_report(args.root, rows, args.watch)
    while args.watch:
        time.sleep(WATCH_SECONDS)
        seen, rows = rows, read_log(log)
        if rows != seen:
            write_report(args.root, rows, args.watch)
    return 0


def print_table(rows: Sequence[dict]) -> None:
    """The log as tab-separated values, as other tools of this family print it."""
    print("commit", "val_bpb", "memory_gb", "status", "description", sep="\t")
    for row in rows:
        score = f"{row['metric']:.6f}" if row["metric"] > 0 else ""
        memory = f"{row['metrics'].get('peak_memory_mb', 0) / 1024:.1f}"
        description = " ".join(row["description"].split())
        print(row["commit"], score, memory, row["status"], description, sep="\t")


def write_report(root: Path, rows: Sequence[dict], watch: bool = False) -> None:
    """Write report.html and progress.png into root."""
    rows = [chart_row(row) for row in with_repeats(root, rows)]
    data = page_data(root, rows, watch)
    text = json.dumps(data).replace("<", "\\u003c")  # no text of the log can end the script element
    page = PAGE.read_text(encoding="utf-8").replace("/*data*/", text, 1)
    write_atomic(root / "report.html", page.encode())
    segments = chart_segments(rows)
    scene = chart.layout(segments[-1], *PICTURE_SIZE) if segments else None
    from harness.picture import write_picture  # loads matplotlib, which takes a second

    write_picture(scene, root / "progress.png")
    print("wrote report.html and progress.png", flush=True)


def page_data(root: Path, rows: Sequence[dict], watch: bool) -> dict:
    """Everything that page.html shows, as JSON; `rows` come from chart_row()."""
    segments = chart_segments(rows)
    charts = [segment_chart(segment, len(segments)) for segment in reversed(segments)]
    return {
        "name": root.resolve().name,
        "watch": watch,
        "facts": session_facts(segments[-1]) if segments else [["runs", "0"]],
        "charts": charts or [{"scenes": [], "notes": ["no scored run yet"]}],
        "runs": [page_row(row) | run_files(root, row) for row in rows],
    }


def with_repeats(root: Path, rows: Sequence[dict]) -> list[dict]:
    """The rows, each with `repeats`: the single scores of its train.py, where there are several.

    Later repeats of a train.py, for the noise or against a candidate, belong to its first row.
    """
    path = root / ".autoresearch" / "scores.jsonl"
    keys = {repr(comparison_key(row)): comparison_key(row) for row in rows}
    scores: dict[tuple, list[float]] = {}
    for name, key in keys.items():
        for entry in read_scores(path, [], key):
            if not entry.get("disturbed"):
                scores.setdefault((name, str(entry.get("code"))), []).append(entry["score"])
    found = []
    for row in rows:
        own = row.get("repeats") if isinstance(row.get("repeats"), list) else []
        repeats = scores.pop((repr(comparison_key(row)), str(row.get("code"))), own)
        found.append(row | {"repeats": repeats if len(repeats) > 1 else []})
    return found


def chart_row(row: dict) -> dict:
    """A row of the log, its optional keys of the types that the chart needs, whoever wrote it."""
    repeats = [number(score) for score in row.get("repeats") or []]
    clean: dict = {"repeats": [score for score in repeats if score > 0]}
    for name in ("floor", "parent_metric", "holdout_bpb"):
        value = number(row.get(name))
        clean[name] = value if value > 0 else None
    return row | clean


def chart_segments(rows: Sequence[dict]) -> list[list[dict]]:
    """The segments worth a chart: those with two or more runs, or the last one when none has."""
    segments: dict[int, list[dict]] = {}
    for row in rows:
        segments.setdefault(row["segment"], []).append(row)
    several = [segment for segment in segments.values() if len(segment) > 1]
    return several or list(segments.values())[-1:]


def segment_chart(segment: Sequence[dict], count: int) -> dict:
    """One chart of the page: its scenes by width, and the sentences below it."""
    scenes = [chart.layout(segment, *size, titled=False) for size in SIZES]
    first = segment[0]
    budget = number(first.get("budget"))
    what = f"runs {first['run']} to {segment[-1]['run']}"
    what += f", {budget:g} s each" if budget else ""
    notes = holdout_notes(segment) if scenes[0] else ["no scored run yet"]
    return {
        "heading": what if count > 1 else "",
        "scenes": [scene.as_json() for scene in scenes if scene],
        "notes": notes,
    }


def holdout_notes(segment: Sequence[dict]) -> list[str]:
    """One sentence: how much of the gain holds on text that no decision has seen; [] if unknown."""
    held = [row for row in kept(segment) if row["holdout_bpb"]]
    if len(held) < 2:
        return []
    first, best = held[0], min(held, key=lambda row: row["metric"])
    gain = first["metric"] - best["metric"]
    on_holdout = first["holdout_bpb"] - best["holdout_bpb"]
    if not gain > 0:
        return []
    return [
        f"On the hold-out text, which decided nothing, the gain from run {first['run']} to run "
        f"{best['run']} is {on_holdout:.4f} of {gain:.4f} bits per byte: "
        f"{100 * on_holdout / gain:.0f}% of it holds."
    ]


def session_facts(segment: Sequence[dict]) -> list[list[str]]:
    """(name, value) of the figures at the top of the page."""
    chosen = kept(segment)
    failed = sum(row["metric"] <= 0 for row in segment)
    facts = []
    if chosen:
        best = min(chosen, key=lambda row: row["metric"])
        gain = chosen[0]["metric"] - best["metric"]
        percent = 100 * gain / chosen[0]["metric"]
        facts += [["best val_bpb", f"{best['metric']:.4f} (run {best['run']})"]]
        facts += [["baseline", f"{chosen[0]['metric']:.4f}"]]
        facts += [["gain", f"{gain:.4f} ({percent:.1f}%)"]]
    facts += [["runs", f"{len(segment)}: {len(chosen)} kept, {failed} failed"]]
    floors = [row["floor"] for row in segment if row["floor"]]
    if floors:
        facts += [["noise floor", f"{floors[-1]:.4f}"]]
    seconds = [row["seconds"] for row in segment if row["seconds"] > 0 and row["metric"] > 0]
    if seconds:
        facts += [["time per run", f"{sum(seconds) / len(seconds):.0f} s"]]
    return facts


def page_row(row: dict) -> dict:
    """What the table and the details of one run show."""
    stamp = ""
    with contextlib.suppress(OverflowError, ValueError, OSError):
        when = datetime.fromtimestamp(row["timestamp"] / 1000, timezone.utc)
        stamp = when.strftime("%Y-%m-%d %H:%M UTC") if row["timestamp"] else ""
    verdict = ": ".join(text for text in (row["status"], row["reason"], row["detail"]) if text)
    facts = [verdict, str(row.get("marks") or "")]
    names = [name for name in ("device", "data_id", "seed", "budget") if row.get(name)]
    where = [f"commit {row['commit']}", stamp, *(f"{name} {row[name]}" for name in names)]
    facts.append(", ".join(text for text in where if text))
    if row["parent_metric"]:
        floor = f"{row['floor']:.6f}" if row["floor"] else "unknown"
        source = row.get("floor_source")
        source = f" ({source})" if isinstance(source, str) else ""
        facts.append(f"best before {row['parent_metric']:.6f}, noise floor {floor}{source}")
    if row["repeats"]:
        scores = ", ".join(f"{score:.6f}" for score in row["repeats"])
        facts.append(f"single scores, each on its own seed: {scores}")
    facts.append(", ".join(f"{name} {value:g}" for name, value in row["metrics"].items()))
    page = {name: row.get(name) for name in PAGE_KEYS}
    page["steps"] = row["metrics"].get("num_steps") or None
    return page | {"facts": [fact for fact in facts if fact]}


def run_files(root: Path, row: dict) -> dict:
    """The diff and the loss curve from a run's folder, if it is still there."""
    folder = root / ".autoresearch" / "runs" / f"{row['run']}-{row['commit']}"
    diff = ""
    with contextlib.suppress(OSError, ValueError):
        diff = (folder / "train.diff").read_text(errors="replace").partition("\n@@")[2]
    left_out = len(diff) - DIFF_LENGTH
    if left_out > 0:
        diff = f"{diff[:DIFF_LENGTH]}\n... {left_out} more characters in {folder.name}/train.diff"
    curve = loss_curve(folder / "steps.jsonl")
    return {"diff": diff, "curve": curve[:: len(curve) // CURVE_POINTS + 1]}


def loss_curve(path: Path) -> list[list[float]]:
    """[seconds, training loss] of each logged step; lines that are no such step are skipped."""
    curve = []
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(errors="replace").split("\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                step = strict_json(line)
                point = [round(float(step["elapsed"]), 2), round(float(step["loss"]), 4)]
                if all(map(math.isfinite, point)):
                    curve.append(point)
    return curve
