"""Runs that outlive the shell that started them: `try --detach` and `wait`."""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from harness.common import UserError, say
from harness.cycle import work
from harness.merge import has_old_base
from harness.overview import (
    COMMAND,
    find_finished,
    find_open,
    newest_run,
    print_verdict,
    recovered_rows,
    under_way,
)
from harness.series import print_series, work_series
from harness.workspace import Run, Stop, Workspace

STILL_RUNNING = 75  # exit code of `wait`: EX_TEMPFAIL of sysexits.h
OUTPUT = "output.txt"  # in the run's folder: what a detached run prints
INTERVAL = 0.5  # seconds between two looks at a run's folder
LOOK_INTERVAL = 10  # seconds between two searches for a process that was killed
HAND_OVER = 30  # seconds that the background process waits for the run


def add_parser(commands) -> None:
    """Register the commands `wait` and, for the background, `work`."""
    words = f"print the verdict of a detached run; exit code {STILL_RUNNING} while it is running"
    parser = commands.add_parser("wait", help=words, description=words)
    parser.add_argument("run", metavar="RUN", nargs="?", help="number or id (default: the newest)")
    parser.add_argument(
        "--timeout", type=float, default=500, metavar="S",
        help="seconds to wait (default 500: many shells end a command after ten minutes)",
    )  # fmt: skip
    parser.set_defaults(func=wait_command)
    parser = commands.add_parser("work", description="used by --detach")
    parser.add_argument("run")
    parser.set_defaults(func=work_command)


def detach(run: Run) -> int:
    """Start an open run in the background and say how to get its verdict."""
    start(run)
    print(f"run {run.id} is under way; train.py is the kept one, ready for the next idea")
    print(f"verdict: {COMMAND} wait {run.id}")
    return 0


def start(run: Run) -> None:
    """Hand an open run to a process of its own; train.py becomes the kept one again."""
    workspace = run.workspace
    command = [sys.executable, "-m", "harness", "work", run.id]
    with workspace.lock():  # nobody else may take the run over meanwhile
        run.save(detached=True)
        run.release()
        with open(run.folder / OUTPUT, "wb") as output:
            child = subprocess.Popen(
                command, cwd=workspace.root, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        while run.adopt():
            run.release()
            if child.poll() is not None:
                words = (run.folder / OUTPUT).read_text(errors="replace").strip()
                raise UserError(f"the background process ended at once: {words}")
            time.sleep(0.02)
        if run.record["kind"] == "candidate":
            give_back(run)


def give_back(run: Run) -> None:
    """Restore the kept train.py, unless the user has edited it since."""
    repository, record = run.workspace.repository, run.record
    ours = {repository.train_blob(commit) for commit in (record["commit"], record["parent"])}
    repository.bring_train(record["branch"], ours)


def work_on(run: Run) -> int:
    """Bring an open run to its end and print the verdict. Returns the exit code."""
    if run.record["kind"] == "series":
        return work_series(run)
    return print_verdict(run.workspace, work(run))


def work_command(args: argparse.Namespace) -> int:
    """Take over an open run and bring it to its end."""
    workspace = Workspace(args.root)
    run = find_open(workspace, args.run)
    if run is None or not run.adopt(HAND_OVER):
        raise UserError(f"there is no open run {args.run}")
    return work_on(run)


def wait_command(args: argparse.Namespace) -> int:
    """Wait for the verdict of a run and print it. Interrupting this does not touch the run."""
    workspace = Workspace(args.root)
    end = time.monotonic() + args.timeout
    name = args.run or newest_run(workspace, recovered_rows(workspace))
    if run := find_open(workspace, name):
        say(under_way(workspace, run))
    while run := find_open(workspace, name):
        if time.monotonic() > end:
            print(under_way(workspace, run))
            print(f"still running. next: {COMMAND} wait {name}")
            return STILL_RUNNING
        sleep_until_gone(run.folder, min(LOOK_INTERVAL, end + INTERVAL - time.monotonic()))
        recovered_rows(workspace)
    return print_result(workspace, name)


def sleep_until_gone(folder: Path, seconds: float) -> None:
    """Wait for a folder to get its final name, without work for the machine that is measured."""
    end = time.monotonic() + seconds
    while folder.exists() and time.monotonic() < end:
        time.sleep(INTERVAL)


def print_result(workspace: Workspace, name: str) -> int:
    """The verdict of a run that has ended, or why it has none. Returns its exit code."""
    row = find_finished(workspace.rows(), name)
    if row:
        code = print_verdict(workspace, row)
        if has_old_base(workspace):
            say("train.py holds edits from before: the next 'try' adds the kept change to them")
        return code
    folders = sorted(workspace.runs.glob(f"*-{name}*"))
    if not folders:
        raise UserError(f"there is no run {name}. hint: '{COMMAND} status' lists the last ones")
    run = Run(workspace, folders[-1])
    if run.record.get("row"):
        return print_series(workspace, run)
    why = run.record.get("ended") or "it was interrupted"
    raise Stop(why, run.record.get("exit_code", 2))
