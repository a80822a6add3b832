"""The step of profile "full" on a GPU that is not there: see tests/fake_cuda.py."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import ROOT, clean_environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has real CUDA parts"),
]


@dataclass
class Step:
    """What tests/fake_cuda.py printed: [type, device, shape] and the like."""

    loss: list
    logits: list
    grads: list[str]
    state: list[str]
    graphs: list[int]  # compiled so far, after each of three steps
    breaks: int  # of graphs
    kept_gib: float  # of activations, for the backward pass
    rows: int


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fakecuda") / "libfakecuda.so"
    folder = Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{folder}/include"]
    command += [str(ROOT / "tests/fakecuda.cpp"), "-o", str(path)]
    command += [f"-L{folder}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return path


def fake_step(library: Path, attention: str, mode: str, dtype: str = "bfloat16") -> Step:
    command = [sys.executable, str(ROOT / "tests/fake_cuda.py"), str(library)]
    environment = clean_environment(PYTHONPATH=str(ROOT), HOME=os.environ["HOME"])
    done = subprocess.run(
        [*command, attention, mode, dtype], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Step(**json.loads(done.stdout.splitlines()[-1]))


def check(step: Step) -> None:
    """Weights, gradients and optimizer state are float32 on the GPU, and so is the loss."""
    assert step.loss == ["torch.float32", "cuda:0", []]
    assert step.logits == ["torch.float32", "cuda:0", [2, 2048, 8196]]
    assert step.grads == ["torch.float32 cuda:0"]
    assert step.state in (["torch.float32 cuda:0"], [])
    assert step.rows == 128


@pytest.mark.parametrize("attention", ["fa3", "flash", "sdpa"])
def test_each_attention_backend_is_called_as_it_wants(library, attention):
    check(fake_step(library, attention, "eager"))


def test_the_compiled_step_has_no_break_recompiles_nothing_and_fits(library):
    step = fake_step(library, "fa3", "compiled")
    check(step)
    assert step.breaks == 0
    assert step.graphs[0] > 0
    assert step.graphs[2] == step.graphs[1] == step.graphs[0]
    assert step.kept_gib < 45  # a card has 80, weights and optimizer take 2, the loss 4 of them


def test_float16_with_checkpointing_keeps_little(library):
    step = fake_step(library, "sdpa", "checkpointing", "float16")
    check(step)
    assert step.kept_gib < 6
