"""Checkpoints: a killed run goes on as if nothing had happened; previews and samples."""

import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from test_devices import read_lines

import prepare
import train
from harness import checkpoint

pytestmark = pytest.mark.slow
STEPS, KILLED = 70, 13


@dataclass
class Result:
    """What tests/ranks.py did."""

    code: int
    out: str
    err: str
    losses: dict[int, float]  # by step
    record: dict | None  # of the evaluator


def train_in(folder: Path, env: dict, *args, world: int = 1, **changes) -> Result:
    """Run tests/ranks.py in that folder: the checkpoints of earlier runs are there."""
    run_dir = folder / f"run{len(list(folder.iterdir()))}"
    run_dir.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, *(launch if world > 1 else []), str(ROOT / "tests/ranks.py")]
    done = subprocess.run(
        [*command, *map(str, args)], cwd=folder, capture_output=True, text=True,
        env=env | {"AUTORESEARCH_RUN_DIR": str(run_dir)} | changes,
    )  # fmt: skip
    losses = {r["step"]: r["loss"] for r in read_lines(run_dir / "steps.jsonl")}
    record = next(iter(read_lines(run_dir / "eval.jsonl")), None)
    return Result(done.returncode, done.stdout, done.stderr, losses, record)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoints/*/*"))


@dataclass
class Runs:
    folder: Path
    uninterrupted: Result
    killed: Result
    kept: list[str]  # checkpoints of the killed run
    resumed: Result


@pytest.fixture(scope="module")
def runs(few_rows, tmp_path_factory) -> Runs:
    """An uninterrupted run, one killed at step KILLED, and how that one went on."""
    folder = tmp_path_factory.mktemp("resume")
    uninterrupted = train_in(folder, few_rows, STEPS, "kill:none")
    assert uninterrupted.code == 0, uninterrupted.err
    killed = train_in(folder, few_rows, STEPS, f"kill:{KILLED}", "--save")
    kept = checkpoints(folder)
    (next(folder.glob("checkpoints/*")) / "00000099.pt.part").write_bytes(b"killed at writing")
    shutil.copytree(folder / "checkpoints", folder / "as_killed")
    resumed = train_in(
        folder, few_rows, STEPS, "kill:none", "--resume", "--sample", 3, PYTHONIOENCODING="ascii"
    )
    return Runs(folder, uninterrupted, killed, kept, resumed)


@pytest.fixture
def killed_run(runs, tmp_path) -> Path:
    """A folder with the checkpoints of the killed run."""
    shutil.copytree(runs.folder / "as_killed", tmp_path / "checkpoints")
    return tmp_path


def test_a_killed_run_goes_on_with_the_same_losses(runs):
    assert runs.killed.code == -9
    assert runs.kept == ["00000006.pt", "00000011.pt"]
    resumed, whole = runs.resumed, runs.uninterrupted
    assert resumed.code == 0, resumed.err
    assert "step 11" in resumed.out
    assert min(resumed.losses) == 12
    assert max(resumed.losses) == STEPS
    assert len(resumed.losses) >= 50
    assert resumed.losses == {step: whole.losses[step] for step in resumed.losses}  # every bit
    assert resumed.record["val_bpb"] == whole.record["val_bpb"]
    assert "resumed after" in resumed.record["marks"]
    assert "resumed" not in whole.record["marks"]


def test_checkpoints_are_plain_data_and_the_last_is_the_end(runs):
    names = [name for name in checkpoints(runs.folder) if name.endswith(".pt")]
    assert names[-1] == f"{STEPS:08d}.pt"
    assert len(names) == 2
    path = next(runs.folder.glob(f"checkpoints/*/{names[-1]}"))
    state = torch.load(path, weights_only=True)
    assert state["step"] == STEPS
    assert state["finished"]
    assert all(t.isfinite().all() for t in state["parts"]["model"].values())


def test_previews_are_shown(runs):
    previews = re.findall(r"preview    bits per byte: (.*)", runs.uninterrupted.out)
    assert len(previews) == 3
    assert previews[-1].count(",") == 2
    values = [float(entry.split()[-1]) for entry in previews[-1].split(", ")]
    assert values[0] > values[-1] > 0
    assert 0.7 < values[-1] / runs.uninterrupted.record["val_bpb"] < 1.4  # five rows, other text


def test_samples_come_after_the_score_and_look_like_no_metric(runs):
    out = runs.resumed.out
    assert out.count("sample\n  | ") == 3
    assert out.count(" >>> ") >= 3
    assert len(re.findall(r"^METRIC val_bpb=", out, re.M)) == 1
    assert out.index("METRIC num_steps=") < out.index("sample\n")


