"""Runs the parts of tests/gpu_session.py one by one, each in a process with a time limit.

A crash of CUDA, a hang or an error costs that part only, and what the part has noted until then is
kept. This process imports no torch.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.common import write_atomic  # noqa: E402
from harness.process import call, raise_on_signals, run_variables  # noqa: E402
from harness.settings import PREFIX, run_environment  # noqa: E402

SHORTEST = 5  # seconds: with less left, a part is not started
LOG_LINES = 30  # of a part that failed, in the JSON file


class Notes:
    """What a part has found so far, in a file: it is there too when the part is killed."""

    def __init__(self, path: Path):
        self.path = path
        self.work = path.parent  # a folder that all parts share
        self.values: dict = {}
        self.error = ""

    def add(self, **values) -> None:
        self.values |= {name: rounded(value) for name, value in values.items()}
        self.write()

    def write(self) -> None:
        content = {"error": self.error, "values": self.values}
        write_atomic(self.path, json.dumps(content).encode())


def rounded(value):
    """Floats to four significant digits, in lists and dicts too; NaN and infinity as text."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


class Skipped(Exception):
    """Raised by a part that cannot be done on this machine: why."""


@dataclass(frozen=True)
class Part:
    """A part of the session. The function raises what went wrong."""

    name: str
    function: Callable[[Notes], None]
    limit: float  # seconds


@dataclass
class Result:
    """How a part ended."""

    state: str  # ok, failed, timeout or skipped
    seconds: float = 0.0
    limit: float = 0.0
    error: str = ""
    values: dict = field(default_factory=dict)
    log: list[str] = field(default_factory=list)  # the last lines of a part that failed


# ---------------------------------------------------------------------------- in the part's process


def do_part(part: Part, work: Path) -> int:
    """Run a part in this process. Returns its exit code."""
    notes = Notes(work / f"{part.name}.json")
    notes.write()
    code = 0
    try:
        part.function(notes)
    except Skipped as reason:
        notes.error, code = str(reason), 77  # as automake's tests say it
    except BaseException as error:  # SystemExit too: train.py ends with it
        traceback.print_exc()
        text = str(error).strip().partition("\n")[0]
        notes.error, code = f"{type(error).__name__}: {text[:300]}", 1
    notes.write()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


# ---------------------------------------------------------------------------- in the session


def run_part(part: Part, script: Path, work: Path, limit: float) -> Result:
    """Run a part in a process of its own and kill it after `limit` seconds."""
    log = work / f"{part.name}.log"
    kept = {name: v for name, v in os.environ.items() if not name.startswith(PREFIX)}
    environment = run_environment(kept) | run_variables(f"gpu-session-{os.getpid()}", work)
    environment |= {"AUTORESEARCH_CACHE": str(work / "cache"), "AUTORESEARCH_PROFILE": "full"}
    environment |= {"AUTORESEARCH_DATA": "embedded"}
    command = [sys.executable, str(script), "--part", part.name, "--work", str(work)]
    ended = call(command, ROOT, [environment], [log], limit)
    lines = log.read_text(errors="replace").splitlines()
    try:
        found = json.loads((work / f"{part.name}.json").read_text())
    except FileNotFoundError:
        found = {"error": "", "values": {}}
    states = {0: "ok", 77: "skipped"}
    result = Result(states.get(ended.code, "failed"), ended.seconds, limit, **found)
    if ended.timed_out:
        result.state = "timeout"
        result.error = f"still running after {limit:.0f} s"
    elif result.state == "failed" and not result.error:
        result.error = f"the process ended with exit code {ended.code}"  # 139: segmentation fault
    if result.state in ("failed", "timeout"):
        result.log = lines[-LOG_LINES:]
    return result


def run_all(parts: Sequence[Part], script: Path, out: Path, seconds: float) -> dict[str, Result]:
    """Run the parts in order; after each, everything known so far is written to `out`."""
    begin = time.monotonic()
    results = {}
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_session.log").write_bytes(b"")
    work = Path(tempfile.mkdtemp(prefix="gpu_session_"))
    try:
        for part in parts:
            left = seconds - (time.monotonic() - begin)
            if left < SHORTEST:
                results[part.name] = Result("skipped", error="no time left")
            else:
                print(f"{part.name} ...", file=sys.stderr, flush=True)
                results[part.name] = run_part(part, script, work, min(part.limit, left))
                with open(out / "gpu_session.log", "ab") as log:
                    log.write(f"\n======== {part.name}\n".encode())
                    log.write((work / f"{part.name}.log").read_bytes())
            save(results, out, time.monotonic() - begin)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return results


def save(results: dict[str, Result], out: Path, seconds: float) -> None:
    """Write gpu_session.json and gpu_session.txt."""
    parts = {name: asdict(result) for name, result in results.items()}
    content = {"seconds": round(seconds, 1), "parts": parts}
    write_atomic(out / "gpu_session.json", json.dumps(content, indent=1).encode())
    write_atomic(out / "gpu_session.txt", table(results, seconds).encode())


# ---------------------------------------------------------------------------- the table


def columns(rows: list[dict]) -> list[str]:
    """Rows with the same keys as lines: numbers to the right, the last column to the left."""
    names = list(rows[0])
    cells = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return [
        "  ".join(text.rjust(width) for text, width in zip(line[:-1], widths, strict=False))
        + f"  {line[-1]}"
        for line in cells
    ]


def table(results: dict[str, Result], seconds: float) -> str:
    """What a reader wants to see: how each part ended, then what each one found."""
    lines = [f"{'part':<12}{'state':<9}{'seconds':>8}{'limit':>7}  error"]
    for name, result in results.items():
        numbers = f"{result.seconds:>8.1f}{result.limit:>7.0f}"
        lines.append(f"{name:<12}{result.state:<9}{numbers}  {result.error}".rstrip())
    lines.append(f"{'together':<21}{seconds:>8.1f}")
    for name, result in results.items():
        if not result.values:
            continue
        lines += ["", name]
        for key, value in result.values.items():
            is_table = isinstance(value, list) and value and isinstance(value[0], dict)
            if is_table:
                lines += [f"  {key}", *(f"    {line}" for line in columns(value))]
            else:
                shown = ", ".join(map(str, value)) if isinstance(value, list) else value
                lines.append(f"  {key:<36}{shown}")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------- command line


def main(parts: Sequence[Part], script: Path, description: str) -> int:
    """The command line of a session. script: the file that calls this, started again for a part."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in parts]
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / ".autoresearch/gpu", help="folder of the results")
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    add("--seconds", type=float, default=470, help="no part runs longer than this after the start")
    add("--part", choices=names, help=argparse.SUPPRESS)
    add("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return do_part(parts[names.index(args.part)], args.work)
    raise_on_signals()
    chosen = [part for part in parts if part.name in args.only]
    try:
        run_all(chosen, script, args.out, args.seconds)
    except KeyboardInterrupt:
        print(f"interrupted; the parts done so far are in {args.out}", file=sys.stderr)
        return 130
    print((args.out / "gpu_session.txt").read_text(), end="")
    print(f"written to {args.out}", file=sys.stderr)
    return 0
