"""On a node of the cluster: one job, in the folder that was unpacked for it.

`python -m harness.fleet_worker` reads the job as one line of JSON from its standard input, and
writes the answer to its standard output. The input stays open as long as the Ray worker lives that
started it. When that worker is killed, or its driver or node is lost, the input ends, and so does
the training.

Two processes do it. Ray kills the children of a worker that ends, so the first one only waits; the
second one, which no one else kills, runs the experiment. Should it be killed all the same, the
first one ends the training. What is left when both are killed is ended by the next job of the node.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from harness.common import UserError
from harness.fixed import fixed_hash
from harness.outcome import Outcome
from harness.process import call, end_run, raise_on_signals
from harness.run import make_folders, prepare_data, run_experiment
from harness.runlog import last_words
from harness.session import OtherSettings, Session, check_equal
from harness.settings import run_environment, user_path

MIN_FREE_MB = 100
CHECK_LIMIT = 900  # seconds for `prepare.py --check`
END_OF_LOG = 2**20  # bytes of run.log that travel home
RECORDS = ("settings.json", "eval.jsonl", "steps.jsonl")
# What torch calls the device; prepare.py's settings have its kind only.
FACTS = """
import json, sys, torch
mps = getattr(torch.backends, "mps", None)
other = "mps" if mps and mps.is_available() else "cpu"
device = torch.cuda.get_device_name() if torch.cuda.is_available() else other
json.dump({"torch": torch.__version__, "device": device}, open(sys.argv[1], "w"))
"""


class Broken(Exception):
    """This node cannot run experiments now, whatever they are."""


def main() -> int:
    """Start the process that does the job, and wait for it."""
    job = json.loads(sys.stdin.readline())
    keeper = os.fork()
    if not keeper:
        os._exit(do_alone(job))
    _, status = os.waitpid(keeper, 0)
    if status:
        end_run(job["attempt"])
    return int(bool(status))


def do_alone(job: dict) -> int:
    """Do the job in a session of its own, and print the answer. Returns the exit code."""
    os.setsid()
    raise_on_signals()
    threading.Thread(target=end_with_the_worker, daemon=True).start()
    try:
        answer = answer_to(job)
        print(json.dumps(answer), flush=True)
        return 0
    except KeyboardInterrupt:  # nobody waits for the answer any more: leave nothing behind
        shutil.rmtree(Path.cwd().parent, ignore_errors=True)
        return 130


def end_with_the_worker() -> None:
    """Interrupt this process when the Ray worker at the other end of the pipe is gone."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def answer_to(job: dict) -> dict:
    """What came of a job: "outcome" or "line"; else "unlike" or "broken", and why.

    A node that is unlike the session is of no use to it; one that is broken may be repaired.
    """
    root = Path.cwd()
    try:
        check_node(root, job["fixed"])
        return run(root, job) if job["action"] == "run" else check(root, job)
    except OtherSettings as error:
        return {"unlike": str(error).partition(". hint:")[0]}
    except (Broken, UserError, OSError) as error:
        return {"broken": str(error)}


def run(root: Path, job: dict) -> dict:
    """One experiment, as `bash autoresearch.sh` runs it; returns what has to travel home."""
    session = Session(job["session"]) if job["session"] else None
    run_dir = root.parent / "run"
    environment = environment_of(job)

    def accept(settings: dict) -> None:
        if session:
            session.check(settings)
            check_facts(session, facts_of(root, environment))

    outcome = run_experiment(
        root, run_dir, environment, sys.executable, run_id=job["attempt"],
        checkout=home(environment), accept=accept,
    )  # fmt: skip
    if outcome.code == 130:
        raise Broken("the run was interrupted there")
    if outcome.code and free_mb(root) < MIN_FREE_MB:
        raise Broken(f"its disk is full: {free_mb(root):.0f} MB free")
    if fixed_hash(root) != job["fixed"]:
        outcome = Outcome(5, "void: train.py changed a fixed file while it ran")
    if session and outcome.score is not None:
        session.check_record(outcome.record)
        check_facts(session, outcome.record)
    paths = [run_dir / name for name in RECORDS] + sorted(run_dir.glob("rank*.log"))
    files = {path.name: text_of(path) for path in paths if path.exists()}
    files["run.log"] = text_of(root / "run.log", END_OF_LOG)
    return {"outcome": asdict(outcome), "files": files}


def check(root: Path, job: dict) -> dict:
    """Whether this node could run an experiment of the session, and what it is, in one line."""
    environment = run_environment(environment_of(job))
    run_dir = root.parent / "run"
    make_folders(root, run_dir)
    settings, _ = prepare_data(root, run_dir, environment, sys.executable)
    facts = facts_of(root, environment)
    if job["session"]:
        Session(job["session"]).check(settings)
        check_facts(Session(job["session"]), facts)
    command = [sys.executable, "prepare.py", "--check"]
    ended = call(command, root, [environment], [root / "run.log"], CHECK_LIMIT)
    if ended.code:
        raise Broken(f"prepare.py --check failed: {last_words(root / 'run.log')}")
    python = ".".join(map(str, sys.version_info[:3]))
    data = f"{settings['profile']}, {settings['data']} {settings['data_id']}"
    versions = f"torch {facts['torch']}, Python {python}"
    room = f"{free_mb(root) / 1024:.1f} GB free"
    return {"line": ", ".join([facts["device"], versions, data, room])}


def check_node(root: Path, fixed: str) -> None:
    """Raise Broken unless the files arrived whole and there is room for a run."""
    if free_mb(root) < MIN_FREE_MB:
        raise Broken(f"its disk is full: {free_mb(root):.0f} MB free, {MIN_FREE_MB} are needed")
    if fixed_hash(root) != fixed:
        raise Broken("the fixed files did not arrive as they were sent")


def check_facts(session: Session, found: dict) -> None:
    """Raise OtherSettings when the device or torch is not the session's."""
    names = ("device", "torch", "processor")
    check_equal({name: session.baseline.get(name) for name in names}, found)


def facts_of(root: Path, environment: dict) -> dict:
    """The device's name and the version of torch on this node. Raises Broken without torch."""
    path, log = root.parent / "facts.json", root.parent / "facts.log"
    ended = call([sys.executable, "-c", FACTS, str(path)], root, [environment], [log])
    if ended.code:
        raise Broken(f"torch does not work there: {last_words(log)}")
    return json.loads(path.read_text())


def environment_of(job: dict) -> dict[str, str]:
    """The node's own environment with the settings of the session; git looks at no other folder."""
    ceiling = {"GIT_CEILING_DIRECTORIES": str(Path.cwd().parent)}
    return dict(os.environ) | job["environment"] | ceiling


def home(environment: dict) -> Path:
    """What all jobs of this node have in common: orphans of one are found by the next one."""
    cache = environment.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch"
    return user_path(cache) / "fleet"


def free_mb(root: Path) -> float:
    """Room on the disk that runs are unpacked to."""
    return shutil.disk_usage(root).free / 2**20


def text_of(path: Path, limit: int | None = None) -> str:
    """The text of a file, or its last bytes; every byte can be restored from it."""
    data = path.read_bytes() if path.exists() else b""
    return data[-limit if limit else 0 :].decode("utf-8", "surrogateescape")


if __name__ == "__main__":
    sys.exit(main())
