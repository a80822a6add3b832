"""What training needs of a machine: precision, compiler, peak, memory, attention, checkpoints. A fixed file, like prepare.py."""

import math
import os
import re
import resource
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

import prepare
from prepare import UserError

# ---------------------------------------------------------------------------- precision, compiler, peak, memory

# Dense bf16 with float32 sums (fp16 on V100 and T4), as remembered from data sheets and not checked; first match wins.
PEAK_TFLOPS = {
    "B200": 2250.0, "H200": 989.5, "H100 PCIe": 756.0, "H100 NVL": 835.5, "H100": 989.5, "H800": 989.5, "A100": 312.0,
    "A10G": 70.0, "A10": 125.0, "L40S": 362.05, "L40": 181.05, "L4": 121.0, "RTX PRO 6000": 503.8, "6000 Ada": 364.2,
    "A6000": 154.8, "RTX 5090": 209.5, "RTX 5080": 112.6, "RTX 4090": 165.2, "RTX 4080": 97.5, "RTX 3090": 71.0,
    "RTX 3080": 59.5, "GB10": 125.0, "V100": 125.0, "T4": 65.0, "MI300X": 1307.4,
}  # fmt: skip


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 only where the device computes it natively: emulated it is many times slower than float32."""
    if device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.bfloat16
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    volta_or_turing = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 7
    return torch.float16 if volta_or_turing else torch.float32


def can_compile(device: torch.device) -> str:
    """'' if torch.compile works here (it needs a compiler and Python's headers), else why not."""
    if device.type == "mps":
        return "not on MPS"
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        return "no C++ compiler"
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
        return ""
    except Exception as e:  # whatever is missing: training goes on without
        return f"{type(e).__name__}: {str(e).strip().splitlines()[0][:100]}"


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(floating-point operations a second, where the number is from)."""
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for key, tflops in PEAK_TFLOPS.items():
            if key in name:
                return tflops * 1e12, f"table, {key}"
    n, best = 2048, math.inf
    a = torch.randn(n, n, device=device).to(dtype)
    for _ in range(8):
        start = time.perf_counter()
        a @ a
        prepare.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best, f"measured, {str(dtype)[6:]} {n}x{n} product"


def peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def fits(micro_step, optimizer) -> bool:
    """Whether two steps fit into the memory of every rank; the second one holds the optimizer's state too."""
    for _ in range(2):
        try:
            micro_step()
            full = 0
        except RuntimeError as e:
            if not re.search("out of memory|can't allocate", str(e)):
                raise
            full = 1
        if prepare.sum_over_ranks(full):
            return False
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return True


# ---------------------------------------------------------------------------- attention

# All take q [B, T, H, D] and k, v [B, T, H/g, D] and mean the same: query i sees keys i-window ... i.


def in_blocks(attend, q, k, v, window: int):
    """attend(q, k, v, mask) on heads-first tensors, a block of queries at a time with only the keys that it can see."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    seq_len = q.size(2)
    size = max(64, min(window, seq_len) // 2)
    out = []
    for start in range(0, seq_len, size):
        end, first = min(start + size, seq_len), max(0, start - window)
        distance = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        mask = (distance >= 0) & (distance <= window)
        out.append(attend(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], mask))
    return torch.cat(out, 2).transpose(1, 2)


def plain_attention(q, k, v, window: int):
    """Two products and a float32 softmax: compiled on a CPU faster than its flash attention at short contexts."""

    def attend(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)).float() * q.size(-1) ** -0.5
        return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v

    group = q.size(2) // k.size(2)
    return in_blocks(attend, q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), window)


def sdpa_attention(q, k, v, window: int):
    """torch's scaled_dot_product_attention, which knows causal but not windows."""
    gqa = q.size(2) != k.size(2)
    if window < q.size(1) - 1:
        attend = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)  # noqa: E731
        return in_blocks(attend, q, k, v, window)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2)


