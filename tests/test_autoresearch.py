"""bash autoresearch.sh: the environment that it finds or builds, runs with the real prepare.py."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, clean_environment, git, make_checkout

# A complete train.py in a few lines: unigram counts of one batch, three timed steps, a true score.
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
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A clone with the real prepare.py, shared: each test writes its own train.py."""
    return make_checkout(tmp_path_factory.mktemp("clone"), HONEST, prepare=None)


def run(checkout, environment, train, **changes):
    (checkout / "train.py").write_text(train)
    settings = {"AUTORESEARCH_PYTHON": sys.executable, "AUTORESEARCH_TIME_BUDGET": "2"}
    return subprocess.run(
        ["bash", "autoresearch.sh"], cwd=checkout, env=environment | settings | changes, text=True,
        capture_output=True, check=False,
    )  # fmt: skip


# ---- with the real prepare.py ----


@pytest.mark.slow
def test_the_same_seed_gives_the_same_score_and_another_one_another(checkout, few_rows):
    done = run(checkout, few_rows, HONEST)
    assert done.returncode == 0, done.stderr
    score = float(re.search(r"^METRIC val_bpb=(\d\.\d{6})$", done.stdout, re.M)[1])
    record = json.loads((checkout / ".autoresearch/last/eval.jsonl").read_text())
    guessing = math.log2(2048) * record["tokens"] / record["bytes"]
    assert 0.6 * guessing < score < guessing  # unigram counts of one batch
    assert run(checkout, few_rows, HONEST).stdout == done.stdout
    other = run(checkout, few_rows, HONEST, AUTORESEARCH_SEED="7")
    assert other.returncode == 0 and other.stdout != done.stdout  # the order of the data


@pytest.mark.slow
def test_an_older_train_py_scores_and_is_marked(checkout, few_rows):
    """No clock, no METRIC lines, only the block."""
    old = HONEST.replace("clock = Clock()", "").replace("clock.start()", "")
    old = old.replace("clock.stop()", "").split("# PRINT")[0]
    done = run(checkout, few_rows, old + 'print(f"---\\nval_bpb:          {bpb:.6f}\\n")\n')
    assert done.returncode == 0, done.stderr
    assert re.search(r"^METRIC val_bpb=\d\.\d{6}$", done.stdout, re.M)
    assert "marked: the clock of prepare.py was not used" in done.stderr


@pytest.mark.slow
def test_an_unknown_profile_is_refused_by_prepare_in_its_own_words(checkout):
    done = run(checkout, clean_environment(), HONEST, AUTORESEARCH_PROFILE="huge")
    assert done.returncode == 2
    assert "AUTORESEARCH_PROFILE='huge' is unknown. hint: one of full, small, tiny" in done.stderr


# ---- the environment, with stand-ins for the interpreters on PATH ----

# Does what the set-up asks of a Python: checks, `-m venv`, `-m pip`, reading pyproject.toml.
FAKE_PYTHON = """#!/bin/bash
echo "{name} $*" >>"{log}"
case "$*" in
*version_info*) exit {code} ;;
"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
"-m pip"*) cat .venv/requirements.txt >>"{log}" ;;
"-m harness"*) echo "harness of {name}" ;;
-) exec "{real}" - ;;
esac
"""


class Machine:
    """A clone without AUTORESEARCH_PYTHON, and a PATH on which only fake interpreters are found."""

    def __init__(self, folder: Path):
        self.root = make_checkout(folder / "clone", "")
        self.bin, self.log = folder / "bin", folder / "calls"
        self.bin.mkdir()
        for name in ("bash", "git", "cmp", "cp", "rm", "mkdir", "dirname", "cat"):
            (self.bin / name).symlink_to(shutil.which(name))

    def install(self, name: str, suitable: bool = True) -> None:
        code = FAKE_PYTHON.format(
            name=name, log=self.log, code=int(not suitable), real=sys.executable
        )
        (self.bin / name).write_text(code)
        (self.bin / name).chmod(0o755)

    def run(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "autoresearch.sh", *arguments], cwd=self.root, capture_output=True, text=True,
            env=clean_environment(PATH=str(self.bin)) | changes, check=False,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_the_newest_suitable_python_is_taken(machine):
    machine.install("python3", suitable=False)
    machine.install("python3.10")
    machine.install("python3.12")
    done = machine.run("status")
    assert done.stdout == "harness of python3.12\n", done.stderr
    assert "setting up .venv" in done.stderr


