"""What several modules share: the error for people, file hashes and atomic writes, ceil_div.

Imports nothing heavy, so that every command starts quickly.
"""

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


class UserError(Exception):
    """An error the user can fix: the message says what is wrong and, after "hint:", what to do."""

    exit_code = 2  # of a command that ends with it


def say(text: str) -> None:
    """A message for the user, on stderr: stdout belongs to the METRIC lines."""
    print(f"autoresearch: {text}", file=sys.stderr, flush=True)


class VoidScore(Exception):
    """The model or the run breaks a rule of the evaluation: there is no score."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error means that memory ran out, on any device.

    torch has an exception class for it on CUDA only; the CPU allocator, MPS and cuBLAS say it in
    the text of a RuntimeError.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(
        re.search("out of memory|can't allocate|CUBLAS_STATUS_ALLOC_FAILED", str(error))
    )


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator:
    """A binary file to write: a reader sees the old content or all of the new one.

    The content is flushed to the disk before the rename, so this also holds after a power cut.
    When the block raises, the partial file is removed and the old one stays.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file, see atomic_file."""
    with atomic_file(path) as file:
        file.write(data)
