"""The real download against a real HTTP server that does what the hub does on a bad day."""

import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import threading

import numpy as np
import pytest
from conftest import CLIMBMIX, FakeHub, contents, parquet, sentences, until

import data
import prepare

REPO_NAME = "someone/texts"
BODY = parquet(sentences(0, 4000))  # about 400 kB: several reads


@pytest.fixture
def download(hub, tmp_path, monkeypatch):
    """A function that downloads a.parquet from the hub, and what is left of it."""
    for name in ("HF_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(prepare, "ROOT", tmp_path)
    monkeypatch.setattr(data, "PAUSE", 0.001)
    monkeypatch.setattr(data, "TIMEOUT", (2, 0.5))
    path = hub.add(REPO_NAME, "a.parquet", BODY)

    def run(*faults, verify=False):
        hub.faults[path] = list(faults)
        return data.Hub(REPO_NAME, tmp_path).fetch(["a.parquet"], verify)

    run.file, run.part, run.path = tmp_path / "a.parquet", tmp_path / "a.parquet.part", path
    return run


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
    assert (download.file.parent / "a.parquet.sha256").read_text() == f"{hashlib.sha256(BODY).hexdigest()}  a.parquet\n"
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
    assert len(ranges(hub)) == 16 > data.ATTEMPTS


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
    with pytest.raises(prepare.UserError, match="a.parquet.*SHA-256" if footer else "a.parquet.*no whole parquet"):
        download(*[{"body": bad}] * 20)
    assert not download.file.exists()


def test_missing_file_is_not_tried_again(download, hub):
    del hub.files[download.path]
    assert download() == ["a.parquet"]
    assert len(ranges(hub)) == 1


def test_refusal_is_not_tried_again_and_token_stays_secret(download, hub, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    with pytest.raises(prepare.UserError, match="403.*HF_TOKEN") as error:
        download({"status": 403, "headers": {"X-Error": "hf_secretsecret"}})
    assert hub.asked("a.parquet")[0]["Authorization"] == "Bearer hf_secretsecret"
    assert len(ranges(hub)) == 1
    assert "secret" not in str(error.value) + "".join(capfd.readouterr())


def test_error_texts_hide_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = data.shown("GET https://me:pass@host/x?Signature=abc&Key=1 (Bearer hf_secret) failed: https://host/path")
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
    with pytest.raises(prepare.UserError, match="SHA-256"):
        download(*[{"to": f"{store.url}/blob"}] * 20)
    store.shutdown()
    store.server_close()


def test_retry_after(monkeypatch):
    class Answer:
        def __init__(self, value):
            self.headers = {"Retry-After": value}

    assert data.retry_after(None) == 0
    assert data.retry_after(Answer("7")) == 7
    assert data.retry_after(Answer("99999")) == 600
    assert data.retry_after(Answer("soon")) == 0
    assert data.retry_after(Answer("Wed, 21 Oct 2015 07:28:00 GMT")) == 0
    assert 500 < data.retry_after(Answer("Wed, 21 Oct 2099 07:28:00 GMT")) <= 600


def test_retry_after_is_waited_for(download, monkeypatch):
    waits = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None, wait=threading.Event.wait: waits.append(seconds))
    monkeypatch.setattr(data, "retry_after", lambda response: 321.0 if response is not None else 0.0)
    download({"status": 429})
    assert 321.0 in waits


@pytest.mark.parametrize("silent", [True, False])
def test_hub_out_of_reach(download, hub, monkeypatch, silent):
    assert data.OUT_OF_REACH < 28
    monkeypatch.setattr(data, "OUT_OF_REACH", 1)
    monkeypatch.setattr(data, "PAUSE", 1)
    monkeypatch.setattr(data, "TIMEOUT", (30, 30))
    if not silent:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    else:
        silent_hub = socket.create_server(("127.0.0.1", 0))  # takes connections, never answers
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent_hub.getsockname()[1]}")
    with pytest.raises(prepare.UserError, match="cannot reach http://127.0.0.1:.*AUTORESEARCH_DATA=embedded"):
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
    with pytest.raises(prepare.UserError, match="no column 'text'.*content"):
        download()


