"""Runs that outlive their shell: `try --detach`, `wait`, `confirm`."""

import os
import signal
import time

import pytest
from helpers import wait_until
from lab import QUICK_TRY, Lab, finished, killed, score_in

STILL_RUNNING = 75
LESS_02 = 'score = record["val_bpb"] = score - 0.2'  # a line of train.py far from its SCORE


def detached(lab, score, gate, *args):
    """Start a run in the background that waits for the file `gate`; returns its id."""
    lab.edit(score)
    before = set(lab.runs.glob("*/started"))
    out = lab.call(*QUICK_TRY, f"score {score}", "--detach", *args, GATE=str(gate)).out
    wait_until(lambda: set(lab.runs.glob("*/started")) - before)
    return out.split()[1]


def test_detach_returns_at_once_and_gives_train_py_back(based, tmp_path):
    run = detached(based, 0.9, tmp_path / "gate")
    assert score_in(based.train.read_text()) == 1.0
    assert based.git("status", "--porcelain") == ""
    based.edit(0.7)  # the next idea, while the run goes on
    (tmp_path / "gate").touch()
    done = based.call("wait", run)
    assert "0.900000" in done.out and "kept" in done.out
    assert based.score_at() == 0.9 and score_in(based.train.read_text()) == 0.7


def kept_while_editing(lab, tmp_path, score, body=""):
    """Edit train.py while a run with score 0.9 is under way, which is then kept."""
    run = detached(lab, 0.9, tmp_path / "gate")
    lab.edit(score, body)
    (tmp_path / "gate").touch()
    assert "the next 'try' adds the kept change" in lab.call("wait", run).err


def test_the_next_try_adds_what_was_kept_to_an_edit_from_before(based, tmp_path):
    kept_while_editing(based, tmp_path, 1.0, LESS_02)
    text = based.attempt("edited meanwhile")
    assert "that change was added to it" in text
    assert based.rows()[-1]["metric"] == pytest.approx(0.7)  # 0.9, which was kept, less 0.2
    assert based.score_at() == 0.9 and LESS_02 in based.train.read_text()
    based.assert_settled()
    based.edit(1.0)  # takes the kept change back, on purpose: nothing is added now
    assert "was added" not in based.attempt("back")
    assert based.rows()[-1]["metric"] == 1.0


def test_a_kept_change_of_the_same_lines_is_the_user_s_to_add(based, tmp_path):
    kept_while_editing(based, tmp_path, 0.8)
    edited = based.train.read_bytes()
    text = based.attempt("edited meanwhile", code=2)
    command = text.split("hint: '")[1].split("'")[0].split()
    assert "SCORE = 0.9" in based.git(*command[1:])
    assert based.train.read_bytes() == edited and len(based.rows()) == 2
    based.attempt("as it is")
    assert based.rows()[-1]["metric"] == 0.8


def test_an_edit_that_began_with_the_kept_change_stays_as_it_is(based, tmp_path):
    kept_while_editing(based, tmp_path, 1.0, "pass")
    based.git("checkout", "train.py")
    based.edit(0.9, LESS_02)
    assert "was added" not in based.attempt("begun anew")
    assert based.rows()[-1]["metric"] == pytest.approx(0.7)


@pytest.mark.slow
def test_wait_says_still_running_and_how_far(based, tmp_path):
    run = detached(based, 1.1, tmp_path / "gate")
    done = based.call("wait", "--timeout", "0.1", code=STILL_RUNNING)
    assert run in done.out and "verdict about" in done.out and f"wait {run}" in done.out
    assert run in based.call("status").out and run in based.call("resume").out
    (tmp_path / "gate").touch()
    assert "worse" in based.call("wait").out
    based.assert_settled()


def test_wait_ends_with_the_exit_code_of_the_run(based, tmp_path):
    based.edit(0.9, "raise ValueError('boom')")
    based.call(*QUICK_TRY, "crashes", "--detach")
    done = based.call("wait", code=1)
    assert "crash" in done.out and "boom" in done.text and "git restore -s" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_wait_does_not_hurt_the_run(based, tmp_path, number):
    run = detached(based, 0.9, tmp_path / "gate")
    waiting = based.start("wait", run)
    time.sleep(0.6)
    os.kill(waiting.pid, number)
    finished(waiting)
    assert based.living()
    (tmp_path / "gate").touch()
    assert "kept" in based.call("wait", run).out


def test_a_detached_run_whose_process_was_killed_is_interrupted(based, tmp_path):
    run = detached(based, 0.9, tmp_path / "gate")
    owner = next(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_work(pid, run))
    os.kill(owner, signal.SIGKILL)
    done = based.call("wait", run, code=1)
    assert "interrupted" in done.out and not based.living()
    assert based.score_at(based.rows()[-1]["ref"]) == 0.9
    based.assert_settled()


def is_work(pid, run):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return f"work\0{run}".encode() in file.read()
    except OSError:
        return False


