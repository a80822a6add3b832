"""Speed of the data path on this machine: python tests/bench_data.py (about two minutes; nothing is downloaded)."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from test_loader import reference_packer  # noqa: E402

import data  # noqa: E402
import prepare  # noqa: E402

BOS = 9


def line(what: str, value: str, bar: str) -> None:
    print(f"{what:<58}{value:>22}  {bar}", flush=True)


def seconds(function, repeat: int = 3) -> float:
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def packing() -> None:
    for seq_len, mean, bar in ((2048, 500, "bar 30"), (256, 500, "bar 5"), (256, 180, "bar 5")):
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(np.log(mean) - 0.32, 0.8, 40_000), 2, 20_000).astype(int)
        shard = rng.integers(10, 2000, lengths.sum()).astype(np.uint16)
        shard[lengths.cumsum() - lengths] = BOS

        def brute_force(shard=shard, seq_len=seq_len):
            documents = map(list, islice(prepare.documents_of(shard, BOS, np.random.default_rng(0)), 6000))
            return sum(1 for _ in islice(reference_packer(documents, seq_len + 1, 1000), 100))

        def all_rows(shard=shard, seq_len=seq_len):
            rows, n = prepare.pack_rows(prepare.documents_of(shard, BOS, np.random.default_rng(0)), seq_len + 1, 1000), 0
            while len(block := prepare.stack_rows(rows, 32, seq_len + 1)):
                n += block.size
            return n

        ours = all_rows() / seconds(all_rows)
        reference = brute_force() * (seq_len + 1) / seconds(brute_force, 1)
        what = f"packing, T={seq_len}, documents of {mean} tokens, one core"
        line(what, f"{ours / 1e6:.0f} M tokens/s", bar)
        line("  against the brute-force packer", f"{ours / reference:.0f} times", "bar 50")


def tokenizing() -> None:
    texts = [t[i : i + 2500] for t in data.python_files() for i in range(0, len(t), 2500)][:12_000]
    tokenizer = data.train_tokenizer(iter(texts), 8192)
    encoder, cores, counted = data.DocumentEncoder(tokenizer, None), os.cpu_count(), [0]

    def alone():  # its fastest call, with no lists of numbers made
        with ThreadPoolExecutor(cores) as pool:
            chunks = [texts[i : i + 100] for i in range(0, len(texts), 100)]
            list(pool.map(lambda chunk: [tokenizer.enc.encode_to_numpy(t, disallowed_special=()) for t in chunk], chunks))

    def ours():
        counted[0] = sum(len(document) for _, document in data.encode_all(encoder, texts))

    times = [(seconds(alone, 1), seconds(ours, 1)) for _ in range(4)]  # in turn: other work disturbs both
    alone, ours = (min(column) for column in zip(*times, strict=True))
    line(f"tokenizing, tiktoken alone, {cores} cores", f"{counted[0] / alone / 1e6:.2f} M tokens/s", "")
    line("tokenizing, with hashes and documents", f"{counted[0] / ours / 1e6:.2f} M tokens/s", "")
    line("  against tiktoken alone", f"{alone / ours:.2f} times", "bar 0.80")


def preparing() -> None:
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"AUTORESEARCH_CACHE": cache, "AUTORESEARCH_PROFILE": "tiny", "AUTORESEARCH_DATA": "embedded"}
        command = [sys.executable, prepare.__file__]
        took = seconds(lambda: subprocess.run(command, env=env, check=True, capture_output=True), 1)
    line("embedded, prepared from nothing", f"{took:.0f} s", "bar 60")
    line("  memory peak", f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6:.2f} GB", "bar 2")


if __name__ == "__main__":
    preparing()
    tokenizing()
    packing()
