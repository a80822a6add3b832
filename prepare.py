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
import runpy
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
from harness.common import UserError, VoidScore, ceil_div, file_hash, is_out_of_memory
from harness.fixed import fixed_hash
from harness.marks import RunState, scoring_marks, training_marks
from harness.probe import Probe, ask, draw_cuts
from harness.settings import chosen_data, read_setting, user_path

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
    path = user_path(data).resolve()
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
        data_path=None if data in DATASETS else user_path(data).resolve(),
        vocab_size=profile.vocab_size,
        seq_len=profile.seq_len,
        eval_tokens=profile.eval_tokens,
        time_budget=profile.time_budget if time_budget is None else time_budget,
        seed=DEFAULT_SEED if seed is None else seed,
        root=user_path(read_setting("CACHE") or DEFAULT_ROOT),
    )


@functools.cache
def settings() -> Settings:
    """make_settings(), resolved on first use and the same from then on.

    The first use also begins the run: from here on optimizer steps are counted, and harness.guard
    notes which files are read.
    """
    found = make_settings()
    guard.watch(found.cache, Path(__file__).parent)
    _count_steps()
    return found


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


EVAL_VERSION = 2  # raise it whenever the same model could get another score
# The evaluator's own references, taken before any code of train.py runs: what train.py puts in
# their place later (a loss with label smoothing, say) does not change the score.
_cross_entropy = F.cross_entropy
_now = time.perf_counter
_fromfile = np.fromfile
STARTED = _now()


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
        manifest = load_manifest(folder) if directory else run_manifest()
        return cls.load(checked(folder, manifest, "tokenizer.json"))

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
    manifest = run_manifest()
    with accounted_time():
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
        _run.count_batch(B * T)
        yield both[0], both[1], (taken - buffer_size) // n_documents + 1


# ------------------------------------------------------------------------- the run and its clock

_run = RunState()


@contextlib.contextmanager
def accounted_time():
    """Time within is accounted for: it is spent by fixed code, and may pass outside the clock."""
    start_time = _now()
    try:
        yield
    finally:
        _run.accounted_seconds += _now() - start_time


def run_manifest() -> dict:
    """The manifest of this run's data: those of its first use, up to its score.

    Raises:
        UserError: the data are not prepared.
        VoidScore: they changed since their first use.
    """
    changed = "the prepared data changed during the run"
    hint = "hint: prepare other data while nothing is training"
    try:
        manifest = load_manifest(settings().cache)
    except UserError as error:
        if _run.data_id:
            raise VoidScore(f"{changed}: {error}. {hint}") from None
        raise
    found = data_id(manifest)
    _run.data_id = _run.data_id or found
    if found != _run.data_id:
        raise VoidScore(f"{changed}: data_id {_run.data_id} became {found}. {hint}")
    return manifest


@functools.cache
def _count_steps() -> None:
    """From now on count the steps of every torch optimizer, in this process."""
    register_optimizer_step_post_hook(lambda *_: _run.count_step())


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


STEPS_ALONE = 10  # at most so many steps of several ranks go by without asking for the time


class AgreedTime:
    """Seconds of the budget on several ranks: rank 0's, and between two agreements its pace.

    The ranks wait for each other at an agreement only. The next one comes after at most a tenth of
    the steps that are left, so no step is begun after the end.
    """

    def __init__(self):
        self.agreed = 0.0  # rank 0's seconds at the last agreement
        self.step_seconds = 0.0  # what a step took before it
        self.steps = 0  # since then
        self.steps_alone = 0  # until the next agreement

    def now(self) -> float:
        """Seconds of the budget that are used, the same on all ranks."""
        return self.agreed + self.steps * self.step_seconds

    def next_step(self, elapsed: float) -> float:
        """Called before each step with this rank's own seconds; returns now()."""
        self.steps += 1
        if self.steps > self.steps_alone:
            seconds = sum_over_ranks(elapsed if ranks()[0] == 0 else 0.0)
            self.step_seconds = (seconds - self.agreed) / self.steps
            if self.agreed > 0:  # else this is before the first step: no pace is known
                left = (settings().time_budget - seconds) / max(self.step_seconds, 1e-3)
                self.steps_alone = min(int(left / 10), STEPS_ALONE)
            self.agreed = seconds
            self.steps = 0
        return self.now()


