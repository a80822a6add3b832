"""One measurement of a commit's train.py: in its own worktree, with the session's settings."""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness.common import say
from harness.fixed import FIXED, SESSION
from harness.fleet import run_on_ray
from harness.git import git
from harness.log import current
from harness.place import Place
from harness.process import call
from harness.repository import one_line
from harness.run import Outcome, run_experiment
from harness.scores import Scores, append_score
from harness.session import CLOCKLESS, Session, serious_marks
from harness.settings import user_path
from harness.verdict import disturbance, kept, noise_floor
from harness.workspace import Run, Workspace

CHECKS = "autoresearch.checks.sh"
CHECKS_LIMIT = 300  # seconds for the user's checks
ANY_SCORE = 1e6  # bits per byte
HERE = Place()


@dataclass(frozen=True)
class Result:
    """What a measurement gave, as a run's record has it. Without a score all numbers are 0."""

    status: str  # scored, marked, disturbed, checks_failed or crash
    reason: str = ""
    detail: str = ""
    score: float = 0.0  # val_bpb, rounded as the log shows it
    metrics: dict = field(default_factory=dict)
    record: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    load: dict = field(default_factory=dict)
    seconds: float = 0.0
    marks: str = ""

    @classmethod
    def of(cls, outcome: Outcome, clockless: bool) -> "Result":
        """The result of an outcome; see serious_marks for `clockless`."""
        common = {
            "seconds": round(outcome.seconds, 1),
            "settings": outcome.settings,
            "load": outcome.load,
            "record": outcome.record,
            "marks": outcome.marks,
        }
        if outcome.reason:
            return cls("crash", outcome.reason, outcome.detail[:300], **common)
        marks = serious_marks(outcome.marks, clockless)
        status, reason = ("marked", "marked") if marks else ("scored", "")
        detail = "; ".join(marks)
        score, metrics = round(outcome.score, 6), outcome.metrics
        return cls(status, reason, detail, score=score, metrics=metrics, **common)


def telemetry(result: Result) -> dict:
    """What the machine gave a run, as harness.verdict.disturbance wants it."""
    return result.load | {"probe_tflops": result.record.get("probe_tflops")}


def measure(
    run: Run,
    commit: str,
    session: Session | None = None,
    seed: int | None = None,
    place: Place = HERE,
) -> Result:
    """Run the commit's train.py once and return what came of it; also saved in the run's record.

    Args:
        session: gives the settings, and refuses others; None measures the session's own baseline.
        seed: instead of the session's.
        place: this machine, or a cluster.

    Raises:
        OtherSettings: the settings are not the session's; train.py did not run.
        Stop: no node of the cluster could run it.
    """
    if session:
        session.check_place(place.label)
    workspace = run.workspace
    repository = workspace.repository
    here = run.checkout(commit)
    begin = repository.git("rev-parse", SESSION)
    present = git("ls-tree", "--name-only", begin, "--", *FIXED, root=workspace.root).splitlines()
    git("checkout", "--quiet", begin, "--", *present, root=here)
    environment = environment_of_run(workspace, os.environ, session, seed, place.gpu)
    environment["AUTORESEARCH_SWEEP_BELOW"] = str(score_to_keep(workspace))
    name = one_line(run.record["description"], 60)
    if place.on:
        say(f"running {name!r} on {place.label}")
        outcome = run_on_ray(run, here, environment, place, session)
    else:
        say(f"running {name!r}; its log: {here / 'run.log'}")
        outcome = run_experiment(
            here,
            run.folder,
            environment,
            sys.executable,
            run_id=run.id,
            checkout=workspace.root,
            session=begin,
            accept=session.check if session else None,
        )
    run.make_room()  # the run may have filled the disk
    if outcome.code == 130:
        raise KeyboardInterrupt
    if session and outcome.score is not None:
        session.check_record(outcome.record)
    result = Result.of(outcome, session.clockless if session else CLOCKLESS in outcome.marks)
    if result.status == "scored":
        result = run_checks(run, here, environment, result)
    run.save(result=asdict(result))
    return result


