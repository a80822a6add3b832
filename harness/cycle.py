"""One candidate, from its commit to the verdict: baseline, noise, measurement, repeats."""

from harness.baseline import SEEDS, make_baseline, measure_noise, repeat
from harness.common import say
from harness.finish import abandon, finish, recover_run
from harness.judging import decide, incumbent, next_step, scores_of_candidate
from harness.measure import Result, measure_fairly
from harness.place import Place
from harness.scores import Scores
from harness.session import OtherSettings, Session
from harness.workspace import Run, Stop

TURNS = 25  # more runs for one verdict; the rule needs fewer, disturbed ones come on top


def work(run: Run) -> dict:
    """Take an open candidate through baseline, noise, measurement and verdict; returns its row."""
    workspace, options = run.workspace, run.record["options"]
    place = Place.of(options)
    try:
        with place.hold(workspace):
            run.enter("measuring the baseline")
            session = begin_session(run, options["new_session"])
            measure_noise(workspace, session.baseline, options["repeats"], place, run)
            run.save(comparison=list(session.comparison), begun=True)
            run.enter("measuring", 1)
            seed = next_seed(run, session) if options["confirms"] else None
            result = measure_fairly(run, run.record["commit"], session, seed, place)
            session = begin_session(run)  # the log may have been deleted meanwhile
            return judge(run, session, result)
    except BaseException as error:
        with workspace.lock():
            if run.is_open:
                stopped(run, error)
        if isinstance(error, OtherSettings):
            raise Stop(f"not comparable: {error}") from None
        raise


def judge(run: Run, session: Session, result: Result) -> dict:
    """Decide a measured candidate, and act on it; returns its row.

    Where several run at once, another one may be kept between the last look at the scores and the
    decision. Then that one is the incumbent, and the comparison goes on with it.
    """
    workspace, factor = run.workspace, run.record["options"]["memory_factor"]
    scored = result.status == "scored"
    while True:
        failure = run_in_turns(run, session) if scored else ""
        with workspace.lock():
            rows = workspace.rows()
            if not scored or failure or is_clear(run, rows):
                warn_of_memory(result, incumbent(rows), factor)
                return finish(run, **decide(run, rows, failure))


def is_clear(run: Run, rows: list[dict]) -> bool:
    """Whether the scores that there are decide this candidate."""
    top = incumbent(rows)
    if top is None:
        return True
    step = next_step(run, rows, top, run.record["options"]["once"])
    return step.action in ("keep", "discard")


def run_in_turns(run: Run, session: Session) -> str:
    """Run candidate or incumbent again until the verdict is clear; see harness.verdict.

    Returns why that was impossible, "" as a rule.
    """
    workspace, options = run.workspace, run.record["options"]
    for _ in range(TURNS):
        rows = workspace.rows()
        top = incumbent(rows)
        step = next_step(run, rows, top, options["once"])
        scores = Scores.of(workspace, rows)
        seeds = options.get("seeds", 1)  # that were asked for; records of old runs have no number
        more = len(scores_of_candidate(run, scores)) < seeds
        if step.action in ("keep", "discard") and not more:
            return ""
        own = more or step.action == "run_candidate"
        commit = run.record["commit"] if own else top["commit_id"]
        count = len(scores.of_code(workspace.repository.train_blob(commit)))
        words = f"run {count + 1} of the {'candidate' if own else 'incumbent'}"
        reason = f"{seeds} seeds were asked for" if more else step.reason
        say(f"{reason}: gain {step.gain:+.6f}, {step.z:.1f} standard errors; {words}")
        run.enter(f"deciding, {words}", 1)
        try:
            repeat(workspace, session, commit, count, Place.of(options))
        except (Stop, OtherSettings) as error:
            return str(error)
    return f"not clear after {TURNS} more runs"


def next_seed(run: Run, session: Session) -> int:
    """The seed of one more run of a code that was measured before."""
    workspace = run.workspace
    code = workspace.repository.train_blob(run.record["commit"])
    count = len(Scores.of(workspace, workspace.rows()).of_code(code))
    return (session.seed + count) % SEEDS


def begin_session(run: Run, new_session: bool = False) -> Session:
    """The session of a candidate, begun with the commit that it is based on if there is none."""
    place = Place.of(run.record["options"])
    return make_baseline(run.workspace, run.record["parent"], place, new_session)


def stopped(run: Run, error: BaseException) -> None:
    """Finish a candidate that an exception ended. The caller holds the lock."""
    if isinstance(error, (OtherSettings, Stop)) and not run.record.get("result"):
        abandon(run, str(error), getattr(error, "exit_code", 2))
        return
    interrupted = isinstance(error, KeyboardInterrupt)
    recover_run(run, "interrupted" if interrupted else f"{type(error).__name__}: {error}")


def warn_of_memory(result: Result, top: dict | None, factor: float) -> None:
    """Say so when a scored run needs much more memory than the incumbent."""
    memory = result.metrics.get("peak_memory_mb", 0)
    usual = top["metrics"].get("peak_memory_mb", 0) if top else 0
    on_cpu = str(result.record.get("device")).startswith("cpu")  # there it counts compiling
    if result.status == "scored" and not on_cpu and usual and memory > factor * usual:
        say(
            f"warning: peak memory {memory:.0f} MB is {memory / usual:.2f} times the incumbent's "
            f"{usual:.0f} MB"
        )
