"""Backends, precision, peaks, memory and ranks. Tests marked gpu need a card: pytest -m gpu."""

import json
import math
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT
from test_train import small_model
from torch.distributed.distributed_c10d import Backend, BackendConfig

import prepare
import train
from harness import attention, exit_codes, parameters, training_log
from harness import device as machine

CPU = torch.device("cpu")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

# ---------------------------------------------------------------------------- which attention


def pick(wanted="auto", **backends):
    config = small_model().config
    return attention.pick_attention(train.ATTENTION_BACKENDS | backends, wanted, config, CPU)


def test_the_first_backend_that_works_is_named_with_the_reason():
    assert pick() == (train.plain_attention, "plain (cpu, float32)")
    assert pick("sdpa") == (train.sdpa_attention, "sdpa (set by ATTENTION)")


@pytest.mark.parametrize("name", ["fa3", "flash", "flush"])
def test_a_backend_that_does_not_run_is_replaced_and_named(name):
    function, why = pick(name)
    assert function is train.sdpa_attention
    assert f"no {name}: " in why


def a_wider_window(q, k, v, window):
    return train.plain_attention(q, k, v, window + 1)


def no_gradient_of_k(q, k, v, window):
    return train.plain_attention(q, k.detach() + 0 * k, v, window)


@pytest.mark.parametrize("wrong", [a_wider_window, no_gradient_of_k])
def test_a_backend_that_computes_something_else_is_not_used(wrong):
    function, why = pick("flash", flash=wrong)
    assert function is train.sdpa_attention
    assert "no flash: ValueError: wrong numbers" in why


def test_plain_is_the_last_resort():
    def broken(q, k, v, window):
        raise RuntimeError("this GPU has no kernel for that")

    for wanted in ("auto", "sdpa"):
        function, why = pick(wanted, sdpa=broken)
        assert function is train.plain_attention


@dataclass
class FakeKernels:
    """The package `kernels`, as far as it is used, and how often the hub was asked."""

    folder: Path
    downloads: int = 0
    online: bool = True

    def install_kernel(self, repository, version):
        assert (repository, version) == (attention.FA3_REPOSITORY, 1)
        if not self.online:
            raise OSError("no network")
        self.downloads += 1
        return self.folder / "snapshots" / "abc123" / "build" / "torch213-cu130"

    def get_local_kernel(self, path):
        assert path == self.folder / "snapshots" / "abc123"
        return SimpleNamespace(flash_attn_func=train.plain_attention)


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine with a Hopper GPU, an empty cache and a hub."""
    settings = replace(prepare.make_settings(), root=tmp_path)
    monkeypatch.setattr(prepare, "settings", lambda: settings)
    kernels = FakeKernels(tmp_path)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return kernels


def test_fa3_is_fetched_once_and_a_run_never_asks_the_hub(hopper, tmp_path):
    with pytest.raises(RuntimeError, match="not downloaded. hint: run prepare.py"):
        attention.FA3Kernel().flash_attn_func  # noqa: B018
    for _ in range(2):
        attention.fetch_fa3(tmp_path)
    assert hopper.downloads == 1
    hopper.online = False
    assert attention.FA3Kernel().flash_attn_func is train.plain_attention
    assert json.loads(attention.fa3_note(tmp_path).read_text())["revision"] == "abc123"


def test_without_a_network_fa3_is_left_out_with_a_hint(hopper, tmp_path, capsys):
    hopper.online = False
    attention.fetch_fa3(tmp_path)
    assert "no Flash Attention 3 (OSError: no network)" in capsys.readouterr().err
    assert not attention.fa3_note(tmp_path).exists()


# ---------------------------------------------------------------------------- the compiler


def test_a_gpu_that_torch_cannot_use_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", Path(__file__))
    with pytest.raises(prepare.UserError, match="CUDA 13.0.* too old.*docs/gpu.md"):
        machine.refuse_unused_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    machine.refuse_unused_gpu()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", Path("/nowhere"))
    machine.refuse_unused_gpu()


def test_the_record_tells_how_the_run_was_set_up():
    facts = machine.run_facts(torch.bfloat16, "no C++ compiler", "plain (cpu, bfloat16)")
    assert facts["compiled"] is False
    assert facts["eager_reason"] == "no C++ compiler"
    assert facts["attention"] == "plain"
    assert facts["dtype"] == "bfloat16"
    assert facts["threads"] == torch.get_num_threads()
    assert facts["processor"]


FAULTS = """
import resource, sys
import torch
from harness.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for _ in range(30):  # the first ones leave gaps that are a little too small
    torch.ones(2**24)  # 64 MB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_is_freed_is_used_again_without_new_pages():
    def faults(word: str) -> int:
        command = [sys.executable, "-c", FAULTS, word]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < faults("default") / 2


