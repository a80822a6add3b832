"""`sweep KNOB=a,b ...`: every combination of these knobs of train.py, each as a candidate.

The candidates are judged like all others, in the order in which they end. A sweep that was cut off
goes on when the same command is given again: what has a row in the session is not run twice.
"""

import argparse
import itertools
import time
from dataclasses import dataclass, replace
from pathlib import Path

from harness.attempt import open_candidate
from harness.checks import begin, check_edits, check_session, idea_of, present_session
from harness.common import UserError, say
from harness.detach import INTERVAL, LOOK_INTERVAL, start
from harness.fleet import room_in_cluster
from harness.judging import incumbent
from harness.knobs import find_knobs, read_knob, with_values
from harness.log import current
from harness.overview import WORDS, find_finished, minutes, recovered_rows, usual_seconds
from harness.place import Place, add_place
from harness.series import add_repeats
from harness.workspace import Workspace

MAX_SEEDS = 20
MAX_AT_ONCE = 64  # each has two processes on this machine
# Ends after which a combination is run again: its code was not measured.
UNMEASURED = ("interrupted", "disturbed")


@dataclass
class Combination:
    """One candidate of a sweep."""

    words: str  # "MATRIX_LR=0.02 WARMDOWN_RATIO=0.5"
    content: bytes  # its train.py
    code: str  # the object id of that
    why: str = ""  # there is no row

    def row_in(self, rows: list[dict]) -> dict | None:
        """Its row in the present session, None while it has not been measured."""
        rows = [row for row in current(rows) if row.get("code") == self.code]
        return next((row for row in reversed(rows) if row["reason"] not in UNMEASURED), None)


def add_parser(commands) -> None:
    """Register the command `sweep`."""
    words = "try every combination of knobs at the top of train.py; one table at the end"
    parser = commands.add_parser("sweep", help=words, description=words)
    parser.add_argument("knobs", nargs="+", metavar="KNOB=A,B", help="a constant and its values")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N",
        help="scores of each combination before it is judged (default 1; doubtful ones get more)",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true", help="judge by these scores, also where they are doubtful"
    )
    add_repeats(parser)
    add_place(parser, many=True)
    parser.set_defaults(func=sweep_command, simpler=False, new_session=False, memory_factor=1.5)


def sweep_command(args: argparse.Namespace) -> int:
    """Run what has no row yet, as many at once as there is room for; print all in one table."""
    workspace = Workspace(args.root)
    Place.of(vars(args)).check()
    rows = begin(workspace)
    check_edits(workspace)
    combinations = read_combinations(workspace, args, rows)
    missing = [combination for combination in combinations if not combination.row_in(rows)]
    places = places_for(workspace, args) if missing else []
    seconds = usual_seconds(rows) * args.seeds * len(missing) / max(1, len(places))
    say(
        f"{len(combinations)} combinations, {len(missing)} of them to run, up to {len(places)} at "
        f"once: {minutes(seconds)} or more"
    )
    run_all(workspace, args, missing, places)
    return print_table(workspace.rows(), combinations)


def read_combinations(
    workspace: Workspace, args: argparse.Namespace, rows: list[dict]
) -> list[Combination]:
    """All that was asked for, checked before anything runs.

    Raises:
        UserError: a knob or a value is wrong, there is no session, or train.py is edited.
    """
    if not 1 <= args.seeds <= MAX_SEEDS:
        raise UserError(f"--seeds {args.seeds} is not from 1 to {MAX_SEEDS}")
    session = present_session(workspace, rows)
    if session is None:
        raise UserError("there is no session yet. hint: bash autoresearch.sh try baseline")
    check_session(session, workspace, Place.of(vars(args)))
    repository = workspace.repository
    if idea_of(repository) != "nothing":
        raise UserError(
            "train.py is edited, and a sweep begins with the kept one. hint: 'try' the edit "
            "first, or 'git restore train.py'"
        )
    source = repository.train.read_bytes()
    knobs = find_knobs(source, session.baseline.get("profile") or "")
    wanted = [read_knob(word, knobs) for word in args.knobs]
    names = [knob.name for knob, _ in wanted]
    if len(set(names)) < len(names):
        raise UserError(f"a knob is named twice: {' '.join(names)}. hint: KNOB=A,B,C")
    found = []
    for values in itertools.product(*(texts for _, texts in wanted)):
        changes = dict(zip((knob for knob, _ in wanted), values, strict=True))
        content = with_values(source, changes)
        words = " ".join(f"{knob.name}={text}" for knob, text in changes.items())
        found.append(Combination(words, content, repository.blob_of(content)))
    return found


