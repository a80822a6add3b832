"""Constants, tokenizer, loader, clock, evaluation: what decides the number. An agent never edits it.

    uv run prepare.py [--help]    prepare the data of this machine's profile, look at them, check the evaluator (in data.py)

Environment: AUTORESEARCH_PROFILE (full, small, tiny), AUTORESEARCH_DATA (as --data), AUTORESEARCH_CACHE (folder),
AUTORESEARCH_TIME_BUDGET (seconds), AUTORESEARCH_SEED; HF_ENDPOINT, HF_TOKEN and the usual proxy variables for the hub.
Exit codes: 0 done, 1 a check failed, 2 refused with a reason, 130 interrupted (run it again to go on).
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
import types
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.common import UserError, file_hash
from harness.settings import read_setting

STARTED = time.perf_counter()


# ---------------------------------------------------------------------------- profiles: every fixed constant


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

    Raises:
        UserError: a variable of the environment has no valid value.
    """
    name = read_setting("PROFILE") or detect_profile()
    if name not in PROFILES:
        known = ", ".join(PROFILES)
        raise UserError(f"AUTORESEARCH_PROFILE={name!r} is unknown. hint: one of {known}")
    profile = PROFILES[name]
    data = data or read_setting("DATA") or profile.data
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
    """make_settings(), resolved on first use and the same from then on."""
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


# ---------------------------------------------------------------------------- files and manifest


