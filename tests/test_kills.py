"""Interruptions of `try`: Ctrl-C, hang-up, and kill -9 at every write and every git call."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import wait_until
from lab import QUICK_TRY, Lab, finished, killed, score_in

from harness.workspace import Run, Workspace


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_run_and_is_logged_at_once(based, tmp_path, number):
    process = based.hold(0.9, tmp_path / "gate")
    os.kill(process.pid, number)
    done = finished(process)
    assert done.code == 130, done.text
    row = based.rows()[-1]
    assert (row["status"], row["reason"]) == ("crash", "interrupted")
    assert based.score_at() == 1.0 and based.score_at(row["ref"]) == 0.9
    based.assert_settled()
    assert not based.living()


def test_nohup_goes_on_when_its_terminal_hangs_up(based, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; a child inherits it
    try:
        process = based.hold(0.9, tmp_path / "gate")
    finally:
        signal.signal(signal.SIGHUP, before)
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.2)
    (tmp_path / "gate").touch()
    assert finished(process).code == 0 and based.score_at() == 0.9


def test_ctrl_c_during_the_kept_commit_waits_for_its_end(based, tmp_path):
    script = f"touch '{tmp_path}/hooked'\nwhile [ ! -e '{tmp_path}/gate' ]; do sleep 0.02; done\n"
    based.add_hook("pre-commit", script)
    based.edit(0.9)
    process = based.start(*QUICK_TRY, "interrupted in its commit")
    wait_until((tmp_path / "hooked").exists)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    (tmp_path / "gate").touch()
    assert finished(process).code == 130
    assert based.column("status") == ["keep", "keep"] and based.score_at() == 0.9
    based.assert_settled()


def test_ctrl_c_during_the_baseline_leaves_the_edit(lab, tmp_path):
    process = lab.hold(0.9, tmp_path / "gate")
    os.kill(process.pid, signal.SIGINT)
    assert finished(process).code == 130
    assert not lab.log.exists() and score_in(lab.train.read_text()) == 0.9
    lab.assert_settled(edited=True)
    assert not lab.living()


def test_after_kill_9_the_next_command_ends_the_run_and_logs_it(based, tmp_path):
    process = based.hold(0.9, tmp_path / "gate")
    killed(process)
    assert based.living()
    done = based.call("status")
    assert "interrupted" in done.out and "git restore -s" in done.err
    assert not based.living()
    row = based.rows()[-1]
    assert row["reason"] == "interrupted" and based.score_at(row["ref"]) == 0.9
    assert score_in(based.train.read_text()) == 1.0
    based.assert_settled()


@pytest.mark.parametrize("dead", [False, True])
def test_a_failure_after_the_log_was_deleted_restores_train_py_too(based, tmp_path, dead):
    process = based.hold(0.9, tmp_path / "gate", FAKE_LOSS="-5")
    based.log.unlink()
    if dead:
        killed(process)
    else:
        (tmp_path / "gate").touch()
        finished(process)
    based.call("status")
    assert score_in(based.train.read_text()) == 1.0
    based.assert_settled()


def test_half_a_last_line_is_put_aside_and_the_log_stays_strict(based):
    with open(based.log, "a") as log:
        log.write('{"run": 2, "commit": "abc')
    based.call("status")
    based.edit(0.9)
    based.attempt("after a power cut")
    assert based.column("run") == [1, 2]
    assert '"abc' in (based.root / ".autoresearch/torn.txt").read_text()


# Kills itself before the n-th place that a kill could fall between: each line of harness/ that
# starts a process, opens a file for writing, renames or removes one. Python reports these as audit
# events.
KILLER = """
import os, signal, sys
sys.path.insert(0, os.getcwd())
from harness import __main__
left, places = int(os.environ.pop("KILL_BEFORE")), set()
NAMES = {"subprocess.Popen", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}

