"""Packing against a readable reference, and the loader built on it."""

import json
import random
from collections import Counter
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from conftest import sentences
from hypothesis import given
from hypothesis import strategies as st

import prepare
from harness.documents import DocumentEncoder, cut_points, train_tokenizer

BOS = 9


def reference_packer(documents, row_len, buffer_size):
    """Best fit as one would write it down: scan the buffer for each placement."""
    documents, buffer = list(documents), []
    while True:
        row = []
        while len(row) < row_len:
            while len(buffer) < buffer_size and documents:
                buffer.append(documents.pop(0))
            if not buffer:
                return
            fitting = [d for d in buffer if len(row) + len(d) <= row_len]
            if fitting:
                best = max(fitting, key=len)  # the first of the longest
                buffer = [d for d in buffer if d is not best]
                row += best
            else:
                shortest = min(map(len, buffer))
                last = [d for d in buffer if len(d) == shortest][-1]
                buffer = [d for d in buffer if d is not last]
                row += last[: row_len - len(row)]
        yield row


def make_documents(lengths) -> list:
    """Documents of these lengths: BOS, then tokens that tell document and place apart."""
    return [
        [BOS, *((1000 + 7 * i + 13 * j) % 50_000 + 10 for j in range(n - 1))]
        for i, n in enumerate(lengths)
    ]


def pack(documents, row_len, buffer_size) -> list:
    views = [memoryview(np.array(d, np.uint16)) for d in documents]
    return [
        [t for part in row for t in part] for row in prepare.pack_rows(views, row_len, buffer_size)
    ]


@pytest.mark.parametrize(
    "row_len, buffer_size", [(2, 1), (17, 4), (33, 1), (65, 1000), (257, 30), (2049, 100)]
)
@pytest.mark.parametrize("longest", [1, 20, 300, 5000])
def test_packer_equals_the_reference(row_len, buffer_size, longest):
    rng = random.Random(row_len * longest)
    documents = make_documents([rng.randint(1, longest) for _ in range(400)])
    assert pack(documents, row_len, buffer_size) == list(
        reference_packer(documents, row_len, buffer_size)
    )


def test_packer_equals_the_reference_on_any_lengths():
    @given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 30), st.integers(1, 12))
    def run(lengths, row_len, buffer_size):
        documents = make_documents(lengths)
        assert pack(documents, row_len, buffer_size) == list(
            reference_packer(documents, row_len, buffer_size)
        )

    run()


def test_stacked_rows():
    documents = make_documents([5, 9, 3, 30, 12, 1, 1, 8, 20, 4, 4])
    rows = prepare.pack_rows([memoryview(np.array(d, np.uint16)) for d in documents], 10, 4)
    first, rest = prepare.stack_rows(rows, 2, 10), prepare.stack_rows(rows, 1000, 10)
    assert first.dtype == np.uint16 and first.shape == (2, 10)
    assert np.concatenate([first, rest]).tolist() == list(reference_packer(documents, 10, 4))
    assert prepare.stack_rows(rows, 5, 10).shape == (0, 10)


def test_documents_of_a_shard_in_file_order_and_shuffled():
    documents = make_documents([3, 1, 1, 7, 10_000, 2])
    shard = np.array([t for d in documents for t in d], np.uint16)
    assert [list(d) for d in prepare.documents_of(shard, BOS)] == documents
    shuffled = [list(d) for d in prepare.documents_of(shard, BOS, np.random.default_rng(3))]
    assert shuffled != documents and sorted(shuffled) == sorted(documents)


# ---------------------------------------------------------------------------- cutting long texts


def test_cut_points():
    blank = np.zeros(1000, bool)
    assert cut_points(blank[:100], 100) == [0, 100]
    assert cut_points(blank[:101], 100) == [0, 100, 101]
    blank[[50, 90, 95]] = True
    # behind the last blank line of the first row's last fifth; its rest of 4, less a BOS, is the
    # next document
    assert cut_points(blank[:300], 100)[:3] == [0, 96, 99]


def test_cut_documents_fit_and_lose_nothing():
    @given(st.lists(st.booleans(), max_size=300), st.integers(1, 50))
    def run(blank, max_len):
        cuts = cut_points(np.array(blank, bool), max_len)
        assert cuts[0] == 0 and cuts[-1] == len(blank)
        assert (
            all(0 < b - a <= max_len for a, b in zip(cuts, cuts[1:], strict=False))
            or len(blank) == 0
        )

    run()


def test_encoder_cuts_at_blank_lines_and_keeps_every_token():
    tokenizer = train_tokenizer(iter(sentences(0, 200)), 400)
    text = "\n\n".join(" ".join(part.split()[:5]) for part in sentences(1, 200))
    documents = [d.tolist() for d in DocumentEncoder(tokenizer, 100)(text).documents()]
    assert all(d[0] == tokenizer.get_bos_token_id() and len(d) <= 101 for d in documents)
    assert [t for d in documents for t in d[1:]] == tokenizer.encode(text)
    at_blank = sum(tokenizer.decode(d[1:]).endswith("\n\n") for d in documents)
    assert at_blank > len(documents) / 4
    assert len(DocumentEncoder(tokenizer, None)(text).lengths) == 1


# ---------------------------------------------------------------------------- loader


class Tokenizer:
    """As much of a tokenizer as the loader uses."""

    get_bos_token_id = staticmethod(lambda: BOS)


