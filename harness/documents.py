"""From texts to documents of tokens: learning the tokenizer, cutting long texts, encoding."""

import hashlib
import json
import os
import re
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import rustbpe

from harness.common import write_atomic
from prepare import SPECIAL_TOKENS, SPLIT_PATTERN, Tokenizer

# ------------------------------------------------------------------ learning the tokenizer

# Twice as many give embedded's held-out text 0.00% fewer tokens, half as many 0.2% more.
CHARS_PER_TOKEN = 1 << 14  # that the tokenizer learns from, for each token of its vocabulary
CHARS_PER_TEXT = 10_000  # no text has more say than that


def learnable(texts: Iterable[str], vocab_size: int) -> Iterator[str]:
    """The beginnings of the texts, CHARS_PER_TOKEN * vocab_size characters in all."""
    total = 0
    for text in texts:
        if total >= CHARS_PER_TOKEN * vocab_size:
            return
        beginning = text[:CHARS_PER_TEXT]
        total += len(beginning)
        yield beginning


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with at most vocab_size tokens, the special ones included."""
    bpe = rustbpe.Tokenizer()
    bpe.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    by_rank = sorted(bpe.get_mergeable_ranks(), key=lambda item: item[1])
    return Tokenizer([bytes(token) for token, _ in by_rank])


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    tokens = [b64encode(token).decode() for token in tokenizer.tokens]
    content = {"pattern": SPLIT_PATTERN, "special": SPECIAL_TOKENS, "tokens": tokens}
    write_atomic(path, json.dumps(content).encode())


# ------------------------------------------------------------------ documents


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The documents of one text, one after another.

    tokens: uint16 [n], each document with BOS first.
    lengths: tokens of each document, BOS included.
    hashes: of each document: 64 bits of its text without white space, so that copies in another
        layout are equal.
    """

    tokens: np.ndarray
    lengths: list[int]
    hashes: list[int]

    def documents(self) -> Iterator[np.ndarray]:
        start = 0
        for length in self.lengths:
            yield self.tokens[start : start + length]
            start += length


def text_hash(data: bytes) -> int:
    """64 bits of a text, its white space left out."""
    digest = hashlib.blake2b(data.translate(None, b" \t\n\r\v\f"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def cut_points(blank: np.ndarray, max_len: int) -> list[int]:
    """Where to cut a text of n tokens into documents of at most max_len tokens: [0, ..., n].

    blank: bool [n], whether a blank line ends with this token.

    The first cut falls behind the last blank line within the last fifth of a row, and the document
    after it takes exactly what is left of that row: best-fit packing joins the two again. (Cutting
    at the last blank line each time would crop a third of the tokens away.)
    """
    cuts = [0]
    n = len(blank)
    room = max_len
    while n - cuts[-1] > room:
        start = cuts[-1]
        tail = start + room * 4 // 5
        ends = np.flatnonzero(blank[tail : start + room]) if room == max_len else ()
        cuts.append(tail + int(ends[-1]) + 1 if len(ends) else start + room)
        room -= cuts[-1] - start + 1  # one more for the next document's BOS
        if room <= 0:
            room = max_len
    return cuts + [n]


class DocumentEncoder:
    """Turns texts into documents: BOS and at most max_len tokens (any number if it is None)."""

    def __init__(self, tokenizer: Tokenizer, max_len: int | None):
        self.enc = tokenizer.enc
        self.bos = tokenizer.get_bos_token_id()
        self.max_len = max_len
        self.lengths = tokenizer.token_bytes
        tokens = tokenizer.tokens
        self.ends_line = np.array([t.endswith(b"\n") for t in tokens])
        self.ends_blank_line = np.array([re.search(rb"\n\s*\n$", t) is not None for t in tokens])
        self.is_line_end = np.array([t.endswith(b"\n") and not t.strip() for t in tokens])

    def __call__(self, text: str) -> EncodedText:
        tokens = self.enc.encode_to_numpy(text, disallowed_special=())
        data = text.encode()
        cuts = [0, len(tokens)]
        offsets = [0, len(data)]
        if self.max_len is not None and len(tokens) > self.max_len:
            blank = self.ends_blank_line[tokens]
            blank[1:] |= self.is_line_end[tokens[1:]] & self.ends_line[tokens[:-1]]
            cuts = cut_points(blank, self.max_len)
            offsets = np.concatenate([[0], np.cumsum(self.lengths[tokens])])[cuts].tolist()
        return EncodedText(
            np.insert(tokens.astype(np.uint16), cuts[:-1], self.bos),
            [end - start + 1 for start, end in pairwise(cuts)],
            [text_hash(data[start:end]) for start, end in pairwise(offsets)],
        )


BATCH_CHARS = 1 << 18  # texts that a thread encodes at a time


def encode_all(encoder: DocumentEncoder, texts: Iterable[str]) -> Iterator[EncodedText]:
    """The texts, in order, encoded on all cores.

    tiktoken releases the interpreter's lock. Memory holds a few batches of texts, no more.
    """
    workers = os.cpu_count() or 1

    def encode(batch: list[str]) -> list[EncodedText]:
        return [encoder(text) for text in batch]

    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for batch in batches_of(texts):
            pending.append(pool.submit(encode, batch))
            if len(pending) > 4 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()


def batches_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts with about BATCH_CHARS characters each."""
    batch = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
