"""All that happens before training: download, sources of text, documents, the prepared cache, `python prepare.py`.

The second fixed file: train.py does not need it. Settings are read and set in the module prepare, nowhere else.
"""

import argparse
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
import zlib
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import requests
import rustbpe
from tqdm import tqdm

import prepare
from harness.known_answers import known_answers
from prepare import DATASETS, SPECIAL_TOKENS, SPLIT_PATTERN, Tokenizer, UserError, file_hash, load_manifest, pack_rows, stack_rows

# ---------------------------------------------------------------------------- files


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
    with open(prepare.ROOT / f"{prepare.DATA}.lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is preparing {prepare.DATA}: waiting for it", file=sys.stderr)
            fcntl.flock(f, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------------- download

WORKERS = 8
ATTEMPTS = 7  # in a row that bring no new byte
PAUSE = 1.0  # seconds before the second attempt, doubled for each further one
TIMEOUT = (5, 20)  # seconds to connect, and without a byte
OUT_OF_REACH = 20  # seconds without any answer before giving up
OFFLINE = "hint: AUTORESEARCH_DATA=embedded needs no network, --data PATH takes your own text, HF_ENDPOINT a mirror"


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


def parquet_fault(path: Path) -> str | None:
    """Why this is no whole parquet file."""
    try:
        columns = pq.ParquetFile(path).schema_arrow.names
    except (pa.ArrowException, OSError) as e:
        return f"no whole parquet file: {e}"
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

    def persist(self, action: Callable, name: str, progress: Callable = lambda: 0) -> bool:
        """Call action until it ends without a network error. Returns whether the hub has no such file.

        Raises:
            UserError: the hub refuses, or keeps failing: ATTEMPTS in a row without progress.
        """
        attempt, best = 0, progress()
        while not self.stopped.is_set():
            try:
                action()
                break
            except requests.RequestException as e:
                status, self.error = 0 if e.response is None else e.response.status_code, shown(e)
                if status == 404:
                    return True
                attempt, best = (0, progress()) if progress() > best else (attempt + 1, best)
                refused = isinstance(e, ValueError) or 300 <= status < 500 and status not in (408, 429)
                if refused or attempt == ATTEMPTS:
                    hint = "hint: HF_TOKEN may be needed" if status in (401, 403) else OFFLINE
                    raise UserError(f"cannot download {self.repo}/{name}: {self.error}. {hint}") from None
                self.stopped.wait(max(PAUSE * 2**attempt * random.uniform(0.5, 1), retry_after(e.response)))
        return False

    def parallel(self, action: Callable, names: list[str]) -> list[str]:
        """action(name) for all names, in threads. Returns the names for which it is true: the hub does not have them."""
        self.stopped, missing, pool = threading.Event(), [], ThreadPoolExecutor(WORKERS)
        self.folder.mkdir(parents=True, exist_ok=True)
        futures = {pool.submit(action, name): name for name in names}
        pending = set(futures)
        try:
            while pending:
                finished, pending = wait(pending, 0.2, FIRST_COMPLETED)
                missing += [futures[future] for future in finished if future.result()]
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

    def download(self, name: str, of: int) -> bool:
        """Bring one file whole into the folder; what an earlier attempt or process left of it is continued by Range.
        Returns whether the hub has no such file."""
        path, part = self.folder / name, self.folder / f"{name}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = Path(f"{path}.sha256")  # its hash, as sha256sum writes it
        if path.exists():
            if not parquet_fault(path) and (not kept.exists() or kept.read_text().startswith(file_hash(path))):
                return False
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
            if fault := parquet_fault(part):
                restart(fault)
            write_atomic(kept, f"{found}  {path.name}\n".encode())
            os.replace(part, path)

        return self.persist(attempt, name, size)


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
        texts = python_files()
        n_val = int(np.searchsorted(np.cumsum([len(text) for text in texts]), 2_500_000)) + 1
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
    hub = Hub("karpathy/climbmix-400b-shuffle", prepare.ROOT / "raw" / "climbmix")
    *train, val = [f"shard_{i:05d}.parquet" for i in range(LAST_SHARD + 1)]
    wanted = train[: num_shards if num_shards >= 0 else None]
    return Source(wanted, train[:TOKENIZER_SHARDS], val, lambda shard: parquet_texts(hub.folder / shard), hub.fetch, cut=False)


VAL_BYTES = 6  # of text held out for each token of EVAL_TOKENS: BPE makes tokens shorter than that, and some are cropped


def tinystories_source() -> Source:
    """Short stories of the hub, shuffled by their author: the first of the first file are held out."""
    hub = Hub("karpathy/tinystories-gpt4-clean", prepare.ROOT / "raw" / "tinystories")
    files = hub.listing()

    def texts(shard: str) -> Iterator:
        name, held_out = files[0] if shard == "val" else shard, 0
        for text in parquet_texts(hub.folder / name):
            in_val = name == files[0] and held_out < VAL_BYTES * prepare.EVAL_TOKENS
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
        record = json.loads(line)
    except (ValueError, RecursionError):
        return Skip("not JSON")
    text = record.get("text") if isinstance(record, dict) else None
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
        total, need = int(weight.sum()), VAL_BYTES * prepare.EVAL_TOKENS
        low, high = (np.searchsorted(weight.cumsum(), [need, max(need, total // 50)]) + 1).tolist()
        if total < 2 * need or not weight[high:].any():
            raise UserError(
                f"{path} has {total / 1e6:.1f} MB of text in {texts} texts, profile '{prepare.PROFILE}' needs "
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
    if prepare.DATA == "climbmix":
        return climbmix_source(num_shards)
    if prepare.DATA in DATASETS:
        return tinystories_source() if prepare.DATA == "tinystories" else embedded_source()
    return path_source(prepare.settings().data_path)


# ---------------------------------------------------------------------------- learning the tokenizer

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


def train_tokenizer(texts, vocab_size: int) -> Tokenizer:
    bpe = rustbpe.Tokenizer()
    bpe.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    return Tokenizer([bytes(token) for token, _ in sorted(bpe.get_mergeable_ranks(), key=lambda item: item[1])])


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    tokens = [b64encode(token).decode() for token in tokenizer.tokens]
    write_atomic(path, json.dumps({"pattern": SPLIT_PATTERN, "special": SPECIAL_TOKENS, "tokens": tokens}).encode())


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


# ---------------------------------------------------------------------------- prepare

SHARD_TOKENS = 100_000_000  # a longer token shard goes on in a further file: what reads it needs memory for one


def settings() -> dict:
    data = prepare.DATA if prepare.DATA in DATASETS else "path"  # the same text elsewhere is the same data
    profile = asdict(prepare.PROFILES[prepare.PROFILE]) | {"time_budget": None}
    return {"eval_version": prepare.EVAL_VERSION, "profile": profile, "data": data}


def write_shard(shard: str, documents, held_out: list[set]) -> dict:
    """Write documents to flat uint16 files but those whose hash is held out. Returns what was counted, and the files."""
    counts = {"files": [], "documents": 0, "tokens": 0, "dropped": 0, "dropped_exact": 0}
    size = SHARD_TOKENS
    while size >= SHARD_TOKENS:
        part = f".{len(counts['files'])}" if counts["files"] else ""
        name, size = f"train_{shard.replace('/', '-').removesuffix('.parquet')}{part}.bin", 0
        with replacing(prepare.CACHE / name) as f:
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
        shard = np.memmap(prepare.CACHE / name, np.uint16, mode="r")
        yield from prepare.documents_of(shard, bos, np.random.default_rng(prepare.SEED))


def cropped_share(manifest: dict, bos: int) -> float:
    """Share of tokens that packing crops away, over the first million documents of the training shards."""
    seen, packed = (islice(training_documents(manifest, bos), 1_000_000) for _ in range(2))
    row_len = prepare.MAX_SEQ_LEN + 1
    return 1 - sum(row_len for _ in pack_rows(packed, row_len, 1000)) / sum(map(len, seen))


def salvage(source: Source, verify: bool) -> tuple[dict, list[str]]:
    """The manifest of what is there and right (by size, with verify by content too), and the names of what is not."""
    manifest = prepare.read_manifest(prepare.CACHE)
    if manifest.get("settings") != settings() or source.state not in (None, manifest.get("state")):
        manifest = {"settings": settings(), "state": source.state, "files": {}, "train": [], "stats": {}, "missing": []}

    def right(name: str) -> bool:
        path, (size, digest) = prepare.CACHE / name, manifest["files"][name]
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


def prepare_data(num_shards: int, allow_missing: bool = False, verify: bool = False) -> None:
    """Bring the cache to completeness; what is there and right is left alone. Whatever is finished survives a kill."""
    prepare.CACHE.mkdir(parents=True, exist_ok=True)
    source = open_source(num_shards)

    def lacking(manifest: dict) -> list[str]:
        return [shard for shard in source.train if shard not in manifest["stats"] and shard not in manifest["missing"]]

    manifest, _ = salvage(source, False)
    if verify or "data_id" not in manifest or lacking(manifest):
        with locked():
            manifest, bad = salvage(source, verify)  # another process may have done it meanwhile
            for name in bad:
                print(f"{prepare.CACHE / name} is missing or damaged: making it again", file=sys.stderr)
            complete(manifest, source, lacking(manifest), allow_missing, verify)
        report(manifest)
    print(f"{prepare.PROFILE}-{prepare.DATA} is prepared in {prepare.CACHE}, data_id {manifest['data_id']}")


def complete(manifest: dict, source: Source, todo: list[str], allow_missing: bool, verify: bool) -> None:
    """Make what the manifest lacks: tokenizer, validation rows, the shards in todo."""

    def keep(*names: str) -> None:
        for name in names:
            manifest["files"][name] = [(prepare.CACHE / name).stat().st_size, file_hash(prepare.CACHE / name)]
        manifest["train"] = [name for shard in sorted(manifest["stats"]) for name in manifest["stats"][shard]["files"]]
        kinds = ("documents", "tokens", "dropped", "dropped_exact")
        manifest["total"] = {kind: sum(stats[kind] for stats in manifest["stats"].values()) for kind in kinds}
        write_atomic(prepare.CACHE / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())

    learn, hold_out = "tokenizer.json" not in manifest["files"], not {"val_rows.bin", "val_keys.bin"} <= {*manifest["files"]}
    wanted = dict.fromkeys([*todo, *(source.sample if learn else ()), *([source.val] if hold_out else ())])
    if missing := source.fetch([*wanted], verify):
        if not allow_missing or source.val in missing:
            raise UserError(f"the hub lacks {', '.join(missing)}. hint: --allow-missing goes on without training shards")
        manifest["missing"] = sorted({*manifest["missing"], *missing})
        todo = [shard for shard in todo if shard not in missing]

    if learn:
        sample = chain.from_iterable(source.texts(shard) for shard in source.sample if shard not in missing)
        tokenizer = train_tokenizer(progress(learnable(usable(sample, Counter())), "tokenizer"), prepare.VOCAB_SIZE)
        if (size := tokenizer.get_vocab_size()) < prepare.VOCAB_SIZE:
            raise UserError(f"the text is too uniform: it gives a vocabulary of {size} tokens, not {prepare.VOCAB_SIZE}")
        save_tokenizer(tokenizer, prepare.CACHE / "tokenizer.json")
        keep("tokenizer.json")
    tokenizer = Tokenizer.load(prepare.CACHE / "tokenizer.json")
    encoder, row_len = DocumentEncoder(tokenizer, prepare.MAX_SEQ_LEN if source.cut else None), prepare.MAX_SEQ_LEN + 1

    if hold_out:
        keys, n_rows = [], prepare.EVAL_TOKENS // prepare.MAX_SEQ_LEN

        def held_out_documents():
            for pair, document in encode_all(encoder, progress(usable(source.texts(source.val), Counter()), "validation")):
                keys.extend(pair)
                yield memoryview(document)

        documents = held_out_documents()
        rows = stack_rows(pack_rows(documents, row_len, 1000), n_rows, row_len)
        if len(rows) < n_rows:
            raise UserError(f"validation fills {len(rows)} rows of {prepare.MAX_SEQ_LEN} tokens, not {n_rows}. hint: more text")
        deque(documents, 0)  # the hashes of the rest
        write_atomic(prepare.CACHE / "val_rows.bin", rows.tobytes())
        write_atomic(prepare.CACHE / "val_keys.bin", np.array(keys, np.uint64).tobytes())
        keep("val_rows.bin", "val_keys.bin")

    held_out = [set(column) for column in np.fromfile(prepare.CACHE / "val_keys.bin", np.uint64).reshape(-1, 2).T.tolist()]
    for shard in todo:
        skipped = Counter()
        documents = encode_all(encoder, progress(usable(source.texts(shard), skipped), shard))
        manifest["stats"][shard] = write_shard(shard, documents, held_out) | {"skipped": skipped}
        keep(*manifest["stats"][shard]["files"])
    if not manifest["train"]:
        raise UserError(f"no training text is left in {prepare.DATA}")
    manifest["cropped"] = cropped_share(manifest, tokenizer.get_bos_token_id())
    manifest["data_id"] = prepare.data_id(manifest)
    keep()


def report(manifest: dict) -> None:
    """What was prepared, in a few lines."""
    total, lengths = manifest["total"], Tokenizer.load(prepare.CACHE / "tokenizer.json").token_bytes
    skipped = Counter()
    for stats in manifest["stats"].values():
        skipped.update(stats["skipped"])
    rows = np.fromfile(prepare.CACHE / "val_rows.bin", np.uint16).reshape(-1, prepare.MAX_SEQ_LEN + 1)
    n_bytes = int(lengths[rows[:, 1:]].sum())
    print(f"cache       {prepare.CACHE}")
    print(f"tokenizer   {len(lengths)} tokens")
    print(f"training    {total['tokens'] / 1e6:.1f} M tokens in {total['documents']} documents")
    print(f"dropped     {total['dropped']} documents whose text occurs in validation ({total['dropped_exact']} exactly, "
          "the others but for white space)")  # fmt: skip
    if skipped:
        print(f"skipped     {', '.join(f'{n} texts: {reason}' for reason, n in skipped.items())}")
    if manifest["missing"]:
        print(f"missing     {', '.join(manifest['missing'])}")
    print(f"packing     {100 * manifest['cropped']:.1f}% of the tokens are cropped")
    per_token = n_bytes / rows[:, 1:].size
    print(f"validation  {len(rows)} rows of {prepare.MAX_SEQ_LEN} tokens, {n_bytes} bytes, {per_token:.3f} a token")


def show_stats() -> None:
    """What one should look at before training: sizes, lengths, rows as the model sees them, the most common tokens."""
    manifest, tokenizer = load_manifest(prepare.CACHE), Tokenizer.from_directory()
    bos, total, n_tokens = tokenizer.get_bos_token_id(), manifest["total"], tokenizer.get_vocab_size()
    counts, lengths = np.zeros(n_tokens, np.int64), Counter()
    for name in manifest["train"]:
        shard = np.memmap(prepare.CACHE / name, np.uint16, mode="r")
        counts += np.bincount(shard, minlength=n_tokens)
        sizes = np.diff(np.flatnonzero(shard == bos), append=len(shard))
        lengths.update(dict(enumerate(np.bincount(np.log2(sizes).astype(int)).tolist())))
    n_bytes = int((counts * tokenizer.token_bytes).sum())
    print(f"documents        {total['documents']}\nbytes            {n_bytes}\ntokens           {total['tokens']}")
    print(f"bytes per token  {n_bytes / max(1, total['tokens'] - total['documents']):.3f} (without BOS)")
    print(f"cropped          {100 * manifest['cropped']:.1f}% of the tokens, by packing\n\ndocuments by length in tokens")
    for power, n in sorted(lengths.items()):
        print(f"{2**power:>8} - {2 ** (power + 1) - 1:<8}{n:>10}  {'#' * math.ceil(60 * n / max(lengths.values()))}")
    rows = list(islice(pack_rows(training_documents(manifest, bos), prepare.MAX_SEQ_LEN + 1, 1000), 1000))
    for row in random.Random(prepare.SEED).sample(rows, min(5, len(rows))):
        print(f"\n--- a packed row of {len(row)} documents\n{tokenizer.decode([t for part in row for t in part])}")
    print("\nmost common tokens")
    for token in np.argsort(-counts)[:20].tolist():
        print(f"{counts[token]:>12}  {tokenizer.enc.decode_single_token_bytes(token)!r}")


# ---------------------------------------------------------------------------- command line


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare the data, look at them, or check the evaluator.")
    parser.add_argument("--data", help=f"{', '.join(DATASETS)}, or the path of a folder or file (default {prepare.DATA})")
    parser.add_argument("--num-shards", type=int, default=10, help="training shards of climbmix (default 10, -1 for all)")
    parser.add_argument("--allow-missing", action="store_true", help="go on without training shards that the hub lacks")
    parser.add_argument("--verify", action="store_true", help="read every file again and mend what is damaged")
    parser.add_argument("--stats", action="store_true", help="show what one should look at before training")
    parser.add_argument("--check", action="store_true", help="score models whose result is known")
    args = parser.parse_args()
    if args.data:
        os.environ["AUTORESEARCH_DATA"] = args.data
        prepare.settings.cache_clear()
    if args.check:
        return 0 if known_answers(prepare.settings()) else 1
    if args.stats:
        show_stats()
    else:
        prepare_data(args.num_shards, args.allow_missing, args.verify)
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
