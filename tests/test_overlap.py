"""Half-copies: training documents that share a run of tokens with held-out rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import sentences
from small_prepare import small_settings

import prepare
from harness.documents import EncodedText
from harness.folder import folder_source
from harness.overlap import WINDOW, Dropped, HeldOut, RollingHash
from harness.shards import prepare_data

BOS = 9
ROW_LEN = 129
NO_HASHES = np.empty(0, np.uint64)


def runs(tokens) -> set[tuple]:
    """All runs of WINDOW tokens without a BOS."""
    every = (tuple(tokens[i : i + WINDOW]) for i in range(len(tokens) - WINDOW + 1))
    return {run for run in every if BOS not in run}


def random_text(rng: np.random.Generator, n: int) -> np.ndarray:
    """Few different tokens: runs that differ in one place only are common."""
    return rng.integers(10, 13, n).astype(np.uint16)


def make_rows(rng: np.random.Generator, n: int) -> np.ndarray:
    """Held-out rows, each of several documents."""
    rows = random_text(rng, n * ROW_LEN).reshape(n, ROW_LEN)
    rows[rng.random(rows.shape) < 0.01] = BOS
    rows[:, 0] = BOS
    return rows


def document(tokens, number: int = 0) -> EncodedText:
    """A text that is one document."""
    return EncodedText(np.array([BOS, *tokens], np.uint16), [len(tokens) + 1], [number])


def make_held_out(rows: np.ndarray) -> HeldOut:
    return HeldOut(NO_HASHES, {"val_rows.bin": rows, "holdout_rows.bin": rows[:2]}, BOS)


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 500])
def test_rolling_hash_is_a_function_of_the_run_alone(n):
    tokens = random_text(np.random.default_rng(n), n)
    hashes = RollingHash(100)(tokens)  # grows when asked for more
    assert len(hashes) == max(0, n - WINDOW + 1)
    for i, value in enumerate(hashes):
        assert RollingHash()(tokens[i : i + WINDOW]).tolist() == [value]
    assert len(set(hashes.tolist())) == len(runs(tokens))


@pytest.mark.parametrize("seed", range(5))
def test_documents_that_share_a_run_are_dropped_as_by_brute_force(seed):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng, 20)
    documents = []
    for i in range(200):
        tokens = random_text(rng, rng.integers(1, 300))
        length = int(rng.choice([0, WINDOW - 1, WINDOW, 100]))
        if length and len(tokens) > length:  # a part of a held-out row
            start = rng.integers(0, ROW_LEN - length)
            place = rng.integers(0, len(tokens) - length)
            part = rows[rng.integers(len(rows)), start : start + length]
            tokens[place : place + length] = np.where(part == BOS, 10, part)
        documents.append(document(tokens, i))
    held_out_runs = set().union(*(runs(row.tolist()) for row in rows))
    shares = [bool(runs(d.tokens.tolist()) & held_out_runs) for d in documents]
    assert 10 < sum(shares) < 190

    dropped = Dropped()
    tokens, n_documents = make_held_out(rows).filter(documents, dropped)
    kept = [d.tokens for d, is_shared in zip(documents, shares, strict=True) if not is_shared]
    assert tokens.tolist() == np.concatenate(kept).tolist()
    assert n_documents == len(kept)
    assert dropped.half_copies == sum(shares)
    assert dropped.half_copy_tokens == sum(len(d.tokens) for d in documents) - len(tokens)


def test_the_shared_part_of_held_out_rows_is_measured():
    rng = np.random.default_rng(0)
    rows = random_text(rng, 4 * ROW_LEN).reshape(4, ROW_LEN)
    rows[:, 0] = BOS
    held_out = make_held_out(rows)
    shared = [
        document(rows[0, 1 : 1 + WINDOW + 10]),  # 74 tokens of row 0
        document(rows[0, 5 : 5 + WINDOW]),  # some of the same
        document(rows[3, -WINDOW:]),  # 64 tokens of row 3
        document(rows[2, 1:WINDOW]),  # too short
    ]
    assert held_out.filter(shared, Dropped())[1] == 1
    n_tokens = 74 + 64
    assert held_out.shares() == {
        "val_rows.bin": pytest.approx(n_tokens / rows.size),
        "holdout_rows.bin": pytest.approx(74 / (2 * ROW_LEN)),
    }
    assert held_out.shares()["val_rows.bin"] == 0  # counts from the last call on


def test_a_run_does_not_reach_over_a_document_border():
    rng = np.random.default_rng(0)
    rows = random_text(rng, ROW_LEN)[None]
    rows[0, [0, 60, 120]] = BOS  # no document of the row has 64 tokens
    halves = [document(rows[0, 1:60]), document(rows[0, 61:120])]
    assert make_held_out(rows).filter(halves, Dropped())[1] == 2


def test_prepared_data_share_no_run(prepared):
    """The real tiny-embedded cache against a set of all its held-out runs."""
    cache = Path(prepared["AUTORESEARCH_CACHE"]) / "tiny-embedded"
    manifest = prepare.load_manifest(cache)
    bos = prepare.Tokenizer.load(cache / "tokenizer.json").get_bos_token_id()
    rows = {
        name: np.fromfile(cache / name, np.uint16).reshape(-1, 257)
        for name in ("val_rows.bin", "holdout_rows.bin", "preview_rows.bin")
    }
    windows = set()
    for array in rows.values():
        for row in array:
            for start in range(1, 257 - WINDOW + 1):
                windows.add(row[start : start + WINDOW].tobytes())
    train = np.fromfile(cache / "train_embedded.bin", np.uint16)
    sample = train[:3_000_000]
    size = 2 * WINDOW
    raw = sample.tobytes()
    found = [i for i in range(0, len(raw) - size, 2) if raw[i : i + size] in windows]
    has_bos = [bos in sample[i // 2 : i // 2 + WINDOW] for i in found]
    assert all(has_bos)
    (stats,) = manifest["stats"].values()
    assert stats["half_copies"] > 0 and 0 < stats["shares"]["val_rows.bin"] < 0.5


def test_edited_copies_in_a_folder_are_dropped(tmp_path):
    """A third of the files has a copy with another beginning."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(sentences(1, 300)):
        (folder / f"{i}.txt").write_text(text * 3)
        if i % 3 == 0:
            (folder / f"{i}-copy.txt").write_text("Another beginning. " + text * 3)
    small = replace(small_settings("embedded"), seq_len=128, eval_tokens=128 * 40, root=tmp_path)
    settings = replace(small, data="texts", data_path=folder)
    manifest = prepare_data(settings, folder_source(folder, settings))
    stats = manifest["stats"]["text"]
    assert stats["copies"] == 0 and stats["half_copies"] > 20
    assert 0.1 < stats["shares"]["val_rows.bin"] < 0.4  # about a third of them
