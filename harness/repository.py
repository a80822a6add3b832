"""The commits of the cycle: candidates outside the branch, kept ones on it; and train.py itself.

A candidate is a commit under refs/autoresearch/runs/<id>. It is made from the bytes of train.py
with an index of its own, so the branch, the user's index and all other files stay as they are, and
no hook runs. The ref keeps it reachable, also after `git gc`. A kept candidate becomes one commit
on the branch's present tip; that commit is an ordinary one and runs the user's hooks.
"""

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.common import UserError
from harness.git import GitError, git, git_or_none

RUN_REFS = "refs/autoresearch/runs/"
MUST_BE_NEW = ""  # as old value of a ref: there must be none yet
INDEX_WAIT = 10  # seconds to wait for another git in the checkout


class HookRefused(UserError):
    """A hook of the user refused the commit of a kept train.py, or changed what it would hold."""


@dataclass(frozen=True)
class Tip:
    """A branch and the commit it is at."""

    branch: str  # refs/heads/...
    commit: str


class Repository:
    """The git repository around a checkout. `root` is the folder with train.py, at any depth."""

    def __init__(self, root: Path):
        self.root = root
        self.train = root / "train.py"

    def git(self, *args: str, **options) -> str:
        """Output of git in the checkout, see harness.git.git."""
        return git(*args, root=self.root, **options)

    def git_or_none(self, *args: str) -> str | None:
        """Output of git in the checkout, or None when it refuses."""
        return git_or_none(*args, root=self.root)

    @cached_property
    def prefix(self) -> str:
        """Path of root in the repository: "" or "folder/"."""
        return self.git("rev-parse", "--show-prefix")

    def tip(self) -> Tip:
        """The branch that is checked out. Raises GitError on a detached HEAD."""
        return Tip(self.git("symbolic-ref", "HEAD"), self.git("rev-parse", "HEAD"))

    def tip_of(self, branch: str) -> str | None:
        """The commit that a branch is at, None when it is gone."""
        return self.git_or_none("rev-parse", "-q", "--verify", branch)

    def train_blob(self, commit: str) -> str:
        """The object id of a commit's train.py: equal for equal bytes."""
        return self.git("rev-parse", f"{commit}:./train.py")

    def train_at(self, commit: str) -> bytes:
        """The bytes of a commit's train.py as a checkout has them."""
        text = self.git("cat-file", "--filters", f"{commit}:./train.py", exact=True)
        return text.encode("utf-8", "surrogateescape")

    def blob_of(self, content: bytes) -> str:
        """The object id that these bytes would have as train.py."""
        text = content.decode("utf-8", "surrogateescape")
        return self.git("hash-object", "--stdin", "--path=train.py", text=text)

    def edited_blob(self) -> str | None:
        """The object id of train.py if it were committed now; None without the file."""
        return self.git_or_none("hash-object", "--path=train.py", "train.py")

    def commits_of_train(self, since: str, branch: str) -> list[str]:
        """The commits on the branch that changed train.py since then."""
        return self.git("log", "--format=%H", f"{since}..{branch}", "--", "train.py").split()

    def resolve_run(self, run_id: str) -> str | None:
        """The commit of a candidate, None when its ref is gone."""
        return self.git_or_none("rev-parse", "-q", "--verify", f"{RUN_REFS}{run_id}^{{commit}}")

    # ---- candidates ----

    def make_candidate(self, run_id: str, content: bytes, message: str, index: Path) -> str:
        """Commit these bytes as train.py on top of HEAD, reachable by the run's ref only.

        Args:
            index: a path for the temporary index; the file is removed again.
        """
        mode, _, _ = self.git("ls-tree", "HEAD", "./train.py").split(maxsplit=2)
        text = content.decode("utf-8", "surrogateescape")
        blob = self.git("hash-object", "-w", "--stdin", "--path=train.py", text=text)
        try:
            self.git("read-tree", "HEAD", index=index)
            entry = f"{mode},{blob},{self.prefix}train.py"
            self.git("update-index", "--cacheinfo", entry, index=index)
            tree = self.git("write-tree", index=index)
        finally:
            index.unlink(missing_ok=True)
        commit = self.git("commit-tree", tree, "-p", "HEAD", "-F", "-", text=message)
        self.git("update-ref", RUN_REFS + run_id, commit, MUST_BE_NEW)
        return commit

    def drop_candidate(self, run_id: str) -> None:
        """Forget a candidate that never ran."""
        self.git("update-ref", "-d", RUN_REFS + run_id)

    def changed_lines(self, commit: str) -> tuple[int, int]:
        """(added, removed) lines of train.py in a candidate, against the commit it is based on."""
        numbers = self.git("diff-tree", "--numstat", f"{commit}^", commit, "--", "train.py").split()
        return (int(numbers[0]), int(numbers[1])) if numbers[:1] != ["-"] and numbers else (0, 0)

    def diff(self, commit: str) -> str:
        """What a candidate changes, as a patch."""
        return self.git("diff-tree", "-p", f"{commit}^", commit, "--", "train.py") + "\n"

    # ---- worktrees ----

    def add_worktree(self, folder: Path, commit: str) -> Path:
        """A clean detached checkout of the commit; returns the folder in it that is like root."""
        self.git("worktree", "add", "--quiet", "--detach", str(folder), commit)
        return folder / self.prefix

    def prune_worktrees(self) -> None:
        """Forget the worktrees whose folders are gone."""
        self.git("worktree", "prune")

    # ---- kept ones ----

    def find_kept(self, branch: str, since: str, run_id: str) -> str | None:
        """The commit on the branch that keeps this run, None if there is none yet."""
        pattern = f"--grep=^Run: .*{RUN_REFS}{run_id}$"
        return self.git_or_none("log", "-1", "--format=%H", pattern, f"{since}..{branch}") or None

    def commit_kept(self, here: Path, branch: str, candidate: str, message: str) -> str:
        """Add one commit to the branch: its tip with the candidate's train.py.

        Made in the worktree `here`, so that nothing else of the checkout is in it; the user's hooks
        run. When somebody commits meanwhile, it is made again on the new tip.

        Raises:
            HookRefused: a hook ended with an error, or changed the commit's files.
        """
        wanted = self.train_blob(candidate)
        signing = self.git_or_none("config", "--bool", "autoresearch.sign") or "false"
        options = ("-c", f"commit.gpgsign={signing}")
        while True:
            tip = self.git("rev-parse", branch)
            git("checkout", "--quiet", "--force", "--detach", tip, root=here)
            git("checkout", "--quiet", candidate, "--", "train.py", root=here)
            try:
                git(*options, "commit", "--quiet", "--allow-empty", "--cleanup=whitespace",
                    "--file=-", root=here, text=message, hooks=True)  # fmt: skip
            except GitError as refusal:
                raise HookRefused(str(refusal)) from None
            made = git("rev-parse", "HEAD", root=here)
            changed = git("diff-tree", "-r", "--name-only", "-z", tip, made, root=here).split("\0")
            if set(changed) - {"", f"{self.prefix}train.py"} or self.train_blob(made) != wanted:
                raise HookRefused("a commit hook changed the files of the commit")
            try:
                self.git("update-ref", "-m", "autoresearch: keep", branch, made, tip)
                return made
            except GitError:
                if self.git("rev-parse", branch) == tip:
                    raise

    def bring_train(self, branch: str, ours: set[str]) -> bool:
        """Bring train.py and its index entry to the branch's tip; False if the user edited it.

        Args:
            ours: object ids of train.py that are in a commit: no edits to protect.
        """
        if self.git_or_none("symbolic-ref", "-q", "HEAD") != branch:
            return True
        self.wait_for_index()
        known = ours | {self.train_blob("HEAD")}
        staged = self.git("ls-files", "--stage", "--", "train.py").split()
        if staged and staged[1] not in known:
            return False
        if self.edited_blob() in known:
            self.git("checkout", "--quiet", "HEAD", "--", "train.py")
            return True
        self.git("reset", "--quiet", "--", "train.py")
        return False

    def wait_for_index(self) -> None:
        """Wait until no other git changes the index of the checkout.

        Raises:
            UserError: it is still locked after INDEX_WAIT seconds.
        """
        lock = self.root / self.git("rev-parse", "--git-path", "index.lock")
        end = time.monotonic() + INDEX_WAIT
        while lock.exists():
            if time.monotonic() > end:
                raise UserError(
                    f"git is busy in this checkout. hint: if no git is running, remove {lock}; "
                    "the next command finishes what is open"
                )
            time.sleep(0.1)

    # ---- the branch as the user sees it ----

    def branch_name(self) -> str | None:
        """Short name of the branch, None on a detached HEAD or without git."""
        return self.git_or_none("symbolic-ref", "-q", "--short", "HEAD")

    def default_branch(self) -> str:
        """Short name of the remote's default branch, "" when unknown."""
        name = self.git_or_none("symbolic-ref", "-q", "--short", "refs/remotes/origin/HEAD") or ""
        return name.removeprefix("origin/")

    def has_identity(self) -> bool:
        """Whether git knows who commits."""
        idents = ("GIT_AUTHOR_IDENT", "GIT_COMMITTER_IDENT")
        return all(self.git_or_none("var", ident) is not None for ident in idents)

    def other_changes(self) -> list[str]:
        """Tracked files, except train.py, that differ from HEAD, staged or not."""
        names = self.git("diff", "--name-only", "-z", "HEAD").split("\0")
        return [name for name in names if name not in ("", f"{self.prefix}train.py")]

    def untracked_modules(self) -> list[str]:
        """Python modules next to train.py that are in no commit."""
        patterns = (":(glob)*.py", ":(glob)*/__init__.py")
        return self.git("ls-files", "--others", "--", *patterns).splitlines()


def one_line(text: object, width: int | None = None) -> str:
    """A text on one line, cut to the width."""
    return " ".join(str(text).split())[:width]


def subject_and_body(description: str, trailers: dict[str, str]) -> str:
    """A commit message: the description, cut to a subject and in full, and trailers."""
    subject = one_line(description, 72)
    paragraphs = [subject] if subject == description else [subject, description]
    lines = [f"{name}: {value}" for name, value in trailers.items()]
    return "\n\n".join([*paragraphs, "\n".join(lines)]) + "\n"
