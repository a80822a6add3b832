"""Which files are fixed: the one definition that every check uses."""

import hashlib
from pathlib import Path

SESSION = "refs/autoresearch/session"  # a git ref: out of reach of edits

# A folder stands for every file in it that git tracks or would track.
FIXED = ("prepare.py", "autoresearch.sh", "pyproject.toml", "harness")


def fixed_files(root: Path) -> list[str]:
    """Paths of the fixed files below root, relative to it, sorted."""
    found = []
    for name in FIXED:
        path = root / name
        inside = path.rglob("*") if path.is_dir() else [path]
        found += [p.relative_to(root).as_posix() for p in inside if p.is_file()]
    return sorted(name for name in found if "__pycache__" not in name)


def fixed_hash(root: Path) -> str:
    """12 hex digits of the names and contents of all fixed files: equal where scores compare."""
    digest = hashlib.sha256()
    for name in fixed_files(root):
        content = hashlib.sha256((root / name).read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()[:12]