def count(event, args):
    global left
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    writes = writes and not str(args[0]).startswith("/dev/") and "__pycache__" not in str(args[0])
    if event not in NAMES and not writes:
        return
    frame, place = sys._getframe(1), [event]
    while frame:
        if "/harness/" in frame.f_code.co_filename:
            place.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    if tuple(place) not in places:
        places.add(tuple(place))
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
sys.exit(__main__.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("score", "verdict", "first"), [(0.9, "keep", 1), (1.1, "discard", 4)])
def test_kill_9_anywhere_then_the_next_command_repairs(based, tmp_path, score, verdict, first):
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER)
    kills = 0
    for n in range(first, 400, 9):  # every ninth place: all would take too long
        based.edit(score)
        rows, head = len(based.rows()), based.git("rev-parse", "HEAD")
        done = finished(
            based.start(*QUICK_TRY, f"kill {n}", script=(str(killer),), KILL_BEFORE=str(n))
        )
        if done.code != -signal.SIGKILL:
            assert done.code == 0, done.text
            break
        kills += 1
        based.call("status")
        new = based.rows()[rows:]
        if not new:  # it had not begun: the edit is still there
            based.assert_settled(edited=True)
            assert score_in(based.train.read_text()) == score
        else:  # one row, and branch and train.py are what the row says
            assert len(new) == 1 and new[0]["status"] in ("crash", verdict)
            assert based.score_at(new[0]["ref"]) == score
            based.assert_settled()
        if new and new[0]["status"] == "keep":
            assert based.subjects()[0] == f"kill {n}" and based.score_at() == score
            score = round(score - 0.003, 3)
        else:
            assert based.git("rev-parse", "HEAD") == head
    assert kills >= 8


def test_a_run_that_ends_while_a_process_waits_for_it_is_not_begun_again(based):
    workspace = Workspace(based.root)
    with workspace.lock():
        run = Run.open(workspace, "candidate", "ends at once")
    second = Run(workspace, run.folder)

    def adopt() -> tuple[bool, bool]:
        return second.adopt(30), second.owner.is_locked  # a lock is known to its thread only

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(adopt)
        time.sleep(0.3)
        with workspace.lock():
            run.close(f"refused-{run.id}")
        assert waiting.result() == (False, False)
    assert not workspace.open_folders()


def test_a_run_whose_record_is_not_there_yet_is_not_listed(based):
    workspace = Workspace(based.root)
    (based.runs / "open-candidate-01234567").mkdir()  # as another process does it just now
    assert workspace.open_runs() == [] and len(workspace.open_folders()) == 1


def code_is_safe(lab, score) -> bool:
    """Whether train.py, or a candidate that is still reachable, has this score."""
    if score_in(lab.train.read_text()) == score:
        return True
    refs = lab.git("for-each-ref", "--format=%(refname)", "refs/autoresearch/runs").split()
    return any(lab.score_at(ref) == score for ref in refs)


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 7])
def test_kill_9_of_the_starter_of_a_detached_run_loses_nothing(based, tmp_path, first):
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER)
    kills, score = 0, 1.1
    for n in range(first, 400, 12):
        score = round(score + 0.001, 4)
        based.edit(score)
        command = (*QUICK_TRY, f"kill {n}", "--detach")
        done = finished(based.start(*command, script=(str(killer),), KILL_BEFORE=str(n)))
        kills += done.code == -signal.SIGKILL
        based.call("wait", "--timeout", "60", code=None)
        based.call("status")
        assert not list(based.runs.glob("open-*")) and code_is_safe(based, score)
        if done.code == 0:
            break
        based.git("checkout", "-q", "train.py")
    assert kills >= 3


@pytest.mark.slow
def test_kill_9_during_the_first_try_of_a_session_loses_nothing(tmp_path):
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER)
    command = ("try", "--once", "--repeats", "2", "first")
    kills = 0
    for n in range(3, 400, 20):
        lab = Lab(tmp_path / f"repo{n}")
        lab.edit(0.9)
        done = finished(lab.start(*command, script=(str(killer),), KILL_BEFORE=str(n)))
        kills += done.code == -signal.SIGKILL
        lab.call("status")
        assert not list(lab.runs.glob("open-*")) and code_is_safe(lab, 0.9)
        assert not lab.living()
        if done.code == 0:
            break
    assert kills >= 3


@pytest.mark.slow
def test_status_works_while_a_run_that_was_cut_off_cannot_be_finished(based, tmp_path):
    killed(based.hold(1.1, tmp_path / "gate"))
    (based.root / ".git/index.lock").touch()
    done = based.call("status")
    assert "git is busy" in done.err and "1.000000" in done.out
    (based.root / ".git/index.lock").unlink()
    based.call("status")
    based.assert_settled()