def test_the_speed_probe_measures_a_product():
    assert 1e-4 < machine.speed_now(CPU, torch.float32, seconds=0.05) < 1e3


# ---------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    "native, capability, dtype",
    [
        (True, (8, 0), torch.bfloat16),
        (False, (7, 5), torch.float16),
        (False, (6, 1), torch.float32),
    ],
)
def test_precision_follows_the_hardware(monkeypatch, native, capability, dtype):
    def is_bf16_supported(including_emulation=True):
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert machine.compute_dtype(torch.device("cuda")) == dtype
    assert machine.compute_dtype(torch.device("mps")) == torch.float32


def test_the_residual_stream_keeps_its_dtype():
    model = small_model(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden_states(torch.zeros(1, 8, dtype=torch.int64))
    assert hidden.dtype == torch.bfloat16


def test_an_overflow_skips_the_step_of_every_parameter_and_halves_the_scale():
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compiled=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randint(61, (2, 24))
    for overflow in (True, False):
        scaler.scale(model(x, x)).backward()
        if overflow:
            model.lm_head.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == overflow
        assert scaler.get_scale() == 2.0**9
        model.zero_grad()


def test_recorded_norms_are_those_of_unscaled_gradients():
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compiled=False)
    x = torch.randint(61, (2, 24))
    model(x, x).backward()
    want = {kind: norm.item() for kind, norm in training_log.grad_norms(optimizer).items()}
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(model(x, x)).backward()
    scaler.step(optimizer)  # unscales in place
    norms = training_log.grad_norms(optimizer)
    assert {kind: norm.item() for kind, norm in norms.items()} == pytest.approx(want, rel=1e-4)
    assert set(want) == {"muon", "adamw"}


def test_the_norm_of_a_sparse_gradient_is_that_of_the_dense_one():
    indices = torch.tensor([1, 4, 4, 7])  # a row twice: its parts are added first
    norms = []
    for sparse in (True, False):
        torch.manual_seed(0)
        embed = torch.nn.Embedding(9, 3, sparse=sparse)
        (embed(indices) * torch.arange(12.0).view(4, 3)).sum().backward()
        optimizer = torch.optim.SGD([embed.weight], lr=1.0)
        norms.append(training_log.grad_norms(optimizer)["all"])
    assert norms[0] == pytest.approx(norms[1].item())


