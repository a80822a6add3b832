"""Several candidates at once: the one to beat, and the seeds on which codes are repeated."""

import argparse

import pytest
from lab import Lab

from harness import cycle
from harness.attempt import OPTIONS, open_candidate
from harness.baseline import SEEDS, free_seed
from harness.session import Session
from harness.workspace import Run, Workspace

NOISE = [0.0, 0.001, -0.001]


def test_a_seed_on_which_a_code_is_just_running_is_not_taken_again(based):
    workspace = Workspace(based.root)
    session = Session.of(workspace.rows())
    head = based.git("rev-parse", "HEAD")
    based.edit(0.9)
    based.git("commit", "-qam", "another code")
    other = based.git("rev-parse", "HEAD")
    with workspace.lock():
        assert free_seed(workspace, session, head, 1) == 1338
        assert free_seed(workspace, session, head, 0) == 1338  # 1337 has a score
        Run.open(workspace, "probe", "under way", commit=other, seed=1338)
        assert free_seed(workspace, session, head, 1) == 1338
        Run.open(workspace, "probe", "under way", commit=head, seed=1338)
        assert free_seed(workspace, session, head, 1) == 1339
        Run.open(workspace, "probe", "under way", commit=head, seed=SEEDS - 1)
        assert free_seed(workspace, session, head, SEEDS - 1338) == 0  # the numbers begin again


@pytest.mark.slow
def test_a_candidate_is_compared_with_the_one_that_was_kept_meanwhile(tmp_path, monkeypatch):
    lab = Lab(tmp_path / "repo")
    lab.edit(1.0, noise=NOISE)
    lab.git("commit", "-qam", "noisy")
    lab.call("try", "baseline", "--repeats", "3")
    lab.edit(0.9, noise=NOISE)
    workspace = Workspace(lab.root)
    options = dict.fromkeys(OPTIONS) | {"once": False, "simpler": False, "repeats": 3, "gpu": "0"}
    options |= {"memory_factor": 1.5, "new_session": False, "seeds": 1}
    content = lab.train.read_bytes()
    run = open_candidate(workspace, argparse.Namespace(**options), "mine", {}, content)
    in_turns = cycle.run_in_turns
    calls = []

    def with_another_one_kept_after_it(run, session):
        calls.append(in_turns(run, session))
        if len(calls) == 1:
            lab.edit(0.9, "pass", noise=NOISE)
            lab.call("try", "as good", "--repeats", "3", "--gpu", "1")
        return calls[-1]

    monkeypatch.setattr(cycle, "run_in_turns", with_another_one_kept_after_it)
    row = cycle.work(run)
    assert lab.rows()[1]["description"] == "as good" and lab.rows()[1]["status"] == "keep"
    assert (row["status"], row["reason"]) == ("discard", "within noise")
    assert row["parent_metric"] == pytest.approx(0.9, abs=0.002) and len(calls) == 2
    assert lab.subjects() == ["as good", "noisy", "start"]
