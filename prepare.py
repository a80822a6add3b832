"""Data, tokenizer, loader and evaluation: the fixed half of the project. An agent never edits this file.

    uv run prepare.py                    prepare the data of this machine's profile (idempotent)
    uv run prepare.py --data DATA        climbmix, tinystories, embedded, or a folder or file of your own text
    uv run prepare.py --num-shards 20    more training data (climbmix; default 10, -1 for all)
    uv run prepare.py --verify           read every file again and mend what is damaged
    uv run prepare.py --stats            what one should look at before training
    uv run prepare.py --check            score models whose result is known, refuse models that cheat

Environment: AUTORESEARCH_PROFILE (full, small, tiny), AUTORESEARCH_DATA (as --data), AUTORESEARCH_CACHE (folder),
AUTORESEARCH_TIME_BUDGET (seconds), AUTORESEARCH_SEED; HF_ENDPOINT, HF_TOKEN and the usual proxy variables for the hub.
Exit codes: 0 done, 1 a check failed, 2 refused with a reason, 130 interrupted (run it again to go on).
"""

import argparse
import base64
import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import math
import os
import random
import re
import sys
import sysconfig
import threading
import time
import types
import zlib
from array import array
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
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
DATASETS = ("climbmix", "tinystories", "embedded")


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


def data_name(data: str) -> str:
    """What the cache calls the data: one of DATASETS, or the end of a path and a few digits of the hash of all of it."""
    path = Path(data).expanduser().resolve()
    if data in DATASETS:
        return data
    if os.sep not in data and not path.exists():
        raise UserError(f"data {data!r} are unknown. hint: {', '.join(DATASETS)}, or the path of a folder or file of text")
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', path.name)[-30:]}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


try:
    PROFILE = setting("PROFILE", "", PROFILES) if os.environ.get("AUTORESEARCH_PROFILE") else detect_profile()
    _profile = PROFILES[PROFILE]
    DATA = data_name(setting("DATA", _profile.data))
    VOCAB_SIZE = _profile.vocab_size
    MAX_SEQ_LEN = _profile.seq_len  # context, tokens
    EVAL_TOKENS = _profile.eval_tokens
    TIME_BUDGET = setting("TIME_BUDGET", float(_profile.time_budget))  # seconds of training
    SEED = setting("SEED", 1337)
    ROOT = Path(setting("CACHE", "~/.cache/autoresearch")).expanduser()
    CACHE = ROOT / f"{PROFILE}-{DATA}"
except UserError as error:
    print(f"prepare.py: {error}", file=sys.stderr)
    sys.exit(2)
EVAL_VERSION = 1  # raise it whenever the same model could get another score
REPAIR = "hint: 'python prepare.py --verify' repairs it"


# ---------------------------------------------------------------------------- files and manifest


@contextlib.contextmanager
def replacing(path: Path):
    """A file to write: a reader sees the old one or the whole new one, also after a crash."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        yield f
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def write_atomic(path: Path, data: bytes) -> None:
    with replacing(path) as f:
        f.write(data)


@contextlib.contextmanager
def locked():
    """One process at a time prepares this data, also for another profile: the raw files are shared."""
    with open(ROOT / f"{DATA}.lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {DATA}: waiting for it", file=sys.stderr)
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


def file_hash(path: Path) -> str:
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


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
        raise UserError(f"cache file {path} is {state}. {REPAIR}")
    return path


def data_id(manifest: dict) -> str:
    """12 hex digits; two scores are comparable only if theirs are equal."""
    parts = [manifest["settings"], [manifest["files"][n][1] for n in ("tokenizer.json", "val_rows.bin")]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------- download

WORKERS = 8
ATTEMPTS = 7  # in a row that bring no new byte
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one
TIMEOUT = (5, 20)  # seconds to connect, and without a byte
OUT_OF_REACH = 20  # seconds without any answer before giving up
OFFLINE = "hint: AUTORESEARCH_DATA=embedded needs no network, --data PATH takes your own text, HF_ENDPOINT a mirror"


class Missing(UserError):
    """The hub has no such file."""


def shown(error) -> str:
    """An error's text without the token, passwords in addresses and signed queries."""
    text = re.sub(r"(?<=//)[^/@\s]+@|(?<=\?)[^\s)'\"]+", "...", str(error))
    token = os.environ.get("HF_TOKEN")
    return text.replace(token, "...") if token else text


def retry_after(response) -> float:
    """Seconds that the hub asks to wait, 0 if it does not say; at most ten minutes."""
    value = response.headers.get("Retry-After", "") if response is not None else ""
    try:
        seconds = float(value) if value.isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError):
        seconds = 0.0
    return min(max(seconds, 0.0), 600.0)


def check_parquet(path: Path) -> None:
    try:
        columns = pq.ParquetFile(path).schema_arrow.names
    except (pa.ArrowException, OSError) as e:
        raise requests.RequestException(f"no whole parquet file: {e}") from None
    if "text" not in columns:
        raise UserError(f"{path} has no column 'text', only {columns}")


