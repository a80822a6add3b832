"""Which files are fixed, and whether they are: the one definition that every check uses."""

import argparse
import hashlib
from pathlib import Path

from harness.common import UserError, say
from harness.git import GitError, git, git_or_none

# A git ref, out of reach of edits; those under refs/worktree/ belong to one worktree each.
SESSION = "refs/worktree/autoresearch/session"
SHOWN = 9  # names in a message

# A folder stands for every file in it, except caches and what editors leave behind.
FIXED = ("prepare.py", "autoresearch.sh", "pyproject.toml", "harness")


def is_leftover(name: str) -> bool:
    """Whether a file is no source: compiled Python, hidden, or an editor's copy."""
    parts = name.split("/")
    return (
        "__pycache__" in parts
        or any(part.startswith(".") for part in parts)
        or name.endswith(("~", ".part", ".pyc"))
    )


def fixed_files(root: Path) -> list[str]:
    """Paths of the fixed files below root, relative to it, sorted."""
    found = []
    for name in FIXED:
        path = root / name
        inside = path.rglob("*") if path.is_dir() else [path]
        found += [p.relative_to(root).as_posix() for p in inside if p.is_file()]
    return sorted(name for name in found if not is_leftover(name))


def fixed_hash(root: Path) -> str:
    """12 hex digits of the names and contents of all fixed files: equal where scores compare."""
    digest = hashlib.sha256()
    for name in fixed_files(root):
        content = hashlib.sha256((root / name).read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()[:12]


def has_commits(root: Path) -> bool:
    """Whether root lies in a git repository with a commit.

    Raises:
        UserError: there is a repository, but git refuses to read it.
    """
    try:
        git("rev-parse", "--git-dir", root=root)
    except GitError as error:
        if error.code == 127 or "not a git repository" in str(error):
            return False
        raise
    return git_or_none("rev-parse", "-q", "--verify", "HEAD", root=root) is not None


def blob_id(path: Path, digits: int) -> str:
    """The name that git gives to a file's bytes as they are: SHA-1 has 40 digits, SHA-256 64."""
    data = path.read_bytes()
    digest = hashlib.sha1 if digits == 40 else hashlib.sha256
    return digest(b"blob %d\0" % len(data) + data).hexdigest()


def changed_files(root: Path, session: str = SESSION) -> list[str]:
    """Fixed files that differ from the session's commit, each with "(added)" or "(missing)".

    Contents are compared byte by byte, whatever git's index or filters say.
    """
    listing = git("ls-tree", "-r", "-z", session, "--", *FIXED, root=root)
    right = {}
    for entry in listing.split("\0"):
        if entry:
            facts, _, name = entry.partition("\t")
            right[name] = facts.split()[2]
    digits = max(map(len, right.values()), default=40)
    present = {name: blob_id(root / name, digits) for name in fixed_files(root)}
    changed = []
    for name in sorted(right.keys() | present.keys()):
        if name not in present:
            changed.append(f"{name} (missing)")
        elif name not in right:
            changed.append(f"{name} (added)")
        elif present[name] != right[name]:
            changed.append(name)
    return changed


def check_fixed(root: Path, session: str = SESSION) -> str:
    """Raise unless the fixed files are those of the commit at which the session began.

    The first check begins the session at HEAD. Returns a remark for the user, "" as a rule.

    Raises:
        UserError: names every file that differs, and the two commands that help.
    """
    if not has_commits(root):
        return "no git commit here: whether the fixed files are unchanged is not checked"
    if git_or_none("rev-parse", "-q", "--verify", session, root=root) is None:
        git("update-ref", session, "HEAD", root=root)
    changed = changed_files(root, session)
    if not changed:
        return ""
    begin = git("rev-parse", "--short", session, root=root)
    restored = " ".join(name for name in changed[:SHOWN] if not name.endswith("(added)"))
    restored = restored.replace(" (missing)", "") or "FILE"
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    raise UserError(
        f"fixed file changed since the session began ({begin}): {' '.join(changed[:SHOWN])}{more}. "
        f"hint: 'git checkout {session} -- {restored}' restores; if it was meant, commit it "
        "and run 'bash autoresearch.sh session'"
    )


def add_parser(commands) -> None:
    """Register the command `session`."""
    words = "accept the fixed files as they are committed now; starts a new session"
    commands.add_parser("session", help=words, description=words).set_defaults(func=start_session)


def start_session(args: argparse.Namespace) -> int:
    """Begin a new session at HEAD."""
    root = args.root
    if not has_commits(root):
        raise UserError("no git commit to start a session from. hint: git init, then commit")
    if changed := changed_files(root, "HEAD"):
        names = " ".join(changed[:SHOWN])
        raise UserError(f"fixed file not committed: {names}. hint: commit it, then repeat this")
    git("update-ref", SESSION, "HEAD", root=root)
    begin = git("rev-parse", "--short", "HEAD", root=root)
    say(f"a new session starts at {begin}: the fixed files are {' '.join(FIXED)}")
    return 0
