"""One experiment as a command, with a stand-in for prepare.py: every way in which a run can end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, Checkout, clean_environment, git, is_alive, make_checkout

from harness import process, runlog
from harness.common import UserError
from harness.outcome import Failed, time_mark
from harness.run import run_experiment
from harness.settings import check_settings, run_environment

HONEST = """
import prepare
bpb = prepare.evaluate(1.25)
print(f"METRIC val_bpb={bpb:.6f}\\nMETRIC num_steps=3")
"""


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(make_checkout(tmp_path / "clone", HONEST))


# ---- a run that ends well ----


def test_a_scored_run_prints_its_metric_lines_and_nothing_else(checkout):
    (checkout.root / "run.log").write_text("METRIC val_bpb=0.100000\n")  # an earlier run's
    done = checkout.run()
    assert done.returncode == 0, done.err
    line = "autoresearch: profile tiny, data embedded (0123456789ab), budget 300 s, seed 1337\n"
    assert done.err == line
    assert done.out == "\nMETRIC val_bpb=1.250000\nMETRIC num_steps=3\n"
    assert checkout.read("run.log") == "METRIC val_bpb=1.250000\nMETRIC num_steps=3\n"
    assert git(checkout.root, "status", "--porcelain") == ""
    assert json.loads(checkout.read(".autoresearch/last/settings.json"))["seed"] == 1337


def test_the_block_of_an_older_train_py_counts_as_metric_lines(checkout):
    block = "---\\nval_bpb:          1.250000\\nnum_params_M:     50.3\\nname: value"
    done = checkout.run(f"import prepare\nprepare.evaluate(1.25)\nprint('noise: 1\\n{block}')\n")
    assert done.out == "\nMETRIC val_bpb=1.250000\nMETRIC num_params_m=50.3\n"


def test_marks_of_the_record_are_said(checkout):
    done = checkout.run(HONEST.replace("1.25)", "1.25, marks='7 steps outside the clock')"))
    assert done.returncode == 0 and "marked: 7 steps outside the clock" in done.err


def test_the_outcome_is_data_and_needs_no_text(checkout, tmp_path):
    environment = clean_environment(AUTORESEARCH_TIME_BUDGET="5", AUTORESEARCH_SEED="7")
    outcome = run_experiment(checkout.root, tmp_path / "run", environment, sys.executable)
    assert (outcome.code, outcome.reason, outcome.score) == (0, "", 1.25)
    assert outcome.metrics == {"val_bpb": 1.25, "num_steps": 3}
    assert (outcome.settings["time_budget"], outcome.record["seed"]) == (5, 7)
    assert outcome.record == json.loads((tmp_path / "run/eval.jsonl").read_text())


def test_run_experiment_says_why_there_is_no_score(checkout, tmp_path):
    (checkout.root / "train.py").write_text("raise SystemExit('no idea')")
    outcome = run_experiment(checkout.root, tmp_path / "run", clean_environment(), sys.executable)
    assert (outcome.code, outcome.reason, outcome.score) == (1, "crash", None)
    assert outcome.detail == "train.py crashed (exit code 1): no idea"
    assert outcome.log_tail == ("no idea",)


# ---- a run that fails ----

FAILURES = {  # train.py, exit code, what is said first
    "crash": ("print('x'); 1 / 0", 1, "train.py crashed .exit code 1.: ZeroDivisionError"),
    "syntax error": ("def", 1, "crashed .exit code 1.: SyntaxError"),
    "refused knobs": ("print('bad knob'); raise SystemExit(2)", 2, "refused: bad knob"),
    "refused by prepare": (
        "import prepare; raise prepare.UserError('no data')",
        2,
        "refused: harness.common.UserError: no data",
    ),
    "diverged": ("print('loss nan'); raise SystemExit(3)", 3, "diverged: loss nan"),
    "out of memory": ("raise SystemExit(4)", 4, "out of memory"),
    "out of memory text": (
        "raise RuntimeError('CUDA out of memory. Tried')",
        4,
        "out of memory .*Tried",
    ),
    "killed": ("import os; os.kill(os.getpid(), 9)", 4, "out of memory .killed or reported"),
    "segmentation fault": ("import os; os.kill(os.getpid(), 11)", 1, "crashed .exit code 139"),
    "silent exit 0": ("print('fine')", 5, "void: train.py ended without printing val_bpb"),
    "printed lie": (
        "print('METRIC val_bpb=0.5')",
        5,
        "void: val_bpb=0.5 was printed, but evaluate_bpb recorded nothing",
    ),
    "nan": ("print('METRIC val_bpb=nan')", 5, "void: .*without printing"),
    "a lie, then a crash": (
        "print('METRIC val_bpb=0.5', flush=True); 1 / 0",
        1,
        "crashed .*ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_has_a_reason_an_exit_code_and_no_number(checkout, name):
    source, code, reason = FAILURES[name]
    done = checkout.run(source + "\n")
    assert done.returncode == code, done.err
    assert done.out == ""
    settings, failure, *_ = done.err.splitlines()
    assert settings.startswith("autoresearch: profile tiny, data embedded")
    assert re.match(f"autoresearch: .*{reason}", failure), done.err


VOID = {  # what replaces a piece of HONEST, what is said
    "prints a better number": (
        ("{bpb:.6f}", "{bpb - 0.1:.6f}"),
        "train.py printed val_bpb=1.150000, evaluate_bpb recorded 1.25",
    ),
    "scores twice": (("bpb = ", "prepare.evaluate(2.0)\nbpb = "), "recorded 2 scores in one run"),
    "prints twice": (("num_steps=3", "val_bpb=0.1"), "METRIC name was printed twice"),
    "another run": (("1.25)", "1.25, run_id='old')"), "the record is of another run"),
    "a longer budget": (
        ("1.25)", "1.25, budget=400)"),
        "trained with a budget of 400 s, this experiment has 300 s",
    ),
    "another seed": (("1.25)", "1.25, seed=42)"), "the seed was changed to 42"),
    "other data": (
        ("1.25)", "1.25, data_id='ba9876543210')"),
        "the data changed meanwhile, data_id 0123456789ab became ba9876543210",
    ),
    "a negative score": (("1.25", "-1.25"), "val_bpb=-1.25 is not a positive number"),
    "no number": (("1.25)", "float('nan'))"), "void"),
    "changes prepare.py": (
        ("print(", "open('prepare.py', 'a').write('#')\nprint("),
        "fixed file changed.*: prepare.py",
    ),
}


@pytest.mark.parametrize("name", VOID)
def test_a_score_that_is_not_this_run_s_is_void(checkout, name):
    (old, new), reason = VOID[name]
    done = checkout.run(HONEST.replace(old, new))
    assert done.returncode == 5 and re.search(reason, done.err), done.err


def test_a_damaged_record_is_void(checkout):
    path = "Path(os.environ['AUTORESEARCH_RUN_DIR'], 'eval.jsonl').write_text('{half\\n')"
    done = checkout.run(
        HONEST.replace("print(", f"import os\nfrom pathlib import Path\n{path}\nprint(")
    )
    assert done.returncode == 5 and "the record of evaluate_bpb can't be read" in done.err


# ---- the log of a run, whatever is in it ----


def test_only_the_end_of_a_long_log_is_shown(checkout):
    done = checkout.run("for i in range(500): print('line', i)\n1 / 0\n")
    assert "line 499" in done.err and "line 400" not in done.err
    assert "line 0\n" in checkout.read("run.log")


def test_a_very_long_line_is_cut_where_it_is_shown(checkout):
    done = checkout.run("import sys\nprint('x' * 30_000_000)\nsys.exit('y' * 1_000_000)\n")
    assert done.returncode == 1 and len(done.err) < 2000
    assert "yyy ... (the line is longer)" in done.err


def test_a_long_line_hides_no_metric_line_and_holds_none(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("x" * runlog.LINE + "METRIC val_bpb=0.1\nMETRIC val_bpb=2.5\n" + "z" * 9999)
    assert runlog.metric_lines(log) == [("val_bpb", "2.5")]


def test_progress_bars_and_control_codes_are_shown_as_text(tmp_path):
    log = tmp_path / "run.log"
    log.write_bytes(b"10%\r20%\r\x1b[31m30%\x1b[0m\x07\n\xff\n\n")
    assert runlog.last_lines(log) == ["30%?", "\N{REPLACEMENT CHARACTER}", ""]
    assert runlog.last_words(log) == "\N{REPLACEMENT CHARACTER}"


def test_a_refusal_shows_no_log_of_an_earlier_run(checkout):
    (checkout.root / "run.log").write_text("yesterday\nMETRIC val_bpb=0.1\n")
    done = checkout.run(AUTORESEARCH_SEED="-1")
    assert done.returncode == 2 and "yesterday" not in done.err
    assert not (checkout.root / "run.log").exists()


# ---- time limit, interrupts, processes ----

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
open("child", "w").write(f"{child.pid}")
open("train", "w").write(f"{os.getpid()}")
print("METRIC val_bpb=0.5", flush=True)
time.sleep(600)
"""


