"""What several test files share and is no fixture."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from harness.process import start_time

ROOT = Path(__file__).resolve().parent.parent
DROPPED = ("AUTORESEARCH_", "GIT_", "HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what could change a run, and with `extra`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(DROPPED)
    }
    return kept | extra


def git(folder: Path, *args: str) -> str:
    """What git prints, with an identity; git's own words are the failure."""
    identity = ["-c", "user.name=A User", "-c", "user.email=user@example.com"]
    done = subprocess.run(
        ["git", *identity, *args], cwd=folder, env=clean_environment(), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for another process to get somewhere."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds} s"
        time.sleep(0.02)


def is_alive(pid: int, grace: float = 5) -> bool:
    """Whether a process still runs after a moment's grace; a zombie does not."""
    end = time.monotonic() + grace
    while start_time(pid):
        if time.monotonic() > end:
            return True
        time.sleep(0.02)
    return False
