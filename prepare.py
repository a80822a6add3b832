"""What decides the number: settings, tokenizer, loader, clock, evaluation. Not to be edited.

    uv run prepare.py [--help]    prepare the data, show statistics of them, check the evaluator

Environment: AUTORESEARCH_PROFILE (full, small, tiny), AUTORESEARCH_DATA (as --data),
AUTORESEARCH_CACHE (folder), AUTORESEARCH_TIME_BUDGET (seconds), AUTORESEARCH_SEED; for downloads
HF_ENDPOINT, HF_TOKEN and the usual proxy variables.
Exit codes: 0 done, 1 a check failed, 2 refused with a reason, 130 interrupted (run it again).
"""

import base64
import contextlib
import functools
import hashlib
import json
import math
import os
import random
import re
import sys
import time
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness import guard
from harness.common import UserError, ceil_div, file_hash, is_out_of_memory
from harness.settings import chosen_data, read_setting

# ------------------------------------------------------------------------- profiles and settings


@dataclass(frozen=True)
class Profile:
    """What decides the number on one class of machine."""

    data: str  # one of DATASETS
    vocab_size: int
    seq_len: int  # context, tokens
    eval_tokens: int  # validation tokens that are scored
    time_budget: float  # seconds of training


PROFILES = {
    "full": Profile("climbmix", 8192, 2048, 40 * 524288, 300.0),  # CUDA with 16 GB or more
    "small": Profile("climbmix", 4096, 1024, 4 * 524288, 300.0),  # smaller CUDA cards, Apple's MPS
    "tiny": Profile("embedded", 2048, 256, 524288, 300.0),  # CPU
}
DATASETS = ("climbmix", "tinystories", "embedded")
DEFAULT_SEED = 1337
DEFAULT_ROOT = "~/.cache/autoresearch"


@dataclass(frozen=True)
class Settings:
    """All that is set from outside, resolved once: the profile's constants and the environment."""

    profile: str
    data: str  # what the cache calls the data, see data_name
    data_path: Path | None  # the user's own text; None for one of DATASETS
    vocab_size: int
    seq_len: int  # context, tokens
    eval_tokens: int  # validation tokens that are scored
    time_budget: float  # seconds of training
    seed: int
    root: Path  # folder of all caches

    @property
    def cache(self) -> Path:
        """The folder with this data's tokenizer, token shards, validation rows and manifest."""
        return self.root / f"{self.profile}-{self.data}"


