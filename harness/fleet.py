"""Runs on a Ray cluster: what travels there and what comes home. See docs/fleet.md.

An experiment is the same function there, harness.run.run_experiment; harness.fleet_worker calls it.
Ray queues and places it, and repeats it when a node is lost; harness.fleet_task asks Ray for that.
Everything else (verdict, log, commits) is done here, as for a run of this machine.
"""

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from harness.common import say
from harness.fixed import fixed_hash
from harness.git import git
from harness.outcome import Outcome
from harness.place import Place
from harness.process import call, run_variables
from harness.runlog import last_words
from harness.session import Session
from harness.settings import PREFIX, SETTINGS, chosen_data, read_setting
from harness.workspace import Run, Stop, Workspace

RECONNECT = 900  # seconds in which a cluster may come back that was lost during a run
LOSSES = 5  # of the cluster during one run
PAUSE = 5  # seconds between two tries to reach it
NOT_THERE = ("CACHE",)  # settings that belong to a machine, not to a run
TUPLES = ("metric_lines", "log_tail")  # of an Outcome; JSON has lists only


def run_on_ray(
    run: Run, here: Path, environment: Mapping[str, str], place: Place, session: Session | None
) -> Outcome:
    """Run the experiment of the worktree `here` on a node that is like the session.

    Its records come into the run's folder and the end of its log into the worktree, as if it had
    run here.

    Raises:
        Stop: no node could run it; it did not count.
    """
    workspace = run.workspace
    known = Unlike(workspace, session)
    job = make_job("run", here, environment, place, session) | {"unlike": known.nodes}
    job |= {"name": f"autoresearch {run.id}", "run_id": run.id}
    answer = ask(run.folder / "fleet", here, job, run_variables(run.id, workspace.root))
    for node, why in answer["unlike"].items():
        if node not in known.nodes:
            say(f"a node is not used for this session: {why}")
            known.add(node, why)
    if "failed" in answer:
        raise Stop(f"it could not run on the cluster: {answer['failed']}")
    for name, text in answer["files"].items():
        folder = here if name == "run.log" else run.folder
        (folder / Path(name).name).write_bytes(text.encode("utf-8", "surrogateescape"))
    shutil.rmtree(run.folder / "fleet")
    found = answer["outcome"]
    found |= {name: tuple(found[name]) for name in TUPLES}
    found["settings"] |= {"on": place.label, "node": answer["name"]}
    return Outcome(**found)


def make_job(
    action: str, here: Path, environment: Mapping, place: Place, session: Session | None
) -> dict:
    """What a worker has to know, and what it must have."""
    travel = {f"{PREFIX}{name}" for name in SETTINGS if name not in NOT_THERE}
    settings = {name: value for name, value in environment.items() if name in travel}
    if (chosen := chosen_data(here)) and not settings.get(f"{PREFIX}DATA"):
        settings[f"{PREFIX}DATA"] = chosen
    return {
        "action": action,
        "environment": settings,
        "fixed": fixed_hash(here),
        "session": session.baseline if session else None,
        "cpus": place.cpus,
        "gpus": read_setting("RANKS", environment) or 1,
    }


def ask(folder: Path, here: Path, job: dict, variables: Mapping[str, str]) -> dict:
    """Let harness.fleet_task do the job; where it loses the cluster, begin again.

    Args:
        folder: for the files of the job.
        here: the checkout whose tracked files travel, as they are staged.
        variables: by which the process is found again, see harness.process.

    Raises:
        Stop: there is no cluster, or it did not come back.
    """
    folder.mkdir(exist_ok=True)
    tree = git("write-tree", root=here)
    git("archive", "--format=tar.gz", f"--output={folder / 'files.tar.gz'}", tree, root=here)
    command = [sys.executable, "-m", "harness.fleet_task", str(folder)]
    answer, log = folder / "answer.json", folder / "ray.log"
    losses, lost = 0, 0.0
    while True:
        (folder / "job.json").write_text(json.dumps(job | {"lost": bool(losses)}))
        call(command, here, [dict(os.environ) | variables], [log])
        if answer.exists():
            return json.loads(answer.read_text())
        if (folder / "connected").exists():
            (folder / "connected").unlink()
            losses, lost = losses + 1, time.monotonic()
        if not losses:
            raise Stop(f"{last_words(log)}. hint: 'ray start --head' begins one; docs/fleet.md")
        if losses == LOSSES or time.monotonic() - lost > RECONNECT:
            raise Stop(f"the Ray cluster was lost {losses} times: {last_words(log)}")
        say(f"the Ray cluster was lost; trying for {RECONNECT} s to reach it again")
        time.sleep(PAUSE)


class Unlike:
    """The nodes that differ from a session, so that no run has to find them out again."""

    def __init__(self, workspace: Workspace, session: Session | None):
        self.path = workspace.state / "unlike-nodes.jsonl"
        self.session = session.baseline["id"] if session else None

    @property
    def nodes(self) -> dict[str, str]:
        """Node id (of one start of Ray on it): the node's name, and what differs."""
        lines = self.path.read_text().splitlines() if self.session and self.path.exists() else []
        found = [json.loads(line) for line in lines]
        return {entry["node"]: entry["why"] for entry in found if entry["session"] == self.session}

    def add(self, node: str, why: str) -> None:
        """Remember a node; one short line is written as a whole."""
        if self.session:
            with open(self.path, "a") as file:
                file.write(json.dumps({"session": self.session, "node": node, "why": why}) + "\n")


def ask_once(
    workspace: Workspace, place: Place, action: str, session: Session | None, **more
) -> dict:
    """Ask something that belongs to no run."""
    environment = dict(os.environ) | (session.environment() if session else {})
    job = make_job(action, workspace.root, environment, place, session) | more
    name = f"fleet-{secrets.token_hex(4)}"
    job |= {"name": f"autoresearch {action}", "run_id": name}
    folder = workspace.state / name
    workspace.make_state()
    try:
        return ask(folder, workspace.root, job, run_variables(name, workspace.root))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def room_in_cluster(workspace: Workspace, place: Place) -> int:
    """How many runs the cluster has room for at a time, busy or not."""
    return ask_once(workspace, place, "room", None)["room"]