@pytest.fixture
def loader(tmp_path, monkeypatch, use_settings):
    """make(documents, B, T, ...) opens a loader on a cache of these documents, one list a shard."""
    cache = use_settings(tmp_path)
    monkeypatch.setattr(prepare, "get_device", lambda: torch.device("cpu"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def make(*shards, B=2, T=16, split="train", **more):
        paths = [cache / f"train_{i}.bin" for i, documents in enumerate(shards) if documents]
        for path, documents in zip(paths, filter(None, shards), strict=True):
            path.write_bytes(np.array([t for d in documents for t in d], np.uint16).tobytes())
        held_out = ("tokenizer.json", "val_rows.bin", "holdout_rows.bin")  # make the data_id
        files = {name: [0, ""] for name in held_out}
        files |= {path.name: [path.stat().st_size, prepare.file_hash(path)] for path in paths}
        manifest = {
            "settings": {},
            "data_id": "x",
            "files": files,
            "train": [path.name for path in paths],
            "total": {"documents": sum(map(len, shards))},
        }
        (cache / "manifest.json").write_text(json.dumps(manifest))
        return prepare.make_dataloader(Tokenizer, B, T, split, **more)

    return make


def rows_of(batches) -> list:
    """Rows of T+1 tokens, put together again from inputs and targets."""
    rows = []
    for x, y, _ in batches:
        assert x.dtype == y.dtype == torch.int64 and torch.equal(
            x[:, 1:], y[:, :-1]
        )  # targets are one ahead
        rows += torch.cat([x, y[:, -1:]], 1).tolist()
    return rows


def test_rows_are_packed_and_shifted_by_one(loader):
    documents = make_documents([random.Random(i).randint(1, 30) for i in range(300)])
    rows = rows_of(islice(loader(documents, B=4, T=16), 20))
    order = [
        i
        for epoch in (1, 2)
        for i in np.random.default_rng([prepare.settings().seed, epoch]).permutation(300)
    ]
    assert rows == list(islice(reference_packer([[*documents[i]] for i in order], 17, 300), 80))
    assert all(row[0] == BOS for row in rows)  # no padding anywhere: they equal the packer's rows


def test_order_differs_between_epochs_and_seeds_not_between_runs(loader, tmp_path, use_settings):
    documents = make_documents([17] * 20)
    first, again = (rows_of(islice(loader(documents, B=20, T=16), 2)) for _ in range(2))
    assert first == again and sorted(first[:20]) == sorted(first[20:]) and first[:20] != first[20:]
    use_settings(tmp_path, SEED=5)
    assert rows_of(islice(loader(documents, B=20, T=16), 2)) != first


def test_every_document_once_an_epoch_and_epochs_counted(loader):
    documents = make_documents([17] * 12)
    batches = list(islice(loader(documents[:5], documents[5:], B=3, T=16), 12))
    assert [epoch for *_, epoch in batches] == [1] * 4 + [2] * 4 + [3] * 4
    rows = rows_of(batches)
    for epoch in range(3):
        assert sorted(rows[12 * epoch : 12 * epoch + 12]) == sorted(documents)


@pytest.mark.parametrize(
    "lengths",
    [[5] * 30, [100], [1], [3], [1] * 10_000, [17], [16], [18], [1000, 1, 1]],
    ids=[
        "few",
        "longer than a row",
        "only BOS",
        "short",
        "one-token documents",
        "fits",
        "one less",
        "one more",
        "mix",
    ],
)
def test_small_corpora_go_round(loader, lengths):
    documents = make_documents(lengths)
    batches = list(islice(loader(documents, B=2, T=16), 50))
    rows, starts = rows_of(batches), {tuple(d[:17]) for d in documents}
    assert len(rows) == 100 and all(row[0] == BOS for row in rows)
    placed = np.cumsum([row.count(BOS) for row in rows])[1::2]
    assert [epoch for *_, epoch in batches] == ((placed - 1) // len(documents) + 1).tolist()
    for row in rows:  # made of beginnings of documents
        cuts = [i for i, t in enumerate(row) if t == BOS] + [17]
        assert all(
            any(s[: b - a] == tuple(row[a:b]) for s in starts)
            for a, b in zip(cuts, cuts[1:], strict=False)
        )


def test_ranks_share_the_stream_without_overlap(loader, monkeypatch):
    documents = make_documents([random.Random(i).randint(1, 30) for i in range(500)])
    alone = [x.tolist() for x, *_ in islice(loader(documents, B=2), 12)]
    monkeypatch.setenv("WORLD_SIZE", "3")
    shared = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        shared.append([x.tolist() for x, *_ in islice(loader(documents, B=2), 4)])
    assert [shared[i % 3][i // 3] for i in range(12)] == alone


def test_batches_stay_what_they_were(loader):
    batches = list(islice(loader(make_documents([17] * 40), B=2, T=16), 6))
    assert len({str(x.tolist()) for x, *_ in batches}) == 6  # no buffer was handed out twice


def test_refusals(loader):
    documents = make_documents([5] * 10)
    with pytest.raises(prepare.UserError, match="'train', not 'val'"):
        next(loader(documents, split="val"))
    with pytest.raises(prepare.UserError, match="no training documents"):
        next(loader([]))
    next(loader(documents))
    path = prepare.settings().cache / "train_0.bin"
    reopen = partial(prepare.make_dataloader, Tokenizer, 2, 16, "train")
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:-2])
    with pytest.raises(prepare.UserError, match="train_0.bin is 98 bytes, 100 expected.*--verify"):
        reopen()
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(prepare.UserError, match="train_0.bin is changed.*--verify"):
        reopen()
    assert Counter(p.suffix for p in prepare.settings().cache.iterdir())[".part"] == 0
