"""The settings of a session: those of its baseline, for all of its runs.

A session is a segment of the log. Its first row, the baseline, has the budget, seed, data, profile,
device and fixed files that all later runs of it must have.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.log import comparison_key, current, number
from harness.settings import read_setting, user_path
from harness.verdict import kept

# An old-style train.py has a clock of its own. That is no fault where all runs of a session do so.
CLOCKLESS = "the clock of prepare.py was not used"
OUTSIDE_CLOCK = "outside the clock"  # ends of the marks that follow from it
# A mark that names a limit of the evaluator's check and no fault of the run.
LIMIT_OF_CHECK = "logits repeat only to"
# setting, its name in a row, its name in what prepare.py resolved
SETTINGS = (
    ("TIME_BUDGET", "budget", "time_budget"),
    ("SEED", "seed", "seed"),
    ("PROFILE", "profile", "profile"),
    ("DATA", "data", "data"),
)


class OtherSettings(Exception):
    """A run would have other settings than its session; it did not start."""


@dataclass(frozen=True)
class Session:
    """The session that a baseline's row began."""

    baseline: dict

    @classmethod
    def of(cls, rows: list[dict]) -> "Session | None":
        """The present session of a log.

        None if there is none, or if another tool or an older version began it: then it is not
        known what its scores can be compared with.
        """
        first = next(iter(kept(current(rows))), None)
        needed = ("data_id", "budget", "code")
        return cls(first) if first and all(first.get(name) for name in needed) else None

    @property
    def comparison(self) -> tuple:
        """What makes two scores comparable."""
        return comparison_key(self.baseline)

    @property
    def seed(self) -> int:
        """The seed of the baseline; repeats use the numbers after it."""
        return int(number(self.baseline.get("seed")))

    @property
    def place(self) -> str | None:
        """The label of the place that it is measured at, see harness.place; None: this machine."""
        return self.baseline.get("on")

    @property
    def clockless(self) -> bool:
        """Whether the baseline trained by a clock of its own; then all runs may."""
        return CLOCKLESS in (self.baseline.get("marks") or "")

    def environment(self) -> dict[str, str]:
        """The variables AUTORESEARCH_* that give a run the settings of this session."""
        values = {name: self.baseline.get(column) for name, column, _ in SETTINGS}
        return {
            f"AUTORESEARCH_{name}": str(value)
            for name, value in values.items()
            if value is not None
        }

    def conflicts(self, root: Path, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Variables that are set to another value than the session has, as texts."""
        found = []
        for name, column, _ in SETTINGS:
            value, ours = read_setting(name, environment), self.baseline.get(column)
            if value is None or ours is None or value == ours:
                continue
            if name == "DATA" and (root / user_path(value)).resolve() == Path(ours):
                continue
            found.append(f"AUTORESEARCH_{name} is {value}, the session has {ours}")
        return found

    def check(self, settings: Mapping) -> None:
        """Raise OtherSettings unless the settings that prepare.py resolved are the session's."""
        wanted = {resolved: self.baseline.get(column) for _, column, resolved in SETTINGS}
        wanted |= {name: self.baseline.get(name) for name in ("data_id", "fixed")}
        wanted["device"] = self.baseline.get("device_type")
        del wanted["seed"]  # repeats have seeds of their own
        check_equal(wanted, settings)

    def check_place(self, place: str | None) -> None:
        """Raise OtherSettings unless a run is for the place that the session is measured at."""
        if place != self.place:
            option = "add '--on ray'" if self.place else "drop '--on ray'"
            raise OtherSettings(
                f"this run is for {place or 'this machine'}, the session is measured on "
                f"{self.place or 'this machine'}: their scores can't be compared. hint: {option} "
                "(and its --cpus), or begin a new session with --new-session"
            )

    def check_record(self, record: Mapping) -> None:
        """Raise OtherSettings unless the evaluator's record is of this session's data and device.

        The record names the GPU, which the settings do not know.
        """
        names = ("data_id", "budget", "device", "profile", "fixed")
        check_equal({name: self.baseline.get(name) for name in names}, record)

    def summary(self) -> str:
        """The settings in one line."""
        row = self.baseline
        parts = [f"budget {row['budget']:g} s", f"seed {row.get('seed')}"]
        parts += [f"{name} {row[name]}" for name in ("data", "profile", "device") if row.get(name)]
        return ", ".join(parts)


def check_equal(wanted: Mapping, found: Mapping) -> None:
    """Raise OtherSettings when a value that both have differs."""
    for name, value in wanted.items():
        other = found.get(name)
        if value is not None and other is not None and other != value:
            raise OtherSettings(
                f"{name} is {other}, the session has {value}: their scores can't be compared. "
                "hint: restore it, or begin a new session with --new-session"
            )


def serious_marks(marks: str, clockless: bool) -> list[str]:
    """The marks of a record that make its score no fair one.

    Args:
        clockless: the session's baseline has the mark CLOCKLESS, so its runs may have it too.
    """
    found = [mark.strip() for mark in marks.split(";")]
    return [
        mark
        for mark in found
        if mark
        and not mark.startswith(LIMIT_OF_CHECK)
        and not (clockless and (mark == CLOCKLESS or mark.endswith(OUTSIDE_CLOCK)))
    ]