class Hub:
    """A data set of the hub, and the folder that keeps its files: each next to its SHA-256, unfinished ones as .part."""

    def __init__(self, repo: str, folder: Path):
        self.base, self.repo, self.folder = os.environ.get("HF_ENDPOINT") or "https://huggingface.co", repo, folder
        self.asked, self.reached, self.error = None, False, "no answer"  # when first asked; whether there was any answer
        self.sizes, self.done = {}, Counter()  # bytes of each file

    def get(self, path: str, **headers) -> requests.Response:
        self.asked = self.asked or time.monotonic()
        if token := os.environ.get("HF_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"  # requests drops it on a redirect to another host
        url = f"{self.base.rstrip('/')}/{path}"
        response = requests.get(url, headers=headers | {"Accept-Encoding": "identity"}, stream=True, timeout=TIMEOUT)
        self.reached = True
        return response

    def persist(self, action: Callable, name: str, progress: Callable = lambda: 0) -> None:
        """Call action until it ends without a network error; give up after ATTEMPTS in a row without progress.

        Raises:
            Missing: the hub has no such file.
            UserError: it refuses, or keeps failing.
        """
        attempt, best = 0, progress()
        while not self.stopped.is_set():
            try:
                return action()
            except requests.RequestException as e:
                status, self.error = 0 if e.response is None else e.response.status_code, shown(e)
                if status == 404:
                    raise Missing(shown(f"{self.base} has no {name} in {self.repo}")) from None
                attempt, best = (0, progress()) if progress() > best else (attempt + 1, best)
                refused = isinstance(e, ValueError) or 300 <= status < 500 and status not in (408, 429)
                if refused or attempt == ATTEMPTS:
                    hint = "hint: HF_TOKEN may be needed" if status in (401, 403) else OFFLINE
                    raise UserError(f"cannot download {self.repo}/{name}: {self.error}. {hint}") from None
                self.stopped.wait(max(PAUSE * 2**attempt * random.uniform(0.5, 1), retry_after(e.response)))

    def parallel(self, action: Callable, names: list[str]) -> list[str]:
        """action(name) for all names, in threads. Returns the names that the hub does not have."""
        self.stopped, missing, pool = threading.Event(), [], ThreadPoolExecutor(WORKERS)
        self.folder.mkdir(parents=True, exist_ok=True)
        futures = {pool.submit(action, name): name for name in names}
        pending = set(futures)
        try:
            while pending:
                finished, pending = wait(pending, 0.2, FIRST_COMPLETED)
                for future in finished:
                    try:
                        future.result()
                    except Missing:
                        missing.append(futures[future])
                # Not left to timeouts: they hold for each address of a host, and for none of its name servers.
                if self.asked and not self.reached and time.monotonic() - self.asked > OUT_OF_REACH:
                    raise UserError(shown(f"cannot reach {self.base}: {self.error}. {OFFLINE}"))
        finally:
            self.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return sorted(missing)

    def listing(self) -> list[str]:
        """Names of the data set's parquet files, in order; asked for once, then kept."""
        kept = self.folder / "listing.json"

        def ask_hub():
            with self.get(f"api/datasets/{self.repo}/tree/main?recursive=true") as r:
                r.raise_for_status()
                names = sorted(entry["path"] for entry in r.json() if entry["path"].endswith(".parquet"))
            write_atomic(kept, json.dumps([n for n in names if ".." not in n and not n.startswith("/")]).encode())

        if not kept.exists():
            with locked():
                if self.parallel(lambda name: self.persist(ask_hub, name), ["listing"]):
                    raise UserError(shown(f"{self.base} has no data set {self.repo}"))
        return json.loads(kept.read_text())

    def fetch(self, names: list[str], verify: bool) -> list[str]:
        """Download those not there, and with verify whatever is damaged. Returns the names that the hub does not have."""
        names = [name for name in dict.fromkeys(names) if not (self.folder / name).exists()]
        if verify:
            names += sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*.parquet"))
        if not names:
            return []
        print(f"{'checking' if verify else 'downloading'} {len(names)} files of {self.repo}", file=sys.stderr)
        with tqdm(unit="B", unit_scale=True, total=0, disable=None) as self.bar:
            return self.parallel(lambda name: self.download(name, len(names)), names)

    def count(self, name: str, done: int) -> None:
        self.bar.update(done - self.done[name])
        self.done[name] = done

    def download(self, name: str, of: int) -> None:
        """Bring one file whole into the folder; what an earlier attempt or process left of it is continued by Range."""
        path, part = self.folder / name, self.folder / f"{name}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = Path(f"{path}.sha256")  # its hash, as sha256sum writes it
        if path.exists():
            with contextlib.suppress(requests.RequestException):
                check_parquet(path)
                if not kept.exists() or kept.read_text().startswith(file_hash(path)):
                    return
            print(f"{path} is damaged: downloading it again", file=sys.stderr)
            path.unlink()

        def size() -> int:
            return part.stat().st_size if part.exists() else 0

        def restart(reason: str):
            part.unlink()
            self.count(name, 0)
            raise requests.RequestException(reason)

        def attempt() -> None:
            have = size()
            with self.get(f"datasets/{self.repo}/resolve/main/{name}", **{"Range": f"bytes={have}-"} if have else {}) as r:
                if have and r.status_code in (206, 416):  # 416: nothing is left to send
                    span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", r.headers.get("Content-Range", ""))
                    if not span or span[1] not in (None, str(have)) or int(span[2]) < have:
                        restart("the rest of the file cannot be had")
                    total = int(span[2])
                else:
                    r.raise_for_status()
                    have, total = 0, int(r.headers.get("Content-Length", 0))
                self.sizes[name] = total
                self.bar.total = sum(self.sizes.values()) * of // len(self.sizes)  # as if the others were like these
                if r.status_code != 416:
                    with open(part, "ab" if have else "wb") as f:
                        for chunk in r.iter_content(1 << 14):
                            f.write(chunk)
                            self.count(name, f.tell())
                            if self.stopped.is_set():
                                return
                        f.flush()
                        os.fsync(f.fileno())
                announced = [a.headers.get("X-Linked-ETag", "").strip('"') for a in (*r.history, r)]  # not by where it leads
            if total and size() < total:
                raise requests.RequestException(f"{size()} bytes of {total} came")
            found = file_hash(part)
            for digest in announced:
                if len(digest) == 64 and digest != found:
                    restart(f"its SHA-256 is {found}, {digest} was announced")
            try:
                check_parquet(part)
            except requests.RequestException as e:
                restart(str(e))
            write_atomic(kept, f"{found}  {path.name}\n".encode())
            os.replace(part, path)

        self.persist(attempt, name, size)


# ---------------------------------------------------------------------------- sources of text


@dataclass
class Source:
    """Shards of text by name, opened only when their tokens are not there yet."""

    train: list[str]
    sample: list[str]  # the shards that the tokenizer learns from, whatever else is trained on
    val: str
    texts: Callable[[str], Iterator]  # the texts of a shard; None or a Skip in place of one that cannot be used
    fetch: Callable[[list[str], bool], list[str]] = lambda shards, verify: []  # download; returns those that are missing
    cut: bool = True  # cut texts longer than a row into documents that fit one
    state: str | None = None  # changes when the texts do


@dataclass
class Skip:
    """In place of a text: why there is none."""

    reason: str


def usable(texts, skipped: Counter) -> Iterator[str]:
    """The texts that are text; the others are counted by reason."""
    for text in texts:
        if not isinstance(text, str):
            skipped[text.reason if text else "null"] += 1
        elif not text or text.isspace():
            skipped["empty"] += 1
        elif not text.isascii() and re.search("[\ud800-\udfff]", text):
            skipped["broken UTF-8"] += 1
        else:
            yield text


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

    @cache
    def halves() -> dict:
        texts, size, n_val = python_files(), 0, 0
        while size < 2_500_000 and n_val < len(texts):
            size += len(texts[n_val])
            n_val += 1
        return {"val": texts[:n_val], "embedded": texts[n_val:]}

    return Source(["embedded"], ["embedded"], "val", lambda shard: iter(halves()[shard]))


def parquet_texts(path: Path, file=None) -> Iterator[str | None]:
    """Column "text" of a parquet file (or of an open one that is called path); broken UTF-8 as surrogates."""
    try:
        for batch in pq.ParquetFile(file or path).iter_batches(1024, columns=["text"]):
            for value in batch["text"].cast(pa.binary()).to_pylist():
                yield None if value is None else value.decode("utf-8", "surrogateescape")
    except KeyError:
        raise UserError(f"{path} has no column 'text'") from None
    except (pa.ArrowException, OSError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None


LAST_SHARD = 6542
TOKENIZER_SHARDS = 5  # enough for TOKENIZER_CHARS


def climbmix_source(num_shards: int) -> Source:
    """Web text of the hub; the last shard is pinned as validation. Longer texts stay whole, as in published results."""
    hub = Hub("karpathy/climbmix-400b-shuffle", ROOT / "raw" / "climbmix")
    *train, val = [f"shard_{i:05d}.parquet" for i in range(LAST_SHARD + 1)]
    wanted = train[: num_shards if num_shards >= 0 else None]
    texts = lambda shard: parquet_texts(hub.folder / shard)  # noqa: E731
    return Source(wanted, train[:TOKENIZER_SHARDS], val, texts, hub.fetch, cut=False)


VAL_BYTES = 6  # of text held out for each token of EVAL_TOKENS: BPE makes tokens shorter than that, and some are cropped


def tinystories_source() -> Source:
    """Short stories of the hub, shuffled by their author: the first of the first file are held out."""
    hub = Hub("karpathy/tinystories-gpt4-clean", ROOT / "raw" / "tinystories")
    files = hub.listing()

    def texts(shard: str) -> Iterator:
        name, held_out = files[0] if shard == "val" else shard, 0
        for text in parquet_texts(hub.folder / name):
            in_val = name == files[0] and held_out < VAL_BYTES * EVAL_TOKENS
            held_out += len(text or "")
            if in_val == (shard == "val"):
                yield text
            elif shard == "val":
                return

    def fetch(shards: list[str], verify: bool) -> list[str]:
        return hub.fetch([files[0] if shard == "val" else shard for shard in shards], verify)

    return Source(files, files, "val", texts, fetch)


SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
PIECE = 1 << 20  # characters; a longer text file is taken in pieces, cut at a line end


def kind_of(path: Path) -> tuple[str, str]:
    """(suffix, suffix of the compression or ""), in lower case."""
    packed = path.suffix.lower() if path.suffix.lower() in (".gz", ".zst") else ""
    return Path(path.stem if packed else path.name).suffix.lower(), packed


def json_text(line: str):
    try:
        text = json.loads(line)["text"]
    except (TypeError, KeyError, IndexError):
        text = None
    except (ValueError, RecursionError):
        return Skip("not JSON")
    return text if isinstance(text, str) else Skip("no field 'text'")


def file_texts(path: Path) -> Iterator:
    """The texts of one file, read as its suffixes say, in bounded memory.

    Raises:
        UserError: it cannot be read or unpacked, or is a parquet file without the column "text".
    """
    kind, packed = kind_of(path)
    unpack = {"": open, ".gz": gzip.open, ".zst": lambda path, _: pa.input_stream(str(path), "zstd")}
    try:
        with unpack[packed](path, "rb") as f:
            if kind == ".parquet":
                yield from parquet_texts(path, pa.BufferReader(f.read()) if packed else f)
                return
            lines = io.TextIOWrapper(f, "utf-8-sig", "surrogateescape", newline="\n")
            if kind == ".jsonl":
                yield from (json_text(line) for line in lines if line.strip())
                return
            piece = lambda: lines.read(PIECE) + lines.readline(PIECE)  # noqa: E731
            for text in chain([piece()], iter(piece, "")):  # an empty file is one empty text
                yield Skip("binary") if "\0" in text else text
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{path} cannot be read: {e}") from None


def path_source(path: Path) -> Source:
    """The texts of a file or of a folder's files, hidden ones left out. The texts whose hashes are lowest are held out:
    as many as EVAL_TOKENS needs, or 2% of the bytes if that is more."""
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [p for p in found if kind_of(p)[0] in SUFFIXES and not any(part[0] == "." for part in p.relative_to(path).parts)]

    def key(text: str) -> int:
        return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

    def between(low: int, high: int) -> Iterator:
        """Texts with low <= the first 16 bits of the hash < high, and what is no text."""
        for text in chain.from_iterable(map(file_texts, files)):
            if not isinstance(text, str) or low <= key(text) >> 48 < high:
                yield text

    @cache
    def limits() -> tuple[int, int]:
        """The hashes of what is scored end at the first, of all that is held out at the second."""
        if not files:
            raise UserError(f"{path} is no file or folder with {', '.join(SUFFIXES)} files (or .gz, .zst of these)")
        weight, texts = np.zeros(1 << 16, np.int64), 0
        for texts, text in enumerate(usable(between(0, 1 << 16), Counter()), 1):  # noqa: B007
            weight[key(text) >> 48] += len(text.encode())
        total, need = int(weight.sum()), VAL_BYTES * EVAL_TOKENS
        low, high = (np.searchsorted(weight.cumsum(), [need, max(need, total // 50)]) + 1).tolist()
        if total < 2 * need or not weight[high:].any():
            raise UserError(
                f"{path} has {total / 1e6:.1f} MB of text in {texts} texts, profile '{PROFILE}' needs "
                f"{2 * need / 1e6:.1f} MB, {need / 1e6:.1f} MB of it for validation. hint: more text, or smaller files"
            )
        return low, high

    def texts(shard: str) -> Iterator:
        low, high = limits()
        if shard != "val":
            return between(high, 1 << 16)
        # The scored ones in the order of their hashes: what fills the rows is then spread over all files.
        return chain(sorted(usable(between(0, low), Counter()), key=key), between(low, high))

    state = json.dumps([(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files])
    return Source(["text"], ["text"], "val", texts, state=hashlib.sha256(state.encode()).hexdigest() if files else None)


def open_source(num_shards: int) -> Source:
    if DATA == "climbmix":
        return climbmix_source(num_shards)
    if DATA in DATASETS:
        return tinystories_source() if DATA == "tinystories" else embedded_source()
    return path_source(Path(setting("DATA", "")).expanduser().resolve())


# ---------------------------------------------------------------------------- tokenizer

# GPT-4's split pattern (tiktoken, cl100k_base) with numbers in groups of at most two digits.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|bos|>", "<|reserved_1|>", "<|reserved_2|>", "<|reserved_3|>")
TOKENIZER_CHARS = 1_000_000_000
TOKENIZER_DOC_CHARS = 10_000


def learnable(texts):
    """The beginnings of the texts, up to TOKENIZER_CHARS in all."""
    total = 0
    for text in texts:
        if total >= TOKENIZER_CHARS:
            return
        total += len(text[:TOKENIZER_DOC_CHARS])
        yield text[:TOKENIZER_DOC_CHARS]


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
    def from_directory(cls, directory: str | Path | None = None) -> "Tokenizer":
        folder = Path(directory or CACHE)
        return cls.load(checked(folder, load_manifest(folder), "tokenizer.json"))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
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
    """Where to cut a text of n tokens into documents of at most max_len: [0, ..., n]. blank: bool [n], a blank line ends.

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


def text_keys(data: bytes) -> tuple[int, int]:
    """Hashes of a document: without its white space (equal for copies that differ only in layout), and as it is."""
    both = (data.translate(None, b" \t\n\r\v\f"), data)
    return tuple(int.from_bytes(hashlib.blake2b(d, digest_size=8).digest(), "little") for d in both)


class DocumentEncoder:
    """Turns texts into documents: BOS and at most max_len tokens (any number if max_len is None)."""

    def __init__(self, tokenizer: Tokenizer, max_len: int | None):
        self.enc, self.bos, self.max_len = tokenizer.enc, tokenizer.get_bos_token_id(), max_len
        self.lengths = tokenizer.token_bytes
        self.line_end = np.array([t.endswith(b"\n") for t in tokenizer.tokens])
        self.blank = np.array([re.search(rb"\n\s*\n$", t) is not None for t in tokenizer.tokens])
        self.white = np.array([t.endswith(b"\n") and not t.strip() for t in tokenizer.tokens])

    def __call__(self, text: str) -> list[tuple[tuple[int, int], np.ndarray]]:
        """(text_keys, uint16 [n] with BOS first) for each document of the text."""
        tokens, data = self.enc.encode_to_numpy(text, disallowed_special=()), text.encode()
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
            documents.append((text_keys(data[offsets[i] : offsets[i + 1]]), document))
        return documents


def encode_all(encoder: DocumentEncoder, texts):
    """The documents of all texts, in order, encoded on all cores (tiktoken releases the interpreter's lock)."""

    def encode(texts: list[str]) -> list:
        return [document for text in texts for document in encoder(text)]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending, batch, size = deque(), [], 0
        for text in chain(texts, [None]):
            if text is not None:
                batch.append(text)
                size += len(text)
            if size >= 1 << 18 or text is None:
                pending.append(pool.submit(encode, batch))
                batch, size = [], 0
            while len(pending) > (4 * os.cpu_count() if text is not None else 0):  # memory holds a few batches, no more
                yield from pending.popleft().result()


def documents_of(shard: np.ndarray, bos: int, order: np.random.Generator | None = None):
    """The documents of a token shard, as memoryviews, in file order or shuffled."""
    starts = np.flatnonzero(shard == bos)
    ends = np.append(starts[1:], len(shard))
    view = memoryview(np.asarray(shard))
    turns = np.arange(len(starts)) if order is None else order.permutation(len(starts))
    for part in np.array_split(turns, len(turns) // 4096 + 1):
        for start, end in zip(starts[part].tolist(), ends[part].tolist(), strict=True):
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

    The order of the documents is drawn anew for every epoch from AUTORESEARCH_SEED; epoch counts from 1 how often all of
    them were placed. Under torchrun each rank takes every world-size-th batch of the same stream. Only "train" can be
    asked for: validation rows are read by evaluate_bpb alone.
    """
    if split != "train":
        raise UserError(f"make_dataloader reads split 'train', not {split!r}. hint: evaluate_bpb scores the validation rows")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    manifest, device, bos, taken = load_manifest(CACHE), get_device(), tokenizer.get_bos_token_id(), 0
    shards = [np.memmap(checked(CACHE, manifest, name), np.uint16, mode="r") for name in manifest["train"]]
    n_documents = manifest["total"]["documents"]
    if not n_documents:
        raise UserError(f"there are no training documents in {CACHE}. hint: 'python prepare.py' with more text")
    buffer_size = min(buffer_size, n_documents)  # reads ahead an epoch at most

    def documents():
        nonlocal taken
        for epoch in count(1):
            order = np.random.default_rng([SEED, epoch])
            for shard in shards:
                for document in documents_of(shard, bos, order):
                    taken += 1
                    yield document

    rows = pack_rows(documents(), T + 1, buffer_size)
    pin = device.type == "cuda"
    buffers = [torch.empty(2, B, T, dtype=torch.int64, pin_memory=pin) for _ in range(2)] if pin else None
    copied = [torch.cuda.Event() for _ in range(2)] if pin else None
    for batch in count():
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
        yield both[0], both[1], (taken - buffer_size) // n_documents + 1


# ---------------------------------------------------------------------------- prepare

SHARD_TOKENS = 100_000_000  # a longer token shard goes on in a further file: what reads it needs memory for one


def settings() -> dict:
    data = DATA if DATA in DATASETS else "path"  # the same text elsewhere is the same data
    return {"eval_version": EVAL_VERSION, "profile": asdict(_profile) | {"time_budget": None}, "data": data}


def write_shard(shard: str, documents, held_out: list[set]) -> dict:
    """Write documents to flat uint16 files but those whose hash is held out. Returns what was counted, and the files."""
    counts = {"files": [], "documents": 0, "tokens": 0, "dropped": 0, "dropped_exact": 0}
    size = SHARD_TOKENS
    while size >= SHARD_TOKENS:
        part = f".{len(counts['files'])}" if counts["files"] else ""
        name, size = f"train_{shard.replace('/', '-').removesuffix('.parquet')}{part}.bin", 0
        with replacing(CACHE / name) as f:
            for (normalized, exact), document in documents:
                if normalized in held_out[0]:
                    counts["dropped"] += 1
                    counts["dropped_exact"] += exact in held_out[1]
                    continue
                f.write(document)
                counts["documents"] += 1
                size += len(document)
                if size >= SHARD_TOKENS:
                    break
        if size:  # no empty file: it could not be mapped
            counts["files"].append(name)
            counts["tokens"] += size
    return counts


def training_documents(manifest: dict, bos: int):
    for name in manifest["train"]:
        yield from documents_of(np.memmap(CACHE / name, np.uint16, mode="r"), bos, np.random.default_rng(SEED))


def cropped_share(manifest: dict, bos: int, limit: int = 1_000_000) -> float:
    """Share of tokens that packing crops away, over the first documents of the training shards."""
    seen = 0

    def counted():
        nonlocal seen
        for document in islice(training_documents(manifest, bos), limit):
            seen += len(document)
            yield document

    kept = sum(MAX_SEQ_LEN + 1 for _ in pack_rows(counted(), MAX_SEQ_LEN + 1, 1000))
    return 1 - kept / seen


def salvage(source: Source, verify: bool) -> tuple[dict, list[str]]:
    """The manifest of what is there and right (by size, with verify by content too), and the names of what is not."""
    manifest = read_manifest(CACHE)
    if manifest.get("settings") != settings() or source.state not in (None, manifest.get("state")):
        manifest = {"settings": settings(), "state": source.state, "files": {}, "train": [], "stats": {}, "missing": []}

    def right(name: str) -> bool:
        path, (size, digest) = CACHE / name, manifest["files"][name]
        return path.exists() and path.stat().st_size == size and not (verify and file_hash(path) != digest)

    bad = [name for name in manifest["files"] if not right(name)]
    if "tokenizer.json" in bad:
        manifest["files"] = {}  # all else follows from it
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name not in bad}
    manifest["stats"] = {s: stats for s, stats in manifest["stats"].items() if {*stats["files"]} <= {*manifest["files"]}}
    if bad:
        manifest.pop("data_id", None)
    if verify:
        manifest["missing"] = []  # ask again
    return manifest, bad


def progress(texts, name: str):
    with tqdm(desc=name, unit=" characters", unit_scale=True, disable=None) as bar:  # None: not into a log
        for text in texts:
            yield text
            bar.update(len(text))


def prepare(num_shards: int, allow_missing: bool = False, verify: bool = False) -> None:
    """Bring the cache to completeness; what is there and right is left alone. Whatever is finished survives a kill."""
    CACHE.mkdir(parents=True, exist_ok=True)
    source = open_source(num_shards)

    def lacking(manifest: dict) -> list[str]:
        return [shard for shard in source.train if shard not in manifest["stats"] and shard not in manifest["missing"]]

    manifest, _ = salvage(source, False)
    if verify or "data_id" not in manifest or lacking(manifest):
        with locked():
            manifest, bad = salvage(source, verify)  # another process may have done it meanwhile
            for name in bad:
                print(f"{CACHE / name} is missing or damaged: making it again", file=sys.stderr)
            complete(manifest, source, lacking(manifest), allow_missing, verify)
        report(manifest)
    print(f"{PROFILE}-{DATA} is prepared in {CACHE}, data_id {manifest['data_id']}")


def complete(manifest: dict, source: Source, todo: list[str], allow_missing: bool, verify: bool) -> None:
    """Make what the manifest lacks: tokenizer, validation rows, the shards in todo."""

    def keep(*names: str) -> None:
        for name in names:
            manifest["files"][name] = [(CACHE / name).stat().st_size, file_hash(CACHE / name)]
        manifest["train"] = [name for shard in sorted(manifest["stats"]) for name in manifest["stats"][shard]["files"]]
        kinds = ("documents", "tokens", "dropped", "dropped_exact")
        manifest["total"] = {kind: sum(stats[kind] for stats in manifest["stats"].values()) for kind in kinds}
        write_atomic(CACHE / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())

    learn, hold_out = "tokenizer.json" not in manifest["files"], not {"val_rows.bin", "val_keys.bin"} <= {*manifest["files"]}
    wanted = dict.fromkeys([*todo, *(source.sample if learn else ()), *([source.val] if hold_out else ())])
    if missing := source.fetch([*wanted], verify):
        if not allow_missing or source.val in missing:
            raise UserError(f"the hub lacks {', '.join(missing)}. hint: --allow-missing goes on without training shards")
        manifest["missing"] = sorted({*manifest["missing"], *missing})
        todo = [shard for shard in todo if shard not in missing]

    if learn:
        sample = chain.from_iterable(source.texts(shard) for shard in source.sample if shard not in missing)
        tokenizer = Tokenizer.train(progress(learnable(usable(sample, Counter())), "tokenizer"), VOCAB_SIZE)
        if (size := tokenizer.get_vocab_size()) < VOCAB_SIZE:
            raise UserError(f"the text is too uniform: it gives a vocabulary of {size} tokens, not {VOCAB_SIZE}")
        tokenizer.save(CACHE / "tokenizer.json")
        keep("tokenizer.json")
    tokenizer = Tokenizer.load(CACHE / "tokenizer.json")
    encoder, row_len = DocumentEncoder(tokenizer, MAX_SEQ_LEN if source.cut else None), MAX_SEQ_LEN + 1

    if hold_out:
        keys, n_rows = array("Q"), EVAL_TOKENS // MAX_SEQ_LEN

        def held_out_documents():
            for pair, document in encode_all(encoder, progress(usable(source.texts(source.val), Counter()), "validation")):
                keys.extend(pair)
                yield memoryview(document)

        documents = held_out_documents()
        rows = stack_rows(pack_rows(documents, row_len, 1000), n_rows, row_len)
        if len(rows) < n_rows:
            raise UserError(f"validation fills {len(rows)} rows of {MAX_SEQ_LEN} tokens, not {n_rows}. hint: more text")
        deque(documents, 0)  # the hashes of the rest
        write_atomic(CACHE / "val_rows.bin", rows.tobytes())
        write_atomic(CACHE / "val_keys.bin", keys.tobytes())
        keep("val_rows.bin", "val_keys.bin")

    held_out = [set(column) for column in np.fromfile(CACHE / "val_keys.bin", np.uint64).reshape(-1, 2).T.tolist()]
    for shard in todo:
        skipped = Counter()
        documents = encode_all(encoder, progress(usable(source.texts(shard), skipped), shard))
        manifest["stats"][shard] = write_shard(shard, documents, held_out) | {"skipped": skipped}
        keep(*manifest["stats"][shard]["files"])
    if not manifest["train"]:
        raise UserError(f"no training text is left in {DATA}")
    manifest["cropped"] = cropped_share(manifest, tokenizer.get_bos_token_id())
    manifest["data_id"] = data_id(manifest)
    keep()


def report(manifest: dict) -> None:
    """What was prepared, in a few lines."""
    total, lengths = manifest["total"], Tokenizer.load(CACHE / "tokenizer.json").token_bytes
    skipped = Counter()
    for stats in manifest["stats"].values():
        skipped.update(stats["skipped"])
    rows = np.fromfile(CACHE / "val_rows.bin", np.uint16).reshape(-1, MAX_SEQ_LEN + 1)
    n_bytes = int(lengths[rows[:, 1:]].sum())
    print(f"cache       {CACHE}")
    print(f"tokenizer   {len(lengths)} tokens")
    print(f"training    {total['tokens'] / 1e6:.1f} M tokens in {total['documents']} documents")
    print(f"dropped     {total['dropped']} documents whose text occurs in validation ({total['dropped_exact']} exactly, "
          "the others but for white space)")  # fmt: skip
    if skipped:
        print(f"skipped     {', '.join(f'{n} texts: {reason}' for reason, n in skipped.items())}")
    if manifest["missing"]:
        print(f"missing     {', '.join(manifest['missing'])}")
    print(f"packing     {100 * manifest['cropped']:.1f}% of the tokens are cropped")
    print(f"validation  {len(rows)} rows of {MAX_SEQ_LEN} tokens, {n_bytes} bytes, {n_bytes / rows[:, 1:].size:.3f} a token")


def show_stats() -> None:
    """What one should look at before training: sizes, lengths, rows as the model sees them, the most common tokens."""
    manifest, tokenizer = load_manifest(CACHE), Tokenizer.from_directory()
    bos, total, n_tokens = tokenizer.get_bos_token_id(), manifest["total"], tokenizer.get_vocab_size()
    counts, lengths = np.zeros(n_tokens, np.int64), Counter()
    for name in manifest["train"]:
        shard = np.memmap(CACHE / name, np.uint16, mode="r")
        counts += np.bincount(shard, minlength=n_tokens)
        sizes = np.diff(np.flatnonzero(shard == bos), append=len(shard))
        lengths.update(dict(enumerate(np.bincount(np.log2(sizes).astype(int)).tolist())))
    n_bytes = int((counts * tokenizer.token_bytes).sum())
    print(f"documents        {total['documents']}\nbytes            {n_bytes}\ntokens           {total['tokens']}")
    print(f"bytes per token  {n_bytes / max(1, total['tokens'] - total['documents']):.3f} (without BOS)")
    print(f"cropped          {100 * manifest['cropped']:.1f}% of the tokens, by packing\n\ndocuments by length in tokens")
    for power, n in sorted(lengths.items()):
        print(f"{2**power:>8} - {2 ** (power + 1) - 1:<8}{n:>10}  {'#' * math.ceil(60 * n / max(lengths.values()))}")
    rows = list(islice(pack_rows(training_documents(manifest, bos), MAX_SEQ_LEN + 1, 1000), 1000))
    for row in random.Random(SEED).sample(rows, min(5, len(rows))):
        print(f"\n--- a packed row of {len(row)} documents\n{tokenizer.decode([t for part in row for t in part])}")
    print("\nmost common tokens")
    for token in np.argsort(-counts)[:20].tolist():
        print(f"{counts[token]:>12}  {tokenizer.enc.decode_single_token_bytes(token)!r}")


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


def precision(model, logits: torch.Tensor) -> float:
    """Unit of rounding of the coarsest type at work: autocast, parameters or logits."""
    dtypes = {logits.dtype, *(p.dtype for p in model.parameters())}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    return max(torch.finfo(d).eps for d in dtypes if d.is_floating_point)


@dataclass
class Probe:
    nats: torch.Tensor  # of every token in the first pass, float64 [n, T]
    change: float  # of a logit before a cut, the largest
    limit: float  # what was allowed
    noise: float  # between two passes over the same tokens; 0 where it was not needed
    eps: float


def probe(model, rows: np.ndarray, vocab_size: int, batch_size: int, device) -> Probe:
    """Refuse a model that looks at future tokens or at other rows: two passes over a few validation rows.

    The second pass sees other tokens from each row's own cut on; logits before the cut must stay as they are. Kernels that
    get the same shapes round the same way, whatever the precision, so next to nothing is allowed: 64 units of float32.
    Only if that is exceeded a third pass measures how well the model repeats itself; four times that is allowed then,
    but never more than rounding in the model's precision explains. README has the measured margins.

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
    return Probe(torch.cat(nats), change, limit, noise, eps)


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
                nats, probed = guarded_score(model, rows[rank::world], token_bytes, batch_size, device)
                break
            except (torch.OutOfMemoryError, RuntimeError) as e:
                if batch_size == 1 or not re.search("out of memory|can't allocate", str(e)):
                    raise
            batch_size //= 2
            print(f"evaluation: out of memory, trying batches of {batch_size}", file=sys.stderr)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    model.train(training)
    if probed.noise:
        note = f"logits repeat only to {probed.noise:.2g}: smaller leaks are not seen"
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


def guarded_score(model, rows: np.ndarray, token_bytes: np.ndarray, batch_size: int, device) -> tuple[torch.Tensor, Probe]:
    """score_rows between the checks: causality before it, an unchanged model after it."""
    n = min(len(rows), -(-PROBE_ROWS // batch_size) * batch_size)
    state = versions(model)
    # The probe sees the last rows first and in reverse: a model that learns while it is scored gives them two scores.
    first = probe(model, rows[::-1][:n], len(token_bytes), batch_size, device)
    nats = score_rows(model, rows, token_bytes, batch_size, device)
    if versions(model) != state:
        raise VoidScore("the model changed its parameters or buffers while it was scored")
    counted = torch.from_numpy(token_bytes > 0)[torch.from_numpy(rows[::-1][:n, 1:].astype(np.int64))]
    drift = abs((first.nats * counted).sum() - nats[-n:].sum()).item() / counted.sum().item()
    if not drift <= max(first.limit, first.eps / 2):
        raise VoidScore(f"the same rows scored twice differ by {drift:.3g} nats a token: the model keeps state between batches")
    return nats, first


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
    global DATA, CACHE
    parser = argparse.ArgumentParser(description="Prepare the data, look at them, or check the evaluator.")
    parser.add_argument("--data", help=f"{', '.join(DATASETS)}, or the path of a folder or file (default {DATA})")
    parser.add_argument("--num-shards", type=int, default=10, help="training shards of climbmix (default 10, -1 for all)")
    parser.add_argument("--allow-missing", action="store_true", help="go on without training shards that the hub lacks")
    parser.add_argument("--verify", action="store_true", help="read every file again and mend what is damaged")
    parser.add_argument("--stats", action="store_true", help="show what one should look at before training")
    parser.add_argument("--check", action="store_true", help="score models whose result is known")
    args = parser.parse_args()
    if args.data:
        os.environ["AUTORESEARCH_DATA"] = args.data
        DATA = data_name(args.data)
        CACHE = ROOT / f"{PROFILE}-{DATA}"
    if args.check:
        return 0 if known_answers() else 1
    if args.stats:
        show_stats()
    else:
        prepare(args.num_shards, args.allow_missing, args.verify)
    return 0


def run() -> int:
    """main() with errors told as to a person."""
    try:
        return main()
    except UserError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
    except OSError as error:  # disk full, no permission
        print(f"prepare.py: {error}. hint: make room, or set AUTORESEARCH_CACHE to another folder", file=sys.stderr)
    except KeyboardInterrupt:
        print("prepare.py: interrupted. hint: run it again, it goes on from here", file=sys.stderr)
        return 130
    return 2


def leave(code: int) -> None:
    """Exit without waiting for threads that wait for the network."""
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(run())
