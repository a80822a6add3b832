"""What a session on a cluster costs: stand-in experiments, some of whose workers are killed.

    python tests/bench_fleet.py [--count 200] [--slots 8] [--seconds 15] [--kill 0.1] [--folder F]

With a folder that exists the session in it goes on, with as many experiments more. All nodes of the
cluster are on this machine and share its cores: figures of a small machine are upper bounds. A
stand-in experiment sleeps. Needs the package ray.
"""

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import FleetLab, RayCluster, kill
from lab import finished

CPUS = 2  # slots of a node


class Killer(threading.Thread):
    """Kills a worker each time so many more experiments have ended."""

    def __init__(self, lab: FleetLab, before: int, count: int, kills: int):
        super().__init__(daemon=True)
        self.lab, self.killed = lab, []
        self.marks = [before + count * number // kills for number in range(kills)]
        self.rng = random.Random(0)

    def run(self) -> None:
        for mark in self.marks:
            while len(self.lab.rows()) < mark:
                time.sleep(0.2)
            while not (workers := self.lab.cluster.processes("ray::autoresearch")):
                time.sleep(0.2)
            self.killed.append(self.rng.choice(workers))
            kill(self.killed[-1])


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Run a sweep of `count` values and print what it cost."""
    cluster = RayCluster(folder / "cluster")
    try:
        for _ in range(args.slots // CPUS):
            cluster.add_node(cpus=CPUS)
        lab = begun(args, folder / "repo", cluster)
        before = len(lab.rows())
        numbers = range(before, before + args.count)
        values = ",".join(f"{1.1 + 0.001 * number:.3f}" for number in numbers)
        killer = Killer(lab, before, args.count, round(args.kill * args.count))
        killer.start()
        begin = time.monotonic()
        command = ("sweep", f"SCORE={values}", "--once", "--repeats", "1")
        done = finished(lab.start(*command), seconds=36000)
        report(args, lab.rows()[before:], time.monotonic() - begin, len(killer.killed))
        print(f"rows of the session        {len(lab.rows()):5d}")
        if done.code:
            print(done.err)
    finally:
        cluster.stop()


def begun(args: argparse.Namespace, root: Path, cluster: RayCluster) -> FleetLab:
    """The session that is in the folder, or a new one with its baseline."""
    if root.exists():
        root.rename(root.with_name("earlier"))
        lab = FleetLab(root, cluster, root.with_name("earlier"))
        shutil.rmtree(root.with_name("earlier"))
        return lab
    lab = FleetLab(root, cluster)
    lab.edit(1.0, f"time.sleep({args.seconds})")
    lab.git("commit", "-qam", "sleeps")
    begin = time.monotonic()
    lab.attempt("baseline")
    print(f"one experiment alone       {time.monotonic() - begin:7.1f} s", flush=True)
    return lab


def report(args: argparse.Namespace, rows: list[dict], wall: float, kills: int) -> None:
    """Print the figures of the experiments with these rows."""
    ids = {row["id"] for row in rows}
    scores = {row["metric"] for row in rows if row["status"] == "discard"}
    ideal = -(-args.count // args.slots) * args.seconds
    trained = sum(row["seconds"] for row in rows)
    overhead = (wall * args.slots - trained) / args.count
    print(
        f"experiments                {args.count:5d}, {args.slots} at once, each {args.seconds:g} s"
    )
    print(f"workers killed             {kills:5d}")
    print(f"rows lost                  {args.count - len(ids):5d}")
    print(f"rows twice                 {len(rows) - len(ids):5d}")
    print(f"scores missing             {args.count - len(scores):5d}")
    print(f"wall time                  {wall:7.1f} s, ideal {ideal:.1f} s")
    print(f"slot time besides training {overhead:7.1f} s an experiment, lost attempts included")


def main() -> int:
    """Parse the arguments and measure. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--kill", type=float, default=0.1, help="part of the workers")
    parser.add_argument("--folder", type=Path, help="keeps the session (default: a temporary one)")
    args = parser.parse_args()
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
        measure(args, args.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
