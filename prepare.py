"""Data, tokenizer, loader and evaluation: the fixed half of the project. An agent never edits this file.

    uv run prepare.py                    prepare the data of this machine's profile (idempotent)
    uv run prepare.py --num-shards 20    more training data (climbmix; default 10, -1 for all)
    uv run prepare.py --check            score models whose result is known, refuse models that cheat

Environment: AUTORESEARCH_PROFILE (full, small, tiny), AUTORESEARCH_DATA (climbmix, embedded), AUTORESEARCH_CACHE (folder),
AUTORESEARCH_TIME_BUDGET (seconds), AUTORESEARCH_SEED. Exit codes: 0 done, 1 a check failed, 2 refused with a reason.
"""

import argparse
import base64
import contextlib
import hashlib
import json
import math
import os
import random
import re
import sys
import sysconfig
import time
import types
from bisect import bisect_left, insort
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import requests
import rustbpe
import tiktoken
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm import tqdm

STARTED = time.perf_counter()


class UserError(Exception):
    """Something a person can mend: the message says what is wrong and what to do."""


# ---------------------------------------------------------------------------- profiles: every fixed constant


@dataclass(frozen=True)
class Profile:
    data: str
    vocab_size: int
    seq_len: int
    eval_tokens: int
    time_budget: int  # seconds


PROFILES = {
    "full": Profile("climbmix", 8192, 2048, 40 * 524288, 300),  # CUDA with 16 GB or more
    "small": Profile("climbmix", 4096, 1024, 4 * 524288, 300),  # smaller CUDA cards, Apple's MPS
    "tiny": Profile("embedded", 2048, 256, 524288, 300),  # CPU
}
DATASETS = ("climbmix", "embedded")


def get_device() -> torch.device:
    """The device that this process trains on (one GPU a process under torchrun)."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def detect_profile() -> str:
    kind = get_device().type
    if kind == "cuda":
        return "full" if torch.cuda.get_device_properties(0).total_memory >= 15e9 else "small"  # "16 GB" cards show less
    return "small" if kind == "mps" else "tiny"


def setting(name: str, default, allowed=None):
    """The environment's AUTORESEARCH_<name>, checked, as the type of the default."""
    text = os.environ.get(f"AUTORESEARCH_{name}") or default
    try:
        value = type(default)(text)
    except ValueError:
        raise UserError(f"AUTORESEARCH_{name}={text!r} is not a number") from None
    if allowed and value not in allowed:
        raise UserError(f"AUTORESEARCH_{name}={text!r} is unknown. hint: one of {', '.join(allowed)}")
    return value


PROFILE = setting("PROFILE", "", PROFILES) if os.environ.get("AUTORESEARCH_PROFILE") else detect_profile()
_profile = PROFILES[PROFILE]
DATA = setting("DATA", _profile.data, DATASETS)
VOCAB_SIZE = _profile.vocab_size
MAX_SEQ_LEN = _profile.seq_len  # context, tokens
EVAL_TOKENS = _profile.eval_tokens
TIME_BUDGET = setting("TIME_BUDGET", float(_profile.time_budget))  # seconds of training
SEED = setting("SEED", 1337)
ROOT = Path(setting("CACHE", "~/.cache/autoresearch")).expanduser()
CACHE = ROOT / f"{PROFILE}-{DATA}"
EVAL_VERSION = 1  # raise it whenever the same model could get another score
REPAIR = "hint: 'python prepare.py' prepares what is missing; to start over, delete "


# ---------------------------------------------------------------------------- files and manifest


