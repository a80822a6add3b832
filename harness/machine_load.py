"""What the machine gave to a run: CPU time of its processes, and what others took meanwhile.

Linux only; elsewhere the result is {}. All rates are CPU seconds per second of wall time, so 1.0 is
one core. They are means over the training proper, because compiling and scoring load a machine in
another way.
"""

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from harness.process import RUN_ID, environments, marked

PROC = Path("/proc")
INTERVAL = 3.0  # seconds between two samples


@dataclass(frozen=True)
class Sample:
    """Counters that only grow, in seconds, and the time at which they were read."""

    time: float  # time.monotonic()
    own: float  # CPU of the run's processes and of their children that have ended
    waited: float  # of the run's threads: ready to run, but without a core
    busy: float  # CPU of all processes of the machine
    steal: float  # taken by the hypervisor
    throttled: float  # the run's control group had used up its share of CPU


def process_seconds(pid: int) -> tuple[float, float]:
    """(CPU seconds, seconds of waiting for a core) of a process and of its children that ended."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    ticks = sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    waited = 0
    for schedstat in (PROC / str(pid) / "task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            waited += int(schedstat.read_text().split()[1])  # nanoseconds
    return ticks / os.sysconf("SC_CLK_TCK"), waited / 1e9


def throttled_seconds() -> float:
    """Seconds in which this control group (a container's CPU limit) let nothing run."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/sys/fs/cgroup/cpu.stat").read_text().splitlines():
            if line.startswith("throttled_usec "):
                return int(line.split()[1]) / 1e6
    return 0.0


class Counters:
    """Reads samples of one run. What a process had used when it ended is not lost."""

    def __init__(self, run_id: str):
        self.run_id = run_id
        self.seen: dict[int, tuple[float, float]] = {}  # pid: its last process_seconds
        # Processes of others, to look at no more. Not after one look: a child that is just being
        # started still shows the environment of its parent.
        self.foreign_once: set[int] = set()
        self.foreign: set[int] = set()

    def find(self) -> list[int]:
        """The run's processes that are alive."""
        found, foreign = [], set()
        for pid, entries in environments(self.foreign):
            if marked(entries).get(RUN_ID) == self.run_id:
                found.append(pid)
            else:
                foreign.add(pid)
        self.foreign |= foreign & self.foreign_once
        self.foreign_once = foreign
        return found

    def read(self) -> Sample:
        """The counters now."""
        now = time.monotonic()
        words = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, softirq, steal = (int(word) for word in words[:8])
        ticks = os.sysconf("SC_CLK_TCK")
        for pid in self.find():
            with contextlib.suppress(OSError, ValueError):
                self.seen[pid] = process_seconds(pid)
        own, waited = (sum(column) for column in zip((0.0, 0.0), *self.seen.values(), strict=True))
        busy = (user + nice + system + irq + softirq) / ticks
        return Sample(now, own, waited, busy, steal / ticks, throttled_seconds())


class LoadMeter:
    """Samples the machine in a thread while a run goes on: `with LoadMeter(run_id) as meter`."""

    def __init__(self, run_id: str):
        self.counters = Counters(run_id)
        self.samples: list[Sample] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.ended = 0.0

    def __enter__(self):
        if (PROC / "stat").exists():
            self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended = time.monotonic()
        self.stopped.set()
        if self.thread.is_alive():
            self.thread.join()

    def sample(self) -> None:
        """Take samples until the run has ended; the counters are a convenience, never a failure."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            while True:
                self.samples.append(self.counters.read())
                if self.stopped.wait(INTERVAL):
                    return

    def load(self, record: dict) -> dict[str, float]:
        """The rates during training, {} when too few samples fell into it.

        Training ended `seconds` (the evaluation's) before the process did, and had begun
        `training_seconds` earlier: both stand in the record.
        """
        stop = self.ended - (record.get("seconds") or 0.0)
        start = stop - (record.get("training_seconds") or self.ended)
        inside = [sample for sample in self.samples if start <= sample.time <= stop]
        return rates(inside[0], inside[-1]) if len(inside) > 1 else {}


def rates(first: Sample, last: Sample) -> dict[str, float]:
    """What the machine gave between two samples, CPU seconds per second of wall time."""
    seconds = last.time - first.time
    own = (last.own - first.own) / seconds
    found = {
        "cpu": own,
        "others": max(0.0, (last.busy - first.busy) / seconds - own),
        "steal": (last.steal - first.steal) / seconds,
        "waited": (last.waited - first.waited) / seconds,
        "throttled": (last.throttled - first.throttled) / seconds,
    }
    return {name: round(value, 4) for name, value in found.items()} | {"seconds": round(seconds, 1)}
