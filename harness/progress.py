"""How far a run under way is, from the files in its folder."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

END = 65536  # bytes at the end of steps.jsonl that are read: more than a hundred lines


@dataclass(frozen=True)
class Progress:
    """Where a run stands. Times are seconds."""

    phase: str  # preparing, starting (reading, compiling), training or scoring
    step: int = 0
    elapsed: float = 0.0  # of the budget
    budget: float = 0.0
    loss: float | None = None

    @property
    def left(self) -> float:
        """Seconds of training that are left; what starting and scoring take is not in it."""
        return max(0.0, self.budget - self.elapsed)

    def __str__(self) -> str:
        if self.phase != "training":
            return self.phase
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return (
            f"training: {self.elapsed:.0f} of {self.budget:.0f} s, step {self.step}{loss}, "
            f"{self.left:.0f} s of training left"
        )


def last_step(path: Path) -> dict:
    """The last complete line of steps.jsonl, {} when there is none yet."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - END))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return {}
    for line in reversed(lines[:-1]):  # what follows the last line end is still being written
        try:
            step = json.loads(line)
        except ValueError:
            continue
        if isinstance(step, dict):
            return step
    return {}


def read_progress(run_dir: Path) -> Progress:
    """How far the run that writes into run_dir is. The clock goes on between two step lines."""
    try:
        budget = float(json.loads((run_dir / "settings.json").read_text())["time_budget"])
    except (OSError, ValueError, KeyError, TypeError):
        return Progress("preparing")
    step = last_step(run_dir / "steps.jsonl")
    if (run_dir / "eval.jsonl").exists():
        return Progress("scoring", elapsed=budget, budget=budget)
    if not step:
        return Progress("starting", budget=budget)
    since = time.time() - (run_dir / "steps.jsonl").stat().st_mtime
    elapsed = float(step.get("elapsed") or 0.0) + max(0.0, since)
    phase = "training" if elapsed < budget else "scoring"
    return Progress(
        phase, int(step.get("step") or 0), min(elapsed, budget), budget, step.get("loss")
    )
