"""One experiment: prepare.py, train.py under a time limit, the check of the score it printed."""

import argparse
import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from harness.common import UserError, say
from harness.fixed import SESSION, check_fixed
from harness.machine_load import LoadMeter
from harness.outcome import Failed, Outcome, check_exit, read_score, time_mark
from harness.process import RUN_ID, Ended, call, end_orphans, processes_of, run_variables
from harness.ranks import number_of_ranks, rank_environments, rank_logs
from harness.runlog import TAIL, last_lines, last_words
from harness.settings import check_settings, read_setting, run_environment, user_path

STATE = ".autoresearch"  # folder in the checkout for all that is not committed


def run_experiment(
    root: Path,
    run_dir: Path,
    environment: Mapping[str, str],
    python: str,
    *,
    run_id: str | None = None,
    checkout: Path | None = None,
    session: str = SESSION,
    accept: Callable[[dict], None] | None = None,
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
        accept: gets the settings before training begins; what it raises ends the experiment.
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
            return run_in_order(root, environment, python, session, accept, tell)
    except UserError as error:
        return Outcome(2, str(error))


def run_in_order(
    root: Path,
    environment: Mapping[str, str],
    python: str,
    session: str,
    accept: Callable[[dict], None] | None,
    tell: Callable[[str], None],
) -> Outcome:
    """run_experiment, in a checkout that it holds and in the run's own environment."""
    log, run_dir = root / "run.log", Path(environment["AUTORESEARCH_RUN_DIR"])
    settings, started, ended = {}, Ended(), Ended()
    try:
        remove_old(log, run_dir)
        check_settings(environment)
        if remark := check_fixed(root, session):
            tell(remark)
        settings, started = prepare_data(root, run_dir, environment, python)
        ranks = number_of_ranks(read_setting("RANKS", environment), settings)
        settings["ranks"] = ranks
        tell(
            f"profile {settings['profile']}, data {settings['data']} ({settings['data_id']}), "
            f"budget {settings['time_budget']:g} s, seed {settings['seed']}"
        )
        if accept:
            accept(settings)
        limit = read_setting("HARD_LIMIT", environment) or 2 * settings["time_budget"] + 120
        logs = rank_logs(log, run_dir, ranks)
        with LoadMeter(environment[RUN_ID]) as meter:
            environments = rank_environments(environment, ranks)
            ended = call([python, "train.py"], root, environments, logs, limit)
        if ended.place:
            show_rank(logs[ended.place], ended.place, log)
        check_exit(ended, limit, log)
        check_still_fixed(root, session)
        outcome = read_score(log, run_dir / "eval.jsonl", settings, environment[RUN_ID])
        mark = time_mark(outcome.record, started.seconds, ended.seconds)
        return replace(
            outcome,
            settings=settings,
            marks="; ".join(filter(None, [outcome.marks, mark])),
            seconds=ended.seconds,
            load=meter.load(outcome.record),
        )
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
    old = [run_dir / name for name in ("settings.json", "eval.jsonl", "steps.jsonl")]
    for path in (log, *old, *run_dir.glob("rank*.log")):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def one_at_a_time(root: Path) -> Iterator[None]:
    """Hold the checkout for one experiment; refuse when another one has it."""
    lock = FileLock(root / STATE / "run.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        found = processes_of(root)
        process = f" (process {found[0]})" if found else ""
        raise UserError(
            f"another experiment is running in this checkout{process}. "
            "hint: wait until it has ended, or use another clone"
        ) from None
    try:
        yield
    finally:
        lock.release()


def prepare_data(
    root: Path, run_dir: Path, environment: Mapping[str, str], python: str
) -> tuple[dict, Ended]:
    """Run prepare.py, which makes the data if needed; returns the settings that it resolved.

    Raises:
        Failed: prepare.py refused or was interrupted.
    """
    log, file = root / "run.log", run_dir / "settings.json"
    command = [python, "prepare.py", "--settings-file", str(file)]
    ended = call(command, root, [environment], [log])
    if ended.code == 130:
        raise Failed(130, f"prepare.py was interrupted: {last_words(log)}")
    if ended.code:
        raise Failed(2, f"prepare.py failed: {last_words(log)}")
    log.unlink(missing_ok=True)
    try:
        return json.loads(file.read_text()), ended
    except (OSError, ValueError) as error:
        raise Failed(2, f"prepare.py wrote no usable settings: {error}") from None


# ---- after the run ----


def show_rank(log: Path, rank: int, first_log: Path) -> None:
    """Put the last lines of a rank that failed to the end of run.log, which is the first rank's."""
    with open(first_log, "a", errors="surrogateescape") as file:
        print(f"\n--- rank {rank}, all of it in {log} ---", *last_lines(log), sep="\n", file=file)


def check_still_fixed(root: Path, session: str) -> None:
    """Raise Failed when train.py changed a fixed file while it ran."""
    try:
        check_fixed(root, session)
    except UserError as error:
        raise Failed(5, str(error)) from None


# ---- the command ----


def add_parser(commands) -> None:
    """Register the command `run`."""
    words = "one experiment with the present train.py; prints METRIC lines"
    commands.add_parser("run", help=words, description=words).set_defaults(func=run_command)


def run_command(args: argparse.Namespace) -> int:
    """One experiment in the checkout: METRIC lines to stdout, all else to stderr."""
    root = args.root
    run_dir = user_path(os.environ.get("AUTORESEARCH_RUN_DIR") or str(root / STATE / "last"))
    outcome = run_experiment(root, run_dir, os.environ, sys.executable)
    if outcome.code:
        say(outcome.detail)
        if outcome.log_tail:
            say(f"last {TAIL} lines of run.log:")
            print(*outcome.log_tail, sep="\n", file=sys.stderr)
        return outcome.code
    if outcome.marks:
        say(f"marked: {outcome.marks}")
    if outcome.record.get("compiled") is False:
        reason = outcome.record.get("eager_reason") or "no reason is recorded"
        say(f"the model was not compiled, so it trained slowly: {reason}")
    print("", *outcome.metric_lines, sep="\n")
    return 0