def write_atomic(path: Path, data: bytes) -> None:
    """A reader sees the old file or the whole new one, also after a crash."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def file_hash(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(f)


def _sha256(f) -> str:  # Python 3.10
    h = hashlib.sha256()
    while chunk := f.read(1 << 20):
        h.update(chunk)
    return h.hexdigest()


def load_manifest(cache: Path) -> dict:
    """{"settings", "files": {name: [bytes, sha256]}, "train": [names], "stats", "data_id"} of a prepared cache."""
    try:
        return json.loads((cache / "manifest.json").read_text())
    except FileNotFoundError:
        raise UserError(f"no prepared data in {cache}. hint: run 'python prepare.py' first") from None
    except ValueError:
        raise UserError(f"{cache / 'manifest.json'} is damaged. {REPAIR}{cache}") from None


def checked(cache: Path, manifest: dict, name: str) -> Path:
    """The path of a cache file whose size and hash are those written when it was made."""
    path = cache / name
    size, digest = manifest["files"].get(name, (None, None))
    found = path.stat().st_size if path.exists() else None
    if found is None or found != size or file_hash(path) != digest:
        state = "missing" if found is None else f"{found} bytes, {size} expected" if found != size else "changed"
        raise UserError(f"cache file {path} is {state}. {REPAIR}{path}")
    return path


def data_id(manifest: dict) -> str:
    """12 hex digits; two scores are comparable only if theirs are equal."""
    parts = [manifest["settings"], [manifest["files"][n][1] for n in ("tokenizer.json", "val_rows.bin")]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------- sources of text


@dataclass
class Source:
    """Named training shards and the validation text, each a function that opens a fresh iterator of documents."""

    train: dict
    val: object
    cut: bool  # cut texts longer than a row into documents that fit one


SKIPPED_FOLDERS = {  # test suites, vendored trees, tools of the environment, other folders on the search path
    *("test", "tests", "testing", "idle_test", "_vendor", "vendor", "vendored", "third_party", "extern", "externals"),
    *("__pycache__", "lib2to3", "node_modules", "site-packages", "dist-packages", "pip", "setuptools", "pkg_resources"),
}
GENERATED = re.compile(rb"(?i)generated (by|from|automatically|code)|do not (edit|modify)|@generated|auto-?generated")


def python_files() -> list[str]:
    """Texts of the Python files of the standard library and the installed packages, duplicates dropped, shuffled."""
    paths, seen, texts = sysconfig.get_paths(), set(), []
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"], paths["platlib"])):
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS)
            for name in sorted(names):
                if not name.endswith(".py") or name.startswith("test_") or name.endswith("_test.py"):
                    continue
                data = Path(folder, name).read_bytes()
                digest = hashlib.sha256(data).digest()
                if not data.strip() or digest in seen or GENERATED.search(data[:1000]):
                    continue
                seen.add(digest)
                with contextlib.suppress(UnicodeDecodeError):
                    texts.append((digest, data.decode()))
    texts.sort()  # by content: the order must not depend on where things are installed
    random.Random(1337).shuffle(texts)
    return [text for _, text in texts]


def embedded_source() -> Source:
    """Python source already on this disk; about 2.5 MB of whole files are held out."""
    texts, size, n_val = python_files(), 0, 0
    while size < 2_500_000 and n_val < len(texts):
        size += len(texts[n_val])
        n_val += 1
    return Source({"embedded": lambda: iter(texts[n_val:])}, lambda: iter(texts[:n_val]), cut=True)


HUB_FOLDER = "/datasets/karpathy/climbmix-400b-shuffle/resolve/main/"
LAST_SHARD = 6542


def download(name: str, folder: Path) -> Path:
    """Fetch one shard from the hub, with retries.

    Raises:
        UserError: the hub cannot be reached, or the file is not there.
    """
    path, url = folder / name, os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/") + HUB_FOLDER + name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(5):
        try:
            with requests.get(url, stream=True, timeout=10) as r:
                r.raise_for_status()
                part = path.with_name(name + ".part")
                with open(part, "wb") as f:
                    for chunk in r.iter_content(1 << 20):
                        f.write(chunk)
                os.replace(part, path)
                return path
        except requests.RequestException as e:
            error = e
            time.sleep(2**attempt / 2)
    raise UserError(f"cannot download {url}: {error}. hint: AUTORESEARCH_DATA=embedded needs no network")


def parquet_texts(path: Path):
    file = pq.ParquetFile(path)
    for batch in file.iter_batches(columns=["text"]):
        yield from batch.column(0).to_pylist()


def climbmix_source(num_shards: int) -> Source:
    """Web text of the hub; the last shard is pinned as validation."""
    n = LAST_SHARD if num_shards < 0 else min(num_shards, LAST_SHARD)
    names = [f"shard_{i:05d}.parquet" for i in [*range(n), LAST_SHARD]]
    folder = ROOT / "raw" / "climbmix"
    with ThreadPoolExecutor(8) as pool:
        paths = list(tqdm(pool.map(lambda s: download(s, folder), names), total=len(names), desc="shards"))
    train = {p.stem: (lambda p=p: parquet_texts(p)) for p in paths[:-1]}
    return Source(train, lambda: parquet_texts(paths[-1]), cut=False)


# ---------------------------------------------------------------------------- tokenizer

# GPT-4's split pattern (tiktoken, cl100k_base) with numbers in groups of at most two digits.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|bos|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>")
TOKENIZER_CHARS = 1_000_000_000
TOKENIZER_DOC_CHARS = 10_000


class Tokenizer:
    """Byte-level BPE: rustbpe learns it, tiktoken runs it, a JSON file keeps it (nothing in it can run code)."""

    def __init__(self, tokens: list[bytes]):
        special = {name: len(tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self.tokens = tokens
        self.enc = tiktoken.Encoding("autoresearch", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)
        # Raw bytes, not decoded text: a token may hold a part of a character.
        self.token_bytes = np.array([*map(len, tokens), *[0] * len(special)], dtype=np.int32)

    @classmethod
    def train(cls, texts, vocab_size: int) -> "Tokenizer":
        bpe = rustbpe.Tokenizer()
        bpe.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        return cls([bytes(token) for token, _ in sorted(bpe.get_mergeable_ranks(), key=lambda item: item[1])])

    @classmethod
    def from_directory(cls, directory: str | Path = CACHE) -> "Tokenizer":
        path = checked(Path(directory), load_manifest(Path(directory)), "tokenizer.json")
        return cls([base64.b64decode(token) for token in json.loads(path.read_text())["tokens"]])

    def save(self, path: Path) -> None:
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        write_atomic(path, json.dumps({"pattern": SPLIT_PATTERN, "special": SPECIAL_TOKENS, "tokens": tokens}).encode())

    def get_vocab_size(self) -> int:
        return self.enc.n_vocab

    def get_bos_token_id(self) -> int:
        return self.enc.encode_single_token(SPECIAL_TOKENS[0])

    def encode(self, text: str | list[str], prepend: int | str | None = None, num_threads: int = 8):
        """Token ids of a text, or a list of them for a list of texts. Special tokens in a text are plain text."""
        if isinstance(text, str):
            return self.encode([text], prepend, 1)[0]
        first = [] if prepend is None else [prepend if isinstance(prepend, int) else self.enc.encode_single_token(prepend)]
        return [first + ids for ids in self.enc.encode_ordinary_batch(text, num_threads=num_threads)]

    def decode(self, ids: list[int]) -> str:
        return self.enc.decode(ids)


# ---------------------------------------------------------------------------- documents and token shards


def cut_points(blank: np.ndarray, max_len: int) -> list[int]:
    """Where to cut a text of n tokens into documents of at most max_len: [0, ..., n]. blank: bool [n], a blank line ends here.

    A cut falls behind the last blank line within the last fifth of a row, and the document after it takes exactly what is
    left of that row: best-fit packing joins the two again. (Cutting at every last blank line would crop a third away.)
    """
    cuts, n, room = [0], len(blank), max_len
    while n - cuts[-1] > room:
        start = cuts[-1]
        tail = start + room * 4 // 5
        ends = np.flatnonzero(blank[tail : start + room]) if room == max_len else ()
        cuts.append(tail + int(ends[-1]) + 1 if len(ends) else start + room)
        room -= cuts[-1] - start + 1  # one more for the next document's BOS
        room = room if room > 0 else max_len
    return cuts + [n]


def text_key(data: bytes) -> int:
    """Hash of a document with all white space removed: equal also for copies that differ only in layout."""
    return int.from_bytes(hashlib.blake2b(data.translate(None, b" \t\n\r\v\f"), digest_size=8).digest(), "little")


class DocumentEncoder:
    """Turns texts into documents: BOS and at most max_len tokens (any number if max_len is None)."""

    def __init__(self, tokenizer: Tokenizer, max_len: int | None):
        self.enc, self.bos, self.max_len = tokenizer.enc, tokenizer.get_bos_token_id(), max_len
        self.lengths = tokenizer.token_bytes
        self.line_end = np.array([t.endswith(b"\n") for t in tokenizer.tokens])
        self.blank = np.array([re.search(rb"\n\s*\n$", t) is not None for t in tokenizer.tokens])
        self.white = np.array([t.endswith(b"\n") and not t.strip() for t in tokenizer.tokens])

    def __call__(self, text: str) -> list[tuple[int, np.ndarray]]:
        """(hash, uint16 [n] with BOS first) for each document of the text."""
        tokens = self.enc.encode_to_numpy(text, disallowed_special=())
        data = text.encode("utf-8", "replace")
        cuts, offsets = [0, len(tokens)], [0, len(data)]
        if self.max_len is not None and len(tokens) > self.max_len:
            blank = self.blank[tokens]
            blank[1:] |= self.white[tokens[1:]] & self.line_end[tokens[:-1]]
            cuts = cut_points(blank, self.max_len)
            offsets = np.concatenate([[0], np.cumsum(self.lengths[tokens])])[cuts].tolist()
        documents = []
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False)):
            document = np.empty(b - a + 1, np.uint16)
            document[0], document[1:] = self.bos, tokens[a:b]
            documents.append((text_key(data[offsets[i] : offsets[i + 1]]), document))
        return documents


def encode_all(encoder: DocumentEncoder, texts):
    """The documents of all texts, in order, encoded on all cores (tiktoken releases the interpreter's lock)."""
    texts = iter(texts)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while batch := list(islice(texts, 2048)):
            for documents in pool.map(encoder, batch, chunksize=16):
                yield from documents


def documents_of(shard: np.ndarray, bos: int, order: np.random.Generator | None = None):
    """The documents of a token shard, as memoryviews, in file order or shuffled."""
    starts = np.flatnonzero(shard == bos)
    lengths = np.diff(starts, append=len(shard))
    if order is not None:
        shuffled = order.permutation(len(starts))
        starts, lengths = starts[shuffled], lengths[shuffled]
    view = memoryview(np.asarray(shard))
    for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
        yield view[start:end]


# ---------------------------------------------------------------------------- packing and loading


def pack_rows(documents, row_len: int, buffer_size: int):
    """Best-fit packing without padding: yield rows, each a list of memoryviews of row_len tokens in all.

    Of a buffer of documents the longest that still fits goes next; when none fits, the shortest is cropped to fill the row.
    Equal lengths: the first to come is the longer. A last row that cannot be filled is dropped. O(log n) a placement.
    """
    documents = iter(documents)
    buffered, keys, count = {}, [], 0  # keys: length << 32 | falling number, ordered
    while True:
        row, room = [], row_len
        while room:
            while len(keys) < buffer_size and (document := next(documents, None)) is not None:
                count += 1
                key = (len(document) << 32) + (1 << 32) - count
                buffered[key] = document
                insort(keys, key)
            if not keys:
                return
            i = bisect_left(keys, (room + 1) << 32)
            if i:
                document = buffered.pop(keys.pop(i - 1))
                room -= len(document)
            else:
                document = buffered.pop(keys.pop(0))[:room]
                room = 0
            row.append(document)
        yield row


def stack_rows(rows, count: int, row_len: int) -> np.ndarray:
    """The next rows of pack_rows, copied into one array: uint16 [count, row_len], or fewer where they end."""
    parts = [part for row in islice(rows, count) for part in row]
    return np.frombuffer(b"".join(parts), np.uint16).reshape(-1, row_len)


def make_dataloader(tokenizer: Tokenizer, B: int, T: int, split: str, buffer_size: int = 1000):
    """Yield (inputs, targets, epoch) for ever: int64 [B, T] each on the device, every row starting with BOS.

    The order of the documents is drawn anew for every epoch from AUTORESEARCH_SEED. Under torchrun each rank takes every
    world-size-th batch of the same stream. Only "train" can be asked for: validation rows are read by evaluate_bpb alone.
    """
    if split != "train":
        raise UserError(f"make_dataloader reads split 'train', not {split!r}. hint: evaluate_bpb scores the validation rows")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    manifest, device, bos, epoch = load_manifest(CACHE), get_device(), tokenizer.get_bos_token_id(), 0

    def documents():
        nonlocal epoch
        while True:
            epoch += 1
            order = np.random.default_rng([SEED, epoch])
            for name in manifest["train"]:
                shard = np.memmap(checked(CACHE, manifest, name), np.uint16, mode="r")
                yield from documents_of(shard, bos, order)

    rows = pack_rows(documents(), T + 1, buffer_size)
    pin = device.type == "cuda"
    buffers = [torch.empty(2, B, T, dtype=torch.int64, pin_memory=pin) for _ in range(2)] if pin else None
    copied = [torch.cuda.Event() for _ in range(2)] if pin else None
    for batch in range(1 << 62):
        if batch % world_size != rank:
            next(islice(rows, B - 1, None))
            continue
        packed = stack_rows(rows, B, T + 1)
        turn = batch // world_size % 2
        if pin:
            copied[turn].synchronize()  # the copy out of this buffer two batches ago may still be queued
        host = buffers[turn] if pin else torch.empty(2, B, T, dtype=torch.int64)
        host[0].numpy()[:] = packed[:, :-1]
        host[1].numpy()[:] = packed[:, 1:]
        both = host.to(device, non_blocking=pin)
        if pin:
            copied[turn].record()
        yield both[0], both[1], epoch


# ---------------------------------------------------------------------------- prepare


def settings() -> dict:
    return {"eval_version": EVAL_VERSION, "profile": asdict(_profile) | {"time_budget": None}, "data": DATA}


def write_tokens(path: Path, documents, dropped: set) -> dict:
    """Write documents to a flat uint16 file but those whose hash is in dropped. Returns what was counted."""
    counts = {"documents": 0, "tokens": 0, "dropped": 0}
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        for key, document in documents:
            if key in dropped:
                counts["dropped"] += 1
                continue
            f.write(document)
            counts["documents"] += 1
            counts["tokens"] += len(document)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)
    return counts