# ---------------------------------------------------------------------------- peak rates


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 836.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("Tesla T4", 65.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peaks_by_device_name(name, tflops):
    assert machine.peak_by_name(name)[0] == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "Quadro T400",
        "NVIDIA T400 4GB",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "A card of the future",
    ],
)
def test_no_peak_is_claimed_for_a_card_that_has_another_one(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    peak, text = machine.peak_flops(torch.device("cuda"), torch.bfloat16)
    assert peak is None
    assert name in text


def test_without_a_peak_no_mfu_is_printed(capsys):
    log = training_log.TrainingLog(CPU, 4096, 10.0, 15.0, 1000, peak_flops=None)
    log.print_progress(3, 2.0, epoch=1)
    training_log.print_values({"val_bpb": 1.0, "mfu_percent": log.mfu(2048.0)})
    assert "mfu" not in capsys.readouterr().out


def test_the_peak_of_a_cpu_is_measured():
    peak, text = machine.peak_flops(CPU, torch.float32)
    assert 1e9 < peak < 1e15
    assert "measured" in text


# ---------------------------------------------------------------------------- untrained parameters


def test_a_parameter_without_first_value_is_refused_by_name(monkeypatch):
    class Gain(train.MLP):
        def __init__(self, config):
            super().__init__(config)
            self.gain = torch.nn.Parameter(torch.empty(()))

    monkeypatch.setattr(train, "MLP", Gain)
    with pytest.raises(prepare.UserError, match=r"no first value: blocks.0.mlp.gain, .*hint"):
        small_model()


def test_tied_parameters_stay_tied_and_are_refused_in_two_groups(monkeypatch):
    class Tied(train.GPT):
        def __init__(self, config, attend):
            super().__init__(config, attend)
            self.lm_head.weight = self.wte.weight

    monkeypatch.setattr(train, "GPT", Tied)
    model = small_model()
    assert model.lm_head.weight is model.wte.weight
    message = r"in two groups of the optimizer: wte.weight \(= lm_head.weight\)"
    with pytest.raises(prepare.UserError, match=message):
        train.build_optimizer(model, torch.float32, compiled=False)


def test_a_parameter_in_no_group_is_refused_by_name_or_frozen_on_purpose():
    model = small_model()
    model.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(prepare.UserError, match="in no group of the optimizer: extra. hint"):
        train.build_optimizer(model, torch.float32, compiled=False)
    model.extra.requires_grad_(False)
    train.build_optimizer(model, torch.float32, compiled=False)


def test_unchanged_parameters_are_found_bit_for_bit():
    model = small_model()
    before = parameters.fingerprints(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name not in ("wte.weight", "backout_lambda"):
                p.view(-1)[0] += 1e-3
    assert parameters.unchanged(model, before) == ["backout_lambda", "wte.weight"]


# ---------------------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    "error, code",
    [
        (prepare.UserError("bad knob"), 2),
        (exit_codes.Diverged("loss nan"), 3),
        (torch.OutOfMemoryError("CUDA out of memory"), 4),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 4),
        (MemoryError(), 4),
        (prepare.VoidScore("it sees the future"), 5),
        (RuntimeError("shape mismatch"), None),
        (KeyError("x"), None),
    ],
)
def test_each_error_has_its_exit_code(error, code):
    assert exit_codes.exit_code(error) == code


@pytest.mark.parametrize("place", ["forward", "optimizer"])
def test_out_of_memory_is_seen_in_the_optimizer_too(place):
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compiled=False)

    def trial_step():
        model(torch.randint(61, (1, 24))).sum().backward()
        if place == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory")
        optimizer.step()
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

    assert not machine.fits(trial_step, optimizer)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_sums_over_ranks_have_a_cpu_backend_on_cuda():
    # with "nccl" alone, the clock's sum of a CPU number fails at the first step
    assert machine.backend_for(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    backends = BackendConfig(Backend(machine.backend_for(torch.device("cuda", 0))))
    assert backends.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
    assert machine.backend_for(CPU) == "gloo"


# ---------------------------------------------------------------------------- runs: ranks, memory


@dataclass
class Result:
    """What tests/ranks.py did."""

    code: int
    out: str
    err: str
    losses: list[float]  # by step
    score: float | None


def read_lines(path: Path) -> list[dict]:
    return [json.loads(t) for t in path.read_text().splitlines()] if path.exists() else []


def train_in(folder: Path, env: dict, *args, world: int = 1) -> Result:
    """Run tests/ranks.py on that many ranks, in a new folder."""
    folder.mkdir(parents=True)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, *(launch if world > 1 else []), str(ROOT / "tests/ranks.py")]
    done = subprocess.run(
        [*command, *map(str, args)], cwd=folder, capture_output=True, text=True, timeout=300,
        env=env | {"AUTORESEARCH_RUN_DIR": str(folder)},
    )  # fmt: skip
    scores = read_lines(folder / "eval.jsonl")
    assert len(scores) <= 1
    losses = [record["loss"] for record in read_lines(folder / "steps.jsonl")]
    score = scores[0]["val_bpb"] if scores else None
    return Result(done.returncode, done.stdout, done.stderr, losses, score)


@pytest.fixture(scope="module")
def brief(few_rows) -> dict:
    """A short budget: every step is recorded."""
    return few_rows | {"AUTORESEARCH_TIME_BUDGET": "3"}