@pytest.mark.slow
def test_the_first_idea_may_be_detached_and_makes_its_baseline(tmp_path):
    lab = Lab(tmp_path / "repo")
    lab.edit(0.9)
    lab.call(*QUICK_TRY, "first", "--detach")
    assert "kept" in lab.call("wait").out
    assert lab.column("description") == ["baseline", "first"]


def test_a_detached_idea_on_a_broken_baseline_stays_reachable(tmp_path):
    lab = Lab(tmp_path / "repo")
    lab.edit(1.0, "raise ValueError('boom')")
    lab.git("commit", "-qam", "broken")
    lab.edit(0.9)
    run = lab.call(*QUICK_TRY, "first", "--detach").out.split()[1]
    done = lab.call("wait", run, code=3)
    assert "baseline fails" in done.err and "git restore -s" in done.err
    assert lab.score_at(f"refs/autoresearch/runs/{run}") == 0.9
    lab.assert_settled()


def test_a_second_run_on_the_same_device_waits_for_the_first(based, tmp_path):
    first = detached(based, 0.9, tmp_path / "gate")
    based.edit(0.8)
    second = based.call(*QUICK_TRY, "queued", "--detach").out.split()[1]
    wait_until(lambda: "waiting for the device" in based.call("status").out)
    assert "waiting for the device" in based.call("wait", second, "--timeout", "0", code=75).out
    (tmp_path / "gate").touch()
    assert "kept" in based.call("wait", first).out
    assert "kept" in based.call("wait", second).out
    assert based.column("metric") == [1.0, 0.9, 0.8]
    based.assert_settled()


def test_a_plain_run_is_refused_while_a_try_is_under_way(based, tmp_path):
    run = detached(based, 0.9, tmp_path / "gate")
    assert "another experiment is running" in based.call("run", code=2).err
    (tmp_path / "gate").touch()
    assert "kept" in based.call("wait", run).out


def test_wait_for_an_unknown_run_says_so(based):
    assert "there is no run" in based.call("wait", "abcdef", code=2).err


# ---- confirm ----


@pytest.mark.slow
def test_confirm_takes_a_dropped_run_up_where_it_stands(based):
    based.edit(0.9995)
    out = based.attempt("a near miss")
    assert "confirm 2" in out
    row = based.rows()[-1]
    assert (row["status"], row["runs"]) == ("discard", 1)
    based.call("confirm", "2", "--once", "--repeats", "1")
    again = based.rows()[-1]
    assert again["runs"] == 2 and again["description"] == "confirm: a near miss"
    assert again["code"] == row["code"]
    based.assert_settled()


def test_confirm_refuses_what_it_cannot_confirm(based):
    assert "hint" in based.call("confirm", "1", code=2).err
    assert "there is no run" in based.call("confirm", "7", code=2).err


def test_killed_before_it_begins_a_detached_idea_stays_reachable(tmp_path):
    lab = Lab(tmp_path / "repo")
    lab.edit(0.9)
    out = lab.call(*QUICK_TRY, "first", "--detach", GATE=str(tmp_path / "gate")).out
    run = out.split()[1]
    wait_until(lambda: list(lab.runs.glob("*/started")))
    owner = next(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_work(pid, run))
    os.kill(owner, signal.SIGKILL)
    done = lab.call("wait", run, code=2)
    assert "git restore -s" in done.err and not lab.living()
    assert lab.score_at(f"refs/autoresearch/runs/{run}") == 0.9


def test_killing_the_starter_after_it_returned_changes_nothing(based, tmp_path):
    based.edit(0.9)
    process = based.start(*QUICK_TRY, "outlives its shell", "--detach", GATE=str(tmp_path / "g"))
    wait_until(lambda: list(based.runs.glob("*/started")))
    killed(process)
    (tmp_path / "g").touch()
    assert "kept" in based.call("wait").out


# ---- without a candidate ----


@pytest.mark.slow
def test_the_baseline_and_its_repeats_may_be_detached(tmp_path):
    lab = Lab(tmp_path / "repo")
    run = lab.call("try", "baseline", "--detach", "--repeats", "3").out.split()[1]
    out = lab.call("wait", run).out
    assert "baseline" in out and "n 3" in out and lab.column("description") == ["baseline"]
    lab.assert_settled()


@pytest.mark.slow
def test_noise_may_be_detached_and_says_how_far_it_is(based, tmp_path):
    out = based.call("noise", "--detach", "--repeats", "3", GATE=str(tmp_path / "gate")).out
    wait_until(lambda: list(based.runs.glob("*/started")))
    done = based.call("wait", "--timeout", "0", code=STILL_RUNNING)
    assert "run 2 of 3" in done.out
    (tmp_path / "gate").touch()
    assert "n 3" in based.call("wait", out.split()[1]).out
    based.assert_settled()


def test_a_detached_baseline_that_fails_says_so_to_wait(tmp_path):
    lab = Lab(tmp_path / "repo")
    lab.edit(1.0, "raise ValueError('boom')")
    lab.git("commit", "-qam", "broken")
    run = lab.call("try", "baseline", "--detach").out.split()[1]
    assert "boom" in lab.call("wait", run, code=3).err
    lab.assert_settled()
