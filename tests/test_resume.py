"""Checkpoints: a killed run goes on as if nothing had happened. Previews and samples: they change nothing."""

import json
import re
import subprocess
import sys

import pytest
import torch
from conftest import REPO

pytestmark = pytest.mark.slow
STEPS, KILLED = 70, 13


def train_in(folder, env, *args, world=1):
    """(exit code, stdout, stderr, {step: loss}, record) of tests/ranks.py in that folder."""
    run_dir = folder / f"run{len(list(folder.iterdir()))}"
    run_dir.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    command = [sys.executable, *launch, str(REPO / "tests/ranks.py"), *map(str, args)]
    done = subprocess.run(command, env=env | {"AUTORESEARCH_RUN_DIR": str(run_dir)}, cwd=folder, capture_output=True, text=True)
    lines = lambda name: (run_dir / name).read_text().splitlines() if (run_dir / name).exists() else []  # noqa: E731
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines("steps.jsonl"))}
    return done.returncode, done.stdout, done.stderr, losses, [*map(json.loads, lines("eval.jsonl")), None][0]


@pytest.fixture(scope="module")
def runs(short, tmp_path_factory):
    """An uninterrupted run, one killed at step KILLED, and how that one went on."""
    folder = tmp_path_factory.mktemp("resume")
    whole = train_in(folder, short, STEPS, "kill:none")
    assert whole[0] == 0, whole[2]
    killed = train_in(folder, short, STEPS, f"kill:{KILLED}", "--save")
    kept = sorted(path.name for path in folder.glob("checkpoints/*/*"))
    (next(folder.glob("checkpoints/*")) / "00000099-0.part").write_bytes(b"killed while it was written")
    resumed = train_in(folder, short, STEPS, "kill:none", "--resume", "--sample", 3)
    return folder, whole, killed, kept, resumed


def test_a_killed_run_goes_on_with_the_same_losses(runs):
    _, whole, killed, kept, resumed = runs
    assert killed[0] == -9 and kept == ["00000006-0.pt", "00000011-0.pt"]
    assert resumed[0] == 0, resumed[2]
    assert "step 11" in resumed[1] and min(resumed[3]) == 12 and max(resumed[3]) == STEPS
    assert len(resumed[3]) >= 50 and resumed[3] == {step: whole[3][step] for step in resumed[3]}  # every bit
    assert resumed[4]["val_bpb"] == whole[4]["val_bpb"]
    assert "resumed after" in resumed[4]["marks"] and "resumed" not in whole[4]["marks"]


def test_checkpoints_are_plain_data_and_the_last_is_the_end(runs):
    folder = runs[0]
    names = sorted(path.name for path in folder.glob("checkpoints/*/*.pt"))
    assert names[-1] == f"{STEPS:08d}-0.pt" and len(names) == 2
    state = torch.load(next(folder.glob(f"checkpoints/*/{names[-1]}")), weights_only=True)
    assert state["step"] == STEPS and all(t.isfinite().all() for t in state["model"].values())


def test_previews_are_shown_and_not_counted(runs):
    out, record = runs[1][1], runs[1][4]
    curve = re.findall(r"preview    bits per byte: (.*)", out)
    assert len(curve) == 3 and curve[-1].count(",") == 2
    values = [float(entry.split()[-1]) for entry in curve[-1].split(", ")]
    assert values[0] > values[-1] > 0 and abs(values[-1] - record["val_bpb"]) < 0.5
    assert record["marks"] == "validation rows were previewed during training"


def test_samples_continue_training_text_and_look_like_no_metric(runs):
    out = runs[4][1]
    assert out.count("sample\n  | ") == 3 and out.count(" >>> ") >= 3
    assert len(re.findall(r"^METRIC val_bpb=", out, re.M)) == 1


def test_a_checkpoint_of_another_run_is_refused(runs, short):
    folder = runs[0]
    code, _, err, *_ = train_in(folder, short | {"AUTORESEARCH_SEED": "7"}, STEPS, "kill:none", "--resume")
    assert code != 0 and "seed 1337, not 7" in err and "hint:" in err


def test_no_checkpoint_is_an_error_with_a_hint(short, tmp_path):
    code, _, err, *_ = train_in(tmp_path, short, STEPS, "kill:none", "--resume")
    assert code != 0 and "no checkpoint in" in err and "hint: 'train.py --save'" in err


def test_two_ranks_save_and_resume_together(short, tmp_path):
    code, _, err, _, record = train_in(tmp_path, short, 14, "kill:none", "--save", world=2)
    assert code == 0, err
    kept = sorted(path.name for path in tmp_path.glob("checkpoints/*/*"))
    assert len(list(tmp_path.glob("checkpoints/*"))) == 1
    assert kept == [f"{step}-{rank}.pt" for step in ("00000011", "00000014") for rank in (0, 1)]
    code, out, err, _, again = train_in(tmp_path, short, 14, "kill:none", "--resume", world=2)
    assert code == 0 and "step 14" in out, err
    assert again["val_bpb"] == record["val_bpb"]
    next(tmp_path.glob("checkpoints/*/00000014-1.pt")).unlink()  # killed between the two: the one before is whole
    code, out, err, *_ = train_in(tmp_path, short, 14, "kill:none", "--resume", world=2)
    assert code == 0 and "step 11" in out, err