def test_without_a_suitable_python_it_says_which_are(machine):
    machine.install("python3", suitable=False)
    done = machine.run()
    assert done.returncode == 2 and "no Python 3.10 to 3.14 with pip on PATH" in done.stderr


def test_every_pin_is_installed_whatever_its_name(machine):
    path = machine.root / "pyproject.toml"
    path.write_text(
        path.read_text().replace('"requests', '"a-b2_c==1.0; os_name != \'x\'",\n    "requests')
    )
    machine.install("python3")
    assert machine.run().returncode == 0
    calls = machine.log.read_text().splitlines()
    assert "a-b2_c==1.0; os_name != 'x'" in calls
    assert any(line.startswith("torch==") for line in calls)
    assert any(line.startswith("pytest==") for line in calls)


def test_the_environment_is_built_once_and_again_when_its_python_went_away(machine):
    machine.install("python3")
    assert "setting up" in machine.run().stderr
    assert "setting up" not in machine.run().stderr
    (machine.root / ".venv/bin/python").unlink()
    (machine.root / ".venv/bin/python").symlink_to("/nowhere/python3")
    done = machine.run()
    assert done.returncode == 0 and "setting up .venv" in done.stderr
    with open(machine.root / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    assert "setting up" in machine.run().stderr


def test_uv_builds_the_environment_where_it_is_installed(machine):
    machine.install("python-of-uv")
    place = '"$UV_PROJECT_ENVIRONMENT/bin'
    (machine.bin / "uv").write_text(
        f'#!/bin/bash\nmkdir -p {place}"\ncp "{machine.bin}/python-of-uv" {place}/python"\n'
    )
    (machine.bin / "uv").chmod(0o755)
    done = machine.run("status", UV_PROJECT_ENVIRONMENT="/elsewhere")
    assert done.stdout == "harness of python-of-uv\n", done.stderr


def test_a_named_interpreter_is_used_as_it_is(machine):
    machine.install("mine")
    done = machine.run("status", AUTORESEARCH_PYTHON=str(machine.bin / "mine"))
    assert done.stdout == "harness of mine\n" and "setting up" not in done.stderr
    done = machine.run(AUTORESEARCH_PYTHON="/nowhere/python")
    assert done.returncode == 2
    assert "AUTORESEARCH_PYTHON=/nowhere/python is no Python 3.10 or newer" in done.stderr
    machine.install("bare", suitable=False)  # too old, or without the packages
    done = machine.run(AUTORESEARCH_PYTHON=str(machine.bin / "bare"))
    assert done.returncode == 2 and "bare is no Python 3.10 or newer with" in done.stderr


def test_packages_of_another_python_do_not_stand_in_for_the_pinned_ones(machine):
    machine.install("python3")
    machine.run()
    shown = '#!/bin/bash\n[ "$1" != -m ] || echo "path=$PYTHONPATH"\n'
    (machine.root / ".venv/bin/python").write_text(shown)
    assert machine.run(PYTHONPATH="/other/packages").stdout == "path=\n"


# ---- line ends ----


def test_a_clone_with_autocrlf_has_plain_line_ends_and_runs(tmp_path):
    source = make_checkout(tmp_path / "source", "print('no score')")
    git(tmp_path, "clone", "-q", "-c", "core.autocrlf=true", str(source), "clone")
    assert b"\r" not in (tmp_path / "clone/autoresearch.sh").read_bytes()
    done = subprocess.run(
        ["bash", "autoresearch.sh"], cwd=tmp_path / "clone", capture_output=True, text=True,
        env=clean_environment(AUTORESEARCH_PYTHON=sys.executable), check=False,
    )  # fmt: skip
    assert done.returncode == 5 and "without printing val_bpb" in done.stderr


def test_the_script_is_short_and_hands_over():
    lines = (ROOT / "autoresearch.sh").read_text().splitlines()
    assert len(lines) <= 60 and lines[-1] == 'exec "$PY" -m harness "$@"'