def get_device() -> torch.device:
    """The device that this process trains on (one GPU per process under torchrun)."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def detect_profile() -> str:
    """The name of the profile for this machine."""
    kind = get_device().type
    if kind == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        return "full" if memory >= 15e9 else "small"  # a "16 GB" card reports less than 16e9 bytes
    return "small" if kind == "mps" else "tiny"


def data_name(data: str) -> str:
    """What the cache calls the data: a name of DATASETS, or the end of a path and a hash of it.

    Raises:
        UserError: neither a data set nor an existing path.
    """
    if data in DATASETS:
        return data
    path = Path(data).expanduser().resolve()
    if os.sep not in data and not path.exists():
        raise UserError(
            f"unknown data set {data!r}. hint: {', '.join(DATASETS)}, "
            "or the path of a folder or file of text"
        )
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', path.name)[-30:]}-{digest}"


def make_settings(data: str | None = None) -> Settings:
    """The settings of this process; data overrides AUTORESEARCH_DATA.

    Without both it is what `prepare.py --data` noted for this checkout, or the profile's data set.

    Raises:
        UserError: a variable of the environment has no valid value.
    """
    name = read_setting("PROFILE") or detect_profile()
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise UserError(f"AUTORESEARCH_PROFILE={name!r} is unknown. hint: one of {known}")
    profile = PROFILES[name]
    chosen = chosen_data(Path(__file__).resolve().parent)
    data = data or read_setting("DATA") or chosen or profile.data
    time_budget, seed = read_setting("TIME_BUDGET"), read_setting("SEED")
    return Settings(
        profile=name,
        data=data_name(data),
        data_path=None if data in DATASETS else Path(data).expanduser().resolve(),
        vocab_size=profile.vocab_size,
        seq_len=profile.seq_len,
        eval_tokens=profile.eval_tokens,
        time_budget=profile.time_budget if time_budget is None else time_budget,
        seed=DEFAULT_SEED if seed is None else seed,
        root=Path(read_setting("CACHE") or DEFAULT_ROOT).expanduser(),
    )


@functools.cache
def settings() -> Settings:
    """make_settings(), resolved on first use and the same from then on.

    The first use also begins the run: optimizer steps are counted from here on.
    """
    _count_steps()
    return make_settings()


CONSTANTS = {  # names of this module that come from settings(), as in karpathy/autoresearch
    "PROFILE": "profile",
    "DATA": "data",
    "VOCAB_SIZE": "vocab_size",
    "MAX_SEQ_LEN": "seq_len",
    "EVAL_TOKENS": "eval_tokens",
    "TIME_BUDGET": "time_budget",
    "SEED": "seed",
    "ROOT": "root",
    "CACHE": "cache",
}


def __getattr__(name: str):
    """The constants, read from settings() when they are first used (PEP 562)."""
    if name in CONSTANTS:
        return getattr(settings(), CONSTANTS[name])
    raise AttributeError(f"module 'prepare' has no attribute {name!r}")


EVAL_VERSION = 1  # raise it whenever the same model could get another score
STARTED = time.perf_counter()


# ------------------------------------------------------------------------- files and manifest


def read_manifest(cache: Path) -> dict:
    """The manifest as it stands, also of an unfinished preparation; {} if there is no valid one."""
    try:
        return dict(json.loads((cache / "manifest.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def load_manifest(cache: Path) -> dict:
    """The manifest of a prepared cache.

    Its keys: "settings", "files" {name: [bytes, sha256]}, "train" [names], "total", "data_id".

    Raises:
        UserError: the preparation has not finished.
    """
    manifest = read_manifest(cache)
    if "data_id" not in manifest:  # it is written last
        raise UserError(
            f"{cache / 'manifest.json'} is missing, damaged or unfinished. "
            "hint: run 'python prepare.py' first"
        )
    return manifest


def checked(cache: Path, manifest: dict, name: str) -> Path:
    """The path of a cache file whose size and hash are those written when it was made.

    Raises:
        UserError: the file is missing or changed.
    """
    path = cache / name
    size, digest = manifest["files"].get(name, (None, None))
    found = path.stat().st_size if path.exists() else None
    if found is None:
        state = "missing"
    elif found != size:
        state = f"{found} bytes, {size} expected"
    elif file_hash(path) != digest:
        state = "changed"
    else:
        return path
    raise UserError(f"cache file {path} is {state}. hint: 'python prepare.py --verify' repairs it")


def data_id(manifest: dict) -> str:
    """12 hex digits; two scores are comparable only if theirs are equal."""
    names = ("tokenizer.json", "val_rows.bin", "holdout_rows.bin")
    hashes = [manifest["files"][name][1] for name in names]
    text = json.dumps([manifest["settings"], hashes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ------------------------------------------------------------------------- tokenizer

# GPT-4's split pattern (tiktoken, cl100k_base) with numbers in groups of at most two digits.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|bos|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>")


class Tokenizer:
    """Byte-level BPE: trained by rustbpe, run by tiktoken, stored as JSON (nothing to execute)."""

    def __init__(self, tokens: list[bytes]):
        special = {name: len(tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}
        self.tokens = tokens
        self.enc = tiktoken.Encoding(
            "autoresearch",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens=special,
        )
        # Lengths of raw bytes, not of decoded text: a token may hold a part of a character.
        lengths = [len(token) for token in tokens] + [0] * len(special)
        self.token_bytes = np.array(lengths, dtype=np.int32)

    @classmethod
    def from_directory(cls, directory: str | Path | None = None) -> "Tokenizer":
        """The tokenizer of a prepared cache, by default the one of these settings."""
        folder = Path(directory or settings().cache)
        return cls.load(checked(folder, load_manifest(folder), "tokenizer.json"))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """The tokenizer of one JSON file, not compared with a manifest."""
        tokens = json.loads(path.read_text())["tokens"]
        return cls([base64.b64decode(token) for token in tokens])

    def get_vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return self.enc.n_vocab

    def get_bos_token_id(self) -> int:
        """The id of the token that begins every document."""
        return self.enc.encode_single_token(SPECIAL_TOKENS[0])

    def encode(
        self, text: str | list[str], prepend: int | str | None = None, num_threads: int = 8
    ) -> list:
        """Token ids of a text, or a list of them for a list of texts.

        Special tokens in a text are encoded as plain text. prepend: an id or a special token.
        """
        if isinstance(text, str):
            return self.encode([text], prepend, 1)[0]
        first = []
        if prepend is not None:
            is_id = isinstance(prepend, int)
            first = [prepend if is_id else self.enc.encode_single_token(prepend)]
        encoded = self.enc.encode_ordinary_batch(text, num_threads=num_threads)
        return [first + ids for ids in encoded]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self.enc.decode(ids)


# ------------------------------------------------------------------------- packing and loading


def documents_of(shard: np.ndarray, bos: int, order: np.random.Generator | None = None):
    """Yield the documents of a token shard as memoryviews, in file order or shuffled."""
    starts = np.flatnonzero(shard == bos)
    ends = np.append(starts[1:], len(shard))
    view = memoryview(np.asarray(shard))
    turns = np.arange(len(starts)) if order is None else order.permutation(len(starts))
    for part in np.array_split(turns, len(turns) // 4096 + 1):
        for start, end in zip(starts[part].tolist(), ends[part].tolist(), strict=True):
            yield view[start:end]


def pack_rows(documents, row_len: int, buffer_size: int):
    """Best-fit packing without padding: yield rows, each a list of memoryviews, row_len tokens.

    From a buffer of documents the longest one that fits goes next. When none fits, the shortest is
    cropped to fill the row. Of equal lengths the first to arrive counts as the longest. A last row
    that cannot be filled is dropped. Time per placement: O(log buffer_size).
    """
    source = iter(documents)
    buffered = {}  # documents by sort key
    # A sort key holds the length in its high bits, and below them a number that falls with each
    # arrival. So the keys of all documents of at most n tokens are below (n + 1) << 32.
    sort_keys = []
    arrivals = 0
    while True:
        row = []
        room = row_len
        while room:
            while len(sort_keys) < buffer_size and (document := next(source, None)) is not None:
                arrivals += 1
                sort_key = (len(document) << 32) + (1 << 32) - arrivals
                buffered[sort_key] = document
                insort(sort_keys, sort_key)
            if not sort_keys:
                return
            fitting = bisect_left(sort_keys, (room + 1) << 32)
            chosen = max(fitting - 1, 0)  # the longest that fits, else the shortest, cropped
            document = buffered.pop(sort_keys.pop(chosen))[:room]
            room -= len(document)
            row.append(document)
        yield row


def stack_rows(rows, count: int, row_len: int) -> np.ndarray:
    """The next count rows of pack_rows as one array: uint16 [count, row_len]; fewer at the end."""
    parts = [part for row in islice(rows, count) for part in row]
    return np.frombuffer(b"".join(parts), np.uint16).reshape(-1, row_len)


def make_dataloader(
    tokenizer: Tokenizer, B: int, T: int, split: str, buffer_size: int = 1000, skip: int = 0
):
    """An endless iterator of (inputs, targets, epoch): int64 [B, T] each, on the device.

    Every row starts with BOS. The documents are shuffled again for every epoch, from the seed.
    epoch counts from 1 how often all of them were placed. Under torchrun each rank takes every
    world-size-th batch of one stream.

    Args:
        split: only "train". The validation rows are read by evaluate_bpb alone.
        skip: number of batches of this rank that an earlier process has taken.

    Raises:
        UserError: another split, no training documents, or a token shard that is damaged.
    """
    if split != "train":
        raise UserError(
            f"make_dataloader reads split 'train', not {split!r}. "
            "hint: evaluate_bpb scores the validation rows"
        )
    cache = settings().cache
    manifest = load_manifest(cache)
    paths = [checked(cache, manifest, name) for name in manifest["train"]]
    shards = [np.memmap(path, np.uint16, mode="r") for path in paths]
    n_documents = manifest["total"]["documents"]
    if not n_documents:
        raise UserError(
            f"there are no training documents in {cache}. hint: 'python prepare.py' with more text"
        )
    buffer_size = min(buffer_size, n_documents)  # reads ahead by one epoch at most
    bos = tokenizer.get_bos_token_id()
    return _batches_forever(shards, bos, n_documents, buffer_size, (B, T), skip)


def _batches_forever(shards, bos: int, n_documents: int, buffer_size: int, shape, skip: int):
    """The iterator behind make_dataloader. shape: (B, T)."""
    B, T = shape
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = get_device()
    pin = device.type == "cuda"
    seed = settings().seed
    taken = 0  # documents that the packer has asked for

    def documents():
        nonlocal taken
        for epoch in count(1):
            order = np.random.default_rng([seed, epoch])
            for shard in shards:
                for document in documents_of(shard, bos, order):
                    taken += 1
                    yield document

    rows = pack_rows(documents(), T + 1, buffer_size)
    for batch in count():
        if batch % world_size != rank or batch < skip * world_size:
            next(islice(rows, B - 1, None))
            continue
        packed = stack_rows(rows, B, T + 1)
        # A new tensor for every batch: torch reuses pinned memory only after the copy is done.
        both = torch.empty(2, B, T, dtype=torch.int64, pin_memory=pin)
        both[0].numpy()[:] = packed[:, :-1]
        both[1].numpy()[:] = packed[:, 1:]
        both = both.to(device, non_blocking=pin)
        yield both[0], both[1], (taken - buffer_size) // n_documents + 1


# ------------------------------------------------------------------------- the clock

OUTSIDE_ALLOWANCE = 150  # seconds of a run that are neither training nor evaluation


@dataclass
class RunState:
    """What this process has done so far: the source of the marks in its record."""

    clock: "Clock | None" = None
    timed_steps: int = 0  # optimizer steps while the clock runs
    untimed_steps: int = 0  # all others, except those of the warm-up


_run = RunState()


def synchronize() -> None:
    """Wait for all queued work on the device."""
    kind = get_device().type
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def ranks() -> tuple[int, int]:
    """(rank of this process, number of processes that train together)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def sum_over_ranks(value: float) -> float:
    """The sum over all ranks, the same on each. All ranks wait for each other, not for devices."""
    if ranks()[1] == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.item()


