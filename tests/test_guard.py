"""What the guard sees of a run: files read, functions replaced, weights changed."""

import gzip
import inspect
import json
import linecache
import mmap
import os
import shutil
import socket
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT

import prepare
from harness import guard
from harness.known_answers import FunctionModel
from prepare import VoidScore, evaluate_bpb

V = 300  # vocabulary of the fixture scored_cache


def uniform(x):
    return torch.zeros(*x.shape, V)


def score(cache) -> None:
    evaluate_bpb(FunctionModel(uniform), cache.tokenizer, 16)


# ---- files ----


@pytest.fixture
def foreign(scored_cache, tmp_path):
    """A folder of files that an earlier run left, seen by a run that begins now."""
    folder = tmp_path / "earlier"
    folder.mkdir()
    np.save(folder / "x.npy", np.arange(8))
    torch.save({"a": torch.ones(3)}, folder / "x.pt")
    (folder / "x.bin").write_bytes(bytes(64))
    (folder / "x.json").write_text("{}")
    with gzip.open(folder / "x.gz", "wb") as file:
        file.write(b"text")
    guard.watch(scored_cache.folder, ROOT)
    return folder


def read_mmap(path):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        return view[0]


def read_os(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.close(descriptor)


def read_gzip(path):
    with gzip.open(path) as file:
        return file.read()


def read_in_thread(path):
    thread = threading.Thread(target=Path(path).read_bytes)
    thread.start()
    thread.join()


def read_in_pool(path):
    with ThreadPoolExecutor() as pool:
        list(pool.map(Path.read_bytes, [path]))


def load_json(path):
    with open(path) as file:
        return json.load(file)


WAYS = {
    "open": ("x.bin", lambda path: open(path, "rb").close()),
    "open to change": ("x.bin", lambda path: open(path, "r+b").close()),
    "pathlib": ("x.bin", lambda path: path.read_bytes()),
    "os.open": ("x.bin", read_os),
    "np.fromfile": ("x.bin", lambda path: np.fromfile(path, np.uint16)),
    "np.memmap": ("x.bin", lambda path: np.memmap(path, np.uint16, mode="r")),
    "np.load": ("x.npy", np.load),
    "torch.load": ("x.pt", torch.load),
    "torch.load, mapped": ("x.pt", lambda path: torch.load(path, mmap=True)),
    "mmap": ("x.bin", read_mmap),
    "gzip": ("x.gz", read_gzip),
    "json": ("x.json", load_json),
    "shutil": ("x.bin", lambda path: shutil.copy(path, path.with_name("copy"))),
    "thread": ("x.bin", read_in_thread),
    "thread pool": ("x.bin", read_in_pool),
    "symbolic link": ("x.bin", lambda path: open(make_link(path), "rb").close()),
}


def make_link(path):
    link = path.with_name("link.py")
    link.symlink_to(path)
    return link


@pytest.mark.parametrize("way", WAYS)
def test_other_data_are_seen_and_named(foreign, way):
    name, read = WAYS[way]
    read(foreign / name)
    assert guard.other_reads() == [str(foreign / name)]


def test_other_data_mark_the_run(scored_cache, foreign):
    torch.load(foreign / "x.pt")
    np.load(foreign / "x.npy")
    score(scored_cache)
    expected = f"other data was read: {foreign / 'x.pt'} and 1 more"
    assert expected in scored_cache.record()["marks"]


def test_the_standard_library_is_no_training_text(foreign):
    path = Path(sysconfig.get_path("stdlib"), "textwrap.py").resolve()
    path.read_text()
    assert guard.other_reads() == [str(path)]


def test_code_that_is_imported_or_inspected_is_no_data(foreign):
    import this  # noqa: F401  (not imported by anything else)

    linecache.clearcache()
    inspect.getsource(shutil)
    assert guard.other_reads() == []


def test_the_run_may_read_its_own_data_and_the_repository(scored_cache, foreign):
    (scored_cache.folder / "manifest.json").read_text()
    (scored_cache.folder / "tokenizer.json").read_bytes()
    (ROOT / "train.py").read_text()
    Path("/proc/self/status").read_text()
    assert guard.other_reads() == []


def test_weights_in_the_cache_folder_are_other_data(scored_cache):
    path = scored_cache.folder / "weights.pt"
    torch.save(torch.ones(3), path)
    scored_cache.begin_run()
    guard._watch.since += 1  # file times are a little coarse
    torch.load(path)
    assert guard.other_reads() == [str(path)]


def test_files_that_the_run_wrote_are_its_own(foreign, tmp_path):
    guard._watch.since -= 1  # file times are a little coarse
    torch.save(torch.ones(3), tmp_path / "best.pt")
    torch.load(tmp_path / "best.pt")
    assert guard.other_reads() == []


def test_files_that_are_missing_or_only_written_are_no_reads(foreign):
    with pytest.raises(FileNotFoundError):
        torch.load(foreign / "none.pt")
    with open(foreign / "x.bin", "wb") as file:
        file.write(b"1")
    assert guard.other_reads() == []


def test_checkpoints_may_be_read_by_a_run_that_is_marked_as_resumed(foreign, tmp_path):
    torch.load(foreign / "x.pt")
    assert guard.other_reads() and not guard.other_reads(except_folder=foreign)


def test_a_connection_to_another_host_is_seen(foreign):
    for address in (("127.0.0.1", 9), ("192.0.2.1", 9)):  # the second is reserved for examples
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.connect(address)
    assert guard.other_reads() == ["192.0.2.1"]


@pytest.mark.parametrize("name", ["val_rows.bin", "holdout_rows.bin", "preview_rows.bin"])
def test_a_run_that_reads_held_out_rows_is_void(scored_cache, name):
    np.fromfile(scored_cache.folder / name, np.uint16)
    with pytest.raises(VoidScore, match=f"the run read {name}: only evaluate_bpb may"):
        score(scored_cache)


def test_held_out_rows_read_through_prepare_are_noticed_as_well(scored_cache):
    manifest = prepare.load_manifest(scored_cache.folder)
    prepare.read_rows(manifest, "val_rows.bin")
    with pytest.raises(VoidScore, match="the run read val_rows.bin"):
        score(scored_cache)


def test_the_evaluator_and_previews_may_read_held_out_rows(scored_cache):
    prepare.preview_bpb(FunctionModel(uniform), 16)
    score(scored_cache)
    score(scored_cache)
    assert guard.held_out_reads() == []


def test_modules_that_read_unseen_are_named(foreign, monkeypatch):
    monkeypatch.setattr(guard, "UNSEEN_READERS", ("json", "no_such_module"))
    assert guard.other_reads() == ["through the module json, which reads unseen"]


def test_a_path_can_not_break_the_line_of_marks(foreign):
    path = foreign / "a; b\n"
    path.write_text("x")
    guard._watch.since += 1
    path.read_text()
    assert guard.other_reads() == [str(foreign / "a? b?")]


# ---- functions ----


@pytest.mark.parametrize("name", ["token_nats", "checked", "data_id", "score_rows", "run_manifest"])
def test_replaced_functions_of_prepare_are_noticed(scored_cache, monkeypatch, name):
    original = getattr(prepare, name)
    monkeypatch.setattr(prepare, name, lambda *a, **k: original(*a, **k))
    with pytest.raises(VoidScore, match=f"prepare.{name} is not the function of its file"):
        score(scored_cache)


@pytest.mark.parametrize("name", ["harness.common.file_hash", "harness.probe.Probe.check"])
def test_replaced_functions_of_the_harness_are_noticed(scored_cache, monkeypatch, name):
    monkeypatch.setattr(name, lambda *a, **k: None)
    with pytest.raises(VoidScore, match=f"{name[8:]} is not the function of its file"):
        score(scored_cache)


def test_replaced_methods_are_noticed(scored_cache, monkeypatch):
    monkeypatch.setattr(prepare.Clock, "elapsed", lambda self: 1.0)
    with pytest.raises(VoidScore, match="prepare.Clock.elapsed is not the function"):
        score(scored_cache)


def test_a_replaced_loss_does_not_change_the_score(scored_cache, monkeypatch):
    """For label smoothing in training, say."""
    score(scored_cache)
    smoothed = torch.nn.CrossEntropyLoss(label_smoothing=0.5, reduction="none")
    monkeypatch.setattr(F, "cross_entropy", lambda z, y, **k: 0.1 * smoothed(z, y))
    score(scored_cache)
    scores = [record["val_bpb"] for record in scored_cache.records()]
    assert scores[0] == scores[1]


def test_a_loss_replaced_before_the_import_is_noticed(scored_cache, monkeypatch):
    monkeypatch.setattr(prepare, "_cross_entropy", lambda *a, **k: None)
    with pytest.raises(VoidScore, match="cross_entropy was replaced before prepare.py"):
        score(scored_cache)


# ---- weights ----


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_checksums_see_every_element_and_every_type(dtype):
    model = torch.nn.Module()
    model.register_buffer("scalar", torch.zeros((), dtype=dtype))
    model.register_buffer("matrix", torch.zeros(5, 7, dtype=dtype).T)
    before = guard.checksums(model)
    assert before == guard.checksums(model)
    model.matrix.data[3, 4] = 1
    after = guard.checksums(model)
    assert after[0] == before[0] and after[1] != before[1]


def test_the_smallest_step_of_training_changes_the_checksum():
    model = torch.nn.Linear(300, 300)
    before = guard.checksums(model)
    model.weight.data[7, 7] = torch.nextafter(model.weight[7, 7], torch.tensor(9.0))
    assert guard.checksums(model) != before
