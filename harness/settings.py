"""The environment variables AUTORESEARCH_*: one parser, one range and one message for each.

Defaults are not here: those that decide the number stand in prepare.py.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.common import UserError

PREFIX = "AUTORESEARCH_"


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
