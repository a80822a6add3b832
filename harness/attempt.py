"""`try`, `confirm`, `noise`: checks, then an open run, here or in the background."""

import argparse

from harness.checks import (
    begin,
    check_edits,
    check_idea,
    check_session,
    idea_of,
    present_session,
)
from harness.common import UserError
from harness.detach import detach, work_on
from harness.log import strict_json
from harness.merge import add_kept_change
from harness.overview import find_row
from harness.place import OPTIONS as PLACE
from harness.place import Place, add_place
from harness.repository import subject_and_body
from harness.series import add_detach, add_noise_options, add_repeats, open_baseline, open_noise
from harness.workspace import Run, Workspace

# What a run needs to know later; kept in its record.
OPTIONS = ("simpler", "once", "memory_factor", "new_session", "repeats", "seeds", *PLACE)


def add_parser(commands) -> None:
    """Register the commands `try`, `confirm` and `noise`."""
    words = "measure the edit in train.py; keep it if it is better, else restore train.py"
    parser = commands.add_parser("try", help=words, description=words)
    parser.add_argument("description", help="what it changes, in a few words")
    parser.add_argument(
        "--asi", default="{}", help='notes for the row, a JSON object: {"hypothesis": "..."}'
    )
    add_options(parser)
    parser.set_defaults(func=try_command)
    words = "take a dropped run up again where it stands: its scores count"
    parser = commands.add_parser("confirm", help=words, description=words)
    parser.add_argument("run", metavar="RUN", help="number or id of the run")
    add_options(parser)
    parser.set_defaults(func=confirm_command)
    words = "repeat the incumbent on other seeds: how much a score varies by itself"
    parser = commands.add_parser("noise", help=words, description=words)
    add_noise_options(parser)
    parser.set_defaults(func=noise_command)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that judges a candidate."""
    parser.add_argument(
        "--simpler", action="store_true", help="also keep it when as good and shorter"
    )
    parser.add_argument(
        "--once", action="store_true", help="judge by one run, also where the result is doubtful"
    )
    add_detach(parser)
    parser.add_argument(
        "--memory-factor", type=float, default=1.5, metavar="X",
        help="warn above this multiple of the incumbent's memory (default 1.5)",
    )  # fmt: skip
    parser.add_argument(
        "--new-session", action="store_true", help="begin again: new settings, new baseline"
    )
    add_repeats(parser)
    add_place(parser)
    parser.set_defaults(seeds=1)


def try_command(args: argparse.Namespace) -> int:
    """One idea, from the edit to the verdict. Returns the exit code."""
    workspace = Workspace(args.root)
    description, asi = read_words(args)
    place = Place.of(vars(args))
    place.check()
    rows = begin(workspace)
    add_kept_change(workspace)
    check_edits(workspace)
    session = None if args.new_session else present_session(workspace, rows)
    if session:
        check_session(session, workspace, place)
    if session is None and idea_of(workspace.repository) == "nothing":
        return carry_out(open_baseline(workspace, args, description, asi), args.detach)
    check_idea(workspace)
    content = workspace.repository.train.read_bytes()
    return carry_out(open_candidate(workspace, args, description, asi, content), args.detach)


def confirm_command(args: argparse.Namespace) -> int:
    """One more run of an earlier candidate, and as many as the verdict needs after it."""
    workspace = Workspace(args.root)
    place = Place.of(vars(args))
    place.check()
    rows = begin(workspace)
    check_edits(workspace)
    row = find_row(rows, args.run)
    commit = workspace.repository.resolve_run(row["id"])
    if commit is None:
        raise UserError(f"run {row['run']} has no code of its own. hint: 'status' lists the runs")
    if row["status"] == "keep":
        raise UserError(f"run {row['run']} was kept. hint: 'noise' repeats the incumbent")
    session = present_session(workspace, rows)
    if session is None or row["segment"] != session.baseline["segment"]:
        raise UserError(
            f"run {row['run']} is of another session. hint: "
            f"'git restore -s {row['ref']} train.py', then 'try'"
        )
    check_session(session, workspace, place)
    content = workspace.repository.train_at(commit)
    description = row["description"].removeprefix("confirm: ")
    run = open_candidate(
        workspace, args, f"confirm: {description}", row["asi"], content, confirms=row["run"]
    )
    return carry_out(run, args.detach)


def noise_command(args: argparse.Namespace) -> int:
    """Bring the incumbent to the wanted number of scores; prints the noise floor."""
    return carry_out(open_noise(Workspace(args.root), args), args.detach)


def carry_out(run: Run, detached: bool) -> int:
    """Work on an open run, here or in the background. Returns the exit code."""
    return detach(run) if detached else work_on(run)


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
    workspace: Workspace,
    args: argparse.Namespace,
    description: str,
    asi: dict,
    content: bytes,
    confirms: int | None = None,
) -> Run:
    """Make a candidate of these bytes of train.py and open its run.

    Args:
        confirms: the number of the earlier run with the same code.
    """
    options = {name: getattr(args, name) for name in OPTIONS} | {"confirms": confirms}
    with workspace.lock():
        run = Run.open(workspace, "candidate", description, asi=asi, options=options)
        commit = workspace.repository.make_candidate(
            run.id, content, subject_and_body(description, {}), run.folder / "index"
        )
        run.save(commit=commit)
    return run
