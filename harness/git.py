"""Calls of git: by argument list, never through a shell, and never steered by a caller's hook."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from harness.common import UserError

# git hands its hooks GIT_DIR, GIT_INDEX_FILE, GIT_WORK_TREE, GIT_AUTHOR_DATE and others. A command
# started from a hook (or from a shell that inherited them) would then work on another repository
# or index. Only variables that hold the user's identity, configuration and access stay.
KEPT = (
    "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL",
    "GIT_CONFIG", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH",
    "GIT_TEMPLATE_DIR", "GIT_SSH", "GIT_ASKPASS", "GIT_TERMINAL_PROMPT", "GIT_SSL", "GIT_HTTP",
    "GIT_PROXY", "GIT_TRACE",
)  # fmt: skip


class GitError(UserError):
    """git refused; the message holds its own words. `code` is its exit code, 127 without git."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


def clean_git_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without the variables that point git at another repository or index."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("GIT_") or name.startswith(KEPT)
    }


def git(
    *args: str,
    root: Path,
    text: str | None = None,
    hooks: bool = False,
    index: Path | None = None,
    exact: bool = False,
) -> str:
    """What git prints, without the last line end. `text` is its standard input.

    Args:
        hooks: run the user's hooks.
        index: used instead of the checkout's own.
        exact: give the output as it is, for the content of a file.

    Raises:
        GitError: git ended with an error, or is not installed.
    """
    command = ["git", *([] if hooks else ["-c", "core.hooksPath=/dev/null"]), *args]
    environment = clean_git_environment()
    if index is not None:
        environment["GIT_INDEX_FILE"] = str(index)
    data = (text or "").encode("utf-8", "surrogateescape")
    try:
        done = subprocess.run(
            command, cwd=root, input=data, env=environment, check=False, capture_output=True
        )
    except FileNotFoundError:
        raise GitError("git is not installed. hint: install it", 127) from None
    if done.returncode:
        words = (done.stderr + done.stdout).decode(errors="replace").strip()
        raise GitError(f"git {args[0]} failed: {words}", done.returncode)
    output = done.stdout.decode("utf-8", "surrogateescape")
    return output if exact else output.removesuffix("\n")


def git_or_none(*args: str, root: Path) -> str | None:
    """What git prints, or None when it refuses."""
    try:
        return git(*args, root=root)
    except GitError:
        return None