def places_for(workspace: Workspace, args: argparse.Namespace) -> list[Place]:
    """A place for each run that may be under way at the same time."""
    place = Place.of(vars(args))
    if place.on:
        room = room_in_cluster(workspace, place)
        return [place] * min(MAX_AT_ONCE, max(1, room))
    if place.gpu:
        return [replace(place, gpu=gpu) for gpu in dict.fromkeys(place.gpu.split(","))]
    return [place]


# ---- running ----


def run_all(
    workspace: Workspace, args: argparse.Namespace, missing: list[Combination], places: list[Place]
) -> None:
    """Run the combinations in the background, a new one whenever a place is free."""
    waiting, free = list(missing), list(places)
    running: dict[str, tuple[Combination, Place, Path]] = {}
    looked = time.monotonic()
    try:
        while waiting or running:
            while waiting and free:
                combination, place = waiting.pop(0), free.pop(0)
                run_id, folder = start_one(workspace, args, combination, place)
                running[run_id] = combination, place, folder
            time.sleep(INTERVAL)
            if time.monotonic() - looked > LOOK_INTERVAL:
                recovered_rows(workspace)  # ends what was killed meanwhile
                looked = time.monotonic()
            for run_id in [name for name, (_, _, folder) in running.items() if not folder.exists()]:
                combination, place, _ = running.pop(run_id)
                free.append(place)
                tell(workspace, combination, run_id)
    except KeyboardInterrupt:
        names = " ".join(running) or "nothing"
        say(f"under way in the background: {names}. The same command goes on with the rest")
        raise


def start_one(
    workspace: Workspace, args: argparse.Namespace, combination: Combination, place: Place
) -> tuple[str, Path]:
    """Begin one candidate; returns its id and its folder while it is open."""
    options = argparse.Namespace(**vars(args) | vars(place))
    asi = {"sweep": " ".join(args.knobs)}
    run = open_candidate(workspace, options, combination.words, asi, combination.content)
    folder = run.folder
    start(run)
    return run.id, folder


def tell(workspace: Workspace, combination: Combination, run_id: str) -> None:
    """Say what came of a candidate that has ended; without a row, remember why."""
    rows = workspace.rows()
    row = combination.row_in(rows) or find_finished(rows, run_id)
    if row is None:
        folders = sorted(workspace.runs.glob(f"*-{run_id}"))
        words = [(folder / "output.txt").read_text(errors="replace") for folder in folders]
        combination.why = "".join(words).strip().split("\n")[-1] or "interrupted"
    say(f"{combination.words}: {verdict_words(row) if row else combination.why}")


# ---- the table ----


def print_table(rows: list[dict], combinations: list[Combination]) -> int:
    """Print all combinations, the best first. Returns the exit code: 1 if one has no row."""
    width = max(len(combination.words) for combination in combinations)
    print(f"{'':{width}}   val_bpb runs    change  verdict")
    for combination in sorted(combinations, key=lambda found: sorting_key(found.row_in(rows))):
        row = combination.row_in(rows)
        text = numbers(row) if row else f"{'-':>9} {0:>4} {'-':>9}  not measured"
        print(f"{combination.words:{width}} {text}")
    top = incumbent(rows)
    best = next((found for found in combinations if top and found.code == top["code"]), None)
    if best:
        print(f"best: {best.words}, val_bpb {top['metric']:.6f}; it is the kept train.py")
    else:
        print(f"none is better than the kept train.py: val_bpb {top['metric']:.6f}")
    unmeasured = [found for found in combinations if not found.row_in(rows)]
    if unmeasured:
        say(f"{len(unmeasured)} were not measured. hint: the same command runs them")
    return int(bool(unmeasured))


def sorting_key(row: dict | None) -> tuple[bool, float]:
    """Best scores first, what has none last."""
    metric = row["metric"] if row else 0
    return not metric, metric


def numbers(row: dict) -> str:
    """Score, runs, change against the incumbent of its time, and verdict."""
    score = f"{row['metric']:.6f}" if row["metric"] else "-"
    change = row["metric"] - row["parent_metric"] if row["metric"] and row["parent_metric"] else 0
    return f"{score:>9} {row.get('runs') or 1:>4} {change:>+9.6f}  {verdict_words(row)}"


def verdict_words(row: dict) -> str:
    """What became of a row."""
    return f"{WORDS.get(row['status'], 'crashed')} ({row['reason']}), run {row['run']}"
