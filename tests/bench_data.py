"""Speed of the data path on this machine: python tests/bench_data.py. Nothing is downloaded.

Prints user and system seconds of the processor, which other work on the machine disturbs less than
the time on the clock. Takes about three minutes.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from test_loader import reference_packer  # noqa: E402

import prepare  # noqa: E402
from harness.documents import DocumentEncoder, encode_all, train_tokenizer  # noqa: E402
from harness.overlap import BATCH_TOKENS, HeldOut  # noqa: E402
from harness.sources import python_files  # noqa: E402

BOS = 9


def line(what: str, value: str, bar: str = "") -> None:
    print(f"{what:<58}{value:>22}  {bar}", flush=True)


def cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def seconds(function: Callable[[], object], repeat: int = 3) -> float:
    """CPU seconds of the fastest of several calls."""
    times = []
    for _ in range(repeat):
        began = cpu_seconds()
        function()
        times.append(cpu_seconds() - began)
    return min(times)


def random_shard(mean: int) -> np.ndarray:
    """40,000 documents of random tokens, their lengths log-normal around `mean`."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, 40_000), 2, 20_000).astype(int)
    shard = rng.integers(10, 2000, lengths.sum()).astype(np.uint16)
    shard[lengths.cumsum() - lengths] = BOS
    return shard


def packing(seq_len: int, mean: int, bar: str) -> None:
    shard = random_shard(mean)
    row_len = seq_len + 1

    def shuffled():
        return prepare.documents_of(shard, BOS, np.random.default_rng(0))

    def brute_force() -> int:
        documents = map(list, islice(shuffled(), 6000))
        return sum(1 for _ in islice(reference_packer(documents, row_len, 1000), 100))

    def all_rows() -> int:
        rows = prepare.pack_rows(shuffled(), row_len, 1000)
        n = 0
        while len(block := prepare.stack_rows(rows, 32, row_len)):
            n += block.size
        return n

    ours = all_rows() / seconds(all_rows)
    reference = brute_force() * row_len / seconds(brute_force, 1)
    what = f"packing, T={seq_len}, documents of {mean} tokens"
    line(what, f"{ours / 1e6:.0f} M tokens/s", bar)
    line("  against the brute-force packer", f"{ours / reference:.0f} times", "bar 50")


def tokenizing() -> None:
    texts = [t[i : i + 2500] for t in python_files() for i in range(0, len(t), 2500)][:12_000]
    tokenizer = train_tokenizer(iter(texts), 8192)
    encoder = DocumentEncoder(tokenizer, None)
    cores = os.cpu_count()

    def encode(chunk: list[str]) -> list:
        return [tokenizer.enc.encode_to_numpy(text, disallowed_special=()) for text in chunk]

    def tiktoken_alone() -> None:
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(encode, [texts[i : i + 100] for i in range(0, len(texts), 100)]))

    def ours() -> int:
        return sum(len(text.tokens) for text in encode_all(encoder, texts))

    n_tokens = ours()
    pairs = [(seconds(tiktoken_alone, 1), seconds(ours, 1)) for _ in range(4)]  # in turn
    alone = min(pair[0] for pair in pairs)
    with_hashes = min(pair[1] for pair in pairs)
    line("tokenizing, tiktoken alone, per core", f"{n_tokens / alone / 1e6:.2f} M tokens/s")
    line("tokenizing, with hashes and documents", f"{n_tokens / with_hashes / 1e6:.2f} M tokens/s")
    line("  against tiktoken alone", f"{alone / with_hashes:.2f} times", "bar 0.80")


def half_copies() -> None:
    shard = random_shard(180)
    rows = shard[: 2688 * 257].reshape(-1, 257)
    held_out = HeldOut(np.empty(0, np.uint64), {"val_rows.bin": rows}, BOS)

    def find() -> None:
        for start in range(0, len(shard), BATCH_TOKENS):
            held_out.find(shard[start : start + BATCH_TOKENS])

    line("looking for shared runs", f"{len(shard) / seconds(find) / 1e6:.0f} M tokens/s", "bar 30")


def preparing() -> None:
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {
            "AUTORESEARCH_CACHE": cache,
            "AUTORESEARCH_PROFILE": "tiny",
            "AUTORESEARCH_DATA": "embedded",
        }
        command = [sys.executable, prepare.__file__]
        before = cpu_seconds(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        subprocess.run(command, env=env, check=True, capture_output=True)
        took = time.perf_counter() - began
        used = cpu_seconds(resource.RUSAGE_CHILDREN) - before
    line("embedded, prepared from nothing", f"{used:.1f} CPU s, {took:.1f} s", "bar 20, 10")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    line("  memory peak", f"{peak:.2f} GB", "bar 2")


if __name__ == "__main__":
    preparing()
    half_copies()
    tokenizing()
    packing(2048, 500, "bar 30")
    packing(256, 500, "bar 5")
    packing(256, 180, "bar 5")
