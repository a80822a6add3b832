"""bash autoresearch.sh, run for real: one honest experiment after another, and every way in which one can fail or cheat."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
METRIC = re.compile(r"METRIC [a-z_][a-z0-9_]*=-?\d+(\.\d+)?")

# A whole train.py in a few lines: unigram counts of one batch, three timed steps, an honest score.
HONEST = """
import torch
from prepare import Clock, Tokenizer, make_dataloader, evaluate_bpb
import prepare
tokenizer = Tokenizer.from_directory()
x, y, epoch = next(make_dataloader(tokenizer, 64, 256, "train"))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        counts = torch.bincount(y.flatten(), minlength=tokenizer.get_vocab_size()) + 1.0
        self.table = torch.nn.Parameter((counts / counts.sum()).log())
    def forward(self, x):
        return self.table.expand(*x.shape, -1)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
def step():
    model.table.sum().backward()
    optimizer.step()
clock = Clock()
# BEFORE
clock.start()
for _ in range(3):
    step()
clock.stop()
# SCORE
bpb = evaluate_bpb(model, tokenizer, 64)
# PRINT
print(f"---\\nval_bpb:   {bpb:.6f}\\n\\nMETRIC val_bpb={bpb:.6f}\\nMETRIC num_steps=3")
# END
"""


def git(folder, *args):
    done = subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *args], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path):
    """A repository of its own, as a user's clone."""
    for name in ("prepare.py", "data.py", "machine.py", "autoresearch.sh", "pyproject.toml", ".gitignore"):
        shutil.copy(REPO / name, tmp_path)
    shutil.copytree(REPO / "harness", tmp_path / "harness")
    (tmp_path / "train.py").write_text(HONEST)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "start")
    return tmp_path


@pytest.fixture
def env(prepared):
    return prepared | {"AUTORESEARCH_PYTHON": sys.executable, "AUTORESEARCH_TIME_BUDGET": "2"}


def run(repo, env, train=None, *args, **changes):
    if train is not None:
        (repo / "train.py").write_text(train)
    done = subprocess.run(["bash", "autoresearch.sh", *args], cwd=repo, env=env | changes, capture_output=True, text=True)
    if done.returncode:
        assert "METRIC" not in done.stdout, "a failed run printed a number"
    return done


