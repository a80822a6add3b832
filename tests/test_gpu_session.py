"""The session on a GPU (tests/gpu_session.py), run on the CPU, and with parts that go wrong."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import ROOT, clean_environment, is_alive

# A session of its own: each part goes wrong in another way, except the last one.
DRILL = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, TESTS)
from gpu_runner import Part, Skipped, main

def raises(notes):
    notes.add(reached=1.23456)
    raise ValueError("no luck")

def exits(notes):
    raise SystemExit(4)

def crashes(notes):
    notes.add(reached="half")
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(notes):
    notes.add(pid=os.getpid())
    time.sleep(600)

def cannot(notes):
    raise Skipped("needs a unicorn")

def works(notes):
    notes.add(rows=[{"ms": 1 / 3, "kernel": "mm"}, {"ms": 12.0, "kernel": "add"}])

limits = {raises: 30, exits: 30, crashes: 30, hangs: 1.5, cannot: 30, works: 30}
parts = [Part(function.__name__, function, limit) for function, limit in limits.items()]
sys.exit(main(parts, Path(__file__), "a drill"))
"""


@dataclass
class Session:
    """What a session printed and wrote."""

    code: int
    out: str
    parts: dict  # of the JSON file
    folder: Path


def run_session(command: list[str], folder: Path) -> Session:
    done = subprocess.run(
        [sys.executable, *command, "--out", str(folder)], cwd=ROOT, capture_output=True, text=True,
        env=clean_environment(OMP_NUM_THREADS="1"), timeout=400,
    )  # fmt: skip
    path = folder / "gpu_session.json"
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    return Session(done.returncode, done.stdout, parts, folder)


@pytest.fixture(scope="module")
def drill_script(tmp_path_factory) -> Path:
    """The drill; a part is started by the path of the script alone, so it finds its modules."""
    path = tmp_path_factory.mktemp("drill") / "drill.py"
    path.write_text(DRILL.replace("TESTS", repr(str(ROOT / "tests"))))
    return path


@pytest.fixture(scope="module")
def drill(drill_script, tmp_path_factory) -> Session:
    return run_session([str(drill_script)], tmp_path_factory.mktemp("out"))


def test_a_session_runs_to_its_end_whatever_its_parts_do(drill):
    assert drill.code == 0
    states = {name: part["state"] for name, part in drill.parts.items()}
    assert states == {
        "raises": "failed",
        "exits": "failed",
        "crashes": "failed",
        "hangs": "timeout",
        "cannot": "skipped",
        "works": "ok",
    }


def test_an_error_is_kept_with_what_was_noted_before_it(drill):
    raises = drill.parts["raises"]
    assert raises["error"] == "ValueError: no luck"
    assert raises["values"] == {"reached": 1.235}
    assert raises["log"][-1] == "ValueError: no luck"
    assert drill.parts["exits"]["error"] == "SystemExit: 4"
    assert drill.parts["crashes"]["error"] == "the process ended with exit code 139"
    assert drill.parts["crashes"]["values"] == {"reached": "half"}
    assert drill.parts["cannot"]["error"] == "needs a unicorn"


def test_a_part_that_exceeds_its_limit_is_ended(drill):
    hangs = drill.parts["hangs"]
    assert hangs["error"] == "still running after 2 s"
    assert not is_alive(hangs["values"]["pid"])


def test_the_table_is_printed_and_saved(drill):
    assert drill.out == (drill.folder / "gpu_session.txt").read_text()
    assert "works       ok " in drill.out
    assert "        ms  kernel\n    0.3333  mm\n      12.0  add\n" in drill.out
    assert "======== hangs" in (drill.folder / "gpu_session.log").read_text()


def test_a_part_is_not_started_when_no_time_is_left(drill_script, tmp_path):
    late = run_session([str(drill_script), "--only", "works", "--seconds", "4"], tmp_path)
    assert late.code == 0
    assert late.parts["works"]["state"] == "skipped"
    assert late.parts["works"]["error"] == "no time left"


# What each part must have noted on a CPU
KEYS = {
    "versions": {"python", "torch", "kernels", "driver", "cuda", "device", "precision"},
    "data": {"tokens", "documents", "fa3"},
    "full": {"compile_and_two_steps_seconds", "tokens_per_second", "mfu_percent", "val_bpb"},
    "memory": {"rows_wanted", "rows_at_once", "peak_gib"},
    "profile": {"step_ms", "step_ms_without_loader", "by_kernel"},
    "resume": {"steps_done_twice", "largest_difference_of_loss", "checkpoint_gib"},
    "plain": {"trial", "speed"},
    "float16": {"first_loss", "last_loss", "loss_scale"},
}


@pytest.mark.slow
def test_the_session_on_a_cpu(tmp_path):
    names = [*KEYS, "flash"]
    session = run_session(["tests/gpu_session.py", "--only", *names], tmp_path)
    assert session.code == 0
    errors = {name: part["log"] for name, part in session.parts.items() if part["log"]}
    assert not errors
    assert session.parts["flash"]["error"] == "needs an NVIDIA GPU"
    for name, keys in KEYS.items():
        assert session.parts[name]["state"] == "ok"
        assert keys <= set(session.parts[name]["values"])
    full = session.parts["full"]["values"]
    assert full["last_loss"] < full["first_loss"]
    assert session.parts["resume"]["values"]["steps_done_twice"]
    assert [row["window"] for row in session.parts["plain"]["values"]["speed"]] == [32, 256]