def score_to_keep(workspace: Workspace) -> float:
    """A run may be kept below this score: the evaluator then looks for leaks at all positions."""
    rows = workspace.rows()
    top = next(reversed(kept(current(rows))), None)
    if top is None:
        return ANY_SCORE
    return round(top["metric"] + noise_floor(Scores.of(workspace, rows).spread())[0], 6)


def environment_of_run(
    workspace: Workspace,
    environment: Mapping[str, str],
    session: Session | None,
    seed: int | None,
    gpu: str | None,
) -> dict[str, str]:
    """The caller's environment with the session's settings; relative paths start at the root."""
    changed = dict(environment) | (session.environment() if session else {})
    for name in ("AUTORESEARCH_CACHE", "AUTORESEARCH_DATA"):
        text = changed.get(name, "")
        path = workspace.root / user_path(text)
        if text and (path.exists() or name == "AUTORESEARCH_CACHE"):  # data may also have a name
            changed[name] = str(path)
    if seed is not None:
        changed["AUTORESEARCH_SEED"] = str(seed)
    if gpu is not None:
        changed["CUDA_VISIBLE_DEVICES"] = gpu
    return changed


def run_checks(run: Run, here: Path, environment: Mapping[str, str], result: Result) -> Result:
    """The user's autoresearch.checks.sh on a scored run: a failure of it is the run's."""
    scripts = [folder / CHECKS for folder in (here, run.workspace.root)]
    script = next((path for path in scripts if path.exists()), None)
    if script is None:
        return result
    command = ["bash", str(script)]
    ended = call(command, here, [environment], [run.folder / "checks.log"], CHECKS_LIMIT)
    if not ended.code:
        return result
    detail = f"{CHECKS} ended with {ended.code}"
    detail += f" after {CHECKS_LIMIT} s" if ended.timed_out else ""
    kept = asdict(result) | {"status": "checks_failed", "reason": "checks_failed"}
    return Result(**kept | {"detail": detail})


# ---- scores of several runs ----


def record_score(run: Run) -> None:
    """Keep the score of a measurement for its code. The caller holds the lock.

    Recorded twice, after a kill, it counts once: the ids are equal.
    """
    result = Result(**run.record["result"])
    if result.status not in ("scored", "disturbed") or not run.record.get("comparison"):
        return
    kinds = {"candidate": "run", "baseline": "baseline", "probe": "repeat"}
    entry = {
        "id": run.id,
        "code": run.workspace.repository.train_blob(run.record["commit"]),
        "commit": run.record["commit"],
        "kind": kinds[run.record["kind"]],
        "score": result.score,
        "seed": result.record.get("seed"),
        "steps": result.metrics.get("num_steps"),
        "seconds": result.seconds,
        "timestamp": time.time_ns() // 1_000_000,
        "comparison": run.record["comparison"],
        "load": telemetry(result),
    }
    if result.status == "disturbed":
        entry |= {"disturbed": result.detail, "id": f"{run.id}-disturbed-{result.seconds}"}
    append_score(run.workspace.scores, entry)


def measure_fairly(
    run: Run,
    commit: str,
    session: Session | None,
    seed: int | None = None,
    place: Place = HERE,
) -> Result:
    """Measure a run, and once more if the machine was busier than usual; then it is not judged.

    The scores are kept for the code of the commit; a disturbed one does not count.
    """
    workspace = run.workspace
    for attempt in (1, 2):
        result = measure(run, commit, session, seed, place)
        earlier = Scores.of(workspace, workspace.rows()).telemetry() if session else []
        why = disturbance(telemetry(result), earlier) if result.status == "scored" else ""
        if why:
            result = replace(result, status="disturbed", reason="disturbed", detail=why)
            run.save(result=asdict(result))
        with workspace.lock():
            record_score(run)
        if not why:
            break
        if attempt == 1:
            say(f"the machine was disturbed: {why}; the run is repeated once")
    return result
