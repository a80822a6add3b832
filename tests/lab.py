"""A repository with the real harness and a stand-in train.py, whose score a test chooses."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from helpers import ROOT, clean_environment, compiled_harness, git, wait_until

from harness.knobs import find_knobs, with_values

# prepare.py without torch: the settings, and nothing to prepare. FAKE_* stand for what a machine
# or the data may do; they reach it through the environment, as a user's variables would.
PREPARE = """
import json, os, sys
from pathlib import Path
from harness.fixed import fixed_hash
FAKE = os.environ.get
SETTINGS = {
    "profile": FAKE("AUTORESEARCH_PROFILE", "tiny"), "data": FAKE("AUTORESEARCH_DATA", "embedded"),
    "data_id": FAKE("FAKE_DATA", "0123456789ab"), "device": FAKE("FAKE_DEVICE", "cpu").split()[0],
    "time_budget": float(FAKE("AUTORESEARCH_TIME_BUDGET", 300)),
    "seed": int(FAKE("AUTORESEARCH_SEED", 1337)), "cache": "", "eval_version": 1,
    "fixed": fixed_hash(Path(__file__).resolve().parent),
}
if __name__ == "__main__" and "--settings-file" in sys.argv:
    with open(sys.argv[sys.argv.index("--settings-file") + 1], "w") as file:
        json.dump(SETTINGS, file)
"""

# Lines of a test go in for #BODY. NOISE gives each seed its own score; GATE holds the run.
TRAIN = """
import json, os, sys, time
from prepare import SETTINGS
SCORE = 1.0
NOISE = [0.0]

def main():
    seed = SETTINGS["seed"]
    score = SCORE + NOISE[(seed - 1337) % len(NOISE)] + float(os.environ.get("FAKE_LOSS", 0))
    folder = os.environ["AUTORESEARCH_RUN_DIR"]
    record = {"run_id": os.environ["AUTORESEARCH_RUN_ID"], "val_bpb": score, "marks": "",
              "budget": SETTINGS["time_budget"]}
    record |= {name: SETTINGS[name] for name in ("seed", "data_id", "profile", "fixed")}
    record["device"] = os.environ.get("FAKE_DEVICE", "cpu")  # a GPU's name, not its kind only
    if os.environ.get("GATE"):
        with open(os.path.join(folder, "started"), "w") as file:
            file.write(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.02)
    #BODY
    with open(os.path.join(folder, "eval.jsonl"), "w") as file:
        file.write(json.dumps(record) + "\\n")
    print(f"METRIC val_bpb={score:.6f}\\nMETRIC peak_memory_mb=2048.0\\nMETRIC num_steps=7")

if __name__ == "__main__":
    main()
"""

QUICK_TRY = ("try", "--once", "--repeats", "1")  # one run for the verdict, none for the noise


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both outputs."""
        return self.out + self.err