class Clock:
    """The time budget of one run. It starts once. With several ranks, the time of rank 0 counts.

    with clock.warmup(model, optimizer): steps in here compile everything and are undone afterwards
    clock.start(); while not clock.done(): ...; clock.stop()
    """

    def __init__(self):
        if _run.clock is not None:
            raise UserError("Clock() was created twice; a run has exactly one")
        _run.clock = self
        self.started = None  # _now() at the start, minus the seconds used before
        self.stopped = None  # _now() at the stop
        self.training_seconds = None  # set by stop()
        self.resumed = 0.0  # seconds that earlier processes trained
        self.paused = 0.0  # seconds of previews
        self.agreed = AgreedTime()  # of several ranks
        self.warming_up = False
        self.warmup_seconds = 0.0
        self.model = None  # the one that was warmed up
        self.first_weights = None  # its checksums before the warm-up
        self.last_weights = None  # its checksums at the stop
        self.changed_early = False  # the weights changed between the warm-up and the start

    @contextlib.contextmanager
    def warmup(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer):
        """Undo what the steps inside do to weights, buffers, optimizer state and random numbers."""
        if optimizer.state:
            raise UserError("the warm-up must come before the first optimizer step")
        start_time = _now()
        tensors = [*model.parameters(), *model.buffers()]
        saved = [t.detach().clone() for t in tensors]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self.model = model
        self.first_weights = guard.checksums(model)
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
        self.warmup_seconds += _now() - start_time

    def running(self) -> bool:
        """Whether the clock has started and not stopped."""
        return self.started is not None and self.training_seconds is None

    def start(self, used: float = 0.0) -> None:
        """Start the budget. used: seconds of it that an earlier process has trained (marked)."""
        if self.started is not None:
            raise UserError("the clock of a run starts once")
        self.resumed = max(used, 0.0)
        if self.model is not None and not self.resumed:
            self.changed_early = guard.checksums(self.model) != self.first_weights
        synchronize()
        sum_over_ranks(0.0)  # no rank's clock runs while another one still compiles
        self.started = _now() - self.resumed

    def elapsed(self) -> float:
        """Seconds since start (0 before), up to stop."""
        if self.training_seconds is not None or self.started is None:
            return self.training_seconds or 0.0
        return _now() - self.started

    def progress(self) -> float:
        """Share of the budget that is used, 0 to 1, the same on all ranks."""
        seconds = self.elapsed() if ranks()[1] == 1 else self.agreed.now()
        return min(seconds / settings().time_budget, 1.0)

    def done(self) -> bool:
        """Whether the budget is used up; called once before each step."""
        if ranks()[1] > 1:
            return self.agreed.next_step(self.elapsed()) >= settings().time_budget
        return self.elapsed() >= settings().time_budget

    def stop(self) -> None:
        """Stop the budget; does nothing if it doesn't run."""
        if not self.running():
            return
        synchronize()
        self.training_seconds = self.elapsed()
        self.stopped = _now()
        if self.model is not None:
            self.last_weights = guard.checksums(self.model)

    def pause(self, seconds: float) -> None:
        """Take back seconds that just passed and were not training."""
        if self.running():
            self.started += seconds
            self.paused += seconds


# ------------------------------------------------------------------------- evaluation

CHUNK = 1 << 24  # number of logits that the evaluator converts to float32 at once
PROBE_ROWS = 16  # at least so many rows are probed, and so many are scored twice
PROBE_SHARE = 8  # one in so many rows is probed, as long as there are positions left


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
            nats.append(_cross_entropy(part, target, reduction="none"))
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
    model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int, device, probe=None
) -> torch.Tensor:
    """Nats of each row, over the targets of non-zero byte length: float64 [N].

    rows: uint16 [N, T+1]; token_bytes: int32 [vocab_size]; probe: a Probe for the first rows.
    """
    counted = torch.from_numpy(token_bytes > 0)
    nats = []
    for x, y, n in batches(rows, batch_size, device):
        logits = ask(model, x, len(token_bytes))
        token = token_nats(logits, y)
        nats.append((token * counted[y.cpu()]).sum(1)[:n])
        if probe is not None:
            probe.check(x, logits, n)
    return torch.cat(nats)