def cropped_share(cache: Path, names: list[str], bos: int, limit: int = 1_000_000) -> float:
    """Share of tokens that packing crops away, over the first documents of the training shards."""
    seen = 0

    def documents():
        nonlocal seen
        for name in names:
            for document in documents_of(np.memmap(cache / name, np.uint16, mode="r"), bos, np.random.default_rng(SEED)):
                seen += len(document)
                yield document

    kept = sum(MAX_SEQ_LEN + 1 for _ in pack_rows(islice(documents(), limit), MAX_SEQ_LEN + 1, 1000))
    return 1 - kept / seen


def prepare(num_shards: int) -> None:
    """Bring the cache to completeness; what is there and right is left alone."""
    CACHE.mkdir(parents=True, exist_ok=True)
    wanted = num_shards if DATA == "climbmix" else 1
    try:
        manifest = load_manifest(CACHE)
        if manifest["settings"] == settings() and 0 <= wanted <= len(manifest["train"]):
            for name, (size, _) in manifest["files"].items():
                if not (CACHE / name).exists() or (CACHE / name).stat().st_size != size:
                    raise UserError(f"{name} is missing or cut short")
            print(f"{PROFILE}-{DATA} is prepared in {CACHE}, data_id {manifest['data_id']}")
            return
    except UserError as e:
        print(f"preparing: {e}", file=sys.stderr)
    manifest = {"settings": settings(), "files": {}, "train": [], "stats": {}}

    def keep(name: str) -> None:
        manifest["files"][name] = [(CACHE / name).stat().st_size, file_hash(CACHE / name)]

    source = embedded_source() if DATA == "embedded" else climbmix_source(num_shards)
    sample, chars = (text[:TOKENIZER_DOC_CHARS] for opened in source.train.values() for text in opened()), 0

    def capped():
        nonlocal chars
        for text in tqdm(sample, desc="tokenizer", unit=" texts"):
            yield text
            chars += len(text)
            if chars > TOKENIZER_CHARS:
                return

    tokenizer = Tokenizer.train(capped(), VOCAB_SIZE)
    tokenizer.save(CACHE / "tokenizer.json")
    keep("tokenizer.json")
    encoder, bos = DocumentEncoder(tokenizer, MAX_SEQ_LEN if source.cut else None), tokenizer.get_bos_token_id()

    validation = list(encode_all(encoder, source.val()))
    n_rows = EVAL_TOKENS // MAX_SEQ_LEN
    rows = stack_rows(pack_rows((memoryview(d) for _, d in validation), MAX_SEQ_LEN + 1, 1000), n_rows, MAX_SEQ_LEN + 1)
    if len(rows) < n_rows:
        raise UserError(f"the validation text fills {len(rows)} rows of {MAX_SEQ_LEN} tokens, {n_rows} are needed")
    write_atomic(CACHE / "val_rows.bin", rows.tobytes())
    keep("val_rows.bin")

    held_out = {key for key, _ in validation}
    for shard, opened in source.train.items():
        name = f"train_{shard}.bin"
        texts = tqdm(opened(), desc=shard, unit=" texts")
        manifest["stats"][name] = write_tokens(CACHE / name, encode_all(encoder, texts), held_out)
        manifest["train"].append(name)
        keep(name)
    manifest["stats"]["cropped"] = cropped_share(CACHE, manifest["train"], bos)
    manifest["data_id"] = data_id(manifest)
    write_atomic(CACHE / "manifest.json", json.dumps(manifest, indent=1).encode())
    report(manifest, tokenizer, rows)


