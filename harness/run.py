"""One experiment: prepare.py, train.py under a time limit, the check of the score it printed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.fixed import SESSION
from harness.process import say

REASONS = {
    0: "", 1: "crash", 2: "refused", 3: "nan", 4: "oom", 5: "void", 124: "timeout",
    130: "interrupted",
}  # fmt: skip


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
    load: dict = field(default_factory=dict)  # what the machine gave, see harness.machine_load

    @property
    def reason(self) -> str:
        """ "" when scored, else crash, refused, nan, oom, void, timeout or interrupted."""
        return REASONS[self.code]


def run_experiment(
    root: Path,
    run_dir: Path,
    environment: Mapping[str, str],
    python: str,
    *,
    run_id: str | None = None,
    checkout: Path | None = None,
    session: str = SESSION,
    tell: Callable[[str], None] = say,
) -> Outcome:
    """Run root/train.py once, as `bash autoresearch.sh` does, and check its score.

    Args:
        root: the folder with prepare.py and train.py; gets run.log.
        run_dir: gets settings.json, eval.jsonl and steps.jsonl; those of an earlier run go.
        environment: of the run; variables that could change its meaning are removed from it.
        python: the interpreter that runs both files.
        run_id: an id chosen before, so that the caller can find the run's processes again.
        checkout: the folder whose commands watch this run (default: root), see end_orphans.
        session: the commit or ref whose fixed files are the right ones.
        tell: gets remarks for the user while it runs.

    Raises:
        KeyboardInterrupt: Ctrl-C, TERM or HUP; all processes of the run have been ended.
    """
    raise NotImplementedError