def guarded_score(
    model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int, device, cuts=()
) -> tuple[torch.Tensor, Probe]:
    """score_rows with a probe of these cuts, and with some rows scored twice.

    Raises:
        VoidScore: the model sees what it must not, or keeps state between batches.
    """
    # The last rows are scored twice, first of all and in reverse order: a model that learns while
    # it is scored gives them two different scores.
    n = min(len(rows), ceil_div(PROBE_ROWS, batch_size) * batch_size)
    last_rows = rows[::-1][:n]
    first = score_rows(model, last_rows, token_bytes, batch_size, device)
    probe = Probe(model, len(token_bytes), cuts)
    nats = score_rows(model, rows, token_bytes, batch_size, device, probe)
    n_counted = int((token_bytes[last_rows[:, 1:]] > 0).sum())
    drift = abs(first.sum() - nats[-n:].sum()).item() / n_counted
    if not drift <= max(probe.limit, probe.eps / 2):
        raise VoidScore(
            f"the same rows scored twice differ by {drift:.3g} nats a token: "
            "the model keeps state between batches"
        )
    return nats, probe


def sweep(model, rows: np.ndarray, vocab_size: int, batch_size: int, device, cuts) -> None:
    """Probe all these cuts, with as many of the rows as that takes.

    Raises:
        VoidScore: the model sees what it must not.
    """
    probe = Probe(model, vocab_size, cuts)
    while probe.cuts:
        for x, _, n in batches(rows[: len(probe.cuts)], batch_size, device):
            probe.check(x, ask(model, x, vocab_size), n)


def in_memory(score, batch_size: int):
    """(score(batch_size), batch_size), with smaller batches where memory runs out."""
    while True:
        try:
            return score(batch_size), batch_size
        except RuntimeError as error:
            if batch_size == 1 or not is_out_of_memory(error):
                raise
        batch_size //= 2
        print(f"evaluation: out of memory, trying batches of {batch_size}", file=sys.stderr)
        torch.cuda.empty_cache()  # without CUDA this does nothing


def bits_per_byte(nats: torch.Tensor, rows: np.ndarray, token_bytes: np.ndarray) -> float:
    """From the nats of this rank's rows, and the rows of all ranks."""
    return sum_over_ranks(nats.sum().item()) / (math.log(2) * int(token_bytes[rows[:, 1:]].sum()))


