"""May a run start? Each check returns what it found, or raises UserError with a hint."""

import ast
import os
import shutil
import sys
import time
from importlib.util import find_spec

from harness.common import UserError
from harness.finish import recover
from harness.fixed import check_fixed, fixed_hash
from harness.git import GitError
from harness.place import Place
from harness.repository import Repository
from harness.session import OtherSettings, Session
from harness.settings import check_settings, user_path
from harness.workspace import Workspace

MIN_FREE_MB = 100
# Calls that only choose random numbers.
SEED_CALLS = ("manual_seed", "manual_seed_all", "seed", "default_rng", "RandomState")


def begin(workspace: Workspace) -> list[dict]:
    """How a command begins that trains: finish what was killed, check, read the log."""
    check_settings(os.environ)
    check_python(workspace)
    check_disk(workspace)
    check_git(workspace)
    with workspace.lock():
        recover(workspace)
        check_fixed(workspace.root)
    return workspace.rows()


def present_session(workspace: Workspace, rows: list[dict]) -> Session | None:
    """The session that a run belongs to; None after changed fixed files were accepted."""
    session = Session.of(rows)
    if session and session.baseline.get("fixed") not in (None, fixed_hash(workspace.root)):
        return None
    return session


def check_session(session: Session, workspace: Workspace, place: Place | None = None) -> None:
    """Refuse settings that are not those of the session, and another place if one is given."""
    try:
        if place:
            session.check_place(place.label)
    except OtherSettings as error:
        raise UserError(str(error)) from None
    conflicts = session.conflicts(workspace.root)
    if conflicts:
        raise UserError(
            f"{'; '.join(conflicts)}: their scores can't be compared. hint: unset it and the "
            "session's value is used; --new-session begins a session with the new one"
        )


def check_environment(workspace: Workspace) -> str:
    """Every setting is in its range, and is that of the session."""
    check_settings(os.environ)
    session = present_session(workspace, workspace.rows())
    if not session:
        return "valid; the next run begins a session"
    check_session(session, workspace)
    return "those of the session"


def check_python(workspace: Workspace) -> str:
    """The interpreter has torch."""
    if not find_spec("torch"):
        raise UserError(f"{sys.executable} has no torch. hint: use 'bash autoresearch.sh'")
    return f"{sys.version.split()[0]} with torch"


def check_disk(workspace: Workspace) -> str:
    """There is room for a run's folder and worktree."""
    free = shutil.disk_usage(workspace.root).free / 2**20
    if free < MIN_FREE_MB:
        raise UserError(
            f"{free:.0f} MB free, a run needs {MIN_FREE_MB}. "
            "hint: delete old folders in .autoresearch/runs"
        )
    cache = user_path(os.environ.get("AUTORESEARCH_CACHE") or "~/.cache/autoresearch")
    state = "exists" if cache.exists() else "is made by the first run"
    return f"{free / 1024:.1f} GB free; the data folder {cache} {state}"


def check_git(workspace: Workspace) -> str:
    """The branch may get commits, and git knows who makes them."""
    repository = workspace.repository
    start = "git add -A && git commit -m start"
    switch = f"hint: git switch -c autoresearch/{time.strftime('%b%d').lower()}"
    try:
        repository.git("rev-parse", "--git-dir")
    except GitError as error:  # no repository, one of another owner, or no git
        raise UserError(
            f"{error}. hint: if there is no repository yet: "
            f"git init -b autoresearch/start && {start}"
        ) from None
    if repository.git_or_none("cat-file", "-e", "HEAD:./train.py") is None:
        raise UserError(f"train.py is in no commit yet. hint: {start}")
    if not repository.has_identity():
        raise UserError(
            "git has no identity. hint: git config user.name NAME && git config user.email ADDRESS"
        )
    branch = repository.branch_name()
    if branch is None:
        raise UserError(f"HEAD is detached: commits here would belong to no branch. {switch}")
    if branch in ("main", "master", repository.default_branch()):
        raise UserError(f"on the default branch '{branch}'. {switch}")
    return f"branch {branch} at {repository.git('rev-parse', '--short', 'HEAD')}"


def check_edits(workspace: Workspace) -> str:
    """Only train.py differs from HEAD, it parses, and what it imports is committed."""
    others = workspace.repository.other_changes()
    if others:
        raise UserError(
            f"changed, and not part of an experiment: {' '.join(others[:9])}. "
            "hint: commit or stash; only train.py may differ from HEAD"
        )
    try:
        tree = ast.parse(workspace.repository.train.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"train.py does not parse: {error}. hint: nothing was run") from None
    modules = imported_modules(tree)
    for path in workspace.repository.untracked_modules():
        if path.split("/")[0].removesuffix(".py") in modules:
            raise UserError(
                f"train.py imports {path}, which is in no commit, so no run can see it. "
                "hint: put the code into train.py"
            )
    return "nothing but train.py differs from HEAD"


def imported_modules(tree: ast.AST) -> set[str]:
    """Top-level names of the modules that a file imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
    return names


class WithoutSeeds(ast.NodeTransformer):
    """Replaces what a file does with seeds by a constant."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Drop the arguments of a call that seeds a generator."""
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        return ast.Constant("seeded") if name in SEED_CALLS else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Drop the value that a name like SEED gets."""
        self.generic_visit(node)
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if any("seed" in name.lower() for name in names):
            node.value = ast.Constant("seed")
        return node


def idea_of(repository: Repository) -> str:
    """What train.py changes against HEAD: "nothing", "the seed only" or "code"."""
    try:
        before = ast.parse(repository.git("show", "HEAD:./train.py"))
        after = ast.parse(repository.train.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return "code"  # one of them does not parse
    if ast.dump(before) == ast.dump(after):
        return "nothing"
    without = WithoutSeeds()
    if ast.dump(without.visit(before)) == ast.dump(without.visit(after)):
        return "the seed only"
    return "code"


def check_idea(workspace: Workspace) -> str:
    """There is something to measure."""
    idea = idea_of(workspace.repository)
    if idea == "the seed only":
        raise UserError(
            "train.py changes the seed only: every run of a session has the session's seed, and "
            "a lucky one is no result. hint: edit something else"
        )
    if idea == "code":
        return "train.py changed"
    if present_session(workspace, workspace.rows()):
        raise UserError(
            "train.py did not change since HEAD, except in comments or whitespace. "
            "hint: edit it first"
        )
    return "the next run makes the baseline"
