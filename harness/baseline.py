"""The begin of a session: its baseline, and repeats that tell what a score varies by itself."""

from harness.checks import present_session
from harness.common import say
from harness.finish import finish, recover_run
from harness.log import change_row, number
from harness.measure import HERE, Result, measure_fairly, record_score
from harness.place import Place
from harness.scores import Scores
from harness.session import Session
from harness.workspace import Run, Stop, Workspace

REPEATS = 5  # scores of the baseline, its first one included
SEEDS = 2**32
DISTURBED = 5  # repeats that may be disturbed, and are made again
FAILED_BASELINE = 3  # exit code: there is no baseline, so nothing can be judged


def make_baseline(
    workspace: Workspace,
    commit: str,
    place: Place,
    new_session: bool = False,
    description: str = "baseline",
    asi: dict | None = None,
) -> Session:
    """The present session; where there is none, this commit's train.py is run to begin one.

    A failed baseline gets no row: nothing after it could be judged.

    Args:
        new_session: begin a session even if there is one.

    Raises:
        Stop: the baseline has no usable score; exit code FAILED_BASELINE.
    """
    before = len(workspace.rows())
    with workspace.only_one("baseline", "waiting for the baseline that another run makes"):
        rows = workspace.rows()
        session = present_session(workspace, rows)
        if session and (not new_session or len(rows) > before):
            return session
        with workspace.lock():
            run = Run.open(workspace, "baseline", description, asi=asi or {}, commit=commit)
        result = measure_extra(run, commit, None, place=place)
        with workspace.lock():
            if result.status == "scored":
                if result.marks:
                    say(f"the baseline is marked: {result.marks}; runs with the same mark count")
                row = finish(run, status="keep", reason="baseline", parent_metric=None)
                run.record["comparison"] = list(Session(row).comparison)
                record_score(run)
                return Session(row)
            run.close(f"failed-baseline-{run.id}")
    raise Stop(
        f"the baseline fails as it is ({result.reason}: {result.detail}), so nothing can be "
        f"judged. hint: see {run.folder / 'run.log'}; then commit a train.py that runs",
        FAILED_BASELINE,
    )


def measure_noise(
    workspace: Workspace, row: dict, repeats: int, place: Place, run: Run | None = None
) -> list[float]:
    """Repeat the code of a row until it has so many scores; returns them.

    Each score is kept as soon as it is there, so an interrupted series goes on where it stopped.

    Args:
        run: the candidate that waits for it.
    """
    scores = Scores.of(workspace, workspace.rows()).of_code(row["code"])
    missing = repeats - len(scores)
    if missing <= 0:
        return scores
    minutes = missing * number(row["seconds"]) / 60
    say(
        f"measuring the noise: {missing} more runs of {row['commit']}, about {minutes:.0f} "
        "minutes; each counts, also after an interruption"
    )
    with workspace.only_one("noise", "waiting for the repeats that another run makes"):
        for _ in range(missing + DISTURBED):
            rows = workspace.rows()
            session = Session.of(rows)
            scores = Scores.of(workspace, rows).of_code(row["code"])
            if len(scores) >= repeats or session is None:
                break
            if run:
                left = repeats - len(scores)
                run.enter(f"measuring the noise, run {len(scores) + 1} of {repeats}", left + 1)
            repeat(workspace, session, row["commit_id"], len(scores), place)

    def with_repeats(found: dict) -> dict:
        return found | {"repeats": scores} if found.get("id") == row["id"] else found

    with workspace.lock():
        change_row(workspace.log, row["run"], with_repeats)
    return scores


def repeat(
    workspace: Workspace, session: Session, commit: str, count: int, place: Place = HERE
) -> Result:
    """One more run of a commit, on a seed after `count` others; it has no row of its own.

    Raises:
        Stop: it fails. A disturbed one does not raise, and does not count.
    """
    with workspace.lock():
        seed = free_seed(workspace, session, commit, count)
        words = f"{commit[:7]} on seed {seed}"
        comparison = list(session.comparison)
        run = Run.open(workspace, "probe", words, commit=commit, comparison=comparison, seed=seed)
    result = measure_extra(run, commit, session, seed, place)
    with workspace.lock():
        run.close(f"seed-{seed}-{commit[:7]}-{run.id}")
    if result.status not in ("scored", "disturbed"):
        raise Stop(f"{words} was not scored: {result.reason}: {result.detail}", 1)
    return result


def free_seed(workspace: Workspace, session: Session, commit: str, count: int) -> int:
    """A seed on which the code of this commit has no score, and on which it is not running.

    Several runs at once may all want one more score of the incumbent. On one seed they would be
    the same experiment, counted as several. The caller holds the lock.
    """
    code = workspace.repository.train_blob(commit)
    scores = Scores.of(workspace, workspace.rows()).undisturbed()
    taken = {entry["seed"] for entry in scores if entry["code"] == code}
    for run in workspace.open_runs("probe"):
        if workspace.repository.train_blob(run.record["commit"]) == code:
            taken.add(run.record.get("seed"))
    while (session.seed + count) % SEEDS in taken:
        count += 1
    return (session.seed + count) % SEEDS


def measure_extra(
    run: Run,
    commit: str,
    session: Session | None,
    seed: int | None = None,
    place: Place = HERE,
) -> Result:
    """Measure a run that is no candidate; when that is cut off, nothing of it stays open."""
    try:
        return measure_fairly(run, commit, session, seed, place)
    except BaseException:
        with run.workspace.lock():
            recover_run(run)
        raise
