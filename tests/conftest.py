"""Fixtures: a real tiny-embedded cache, made once a session; a small corpus; a faulty hub."""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT, clean_environment
from lab import Lab

import prepare
from harness import guard
from harness.common import file_hash, write_atomic
from harness.documents import save_tokenizer, train_tokenizer

# A job in the background ignores Ctrl-C, one under nohup a hang-up, and so would their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Several processes of pytest-xdist share the cores: more threads than cores only disturb each other
if n_workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    n_threads = max(1, os.cpu_count() // int(n_workers))
    os.environ.setdefault("OMP_NUM_THREADS", str(n_threads))
    torch.set_num_threads(n_threads)


def pytest_collection_modifyitems(items):
    """Whatever needs the real cache is slow: to make it takes half a minute.

    Files with slow tests come first, so that no core waits for one of them at the end.
    """
    for item in items:
        if "prepared" in item.fixturenames:
            item.add_marker("slow")
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, worker_id) -> dict[str, str]:
    """The environment of processes that see a prepared tiny-embedded cache.

    All processes of pytest-xdist share it: the first one makes it, the others wait.
    """
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent
    environment = clean_environment(
        AUTORESEARCH_CACHE=str(folder / "cache"),
        AUTORESEARCH_PROFILE="tiny",
        AUTORESEARCH_DATA="embedded",
    )
    command = [sys.executable, "prepare.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return environment


@pytest.fixture(scope="session")
def few_rows(prepared, tmp_path_factory) -> dict[str, str]:
    """As `prepared`, with 70 validation rows only: scoring them is quick."""
    root = tmp_path_factory.mktemp("few_rows")
    shutil.copytree(Path(prepared["AUTORESEARCH_CACHE"]), root, dirs_exist_ok=True)
    cache = root / "tiny-embedded"
    manifest = prepare.load_manifest(cache)
    for name, n_rows in (("val_rows.bin", 70), ("holdout_rows.bin", 18), ("preview_rows.bin", 5)):
        rows = (cache / name).read_bytes()[: n_rows * 257 * 2]
        (cache / name).write_bytes(rows)
        manifest["files"][name] = [len(rows), file_hash(cache / name)]
    manifest["data_id"] = prepare.data_id(manifest)
    (cache / "manifest.json").write_text(json.dumps(manifest))
    small = {"AUTORESEARCH_CACHE": str(root), "OMP_NUM_THREADS": "1"}
    return prepared | small | {"AUTORESEARCH_TIME_BUDGET": "300"}


@pytest.fixture
def use_settings(monkeypatch):
    """use(root, **changes): prepare.settings() gives these from then on.

    For example use(tmp_path, seq_len=32, SEED=5): a constant of the profile, a variable. The cache
    folder below root is made and returned; the process counts as a new run.
    """

    def use(root: Path, **changes) -> Path:
        fields = {name: value for name, value in changes.items() if name.islower()}
        variables = {name: str(value) for name, value in changes.items() if name.isupper()}
        for name in [name for name in os.environ if name.startswith("AUTORESEARCH_")]:
            monkeypatch.delenv(name)
        for name, value in ({"PROFILE": "tiny", "CACHE": str(root)} | variables).items():
            monkeypatch.setenv(f"AUTORESEARCH_{name}", value)
        profile = replace(prepare.PROFILES["tiny"], **fields)
        monkeypatch.setitem(prepare.PROFILES, "tiny", profile)
        monkeypatch.setattr(prepare, "_run", prepare.RunState())
        prepare.settings.cache_clear()
        prepare.settings().cache.mkdir(parents=True, exist_ok=True)
        return prepare.settings().cache

    yield use
    prepare.settings.cache_clear()


@pytest.fixture
def lab(tmp_path) -> Lab:
    """A checkout with a stand-in train.py."""
    return Lab(tmp_path / "repo")


@pytest.fixture(scope="session")
def checkout_with_baseline(tmp_path_factory) -> Path:
    """The same after its first run."""
    lab = Lab(tmp_path_factory.mktemp("lab") / "repo")
    lab.attempt("baseline")
    return lab.root


@pytest.fixture
def based(checkout_with_baseline, tmp_path) -> Lab:
    """A checkout with a baseline of one run, score 1.0."""
    return Lab(tmp_path / "repo", original=checkout_with_baseline)


def sentences(seed: int, n: int) -> list[str]:
    """n different texts of a few dozen words each."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(300)]
    return [f"{i} {seed} " + " ".join(rng.choices(words, k=rng.randint(5, 60))) for i in range(n)]


def parquet(texts: list, column: str = "text") -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({column: texts}), buffer, row_group_size=50)
    return buffer.getvalue()


class FakeHub(ThreadingHTTPServer):
    """The hub's layout over plain HTTP.

    faults[path] lists what happens to the next requests for it, each a dict with some of: status;
    headers; drop: close after so many bytes; stall: so many bytes, then silence; length: a wrong
    Content-Length; body: another one; plain: ignore Range; to: redirect.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[dict]] = {}
        self.requests: list[tuple[str, dict]] = []  # path and headers
        self.digests = True  # announce the SHA-256 of each file
        self.closing = threading.Event()  # ends what stalls
        serve = partial(self.serve_forever, poll_interval=0.02)
        threading.Thread(target=serve, daemon=True).start()

    def add(self, repo: str, name: str, data: bytes) -> str:
        """Put a file on the hub. Returns its path there."""
        folder = f"/datasets/{repo}/resolve/main/"
        self.files[folder + name] = data
        names = [path.removeprefix(folder) for path in self.files if path.startswith(folder)]
        names += ["README.md", "../evil.parquet"]
        listing = json.dumps([{"type": "file", "path": name} for name in names])
        self.files[f"/api/datasets/{repo}/tree/main?recursive=true"] = listing.encode()
        return folder + name

    def asked(self, name: str) -> list[dict]:
        return [headers for path, headers in self.requests if path.endswith(name)]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        hub = self.server
        path = self.path
        hub.requests.append((path, dict(self.headers)))
        fault = hub.faults[path].pop(0) if hub.faults.get(path) else {}
        status = fault.get("status", 200)
        headers = dict(fault.get("headers", {}))
        body = fault.get("body", hub.files.get(path.split("?sig")[0]))
        if body is None:
            status = 404
            body = b"Entry not found"
        elif "to" in fault:
            status = 302
            body = b""
            headers["Location"] = fault["to"]
        if hub.digests and status in (200, 302) and path in hub.files:
            headers["X-Linked-ETag"] = f'"{hashlib.sha256(hub.files[path]).hexdigest()}"'
        if status == 200 and "Range" in self.headers and not fault.get("plain"):
            status, body, headers["Content-Range"] = self.part_of(body)
        self.send_response(status)
        headers = {"Content-Length": fault.get("length", len(body))} | headers
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.send_body(body[: fault.get("drop", fault.get("stall"))], "stall" in fault)

    def part_of(self, body: bytes) -> tuple[int, bytes, str]:
        """(status, body, Content-Range) for the range that was asked for."""
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        total = len(body)
        if start < total:
            return 206, body[start:], f"bytes {start}-{total - 1}/{total}"
        return 416, b"", f"bytes */{total}"

    def send_body(self, body: bytes, stall: bool) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(body)
            self.wfile.flush()
            if stall:
                self.server.closing.wait(60)
        self.close_connection = True


