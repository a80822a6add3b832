"""The environment variables AUTORESEARCH_*: one parser, one range and one message for each.

Defaults are not here: those that decide the number stand in prepare.py.
"""

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.common import UserError
from harness.git import clean_git_environment

PREFIX = "AUTORESEARCH_"
SIMILAR = 0.6  # from here on (difflib's ratio) an unknown name counts as a misspelt one
# Set by the user or by the commands themselves; their values are not checked here.
OTHERS = ("PYTHON", "RUN_DIR", "RUN_ID", "CHECKOUT", "OWNER")

# What a shell may hand down without changing what a run means: the rest of PYTHON* is dropped
# (PYTHONOPTIMIZE removes assertions, PYTHONSAFEPATH hides prepare.py, PYTHONWARNINGS=error kills).
KEPT_PYTHON = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONPYCACHEPREFIX",
    "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER",
)  # fmt: skip
# A shell inside a torchrun or Slurm job would make one process believe that it is one of many.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """How to read one variable. `low` and `high` bound a number and are both allowed."""

    parse: Callable = str
    low: float = -math.inf
    high: float = math.inf
    what: str = ""


SETTINGS = {
    "PROFILE": Setting(what="a profile of prepare.py"),
    "DATA": Setting(what="a data set, or the path of a folder or file of text"),
    "CACHE": Setting(what="the folder for data and compiled code"),
    "TIME_BUDGET": Setting(float, 0.1, 30 * 86400, "a number of seconds from 0.1 to 30 days"),
    "SEED": Setting(int, 0, 2**32 - 1, "a whole number from 0 to 4294967295"),
    "HARD_LIMIT": Setting(float, 1, 31 * 86400, "a number of seconds from 1 to 31 days"),
    # A score below it may be kept: then the evaluator looks for leaks at all positions.
    "SWEEP_BELOW": Setting(float, 0, 1e6, "a score in bits per byte"),
    "RANKS": Setting(int, 1, 1024, "a number of processes from 1 to 1024"),
}


def read_setting(name: str, environment: Mapping[str, str] = os.environ):
    """The value of AUTORESEARCH_<name> as its type, or None where it is unset or empty.

    Raises:
        UserError: the text is not a value of this setting.
    """
    setting = SETTINGS[name]
    text = environment.get(PREFIX + name, "").strip()
    if not text:
        return None
    try:
        value = setting.parse(text)
    except ValueError:
        value = None
    if value is None or (setting.parse is not str and not setting.low <= value <= setting.high):
        raise UserError(f"{PREFIX}{name}={text!r} is not {setting.what}. hint: unset or correct it")
    return value


def user_path(text: str) -> Path:
    """A path as a user writes it: ~ is the home folder.

    Raises:
        UserError: there is no such home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{text}: {error} hint: set HOME, or AUTORESEARCH_CACHE to a folder with its full path"
        ) from None


def check_settings(environment: Mapping[str, str]) -> None:
    """Read every setting, so that a wrong one is refused before anything starts.

    Raises:
        UserError: a value is out of its range, or a name looks like a misspelt setting.
    """
    for name in SETTINGS:
        read_setting(name, environment)
    known = (*SETTINGS, *OTHERS)
    for variable in environment:
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known:
            continue
        if close := difflib.get_close_matches(name, known, 1, SIMILAR):
            raise UserError(f"{variable} is no setting. hint: did you mean {PREFIX}{close[0]}?")


def run_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of prepare.py and train.py: without what could change a run's meaning.

    Set here: unbuffered output, so that run.log is complete after a kill; UTF-8 with escapes, so
    that no text can stop a print; one seed for the order of sets, so that a run repeats itself.
    """
    kept = {
        name: value
        for name, value in clean_git_environment(environment).items()
        if not name.startswith(("TORCHELASTIC_", "PYTHON"))
        and name not in RANK_VARIABLES
        or name in KEPT_PYTHON
    }
    return kept | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:backslashreplace",
        "PYTHONHASHSEED": "0",
    }


def choice_file(checkout: Path) -> Path:
    """Where `prepare.py --data` notes the data set that this checkout trains on."""
    return checkout / ".autoresearch" / "data"


def chosen_data(checkout: Path) -> str | None:
    """The data set noted for a checkout; a worktree inside a checkout has the same one."""
    for folder in (checkout, *checkout.parents):
        if choice_file(folder).is_file():
            return choice_file(folder).read_text().strip() or None
    return None