@contextlib.contextmanager
def evaluation_mode(model):
    """No gradients, no dropout, and no change of the model within.

    Raises:
        VoidScore: the model changed its parameters or buffers.
    """
    training = model.training
    state = guard.model_state(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
    if guard.model_state(model) != state:
        raise VoidScore("the model changed its parameters or buffers while it was scored")


@dataclass(frozen=True)
class Scores:
    """What score_model found, the same on all ranks but for noise."""

    val_bpb: float
    holdout_bpb: float
    nats: float  # of the validation rows
    noise: float  # how much the logits of a repeat differ, 0 if that was not measured
    swept: bool  # whether every position was probed


def score_model(
    model, rows: np.ndarray, holdout: np.ndarray, token_bytes: np.ndarray, batch_size: int
) -> Scores:
    """Score the validation rows, with the probe, and the held-out rows: uint16 [N, T+1] each.

    Raises:
        VoidScore: the model breaks a rule.
    """
    rank, world = ranks()
    device = device_of(model)
    n_cuts = max(PROBE_ROWS, ceil_div(len(rows), PROBE_SHARE))
    seed = random.SystemRandom().getrandbits(48) if rank == 0 else 0  # no leak hides from all runs
    cuts, other_cuts = draw_cuts(n_cuts, rows.shape[1] - 1, int(sum_over_ranks(seed)))
    mine = rows[rank::world]

    def score(batch_size: int):
        part = cuts[rank::world]
        return guarded_score(model, mine, token_bytes, batch_size, device, part)

    def sweep_others(batch_size: int) -> None:
        sweep(model, mine, len(token_bytes), batch_size, device, other_cuts[rank::world])

    def score_holdout(batch_size: int) -> torch.Tensor:
        return score_rows(model, holdout[rank::world], token_bytes, batch_size, device)

    with evaluation_mode(model):
        (nats, probe), batch_size = in_memory(score, batch_size)
        bpb = bits_per_byte(nats, rows, token_bytes)
        limit = read_setting("SWEEP_BELOW")
        promising = limit is not None and bpb < limit  # the run may be kept: look everywhere
        if promising:
            _, batch_size = in_memory(sweep_others, batch_size)
        holdout_nats, _ = in_memory(score_holdout, batch_size)
    return Scores(
        val_bpb=bpb,
        holdout_bpb=bits_per_byte(holdout_nats, holdout, token_bytes),
        nats=sum_over_ranks(nats.sum().item()),
        noise=probe.noise,
        swept=promising or not other_cuts,
    )


def read_rows(manifest: dict, name: str) -> np.ndarray:
    """Held-out rows of the cache: uint16 [N, T+1]. The run is void if train.py reads them."""
    path = checked(settings().cache, manifest, name)
    return _fromfile(path, np.uint16).reshape(-1, settings().seq_len + 1)


def device_of(model) -> torch.device:
    """Where the model's first parameter or buffer is."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return get_device()


def preview_bpb(model, batch_size: int) -> float:
    """Bits per byte on rows that are never scored, for the curve of a long run.

    The clock stands still meanwhile, nothing is recorded, and nothing is marked.
    """
    synchronize()
    start_time = _now()
    with guard.evaluating():
        manifest = run_manifest()
        rows = read_rows(manifest, "preview_rows.bin")
        token_bytes = Tokenizer.from_directory().token_bytes
    rank, world = ranks()
    with evaluation_mode(model):
        nats = score_rows(model, rows[rank::world], token_bytes, batch_size, device_of(model))
    bpb = bits_per_byte(nats, rows, token_bytes)
    if _run.clock is not None:
        _run.clock.pause(_now() - start_time)
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
            returns no proper logits; or the run read held-out rows, or its data changed.
        UserError: the prepared data are damaged.
    """
    start_time = _now()
    if _run.clock is not None:
        _run.clock.stop()
    marks = training_marks(_run, model, settings().time_budget, STARTED, start_time)
    check_run()
    with guard.evaluating():
        manifest = run_manifest()
        rows = read_rows(manifest, "val_rows.bin")
        holdout = read_rows(manifest, "holdout_rows.bin")
        token_bytes = Tokenizer.from_directory().token_bytes
    scores = score_model(model, rows, holdout, token_bytes, batch_size)
    seconds = _now() - start_time
    marks += scoring_marks(_run, seconds, rows.size + holdout.size, scores.noise)
    targets = rows[:, 1:]
    record = (facts or {}) | {
        "run_id": os.environ.get("AUTORESEARCH_RUN_ID", ""),
        "val_bpb": scores.val_bpb,
        "nats": scores.nats,
        "tokens": int((token_bytes[targets] > 0).sum()),
        "bytes": int(token_bytes[targets].sum()),
        "holdout_bpb": scores.holdout_bpb,
        "swept": scores.swept,
        "seconds": round(seconds, 2),
        **describe_run(model, start_time),
        "marks": "; ".join(marks),
    }
    if ranks()[0] == 0 and (folder := os.environ.get("AUTORESEARCH_RUN_DIR")):
        with open(Path(folder, "eval.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")
    return scores.val_bpb


def check_run() -> None:
    """Refuse a run whose evaluator is not the one of its file, or that read what is scored.

    Raises:
        VoidScore: with the function or the file.
    """
    names = ("common", "fixed", "guard", "marks", "probe", "settings")
    own = [sys.modules[f"harness.{name}"] for name in names]
    if replaced := guard.replaced_functions(sys.modules[__name__], *own):
        raise VoidScore(f"{replaced} is not the function of its file: it was replaced at run time")
    code = getattr(_cross_entropy, "__code__", None)
    if code is None or code.co_filename != F.__file__:
        raise VoidScore("torch's cross_entropy was replaced before prepare.py was imported")
    if names := guard.held_out_reads():
        raise VoidScore(
            f"the run read {' and '.join(names)}: only evaluate_bpb may. "
            "hint: train on the batches of make_dataloader, nothing else"
        )


def describe_run(model, end: float) -> dict:
    """What the record says of the run besides its score. end: _now() before the evaluation."""
    clock = _run.clock
    device = device_of(model)
    return {
        "data_id": _run.data_id,
        "seed": settings().seed,
        "profile": settings().profile,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "budget": settings().time_budget,
        "training_seconds": clock.training_seconds if clock else None,
        "outside_seconds": round(end - STARTED - _run.trained_here(), 1),
        "warmup_seconds": round(clock.warmup_seconds, 1) if clock else None,
        "untimed_steps": _run.untimed_steps,
        "untimed_batches": _run.untimed_batches,
        "eval_version": EVAL_VERSION,
        "fixed": fixed_hash(Path(__file__).resolve().parent),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    # The command line is harness.data, run as a program. It imports this module by its name, and
    # the alias saves it from loading a second copy.
    sys.modules["prepare"] = sys.modules["__main__"]
    runpy.run_module("harness.data", run_name="__main__")