@pytest.fixture
def hub():
    server = FakeHub()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


CLIMBMIX = "karpathy/climbmix-400b-shuffle"


@dataclass
class Preparation:
    """prepare.py with small sizes in processes, and where its files are."""

    environment: dict[str, str]
    cache: Path
    raw: Path

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen:
        """A process of tests/small_prepare.py with these arguments and variables."""
        command = [sys.executable, "tests/small_prepare.py", *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment | environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(
        self, *arguments: object, code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess:
        """Wait for such a process. It must exit with this code, and without a traceback."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate()
        assert process.returncode == code, out + err
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(process.args, code, out, err)


@pytest.fixture
def small_prepare(tmp_path) -> Preparation:
    """prepare.py with small sizes and an empty cache."""
    root = tmp_path / "cache"
    environment = clean_environment(AUTORESEARCH_CACHE=str(root), AUTORESEARCH_PROFILE="tiny")
    return Preparation(environment, root / "tiny-climbmix", root / "raw" / "climbmix")


@pytest.fixture
def climbmix(hub, small_prepare) -> Preparation:
    """The same on a hub with seven small shards of climbmix; the last is held out."""
    held_out = sentences(6, 200)
    for i in range(7):
        texts = sentences(i, 200)
        if i == 3:  # copies of held-out texts, one of them in another layout
            texts[10:12] = [held_out[5], "  " + held_out[6].replace(" ", "\n")]
        hub.add(CLIMBMIX, f"shard_{i:05d}.parquet", parquet(texts))
    small_prepare.environment |= {"HF_ENDPOINT": hub.url, "AUTORESEARCH_DATA": "climbmix"}
    return small_prepare


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes by name, except unfinished ones and locks."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: path.read_bytes() for path in files if path.suffix not in (".part", ".lock")}


@dataclass
class ScoredCache:
    """A small prepared cache with held-out rows of a real tokenizer, and the records of scores."""

    folder: Path
    tokenizer: prepare.Tokenizer
    rows: np.ndarray  # uint16 [150, 33], as the others but for their number
    holdout: np.ndarray
    preview: np.ndarray
    data_id: str

    @property
    def token_bytes(self) -> np.ndarray:
        return self.tokenizer.token_bytes

    def begin_run(self) -> None:
        """What was read until now does not count."""
        guard.watch(self.folder, ROOT)

    def records(self) -> list[dict]:
        path = self.folder / "eval.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def record(self) -> dict:
        return self.records()[-1]


@pytest.fixture(scope="session")
def small_tokenizer() -> prepare.Tokenizer:
    """300 tokens."""
    return train_tokenizer([Path(__file__).read_text() + "\u00e9\u4e2d"], 300)


@pytest.fixture
def scored_cache(tmp_path, monkeypatch, use_settings, small_tokenizer) -> ScoredCache:
    """150 validation rows of 32 tokens; a target of no bytes is in every row."""
    monkeypatch.setattr(guard, "UNSEEN_READERS", ())  # the tests themselves import pyarrow
    folder = use_settings(tmp_path / "cache", seq_len=32)
    save_tokenizer(small_tokenizer, folder / "tokenizer.json")
    rows = np.random.default_rng(0).integers(0, 300, (150 + 38 + 10, 33)).astype(np.uint16)
    rows[:, [0, 7]] = small_tokenizer.get_bos_token_id()
    sets = dict(zip(guard.ROW_FILES, np.split(rows, [150, 188]), strict=True))
    for name, part in sets.items():
        write_atomic(folder / name, part.tobytes())
    paths = [folder / name for name in ("tokenizer.json", *sets)]
    files = {path.name: [path.stat().st_size, file_hash(path)] for path in paths}
    manifest = {"settings": {}, "files": files, "train": [], "total": {"documents": 0}}
    manifest["data_id"] = prepare.data_id(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setenv("AUTORESEARCH_RUN_DIR", str(folder))
    monkeypatch.setenv("AUTORESEARCH_RUN_ID", "run-7")
    cache = ScoredCache(folder, small_tokenizer, *sets.values(), manifest["data_id"])
    cache.begin_run()
    return cache
