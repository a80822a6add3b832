"""Shared fixtures: a real tiny-embedded cache made once a session, a small corpus, a hub that misbehaves on order."""

import dataclasses
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
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare

REPO = Path(__file__).resolve().parent.parent
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores Ctrl-C, and so would its children


def clean_environment(**extra) -> dict:
    dropped = ("AUTORESEARCH_", "HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return {k: v for k, v in os.environ.items() if not k.upper().startswith(dropped)} | extra


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> dict:
    """The environment of subprocesses that see a prepared tiny-embedded cache (AUTORESEARCH_CACHE names its root)."""
    env = clean_environment(AUTORESEARCH_CACHE=str(tmp_path_factory.mktemp("cache")), AUTORESEARCH_PROFILE="tiny")
    done = subprocess.run([sys.executable, "prepare.py"], cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return env


@pytest.fixture(scope="session")
def short(prepared, tmp_path_factory):
    """A prepared cache with 70 validation rows only."""
    root = tmp_path_factory.mktemp("short")
    shutil.copytree(Path(prepared["AUTORESEARCH_CACHE"]), root, dirs_exist_ok=True)
    cache = root / "tiny-embedded"
    rows = (cache / "val_rows.bin").read_bytes()[: 70 * 257 * 2]
    (cache / "val_rows.bin").write_bytes(rows)
    manifest = prepare.load_manifest(cache)
    manifest["files"]["val_rows.bin"] = [len(rows), prepare.file_hash(cache / "val_rows.bin")]
    (cache / "manifest.json").write_text(json.dumps(manifest | {"data_id": prepare.data_id(manifest)}))
    return prepared | {"AUTORESEARCH_CACHE": str(root), "OMP_NUM_THREADS": "1", "AUTORESEARCH_TIME_BUDGET": "300"}


@pytest.fixture
def use_settings(monkeypatch):
    """use(root, cache folder's constants and variables): prepare.settings() gives these from then on.

    For example use(tmp_path, seq_len=32, SEED=5). The cache folder is made and returned; the process
    counts as a new run.
    """

    def use(root: Path, **changes) -> Path:
        fields = {name: value for name, value in changes.items() if name.islower()}
        variables = {name: str(value) for name, value in changes.items() if name.isupper()}
        for name in [name for name in os.environ if name.startswith("AUTORESEARCH_")]:
            monkeypatch.delenv(name)
        for name, value in ({"PROFILE": "tiny", "CACHE": str(root)} | variables).items():
            monkeypatch.setenv(f"AUTORESEARCH_{name}", value)
        profile = dataclasses.replace(prepare.PROFILES["tiny"], **fields)
        monkeypatch.setitem(prepare.PROFILES, "tiny", profile)
        monkeypatch.setattr(prepare, "_run", prepare.RunState())
        prepare.settings.cache_clear()
        prepare.settings().cache.mkdir(parents=True, exist_ok=True)
        return prepare.settings().cache

    yield use
    prepare.settings.cache_clear()


def sentences(seed: int, n: int) -> list[str]:
    """n different texts of a few dozen words each."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(300)]
    return [f"{i} {seed} " + " ".join(rng.choices(words, k=rng.randint(5, 60))) for i in range(n)]


def parquet(texts: list, column: str = "text") -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({column: texts}), buffer, row_group_size=50)
    return buffer.getvalue()


class FakeHub(ThreadingHTTPServer):
    """The hub's layout over plain HTTP. faults[path] lists what happens to the next requests for it, each a dict:
    status, headers, drop (close after so many bytes), stall (so many bytes, then silence), length (a wrong one), body, plain
    (ignore Range), to (redirect)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults, self.requests, self.digests, self.closing = {}, {}, [], True, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def add(self, repo: str, name: str, data: bytes) -> str:
        path = f"/datasets/{repo}/resolve/main/{name}"
        self.files[path] = data
        self.files[f"/api/datasets/{repo}/tree/main?recursive=true"] = json.dumps(
            [{"type": "file", "path": p.rsplit("/main/")[1]} for p in self.files if f"/{repo}/resolve" in p]
            + [{"type": "file", "path": "README.md"}, {"type": "file", "path": "../evil.parquet"}]
        ).encode()
        return path

    def asked(self, name: str) -> list[dict]:
        return [headers for path, headers in self.requests if path.endswith(name)]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        hub, path = self.server, self.path
        hub.requests.append((path, dict(self.headers)))
        fault = hub.faults[path].pop(0) if hub.faults.get(path) else {}
        status, headers = fault.get("status", 200), dict(fault.get("headers", {}))
        body = fault.get("body", hub.files.get(path.split("?sig")[0]))
        if body is None:
            status, body = 404, b"Entry not found"
        elif "to" in fault:
            status, body = 302, b""
            headers["Location"] = fault["to"]
        if hub.digests and status in (200, 302) and path in hub.files:
            headers["X-Linked-ETag"] = f'"{hashlib.sha256(hub.files[path]).hexdigest()}"'
        if status == 200 and "Range" in self.headers and not fault.get("plain"):
            start, total = int(self.headers["Range"][6:-1]), len(body)
            status, body = (206, body[start:]) if start < total else (416, b"")
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}" if status == 206 else f"bytes */{total}"
        self.send_response(status)
        for key, value in ({"Content-Length": fault.get("length", len(body))} | headers).items():
            self.send_header(key, str(value))
        self.end_headers()
        cut = fault.get("drop", fault.get("stall", len(body)))
        try:
            self.wfile.write(body[:cut])
            self.wfile.flush()
            if "stall" in fault:
                hub.closing.wait(60)
        except OSError:
            pass
        self.close_connection = True


@pytest.fixture
def hub():
    server = FakeHub()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


CLIMBMIX = "karpathy/climbmix-400b-shuffle"
SMALL = """
import sys, data as d, prepare as p
p.VOCAB_SIZE, p.MAX_SEQ_LEN, p.EVAL_TOKENS = 320, 32, 32 * 40
d.LAST_SHARD, d.TOKENIZER_SHARDS, d.PAUSE, d.TIMEOUT = 6, 2, 0.01, (2, 2)
"""


@pytest.fixture
def climbmix(hub, tmp_path):
    """A hub with seven small shards of climbmix, and run(*arguments, patch="") that prepares from it in a process."""
    for i in range(7):
        texts = sentences(i, 200)
        if i == 3:  # copies of validation texts, one of them laid out in another way
            texts[10:12] = [sentences(6, 200)[5], "  " + sentences(6, 200)[6].replace(" ", "\n")]
        hub.add(CLIMBMIX, f"shard_{i:05d}.parquet", parquet(texts))
    env = clean_environment(AUTORESEARCH_CACHE=str(tmp_path / "cache"), AUTORESEARCH_PROFILE="tiny", HF_ENDPOINT=hub.url)
    env["AUTORESEARCH_DATA"] = "climbmix"

    def start(*arguments, patch="", **extra):
        code = f"{SMALL}\n{patch}\nsys.argv = {['prepare.py', *arguments]!r}\nd.leave(d.run())"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", code], cwd=REPO, env=env | extra, **pipes)

    def run(*arguments, patch="", code=0, **extra):
        process = start(*arguments, patch=patch, **extra)
        process.out, process.err = process.communicate()
        assert process.returncode == code, process.err
        return process

    run.start, run.cache, run.raw = start, tmp_path / "cache" / "tiny-climbmix", tmp_path / "cache" / "raw" / "climbmix"
    return run


def contents(folder: Path) -> dict:
    """Every file's bytes by name, but unfinished ones."""
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".part"}


def until(condition) -> None:
    """Wait for another process to get somewhere."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never happened")
