"""Backends, precision, memory and many ranks; the tests marked gpu need an NVIDIA card: python -m pytest -m gpu."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_train import brute_attention, small_model
from torch.utils.flop_counter import FlopCounterMode

import machine
import prepare
import train

REPO = Path(__file__).resolve().parent.parent
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


# ---------------------------------------------------------------------------- attention


def test_a_short_window_costs_less():
    q = torch.randn(1, 512, 2, 8)
    counts = {}
    for window in (16, 128, 512):
        with FlopCounterMode(display=False) as counter:
            machine.plain_attention(q, q, q, window)
        counts[window] = counter.get_total_flops()
    assert counts[16] < counts[128] / 2 < counts[512] / 4


@pytest.mark.parametrize("window", [0, 5, 100, 199])
@pytest.mark.parametrize("attend", [machine.sdpa_attention, machine.plain_attention])
def test_blocks_equal_one_mask(attend, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, h, 16, requires_grad=True) for h in (4, 2, 2))
    distance = torch.arange(200)[:, None] - torch.arange(200)
    mask = (distance >= 0) & (distance <= window)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    want = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    got, weights = attend(q, k, v, window), torch.randn(2, 200, 4, 16)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    for a, b in zip(torch.autograd.grad((got * weights).sum(), (q, k, v)),
                    torch.autograd.grad((want * weights).sum(), (q, k, v)), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def fake_varlen(q, k, v, starts, ends, longest_q, longest_k, window_size, enable_gqa):
    """What varlen_attn's documentation says, row by row."""
    assert starts.dtype == torch.int32 and window_size[1] == 0 and enable_gqa == (q.size(1) != k.size(1))
    rows = zip(starts.tolist(), ends.tolist()[1:], strict=False)
    return torch.cat([brute_attention(q[None, a:b], k[None, a:b], v[None, a:b], window_size[0])[0].float() for a, b in rows])


def test_flash_packs_the_rows(monkeypatch):
    monkeypatch.setattr(machine, "varlen_attn", fake_varlen)
    q, k, v = (torch.randn(3, 12, h, 8) for h in (4, 2, 2))
    torch.testing.assert_close(machine.flash_attention(q, k, v, 4).double(), brute_attention(q, k, v, 4), atol=1e-5, rtol=1e-5)


def test_backends_are_tried_and_the_reason_is_shown(monkeypatch):
    config, cpu = small_model().config, torch.device("cpu")
    pick = lambda wanted="auto": machine.pick_attention(config, cpu, wanted)  # noqa: E731
    assert pick() == (machine.plain_attention, "plain (cpu, float32)")
    assert pick("sdpa") == (machine.sdpa_attention, "sdpa (set by ATTENTION)")
    for name, reason in (("fa3", "no fa3: "), ("flash", "no flash: "), ("flush", "no flush: KeyError")):
        attend, why = pick(name)
        assert attend is machine.sdpa_attention and reason in why
    wider = lambda q, k, v, window: machine.plain_attention(q, k, v, window + 1)  # noqa: E731
    no_gradient = lambda q, k, v, window: machine.plain_attention(q, k.detach() + 0 * k, v, window)  # noqa: E731
    for wrong in (wider, no_gradient):
        monkeypatch.setitem(machine.BACKENDS, "flash", wrong)
        assert pick("flash")[0] is machine.sdpa_attention and "wrong numbers" in pick("flash")[1]


# ---------------------------------------------------------------------------- loss


