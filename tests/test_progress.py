"""How far a run under way is."""

import json
import os
import time

import pytest

from harness.progress import read_progress


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "settings.json").write_text('{"time_budget": 300}')
    return tmp_path


def test_the_phases_of_a_run(folder, tmp_path_factory):
    assert str(read_progress(tmp_path_factory.mktemp("empty"))) == "preparing"
    assert str(read_progress(folder)) == "starting"
    step = {"step": 40, "elapsed": 100.0, "loss": 3.25}
    (folder / "steps.jsonl").write_text(json.dumps(step) + "\n")
    assert str(read_progress(folder)).startswith("training: 100 of 300 s, step 40, loss 3.2500, ")
    (folder / "eval.jsonl").touch()
    assert str(read_progress(folder)) == "scoring"


def test_the_clock_goes_on_between_two_lines(folder):
    (folder / "steps.jsonl").write_text('{"step": 1, "elapsed": 100}\n')
    before = time.time() - 50
    os.utime(folder / "steps.jsonl", (before, before))
    progress = read_progress(folder)
    assert progress.elapsed == pytest.approx(150, abs=20)
    assert progress.left == pytest.approx(300 - progress.elapsed)
    os.utime(folder / "steps.jsonl", (before - 500, before - 500))
    assert read_progress(folder).phase == "scoring"


def test_a_line_that_is_still_written_or_damaged_is_passed_over(folder):
    lines = '{"step": 1, "elapsed": 1}\n{"step": 2, "elapsed": 2}\nnonsense\n{"step": 3, "el'
    (folder / "steps.jsonl").write_text("x" * 200_000 + "\n" + lines)
    assert read_progress(folder).step == 2
