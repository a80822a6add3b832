"""What training needs to know of the machine: processes, precision, peak rate, memory."""

import contextlib
import ctypes
import gc
import math
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prepare
from harness.common import UserError, is_out_of_memory
from harness.compiler import set_up_compiler

# ---------------------------------------------------------------------------- processes


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")  # is there when the driver is loaded


def refuse_unused_gpu() -> None:
    """A GPU with a driver too old for this torch must not become a run on the CPU.

    Raises:
        UserError: torch was built for CUDA and there is an NVIDIA driver, but no usable device.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None or hidden in ("", "-1", "NoDevFiles"):
        return
    if NVIDIA_DRIVER.exists():
        raise UserError(
            f"there is an NVIDIA driver, but torch {torch.__version__} (CUDA {torch.version.cuda}) "
            "cannot use a GPU: the driver is too old, or the card is. hint: update the driver "
            "(CUDA 13 needs 580 or newer), or install another torch, see docs/gpu.md; "
            "CUDA_VISIBLE_DEVICES= trains on the CPU on purpose"
        )


def backend_for(device: torch.device) -> str:
    """The communication backend. Clock and score are summed on the CPU, on any machine."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def start_process() -> torch.device:
    """Join the other ranks, choose the device, set up the compiler.

    Of several ranks only rank 0 prints to stdout.

    Raises:
        UserError: there is an NVIDIA GPU that torch cannot use.
    """
    if hasattr(sys.stdout, "reconfigure"):  # no character of a sample can end a run
        sys.stdout.reconfigure(errors="backslashreplace")
        sys.stderr.reconfigure(errors="backslashreplace")
    set_up_compiler(prepare.settings().root / "compiled")
    device = prepare.get_device()
    if device.type == "cpu":
        refuse_unused_gpu()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # Ten minutes: the first compilation of one rank can keep the others waiting
        dist.init_process_group(backend_for(device), timeout=timedelta(minutes=10))
    if prepare.ranks()[0]:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    torch.set_float32_matmul_precision("high")
    return device


def keep_freed_memory() -> None:
    """Let glibc hand freed memory out again instead of giving it back to the system.

    It gives every block over 32 MB back at once, by default. Logits are larger, so each step would
    pay for new pages: 3 to 4% of its time with `tiny` on two cores. The price is a peak that
    differs between equal runs: 0.9 to 3 GB were seen, and 2.8 GB when called before compiling. The
    numbers are those of <malloc.h>; other systems are left as they are.
    """
    trim_threshold, mmap_max = -1, -4
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_max, 0)


def end_process() -> None:
    """Leave the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def data_parallel(model: torch.nn.Module, device: torch.device, find_unused: bool):
    """The model itself on one rank; on several, wrapped to average the gradients over them."""
    if prepare.ranks()[1] == 1:
        return model
    # The blocks are compiled one by one: their gradients arrive one by one without its help
    torch._dynamo.config.optimize_ddp = False
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,  # they never change
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
    )


def no_sync(model: torch.nn.Module):
    """Context: gradients are added up on this rank only."""
    wrapped = isinstance(model, DistributedDataParallel)
    return model.no_sync() if wrapped else contextlib.nullcontext()


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor over all ranks, the same on each."""
    world = prepare.ranks()[1]
    if world == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total / world


# ---------------------------------------------------------------------------- precision


def compute_dtype(device: torch.device) -> torch.dtype:
    """Type of activations: bfloat16 only where the device computes it natively.

    Emulated, as on older CPUs and GPUs, it is many times slower than float32.
    """
    if device.type == "cpu":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if native else torch.float32
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16
        if torch.cuda.get_device_capability(device)[0] == 7:  # Volta, Turing
            return torch.float16
    return torch.float32


# ---------------------------------------------------------------------------- peak rates

# TFLOP/s of dense bfloat16 products with float32 sums (float16 on V100 and T4), as two tables of
# the field give them: nanochat's get_peak_flops, and the throughput table of Lightning Fabric. A
# card that neither names is missing here. The first entry that fits counts.
PEAK_TFLOPS = (
    ("GB200", 2500.0, "nanochat"),
    ("B200", 2250.0, "nanochat"),
    ("H200 NVL", 836.0, "nanochat"),
    ("H200", 989.0, "nanochat"),
    ("H100 NVL", 835.0, "nanochat"),
    ("H100 PCIe", 756.0, "nanochat"),
    ("H100", 989.0, "nanochat"),
    ("A100", 312.0, "nanochat"),
    ("A40", 149.7, "nanochat"),
    ("A30", 165.0, "nanochat"),
    ("A10", 125.0, "Lightning"),
    ("L40S", 362.0, "nanochat"),
    ("L4", 121.0, "nanochat"),
    ("RTX 5090", 209.5, "nanochat"),
    ("RTX 4090", 165.2, "nanochat"),
    ("RTX 3090", 71.0, "nanochat"),
    ("MI300X", 1307.4, "nanochat"),
    ("V100 PCIe", 112.0, "Lightning"),
    ("V100", 125.0, "Lightning"),
    ("T4", 65.0, "Lightning"),
)
# Words that make another, slower device of the same name
VARIANTS = {"laptop", "max", "d", "ti", "super", "mobile", "mig"}