@pytest.mark.parametrize("n", [1, 40, 16 * 40000])
def test_chunked_loss_equals_the_whole(n):
    torch.manual_seed(0)
    vocab = 61 if n < 1000 else 7
    x, weight = torch.randn(n, 4, requires_grad=True), (5 * torch.randn(vocab, 4)).requires_grad_()
    y = torch.randint(vocab, (n,))
    whole = F.cross_entropy(train.softcap(x @ weight.T), y)
    mine = train.ChunkedLoss.apply(x, weight, y)
    torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(3 * mine, (x, weight)), torch.autograd.grad(3 * whole, (x, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_no_chunk_holds_all_logits(monkeypatch):
    sizes, softcap = [], train.softcap
    monkeypatch.setattr(train, "softcap", lambda z: sizes.append(len(z)) or softcap(z))
    x = torch.zeros(4096, 2, requires_grad=True)
    train.ChunkedLoss.apply(x, torch.zeros(20000, 2, requires_grad=True), torch.zeros(4096, dtype=torch.int64))
    assert max(sizes) == 256 and sum(sizes) == 4096


def test_checkpointing_changes_no_gradient():
    model, x = small_model(), torch.randint(61, (2, 24))
    grads = []
    for model.checkpointing in (False, True):
        model.zero_grad()
        train.train_loss(model, x, x).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------------- precision, peaks


@pytest.mark.parametrize(
    "native, capability, dtype",
    [(True, (8, 0), torch.bfloat16), (False, (7, 5), torch.float16), (False, (6, 1), torch.float32)],
)
def test_precision_follows_the_hardware(monkeypatch, native, capability, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert machine.compute_dtype(torch.device("cuda")) == dtype
    assert machine.compute_dtype(torch.device("mps")) == torch.float32


def test_the_residual_stream_keeps_its_dtype():
    model = small_model(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.trunk(torch.zeros(1, 8, dtype=torch.int64)).dtype == torch.bfloat16


def test_an_overflow_skips_the_step_and_halves_the_scale():
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compile=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = [p.clone() for p in model.parameters()]
    x = torch.randint(61, (2, 24))
    for overflow in (True, False):
        scaler.scale(train.train_loss(model, x, x)).backward()
        if overflow:
            model.lm_head.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == overflow and scaler.get_scale() == 2.0**9
        if not overflow:  # unscaled in place: what grad_norms then reads
            norms = train.grad_norms(optimizer)
            model.zero_grad()
        model.zero_grad()
    for p, b in zip(model.parameters(), before, strict=True):
        p.data.copy_(b)
    train.train_loss(model, x, x).backward()
    assert norms["adamw"].item() == pytest.approx(train.grad_norms(optimizer)["adamw"].item(), rel=1e-4)


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H100 80GB HBM3", 989.5), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H200", 989.5), ("NVIDIA H800", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA A10", 125.0), ("NVIDIA A10G", 70.0), ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05), ("NVIDIA GeForce RTX 3090", 71.0), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 5090", 209.5), ("NVIDIA RTX 6000 Ada Generation", 364.2), ("NVIDIA GB10", 125.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)  # fmt: skip
def test_peaks_by_device_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    assert machine.peak_flops(torch.device("cuda"), torch.bfloat16)[0] == tflops * 1e12


def test_unknown_peaks_are_measured():
    peak, source = machine.peak_flops(torch.device("cpu"), torch.float32)
    assert 1e9 < peak < 1e15 and source.startswith("measured")


# ---------------------------------------------------------------------------- whole runs: ranks, memory


def train_on(env, folder, world, *args, **changes):
    """(exit code, stdout, stderr, losses by step, recorded score or None) of tests/ranks.py on that many ranks."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    command = [sys.executable, *launch, str(REPO / "tests/ranks.py"), *map(str, args)]
    done = subprocess.run(command, env=env | {"AUTORESEARCH_RUN_DIR": str(folder)} | changes, cwd=folder, capture_output=True,
                          text=True, timeout=150)  # fmt: skip
    lines = lambda name: [json.loads(t) for t in (folder / name).read_text().splitlines()] if (folder / name).exists() else []  # noqa: E731
    scores = lines("eval.jsonl")
    assert len(scores) <= 1
    return done.returncode, done.stdout, done.stderr, [r["loss"] for r in lines("steps.jsonl")], scores and scores[0]["val_bpb"]


@pytest.fixture(scope="module")
def alone(short, tmp_path_factory):
    env = short | {"AUTORESEARCH_TIME_BUDGET": "3"}  # a short budget: every step is recorded
    code, out, err, losses, score = train_on(env, tmp_path_factory.mktemp("alone") / "run", 1, 5)
    assert code == 0, err
    return env, losses, score


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, drill, shown",
    [
        (2, "", "= 2 ranks x 1 x 8 rows x 256"),
        (4, "", "= 4 ranks x 1 x 4 rows x 256"),
        (2, "oom:3", "out of memory: 2 rows at a time\nbatch      4096 tokens = 2 ranks x 4 x 2 rows x 256"),
        (1, "oom:0", "1 rows at a time, activation checkpointing\nbatch      4096 tokens = 1 ranks x 16 x 1 rows x 256"),
    ],
)
def test_ranks_and_small_memory_change_no_result(alone, tmp_path, world, drill, shown):
    env, want, score = alone
    code, out, err, losses, mine = train_on(env, tmp_path / "run", world, 5, drill)
    assert code == 0 and len(losses) == len(want) == 5, err
    assert mine == pytest.approx(score, rel=1e-5)
    assert losses == pytest.approx(want, rel=5e-6)
    assert out.count("METRIC val_bpb=") == out.count("attention  ") == 1
    assert shown in out


@pytest.mark.slow
def test_ranks_stop_together(short, tmp_path):
    code, out, err, losses, score = train_on(short, tmp_path / "run", 2, 0, AUTORESEARCH_TIME_BUDGET="3")
    assert code == 0 and score
    counts = re.findall(r"rank \d did (\d+) steps", err)
    assert len(counts) == 2 and len(set(counts)) == 1 and int(counts[0]) > 0


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(short, tmp_path):
    code, out, err, losses, score = train_on(short, tmp_path / "run", 2, 0, "die")  # would run for 300 s
    assert code != 0 and not score and "METRIC" not in out
    assert re.search(r"exitcode\s*:\s*9", err) and "rank      : 1" in err


@pytest.mark.slow
def test_a_model_refused_on_one_rank_is_refused(short, tmp_path):
    code, out, err, losses, score = train_on(short, tmp_path / "run", 2, 2, "void")
    assert code != 0 and not score and "METRIC" not in out and "VoidScore: the logits contain NaN" in err


def test_the_batch_is_divided_over_ranks_or_refused(monkeypatch):
    for name, value in dict(MAX_SEQ_LEN=256, TOTAL_BATCH_SIZE=4096 * 3, DEVICE_BATCH_SIZE=16).items():
        monkeypatch.setattr(train, name, value)
    assert [train.split_batch(world) for world in (1, 3, 6)] == [(48, 16), (16, 16), (8, 8)]
    with pytest.raises(prepare.UserError, match=r"12288 .* 9 rows x 256 tokens x 5 ranks = 11520.*11520 or 23040"):
        train.split_batch(5)


# ---------------------------------------------------------------------------- on a GPU: never run so far


@pytest.mark.parametrize("name", ["fa3", "flash", "sdpa", "plain"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("window", [0, 1, 16, 100, 200])
class TestGpu:
    pytestmark = gpu

    def test_backend_equals_brute_force(self, name, group, window):
        if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("no Hopper GPU")
        attend = machine.load_fa3() if name == "fa3" else machine.BACKENDS[name]
        like = dict(device="cuda", dtype=torch.bfloat16, requires_grad=True)
        q, k, v = (torch.randn(2, 200, h, 64, **like) for h in (4, 4 // group, 4 // group))
        y, want = torch.compile(attend)(q, k, v, window), machine.plain_attention(*(t.float() for t in (q, k, v)), window)
        torch.testing.assert_close(y.float(), want, atol=0.03, rtol=0.03)
        mine, theirs = (torch.autograd.grad(t.float().square().sum(), (q, k, v)) for t in (y, want))
        for a, b in zip(mine, theirs, strict=True):
            assert (a - b).norm() <= 0.03 * b.norm()


class TestGpuRun:
    pytestmark = gpu

    def test_stream_and_loss_on_the_device(self):
        device = torch.device("cuda")
        dtype = machine.compute_dtype(device)
        model = small_model(dtype=dtype).to(device)
        x = torch.randint(61, (4, 24), device=device)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            assert model.trunk(x).dtype == dtype
            model(x)
            loss = train.train_loss(model, x, x)
            whole = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        assert loss.item() == pytest.approx(whole.item(), rel=1e-2)
        optimizer = train.build_optimizer(model, dtype, compile=True)
        loss.backward()
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())

    def test_real_memory_runs_out_and_is_halved(self, prepared, tmp_path):
        env = os.environ | {k: v for k, v in prepared.items() if k.startswith("AUTORESEARCH_")}
        env |= {"AUTORESEARCH_TIME_BUDGET": "5", "AUTORESEARCH_RUN_DIR": str(tmp_path)}
        code = "import torch, train; torch.cuda.set_per_process_memory_fraction(0.01); train.COMPILE = False; "
        code += "train.TOTAL_BATCH_SIZE, train.DEVICE_BATCH_SIZE = 2**20, 4096; train.main()"
        done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and "rows at a time" in done.stdout and "METRIC val_bpb" in done.stdout, done.stderr