def test_honest_run_prints_metric_lines_and_nothing_else(repo, env):
    (repo / "run.log").write_text("METRIC val_bpb=0.100000\n")  # an earlier run's
    done = run(repo, env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert done.stdout.startswith("\nMETRIC ") and all(METRIC.fullmatch(line) for line in lines)
    assert [line.split("=")[0] for line in lines] == ["METRIC val_bpb", "METRIC num_steps"]
    value = float(lines[0].split("=")[1])
    assert 2.5 < value < 3.7  # between the best unigram model and guessing
    assert f"METRIC val_bpb={value:.6f}" in (repo / "run.log").read_text()
    assert git(repo, "status", "--porcelain") == ""
    again = run(repo, env)
    assert again.stdout == done.stdout  # same seed, same data, same score
    other = run(repo, env, AUTORESEARCH_SEED="7")
    assert other.returncode == 0 and other.stdout != done.stdout  # the seed chooses the order of the data


def test_an_older_train_py_is_understood(repo, env):
    """No clock, no METRIC lines, only the block: it scores, and is marked."""
    old = HONEST.replace("clock = Clock()", "").replace("clock.start()", "").replace("clock.stop()", "")
    old = old.split("# PRINT")[0] + 'print(f"---\\nval_bpb:          {bpb:.6f}\\nnum_params_M:     50.3")\n'
    done = run(repo, env, old)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^METRIC val_bpb=\d\.\d{6}\nMETRIC num_params_m=50.3$", done.stdout, re.M)
    assert "marked: the clock of prepare.py was not used" in done.stderr


FAILURES = {  # train.py, exit code, what the first line says
    "crash": ("print('x'); 1 / 0", 1, r"train.py crashed .exit code 1.: ZeroDivisionError: division by zero"),
    "syntax error": ("def", 1, r"crashed .exit code 1.: SyntaxError"),
    "refused knobs": ("print('bad knob'); raise SystemExit(2)", 2, "refused: bad knob"),
    "refused by prepare": ("import prepare; raise prepare.UserError('no data')", 2, "refused: prepare.UserError: no data"),
    "diverged": ("print('loss nan'); raise SystemExit(3)", 3, "diverged: loss nan"),
    "out of memory": ("raise SystemExit(4)", 4, "out of memory"),
    "out of memory text": ("raise RuntimeError('CUDA out of memory. Tried')", 4, "out of memory .*Tried"),
    "killed": ("import os; os.kill(os.getpid(), 9)", 4, "out of memory .killed or reported"),
    "segmentation fault": ("import os; os.kill(os.getpid(), 11)", 1, "crashed .exit code 139"),
    "silent exit 0": ("print('all fine')", 5, "void: train.py ended without printing val_bpb"),
    "printed lie": ("print('METRIC val_bpb=0.5')", 5, "void: val_bpb=0.5 was printed, but evaluate_bpb recorded nothing"),
    "nan": ("print('METRIC val_bpb=nan')", 5, "void: .*without printing"),
    "a lie, then a crash": ("print('METRIC val_bpb=0.5', flush=True); 1 / 0", 1, "crashed .*ZeroDivisionError"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_have_a_reason_an_exit_code_and_no_number(repo, env, name):
    source, code, reason = FAILURES[name]
    done = run(repo, env, source + "\n")
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert re.match(f"autoresearch: .*{reason}", done.stderr.splitlines()[0]), done.stderr


def test_only_the_end_of_a_long_log_is_shown(repo, env):
    done = run(repo, env, "for i in range(500): print('line', i)\n1 / 0\n")
    assert "line 499" in done.stderr and "line 400" not in done.stderr
    assert "line 0\n" in (repo / "run.log").read_text()


def alive(pid):
    """Whether a process still runs, after a moment's grace (a zombie does not)."""
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not state or state.startswith("Z"):
            return False
        time.sleep(0.05)
    return True


def test_timeout_kills_the_whole_process_group(repo, env):
    source = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
open("pids", "w").write(f"{child.pid}")
print("METRIC val_bpb=0.5", flush=True)
time.sleep(600)
"""
    done = run(repo, env, source, AUTORESEARCH_HARD_LIMIT="3")
    assert done.returncode == 124 and "timeout: still running after 3 s" in done.stderr
    assert not alive(int((repo / "pids").read_text()))


def test_interrupt_kills_training_and_exits_130(repo, env):
    source = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (repo / "train.py").write_text(source)
    process = subprocess.Popen(["bash", "autoresearch.sh"], cwd=repo, env=env, stdout=-1, stderr=-1, start_new_session=True)
    while not (repo / "pid").exists() or not (repo / "pid").read_text():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == b"" and b"interrupted" in err
    assert not alive(int((repo / "pid").read_text()))


@pytest.mark.parametrize(
    "args, changes, reason",
    [
        (["frobnicate"], {}, "unknown command 'frobnicate'. usage"),
        ([], {"AUTORESEARCH_TIME_BUDGET": "5m"}, "AUTORESEARCH_TIME_BUDGET=5m is not a number"),
        ([], {"AUTORESEARCH_PROFILE": "huge"}, "AUTORESEARCH_PROFILE='huge' is unknown. hint: one of full, small, tiny"),
    ],
)
def test_usage_is_refused_with_code_2(repo, env, args, changes, reason):
    done = run(repo, env, None, *args, **changes)
    assert done.returncode == 2 and reason in done.stderr


# ---------------------------------------------------------------------------- bound to the run

CHEATS = {
    "prints a better number": (("# PRINT", "bpb -= 0.1"), "train.py printed val_bpb=.*, evaluate_bpb recorded"),
    "scores twice": (("# SCORE", "evaluate_bpb(model, tokenizer, 64)"), "recorded 2 scores in one run"),
    "prints twice": (("# END", "print('METRIC val_bpb=0.1')"), "METRIC name was printed twice"),
    "own evaluator": (("# SCORE", "prepare.evaluate_bpb = evaluate_bpb = lambda *a: 0.5"), "evaluate_bpb recorded nothing"),
    "patched helper": (
        ("# SCORE", "prepare.token_nats = lambda z, y: torch.zeros(y.shape).double()"),
        "void: .*prepare.token_nats is not the function of prepare.py",
    ),
    "sees the next token": (
        ("# SCORE", "Model.forward = lambda self, x: 5.0 * torch.nn.functional.one_hot(x.roll(-1, 1), self.table.numel())"),
        "void: .*sees the future or other rows",
    ),
    "asks for validation rows": (
        ("# BEFORE", "next(make_dataloader(tokenizer, 64, 256, 'val'))"),
        "refused: .*reads split 'train', not 'val'",
    ),
    "record of another run": (
        ("# END", "import os, pathlib; p = pathlib.Path(os.environ['AUTORESEARCH_RUN_DIR'], 'eval.jsonl'); "
         "p.write_text(p.read_text().replace(os.environ['AUTORESEARCH_RUN_ID'], 'yesterday'))"),
        "the record is of another run",
    ),
    "takes more time": (
        ("import torch", "import os; os.environ['AUTORESEARCH_TIME_BUDGET'] = '4'"),
        "void: trained with a budget of 4.0 s",
    ),
    "takes more time quietly": (("# BEFORE", "prepare.TIME_BUDGET = 4.0"), "void: trained with a budget of 4.0 s"),
    "tunes the seed": (("import torch", "import os; os.environ['AUTORESEARCH_SEED'] = '42'"), "void: the seed was changed to 42"),
    "changes prepare.py while running": (("# END", "open('prepare.py', 'a').write('#')"), "fixed file changed.*: prepare.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_void_with_the_reason(repo, env, name):
    (anchor, attack), reason = CHEATS[name]
    done = run(repo, env, HONEST.replace(anchor, f"{attack}\n{anchor}", 1))
    assert done.returncode == (2 if "refused" in reason else 5) and re.search(reason, done.stderr), done.stderr


def test_steps_outside_the_clock_are_shown_and_warmup_steps_are_not(repo, env):
    done = run(repo, env, HONEST.replace("# BEFORE", "for _ in range(7): step()"))
    assert done.returncode == 0 and "marked: 7 optimizer steps outside the clock" in done.stderr
    done = run(repo, env, HONEST.replace("# BEFORE", "with clock.warmup(model, optimizer): step()"))
    assert done.returncode == 0 and "marked" not in done.stderr


def test_fixed_files_are_those_of_the_session(repo, env):
    assert run(repo, env).returncode == 0  # begins the session
    original = (repo / "prepare.py").read_text()
    (repo / "prepare.py").write_text(original + "\n# easier\n")
    done = run(repo, env)
    assert done.returncode == 2 and "fixed file changed" in done.stderr and ": prepare.py" in done.stderr
    git(repo, "commit", "-qam", "make it easier")  # a commit does not make it right
    assert run(repo, env).returncode == 2
    git(repo, "update-index", "--assume-unchanged", "prepare.py")  # nor does hiding it from git
    assert run(repo, env).returncode == 2
    done = run(repo, env, None, "session")
    assert done.returncode == 0 and "new session" in done.stderr
    assert run(repo, env).returncode == 0


def test_without_git_it_runs_and_says_what_is_not_checked(repo, env):
    shutil.rmtree(repo / ".git")
    done = run(repo, env, GIT_CEILING_DIRECTORIES=str(repo.parent))
    assert done.returncode == 0 and "fixed files are unchanged is not checked" in done.stderr
