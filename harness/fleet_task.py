"""The process that talks to Ray: `python -m harness.fleet_task FOLDER`. Nothing else imports ray.

The folder holds job.json and files.tar.gz; answer.json is written into it. It is a process of its
own because Ray ends a driver at once when the head of the cluster is lost.

Ray queues the job, places it on a node with room, and runs it again when the worker or its node is
lost. A task has one result, so what a lost attempt did is never counted.
"""

import contextlib
import io
import json
import os
import secrets
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import ray

RETRIES = 3  # after a worker or its node was lost
BROKEN_NODES = 3  # nodes that may fail at one job before it is given up
PATIENCE = 60  # seconds for an answer of the cluster
LOOK = 20  # seconds between two looks whether it is still the same cluster
ANSWER = "answer.json"
CONNECTED = "connected"  # exists once the cluster was reached


def main() -> int:
    """Do the job of a folder. Returns the exit code: 0 if there is an answer."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    archive = (folder / "files.tar.gz").read_bytes()
    connect()
    (folder / CONNECTED).touch()
    answer = ACTIONS[job["action"]](archive, job)
    part = folder / f"{ANSWER}.part"
    part.write_text(json.dumps(answer))
    part.replace(folder / ANSWER)
    return 0


def connect() -> None:
    """Join the cluster as a driver; ends the process with a message where that is impossible."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = address.rpartition(":")
    try:
        with limited(f"no Ray cluster answered at {address} within {PATIENCE} s"):
            if host and port.isdigit() and "//" not in host:
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError) as error:  # ConnectionError is an OSError
        sys.exit(f"no Ray cluster at {address}: {error}")


