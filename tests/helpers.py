"""What several test files share and is no fixture."""

import atexit
import compileall
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.process import start_time

ROOT = Path(__file__).resolve().parent.parent
DROPPED = ("AUTORESEARCH_", "GIT_", "HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
DROPPED += ("PYTHONDONTWRITEBYTECODE",)  # a command starts twice as fast with bytecode


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what could change a run, and with `extra`.

    The developer's own git configuration (signing, hooks, branch names) is not read.
    """
    kept = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(DROPPED)
    }
    return kept | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"} | extra


def git(folder: Path, *args: str) -> str:
    """What git prints, with an identity; git's own words are the failure."""
    identity = ["-c", "user.name=A User", "-c", "user.email=user@example.com"]
    done = subprocess.run(
        ["git", *identity, *args], cwd=folder, env=clean_environment(), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@functools.cache
def compiled_harness() -> Path:
    """A copy of harness/ with its bytecode: checkouts that are copied from it start faster."""
    folder = Path(tempfile.mkdtemp(prefix="harness-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "harness", folder, ignore=ignored, dirs_exist_ok=True)
    compileall.compile_dir(folder, quiet=1)
    return folder


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for another process to get somewhere."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds} s"
        time.sleep(0.02)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk of this size, mounted on a new folder; the test is skipped where that is forbidden."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def is_alive(pid: int, grace: float = 5) -> bool:
    """Whether a process still runs after a moment's grace; a zombie does not."""
    end = time.monotonic() + grace
    while start_time(pid):
        if time.monotonic() > end:
            return True
        time.sleep(0.02)
    return False


# A prepare.py without torch: the settings that the outer process asks for, and an evaluator that
# records any number it is given. Extra keys of the record are keyword arguments.
PREPARE = """
import json, os, sys
from pathlib import Path
from harness.common import UserError
from harness.settings import read_setting

DATA_ID = "0123456789ab"
budget, seed = read_setting("TIME_BUDGET"), read_setting("SEED")
SETTINGS = {
    "profile": "tiny", "data": "embedded", "data_id": DATA_ID, "device": "cpu",
    "time_budget": 300 if budget is None else budget, "seed": 1337 if seed is None else seed,
    "cache": "", "eval_version": 1, "fixed": "0" * 12,
}

def evaluate(score, **extra):
    record = {"run_id": os.environ["AUTORESEARCH_RUN_ID"], "val_bpb": score, "marks": "",
              "budget": SETTINGS["time_budget"]}
    record |= {name: SETTINGS[name] for name in ("seed", "data_id", "profile", "device")} | extra
    with open(Path(os.environ["AUTORESEARCH_RUN_DIR"], "eval.jsonl"), "a") as file:
        file.write(json.dumps(record) + "\\n")
    return score

if __name__ == "__main__" and "--settings-file" in sys.argv:
    Path(sys.argv[-1]).write_text(json.dumps(SETTINGS))
"""


def make_checkout(folder: Path, train: str, prepare: str | None = PREPARE) -> Path:
    """A repository as a user's clone, with this train.py; without `prepare` the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("autoresearch.sh", "pyproject.toml", ".gitignore", ".gitattributes"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(compiled_harness(), folder / "harness")
    if prepare is None:
        shutil.copy(ROOT / "prepare.py", folder / "prepare.py")
    else:
        (folder / "prepare.py").write_text(prepare)
    (folder / "train.py").write_text(train)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "start")
    return folder


class Checkout:
    """Runs commands in a folder made by make_checkout."""

    def __init__(self, root: Path):
        self.root = root
        self.environment = clean_environment(AUTORESEARCH_PYTHON=sys.executable)

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen:
        """A command that goes on while the test does."""
        return subprocess.Popen(
            ["bash", "autoresearch.sh", *arguments], cwd=self.root, text=True,
            env=self.environment | changes, stdout=-1, stderr=-1, start_new_session=True,
        )  # fmt: skip

    def run(self, train: str | None = None, *arguments: str, **changes: str):
        """A command to its end, with this train.py; what it printed is in `out` and `err`."""
        if train is not None:
            (self.root / "train.py").write_text(train)
        process = self.start(*arguments, **changes)
        process.out, process.err = process.communicate(timeout=60)
        if process.returncode:
            assert "METRIC" not in process.out, "a failed run printed a number"
        return process

    def read(self, name: str) -> str:
        """The text of a file of the clone."""
        return (self.root / name).read_text()

    def pid(self, name: str) -> int:
        """A process number that train.py writes into a file, once it is there."""
        path = self.root / name
        wait_until(lambda: path.exists() and path.read_text())
        return int(path.read_text())
