"""Runs without a candidate: the baseline of a session, and repeats of the incumbent (`noise`)."""

import argparse
import statistics

from harness.baseline import REPEATS, make_baseline, measure_noise
from harness.checks import begin, check_session, present_session
from harness.common import UserError, say
from harness.judging import floor_of, incumbent
from harness.overview import print_verdict
from harness.place import OPTIONS as PLACE
from harness.place import Place, add_place
from harness.workspace import Run, Workspace

# What a series needs to know later; kept in its record.
OPTIONS = ("new_session", "repeats", *PLACE)


def add_repeats(parser: argparse.ArgumentParser) -> None:
    """The option --repeats."""
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N",
        help=f"scores of one train.py that measure the noise (default {REPEATS})",
    )  # fmt: skip


def add_detach(parser: argparse.ArgumentParser) -> None:
    """The option --detach."""
    parser.add_argument(
        "--detach", action="store_true", help="return at once; 'wait' prints the verdict"
    )


def add_noise_options(parser: argparse.ArgumentParser) -> None:
    """The options of `noise`."""
    add_repeats(parser)
    add_detach(parser)
    add_place(parser)
    parser.set_defaults(new_session=False)


def open_baseline(
    workspace: Workspace, args: argparse.Namespace, description: str, asi: dict
) -> Run:
    """Open a series that begins a session with the present commit."""
    options = {name: getattr(args, name) for name in OPTIONS} | {"of": "baseline"}
    with workspace.lock():
        return Run.open(workspace, "series", description, asi=asi, options=options)


def open_noise(workspace: Workspace, args: argparse.Namespace) -> Run:
    """Open a series that repeats the incumbent."""
    place = Place.of(vars(args))
    place.check()
    rows = begin(workspace)
    session, top = present_session(workspace, rows), incumbent(rows)
    if not session or not top:
        raise UserError("nothing to measure yet. hint: bash autoresearch.sh try baseline")
    check_session(session, workspace, place)
    if args.repeats < 2:
        raise UserError(f"--repeats {args.repeats}: a standard deviation needs 2 or more")
    options = {name: getattr(args, name) for name in OPTIONS} | {"of": "incumbent"}
    with workspace.lock():
        return Run.open(workspace, "series", f"noise of run {top['run']}", options=options)


def work_series(run: Run) -> int:
    """Make the runs of a series and print what they gave. Returns the exit code."""
    workspace, options = run.workspace, run.record["options"]
    place = Place.of(options)
    try:
        with place.hold(workspace):
            if options["of"] == "baseline":
                row = make_baseline_of(run)
            else:
                row = incumbent(workspace.rows())
            scores = measure_noise(workspace, row, options["repeats"], place, run)
    except BaseException as error:
        with workspace.lock():
            run.save(ended=str(error) or "interrupted", exit_code=getattr(error, "exit_code", 130))
            run.close(f"interrupted-{run.id}")
        raise
    words = noise_words(workspace, scores)
    with workspace.lock():
        run.save(ended=words, exit_code=0, row=row["run"])
        run.close(f"noise-{run.id}")
    return print_series(workspace, run)


def make_baseline_of(run: Run) -> dict:
    """Begin the session that a series is for; returns the row of its baseline."""
    record, options = run.record, run.record["options"]
    run.enter("measuring the baseline")
    session = make_baseline(
        run.workspace,
        record["parent"],
        Place.of(options),
        options["new_session"],
        record["description"],
        record["asi"],
    )
    return session.baseline


def noise_words(workspace: Workspace, scores: list[float]) -> str:
    """Mean and spread of some scores of one code, and the floor that follows, as a sentence."""
    if len(scores) < 2:
        return "one score; 'noise' measures what it varies by itself"
    floor, source = floor_of(workspace, workspace.rows())
    deviation = statistics.stdev(scores)
    if not deviation:
        say("all scores are equal. hint: does train.py use the seed?")
    return (
        f"mean {statistics.mean(scores):.6f}, standard deviation {deviation:.6f}, "
        f"n {len(scores)}; the floor is now {floor:.6f} ({source})"
    )


def print_series(workspace: Workspace, run: Run) -> int:
    """Print what a series that has ended gave. Returns the exit code."""
    rows = [row for row in workspace.rows() if row["run"] == run.record["row"]]
    code = 0
    if run.record["options"]["of"] == "baseline" and rows:
        code = print_verdict(workspace, rows[0])
    print(run.record["ended"])
    return code
