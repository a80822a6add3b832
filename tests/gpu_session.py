"""The first minutes on a GPU, in one command: what runs there, how fast, and what does not.

    python tests/gpu_session.py [--out FOLDER] [--only NAME ...] [--seconds 470]

Writes gpu_session.json, a readable table of the same (gpu_session.txt, also printed) and the output
of all parts (gpu_session.log) to FOLDER. The data are made on the spot, from Python source on this
disk: nothing is downloaded, except Flash Attention 3 if it is not there yet.

Each part runs in a process of its own with a time limit, so a crash of CUDA, a hang or an error
costs that part only; what it has noted until then is kept. All parts together end after --seconds.
Without a GPU a small model takes the place of `full`, and what needs a GPU is skipped by name.
Exit code 0 when the session ran to its end, whatever the parts said.
"""

import itertools
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_runner import PREFIX, ROOT, Notes, Part, Skipped, main
from gpu_training import (
    GIB,
    float16,
    full,
    memory,
    on_gpu,
    profile,
    resume,
    set_profile,
    trainer,
)  # fmt: skip


def need_gpu() -> None:
    if not on_gpu():
        raise Skipped("needs an NVIDIA GPU")


# ---------------------------------------------------------------------------- versions, data


def first_line(*command: str) -> str:
    """The first line that a command prints, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"none ({type(error).__name__})"
    return done.stdout.partition("\n")[0].strip()


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def versions(notes: Notes) -> None:
    """Software and card."""
    names = ("torch", "triton", "kernels", "numpy")
    notes.add(python=platform.python_version(), system=platform.platform())
    notes.add(**{name: package_version(name) for name in names})
    notes.add(compiler=first_line(os.environ.get("CXX", "g++"), "--version"))
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    notes.add(driver=first_line("nvidia-smi", *query), cpus=os.cpu_count())
    import torch

    from harness import device as machine
    from prepare import get_device

    device = get_device()
    notes.add(cuda=torch.version.cuda or "none", device=device.type)
    notes.add(precision=str(machine.compute_dtype(device)).removeprefix("torch."))
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        notes.add(card=card.name, capability=f"{card.major}.{card.minor}")
        notes.add(memory_gib=card.total_memory / GIB, processors=card.multi_processor_count)


def data(notes: Notes) -> None:
    """A cache in the shapes of `full`, from a part of `embedded`."""
    import prepare
    from harness.attention import fa3_note
    from harness.data import run
    from harness.sources import embedded_source

    files = 6000 if on_gpu() else 500
    set_profile()

    def open_source(settings, num_shards):
        source = embedded_source()
        texts = source.texts
        source.texts = lambda shard: itertools.islice(texts(shard), files)
        return source

    fetched = fa3_note(Path(prepare.DEFAULT_ROOT).expanduser())
    if fetched.exists():  # as the user's runs have it
        root = prepare.settings().root
        root.mkdir(parents=True, exist_ok=True)
        shutil.copy(fetched, fa3_note(root))
    run([], open_source=open_source)
    notes.add(fa3="fetched" if fa3_note(prepare.settings().root).exists() else "none")
    total = prepare.load_manifest(prepare.settings().cache)["total"]
    notes.add(tokens=total["tokens"], documents=total["documents"])


# ---------------------------------------------------------------------------- attention


def milliseconds(function: Callable[[], object]) -> float:
    """Median time of a call, from five groups of calls without a wait between them."""
    from prepare import synchronize

    def group(calls: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return 1000 * (time.perf_counter() - start) / calls

    group(2)
    calls = max(1, min(50, int(100 / group(1))))
    return statistics.median(group(calls) for _ in range(5))


def attention(name: str, notes: Notes) -> None:
    """Trial, and speed forward and backward, in the shapes of `full`."""
    if name in ("fa3", "flash"):
        need_gpu()
    import torch

    from harness.attention import try_attention

    train = trainer(60)
    device = train.prepare.get_device()
    dtype = train.machine.compute_dtype(device)
    config = train.build_config(train.prepare.VOCAB_SIZE, dtype)
    function = train.ATTENTION_BACKENDS[name]
    try_attention(function, train.plain_attention, config, device)
    rows = 32 if on_gpu() else 2
    notes.add(trial="passed", rows=rows, tokens=config.seq_len, heads=config.n_head)
    if on_gpu():
        function = torch.compile(function, dynamic=False)  # as train.py calls it
    shape = (rows, config.seq_len, config.n_head, config.n_embd // config.n_head)
    made = {"device": device, "dtype": config.dtype, "requires_grad": True}
    qkv = [torch.randn(shape, **made) for _ in range(3)]
    speeds = []
    for window in (config.seq_len // 8, config.seq_len):
        pairs = sum(min(i, window) + 1 for i in range(config.seq_len))
        flops = 4 * pairs * rows * config.n_embd  # of the keys that are seen
        y = function(*qkv, window)
        gradient = torch.randn_like(y)
        forward = milliseconds(partial(function, *qkv, window))
        backward = milliseconds(partial(torch.autograd.grad, y, qkv, gradient, retain_graph=True))
        speeds.append({
            "window": window,
            "forward_ms": forward,
            "forward_tflops": flops / forward / 1e9,
            "backward_ms": backward,
            "backward_tflops": 2.5 * flops / backward / 1e9,
        })  # fmt: skip
        notes.add(speed=speeds)


def gpu_tests(notes: Notes) -> None:
    """The tests that wait for a GPU."""
    need_gpu()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-vv", "-p", "no:cacheprovider"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    process = subprocess.Popen(
        [*command, "--continue-on-collection-errors", "tests"], cwd=ROOT, env=kept, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    counts: Counter = Counter()
    failed = []
    for line in process.stdout:
        print(line, end="", flush=True)
        if found := re.match(r"(\S+::.*) (PASSED|FAILED|SKIPPED|ERROR)\b", line):
            counts[found[2].lower()] += 1
            failed += [found[1]] if found[2] in ("FAILED", "ERROR") else []
            notes.add(**counts, which_failed=failed)
    if process.wait():
        raise RuntimeError(f"pytest ended with exit code {process.returncode}")


PARTS = (  # the most important ones first: the last ones may find no time left
    Part("versions", versions, 30),
    Part("data", data, 75),
    Part("full", full, 165),
    Part("memory", memory, 50),
    Part("profile", profile, 60),
    Part("resume", resume, 75),
    Part("fa3", partial(attention, "fa3"), 40),
    Part("flash", partial(attention, "flash"), 40),
    Part("sdpa", partial(attention, "sdpa"), 40),
    Part("plain", partial(attention, "plain"), 40),
    Part("float16", float16, 50),
    Part("gpu_tests", gpu_tests, 150),
)

if __name__ == "__main__":
    sys.exit(main(PARTS, Path(__file__), __doc__))
