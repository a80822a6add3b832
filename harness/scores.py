"""All scores of a session, each under the code that it is of: .autoresearch/scores.jsonl.

The log has one row for each idea. Repeats of the incumbent and of a doubtful candidate are scores
of the same train.py, and count for it as much as the first run does.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.log import comparison_key, number, strict_json
from harness.session import Session
from harness.verdict import Spread, pooled_spread
from harness.workspace import Workspace


@dataclass(frozen=True)
class Scores:
    """All scores of a session that can be compared, each under the code that it is of."""

    entries: Sequence[dict]

    @classmethod
    def of(cls, workspace: Workspace, rows: list[dict]) -> "Scores":
        """The scores of the present session, none without one."""
        session = Session.of(rows)
        return cls(read_scores(workspace.scores, rows, session.comparison) if session else [])

    def of_code(self, code: str | None) -> list[float]:
        """The scores of one train.py, in the order in which they were measured."""
        return [entry["score"] for entry in self.undisturbed() if entry["code"] == code]

    def undisturbed(self) -> list[dict]:
        """Those that count: not of a run that got less of the machine than usual."""
        return [entry for entry in self.entries if not entry.get("disturbed")]

    def telemetry(self) -> list[dict]:
        """What the machine gave to each run, disturbed ones included."""
        return [entry.get("load") or {} for entry in self.entries]

    def spread(self) -> Spread:
        """How much the score of one and the same train.py varies."""
        codes = {entry["code"] for entry in self.undisturbed()}
        return pooled_spread([self.of_code(code) for code in sorted(codes)])


def read_scores(path: Path, rows: list[dict], comparison: tuple) -> list[dict]:
    """All scores with this comparison_key, from the file and from the log's rows.

    Each has id, code (object id of train.py), commit, kind, score, seed and steps. A run that is in
    both counts once.
    """
    found = {}
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = strict_json(line)
            same = tuple(entry["comparison"]) == comparison
            if same and entry["code"] and number(entry["score"]) > 0:
                found[entry["id"]] = entry
    for row in rows:
        judged = row["status"] in ("keep", "discard") and row["reason"] != "marked"
        same = comparison_key(row) == comparison
        if judged and same and row["metric"] > 0 and row.get("code"):
            found.setdefault(row["id"], score_of_row(row))
    return list(found.values())


def score_of_row(row: dict) -> dict:
    """The entry that a row of the log stands for."""
    return {
        "id": row["id"],
        "code": row["code"],
        "commit": row["commit_id"],
        "kind": "run",
        "score": row["metric"],
        "seed": row.get("seed"),
        "steps": row["metrics"].get("num_steps"),
    }


def append_score(path: Path, entry: dict) -> None:
    """Add one score and flush it to the disk. The caller holds the lock."""
    with open(path, "ab+") as file:
        file.seek(0)
        torn = file.read()[-1:] not in (b"", b"\n")
        line = json.dumps(entry, allow_nan=False) + "\n"
        file.write(("\n" if torn else "").encode() + line.encode())
        file.flush()
        os.fsync(file.fileno())