class Lab:
    """A checkout on an experiment branch, and the commands in it.

    top: the folder that becomes the repository, if not root; original: a checkout to copy.
    """

    def __init__(self, root: Path, top: Path | None = None, original: Path | None = None):
        self.root = root
        self.train = root / "train.py"
        self.log = root / "autoresearch.jsonl"
        self.runs = root / ".autoresearch" / "runs"
        if original:
            shutil.copytree(original, root, symlinks=True)
        else:
            self.make(top or root)

    def make(self, top: Path) -> None:
        """Make the files and the first commit."""
        root = self.root
        root.mkdir(parents=True)
        for name in ("autoresearch.sh", "pyproject.toml", ".gitignore", ".gitattributes"):
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(compiled_harness(), root / "harness")
        (root / "prepare.py").write_text(PREPARE)
        (root / "README.md").write_text("about\n")
        git(top, "init", "-q", "-b", "autoresearch/test")
        self.git("config", "user.name", "A User")
        self.git("config", "user.email", "user@example.com")
        self.edit()
        self.git("add", "-A")
        self.git("commit", "-qm", "start")

    def git(self, *args: str) -> str:
        """What git prints in the checkout."""
        return git(self.root, *args)

    def edit(self, score: float = 1.0, body: str = "", noise: list[float] | None = None) -> None:
        """Write a train.py with this score."""
        code = TRAIN.replace("SCORE = 1.0", f"SCORE = {score}")
        code = code.replace("NOISE = [0.0]", f"NOISE = {noise or [0.0]}")
        self.train.write_text(code.replace("#BODY", body.replace("\n", "\n    ")))

    def use_real_files(self) -> None:
        """Commit the real prepare.py, and a real train.py whose model is quick on one core."""
        shutil.copy(ROOT / "prepare.py", self.root / "prepare.py")
        source = (ROOT / "train.py").read_bytes()
        knobs = find_knobs(source, "tiny")
        small = {"COMPILE": "False", "DEPTH": "2", "TOTAL_BATCH_SIZE": "2**11"}
        self.train.write_bytes(with_values(source, {knobs[name]: small[name] for name in small}))
        self.git("commit", "-qam", "the real ones")

    def start(self, *args: str, script: tuple[str, ...] = ("-m", "harness"), **environment: str):
        """Start a command; ends with the test."""
        return subprocess.Popen(
            [sys.executable, *script, *args],
            cwd=self.root,
            env=clean_environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(self, *args: str, code: int | None = 0, **environment: str) -> Done:
        """Run a command, which must end with this exit code (None: any)."""
        done = finished(self.start(*args, **environment))
        assert code is None or done.code == code, done.text
        return done

    def attempt(self, description: str, *args: str, code: int = 0, **environment: str) -> str:
        """`try` with one run each, which must end with this code; returns both outputs."""
        return self.call(*QUICK_TRY, description, *args, code=code, **environment).text

    def rows(self) -> list[dict]:
        """The rows of the log, read by the strict reader."""
        return read_strictly(self.log) if self.log.exists() else []

    def column(self, name: str) -> list:
        """One value of each row."""
        return [row[name] for row in self.rows()]

    def score_at(self, revision: str = "HEAD") -> float:
        """The score that a commit's train.py has."""
        return score_in(self.git("show", f"{revision}:./train.py"))

    def subjects(self) -> list[str]:
        """What `git log` of the branch says, newest first."""
        return self.git("log", "--format=%s").splitlines()

    def assert_settled(self, edited: bool = False) -> None:
        """Nothing is open, no worktree is left; train.py differs from HEAD only if edited."""
        assert not list(self.runs.glob("open-*"))
        assert len(self.git("worktree", "list").splitlines()) == 1
        assert self.git("status", "--porcelain") == ("M train.py" if edited else "")

    def hold(self, score: float, gate: Path, *args: str, first_line: str = "", **environment: str):
        """Start a run that waits for the file `gate`; returns when its train.py is running."""
        self.edit(score)
        self.train.write_text(first_line + self.train.read_text())
        before = set(self.runs.glob("*/started"))
        process = self.start(*QUICK_TRY, f"score {score}", *args, GATE=str(gate), **environment)
        wait_until(lambda: process.poll() is not None or set(self.runs.glob("*/started")) - before)
        assert process.poll() is None, process.communicate()
        return process

    def living(self) -> list[str]:
        """Process numbers that still run a train.py of this checkout."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                inside = os.readlink(process / "cwd").startswith(str(self.root))
                words = (process / "cmdline").read_bytes().split(b"\0")
                found += [process.name] * (inside and b"train.py" in words)
        return found

    def add_hook(self, name: str, script: str) -> None:
        """Install a git hook."""
        hook = self.root / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text("#!/bin/sh\n" + script)
        hook.chmod(0o755)


def score_in(code: str) -> float:
    """The score in the text of a stand-in train.py."""
    return next(float(line[8:]) for line in code.splitlines() if line.startswith("SCORE ="))


def finished(process: subprocess.Popen, seconds: float = 120) -> Done:
    """Wait for a command."""
    out, err = process.communicate(timeout=seconds)
    return Done(process.returncode, out, err)


def killed(process: subprocess.Popen) -> None:
    """kill -9, as a power user or the kernel does it."""
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


# ---- logs ----


def read_strictly(path: Path) -> list[dict]:
    """The log with the rules of the strictest tools of this family: one wrong line is an error."""

    def no_twins(pairs):
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    def no_nan(word):
        raise AssertionError(word)

    text = path.read_bytes().decode()
    assert text.endswith("\n")
    lines = [
        json.loads(line, object_pairs_hook=no_twins, parse_constant=no_nan)
        for line in text[:-1].split("\n")
    ]
    rows, segment = [], -1
    for line, before in zip(lines, [{}, *lines], strict=False):
        if line.get("type") == "config":
            assert before.get("type") != "config"
            assert_config(line)
            segment += 1
            continue
        assert_row(line, rows, segment)
        if before.get("type") == "config":
            assert line["status"] == "keep" and line["metric"] > 0
        rows.append(line)
    return rows


def assert_config(line: dict) -> None:
    """A config line as the other tools want it."""
    assert line["metricName"] == "val_bpb" and line["metricUnit"] and line["name"]
    assert line["bestDirection"] == "lower"


def assert_row(line: dict, rows: list[dict], segment: int) -> None:
    """A row as the other tools want it, after these rows."""
    order = ["run", "commit", "metric", "metrics", "status", "description", "timestamp"]
    assert list(line)[:10] == [*order, "segment", "confidence", "asi"]
    assert segment >= 0 and "type" not in line and not {"op", "parent"} & set(line)
    assert line["run"] == len(rows) + 1 and line["segment"] == segment
    assert len(line["commit"]) == 7 and int(line["commit"], 16) >= 0
    assert math.isfinite(line["metric"]) and line["metric"] >= 0
    assert (line["metric"] == 0) == (line["status"] == "crash")
    assert all(math.isfinite(value) for value in line["metrics"].values())
    assert not rows or line["metrics"].keys() == rows[0]["metrics"].keys()
    assert line["status"] in ("keep", "discard", "crash", "checks_failed")
    assert abs(line["timestamp"] / 1000 - time.time()) < 86400
    assert line["confidence"] is None or math.isfinite(line["confidence"])
    assert isinstance(line["asi"], dict) and isinstance(line["description"], str)


def many_rows(lab: Lab, count: int) -> None:
    """A log of `count` rows, made from the first real row that is there."""
    config, line = lab.log.read_text().splitlines()[:2]
    row = json.loads(line)
    statuses = ["discard", "keep", "crash", "discard", "checks_failed"]
    with open(lab.log, "w") as log:
        log.write(config + "\n")
        for n in range(count):
            status = statuses[n % 5] if n else "keep"
            score = 0 if status == "crash" else 1.0 - 0.0003 * n + 0.01 * (status != "keep")
            row |= {"run": n + 1, "status": status, "metric": round(score, 6)}
            row |= {
                "description": f"idea {n} " + "long " * 40,
                "id": f"{n:08x}",
                "code": f"{n:040x}",
            }
            row |= {"asi": {"learned": "much " * 30}, "timestamp": row["timestamp"] + n}
            log.write(json.dumps(row) + "\n")
