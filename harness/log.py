"""autoresearch.jsonl: a config line, then one row a run. Other tools of this family read it too.

The format is strict JSON, one object a line. A new config line begins a new segment: scores of one
segment can be compared with each other, scores of two cannot.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from harness.common import write_atomic
from harness.verdict import confidence

# Metrics that every row has; other readers want the same keys in each.
METRICS = (
    "peak_memory_mb",
    "mfu_percent",
    "training_seconds",
    "total_seconds",
    "num_steps",
    "total_tokens_m",
    "num_params_m",
)
# What a run ran on: other values do not make a run another experiment, but are never hidden.
MACHINE_KEYS = (
    "compiled", "eager_reason", "attention", "dtype", "torch", "threads", "processor", "ranks",
)  # fmt: skip
# Keys of an evaluator's record that a row repeats.
RECORD_KEYS = (
    "data_id", "budget", "device", "profile", "seed", "marks", "fixed", "holdout_bpb",
    *MACHINE_KEYS,
)  # fmt: skip
TEXTS = ("commit", "status", "description", "reason", "id", "detail")


def strict_json(text: str) -> dict:
    """A JSON object of finite numbers. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    json.dumps(value, allow_nan=False)
    return value


def number(value: object) -> float:
    """A finite number, or the text of one; 0 for anything else."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0
    return (value if isinstance(value, (int, float)) else found) if math.isfinite(found) else 0


def complete_row(row: dict) -> dict:
    """A row with all keys that we read, each of its type, whatever tool wrote it."""
    texts = {name: row[name] if isinstance(row.get(name), str) else "" for name in TEXTS}
    metrics = row["metrics"] if isinstance(row.get("metrics"), dict) else {}
    return row | texts | {
        "metric": number(row["metric"]),
        "metrics": {name: number(value) for name, value in metrics.items()},
        "asi": row["asi"] if isinstance(row.get("asi"), dict) else {},
        "timestamp": number(row.get("timestamp")),
        "seconds": number(row.get("seconds")),
        "budget": number(row.get("budget")) or None,
        "commit_id": row.get("commit_id") or texts["commit"],
    }  # fmt: skip


def read_log(path: Path) -> list[dict]:
    """All rows in order. Half a last line, an edit by hand and lines of other types are skipped."""
    rows = []
    segment = -1
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = strict_json(line)
            segment += row.get("type") == "config"
            if isinstance(row.get("run"), int) and isinstance(row.get("metric"), (int, float)):
                rows.append(complete_row(row) | {"segment": max(segment, 0)})
    return rows


def current(rows: list[dict]) -> list[dict]:
    """The rows of the last segment."""
    return [row for row in rows if row["segment"] == rows[-1]["segment"]] if rows else []


def comparison_key(row: dict) -> tuple:
    """Two scores can be compared only when this is equal. Takes a row, or an evaluator's record."""
    budget = number(row.get("budget"))
    return row.get("data_id"), budget, row.get("device"), row.get("seed"), row.get("fixed")


def change_row(path: Path, number: int, change: Callable[[dict], dict]) -> None:
    """Replace one row; all other bytes of the log stay as they are. The caller holds the lock."""
    lines = path.read_text(errors="surrogateescape").split("\n")
    for place, line in enumerate(lines):
        with contextlib.suppress(ValueError):
            row = strict_json(line)
            if row.get("run") == number and "metric" in row:
                lines[place] = json.dumps(change(row), allow_nan=False)
    write_atomic(path, "\n".join(lines).encode(errors="surrogateescape"))


def append_row(path: Path, row: dict, new_segment: bool = False, torn: Path | None = None) -> dict:
    """Write one row, after a config line if it begins a segment, and flush it to the disk.

    The caller holds the lock. The row gets its run number, segment and confidence.

    Args:
        torn: gets half a last line that a power cut left.

    Raises:
        OSError: nothing was written.
    """
    rows = read_log(path)
    new_segment = new_segment or not rows
    segment = rows[-1]["segment"] + new_segment if rows else 0
    row = row | {"run": len(rows) + 1, "segment": segment}
    same = [earlier for earlier in rows if earlier["segment"] == segment]
    row["confidence"] = confidence([*same, row])
    config = {
        "type": "config",
        "name": path.resolve().parent.name,
        "metricName": "val_bpb",
        "metricUnit": "bpb",
        "bestDirection": "lower",
    }
    with open(path, "ab+", buffering=0) as file:
        # A config line may be there: of another tool, or ours before a power cut.
        begun = re.match(rb'{"type": ?"config"', repair_last_line(file, torn))
        lines = [config, row] if new_segment and not begun else [row]
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) < len(data):
                raise OSError(f"no room for a row of {path.name}")
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)  # half a line would stop strict readers
            raise
    return row


def repair_last_line(file, torn: Path | None) -> bytes:
    """Return the log's last line; move a partial line aside, add a missing newline."""
    file.seek(0)
    *lines, tail = file.read().split(b"\n")
    if not tail:
        return lines[-1] if lines else b""
    try:
        strict_json(tail.decode(errors="replace"))
    except ValueError:
        if torn:
            with open(torn, "ab") as aside:
                aside.write(tail + b"\n")
        file.truncate(file.seek(0, os.SEEK_END) - len(tail))
        return lines[-1] if lines else b""
    file.write(b"\n")
    return tail
