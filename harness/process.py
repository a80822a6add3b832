"""The processes of a run: start one with a time limit, and leave none of them behind.

Every process of a run carries three variables in its environment: AUTORESEARCH_RUN_ID,
AUTORESEARCH_CHECKOUT (for the folder whose command started it) and AUTORESEARCH_OWNER (the process
that waits for it). They are inherited, so a child is found by them even when it left the process
group, and even after everything else of its run was killed.
"""

import contextlib
import hashlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

RUN_ID = "AUTORESEARCH_RUN_ID"
CHECKOUT = "AUTORESEARCH_CHECKOUT"
OWNER = "AUTORESEARCH_OWNER"
GRACE = 10  # seconds between TERM and KILL
POLL = 0.05  # seconds between two looks at the children
TIMEOUT = 124  # exit code of a command that was still running at its limit, as timeout(1) has it


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int = 0  # 128 + the signal's number when it was killed
    seconds: float = 0.0
    timed_out: bool = False
    place: int = 0  # of several processes at once, the one that decided


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


def checkout_id(folder: Path) -> str:
    """A word for a folder: its path may hold spaces, which a listing of processes cannot show."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def run_variables(run_id: str, checkout: Path) -> dict[str, str]:
    """The variables by which the processes of a run are found again."""
    return {RUN_ID: run_id, CHECKOUT: checkout_id(checkout), OWNER: this_process()}


def environments(passed: Container[int] = ()) -> Iterator[tuple[int, list[str]]]:
    """(pid, entries NAME=VALUE) of every other process whose environment this user may read.

    Processes in `passed` are left out.
    """
    if Path("/proc/self/environ").exists():
        for folder in Path("/proc").iterdir():
            pid = int(folder.name) if folder.name.isdigit() else os.getpid()
            if pid != os.getpid() and pid not in passed:
                with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                    entries = (folder / "environ").read_bytes().split(b"\0")
                    yield pid, [os.fsdecode(entry) for entry in entries]
        return
    # macOS and BSD: the words of the environment follow those of the command
    command = ["ps", "-axEww", "-o", "pid=,command="]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    for line in filter(str.strip, listing.splitlines()):
        number, *words = line.split()
        if number.isdigit() and int(number) != os.getpid():
            yield int(number), words


def run_processes() -> Iterator[tuple[int, dict[str, str]]]:
    """(pid, its run_variables) of every process of any run that belongs to this user."""
    for pid, entries in environments():
        if found := marked(entries):
            yield pid, found


def processes_of(checkout: Path) -> list[int]:
    """The processes of runs that this checkout's commands started, oldest number first."""
    wanted = checkout_id(checkout)
    return sorted(pid for pid, found in run_processes() if found.get(CHECKOUT) == wanted)


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
    wanted = checkout_id(checkout)

    def is_orphan(found: dict[str, str]) -> bool:
        return found.get(CHECKOUT) == wanted and not is_running(found.get(OWNER, ""))

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


def stop_groups(children: list[subprocess.Popen]) -> None:
    """TERM to the children's process groups, and KILL to what is left after GRACE seconds."""
    for child in children:
        signal_group(child, signal.SIGTERM)
    end = time.monotonic() + GRACE
    while time.monotonic() < end and any(
        child.poll() is None or signal_group(child, 0) for child in children
    ):
        time.sleep(POLL)


def reap(child: subprocess.Popen) -> None:
    """Wait until a child that was killed is gone.

    Not with Popen.wait(): a signal that interrupts Popen.poll() just after it took the child's lock
    leaves the lock taken (seen with CPython 3.11), and wait() would never end.
    """
    if child.returncode is None:
        with contextlib.suppress(ChildProcessError):  # poll() was interrupted after it had seen it
            _, status = os.waitpid(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)


def exit_code(child: subprocess.Popen) -> int:
    """The exit code of a child that has ended, as a shell gives it: 128 + signal if killed."""
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def wait_for(children: list[subprocess.Popen], limit: float) -> int | None:
    """Wait until all children have ended well, or one has not; returns its place in the list.

    0 when all ended well, None when `limit` seconds have passed. Of several that failed at the
    same time, one with another code than 1 is returned: the others crash because it is gone.
    """
    end = time.monotonic() + limit
    while True:
        states = [child.poll() for child in children]
        failed = [place for place, state in enumerate(states) if state]
        if failed:
            return min(failed, key=lambda place: states[place] == 1)
        if None not in states:
            return 0
        if time.monotonic() > end:  # after the states: Ctrl-Z may have stopped us, not the children
            return None
        time.sleep(POLL)


def call(
    command: list[str],
    folder: Path,
    environments: list[Mapping[str, str]],
    logs: list[Path],
    limit: float = math.inf,
) -> Ended:
    """Run a command once per environment, at the same time, each in a session of its own.

    Both outputs of each go to its log. When one fails, or after `limit` seconds, all get TERM, and
    KILL ten seconds later. When this returns or raises (Ctrl-C), nothing of them is alive: no
    process of their groups and, where the environment holds run_variables, none that left them.
    """
    begin = time.monotonic()
    children = []
    try:
        for environment, log in zip(environments, logs, strict=True):
            with open(log, "wb") as output:
                children.append(
                    subprocess.Popen(
                        command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL,
                        stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
        place = wait_for(children, limit)
        if place is None or exit_code(children[place]):
            stop_groups(children)
    finally:
        for child in children:
            signal_group(child, signal.SIGKILL)
        for run_id in {environment.get(RUN_ID) for environment in environments} - {None}:
            end_run(run_id)
        for child in children:
            reap(child)
    seconds = time.monotonic() - begin
    if place is None:
        return Ended(TIMEOUT, seconds, timed_out=True)
    return Ended(exit_code(children[place]), seconds, place=place)


def raise_on_signals() -> None:
    """Let TERM and HUP end a command as Ctrl-C does: by KeyboardInterrupt, so that it tidies up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
