"""`try`: from an edit of train.py to a kept commit, or to a dropped idea that stays reachable."""

import argparse

from harness.baseline import add_repeats, make_baseline, measure_noise
from harness.checks import (
    begin,
    check_edits,
    check_idea,
    check_session,
    idea_of,
    present_session,
)
from harness.common import UserError, say
from harness.finish import finish, record_score, recover_run
from harness.judging import decide, incumbent
from harness.log import strict_json
from harness.measure import Result, add_gpu, measure
from harness.overview import print_verdict
from harness.repository import subject_and_body
from harness.session import OtherSettings, Session
from harness.workspace import Run, Stop, Workspace


def add_parser(commands) -> None:
    """Register the command `try`."""
    words = "measure the edit in train.py; keep it if it is better, else restore train.py"
    parser = commands.add_parser("try", help=words, description=words)
    parser.add_argument("description", help="what it changes, in a few words")
    parser.add_argument(
        "--asi", default="{}", help='notes for the row, a JSON object: {"hypothesis": "..."}'
    )
    parser.add_argument(
        "--simpler", action="store_true", help="also keep it when equal within noise and shorter"
    )
    parser.add_argument(
        "--memory-factor", type=float, default=1.5, metavar="X",
        help="warn above this multiple of the incumbent's memory (default 1.5)",
    )  # fmt: skip
    parser.add_argument(
        "--new-session", action="store_true", help="begin again: new settings, new baseline"
    )
    add_repeats(parser)
    add_gpu(parser)
    parser.set_defaults(func=try_command)


OPTIONS = ("simpler", "memory_factor", "new_session", "repeats", "gpu")


def try_command(args: argparse.Namespace) -> int:
    """One idea, from the edit to the verdict. Returns the exit code."""
    workspace = Workspace(args.root)
    description, asi = read_words(args)
    rows = begin(workspace)
    check_edits(workspace)
    session = None if args.new_session else present_session(workspace, rows)
    if session:
        check_session(session, workspace)
    if session or idea_of(workspace.repository) != "nothing":
        check_idea(workspace)
        run = open_candidate(workspace, args, description, asi)
        return print_verdict(workspace, work(run))
    with workspace.device(args.gpu):
        head = workspace.repository.git("rev-parse", "HEAD")
        session = make_baseline(workspace, head, args.gpu, args.new_session, description, asi)
        measure_noise(workspace, session.baseline, args.repeats, args.gpu)
    return print_verdict(workspace, session.baseline)


def read_words(args: argparse.Namespace) -> tuple[str, dict]:
    """The description and the notes, checked."""
    if not args.description.strip():
        raise UserError(
            "the description is empty. hint: say in a few words what this experiment changes"
        )
    try:
        asi = strict_json(args.asi)
    except ValueError as error:
        raise UserError(
            f'--asi {args.asi[:60]!r}: {error}. hint: --asi \'{{"hypothesis": "..."}}\''
        ) from None
    return args.description.encode(errors="replace").decode(), asi


def open_candidate(
    workspace: Workspace, args: argparse.Namespace, description: str, asi: dict
) -> Run:
    """Make a candidate of the present train.py and open its run."""
    options = {name: getattr(args, name) for name in OPTIONS}
    with workspace.lock():
        content = workspace.repository.train.read_bytes()
        run = Run.open(workspace, "candidate", description, asi=asi, options=options)
        commit = workspace.repository.make_candidate(
            run.id, content, subject_and_body(description, {}), run.folder / "index"
        )
        run.save(commit=commit)
    return run


def work(run: Run) -> dict:
    """Take an open candidate through baseline, noise, measurement and verdict; returns its row."""
    workspace, options = run.workspace, run.record["options"]
    try:
        with workspace.device(options["gpu"]):
            session = begin_session(run, options["new_session"])
            measure_noise(workspace, session.baseline, options["repeats"], options["gpu"])
            run.save(key=list(session.key), begun=True)
            result = measure(run, run.record["commit"], session, gpu=options["gpu"])
            with workspace.lock():
                record_score(run, "run")
            begin_session(run)  # the log may have been deleted meanwhile
            with workspace.lock():
                rows = workspace.rows()
                warn_of_memory(result, incumbent(rows), options["memory_factor"])
                return finish(run, **decide(run, rows))
    except BaseException as error:
        with workspace.lock():
            if run.is_open:
                stopped(run, error)
        if isinstance(error, OtherSettings):
            raise Stop(f"not started: {error}") from None
        raise


def begin_session(run: Run, new_session: bool = False) -> Session:
    """The session of a candidate, begun with the commit that it is based on if there is none."""
    gpu = run.record["options"]["gpu"]
    return make_baseline(run.workspace, run.record["parent"], gpu, new_session)


def stopped(run: Run, error: BaseException) -> None:
    """Finish a candidate that an exception ended. The caller holds the lock."""
    if isinstance(error, (OtherSettings, Stop)) and not run.record.get("result"):
        run.workspace.repository.drop_candidate(run.id)
        run.close(f"refused-{run.id}")
        return
    interrupted = isinstance(error, KeyboardInterrupt)
    recover_run(run, "interrupted" if interrupted else f"{type(error).__name__}: {error}")


def warn_of_memory(result: Result, top: dict | None, factor: float) -> None:
    """Say so when a scored run needs much more memory than the incumbent."""
    memory = result.metrics.get("peak_memory_mb", 0)
    usual = top["metrics"].get("peak_memory_mb", 0) if top else 0
    if result.status == "scored" and usual and memory > factor * usual:
        say(
            f"warning: peak memory {memory:.0f} MB is {memory / usual:.2f} times the incumbent's "
            f"{usual:.0f} MB"
        )
