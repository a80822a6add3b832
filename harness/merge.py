"""Edits that were made while a run was under way, and the change that this run brought.

Such edits are based on the train.py from before the run. If the run was kept, they lack its change,
and measured as they are they would take it back. So the next `try` first merges it into them.
"""

import tempfile
from pathlib import Path

from harness.common import UserError, say, write_atomic
from harness.git import GitError
from harness.repository import Repository
from harness.workspace import Workspace


def base_file(workspace: Workspace) -> Path:
    """Holds the commit that the edits in train.py are based on, if that is not HEAD."""
    return workspace.state / "edit_base"


def has_old_base(workspace: Workspace) -> bool:
    """Whether train.py holds edits that lack what was kept since."""
    return base_file(workspace).exists()


def note_base(workspace: Workspace, commit: str) -> None:
    """Remember what the present edits are based on; of several commits, the first one."""
    if not has_old_base(workspace):
        write_atomic(base_file(workspace), commit.encode())


def forget_base(workspace: Workspace) -> None:
    """train.py holds no such edits any more."""
    base_file(workspace).unlink(missing_ok=True)


def add_kept_change(workspace: Workspace) -> None:
    """Merge what was kept since the edits in train.py began into them. Takes the lock.

    Raises:
        UserError: both changed the same lines. train.py stays as it is, and the next call takes it
            as it is then.
    """
    with workspace.lock():
        repository = workspace.repository
        if not has_old_base(workspace) or not repository.train.exists():
            return
        base = base_file(workspace).read_text()
        is_ours = repository.git_or_none("merge-base", "--is-ancestor", base, "HEAD") is not None
        if is_ours:  # else another branch is checked out now
            edited = repository.train.read_bytes()
            merged = merge(repository, edited, base)
            if merged is None:
                forget_base(workspace)
                raise UserError(
                    "train.py was edited before the last kept change, and both change the same "
                    f"lines. hint: 'git diff {base[:7]} HEAD -- train.py' shows that change: add "
                    "it by hand and repeat the command, which then takes train.py as it is"
                )
            if merged != edited:
                write_atomic(repository.train, merged)
                say("train.py was edited before the last kept change: that change was added to it")
        forget_base(workspace)


def merge(repository: Repository, edited: bytes, base: str) -> bytes | None:
    """The edited train.py with what changed from commit `base` to HEAD; None if they conflict."""
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name, part) for part in ("edited", "base", "kept")]
        contents = (edited, repository.train_at(base), repository.train_at("HEAD"))
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        try:
            text = repository.git("merge-file", "-p", "--quiet", *map(str, paths), exact=True)
        except GitError:
            return None
    return text.encode("utf-8", "surrogateescape")
