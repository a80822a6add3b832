"""Tokenizer: byte lengths, round trips, plain data on disk."""

import json

import numpy as np
import pytest
from conftest import sentences
from hypothesis import given
from hypothesis import strategies as st

import prepare
from harness.documents import DocumentEncoder, learnable, save_tokenizer, train_tokenizer

TEXTS = [
    *sentences(0, 300),
    "def f(x):\n    return x + 12345\n\n\n" * 20,
    "漢字かな交じり文。" * 30 + "한국어 텍스트 " * 30,
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ñ Ω ß " * 30,
]
HARD = [
    "",
    " ",
    "漢字とかな、한국어、中文",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 \U0010ffff",
    "e\u0301\u0323 a\u0300\u0301\u0302 \u0bcd",
    "\x00\x01\x7f\x80\xff\ufeff\ufffd",
    "a\r\n\r\n\tb  \u00a0\u2003c",
    "<|bos|><|reserved_1|>",
    "0123456789" * 5,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(iter(TEXTS), 600)


def check(tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


@pytest.mark.parametrize("text", HARD)
def test_bytes_and_round_trip(tokenizer, text):
    check(tokenizer, text)


def test_tokens_that_split_a_character_count_their_raw_bytes(tokenizer):
    ids = tokenizer.encode("\U00012345")  # not in the training text: falls apart into bytes
    assert len(ids) > 1 and tokenizer.token_bytes[ids].tolist() == [
        len(tokenizer.tokens[i]) for i in ids
    ]
    assert tokenizer.token_bytes[ids].sum() == 4
    assert sorted(t for t in tokenizer.tokens if len(t) == 1) == [bytes([b]) for b in range(256)]


def test_any_text(tokenizer):
    @given(st.text())
    def run(text):
        check(tokenizer, text)

    run()


def test_vocabulary(tokenizer):
    assert tokenizer.get_vocab_size() == 600 == len(tokenizer.token_bytes)
    assert tokenizer.get_bos_token_id() == 600 - len(prepare.SPECIAL_TOKENS)
    assert tokenizer.token_bytes[-len(prepare.SPECIAL_TOKENS) :].tolist() == [0] * 4
    assert (tokenizer.token_bytes[:-4] > 0).all()
    assert len(set(tokenizer.tokens)) == 596


def test_numbers_are_grouped_by_two_digits(tokenizer):
    assert all(len(t) <= 2 for t in tokenizer.tokens if t.isdigit())


def test_special_tokens_in_a_document_are_plain_text(tokenizer):
    text = "".join(prepare.SPECIAL_TOKENS)
    encoded = DocumentEncoder(tokenizer, None)(text)
    assert max(tokenizer.encode(text)) < 596
    assert encoded.tokens.tolist().count(tokenizer.get_bos_token_id()) == 1
    check(tokenizer, text)


def test_encode_lists_and_prepend(tokenizer):
    bos, texts = tokenizer.get_bos_token_id(), ["one", "", "two three"]
    plain = tokenizer.encode(texts)
    assert plain == [tokenizer.encode(t) for t in texts]
    assert tokenizer.encode(texts, prepend=bos, num_threads=2) == [[bos, *ids] for ids in plain]
    assert tokenizer.encode("one", prepend="<|bos|>") == [bos, *plain[0]]
    assert tokenizer.encode("one", prepend=0) == [0, *plain[0]]  # 0 is a token, not "nothing"


def test_training_is_deterministic_and_kept_as_plain_data(tokenizer, tmp_path):
    again = train_tokenizer(iter(TEXTS), 600)
    save_tokenizer(again, tmp_path / "tokenizer.json")
    kept = json.loads((tmp_path / "tokenizer.json").read_text())
    loaded = prepare.Tokenizer.load(tmp_path / "tokenizer.json")
    assert kept["pattern"] == prepare.SPLIT_PATTERN
    assert loaded.tokens == again.tokens == tokenizer.tokens
    assert np.array_equal(loaded.token_bytes, tokenizer.token_bytes)
    assert [loaded.encode(t) for t in HARD] == [tokenizer.encode(t) for t in HARD]


def test_learns_from_the_beginnings_up_to_a_limit(monkeypatch):
    monkeypatch.setattr("harness.documents.CHARS_PER_TOKEN", 5)
    monkeypatch.setattr("harness.documents.CHARS_PER_TEXT", 10)
    texts = ["a" * 30, "b", "c" * 30, "d" * 30, "e"]
    assert list(learnable(texts, 5)) == ["a" * 10, "b", "c" * 10, "d" * 10]