def test_a_finished_run_is_not_finished_twice(runs, few_rows):
    again = train_in(runs.folder, few_rows, STEPS, "kill:none", "--resume")
    assert again.code == 2
    assert "has finished" in again.err
    assert "METRIC" not in again.out
    assert again.record is None


def test_an_earlier_checkpoint_can_be_named(killed_run, few_rows):
    path = next(killed_run.glob("checkpoints/*/00000006.pt"))
    result = train_in(killed_run, few_rows, STEPS, "kill:7", "--resume", path)
    assert result.code == -9
    assert f"{path}, step 6" in result.out


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(killed_run, few_rows):
    result = train_in(killed_run, few_rows, STEPS, "kill:none", "--resume", AUTORESEARCH_SEED="7")
    assert result.code == 2
    assert "SEED 1337, not 7" in result.err
    assert "hint:" in result.err


def test_an_edited_knob_is_named_and_refused(killed_run, few_rows, tmp_path):
    source = (ROOT / "tests/ranks.py").read_text()
    edited = tmp_path / "edited.py"
    edited.write_text(
        source.replace('"MATRIX_LR": 0.005', '"MATRIX_LR": 0.0').replace(
            "Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})"
        )
    )
    command = [sys.executable, str(edited), str(STEPS), "kill:none", "--resume"]
    done = subprocess.run(command, cwd=killed_run, capture_output=True, text=True, env=few_rows)
    assert done.returncode == 2
    assert "MATRIX_LR 0.005, not 0.0" in done.stderr


@pytest.mark.parametrize("damage", ["empty", "truncated", "other"])
def test_a_damaged_checkpoint_is_skipped_by_name(killed_run, few_rows, damage):
    path = next(killed_run.glob("checkpoints/*/00000011.pt"))
    data = path.read_bytes()
    damaged = {"empty": b"", "truncated": data[: len(data) // 2], "other": b"x" * 99}
    path.write_bytes(damaged[damage])
    result = train_in(killed_run, few_rows, STEPS, "kill:7", "--resume")
    assert result.code == -9
    assert re.search(r"skipped .*00000011.pt is missing or damaged", result.out)
    assert re.search(r"resumed .*00000006.pt, step 6", result.out)


def test_no_checkpoint_is_an_error_with_a_hint(few_rows, tmp_path):
    result = train_in(tmp_path, few_rows, STEPS, "kill:none", "--resume")
    assert result.code == 2
    assert "no checkpoint in" in result.err
    assert "hint: 'train.py --save'" in result.err


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(few_rows, tmp_path):
    (tmp_path / "checkpoints").symlink_to("/dev/full")  # no folder can be made there
    result = train_in(tmp_path, few_rows, 6, "kill:none", "--save")
    assert result.code == 0, result.err
    assert "training goes on" in result.err
    assert result.record


def test_a_checkpoint_of_other_code_with_the_same_knobs_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "load_manifest", lambda cache: {"data_id": "0123456789ab"})
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    part, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 4)
    run = SimpleNamespace(step=1, elapsed=2.0, model=part, optimizer=part, scaler=scaler, log=part)
    saver = checkpoint.Saver(train, enabled=True)
    saver.save(run)
    run.model = other
    run.device = torch.device("cpu")
    with pytest.raises(prepare.UserError, match="does not fit the model of this train.py.*hint"):
        saver.resume(run, "newest")


def test_a_checkpoint_larger_than_the_disk_is_removed(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "load_manifest", lambda cache: {"data_id": "0123456789ab"})
    part = torch.nn.Linear(300, 300)  # 360 kB
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = SimpleNamespace(step=1, elapsed=2.0, model=part, optimizer=part, scaler=scaler, log=part)
    saver = checkpoint.Saver(train, enabled=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        saver.save(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "training goes on" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    for run.step in range(2, 6):  # there is room again
        saver.save(run)
    assert checkpoints(tmp_path) == ["00000004.pt", "00000005.pt"]


def test_two_ranks_save_and_resume_together(few_rows, tmp_path):
    first = train_in(tmp_path, few_rows, 14, "kill:12", "--save", world=2)
    assert first.code != 0
    assert checkpoints(tmp_path) == ["00000006.pt", "00000011.pt"]
    again = train_in(tmp_path, few_rows, 14, "kill:none", "--resume", world=2)
    assert again.code == 0, again.err
    whole = train_in(tmp_path, few_rows, 14, "kill:none", world=2)
    assert again.record["val_bpb"] == whole.record["val_bpb"]


def test_knobs_are_the_constants_of_the_file():
    knobs = checkpoint.knobs_of(train)
    assert {"DEPTH", "MATRIX_LR", "SEED", "TIME_BUDGET", "ADAM_BETAS"} <= set(knobs)
    assert "COMPILE" not in knobs