def test_listing_is_asked_for_once_and_safe(download, hub, tmp_path):
    hub.add(REPO_NAME, "data/b.parquet", BODY)
    listing = data.Hub(REPO_NAME, tmp_path).listing()
    assert listing == data.Hub(REPO_NAME, tmp_path).listing() == ["a.parquet", "data/b.parquet"]
    assert len(hub.asked("recursive=true")) == 1
    assert data.Hub(REPO_NAME, tmp_path).fetch(["data/b.parquet"], False) == []
    assert (tmp_path / "data" / "b.parquet").read_bytes() == BODY


# ---------------------------------------------------------------------------- whole preparations, in processes


def manifest(run) -> dict:
    return json.loads((run.cache / "manifest.json").read_text())


def names(*numbers) -> list:
    return [f"train_shard_{i:05d}.bin" for i in numbers]


def test_adding_shards_only_makes_the_new_ones(climbmix, hub):
    first = climbmix("--num-shards", "1")
    before, one = contents(climbmix.cache), manifest(climbmix)
    assert one["train"] == names(0)
    assert {p.rsplit("/")[-1] for p, _ in hub.requests} == {f"shard_0000{i}.parquet" for i in (0, 1, 6)}  # 1: tokenizer
    for path in climbmix.raw.iterdir():  # tokens are enough: the raw files may go
        path.unlink()
    hub.requests.clear()
    climbmix("--num-shards", "4")
    assert {p.rsplit("/")[-1] for p, _ in hub.requests} == {f"shard_0000{i}.parquet" for i in (1, 2, 3)}
    after = manifest(climbmix)
    assert after["train"] == names(0, 1, 2, 3)
    assert after["data_id"] == one["data_id"] and after["data_id"] in first.out
    assert all(contents(climbmix.cache)[name] == was for name, was in before.items() if name != "manifest.json")
    assert [after["total"][kind] for kind in ("dropped", "dropped_exact")] == [2, 1]
    hub.requests.clear()
    climbmix("--num-shards", "2")  # fewer than there are: nothing to do
    assert not hub.requests and manifest(climbmix) == after


@pytest.mark.slow
def test_killed_anywhere_the_next_run_completes(climbmix):
    """SIGKILL after every few files written or texts encoded; in the end the cache is that of an undisturbed run."""
    climbmix("--num-shards", "3")
    expected = contents(climbmix.cache), contents(climbmix.raw)
    assert len(expected[0]) == 7
    shutil.rmtree(climbmix.cache.parent)
    patch = """
import os, signal
left, replace, encode = [EVENTS], os.replace, d.DocumentEncoder.__call__
def tick(cost):
    left[0] -= cost
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
d.os.replace = lambda *paths: (tick(100), replace(*paths))
d.DocumentEncoder.__call__ = lambda *args: (tick(1), encode(*args))[1]
"""
    deaths = 0
    for _ in range(40):
        process = climbmix.start("--num-shards", "3", patch=patch.replace("EVENTS", str(390 + 10 * deaths)))
        _, err = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, err
        with pytest.raises(prepare.UserError, match="missing, damaged or unfinished"):
            prepare.load_manifest(climbmix.cache)
        deaths += 1
    assert process.returncode == 0 and deaths >= 4
    assert (contents(climbmix.cache), contents(climbmix.raw)) == expected


def test_kill_in_the_middle_of_a_download(climbmix, hub):
    path = f"/datasets/{CLIMBMIX}/resolve/main/shard_00000.parquet"
    hub.faults[path] = [{"stall": 16384}]
    part = climbmix.raw / "shard_00000.parquet.part"
    process = climbmix.start("--num-shards", "2", patch="d.TIMEOUT = 60, 60")
    until(lambda: part.exists() and part.stat().st_size == 16384 and (climbmix.raw / "shard_00006.parquet").exists())
    process.kill()
    process.communicate()
    climbmix("--num-shards", "2")
    assert [h.get("Range") for h in hub.asked("shard_00000.parquet")] == [None, "bytes=16384-"]
    assert len(hub.asked("shard_00006.parquet")) == 1


