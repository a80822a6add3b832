"""What the end of a run means: exit codes, the printed score, and the evaluator's record of it."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.common import UserError
from harness.process import Ended
from harness.runlog import last_words, metric_lines

REASONS = {
    0: "", 1: "crash", 2: "refused", 3: "nan", 4: "oom", 5: "void", 124: "timeout",
    130: "interrupted",
}  # fmt: skip
SAME_SCORE = 1e-6  # train.py prints six decimals


@dataclass(frozen=True)
class Outcome:
    """What came of one experiment. A run without a trusted score has score None and no metrics."""

    code: int  # exit code of `bash autoresearch.sh`, a key of REASONS
    detail: str = ""  # one line: what went wrong
    score: float | None = None  # val_bpb as recorded by the evaluator, bits per byte
    metrics: dict[str, float] = field(default_factory=dict)  # the METRIC lines, names in lower case
    metric_lines: tuple[str, ...] = ()  # the same as train.py printed them
    record: dict = field(default_factory=dict)  # the line of eval.jsonl
    settings: dict = field(default_factory=dict)  # of `prepare.py --settings-file`
    marks: str = ""  # of the record, and what the outer process found, joined by "; "
    seconds: float = 0.0  # wall time of train.py
    log_tail: tuple[str, ...] = ()  # of a failed run, the last lines of its run.log as shown
    load: dict = field(default_factory=dict)  # what the machine gave, see harness.machine_load

    @property
    def reason(self) -> str:
        """ "" when scored, else crash, refused, nan, oom, void, timeout or interrupted."""
        return REASONS[self.code]


class Failed(UserError):
    """Ends an experiment with an exit code and the one line that says why."""

    def __init__(self, code: int, detail: str):
        super().__init__(detail)
        self.code = code


def check_exit(ended: Ended, limit: float, log: Path) -> None:
    """Raise Failed with the right code and words unless train.py ended well within its limit."""
    code, words = ended.code, last_words(log)
    if ended.timed_out:
        raise Failed(124, f"timeout: still running after {limit:.0f} s, killed")
    if code == 0:
        return
    if code == 1:  # a train.py that handles no errors: its last words tell the kind
        if "UserError:" in words:
            code = 2
        elif "VoidScore:" in words:
            code = 5
        elif "OutOfMemory" in words or "out of memory" in words or words.startswith("MemoryError"):
            code = 4
    if code == 2:
        raise Failed(2, f"refused: {words}")
    if code == 3:
        raise Failed(3, f"diverged: {words}")
    if code in (4, 137):
        raise Failed(4, f"out of memory (killed or reported): {words}")
    if code == 5:
        raise Failed(5, f"void: {words}")
    raise Failed(1, f"train.py crashed (exit code {code}): {words}")


def read_record(path: Path, printed: str, ranks: int) -> dict:
    """The one line that the evaluator wrote for this run."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if not lines:
        raise Failed(5, f"void: val_bpb={printed} was printed, but evaluate_bpb recorded nothing")
    if len(lines) > 1:
        words = f"void: evaluate_bpb recorded {len(lines)} scores in one run"
        if len(lines) == ranks > 1:
            words += ". hint: a train.py for one process needs AUTORESEARCH_RANKS=1"
        raise Failed(5, words)
    try:
        record = json.loads(lines[0])
        record["val_bpb"] = float(record["val_bpb"])
        json.dumps(record, allow_nan=False)
    except (ValueError, TypeError, KeyError) as error:
        raise Failed(5, f"void: the record of evaluate_bpb can't be read: {error!r}") from None
    return record


def read_score(log: Path, record_path: Path, settings: Mapping, run_id: str) -> Outcome:
    """The outcome of a run that ended well, if what it printed is what the evaluator recorded.

    Raises:
        Failed: the score is void.
    """
    printed = metric_lines(log)
    names = [name for name, _ in printed]
    if "val_bpb" not in names:
        raise Failed(5, "void: train.py ended without printing val_bpb")
    if len(set(names)) < len(names):
        raise Failed(5, "void: a METRIC name was printed twice")
    score = dict(printed)["val_bpb"]
    record = read_record(record_path, score, settings["ranks"])
    check_record(record, settings, run_id)
    recorded = record["val_bpb"]
    if not abs(float(score) - recorded) < SAME_SCORE:
        words = f"train.py printed val_bpb={score}, evaluate_bpb recorded {recorded}"
        raise Failed(5, f"void: {words}")
    if not 0 < recorded < math.inf:
        raise Failed(5, f"void: val_bpb={recorded} is not a positive number")
    return Outcome(
        0,
        score=recorded,
        metrics={name: float(number) for name, number in printed},
        metric_lines=tuple(f"METRIC {name}={number}" for name, number in printed),
        record=record,
        marks=record.get("marks") or "",
    )


def check_record(record: Mapping, settings: Mapping, run_id: str) -> None:
    """Raise Failed unless the record is of this run, with this budget, seed and data."""
    if record.get("run_id") != run_id:
        raise Failed(5, "void: the record is of another run")
    budget, wanted = record.get("budget"), settings["time_budget"]
    if budget != wanted:
        words = f"trained with a budget of {budget} s, this experiment has {wanted:g} s"
        raise Failed(5, f"void: {words}")
    if record.get("seed") != settings["seed"]:
        raise Failed(5, f"void: the seed was changed to {record.get('seed')}")
    before, after = settings.get("data_id"), record.get("data_id")
    if before is not None and before != after:
        raise Failed(5, f"void: the data changed meanwhile, data_id {before} became {after}")


def time_mark(record: Mapping, starting: float, seconds: float) -> str:
    """A mark when the times in the record do not explain the wall time of the process.

    `starting` is what prepare.py took just before: it imports the same modules and reads the same
    data, so twice that (and ten seconds) is a fair allowance for what happens before the record's
    own clock runs and after the score. A process that trains before it imports prepare, or whose
    clock was slowed, takes longer.

    Raises:
        Failed: the record holds more seconds than have passed.
    """
    parts = [record.get(name) for name in ("training_seconds", "outside_seconds", "seconds")]
    if None in parts:
        return ""
    explained = sum(parts)
    words = f"the record explains {explained:.0f} s of the {seconds:.0f} s that the run took"
    if explained > seconds + 1:
        raise Failed(5, f"void: {words}: its clock was changed")
    if seconds - explained > 2 * starting + 10:
        return words
    return ""
