"""The real download against a real HTTP server that does what the hub does on a bad day."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import CLIMBMIX, FakeHub, contents, parquet, sentences
from helpers import wait_until

import prepare
from harness.common import UserError
from harness.hub import Hub
from harness.retrying import Limits, WatchedRetry, without_secrets
from harness.sources import BYTES_PER_TOKEN

REPO_NAME = "someone/texts"
BODY = parquet(sentences(0, 4000))  # about 400 kB: several reads


@dataclass
class Downloader:
    """Downloads a.parquet from the hub; faults are what happens to its requests, in turn."""

    hub: FakeHub
    path: str  # of the file on the hub
    folder: Path
    limits: Limits

    def __call__(self, *faults: dict, verify: bool = False) -> list[str]:
        self.hub.faults[self.path] = list(faults)
        return Hub(REPO_NAME, self.folder, self.limits).fetch(["a.parquet"], verify)

    @property
    def file(self) -> Path:
        return self.folder / "a.parquet"

    @property
    def part(self) -> Path:
        return self.folder / "a.parquet.part"


@pytest.fixture
def download(hub, tmp_path, monkeypatch) -> Downloader:
    for name in ("HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    path = hub.add(REPO_NAME, "a.parquet", BODY)
    return Downloader(hub, path, tmp_path, Limits(pause=0.001, connect=2, read=0.5))


def ranges(hub) -> list:
    return [headers.get("Range") for headers in hub.asked("a.parquet")]


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [{"status": 500}, {"status": 500}],
        [{"status": 503}, {"drop": 10}, {"status": 502}],
        [{"status": 429, "headers": {"Retry-After": "0"}}],
        [{"drop": 0}],
        [{"drop": 196_608}, {"drop": 98_304}],
        [{"drop": 196_608}, {"plain": True}],
        [{"drop": 196_608}, {"plain": True, "drop": 294_912}],
        [{"stall": 196_608}],
        [{"length": len(BODY) + 1000}],
        [{"length": 1000}],
        [{"body": BODY[:-50]}],
        [{"body": b"x" * len(BODY)}],
        [{"drop": 196_608}, {"headers": {"Content-Range": "bytes 7-9/10"}, "status": 206}],
        [{"drop": 196_608}, {"status": 416}],
    ],
    ids=lambda faults: ",".join("+".join(f) for f in faults) or "no fault",
)
def test_whole_file_whatever_happens(download, hub, faults):
    assert download(*faults) == []
    assert download.file.read_bytes() == BODY
    digest = hashlib.sha256(BODY).hexdigest()
    assert (download.folder / "a.parquet.sha256").read_text() == f"{digest}  a.parquet\n"
    assert not download.part.exists()


def test_dropped_connection_resumes_by_range(download, hub):
    download({"drop": 196_608}, {"drop": 98_304})
    assert ranges(hub) == [None, "bytes=196608-", "bytes=294912-"]


def test_ignored_range_restarts_cleanly(download, hub):
    hub.digests = False  # only the footer and the length protect now
    download({"drop": 196_608}, {"plain": True})
    assert ranges(hub) == [None, "bytes=196608-"]
    assert download.file.read_bytes() == BODY


def test_progress_is_not_counted_as_failing(download, hub):
    download(*[{"drop": 16_384}] * 15)  # more drops than ATTEMPTS, each bringing something
    assert len(ranges(hub)) == 16 > download.limits.attempts


def test_part_of_a_killed_process_is_continued(download, hub):
    download.part.write_bytes(BODY[:123_456])
    download()
    assert ranges(hub) == ["bytes=123456-"]
    assert download.file.read_bytes() == BODY


def test_part_that_is_whole_is_only_checked(download, hub):
    download.part.write_bytes(BODY)
    download()
    assert ranges(hub) == [f"bytes={len(BODY)}-"]


def test_part_of_another_file_is_thrown_away(download, hub):
    download.part.write_bytes(b"?" * 1000)
    download()
    assert ranges(hub) == ["bytes=1000-", None]
    assert download.file.read_bytes() == BODY


@pytest.mark.parametrize("footer", [True, False])
def test_content_that_stays_wrong_is_refused(download, hub, footer):
    bad = parquet(sentences(9, 50)) if footer else BODY[:1000]
    hub.digests = footer
    fault = "SHA-256" if footer else "no complete parquet"
    with pytest.raises(UserError, match=f"a.parquet.*{fault}"):
        download(*[{"body": bad}] * 20)
    assert not download.file.exists()


def test_missing_file_is_not_tried_again(download, hub):
    del hub.files[download.path]
    assert download() == ["a.parquet"]
    assert len(ranges(hub)) == 1


def test_refusal_is_not_tried_again_and_token_stays_secret(download, hub, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    with pytest.raises(UserError, match="403.*HF_TOKEN") as error:
        download({"status": 403, "headers": {"X-Error": "hf_secretsecret"}})
    assert hub.asked("a.parquet")[0]["Authorization"] == "Bearer hf_secretsecret"
    assert len(ranges(hub)) == 1
    assert "secret" not in str(error.value) + "".join(capfd.readouterr())


def test_error_texts_hide_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    request = "GET https://me:pass@host/x?Signature=abc&Key=1 (Bearer hf_secret)"
    text = without_secrets(f"{request} failed: https://host/path")
    assert not any(secret in text for secret in ("hf_secret", "pass@", "Signature", "Key"))
    assert "failed: https://host/path" in text


def test_token_does_not_follow_a_redirect_to_another_host(download, hub, monkeypatch):
    store = FakeHub()
    store.files["/blob"] = BODY
    store.faults["/blob?sig=1"] = [{"drop": 147_456}]
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    assert download({"to": f"{store.url}/blob?sig=1"}, {"to": f"{store.url}/blob?sig=2"}) == []
    assert [headers.get("Range") for _, headers in store.requests] == [None, "bytes=147456-"]
    assert all("Authorization" in headers for headers in hub.asked("a.parquet"))
    assert not any("Authorization" in headers for _, headers in store.requests)
    store.shutdown()
    store.server_close()


def test_hash_of_the_redirecting_hub_is_checked(download, hub):
    store = FakeHub()
    store.files["/blob"] = parquet(sentences(5, 100))  # whole, but not what the hub announced
    with pytest.raises(UserError, match="SHA-256"):
        download(*[{"to": f"{store.url}/blob"}] * 20)
    store.shutdown()
    store.server_close()


@pytest.mark.parametrize(
    "header, seconds",
    [
        ("7", 7),
        ("99999", 600),
        ("soon", 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 600),
    ],
)
def test_retry_after_is_waited_for_within_limits(download, monkeypatch, header, seconds):
    pauses = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", pauses.append)
    assert download({"status": 429, "headers": {"Retry-After": header}}) == []
    assert [pause for pause in pauses if pause >= 1] == [seconds] * (seconds > 0)


def test_every_answer_and_error_is_watched():
    seen = []
    retry = WatchedRetry(total=5)
    retry.watcher = lambda response, error: seen.append((response, error))
    error = OSError("no route")
    retry.increment("GET", "/", error=error).increment("GET", "/", error=error)
    assert seen == [(None, error)] * 2


def test_a_hub_that_only_answers_errors_is_not_out_of_reach(download):
    download.limits = replace(download.limits, out_of_reach=0.3, pause=0.2, attempts=3)
    with pytest.raises(UserError, match="cannot download.*503"):
        download(*[{"status": 503}] * 20)


def test_giving_up_comes_before_an_agent_loses_patience():
    assert Limits().out_of_reach < 28


@pytest.mark.parametrize("silent", [True, False])
def test_hub_out_of_reach(download, monkeypatch, silent):
    download.limits = Limits(pause=1, connect=30, read=30, out_of_reach=1)
    address = "http://127.0.0.1:9"
    if silent:
        silent_hub = socket.create_server(("127.0.0.1", 0))  # takes connections, never answers
        address = f"http://127.0.0.1:{silent_hub.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(UserError, match=f"cannot reach {address}.*AUTORESEARCH_DATA=embedded"):
        download()


def test_verify_heals_a_damaged_file(download, hub):
    download()
    download(verify=True)
    assert len(ranges(hub)) == 1  # nothing to mend, nothing asked
    damaged = bytearray(BODY)
    damaged[1000] ^= 1
    download.file.write_bytes(damaged)
    assert download() == [] and download.file.read_bytes() == damaged  # existing files are trusted
    download(verify=True)
    assert download.file.read_bytes() == BODY


def test_parquet_without_text_is_refused(download, hub):
    hub.files[download.path] = parquet(["a"], column="content")
    with pytest.raises(UserError, match="no column 'text'.*content"):
        download()


def test_listing_is_asked_for_once_and_safe(download, hub, tmp_path):
    hub.add(REPO_NAME, "data/b.parquet", BODY)
    listing = Hub(REPO_NAME, tmp_path).listing()
    assert listing == Hub(REPO_NAME, tmp_path).listing() == ["a.parquet", "data/b.parquet"]
    assert len(hub.asked("recursive=true")) == 1
    assert Hub(REPO_NAME, tmp_path).fetch(["data/b.parquet"], False) == []
    assert (tmp_path / "data" / "b.parquet").read_bytes() == BODY


@pytest.mark.parametrize("fault", [{"drop": 20}, {"status": 503}, {"body": b"<html>"}])
def test_listing_is_asked_for_again(download, hub, tmp_path, fault):
    hub.faults[f"/api/datasets/{REPO_NAME}/tree/main?recursive=true"] = [fault] * 3
    assert Hub(REPO_NAME, tmp_path, download.limits).listing() == ["a.parquet"]


def test_a_data_set_that_is_not_there_is_named(download, tmp_path):
    with pytest.raises(UserError, match="has no data set someone/nothing"):
        Hub("someone/nothing", tmp_path, download.limits).listing()


# ------------------------------------------------------------------ preparations, in processes


def manifest(run) -> dict:
    return json.loads((run.cache / "manifest.json").read_text())


def asked_shards(hub) -> set[int]:
    """Numbers of the shards that were asked for."""
    return {int(re.search(r"shard_(\d+)", path)[1]) for path, _ in hub.requests}


def names(*numbers) -> list:
    return [f"train_shard_{i:05d}.bin" for i in numbers]


@pytest.mark.slow
def test_adding_shards_only_makes_the_new_ones(climbmix, hub):
    first = climbmix("--num-shards", "1")
    before, one = contents(climbmix.cache), manifest(climbmix)
    assert one["train"] == names(0)
    assert asked_shards(hub) == {0, 1, 6}  # 1: for the tokenizer
    for path in climbmix.raw.iterdir():  # tokens are enough: the raw files may go
        path.unlink()
    hub.requests.clear()
    climbmix("--num-shards", "4")
    assert asked_shards(hub) == {1, 2, 3}
    after = manifest(climbmix)
    assert after["train"] == names(0, 1, 2, 3)
    assert after["data_id"] == one["data_id"] and after["data_id"] in first.stdout
    now = contents(climbmix.cache)
    assert all(now[name] == before[name] for name in before if name != "manifest.json")
    assert after["total"]["copies"] == 2
    hub.requests.clear()
    climbmix("--num-shards", "2")  # fewer than there are: nothing to do
    assert not hub.requests and manifest(climbmix) == after


@pytest.mark.slow
def test_killed_anywhere_the_next_run_completes(climbmix):
    """SIGKILL after every few files written or texts encoded; in the end all is as undisturbed."""
    climbmix("--num-shards", "3")
    expected = contents(climbmix.cache), contents(climbmix.raw)
    assert len(expected[0]) == 9
    shutil.rmtree(climbmix.cache.parent)
    deaths = 0
    for _ in range(40):
        process = climbmix.start("--num-shards", "3", DRILL=f"kill:{390 + 25 * deaths}")
        _, err = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, err
        with pytest.raises(UserError, match="missing, damaged or unfinished"):
            prepare.load_manifest(climbmix.cache)
        deaths += 1
    assert process.returncode == 0 and deaths >= 4
    assert (contents(climbmix.cache), contents(climbmix.raw)) == expected


@pytest.mark.slow
def test_kill_in_the_middle_of_a_download(climbmix, hub):
    path = f"/datasets/{CLIMBMIX}/resolve/main/shard_00000.parquet"
    hub.faults[path] = [{"stall": 16384}]
    part = climbmix.raw / "shard_00000.parquet.part"
    process = climbmix.start("--num-shards", "2", DRILL="patient")
    last = climbmix.raw / "shard_00006.parquet"
    wait_until(lambda: part.exists() and part.stat().st_size == 16384 and last.exists())
    process.kill()
    process.communicate()
    climbmix("--num-shards", "2")
    assert [h.get("Range") for h in hub.asked("shard_00000.parquet")] == [None, "bytes=16384-"]
    assert len(hub.asked("shard_00006.parquet")) == 1


@pytest.mark.slow
def test_interrupt_leaves_resumable_state(climbmix, hub):
    path = f"/datasets/{CLIMBMIX}/resolve/main/shard_00001.parquet"
    hub.faults[path] = [{"stall": 16384}]
    part = climbmix.raw / "shard_00001.parquet.part"
    process = climbmix.start("--num-shards", "2", DRILL="patient")
    wait_until(lambda: part.exists() and part.stat().st_size == 16384)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err and "interrupted" in err
    climbmix("--num-shards", "2")
    assert hub.asked("shard_00001.parquet")[1]["Range"] == "bytes=16384-"


@pytest.mark.slow
def test_two_at_once(climbmix, hub):
    path = f"/datasets/{CLIMBMIX}/resolve/main/shard_00000.parquet"
    hub.faults[path] = [{"stall": 16384}]
    part = climbmix.raw / "shard_00000.parquet.part"
    first = climbmix.start("--num-shards", "2", DRILL="patient")
    wait_until(part.exists)
    second = climbmix.start("--num-shards", "2")
    assert "another process is preparing climbmix: waiting" in second.stderr.readline()
    hub.closing.set()  # the stalled connection breaks, the first goes on
    errors = [process.communicate()[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], errors
    assert len(hub.asked("shard_00001.parquet")) == 1
    assert manifest(climbmix)["train"] == names(0, 1)


@pytest.mark.slow
def test_missing_shards_by_name(climbmix, hub):
    del hub.files[f"/datasets/{CLIMBMIX}/resolve/main/shard_00002.parquet"]
    process = climbmix("--num-shards", "4", code=2)
    assert "shard_00002" in process.stderr and "--allow-missing" in process.stderr
    assert "shard_00002" in climbmix("--num-shards", "4", "--allow-missing").stdout
    assert manifest(climbmix)["train"] == names(0, 1, 3)
    hub.requests.clear()
    climbmix("--num-shards", "4")  # what is known to be missing does not stop the next experiment
    assert not hub.requests
    del hub.files[f"/datasets/{CLIMBMIX}/resolve/main/shard_00006.parquet"]
    shutil.rmtree(climbmix.cache.parent)
    assert "shard_00006" in climbmix("--num-shards", "1", "--allow-missing", code=2).stderr


@pytest.mark.slow
def test_no_space(climbmix):
    process = climbmix("--num-shards", "1", code=2, DRILL="full disk")
    assert "File too large" in process.stderr and "AUTORESEARCH_CACHE" in process.stderr


@pytest.mark.slow
def test_no_permission(climbmix, tmp_path):
    (tmp_path / "file").write_text("")
    below_a_file = str(tmp_path / "file" / "cache")
    process = climbmix("--num-shards", "1", code=2, AUTORESEARCH_CACHE=below_a_file)
    assert "file" in process.stderr and "AUTORESEARCH_CACHE" in process.stderr


@pytest.mark.slow
def test_tinystories_layout_comes_from_the_hub(climbmix, hub):
    stories = sentences(1, 1500)
    hub.add("karpathy/tinystories-gpt4-clean", "all-stories.parquet", parquet(stories))
    climbmix("--data", "tinystories")
    cache = climbmix.cache.parent / "tiny-tinystories"
    made = json.loads((cache / "manifest.json").read_text())
    need = BYTES_PER_TOKEN * 32 * 40 * 21 // 16
    held_out = next(n for n in range(1500) if sum(map(len, stories[:n])) >= need)
    texts = prepare.Tokenizer.load(cache / "tokenizer.json").decode(
        np.fromfile(cache / made["train"][0], "uint16").tolist()
    )
    assert stories[held_out - 1] not in texts and stories[held_out] in texts.replace("<|bos|>", "")
    requests = len(hub.requests)
    climbmix("--data", "tinystories")
    assert len(hub.requests) == requests
    assert os.listdir(climbmix.cache.parent / "raw" / "tinystories")