def read_manifest(cache: Path) -> dict:
    """The manifest as it stands, also of an unfinished preparation; {} if there is none that can be read."""
    try:
        return dict(json.loads((cache / "manifest.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def load_manifest(cache: Path) -> dict:
    """{"settings", "files": {name: [bytes, sha256]}, "train": [names], "stats", "data_id"} of a prepared cache."""
    manifest = read_manifest(cache)
    if "data_id" not in manifest:  # it is written last
        raise UserError(f"{cache / 'manifest.json'} is missing, damaged or unfinished. hint: run 'python prepare.py' first")
    return manifest


def checked(cache: Path, manifest: dict, name: str) -> Path:
    """The path of a cache file whose size and hash are those written when it was made."""
    path = cache / name
    size, digest = manifest["files"].get(name, (None, None))
    found = path.stat().st_size if path.exists() else None
    if found is None or found != size or file_hash(path) != digest:
        state = "missing" if found is None else f"{found} bytes, {size} expected" if found != size else "changed"
        raise UserError(f"cache file {path} is {state}. hint: 'python prepare.py --verify' repairs it")
    return path


def data_id(manifest: dict) -> str:
    """12 hex digits; two scores are comparable only if theirs are equal."""
    parts = [manifest["settings"], [manifest["files"][n][1] for n in ("tokenizer.json", "val_rows.bin")]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------- tokenizer

# GPT-4's split pattern (tiktoken, cl100k_base) with numbers in groups of at most two digits.
SPLIT_PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SPECIAL_TOKENS = ("<|bos|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>")


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
    def from_directory(cls, directory: str | Path | None = None) -> "Tokenizer":
        folder = Path(directory or settings().cache)
        return cls.load(checked(folder, load_manifest(folder), "tokenizer.json"))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        return cls([base64.b64decode(token) for token in json.loads(path.read_text())["tokens"]])

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


# ---------------------------------------------------------------------------- packing and loading


def documents_of(shard: np.ndarray, bos: int, order: np.random.Generator | None = None):
    """The documents of a token shard, as memoryviews, in file order or shuffled."""
    starts = np.flatnonzero(shard == bos)
    ends = np.append(starts[1:], len(shard))
    view = memoryview(np.asarray(shard))
    turns = np.arange(len(starts)) if order is None else order.permutation(len(starts))
    for part in np.array_split(turns, len(turns) // 4096 + 1):
        for start, end in zip(starts[part].tolist(), ends[part].tolist(), strict=True):
            yield view[start:end]


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


def make_dataloader(tokenizer: Tokenizer, B: int, T: int, split: str, buffer_size: int = 1000, skip: int = 0):
    """Yield (inputs, targets, epoch) for ever: int64 [B, T] each on the device, every row starting with BOS.

    The order of the documents is drawn anew for every epoch from AUTORESEARCH_SEED; epoch counts from 1 how often all of
    them were placed. Under torchrun each rank takes every world-size-th batch of the same stream. Only "train" can be
    asked for: validation rows are read by evaluate_bpb alone. skip: batches of this rank that an earlier process has taken.
    """
    if split != "train":
        raise UserError(f"make_dataloader reads split 'train', not {split!r}. hint: evaluate_bpb scores the validation rows")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    manifest, device, bos, taken = load_manifest(settings().cache), get_device(), tokenizer.get_bos_token_id(), 0
    shards = [np.memmap(checked(settings().cache, manifest, name), np.uint16, mode="r") for name in manifest["train"]]
    n_documents = manifest["total"]["documents"]
    if not n_documents:
        raise UserError(f"there are no training documents in {settings().cache}. hint: 'python prepare.py' with more text")
    buffer_size = min(buffer_size, n_documents)  # reads ahead an epoch at most

    def documents():
        nonlocal taken
        for epoch in count(1):
            order = np.random.default_rng([settings().seed, epoch])
            for shard in shards:
                for document in documents_of(shard, bos, order):
                    taken += 1
                    yield document

    rows, pin = pack_rows(documents(), T + 1, buffer_size), device.type == "cuda"
    for batch in count():
        if batch % world_size != rank or batch < skip * world_size:
            next(islice(rows, B - 1, None))
            continue
        packed = stack_rows(rows, B, T + 1)
        both = torch.empty(2, B, T, dtype=torch.int64, pin_memory=pin)  # torch reuses it only when the copy is done
        both[0].numpy()[:] = packed[:, :-1]
        both[1].numpy()[:] = packed[:, 1:]
        both = both.to(device, non_blocking=pin)
        yield both[0], both[1], (taken - buffer_size) // n_documents + 1


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
        self.resumed = self.paused = 0.0  # seconds: trained by earlier processes, of this one in previews
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

    def start(self, used: float = 0.0) -> None:
        """used: seconds of the budget that an earlier process has trained for. The score is marked then."""
        if self.started is not None:
            raise UserError("the clock of a run starts once")
        synchronize()
        sum_over_ranks(0.0)  # no rank's clock runs while another one still compiles
        self.resumed, self.started = max(used, 0.0), time.perf_counter() - max(used, 0.0)

    def elapsed(self) -> float:
        """Seconds since start (0 before), up to stop."""
        if self.training_seconds is not None or self.started is None:
            return self.training_seconds or 0.0
        return time.perf_counter() - self.started

    def progress(self) -> float:
        """Share of the time budget that is used, 0 to 1; with several ranks, as of the last done()."""
        return min((self.elapsed() if ranks()[1] == 1 else self.agreed) / settings().time_budget, 1.0)

    def done(self) -> bool:
        """Whether the budget is used up: rank 0 decides, so that all ranks stop at the same step."""
        self.agreed = sum_over_ranks(self.elapsed() if ranks()[0] == 0 else 0.0)
        return self.agreed >= settings().time_budget

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
    outside = time.perf_counter() - STARTED - (trained - _clock.resumed + _clock.paused if trained is not None else 0.0)
    marks = [f"resumed after {_clock.resumed:.0f} s"] if _clock and _clock.resumed else []
    if trained is None:
        marks.append("the clock of prepare.py was not used")
    elif trained > 1.1 * settings().time_budget + 5:
        marks.append(f"trained {trained:.0f} s of a budget of {settings().time_budget:.0f} s")
    if _clock and _clock.paused:
        marks.append("validation rows were previewed during training")
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


def precision(model, logits: torch.Tensor) -> float:
    """Unit of rounding of the coarsest type at work: autocast, parameters or logits."""
    dtypes = {logits.dtype, *(p.dtype for p in model.parameters())}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    return max(torch.finfo(d).eps for d in dtypes if d.is_floating_point)


def probe(model, rows: np.ndarray, vocab_size: int, batch_size: int, device) -> tuple[torch.Tensor, float, float, float]:
    """Refuse a model that looks at future tokens or at other rows: two passes over a few validation rows.

    The second pass sees other tokens from each row's own cut on; logits before the cut must stay as they are. Kernels that
    get the same shapes round the same way, whatever the precision, so next to nothing is allowed: 64 units of float32.
    Only if that is exceeded a third pass measures how well the model repeats itself; four times that is allowed then,
    but never more than rounding in the model's precision explains. README has the measured margins.

    Returns:
        nats of the first pass, float64 [n, T]; the change allowed; the noise of a repeat, 0 if not needed; unit of rounding.

    Raises:
        VoidScore: a logit before the cut changed by more.
    """
    seq_len = rows.shape[1] - 1
    cuts = torch.tensor(probe_cuts(len(rows), seq_len))
    shift = torch.from_numpy(np.random.default_rng(len(rows)).integers(1, vocab_size, (len(rows), seq_len)))
    nats, change, limit, noise, eps = [], 0.0, 0.0, 0.0, 0.0
    for i, (x, y, n) in enumerate(batches(rows, batch_size, device)):
        cut = cuts[i * batch_size :][:n].to(device)
        before = torch.arange(seq_len, device=device) < cut[:, None]
        other = x.clone()
        other[:n] = torch.where(before, x[:n], (x[:n] + shift[i * batch_size :][:n].to(device)) % vocab_size)
        logits = ask(model, x, vocab_size)
        nats.append(token_nats(logits, y)[:n])
        diff = (logits[:n] - ask(model, other, vocab_size)[:n]).abs().amax(-1).float().masked_fill(~before, 0.0)
        scale, eps = max(1.0, logits.abs().max().item()), precision(model, logits)
        change, limit = max(change, diff.max().item()), max(limit, 64 * 2**-23 * scale)
        if not change <= limit:
            noise = max(noise, (logits - ask(model, x, vocab_size)).abs().max().item())
            limit = min(max(limit, 4 * noise), max(limit, 4 * eps * scale))
        if not change <= limit:
            row, position = divmod(int((~(diff <= limit)).flatten().nonzero()[0]), seq_len)
            raise VoidScore(
                f"the model sees the future or other rows: with other tokens from position {int(cut[row])} on, a logit at "
                f"position {position} changed by {diff[row, position]:.3g} (tolerance {limit:.3g})"
            )
    return torch.cat(nats), limit, noise, eps


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
        for inner in (c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name[0] != "<"):
            found = space.get(inner.co_name)
            if isinstance(found, type):
                compare(vars(found), inner, f"{path}{inner.co_name}.")
                continue
            found = getattr(found, "fget", found)  # a property
            found = getattr(found, "__func__", found)
            found = getattr(found, "__wrapped__", found)
            if not isinstance(found, types.FunctionType) or not _same_code(found.__code__, inner):
                raise VoidScore(f"prepare.{path}{inner.co_name} is not the function of prepare.py: it was replaced at run time")

    compare(globals(), compile(Path(__file__).read_bytes(), __file__, "exec"), "")


def validation(manifest: dict) -> tuple[np.ndarray, np.ndarray]:
    """The validation rows, uint16 [n, T+1], and the byte length of every token."""
    path = checked(settings().cache, manifest, "val_rows.bin")
    return np.fromfile(path, np.uint16).reshape(-1, settings().seq_len + 1), Tokenizer.from_directory(settings().cache).token_bytes


def preview_bpb(model, batch_size: int) -> float:
    """Bits per byte on every 16th validation row, for the curve of a long run: the clock stands still, nothing is recorded."""
    synchronize()
    began, state, (rank, world) = time.perf_counter(), versions(model), ranks()
    rows, token_bytes = validation(load_manifest(settings().cache))
    model.eval()
    with torch.no_grad():
        nats = score_rows(model, rows[16 * rank :: 16 * world], token_bytes, batch_size, next(model.parameters()).device)
    model.train()
    if versions(model) != state:
        raise VoidScore("the model changed its parameters or buffers while it was scored")
    bpb = sum_over_ranks(nats.sum().item()) / (math.log(2) * int(token_bytes[rows[::16, 1:]].sum()))
    _clock.started += time.perf_counter() - began
    _clock.paused += time.perf_counter() - began
    return bpb


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
    manifest = load_manifest(settings().cache)
    rows, token_bytes = validation(manifest)
    training, device = model.training, next(model.parameters()).device
    rank, world = ranks()
    model.eval()
    with torch.no_grad():
        while True:
            try:
                nats, noise = guarded_score(model, rows[rank::world], token_bytes, batch_size, device)
                break
            except RuntimeError as e:
                if batch_size == 1 or not re.search("out of memory|can't allocate", str(e)):
                    raise
            batch_size //= 2
            print(f"evaluation: out of memory, trying batches of {batch_size}", file=sys.stderr)
            torch.cuda.empty_cache()  # without CUDA this does nothing
    model.train(training)
    if noise:
        note = f"logits repeat only to {noise:.2g}: smaller leaks are not seen"
        spent["marks"] = "; ".join(filter(None, (spent["marks"], note)))
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
        "seed": settings().seed,
        "profile": settings().profile,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "seconds": round(time.perf_counter() - began, 2),
        "budget": settings().time_budget,
        **spent,
    }
    if rank == 0 and (folder := os.environ.get("AUTORESEARCH_RUN_DIR")):
        with open(Path(folder, "eval.jsonl"), "a") as f:
            f.write(json.dumps(record) + "\n")
    return bpb


def guarded_score(model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int, device) -> tuple[torch.Tensor, float]:
    """score_rows between the checks: causality before it, an unchanged model after it. Returns also the probe's noise."""
    n = min(len(rows), -(-PROBE_ROWS // batch_size) * batch_size)
    state = versions(model)
    # The probe sees the last rows first and in reverse: a model that learns while it is scored gives them two scores.
    first, limit, noise, eps = probe(model, rows[::-1][:n], len(token_bytes), batch_size, device)
    nats = score_rows(model, rows, token_bytes, batch_size, device)
    if versions(model) != state:
        raise VoidScore("the model changed its parameters or buffers while it was scored")
    counted = torch.from_numpy(token_bytes > 0)[torch.from_numpy(rows[::-1][:n, 1:].astype(np.int64))]
    drift = abs((first * counted).sum() - nats[-n:].sum()).item() / counted.sum().item()
    if not drift <= max(limit, eps / 2):
        raise VoidScore(f"the same rows scored twice differ by {drift:.3g} nats a token: the model keeps state between batches")
    return nats, noise


if __name__ == "__main__":
    sys.modules["prepare"] = sys.modules["__main__"]  # data.py imports this module, not a second copy
    import data

    data.leave(data.run())