def test_a_timeout_ends_every_process_also_one_in_a_session_of_its_own(
    checkout, tmp_path, monkeypatch
):
    monkeypatch.setattr(process, "GRACE", 0.5)
    (checkout.root / "train.py").write_text(STUBBORN)
    environment = clean_environment(AUTORESEARCH_HARD_LIMIT="2")
    outcome = run_experiment(checkout.root, tmp_path / "run", environment, sys.executable)
    assert (outcome.code, outcome.reason) == (124, "timeout")
    assert outcome.detail == "timeout: still running after 2 s, killed"
    assert not is_alive(checkout.pid("child")) and not is_alive(checkout.pid("train"))


def test_a_run_that_ended_while_the_command_was_stopped_is_no_timeout():
    """Ctrl-Z stops the command, not the run; its limit may have passed when it goes on."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process.wait_for([child], limit=-100) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_interrupt_ends_training_and_exits_130(checkout, number):
    (checkout.root / "train.py").write_text(STUBBORN)
    command = checkout.start()
    train, child = checkout.pid("train"), checkout.pid("child")
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out) == (130, "") and "interrupted" in err
    assert not is_alive(train) and not is_alive(child)


def test_an_interrupt_inside_of_poll_still_ends_the_run(tmp_path):
    def interrupt_with_the_lock_taken(frame, event, _):
        if frame.f_code is not subprocess.Popen._internal_poll.__code__:
            return None
        if event == "line" and frame.f_locals["self"]._waitpid_lock.locked():
            raise KeyboardInterrupt
        return interrupt_with_the_lock_taken

    def run():
        sys.settrace(interrupt_with_the_lock_taken)
        try:
            process.call(["sleep", "600"], tmp_path, [os.environ], [tmp_path / "log"])
        except KeyboardInterrupt:
            ended.set()

    ended = threading.Event()
    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(60)


def test_the_next_command_ends_what_a_killed_one_left(checkout):
    (checkout.root / "train.py").write_text(STUBBORN)
    command = checkout.start()
    train, child = checkout.pid("train"), checkout.pid("child")
    command.kill()
    command.communicate()
    assert is_alive(train, grace=0) and is_alive(child, grace=0)
    done = checkout.run(HONEST)
    assert done.returncode == 0 and "ended 2 processes of an earlier run" in done.err
    assert not is_alive(train) and not is_alive(child)


def test_processes_are_found_where_there_is_no_proc(monkeypatch):
    """macOS and BSD: `ps` prints the environment after the command."""
    listing = (
        "  12 python train.py HOME=/h\n"
        "  13 python train.py AUTORESEARCH_RUN_ID=7-ab AUTORESEARCH_CHECKOUT=c0 PATH=/a b\n"
    )
    done = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(process, "Path", lambda path: Path("/nowhere", path.lstrip("/")))
    monkeypatch.setattr(process, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
    found = {"AUTORESEARCH_RUN_ID": "7-ab", "AUTORESEARCH_CHECKOUT": "c0"}
    assert list(process.run_processes()) == [(13, found)]


def test_a_second_experiment_in_one_checkout_is_refused(checkout):
    gate = "import os, time\nwhile not os.path.exists('gate'):\n    time.sleep(0.02)\n"
    started = "import os\nopen('train', 'w').write(str(os.getpid()))\n"
    (checkout.root / "train.py").write_text(started + gate + HONEST)
    first = checkout.start()
    train = checkout.pid("train")
    second = checkout.run()
    assert second.returncode == 2 and second.out == ""
    assert f"another experiment is running in this checkout (process {train})" in second.err
    (checkout.root / "gate").touch()
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0 and "METRIC val_bpb=1.250000" in out, err


# ---- settings ----


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TIME_BUDGET", "5m"), ("TIME_BUDGET", "-5"), ("TIME_BUDGET", "0"), ("TIME_BUDGET", "nan"),
        ("TIME_BUDGET", "inf"), ("SEED", "-1"), ("SEED", "1.5"), ("SEED", str(2**32)),
        ("HARD_LIMIT", "abc"), ("HARD_LIMIT", "0"), ("HARD_LIMIT", "-3"), ("RANKS", "0"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name_and_range(name, value):
    with pytest.raises(UserError, match=f"AUTORESEARCH_{name}='{value}' is not a .* from .* to "):
        check_settings({f"AUTORESEARCH_{name}": value})


def test_a_wrong_setting_is_refused_before_anything_starts(checkout):
    done = checkout.run("open('ran', 'w')", AUTORESEARCH_HARD_LIMIT="abc")
    assert done.returncode == 2 and "AUTORESEARCH_HARD_LIMIT='abc' is not" in done.err
    assert not (checkout.root / "ran").exists()


def test_a_seed_with_leading_zeros_is_that_number(checkout):
    assert checkout.run(AUTORESEARCH_SEED="007").returncode == 0


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("TIMEBUDGET", "TIME_BUDGET"), ("BUGET", "TIME_BUDGET"), ("SEEDS", "SEED"), ("RANK", "RANKS")],
)
def test_a_misspelt_setting_is_refused(typed, meant):
    with pytest.raises(
        UserError, match=f"_{typed} is no setting.*did you mean AUTORESEARCH_{meant}"
    ):
        check_settings({f"AUTORESEARCH_{typed}": "60"})


def test_variables_of_other_tools_and_our_own_are_no_misspelt_settings():
    names = ("LOG_DIR", "MAX_ITERATIONS", "PYTHON", "RUN_DIR", "RUN_ID")
    check_settings({f"AUTORESEARCH_{name}": "1" for name in names})


def test_usage_errors_have_code_2(checkout):
    done = checkout.run(None, "frobnicate")
    assert done.returncode == 2 and "'frobnicate'" in done.err and "usage" in done.err


# ---- what a shell hands down ----


def test_variables_of_a_hook_reach_neither_git_nor_the_run(checkout, tmp_path):
    show = "import os\nprint(sorted(n for n in os.environ if n.startswith('GIT_')))\n"
    kept = "['GIT_CONFIG_GLOBAL', 'GIT_CONFIG_NOSYSTEM']\n"
    elsewhere = {"GIT_DIR": str(tmp_path), "GIT_WORK_TREE": str(tmp_path), "GIT_INDEX_FILE": "no"}
    done = checkout.run(show + HONEST, **elsewhere, GIT_AUTHOR_DATE="2001-01-01T00:00:00")
    assert done.returncode == 0, done.err
    assert checkout.read("run.log").startswith(kept)


def test_a_run_keeps_only_harmless_variables_of_python_and_none_of_torchrun():
    shell = {"PYTHONOPTIMIZE": "2", "PYTHONPATH": "/p", "RANK": "3", "TORCHELASTIC_RUN_ID": "x"}
    found = run_environment(shell | {"HOME": "/h", "OMP_NUM_THREADS": "2"})
    assert found.pop("PYTHONHASHSEED") == "0" and found.pop("PYTHONUNBUFFERED") == "1"
    assert found.pop("PYTHONIOENCODING").startswith("utf-8")
    assert found == {"PYTHONPATH": "/p", "HOME": "/h", "OMP_NUM_THREADS": "2"}


# ---- the fixed files ----


@pytest.mark.slow
def test_fixed_files_are_those_of_the_session(checkout):
    assert checkout.run().returncode == 0  # begins the session
    with open(checkout.root / "prepare.py", "a") as file:
        file.write("# easier\n")
    done = checkout.run()
    assert done.returncode == 2 and re.search("fixed file changed .*: prepare.py", done.err)
    git(checkout.root, "commit", "-qam", "make it easier")  # a commit does not make it right
    assert checkout.run().returncode == 2
    git(checkout.root, "update-index", "--assume-unchanged", "prepare.py")  # nor hiding it
    assert checkout.run().returncode == 2
    with open(checkout.root / "prepare.py", "a") as file:
        file.write("# easier still\n")
    git(checkout.root, "update-index", "--no-assume-unchanged", "prepare.py")
    done = checkout.run(None, "session")
    assert done.returncode == 2 and "fixed file not committed: prepare.py" in done.err
    git(checkout.root, "commit", "-qam", "easier still")
    done = checkout.run(None, "session")
    assert done.returncode == 0 and "a new session starts at" in done.err
    assert "prepare.py autoresearch.sh pyproject.toml harness" in done.err
    assert checkout.run().returncode == 0


def test_the_fixed_files_of_a_checkout_in_a_larger_repository_are_found(tmp_path):
    lab = Checkout(make_checkout(tmp_path / "big/lab", HONEST))
    shutil.rmtree(lab.root / ".git")
    git(tmp_path / "big", "init", "-q")
    git(tmp_path / "big", "add", "-A")
    git(tmp_path / "big", "commit", "-qm", "start")
    assert lab.run().returncode == 0
    (lab.root / "harness/run.py").write_bytes((lab.root / "harness/run.py").read_bytes() + b"#")
    done = lab.run()
    assert done.returncode == 2 and ": harness/run.py. hint" in done.err


@pytest.mark.slow
def test_files_added_to_or_removed_from_the_harness_count(checkout):
    assert checkout.run().returncode == 0
    (checkout.root / "harness/extra.py").touch()
    (checkout.root / "harness/.run.py.swp").touch()  # an editor's
    (checkout.root / "harness/page.html").unlink()
    done = checkout.run()
    assert done.returncode == 2
    assert ": harness/extra.py (added) harness/page.html (missing). hint" in done.err
    assert "git checkout refs/worktree/autoresearch/session -- harness/page.html'" in done.err
    for number in range(20):
        (checkout.root / f"harness/extra{number}.py").touch()
    assert "and 13 more. hint" in checkout.run().err


def test_without_git_it_runs_and_says_what_is_not_checked(checkout):
    shutil.rmtree(checkout.root / ".git")
    done = checkout.run(GIT_CEILING_DIRECTORIES=str(checkout.root.parent))
    assert (
        done.returncode == 0 and "whether the fixed files are unchanged is not checked" in done.err
    )


def test_a_checkout_that_cannot_be_written_is_named_as_such(checkout):
    (checkout.root / ".autoresearch").touch()  # root may write everywhere, so a file is in the way
    done = checkout.run()
    assert done.returncode == 2 and "fixed file" not in done.err
    assert "cannot write" in done.err and "hint: a run writes run.log" in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_checkout_is_named_as_such(checkout):
    checkout.root.chmod(0o555)
    done = checkout.run()
    checkout.root.chmod(0o755)
    assert done.returncode == 2 and "cannot write" in done.err and "fixed file" not in done.err


# ---- what the outer process finds in the record ----


def test_a_model_that_was_not_compiled_is_said_with_the_reason(checkout):
    eager = "1.25, compiled=False, eager_reason='no C++ compiler')"
    done = checkout.run(HONEST.replace("1.25)", eager))
    assert (
        done.returncode == 0 and "not compiled, so it trained slowly: no C++ compiler" in done.err
    )


def test_time_that_the_record_does_not_explain_is_marked_or_void():
    record = {"training_seconds": 300.0, "outside_seconds": 40.0, "seconds": 10.0}
    assert time_mark(record, starting=5, seconds=360) == ""
    words = "the record explains 350 s of the 500 s that the run took"
    assert time_mark(record, starting=5, seconds=500) == words  # trained before the clock ran
    assert time_mark(record, starting=80, seconds=500) == ""  # a machine that starts slowly
    with pytest.raises(Failed, match="explains 350 s of the 200 s .* its clock was changed"):
        time_mark(record, starting=5, seconds=200)
    assert time_mark({"seconds": 10.0}, starting=5, seconds=500) == ""  # an older train.py


def test_the_outer_process_loads_neither_torch_nor_prepare():
    code = "import sys, harness.__main__\nprint({'torch', 'numpy', 'prepare'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