def test_interrupt_leaves_resumable_state(climbmix, hub):
    path = f"/datasets/{CLIMBMIX}/resolve/main/shard_00001.parquet"
    hub.faults[path] = [{"stall": 16384}]
    part = climbmix.raw / "shard_00001.parquet.part"
    process = climbmix.start("--num-shards", "2", patch="d.TIMEOUT = 60, 60")
    until(lambda: part.exists() and part.stat().st_size == 16384)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err and "interrupted" in err
    climbmix("--num-shards", "2")
    assert hub.asked("shard_00001.parquet")[1]["Range"] == "bytes=16384-"


def test_two_at_once(climbmix, hub):
    path = f"/datasets/{CLIMBMIX}/resolve/main/shard_00000.parquet"
    hub.faults[path] = [{"stall": 16384}]
    part = climbmix.raw / "shard_00000.parquet.part"
    first = climbmix.start("--num-shards", "2", patch="d.TIMEOUT = 60, 60")
    until(part.exists)
    second = climbmix.start("--num-shards", "2")
    assert "another process is preparing climbmix: waiting" in second.stderr.readline()
    hub.closing.set()  # the stalled connection breaks, the first goes on
    errors = [process.communicate()[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], errors
    assert len(hub.asked("shard_00001.parquet")) == 1
    assert manifest(climbmix)["train"] == names(0, 1)


def test_missing_shards_by_name(climbmix, hub):
    del hub.files[f"/datasets/{CLIMBMIX}/resolve/main/shard_00002.parquet"]
    process = climbmix("--num-shards", "4", code=2)
    assert "shard_00002" in process.err and "--allow-missing" in process.err and "Traceback" not in process.err
    assert "shard_00002" in climbmix("--num-shards", "4", "--allow-missing").out
    assert manifest(climbmix)["train"] == names(0, 1, 3)
    hub.requests.clear()
    climbmix("--num-shards", "4")  # what is known to be missing does not stop the next experiment
    assert not hub.requests
    del hub.files[f"/datasets/{CLIMBMIX}/resolve/main/shard_00006.parquet"]
    shutil.rmtree(climbmix.cache.parent)
    assert "shard_00006" in climbmix("--num-shards", "1", "--allow-missing", code=2).err


def test_no_space(climbmix):
    small_files = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    small_files += "; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))"
    process = climbmix("--num-shards", "1", patch=small_files, code=2)
    assert "File too large" in process.err and "AUTORESEARCH_CACHE" in process.err and "Traceback" not in process.err
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000


def test_no_permission(climbmix, tmp_path):
    (tmp_path / "file").write_text("")
    process = climbmix("--num-shards", "1", code=2, AUTORESEARCH_CACHE=str(tmp_path / "file" / "cache"))
    assert "file" in process.err and "AUTORESEARCH_CACHE" in process.err and "Traceback" not in process.err


def test_tinystories_layout_comes_from_the_hub(climbmix, hub):
    stories = sentences(1, 1500)
    hub.add("karpathy/tinystories-gpt4-clean", "all-stories.parquet", parquet(stories))
    climbmix("--data", "tinystories")
    cache = climbmix.cache.parent / "tiny-tinystories"
    made = json.loads((cache / "manifest.json").read_text())
    held_out = next(n for n in range(1500) if sum(map(len, stories[:n])) >= data.VAL_BYTES * 32 * 40)
    texts = prepare.Tokenizer.load(cache / "tokenizer.json").decode(
        np.fromfile(cache / made["train"][0], "uint16").tolist()
    )
    assert stories[held_out - 1] not in texts and stories[held_out] in texts.replace("<|bos|>", "")
    requests = len(hub.requests)
    climbmix("--data", "tinystories")
    assert len(hub.requests) == requests
    assert os.listdir(climbmix.cache.parent / "raw" / "tinystories")