@pytest.fixture(scope="module")
def alone(brief, tmp_path_factory) -> Result:
    result = train_in(tmp_path_factory.mktemp("alone") / "run", brief, 5)
    assert result.code == 0, result.err
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, drill, shown",
    [
        (2, "", "= 2 ranks x 1 x 8 rows x 256"),
        (4, "", "= 4 ranks x 1 x 4 rows x 256"),
        (2, "oom:3", "out of memory: 2 rows at a time\nbatch      4096 tokens = 2 ranks x 4 x 2"),
        (2, "unused", "unused     not trained, no part of the loss: blocks.0.unused.weight"),
        (1, "oom:0", "out of memory: 1 row at a time, activation checkpointing\nbatch      4096"),
    ],
)
def test_ranks_and_small_memory_change_no_result(brief, alone, tmp_path, world, drill, shown):
    result = train_in(tmp_path / "run", brief, 5, drill, world=world)
    assert result.code == 0, result.err
    assert result.losses == pytest.approx(alone.losses, rel=5e-6)
    assert result.score == pytest.approx(alone.score, rel=1e-5)
    assert result.out.count("METRIC val_bpb=") == result.out.count("attention  ") == 1
    assert shown in result.out


@pytest.mark.slow
def test_ranks_stop_together(brief, tmp_path):
    result = train_in(tmp_path / "run", brief, 0, world=2)
    assert result.code == 0
    assert result.score
    counts = re.findall(r"rank \d did (\d+) steps", result.err)
    assert len(counts) == 2
    assert len(set(counts)) == 1
    assert int(counts[0]) > 0


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(few_rows, tmp_path):
    result = train_in(tmp_path / "run", few_rows, 0, "die", world=2)  # would run for 300 s
    assert result.code != 0
    assert result.score is None
    assert "METRIC" not in result.out
    assert re.search(r"exitcode\s*:\s*9", result.err)
    assert "rank      : 1" in result.err


@pytest.mark.slow
def test_a_model_refused_on_one_rank_is_refused(few_rows, tmp_path):
    result = train_in(tmp_path / "run", few_rows, 2, "void", world=2)
    assert result.code != 0
    assert result.score is None
    assert "VoidScore: the logits contain NaN" in result.err


@pytest.mark.slow
def test_a_loss_that_is_nan_on_one_rank_ends_all(few_rows, tmp_path):
    result = train_in(tmp_path / "run", few_rows, 0, "nan", world=2)
    assert result.code != 0
    assert result.score is None
    assert re.search(r"Diverged: loss nan at step \d", result.err)


# ---------------------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("name", list(train.ATTENTION_BACKENDS))
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("window", [0, 1, 16, 100, 200])
class TestBackendsOnAGpu:
    pytestmark = gpu

    def test_backend_equals_plain(self, name, group, window):
        if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("no Hopper GPU")
        made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        qkv = [torch.randn(2, 200, h, 64, **made) for h in (4, 4 // group, 4 // group)]
        y = torch.compile(train.ATTENTION_BACKENDS[name])(*qkv, window)
        want = train.plain_attention(*(t.float() for t in qkv), window)
        torch.testing.assert_close(y.float(), want, atol=0.03, rtol=0.03)
        results = (torch.autograd.grad(t.float().square().sum(), qkv) for t in (y, want))
        for mine, plain in zip(*results, strict=True):
            assert (mine - plain).norm() <= 0.03 * plain.norm()


class TestRunOnAGpu:
    pytestmark = gpu

    def test_stream_and_loss_on_the_device(self):
        device = torch.device("cuda")
        dtype = machine.compute_dtype(device)
        model = small_model(dtype=dtype).to(device)
        x = torch.randint(61, (4, 24), device=device)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            assert model.hidden_states(x).dtype == dtype
            loss = model(x, x)
            whole = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        assert loss.item() == pytest.approx(whole.item(), rel=1e-2)
        optimizer = train.build_optimizer(model, dtype, compiled=True)
        loss.backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())

    def test_real_memory_runs_out_and_is_halved(self, prepared, tmp_path):
        env = {k: v for k, v in prepared.items() if k.startswith("AUTORESEARCH_")}
        env |= {"AUTORESEARCH_TIME_BUDGET": "5", "AUTORESEARCH_RUN_DIR": str(tmp_path)}
        code = (
            "import torch, train; torch.cuda.set_per_process_memory_fraction(0.01)\n"
            "train.COMPILE = False\n"
            "train.TOTAL_BATCH_SIZE = 2**20\n"
            "train.DEVICE_BATCH_SIZE = 4096\n"
            "train.main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "rows at a time" in done.stdout
        assert "METRIC val_bpb" in done.stdout