@contextlib.contextmanager
def limited(words: str) -> Iterator[None]:
    """End this process with these words if the block takes long: Ray itself tries for minutes."""

    def give_up() -> None:
        print(words, flush=True)
        os._exit(2)

    timer = threading.Timer(PATIENCE, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def result_of(task) -> dict:
    """Wait for a task. Ends this process when the cluster was begun anew and forgot the task."""
    while not ray.wait([task], timeout=LOOK)[0]:
        with limited(f"the Ray cluster did not answer for {PATIENCE} s"):
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if ray.get_runtime_context().get_node_id() not in alive:
            sys.exit("the Ray cluster was begun anew")
    return ray.get(task)


# ---- the nodes ----


def needs(job: dict) -> dict[str, float]:
    """What a worker has to have for the job, in Ray's names."""
    return {"CPU": job["cpus"]} if job["cpus"] else {"CPU": 1, "GPU": job["gpus"]}


def room_on(node: dict, job: dict) -> int:
    """How many such jobs a node can run at a time."""
    return int(min(node["Resources"].get(name, 0) // count for name, count in needs(job).items()))


def fitting_nodes(job: dict) -> list[dict]:
    """The nodes that are alive and have what the job needs, busy or not."""
    return [node for node in ray.nodes() if node["Alive"] and room_on(node, job)]


def submit(archive: bytes, job: dict, where: str):
    """Give the job to Ray; `where` is a label selector for the node's id."""
    options = {"max_retries": RETRIES, "num_cpus": needs(job)["CPU"], "name": job["name"]}
    options["num_gpus"] = needs(job).get("GPU", 0)
    if where:
        options["label_selector"] = {"ray.io/node-id": where}
    return ray.remote(carry_out).options(**options).remote(archive, job)


# ---- what a job can be ----


def run_somewhere(archive: bytes, job: dict) -> dict:
    """Run an experiment on a node that is like the session.

    Returns the worker's answer, or "failed" and why; "unlike" has the nodes that were not used
    because they differ from the session: node id to words.
    """
    unlike, broken = dict(job["unlike"]), {}
    while True:
        avoided = unlike | broken
        nodes = fitting_nodes(job)
        # Where nodes were there a moment ago, Ray waits until one comes back.
        waits = not nodes and (broken or job["lost"])
        if all(node["NodeID"] in avoided for node in nodes) and not waits:
            return {"failed": no_node(job, avoided), "unlike": unlike}
        if len(broken) == BROKEN_NODES:
            return {"failed": "; ".join(broken.values()), "unlike": unlike}
        where = f"!in({','.join(avoided)})" if avoided else ""
        try:
            answer = result_of(submit(archive, job, where))
        except ray.exceptions.RayError as error:
            return {"failed": words_of(error), "unlike": unlike}
        if "outcome" in answer:
            return answer | {"unlike": unlike}
        why = f"{answer['name']}: {answer.get('unlike') or answer['broken']}"
        print(f"not used: {why}", flush=True)
        (unlike if "unlike" in answer else broken)[answer["node"]] = why


def words_of(error: ray.exceptions.RayError) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().split("\n")
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"an error on the node: {lines[-1]}"
    return f"lost {RETRIES + 1} times: {lines[0]}"


def no_node(job: dict, avoided: dict[str, str]) -> str:
    """Why no node of the cluster can run the job."""
    wanted = " and ".join(f"{count} {name}" for name, count in needs(job).items())
    nodes = fitting_nodes(job)
    if not nodes:
        return f"no node of the cluster has {wanted}. hint: 'fleet check'; --cpus N needs no GPU"
    words = "; ".join(avoided[node["NodeID"]] for node in nodes)
    return f"no node can be used: {words}. hint: 'fleet check' shows all of them"


def count_room(archive: bytes, job: dict) -> dict:
    """How many runs the cluster has room for at a time."""
    return {"room": sum(room_on(node, job) for node in fitting_nodes(job))}


def check_nodes(archive: bytes, job: dict) -> dict:
    """Check every node; a busy one is checked when it has room, until the limit is over."""
    nodes = fitting_nodes(job)
    waiting = {submit(archive, job, node["NodeID"]): node for node in nodes}
    end = time.monotonic() + job["limit"]
    answers = []
    while waiting and (left := end - time.monotonic()) > 0:
        done, _ = ray.wait(list(waiting), timeout=left)
        for task in done:
            node = waiting.pop(task)
            try:
                answers.append(ray.get(task))
            except ray.exceptions.RayError as error:
                found = {"node": node["NodeID"], "name": name_of(node)}
                answers.append(found | {"broken": words_of(error)})
    answers += [
        {"node": node["NodeID"], "name": name_of(node), "busy": f"busy for {job['limit']:g} s"}
        for node in waiting.values()
    ]
    answers += [
        {"node": node["NodeID"], "name": name_of(node), "none": f"runs nothing: {too_small(job)}"}
        for node in ray.nodes()
        if node["Alive"] and not room_on(node, job)
    ]
    return {"nodes": answers}


def too_small(job: dict) -> str:
    """Why a node can run no such job."""
    wanted = " and ".join(f"{count} {name}" for name, count in needs(job).items())
    return f"it has less than {wanted}"


def name_of(node: dict) -> str:
    """A node as people know it, and the begin of its id: one machine may have several."""
    return f"{node['NodeManagerHostname']} {node['NodeID'][:8]}"


ACTIONS = {"run": run_somewhere, "room": count_room, "check": check_nodes}


# ---- on the node; Ray sends this function itself, harness is not installed there ----


def carry_out(archive: bytes, job: dict) -> dict:
    """Unpack the files into an empty folder and let the harness in it do the job."""
    node = ray.get_runtime_context().get_node_id()
    place = {"node": node, "name": f"{socket.gethostname()} {node[:8]}"}
    # Two attempts may overlap on one node: the id tells their processes apart.
    job = job | {"attempt": f"{job['run_id']}-{secrets.token_hex(3)}"}
    try:
        with tempfile.TemporaryDirectory(
            prefix="autoresearch-", ignore_cleanup_errors=True
        ) as folder:
            root = Path(folder, "files")
            with tarfile.open(fileobj=io.BytesIO(archive)) as files:
                files.extractall(root, filter="data")
            return place | ask_harness(root, job)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        return place | {"broken": f"the files do not unpack: {error}"}


def ask_harness(root: Path, job: dict) -> dict:
    """Start harness.fleet_worker; its standard input stays open as long as this process lives."""
    command = [sys.executable, "-m", "harness.fleet_worker"]
    with open(root.parent / "stderr", "w+b") as errors:
        child = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        child.stdin.write(json.dumps(job).encode() + b"\n")
        child.stdin.flush()
        answer = child.stdout.read()
        if child.wait() == 0:
            return json.loads(answer)
        errors.seek(0)
        words = errors.read().decode(errors="replace").strip().split("\n")[-1]
        return {"broken": f"the run ended without an answer, exit code {child.returncode}: {words}"}


if __name__ == "__main__":
    sys.exit(main())
