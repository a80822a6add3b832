"""How a training process ends: the exit code and the one line for each kind of error."""

import contextlib
import sys
from collections.abc import Iterator

import torch

from harness.common import UserError, is_out_of_memory
from prepare import VoidScore


class Diverged(Exception):
    """The loss is not a number any more, or far above that of guessing."""


def exit_code(error: BaseException) -> int | None:
    """The exit code for this error: None means a crash, with a traceback and code 1."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, Diverged):
        return 3
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error):
        return 4
    if isinstance(error, VoidScore):
        return 5
    return None


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the errors that have an exit code into one line on stderr and that code."""
    try:
        yield
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(code)
