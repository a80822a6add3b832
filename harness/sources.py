"""Where texts come from: this machine's Python files, two data sets of the hub, the user's files.

A source names shards of text and opens them on demand. It also decides which texts are held out
(the shard `val`): scored, or kept for previews, and never trained on.
"""

import contextlib
import hashlib
import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.common import UserError
from harness.hub import Hub
from harness.retrying import Limits
from prepare import Settings

# Bytes of text held out for each scored token. BPE makes tokens shorter than that; the rest covers
# what packing crops and reads ahead.
BYTES_PER_TOKEN = 6


@dataclass(frozen=True)
class Skip:
    """Stands in place of a text: why there is none."""

    reason: str


@dataclass
class Source:
    """Shards of text by name, opened only when their tokens are not there yet."""

    train: list[str]
    sample: list[str]  # the shards that the tokenizer learns from, whatever else is trained on
    val: str  # the held-out shard
    texts: Callable[[str], Iterator[str | Skip | None]]  # the texts of a shard
    # Download shards (names, verify); returns those that cannot be had.
    fetch: Callable[[list[str], bool], list[str]] = lambda shards, verify: []
    cut: bool = True  # cut texts longer than a row into documents that fit one
    state: str | None = None  # changes when the texts do
    passed_over: Counter = field(default_factory=Counter)  # files that are not read, by reason


def fault_of(text: str | Skip | None) -> str | None:
    """Why this cannot be used as a text, None if it can."""
    if not isinstance(text, str):
        return text.reason if text else "null"
    if not text or text.isspace():
        return "empty"
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        return "broken UTF-8"
    return None


def usable(texts: Iterable[str | Skip | None], skipped: Counter) -> Iterator[str]:
    """The texts that can be used; the others are counted by reason, of which 100 are told apart."""
    for text in texts:
        fault = fault_of(text)
        if fault is None:
            yield text
        else:
            skipped[fault if fault in skipped or len(skipped) < 100 else "other reasons"] += 1


def held_out_bytes(settings: Settings) -> int:
    """Bytes of text to hold out: for validation, held-out and preview rows (1 + 1/4 + 1/16)."""
    return BYTES_PER_TOKEN * settings.eval_tokens * 21 // 16


def parquet_texts(path: Path, file=None) -> Iterator[str | None]:
    """Column "text" of a parquet file, or of an open file whose name is `path`.

    Broken UTF-8 comes as surrogates.

    Raises:
        UserError: the file cannot be read, or has no such column.
    """
    try:
        for batch in pq.ParquetFile(file or path).iter_batches(1024, columns=["text"]):
            for value in batch["text"].cast(pa.binary()).to_pylist():
                yield None if value is None else value.decode("utf-8", "surrogateescape")
    except KeyError:
        raise UserError(f"{path} has no column 'text'") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


# ------------------------------------------------------------------ embedded: Python on this disk

# Test suites, vendored code, tools of the environment, other folders of the search path.
SKIPPED_FOLDERS = {
    *("test", "tests", "testing", "idle_test"),
    *("_vendor", "vendor", "vendored", "third_party", "extern", "externals"),
    *("__pycache__", "lib2to3", "node_modules", "site-packages", "dist-packages"),
    *("pip", "setuptools", "pkg_resources"),
}
GENERATED = re.compile(
    rb"(?i)generated (by|from|automatically|code)|do not (edit|modify)|@generated|auto-?generated"
)
EMBEDDED_HELD_OUT = 3_500_000  # characters


def python_files() -> list[str]:
    """Texts of the Python files of the standard library and the installed packages.

    Copies and generated files are left out. The order is random but always the same: it follows
    the content, not the place where a file is installed.
    """
    paths = sysconfig.get_paths()
    texts = {}
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"], paths["platlib"])):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
            for name in names:
                if (
                    not name.endswith(".py")
                    or name.startswith("test_")
                    or name.endswith("_test.py")
                ):
                    continue
                data = Path(folder, name).read_bytes()
                if data.strip() and not GENERATED.search(data[:1000]):
                    with contextlib.suppress(UnicodeDecodeError):
                        texts[hashlib.sha256(data).digest()] = data.decode()
    digests = sorted(texts)
    random.Random(1337).shuffle(digests)
    return [texts[digest] for digest in digests]


def embedded_source() -> Source:
    """Python source already on this disk; the first complete files are held out."""

    @cache
    def split() -> dict:
        texts = python_files()
        ends = np.cumsum([len(text) for text in texts])
        n_val = int(np.searchsorted(ends, EMBEDDED_HELD_OUT)) + 1
        return {"val": texts[:n_val], "embedded": texts[n_val:]}

    return Source(["embedded"], ["embedded"], "val", lambda shard: iter(split()[shard]))


# ------------------------------------------------------------------ data sets of the hub

LAST_SHARD = 6542
TOKENIZER_SHARDS = 1  # more text than the tokenizer learns from


def climbmix_source(
    settings: Settings,
    num_shards: int,
    limits: Limits | None = None,
    last_shard: int = LAST_SHARD,
    tokenizer_shards: int = TOKENIZER_SHARDS,
) -> Source:
    """Web text of the hub; its last shard is held out. Texts stay whole, as in published results.

    num_shards: how many to train on, -1 for all.
    """
    hub = Hub("karpathy/climbmix-400b-shuffle", settings.root / "raw" / "climbmix", limits)
    shards = [f"shard_{i:05d}.parquet" for i in range(last_shard + 1)]
    val = shards.pop()
    return Source(
        train=shards[:num_shards] if num_shards >= 0 else shards,
        sample=shards[:tokenizer_shards],
        val=val,
        texts=lambda shard: parquet_texts(hub.folder / shard),
        fetch=hub.fetch,
        cut=False,
    )


def tinystories_source(settings: Settings, limits: Limits | None = None) -> Source:
    """Short stories of the hub, shuffled by their author: the first ones are held out."""
    hub = Hub("karpathy/tinystories-gpt4-clean", settings.root / "raw" / "tinystories", limits)
    files = hub.listing()
    need = held_out_bytes(settings)

    def file_of(shard: str) -> str:
        return files[0] if shard == "val" else shard

    def texts(shard: str) -> Iterator[str | None]:
        held_out = 0
        for text in parquet_texts(hub.folder / file_of(shard)):
            is_held_out = file_of(shard) == files[0] and held_out < need
            if shard == "val" and not is_held_out:
                return
            if is_held_out == (shard == "val"):
                yield text
            held_out += len(text or "")

    def fetch(shards: list[str], verify: bool) -> list[str]:
        return hub.fetch([file_of(shard) for shard in shards], verify)

    return Source(files, files, "val", texts, fetch)
