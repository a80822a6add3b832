"""One checkout and what the cycle keeps in it: the lock, the log, open runs and their folders.

A run that is under way has a folder .autoresearch/runs/open-<kind>-<id>. Its record.json is
rewritten after every step, so after `kill -9` the next command can finish the run from there. The
process that works on it holds the run's lock, .autoresearch/owners/<id>. When all is done, the
folder gets its final name.
"""

import contextlib
import json
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from harness.common import UserError, say, write_atomic
from harness.log import append_row, read_log, strict_json
from harness.repository import Repository

RESERVE = 2**20  # bytes a run sets aside for its row and commit, should it fill the disk
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop(UserError):
    """Ends a command with a message for the user and an exit code."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


class Workspace:
    """The folder with train.py, its repository, log and state."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self.repository = Repository(self.root)
        self.log = self.root / "autoresearch.jsonl"
        self.scores = self.root / ".autoresearch" / "scores.jsonl"
        self.state = self.root / ".autoresearch"
        self.runs = self.state / "runs"

    def rows(self) -> list[dict]:
        """All rows of the log."""
        return read_log(self.log)

    def append(self, row: dict, new_segment: bool = False) -> dict:
        """Add a row to the log, see harness.log.append_row."""
        return append_row(self.log, row, new_segment, self.state / "torn.txt")

    def make_state(self) -> None:
        """Make the folder of the state. Raises UserError if that is impossible."""
        try:
            self.state.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write to the checkout: {error}. hint: make it writable, or copy it"
            ) from None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time. Ctrl-C waits until the block has ended, then raises."""
        self.make_state()
        with FileLock(self.state / "lock"):
            received = []

            def remember(number, _frame):
                received.append(number)

            ours = [n for n in SIGNALS if signal.getsignal(n) is signal.default_int_handler]
            for number in ours:
                signal.signal(number, remember)
            try:
                yield
            finally:
                for number in ours:
                    signal.signal(number, signal.default_int_handler)
            if received:
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def only_one(self, name: str, message: str) -> Iterator[None]:
        """One process at a time for a piece of work that takes long; says so when it waits."""
        self.make_state()
        lock = FileLock(self.state / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(message)
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def device(self, gpu: str | None):
        """Hold the device for a command: two runs on one would slow each other down.

        Without a choice of GPU it is the lock of `bash autoresearch.sh run` in this checkout.
        """
        words = "waiting until the run that is under way on this device has ended"
        return self.only_one(f"device-{one_word(gpu)}" if gpu else "run", words)

    def folder_of(self, row: dict) -> Path:
        """Where a finished run keeps its log, record, steps and diff."""
        return self.runs / f"{row['run']}-{row['commit']}"

    def open_folders(self, kind: str = "*") -> list[Path]:
        """Folders of runs that are under way, or were when their process was killed."""
        return sorted(self.runs.glob(f"open-{kind}-*"))

    def open_runs(self, kind: str = "*") -> list["Run"]:
        """The same runs, without those that begin or end just now."""
        runs = []
        for folder in self.open_folders(kind):
            with contextlib.suppress(FileNotFoundError):
                runs.append(Run(self, folder))
        return runs


class Run:
    """A run that is under way: its folder, its record, and its worktree.

    The record has id, kind, description, asi, branch, parent (the commit at its begin) and commit;
    later the result, and the decision. Kinds: a candidate (one idea) and a series (baseline and
    repeats) are what a user asked for; a baseline and a probe (a repeat) are single trainings.
    """

    def __init__(self, workspace: Workspace, folder: Path):
        self.workspace = workspace
        self.folder = folder
        self.record = read_record(folder)
        self.id = self.record["id"]
        self.worktree = workspace.state / "worktrees" / self.id
        # Not in the folder: whoever waits for the lock would make the folder again after its end.
        self.owner = FileLock(workspace.state / "owners" / self.id)

    @classmethod
    def open(cls, workspace: Workspace, kind: str, description: str, **record) -> "Run":
        """Begin a run. The caller holds the workspace's lock."""
        name = secrets.token_hex(4)
        folder = workspace.runs / f"open-{kind}-{name}"
        folder.mkdir(parents=True)
        owner = FileLock(workspace.state / "owners" / name)
        owner.acquire()
        (folder / "reserve").write_bytes(bytes(RESERVE))
        tip = workspace.repository.tip()
        basics = {"id": name, "kind": kind, "description": description, "asi": {}, "commit": None}
        basics |= {"branch": tip.branch, "parent": tip.commit, "opened": time.time()}
        write_record(folder, basics | record)
        run = cls(workspace, folder)
        run.owner = owner
        return run

    @property
    def is_open(self) -> bool:
        """Whether it still has to be finished."""
        return self.folder.name.startswith("open-")

    def save(self, **changes) -> None:
        """Change the record, on the disk too."""
        self.record |= changes
        write_record(self.folder, self.record)

    def enter(self, stage: str, planned: int = 0) -> None:
        """Say for `wait` and `status` what the run is doing now.

        Args:
            planned: trainings until the verdict, this one included; 0 if unknown.
        """
        self.save(stage=stage, planned=planned, stage_began=time.time())

    def adopt(self, seconds: float = 0) -> bool:
        """Become the process that works on this run.

        Returns:
            False if another process works on it all the time, or has ended it.
        """
        try:
            self.owner.acquire(timeout=seconds)
            self.record = read_record(self.folder)
            return True
        except Timeout:
            return False
        except FileNotFoundError:
            self.release()
            return False

    def release(self) -> None:
        """Let another process work on this run."""
        self.owner.release()

    def checkout(self, commit: str) -> Path:
        """A clean worktree of the commit; returns the folder in it that is like the root."""
        self.clear()
        return self.workspace.repository.add_worktree(self.worktree, commit)

    def clear(self) -> None:
        """Remove the worktree; run.log moves to the run's folder."""
        log = self.worktree / self.workspace.repository.prefix / "run.log"
        if log.exists():
            log.replace(self.folder / "run.log")
        shutil.rmtree(self.worktree, ignore_errors=True)
        self.workspace.repository.prune_worktrees()

    def make_room(self) -> None:
        """Give back the reserved part of the disk."""
        (self.folder / "reserve").unlink(missing_ok=True)

    def close(self, name: str) -> None:
        """Keep the folder under its final name. The caller holds the workspace's lock."""
        self.clear()
        self.make_room()
        target = self.folder.with_name(name)
        if target.exists():  # of a log that was deleted and begun again
            target.rename(f"{target}-before-{self.id}")
        self.folder = self.folder.rename(target)
        Path(self.owner.lock_file).unlink(missing_ok=True)
        self.release()


def one_word(text: str) -> str:
    """A text as a part of a file's name."""
    return "".join(character if character.isalnum() else "-" for character in text)


def read_record(folder: Path) -> dict:
    """The record of the run in this folder. Raises FileNotFoundError if there is none any more."""
    return strict_json((folder / "record.json").read_text())


def write_record(folder: Path, record: dict) -> None:
    """Write record.json, the old one or all of the new one."""
    text = json.dumps(record, indent=1, allow_nan=False)
    write_atomic(folder / "record.json", text.encode())