def flash_attention(q, k, v, window: int):
    """Flash Attention 2 in torch's CUDA build, from Ampere on: knows windows, needs no mask and no Triton."""
    B, T = q.shape[:2]
    starts = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    y = varlen_attn(q, k, v, starts, starts, T, T, window_size=(window, 0), enable_gqa=q.size(1) != k.size(1))
    return y.unflatten(0, (B, T))


def load_fa3():
    """Flash Attention 3."""
    from kernels import get_kernel

    if torch.cuda.get_device_capability()[0] != 9:
        raise RuntimeError("no Hopper GPU")
    flash = get_kernel("kernels-community/flash-attn3", version=1).flash_attn_func
    return lambda q, k, v, window: flash(q, k, v, causal=True, window_size=(window, 0))


BACKENDS = {"flash": flash_attention, "sdpa": sdpa_attention, "plain": plain_attention}  # and fa3, once it is loaded


def try_attention(attend, config, device) -> None:
    """One real call, forward and backward: a backend with another window would train another model."""
    heads = (config.n_head, config.n_kv_head, config.n_kv_head)
    qkv = [torch.randn(2, 96, h, config.n_embd // config.n_head, device=device, dtype=config.dtype) for h in heads]
    qkv = [t.requires_grad_() for t in qkv]
    for window in (17, 96):
        ys = [f(*qkv, window) for f in (attend, plain_attention)]
        mine, plain = ([y, *torch.autograd.grad(y.float().square().sum(), qkv)] for y in ys)
        if not all((a - b).norm() <= 0.03 * b.norm() for a, b in zip(mine, plain, strict=True)):
            raise ValueError("wrong numbers in a trial call")


def pick_attention(config, device: torch.device, wanted: str = "auto"):
    """(function, name and why): the first backend for this device that loads and passes its trial."""
    kind = f"{device.type}, {str(config.dtype)[6:]}"
    auto = {"cpu": ["plain"], "cuda, bfloat16": ["fa3", "flash", "sdpa"]}
    names = [wanted, "sdpa"] if wanted != "auto" else auto.get(kind, auto.get(device.type, ["sdpa"]))
    why = [kind if wanted == "auto" else "set by ATTENTION"]
    for name in names:
        try:
            attend = load_fa3() if name == "fa3" else BACKENDS[name]
            try_attention(attend, config, device)
            return attend, f"{name} ({'; '.join(why)})"
        except Exception as e:  # whatever it is, the next one means the same
            why.append(f"no {name}: {type(e).__name__}: {str(e).strip()[:200]}")
    raise UserError(f"no attention works here: {'; '.join(why)}")


# ---------------------------------------------------------------------------- checkpoints

CHECKPOINTS = Path("checkpoints")  # a folder for each run


def save_checkpoint(folder: Path, step: int, state: dict) -> None:
    """Written aside and renamed, the two newest are kept. Each rank writes its own: it has a share of the optimizer's state."""
    rank = prepare.ranks()[0]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step:08d}-{rank}.pt"
    with open(path.with_suffix(".part"), "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())  # or a power cut could leave a whole name on half a file
    os.replace(path.with_suffix(".part"), path)
    for old in sorted(folder.glob(f"*-{rank}.pt"))[:-2]:
        old.unlink()


def load_checkpoint(like: dict, device: torch.device) -> tuple[Path, dict]:
    """(folder, state) of the newest checkpoint that every rank has. Raises UserError if there is none, or one of another run."""
    rank, world = prepare.ranks()
    for path in sorted(CHECKPOINTS.glob("*/*-0.pt"), reverse=True):
        paths = [path.with_name(f"{path.name[:-5]}-{r}.pt") for r in range(world)]
        if all(p.exists() for p in paths):
            state = torch.load(paths[rank], map_location=device, weights_only=True)
            if other := [f"{k} {v}, not {like[k]}" for k, v in state["like"].items() if v != like[k]]:
                raise UserError(f"{path} has {'; '.join(other)}. hint: set it as it was, or start anew without --resume")
            return path.parent, state
    raise UserError(f"no checkpoint in {CHECKPOINTS.resolve()}. hint: 'train.py --save' writes them")