def report(manifest: dict, tokenizer: Tokenizer, rows: np.ndarray) -> None:
    total = {k: sum(manifest["stats"][name][k] for name in manifest["train"]) for k in ("documents", "tokens", "dropped")}
    n_bytes = int(tokenizer.token_bytes[rows[:, 1:]].sum())
    print(f"cache       {CACHE}")
    print(f"tokenizer   {tokenizer.get_vocab_size()} tokens")
    print(f"training    {total['tokens'] / 1e6:.1f} M tokens in {total['documents']} documents; {total['dropped']} dropped "
          "whose text occurs in validation")  # fmt: skip
    print(f"packing     {100 * manifest['stats']['cropped']:.1f}% of the tokens are cropped")
    print(f"validation  {len(rows)} rows of {MAX_SEQ_LEN} tokens, {n_bytes} bytes, {n_bytes / rows[:, 1:].size:.3f} a token")
    print(f"data_id     {manifest['data_id']}")


# ---------------------------------------------------------------------------- the clock

OUTSIDE_ALLOWANCE = 150  # seconds of a run that are neither training nor evaluation: setting up, compiling
_steps = {"timed": 0, "untimed": 0}
_clock = None


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    kind = get_device().type
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def ranks() -> tuple[int, int]:
    """(rank of this process, how many train together)."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)


def sum_over_ranks(value: float) -> float:
    """The same sum on every rank; each waits for all. On the CPU: no device is synchronized."""
    if ranks()[1] == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.item()


class Clock:
    """The time budget of one run: starts once, and counts what happens outside it. Of several ranks, rank 0's counts.

    with clock.warmup(model, optimizer): steps in here compile everything and are undone afterwards
    clock.start(); while not clock.done(): ...; clock.stop()
    """

    def __init__(self):
        global _clock
        if _clock is not None:
            raise UserError("a run has one Clock, this is a second one")
        _clock = self
        self.started = self.training_seconds = None
        self.agreed = 0.0  # rank 0's seconds at the last done(): the same on every rank
        self.warming_up = False

    @contextlib.contextmanager
    def warmup(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """Undo all that the steps inside do to weights, buffers, optimizer state and random numbers."""
        tensors = [*model.parameters(), *model.buffers()]
        saved = [t.detach().clone() for t in tensors]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if optimizer.state:
            raise UserError("the warm-up must come before the first optimizer step")
        self.warming_up = True
        with torch.random.fork_rng(devices=[get_device()] if get_device().type == "cuda" else []):
            yield
        self.warming_up = False
        with torch.no_grad():
            for t, s in zip(tensors, saved, strict=True):
                t.copy_(s)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        optimizer.state.clear()
        model.zero_grad(set_to_none=True)

    def start(self) -> None:
        if self.started is not None:
            raise UserError("the clock of a run starts once")
        synchronize()
        sum_over_ranks(0.0)  # no rank's clock runs while another one still compiles
        self.started = time.perf_counter()

    def elapsed(self) -> float:
        """Seconds since start (0 before), up to stop."""
        if self.training_seconds is not None or self.started is None:
            return self.training_seconds or 0.0
        return time.perf_counter() - self.started

    def progress(self) -> float:
        """Share of the time budget that is used, 0 to 1; with several ranks, as of the last done()."""
        return min((self.elapsed() if ranks()[1] == 1 else self.agreed) / TIME_BUDGET, 1.0)

    def done(self) -> bool:
        """Whether the budget is used up: rank 0 decides, so that all ranks stop at the same step."""
        self.agreed = sum_over_ranks(self.elapsed() if ranks()[0] == 0 else 0.0)
        return self.agreed >= TIME_BUDGET

    def stop(self) -> None:
        if self.training_seconds is None:
            synchronize()
            self.training_seconds = self.elapsed()


def _count_step(*_) -> None:
    running = _clock is not None and _clock.started is not None and _clock.training_seconds is None
    if _clock is None or not _clock.warming_up:
        _steps["timed" if running else "untimed"] += 1


register_optimizer_step_post_hook(_count_step)


def timing() -> dict:
    """How this run spent its time; marks says in words what a reader of the score must know."""
    trained = _clock.training_seconds if _clock else None
    outside = time.perf_counter() - STARTED - (trained or 0.0)
    marks = []
    if trained is None:
        marks.append("the clock of prepare.py was not used")
    elif trained > 1.1 * TIME_BUDGET + 5:
        marks.append(f"trained {trained:.0f} s of a budget of {TIME_BUDGET:.0f} s")
    if _steps["untimed"]:
        marks.append(f"{_steps['untimed']} optimizer steps outside the clock")
    if trained is not None and outside > OUTSIDE_ALLOWANCE:
        marks.append(f"{outside:.0f} s outside training ({OUTSIDE_ALLOWANCE} s allowed)")
    return {
        "training_seconds": trained,
        "outside_seconds": round(outside, 1),
        "untimed_steps": _steps["untimed"],
        "marks": "; ".join(marks),
    }


# ---------------------------------------------------------------------------- evaluation


class VoidScore(Exception):
    """The model or the run breaks a rule of the evaluation: there is no score."""


CHUNK = 1 << 24  # logits that are float32 at once in the evaluator
PROBE_ROWS = 16  # at least


def ask(model, x: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """model(x), checked to be logits [B, T, vocab_size]: the model never sees a target."""
    logits = model(x)
    want = (*x.shape, vocab_size)
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != want:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise VoidScore(f"model(x) must return logits {want}, it returned {got}. hint: no tuple, no loss, no padded vocabulary")
    return logits


def token_nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[target], computed in float32 in chunks: float64 [B, T] on the CPU."""
    flat, wanted, rows = logits.flatten(0, 1), targets.flatten(), max(1, CHUNK // logits.size(-1))
    nats, bad = [], torch.zeros((), dtype=torch.bool, device=logits.device)
    with torch.autocast(logits.device.type, enabled=False):
        for part, target in zip(flat.split(rows), wanted.split(rows), strict=True):
            part = part.float()
            bad |= ~torch.isfinite(part.sum())  # one NaN or infinity anywhere makes the sum one
            nats.append(F.cross_entropy(part, target, reduction="none"))
    if bad.item():
        raise VoidScore("the logits contain NaN or infinity")
    return torch.cat(nats).view(targets.shape).cpu().double()


def batches(rows: np.ndarray, batch_size: int, device):
    """(inputs, targets, n) of all rows: int64 [batch_size, T]; the last batch is filled up with copies, n of it count."""
    for i in range(0, len(rows), batch_size):
        part = rows[i : i + batch_size]
        full = np.concatenate([part, np.repeat(part[-1:], batch_size - len(part), 0)]).astype(np.int64)
        both = torch.from_numpy(full).to(device)
        yield both[:, :-1].contiguous(), both[:, 1:].contiguous(), len(part)


def score_rows(model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int, device) -> torch.Tensor:
    """Nats of each row, float64 [rows], over targets of non-zero byte length. rows: uint16 [n, T+1]."""
    counted = torch.from_numpy(token_bytes > 0)
    nats = []
    for x, y, n in batches(rows, batch_size, device):
        nats.append((token_nats(ask(model, x, len(token_bytes)), y) * counted[y.cpu()]).sum(1)[:n])
    return torch.cat(nats)


def probe_cuts(n: int, seq_len: int) -> list[int]:
    """n cut positions from 1 to seq_len-1: the ends, powers of two and their neighbours, the rest at random."""
    edges = [1, seq_len - 1, *(2**k + d for k in range(20) for d in (0, 1, -1)), seq_len // 2, seq_len // 2 + 1]
    edges = [c for c in dict.fromkeys(edges) if 0 < c < seq_len]
    rest = [c for c in range(1, seq_len) if c not in edges]
    random.Random(n).shuffle(rest)
    edges = edges if n >= len(edges) else [edges[0], edges[1], *random.Random(n).sample(edges[2:], max(0, n - 2))]
    return [(edges + rest)[i % (seq_len - 1)] for i in range(n)]


def tolerance(model, logits: torch.Tensor) -> float:
    """Largest change of a logit that rounding can explain: a few units in the last place of the widest logit.

    The precision is the lowest among autocast, parameters and logits. Measured margins: see README.
    """
    kind = logits.device.type
    dtypes = {logits.dtype, *(p.dtype for p in model.parameters())}
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    eps = max(torch.finfo(d).eps for d in dtypes if d.is_floating_point)
    if kind == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        eps = max(eps, 2**-10)
    return 4 * eps * max(1.0, logits.abs().max().item())


def probe(model, rows: np.ndarray, vocab_size: int, batch_size: int, device) -> tuple[torch.Tensor, float, float]:
    """Refuse a model that looks at future tokens or at other rows: two passes over a few validation rows.

    The second pass sees other tokens from each row's own cut on; logits before the cut must stay as they are.
    Returns (nats of every token in the first pass [n, T], largest change seen, tolerance).

    Raises:
        VoidScore: a logit before the cut changed by more than rounding can explain.
    """
    seq_len = rows.shape[1] - 1
    cuts = torch.tensor(probe_cuts(len(rows), seq_len))
    shift = torch.from_numpy(np.random.default_rng(len(rows)).integers(1, vocab_size, (len(rows), seq_len)))
    first_nats, worst, limit = [], 0.0, 0.0
    for i, (x, y, n) in enumerate(batches(rows, batch_size, device)):
        cut = cuts[i * batch_size :][:n].to(device)
        before = torch.arange(seq_len, device=device) < cut[:, None]
        changed = x.clone()
        changed[:n] = torch.where(before, x[:n], (x[:n] + shift[i * batch_size :][:n].to(device)) % vocab_size)
        a = ask(model, x, vocab_size)
        first_nats.append(token_nats(a, y)[:n])
        b = ask(model, changed, vocab_size)
        diff = (a[:n] - b[:n]).abs().amax(-1).float().masked_fill(~before, 0.0)
        limit = tolerance(model, a)
        worst = max(worst, diff.max().item())
        if not worst <= limit:
            row, position = divmod(int((~(diff <= limit)).flatten().nonzero()[0]), seq_len)
            raise VoidScore(
                f"the model sees the future or other rows: with other tokens from position {int(cut[row])} on, a logit at "
                f"position {position} changed by {diff[row, position]:.3g} (tolerance {limit:.3g})"
            )
    return torch.cat(first_nats), worst, limit


def versions(model) -> list:
    """Where every parameter and buffer lies and how often it was written to."""
    return [(name, t.data_ptr(), t._version) for name, t in (*model.named_parameters(), *model.named_buffers())]


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    consts = zip(a.co_consts, b.co_consts, strict=False)
    return (a.co_code, a.co_names, len(a.co_consts)) == (b.co_code, b.co_names, len(b.co_consts)) and all(
        _same_code(x, y) if isinstance(x, types.CodeType) and isinstance(y, types.CodeType) else repr(x) == repr(y)
        for x, y in consts
    )


def check_unpatched() -> None:
    """The functions and constants of this module are those of its file."""

    def compare(space: dict, code: types.CodeType, path: str) -> None:
        for inner in (c for c in code.co_consts if isinstance(c, types.CodeType)):
            found = space.get(inner.co_name)
            if isinstance(found, type):
                compare(vars(found), inner, f"{path}{inner.co_name}.")
                continue
            found = getattr(found, "__func__", found)
            found = getattr(found, "__wrapped__", found)
            if inner.co_name.startswith("<"):
                continue
            if not isinstance(found, types.FunctionType) or not _same_code(found.__code__, inner):
                raise VoidScore(f"prepare.{path}{inner.co_name} is not the function of prepare.py: it was replaced at run time")

    compare(globals(), compile(Path(__file__).read_bytes(), __file__, "exec"), "")


def evaluate_bpb(model, tokenizer: Tokenizer, batch_size: int) -> float:
    """Bits per byte of the model on the profile's validation rows, by its logits; lower is better.

    Asks model(x) for logits [B, T, vocab] under the caller's autocast; everything else is done here. The result does not
    depend on batch_size, which is halved when memory runs out. The score is recorded in AUTORESEARCH_RUN_DIR. Of several
    ranks each checks the model and scores every world-size-th row; all get the whole score, rank 0 records it.

    Raises:
        VoidScore: the model uses future tokens or other rows, changes while it is scored, or returns no proper logits.
        UserError: the prepared data are missing or damaged.
    """
    if _clock is not None:
        _clock.stop()
    spent, began = timing(), time.perf_counter()
    check_unpatched()
    manifest = load_manifest(CACHE)
    token_bytes = Tokenizer.from_directory(CACHE).token_bytes
    rows = np.fromfile(checked(CACHE, manifest, "val_rows.bin"), np.uint16).reshape(-1, MAX_SEQ_LEN + 1)
    training, device = model.training, next(model.parameters()).device
    rank, world = ranks()
    model.eval()
    with torch.no_grad():
        while True:
            try:
                nats = guarded_score(model, rows[rank::world], token_bytes, batch_size, device)
                break
            except (torch.OutOfMemoryError, RuntimeError) as e:
                if batch_size == 1 or not re.search("out of memory|can't allocate", str(e)):
                    raise
            batch_size //= 2
            print(f"evaluation: out of memory, trying batches of {batch_size}", file=sys.stderr)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    model.train(training)
    targets = rows[:, 1:]
    n_bytes, total = int(token_bytes[targets].sum()), sum_over_ranks(nats.sum().item())
    bpb = total / (math.log(2) * n_bytes)
    record = {
        "run_id": os.environ.get("AUTORESEARCH_RUN_ID", ""),
        "val_bpb": bpb,
        "nats": total,
        "tokens": int((token_bytes[targets] > 0).sum()),
        "bytes": n_bytes,
        "data_id": data_id(manifest),
        "seed": SEED,
        "profile": PROFILE,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "seconds": round(time.perf_counter() - began, 2),
        "budget": TIME_BUDGET,
        **spent,
    }
    if rank == 0 and (folder := os.environ.get("AUTORESEARCH_RUN_DIR")):
        with open(Path(folder, "eval.jsonl"), "a") as f:
            f.write(json.dumps(record) + "\n")
    return bpb


def guarded_score(model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int, device) -> torch.Tensor:
    """score_rows between the checks: causality before it, an unchanged model after it."""
    n = min(len(rows), -(-PROBE_ROWS // batch_size) * batch_size)
    state = versions(model)
    # The probe sees the last rows first and in reverse: a model that learns while it is scored gives them two scores.
    first, _, limit = probe(model, rows[::-1][:n], len(token_bytes), batch_size, device)
    nats = score_rows(model, rows, token_bytes, batch_size, device)
    if versions(model) != state:
        raise VoidScore("the model changed its parameters or buffers while it was scored")
    counted = torch.from_numpy(token_bytes > 0)[torch.from_numpy(rows[::-1][:n, 1:].astype(np.int64))]
    drift = ((first * counted).sum(1).flip(0) - nats[-n:]).abs().max().item() / MAX_SEQ_LEN
    if not drift <= 2 * limit:
        raise VoidScore(f"the same rows scored twice differ by {drift:.3g} nats a token: the model keeps state between batches")
    return nats


# ---------------------------------------------------------------------------- known answers


class Known(torch.nn.Module):
    """A model given as a function from token ids [B, T] to logits."""

    def __init__(self, function):
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.function = function

    def forward(self, x):
        return self.function(x)


def known_answers() -> bool:
    """Score models whose result is known in closed form and models that must be refused. Prints a table."""
    manifest, tokenizer, device = load_manifest(CACHE), Tokenizer.from_directory(CACHE), get_device()
    rows = np.fromfile(checked(CACHE, manifest, "val_rows.bin"), np.uint16).reshape(-1, MAX_SEQ_LEN + 1)
    rows, lengths, V = rows[:512], tokenizer.token_bytes, tokenizer.get_vocab_size()
    targets = rows[:, 1:]
    n_bytes, counted, batch = int(lengths[targets].sum()), lengths[targets] > 0, 16
    counts = np.bincount(targets[counted], minlength=V)
    p = np.maximum(counts / counts.sum(), 1e-9)
    p /= p.sum()
    first_byte = np.array([t[0] for t in tokenizer.tokens] + [256 + i for i in range(len(SPECIAL_TOKENS))])
    alike = np.bincount(first_byte)[first_byte]  # tokens that begin with the same byte
    unigram = torch.tensor(np.log(p), dtype=torch.float32, device=device)
    classes = torch.from_numpy(first_byte).to(device)
    upcoming = batches(rows, batch, device)

    def oracle(x):  # is told the next token's first byte, from outside its input
        _, y, _ = next(upcoming)
        return torch.where(classes == classes[y][..., None], 0.0, -1e9)

    closed = {
        "uniform": (lambda x: torch.zeros(1, device=device).expand(*x.shape, V), counted.sum() * np.log2(V)),
        "unigram": (lambda x: unigram.expand(*x.shape, V), -(counts * np.log2(p)).sum()),
        "first byte known": (oracle, np.log2(alike[targets])[counted].sum()),
    }
    passed = True
    print(f"{'model':<24}{'expected':>12}{'scored':>12}")
    for name, (function, bits) in closed.items():
        want = bits / n_bytes
        got = score_rows(Known(function).to(device), rows, lengths, batch, device).sum().item() / math.log(2) / n_bytes
        ok = abs(got - want) < 1e-5 * want
        passed &= ok
        print(f"{name:<24}{want:>12.6f}{got:>12.6f}  {'ok' if ok else 'WRONG'}")

    table = torch.randn(V, 64, generator=torch.Generator().manual_seed(0)).to(device)

    def logits(h):
        return h @ table.T / 8

    def shifted(h, by):
        return torch.cat([h[:, by:], h[:, :by]], 1)

    def block(h, size):
        return F.pad(h, (0, 0, 0, -h.size(1) % size)).unflatten(1, (-1, size)).mean(2).repeat_interleave(size, 1)[:, : h.size(1)]

    cheats = {
        "honest": lambda x: logits(table[x] + table[x].cumsum(1)),
        "next token": lambda x: logits(table[x] + shifted(table[x], 1)),
        "small gate": lambda x: logits(table[x] + 1e-3 * shifted(table[x], 1)),
        "block of 2": lambda x: logits(block(table[x], 2)),
        "block of 64": lambda x: logits(block(table[x], 64)),
        "FFT over time": lambda x: logits(torch.fft.fft(table[x].cpu(), dim=1).real.to(device)),
        "batch mean": lambda x: logits(table[x] - table[x].mean(0)),
        "NaN": lambda x: logits(table[x]) / 0.0 * 0.0,
    }
    for name, function in cheats.items():
        try:
            with torch.no_grad():
                probe(Known(function).to(device), rows[:PROBE_ROWS], V, PROBE_ROWS, device)
            got = "accepted"
        except VoidScore:
            got = "refused"
        ok = got == ("accepted" if name == "honest" else "refused")
        passed &= ok
        print(f"{name:<24}{'accepted' if name == 'honest' else 'refused':>12}{got:>12}  {'ok' if ok else 'WRONG'}")
    return passed


# ---------------------------------------------------------------------------- command line


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare the data, or check the evaluator.")
    parser.add_argument("--num-shards", type=int, default=10, help="training shards of climbmix (default 10, -1 for all)")
    parser.add_argument("--check", action="store_true", help="score models whose result is known")
    args = parser.parse_args()
    if args.check:
        return 0 if known_answers() else 1
    prepare(args.num_shards)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        sys.exit(2)
