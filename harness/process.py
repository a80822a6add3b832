"""The processes of a run: start one with a time limit, and leave none of them behind.

Every process of a run carries three variables in its environment: AUTORESEARCH_RUN_ID,
AUTORESEARCH_CHECKOUT (the folder whose command started it) and AUTORESEARCH_OWNER (the process that
waits for it). They are inherited, so a child is found by them even when it left the process group,
and even after everything else of its run was killed.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

RUN_ID = "AUTORESEARCH_RUN_ID"
CHECKOUT = "AUTORESEARCH_CHECKOUT"
OWNER = "AUTORESEARCH_OWNER"
GRACE = 10  # seconds between TERM and KILL
TIMEOUT = 124  # exit code of a command that was still running at its limit, as timeout(1) has it


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (128 + the signal's number if killed) and seconds."""

    code: int
    timed_out: bool
    seconds: float


def start_time(pid: int) -> str:
    """When a process began, to tell it from a later one with the same number; "" if it is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    if Path("/proc/self/stat").exists():
        return ""
    with contextlib.suppress(OSError):
        command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
        words = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        return "" if not words or words[0].startswith("Z") else "-".join(words[1:])
    return ""


def this_process() -> str:
    """What identifies the calling process on this machine: number and start time."""
    return f"{os.getpid()}@{start_time(os.getpid())}"


def is_running(identity: str) -> bool:
    """Whether the process with this identity (see this_process) still exists."""
    number, _, started = identity.partition("@")
    return number.isdigit() and bool(started) and start_time(int(number)) == started


def run_variables(run_id: str, checkout: Path) -> dict[str, str]:
    """The variables by which the processes of a run are found again."""
    return {RUN_ID: run_id, CHECKOUT: str(checkout.resolve()), OWNER: this_process()}


def run_processes() -> Iterator[tuple[int, dict[str, str]]]:
    """(pid, its run_variables) of every process of any run that belongs to this user."""
    if Path("/proc/self/environ").exists():
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                entries = (folder / "environ").read_bytes().split(b"\0")
                if found := marked(os.fsdecode(entry) for entry in entries):
                    yield int(folder.name), found
        return
    command = ["ps", "-axEww", "-o", "pid=,command="]  # BSD and macOS: words of the environment
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for line in listing.splitlines():
        number, *words = line.split(" ")
        number, *words = [word for word in (number, *words) if word] or [""]
        if number.isdigit() and int(number) != os.getpid() and (found := marked(words)):
            yield int(number), found


def marked(entries: Iterable[str]) -> dict[str, str]:
    """Those of the entries NAME=VALUE that belong to run_variables; {} without a run id."""
    pairs = (entry.partition("=") for entry in entries)
    found = {name: value for name, _, value in pairs if name in (RUN_ID, CHECKOUT, OWNER)}
    return found if RUN_ID in found else {}


def end_run(run_id: str) -> int:
    """Kill every process of this run; returns how many there were."""

    def is_of_run(found: dict[str, str]) -> bool:
        return found[RUN_ID] == run_id

    return kill_where(is_of_run)


def end_orphans(checkout: Path) -> int:
    """Kill the processes of this checkout's runs whose owner is gone; returns how many there were.

    An owner that was killed with kill -9 cannot end its run. Runs that are watched stay.
    """
    folder = str(checkout.resolve())

    def is_orphan(found: dict[str, str]) -> bool:
        return found.get(CHECKOUT) == folder and not is_running(found.get(OWNER, ""))

    return kill_where(is_orphan)


def kill_where(matches: Callable[[dict[str, str]], bool]) -> int:
    """Kill all processes of runs whose variables match, and those that they start meanwhile."""
    killed = set()
    for _ in range(100):
        alive = [pid for pid, found in run_processes() if matches(found) and start_time(pid)]
        if not alive:
            break
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(alive)
        time.sleep(0.02)
    return len(killed)


def signal_group(child: subprocess.Popen, number: int) -> bool:
    """Send a signal to the child's process group; whether there was anything left to get it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
        return True
    return False


def stop_group(child: subprocess.Popen) -> None:
    """TERM to the child's process group, and KILL to what is left of it after GRACE seconds."""
    signal_group(child, signal.SIGTERM)
    end = time.monotonic() + GRACE
    while time.monotonic() < end and (child.poll() is None or signal_group(child, 0)):
        time.sleep(0.05)
    signal_group(child, signal.SIGKILL)


def call(
    command: list[str], folder: Path, environment: Mapping[str, str], log: Path, limit: float
) -> Ended:
    """Run a command in a session of its own, both its outputs into `log`, at most `limit` seconds.

    At the limit it gets TERM, and KILL ten seconds later. When this returns or raises (Ctrl-C),
    nothing of the command is alive: neither its process group nor, where the environment holds
    run_variables, a process that left the group.
    """
    begin = time.monotonic()
    timed_out = False
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        child.wait(limit)
    except subprocess.TimeoutExpired:
        timed_out = True
        stop_group(child)
    finally:
        signal_group(child, signal.SIGKILL)
        if RUN_ID in environment:
            end_run(environment[RUN_ID])
        child.wait()
    code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    return Ended(TIMEOUT if timed_out else code, timed_out, time.monotonic() - begin)


def raise_on_signals() -> None:
    """Let TERM and HUP end a command as Ctrl-C does: by KeyboardInterrupt, so that it tidies up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