class Clock:
    """The time budget of one run. It starts once. With several ranks, the time of rank 0 counts.

    with clock.warmup(model, optimizer): steps in here compile everything and are undone afterwards
    clock.start(); while not clock.done(): ...; clock.stop()
    """

    def __init__(self):
        if _run.clock is not None:
            raise UserError("Clock() was created twice; a run has exactly one")
        _run.clock = self
        self.started = None  # time.perf_counter() at the start, minus the seconds used before
        self.training_seconds = None  # set by stop()
        self.resumed = 0.0  # seconds that earlier processes trained
        self.paused = 0.0  # seconds of previews
        self.agreed = 0.0  # rank 0's elapsed seconds at the last done(): the same on every rank
        self.warming_up = False

    @contextlib.contextmanager
    def warmup(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """Undo what the steps inside do to weights, buffers, optimizer state and random numbers."""
        if optimizer.state:
            raise UserError("the warm-up must come before the first optimizer step")
        tensors = [*model.parameters(), *model.buffers()]
        saved = [t.detach().clone() for t in tensors]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self.warming_up = True
        with torch.random.fork_rng(devices=[get_device()] if get_device().type == "cuda" else []):
            yield
        self.warming_up = False
        with torch.no_grad():
            for tensor, values in zip(tensors, saved, strict=True):
                tensor.copy_(values)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        optimizer.state.clear()
        model.zero_grad(set_to_none=True)

    def running(self) -> bool:
        """Whether the clock has started and not stopped."""
        return self.started is not None and self.training_seconds is None

    def start(self, used: float = 0.0) -> None:
        """Start the budget. used: seconds of it that an earlier process has trained (marked)."""
        if self.started is not None:
            raise UserError("the clock of a run starts once")
        synchronize()
        sum_over_ranks(0.0)  # no rank's clock runs while another one still compiles
        self.resumed = max(used, 0.0)
        self.started = time.perf_counter() - self.resumed

    def elapsed(self) -> float:
        """Seconds since start (0 before), up to stop."""
        if self.training_seconds is not None or self.started is None:
            return self.training_seconds or 0.0
        return time.perf_counter() - self.started

    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1; with several ranks, as of the last done()."""
        seconds = self.elapsed() if ranks()[1] == 1 else self.agreed
        return min(seconds / settings().time_budget, 1.0)

    def done(self) -> bool:
        """Whether the budget is used up: rank 0 decides, so that all ranks stop at one step."""
        self.agreed = sum_over_ranks(self.elapsed() if ranks()[0] == 0 else 0.0)
        return self.agreed >= settings().time_budget

    def stop(self) -> None:
        """Stop the budget; a second call does nothing."""
        if self.training_seconds is None:
            synchronize()
            self.training_seconds = self.elapsed()


@functools.cache
def _count_steps() -> None:
    """From now on count the steps of every torch optimizer, in this process."""

    def count_step(*_) -> None:
        clock = _run.clock
        if clock is not None and clock.running():
            _run.timed_steps += 1
        elif clock is None or not clock.warming_up:
            _run.untimed_steps += 1

    register_optimizer_step_post_hook(count_step)


def timing() -> dict:
    """How this run spent its time; "marks" says what a reader of the score must know."""
    clock = _run.clock
    budget = settings().time_budget
    trained = clock.training_seconds if clock else None
    outside = time.perf_counter() - STARTED
    marks = []
    if trained is not None:
        outside -= trained - clock.resumed + clock.paused
    if clock and clock.resumed:
        marks.append(f"resumed after {clock.resumed:.0f} s")
    if trained is None:
        marks.append("the clock of prepare.py was not used")
    elif trained > 1.1 * budget + 5:
        marks.append(f"trained {trained:.0f} s of a budget of {budget:.0f} s")
    if clock and clock.paused:
        marks.append("validation rows were previewed during training")
    if _run.untimed_steps:
        marks.append(f"{_run.untimed_steps} optimizer steps outside the clock")
    if trained is not None and outside > OUTSIDE_ALLOWANCE:
        marks.append(f"{outside:.0f} s outside training ({OUTSIDE_ALLOWANCE} s allowed)")
    return {
        "training_seconds": trained,
        "outside_seconds": round(outside, 1),
        "untimed_steps": _run.untimed_steps,
        "marks": "; ".join(marks),
    }


# ------------------------------------------------------------------------- evaluation


class VoidScore(Exception):
    """The model or the run breaks a rule of the evaluation: there is no score."""


CHUNK = 1 << 24  # number of logits that the evaluator converts to float32 at once
PROBE_ROWS = 16  # at least


def ask(model, x: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """model(x), checked to be logits [B, T, vocab_size]: the model never sees a target."""
    logits = model(x)
    expected = (*x.shape, vocab_size)
    is_tensor = isinstance(logits, torch.Tensor)
    if not is_tensor or tuple(logits.shape) != expected:
        got = tuple(logits.shape) if is_tensor else type(logits).__name__
        raise VoidScore(
            f"model(x) must return logits {expected}, it returned {got}. "
            "hint: no tuple, no loss, no padded vocabulary"
        )
    return logits


def token_nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[target], computed in float32 in chunks: float64 [B, T] on the CPU."""
    flat_logits = logits.flatten(0, 1)
    flat_targets = targets.flatten()
    rows = max(1, CHUNK // logits.size(-1))
    nats = []
    bad = torch.zeros((), dtype=torch.bool, device=logits.device)
    with torch.autocast(logits.device.type, enabled=False):
        for part, target in zip(flat_logits.split(rows), flat_targets.split(rows), strict=True):
            part = part.float()
            bad |= ~torch.isfinite(part.sum())  # one NaN or infinity anywhere makes the sum one
            nats.append(F.cross_entropy(part, target, reduction="none"))
    if bad.item():
        raise VoidScore("the logits contain NaN or infinity")
    return torch.cat(nats).view(targets.shape).cpu().double()


def batches(rows: np.ndarray, batch_size: int, device):
    """Yield (inputs, targets, n) for all rows [N, T+1]: int64 [batch_size, T].

    The last batch is filled up with copies of its last row: a model that is compiled sees one shape
    only. n of its rows count.
    """
    for i in range(0, len(rows), batch_size):
        part = rows[i : i + batch_size]
        copies = np.repeat(part[-1:], batch_size - len(part), 0)
        filled = torch.from_numpy(np.concatenate([part, copies]).astype(np.int64)).to(device)
        yield filled[:, :-1].contiguous(), filled[:, 1:].contiguous(), len(part)


def score_rows(
    model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int, device
) -> torch.Tensor:
    """Nats of each row, over the targets of non-zero byte length: float64 [N].

    rows: uint16 [N, T+1]; token_bytes: int32 [vocab_size].
    """
    counted = torch.from_numpy(token_bytes > 0)
    nats = []
    for x, y, n in batches(rows, batch_size, device):
        token = token_nats(ask(model, x, len(token_bytes)), y)
        nats.append((token * counted[y.cpu()]).sum(1)[:n])
    return torch.cat(nats)


def probe_cuts(n: int, seq_len: int) -> list[int]:
    """n cut positions from 1 to seq_len-1: the ends, powers of two and neighbours, then random."""
    edges = [1, seq_len - 1, *(2**k + d for k in range(20) for d in (0, 1, -1))]
    edges += [seq_len // 2, seq_len // 2 + 1]
    edges = [cut for cut in dict.fromkeys(edges) if 0 < cut < seq_len]
    rest = [cut for cut in range(1, seq_len) if cut not in edges]
    random.Random(n).shuffle(rest)
    if n < len(edges):
        edges = edges[:2] + random.Random(n).sample(edges[2:], max(0, n - 2))
    return [(edges + rest)[i % (seq_len - 1)] for i in range(n)]


def precision(model, logits: torch.Tensor) -> float:
    """Unit of rounding of the coarsest type at work: autocast, parameters or logits."""
    dtypes = {logits.dtype, *(p.dtype for p in model.parameters())}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    return max(torch.finfo(d).eps for d in dtypes if d.is_floating_point)


@dataclass
class Probe:
    """What the probe measured."""

    nats: torch.Tensor  # of its first pass, float64 [n, T]
    limit: float  # change of a logit that was allowed
    noise: float  # how much a repeat differs; 0 if that was not needed
    eps: float  # unit of rounding of the model


def probe(model, rows: np.ndarray, vocab_size: int, batch_size: int, device) -> Probe:
    """Refuse a model that sees future tokens or other rows: two passes over a few rows [n, T+1].

    The second pass sees other tokens from each row's own cut on; logits before the cut must not
    change. Kernels that get equal shapes round equally, whatever the precision, so almost nothing
    is allowed: 64 units of float32. Only if that is exceeded, a third pass measures how well the
    model repeats itself. Four times that is allowed then, but never more than rounding in the
    model's precision explains.

    Raises:
        VoidScore: a logit before the cut changed by more.
    """
    seq_len = rows.shape[1] - 1
    generator = np.random.default_rng(len(rows))
    cuts = torch.tensor(probe_cuts(len(rows), seq_len))
    shift = torch.from_numpy(generator.integers(1, vocab_size, (len(rows), seq_len)))
    nats = []
    change = limit = noise = eps = 0.0
    for i, (x, y, n) in enumerate(batches(rows, batch_size, device)):
        part = slice(i * batch_size, i * batch_size + n)
        cut = cuts[part].to(device)
        before = torch.arange(seq_len, device=device) < cut[:, None]
        other = x.clone()
        other[:n] = torch.where(before, x[:n], (x[:n] + shift[part].to(device)) % vocab_size)
        logits = ask(model, x, vocab_size)
        nats.append(token_nats(logits, y)[:n])
        change_of = (logits[:n] - ask(model, other, vocab_size)[:n]).abs().amax(-1).float()
        change_of = change_of.masked_fill(~before, 0.0)
        scale = max(1.0, logits.abs().max().item())
        eps = precision(model, logits)
        change = max(change, change_of.max().item())
        limit = max(limit, 64 * 2**-23 * scale)
        if not change <= limit:
            repeat = ask(model, x, vocab_size)
            noise = max(noise, (logits - repeat).abs().max().item())
            limit = min(max(limit, 4 * noise), max(limit, 4 * eps * scale))
        if not change <= limit:
            row, position = divmod(int((~(change_of <= limit)).flatten().nonzero()[0]), seq_len)
            raise VoidScore(
                "the model sees the future or other rows: with other tokens from position "
                f"{int(cut[row])} on, a logit at position {position} changed by "
                f"{change_of[row, position]:.3g} (tolerance {limit:.3g})"
            )
    return Probe(torch.cat(nats), limit, noise, eps)


def guarded_score(
    model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int, device
) -> tuple[torch.Tensor, float]:
    """score_rows between the checks: causality before it, an unchanged model after it.

    Returns:
        nats of each row, float64 [N]; the noise of a repeat, 0 if it was not measured.
    """
    n = min(len(rows), ceil_div(PROBE_ROWS, batch_size) * batch_size)
    state = guard.versions(model)
    # The probe sees the last rows first and in reverse order: a model that learns while it is
    # scored gives them two different scores.
    last_rows = rows[::-1][:n]
    found = probe(model, last_rows, len(token_bytes), batch_size, device)
    nats = score_rows(model, rows, token_bytes, batch_size, device)
    if guard.versions(model) != state:
        raise VoidScore("the model changed its parameters or buffers while it was scored")
    targets = torch.from_numpy(last_rows[:, 1:].astype(np.int64))
    counted = torch.from_numpy(token_bytes > 0)[targets]
    drift = abs((found.nats * counted).sum() - nats[-n:].sum()).item() / counted.sum().item()
    if not drift <= max(found.limit, found.eps / 2):
        raise VoidScore(
            f"the same rows scored twice differ by {drift:.3g} nats a token: "
            "the model keeps state between batches"
        )
    return nats, found.noise


def validation(manifest: dict) -> tuple[np.ndarray, np.ndarray]:
    """The validation rows, uint16 [N, T+1], and the byte length of every token."""
    cache = settings().cache
    rows = np.fromfile(checked(cache, manifest, "val_rows.bin"), np.uint16)
    token_bytes = Tokenizer.from_directory(cache).token_bytes
    return rows.reshape(-1, settings().seq_len + 1), token_bytes


def preview_bpb(model, batch_size: int) -> float:
    """Bits per byte on every 16th validation row, for the curve of a long run.

    The clock stands still meanwhile, and nothing is recorded.
    """
    synchronize()
    start_time = time.perf_counter()
    state = guard.versions(model)
    rank, world = ranks()
    rows, token_bytes = validation(load_manifest(settings().cache))
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        mine = rows[16 * rank :: 16 * world]
        nats = score_rows(model, mine, token_bytes, batch_size, device)
    model.train()
    if guard.versions(model) != state:
        raise VoidScore("the model changed its parameters or buffers while it was scored")
    n_bytes = int(token_bytes[rows[::16, 1:]].sum())
    bpb = sum_over_ranks(nats.sum().item()) / (math.log(2) * n_bytes)
    seconds = time.perf_counter() - start_time
    _run.clock.started += seconds
    _run.clock.paused += seconds
    return bpb


def evaluate_bpb(model, tokenizer: Tokenizer, batch_size: int, facts: dict | None = None) -> float:
    """Bits per byte of the model on the profile's validation rows, by its logits; lower is better.

    Asks model(x) for logits [B, T, vocab] under the caller's autocast; everything else is done
    here. The result does not depend on batch_size, which is halved when memory runs out. The score
    is recorded in AUTORESEARCH_RUN_DIR. With several ranks, each checks the model and scores every
    world-size-th row; all return the same score, and rank 0 records it. facts: what else shall
    stand in the record (how the run was set up); it cannot replace what is recorded here.

    Raises:
        VoidScore: the model uses future tokens or other rows, changes while it is scored, or
            returns no proper logits.
        UserError: the prepared data are missing or damaged.
    """
    if _run.clock is not None:
        _run.clock.stop()
    spent = timing()
    start_time = time.perf_counter()
    if replaced := guard.replaced_functions(sys.modules[__name__]):
        raise VoidScore(f"{replaced} is not the function of its file: it was replaced at run time")
    manifest = load_manifest(settings().cache)
    rows, token_bytes = validation(manifest)
    nats, noise = _score_with_less_memory(model, rows, token_bytes, batch_size)
    if noise:
        note = f"logits repeat only to {noise:.2g}: smaller leaks are not seen"
        spent["marks"] = "; ".join(filter(None, (spent["marks"], note)))
    targets = rows[:, 1:]
    n_bytes = int(token_bytes[targets].sum())
    total = sum_over_ranks(nats.sum().item())
    bpb = total / (math.log(2) * n_bytes)
    device = next(model.parameters()).device
    record = (facts or {}) | {
        "run_id": os.environ.get("AUTORESEARCH_RUN_ID", ""),
        "val_bpb": bpb,
        "nats": total,
        "tokens": int((token_bytes[targets] > 0).sum()),
        "bytes": n_bytes,
        "data_id": data_id(manifest),
        "seed": settings().seed,
        "profile": settings().profile,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "seconds": round(time.perf_counter() - start_time, 2),
        "budget": settings().time_budget,
        **spent,
    }
    if ranks()[0] == 0 and (folder := os.environ.get("AUTORESEARCH_RUN_DIR")):
        with open(Path(folder, "eval.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")
    return bpb


def _score_with_less_memory(
    model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int
) -> tuple[torch.Tensor, float]:
    """guarded_score of this rank's rows, in evaluation mode, with smaller batches where needed."""
    rank, world = ranks()
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            while True:
                try:
                    return guarded_score(model, rows[rank::world], token_bytes, batch_size, device)
                except RuntimeError as error:
                    if batch_size == 1 or not is_out_of_memory(error):
                        raise
                batch_size //= 2
                print(f"evaluation: out of memory, trying batches of {batch_size}", file=sys.stderr)
                torch.cuda.empty_cache()  # without CUDA this does nothing
    finally:
        model.train(training)


if __name__ == "__main__":
    # harness.data imports this module: without the alias it would get a second copy.
    sys.modules["prepare"] = sys.modules["__main__"]
    from harness.data import main

    main()
