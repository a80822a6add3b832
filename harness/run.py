"""One experiment: prepare.py, train.py under a time limit, the check of the score it printed."""

import argparse
import contextlib
import json
import math
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock, Timeout

from harness.common import UserError, say
from harness.fixed import SESSION, check_fixed
from harness.process import CHECKOUT, RUN_ID, Ended, call, end_orphans, run_processes, run_variables
from harness.runlog import TAIL, last_lines, last_words, metric_lines
from harness.settings import check_settings, read_setting, run_environment

STATE = ".autoresearch"  # folder in the checkout for all that is not committed
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
    run_id = run_id or f"{time.time_ns() // 1_000_000}-{secrets.token_hex(6)}"
    try:
        make_folders(root, run_dir)
        with one_at_a_time(root):
            if stopped := end_orphans(checkout or root):
                tell(f"ended {stopped} processes of an earlier run whose command was killed")
            environment = run_environment(environment)
            environment |= run_variables(run_id, checkout or root)
            environment |= {"AUTORESEARCH_RUN_DIR": str(run_dir.resolve())}
            return measure(root, environment, python, session, tell)
    except UserError as error:
        return Outcome(2, str(error))


def measure(
    root: Path,
    environment: Mapping[str, str],
    python: str,
    session: str,
    tell: Callable[[str], None],
) -> Outcome:
    """run_experiment, in a checkout that it holds and in the run's own environment."""
    log, run_dir = root / "run.log", Path(environment["AUTORESEARCH_RUN_DIR"])
    settings, ended = {}, Ended(0, False, 0.0)
    try:
        remove_old(log, run_dir)
        check_settings(environment)
        if remark := check_fixed(root, session):
            tell(remark)
        settings = prepare_data(root, run_dir, environment, python)
        limit = read_setting("HARD_LIMIT", environment) or 2 * settings["time_budget"] + 120
        ended = call([python, "train.py"], root, environment, log, limit)
        check_exit(ended, limit, log)
        check_still_fixed(root, session)
        outcome = read_score(log, run_dir / "eval.jsonl", settings, environment[RUN_ID])
        return replace(outcome, settings=settings, seconds=ended.seconds)
    except UserError as error:
        return Outcome(
            error.code if isinstance(error, Failed) else 2,
            str(error),
            settings=settings,
            seconds=ended.seconds,
            log_tail=tuple(last_lines(log)),
        )


# ---- before the run ----


def make_folders(root: Path, run_dir: Path) -> None:
    """Make the folders that a run writes to.

    Raises:
        UserError: the checkout or run_dir is read-only.
    """
    try:
        (root / STATE).mkdir(exist_ok=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        for folder in (root, root / STATE, run_dir):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise UserError(
            f"cannot write: {error}. hint: a run writes run.log and {STATE}/ in the checkout; "
            "make it writable, or work in a copy of it"
        ) from None


def remove_old(log: Path, run_dir: Path) -> None:
    """Remove what an earlier run left, so that no number can come from it."""
    for path in (log, *(run_dir / name for name in ("settings.json", "eval.jsonl", "steps.jsonl"))):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Hold the checkout for one experiment; refuse when another one has it."""
    lock = FileLock(root / STATE / "run.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        folder = str(root.resolve())
        found = [pid for pid, of_run in run_processes() if of_run.get(CHECKOUT) == folder]
        process = f" (process {min(found)})" if found else ""
        raise UserError(
            f"another experiment is running in this checkout{process}. "
            "hint: wait until it has ended, or use another clone"
        ) from None
    try:
        yield
    finally:
        lock.release()


def prepare_data(root: Path, run_dir: Path, environment: Mapping[str, str], python: str) -> dict:
    """Run prepare.py, which makes the data if needed; returns the settings that it resolved.

    Raises:
        Failed: prepare.py refused or was interrupted.
    """
    log, file = root / "run.log", run_dir / "settings.json"
    command = [python, "prepare.py", "--settings-file", str(file)]
    ended = call(command, root, environment, log, None)
    if ended.code == 130:
        raise Failed(130, f"prepare.py was interrupted: {last_words(log)}")
    if ended.code == 2 and "unrecognized arguments: --settings-file" in last_words(log):
        ended = call(command[:2], root, environment, log, None)
    if ended.code:
        raise Failed(2, f"prepare.py failed: {last_words(log)}")
    log.unlink(missing_ok=True)
    if not file.exists():
        budget, seed = read_setting("TIME_BUDGET", environment), read_setting("SEED", environment)
        return {"time_budget": budget or 300.0, "seed": 1337 if seed is None else seed}
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Failed(2, f"prepare.py wrote no usable settings: {error}") from None


# ---- after the run ----


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


def check_still_fixed(root: Path, session: str) -> None:
    """Raise Failed when train.py changed a fixed file while it ran."""
    try:
        check_fixed(root, session)
    except UserError as error:
        raise Failed(5, str(error)) from None


def read_record(path: Path, printed: str) -> dict:
    """The one line that the evaluator wrote for this run."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if not lines:
        raise Failed(5, f"void: val_bpb={printed} was printed, but evaluate_bpb recorded nothing")
    if len(lines) > 1:
        raise Failed(5, f"void: evaluate_bpb recorded {len(lines)} scores in one run")
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
    record = read_record(record_path, score)
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


# ---- the command ----


def add_parser(commands) -> None:
    """Register the command `run`."""
    words = "one experiment with the present train.py; prints METRIC lines"
    commands.add_parser("run", help=words, description=words).set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """One experiment in the checkout: METRIC lines to stdout, all else to stderr."""
    root = args.root
    run_dir = Path(os.environ.get("AUTORESEARCH_RUN_DIR") or root / STATE / "last").expanduser()
    outcome = run_experiment(root, run_dir, os.environ, sys.executable)
    if outcome.code:
        say(outcome.detail)
        if outcome.log_tail:
            say(f"last {TAIL} lines of run.log:")
            print(*outcome.log_tail, sep="\n", file=sys.stderr)
        return outcome.code
    if outcome.marks:
        say(f"marked: {outcome.marks}")
    print("", *outcome.metric_lines, sep="\n")
    return 0