def words(name: str) -> list[str]:
    """The words of a device name, in lower case: "A100-SXM4-80GB" has three."""
    return re.findall(r"[a-z0-9.]+", name.lower())


def peak_by_name(name: str) -> tuple[float, str] | None:
    """(floating-point operations per second, source) of a card in the table, else None."""
    have = words(name)
    for card, tflops, source in PEAK_TFLOPS:
        want = words(card)
        found = any(have[i : i + len(want)] == want for i in range(len(have)))
        if found and not VARIANTS & set(have):
            return tflops * 1e12, f"table, {card}: {source}"
    return None


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """(floating-point operations per second, or None if unknown; the same in words).

    CPUs, MPS and float32 are measured by a large product, GPUs looked up.
    """
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        card = peak_by_name(name)
        if card is None:
            return None, f"unknown for {name}: no mfu"
        return card[0], f"{card[0] / 1e12:.2f} TFLOP/s ({card[1]})"
    n = 8192 if device.type == "cuda" else 2048  # smaller products leave a large GPU idle
    best = math.inf
    a = torch.randn(n, n, device=device).to(dtype)
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        prepare.synchronize()
        best = min(best, time.perf_counter() - start)
    peak = 2 * n**3 / best
    kind = str(dtype).removeprefix("torch.")
    return peak, f"{peak / 1e12:.2f} TFLOP/s (measured, {kind} {n}x{n} product)"


# ---------------------------------------------------------------------------- what a run ran on


def processor_name() -> str:
    """The processor's model name, or its architecture where it has none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def run_facts(dtype: torch.dtype, why_eager: str, attention: str) -> dict:
    """For the record of the score: runs that differ in one of these are no equals in speed."""
    return {
        "compiled": not why_eager,
        "eager_reason": why_eager,
        "attention": attention.split()[0],
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor_name(),
        "ranks": prepare.ranks()[1],
    }


def steady_memory(device: torch.device) -> None:
    """From here on each step needs the same memory: nothing is collected, or given back."""
    gc.collect()  # one in the middle of a run costs half a second
    gc.freeze()
    gc.disable()
    if device.type == "cpu":
        keep_freed_memory()


def speed_now(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """TFLOP/s of the fastest of many equal products: what the machine can do at this moment.

    Not their mean: on two cores, a process that interrupts one thread makes a product five times
    slower, for as long as it takes. An idle machine shows such moments, too.
    """
    n = 512 if device.type == "cpu" else 4096
    a = torch.ones(n, n, device=device, dtype=dtype)
    a @ a
    prepare.synchronize()
    fastest = math.inf
    last = start = time.perf_counter()
    while last - start < seconds:
        a @ a
        prepare.synchronize()
        now = time.perf_counter()
        fastest = min(fastest, now - last)
        last = now
    return round(2 * n**3 / fastest / 1e12, 4)


# ---------------------------------------------------------------------------- memory


def peak_memory_mb(device: torch.device) -> float:
    """The most memory this process has held so far, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def fits(trial_step: Callable, optimizer: torch.optim.Optimizer) -> bool:
    """Whether two steps fit into the memory of every rank.

    trial_step: forward, backward and optimizer step, without communication between ranks. It is
    called twice: the second time, the optimizer's state takes its memory too.
    """
    for _ in range(2):
        try:
            trial_step()
            failed = 0
        except Exception as error:
            if not isinstance(error, torch.OutOfMemoryError) and not is_out_of_memory(error):
                raise
            failed = 1
        optimizer.zero_grad(set_to_none=True)
        if prepare.sum_over_ranks(failed):
            free_memory(optimizer)
            return False
    return True


def free_memory(optimizer: torch.optim.Optimizer) -> None:
    """After a failed trial: give back what it left, and forget code compiled for its shapes."""
    optimizer.state.clear()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
