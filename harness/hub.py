"""Download of data sets from the Hugging Face hub: in parallel, continued after any interruption.

urllib3's Retry waits and asks again when a request fails (connection, silence, 408, 429, 5xx). What
it cannot do is here: a body that breaks off is continued by a Range request, and what arrived is
checked against its announced length, its SHA-256 and its parquet footer.

Environment: HF_ENDPOINT (a mirror), HF_TOKEN, and the usual proxy variables.
"""

import contextlib
import json
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import requests
from filelock import FileLock, Timeout
from tqdm import tqdm

from harness.common import UserError, file_hash, write_atomic
from harness.retrying import Limits, retrying_session, without_secrets

OFFLINE = (
    "hint: AUTORESEARCH_DATA=embedded needs no network, --data PATH takes your own text, "
    "HF_ENDPOINT a mirror"
)
CHUNK = 1 << 14  # bytes written at a time: what a broken connection can lose


@contextlib.contextmanager
def locked(path: Path, waiting_for: str) -> Iterator[None]:
    """Hold the lock file `path`; another process that holds it is waited for, and named."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process is {waiting_for}: waiting for it", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def parquet_fault(path: Path) -> str | None:
    """Why this is not a complete parquet file, None if it is one.

    Raises:
        UserError: it is one, but has no column "text".
    """
    try:
        columns = pq.ParquetFile(path).schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        return f"no complete parquet file: {error}"
    if "text" not in columns:
        raise UserError(f"{path} has no column 'text', only {columns}")
    return None


class Broken(Exception):
    """A transfer went wrong in a way that another attempt may repair."""


class Hub:
    """A data set of the hub, and the folder that keeps its files.

    Each file lies next to its SHA-256 (NAME.sha256), an unfinished one is NAME.part.
    """

    def __init__(self, repo: str, folder: Path, limits: Limits | None = None):
        self.base = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.repo = repo
        self.folder = folder
        self.limits = limits or Limits()
        self.first_request: float | None = None
        self.answered = False  # whether there was any answer
        self.last_error = "no answer"
        self.stopped = threading.Event()
        self.bar: tqdm | None = None
        self.sizes: dict[str, int] = {}  # bytes of each file, where known
        self.received: Counter = Counter()  # bytes of each file

    def note_answer(self, response, error) -> None:
        if response is not None:
            self.answered = True
        if error is not None:
            self.last_error = without_secrets(error)

    def get(self, session: requests.Session, path: str, name: str, **headers) -> requests.Response:
        """Ask for a path of the hub. The body has not been read yet.

        Raises:
            UserError: no answer, or a status that is an error other than 404 and 416.
        """
        self.first_request = self.first_request or time.monotonic()
        headers["Accept-Encoding"] = "identity"
        if token := os.environ.get("HF_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"  # dropped on redirects to other hosts
        url = f"{self.base}/{path}"
        timeout = (self.limits.connect, self.limits.read)
        try:
            response = session.get(url, headers=headers, stream=True, timeout=timeout)
            self.answered = True
            if response.status_code not in (404, 416):
                response.raise_for_status()
        except requests.RequestException as error:
            raise self.refusal(name, error) from None
        return response

    def refusal(self, name: str, error: Exception) -> UserError:
        response = getattr(error, "response", None)
        asks_for_token = response is not None and response.status_code in (401, 403)
        hint = "hint: HF_TOKEN may be needed" if asks_for_token else OFFLINE
        return UserError(f"cannot download {self.repo}/{name}: {without_secrets(error)}. {hint}")

    # what users of this class call

    def listing(self) -> list[str]:
        """Names of the data set's parquet files, in order; asked for once, then kept."""
        kept = self.folder / "listing.json"
        if not kept.exists():
            with locked(self.folder / ".lock", f"listing {self.repo}"):
                if self.in_threads(self.save_listing, [kept.name]):
                    raise UserError(without_secrets(f"{self.base} has no data set {self.repo}"))
        return json.loads(kept.read_text())

    def save_listing(self, name: str) -> bool:
        """Returns whether the hub has this data set."""
        session = retrying_session(self.limits, self.note_answer)
        return self.keep_trying(lambda: self.ask_listing(session, name), name)

    def ask_listing(self, session: requests.Session, name: str) -> bool:
        path = f"api/datasets/{self.repo}/tree/main?recursive=true"
        with self.get(session, path, name) as response:
            if response.status_code == 404:
                return False
            try:
                found = [entry["path"] for entry in response.json()]
            except (ValueError, TypeError, KeyError) as error:
                raise Broken(f"no list of files: {error}") from None
        # The names become paths below our folder: none may lead out of it.
        safe = [n for n in found if n.endswith(".parquet") and ".." not in n and n[0] != "/"]
        write_atomic(self.folder / name, json.dumps(sorted(safe)).encode())
        return True

    def fetch(self, names: list[str], verify: bool) -> list[str]:
        """Download what is not there yet, and with `verify` also what is damaged.

        Returns the names that the hub does not have.
        """
        names = [name for name in dict.fromkeys(names) if not (self.folder / name).exists()]
        if verify:
            there = sorted(self.folder.rglob("*.parquet"))
            names += [path.relative_to(self.folder).as_posix() for path in there]
        if not names:
            return []
        verb = "checking" if verify else "downloading"
        print(f"{verb} {len(names)} files of {self.repo}", file=sys.stderr)
        with tqdm(unit="B", unit_scale=True, total=0, disable=None) as self.bar:
            self.n_files = len(names)
            return self.in_threads(lambda name: Download(self, name).run(), names)

    def in_threads(self, action: Callable[[str], bool], names: list[str]) -> list[str]:
        """action(name) for all names, in threads. Returns the names for which it is False."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stopped.clear()
        pool = ThreadPoolExecutor(self.limits.workers)
        futures = {pool.submit(action, name): name for name in names}
        pending = set(futures)
        missing = []
        try:
            while pending:
                finished, pending = wait(pending, 0.2, FIRST_COMPLETED)
                missing += [futures[future] for future in finished if not future.result()]
                self.check_in_reach()
        finally:
            self.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return sorted(missing)

    def check_in_reach(self) -> None:
        """Give up when nothing has answered yet.

        Timeouts alone do not do that: they hold for each address of a host, and for no name server.
        """
        if self.answered or self.first_request is None:
            return
        if time.monotonic() - self.first_request > self.limits.out_of_reach:
            message = f"cannot reach {self.base}: {self.last_error}. {OFFLINE}"
            raise UserError(without_secrets(message))

    def keep_trying(
        self, action: Callable[[], bool], name: str, size: Callable[[], int] = lambda: 0
    ) -> bool:
        """action() until it does not raise Broken or an error of the network.

        size: bytes that have arrived. When it grows, an attempt has not failed.

        Raises:
            UserError: `attempts` in a row have failed.
        """
        failures = 0
        most = size()
        while not self.stopped.is_set():
            try:
                return action()
            except (Broken, requests.RequestException) as error:
                failures = 0 if size() > most else failures + 1
                most = max(most, size())
                if failures == self.limits.attempts:
                    raise self.refusal(name, error) from None
                self.stopped.wait(self.limits.pause * 2**failures * random.uniform(0.5, 1))
        return True

    # progress

    def show_size(self, name: str, size: int) -> None:
        self.sizes[name] = size
        # The total as if the other files were as large as these on average.
        self.bar.total = sum(self.sizes.values()) * self.n_files // len(self.sizes)

    def show_received(self, name: str, received: int) -> None:
        self.bar.update(received - self.received[name])
        self.received[name] = received


class Download:
    """One file of a hub: NAME.part while it arrives, NAME once it is complete and checked."""

    def __init__(self, hub: Hub, name: str):
        self.hub = hub
        self.name = name
        self.path = hub.folder / name
        self.part = hub.folder / f"{name}.part"
        self.hash_file = hub.folder / f"{name}.sha256"  # as sha256sum writes it
        self.session = retrying_session(hub.limits, hub.note_answer)

    def size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def run(self) -> bool:
        """Bring the file into the folder; what is there of it already is continued.

        Returns whether the hub has the file.
        """
        return self.is_there() or self.hub.keep_trying(self.attempt, self.name, self.size)

    def is_there(self) -> bool:
        """Whether the complete file is in the folder; a damaged one is removed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return False
        fault = parquet_fault(self.path)
        if not fault and self.hash_file.exists():
            fault = not self.hash_file.read_text().startswith(file_hash(self.path))
        if fault:
            print(f"{self.path} is damaged: downloading it again", file=sys.stderr)
            self.path.unlink()
        return not fault

    def attempt(self) -> bool:
        """Ask for what is missing of the file, and finish it. Returns whether the hub has it.

        Raises:
            Broken, requests.RequestException: what arrived is not complete or not right.
        """
        have = self.size()
        headers = {"Range": f"bytes={have}-"} if have else {}
        path = f"datasets/{self.hub.repo}/resolve/main/{self.name}"
        with self.hub.get(self.session, path, self.name, **headers) as response:
            if response.status_code == 404:
                return False
            start, total = self.span(response, have)
            self.hub.show_size(self.name, total)
            if response.status_code != 416:
                self.receive(response, start)
            # The hub announces the hash in its own answer, the store it redirects to does not.
            answers = (*response.history, response)
            announced = {a.headers.get("X-Linked-ETag", "").strip('"') for a in answers}
        if self.hub.stopped.is_set():
            return True
        if total and self.size() < total:
            raise Broken(f"{self.size()} of {total} bytes arrived")
        self.finish({digest for digest in announced if len(digest) == 64})
        return True

    def span(self, response: requests.Response, have: int) -> tuple[int, int]:
        """(where the body begins in the file, bytes of the complete file or 0 if not said)."""
        if not have or response.status_code == 200:
            return 0, int(response.headers.get("Content-Length", 0))
        # 206 brings the rest, 416 says that nothing is left to send.
        content_range = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", content_range)
        if not match or match[1] not in (None, str(have)) or int(match[2]) < have:
            self.discard("the rest of the file is not available")
        return have, int(match[2])

    def receive(self, response: requests.Response, start: int) -> None:
        """Write the body into the .part file, from byte `start` on."""
        with open(self.part, "ab" if start else "wb") as file:
            for chunk in response.iter_content(CHUNK):
                file.write(chunk)
                self.hub.show_received(self.name, file.tell())
                if self.hub.stopped.is_set():
                    return
            file.flush()
            os.fsync(file.fileno())

    def finish(self, announced: set[str]) -> None:
        """Check the complete .part file and give it its name."""
        found = file_hash(self.part)
        for digest in announced - {found}:
            self.discard(f"its SHA-256 is {found}, {digest} was announced")
        if fault := parquet_fault(self.part):
            self.discard(fault)
        write_atomic(self.hash_file, f"{found}  {self.path.name}\n".encode())
        os.replace(self.part, self.path)

    def discard(self, reason: str) -> None:
        """Throw away what arrived, because it cannot be continued."""
        self.part.unlink()
        self.hub.show_received(self.name, 0)
        raise Broken(reason)
