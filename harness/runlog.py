"""Reading run.log, whatever a run wrote into it: lines of any length, control codes, no end."""

import re
from collections.abc import Iterator
from pathlib import Path

LINE = 4096  # characters of a line that are read; the rest of it is passed over
SHOWN = 300  # characters of a line that are shown
TAIL = 50  # lines that are shown of a failed run
METRIC = re.compile(r"METRIC ([a-z_][a-z0-9_]*)=(-?[0-9]+(?:\.[0-9]+)?)")
OLD_METRIC = re.compile(r"([A-Za-z_0-9]+): +(-?[0-9]+(?:\.[0-9]+)?)")


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file without their ends, each cut to LINE bytes; none if it is missing."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        while line := file.readline(LINE):
            yield line.rstrip(b"\n").decode(errors="replace")
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)


def shown(line: str) -> str:
    """A line as a terminal may get it: the last state of a progress bar, cut, no control codes."""
    states = [state for state in line.split("\r") if state.strip()] or [""]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", states[-1])
    plain = "".join(c if c.isprintable() or c == "\t" else "?" for c in plain)
    if len(plain) <= SHOWN:
        return plain
    return f"{plain[:SHOWN]} ... (the line is longer)"


def last_lines(path: Path, count: int = TAIL) -> list[str]:
    """The last lines of a file, each as `shown`; of a very long last line its end."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - count * LINE))
        text = file.read().decode(errors="replace")
    return [shown(line) for line in text.removesuffix("\n").split("\n")[-count:]] if text else []


def last_words(path: Path) -> str:
    """The last line that says something, or "" when there is none."""
    for line in reversed(last_lines(path)):
        if line.strip():
            return line.strip()
    return ""


def metric_lines(path: Path) -> list[tuple[str, str]]:
    """(name, number as text) of each METRIC line.

    A train.py of karpathy/autoresearch prints none, only a block `name: number` after a line `---`.
    Where there is no METRIC line, the lines of that block count, with names in lower case.
    """
    found, block, in_block = [], [], False
    for line in read_lines(path):
        if match := METRIC.fullmatch(line):
            found.append((match[1], match[2]))
        elif line == "---":
            in_block = True
        elif in_block and (match := OLD_METRIC.fullmatch(line)):
            block.append((match[1].lower(), match[2]))
    return found or block
