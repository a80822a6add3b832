"""Keeps held-out text out of training: copies of documents, and documents that share a long run.

Copies are found by hashes of their text. A shared run of WINDOW tokens is found by a rolling hash
over all positions of the training text (Karp and Rabin, 1987), made with numpy's running sums: a
second for 100 MB of text.
"""

from dataclasses import dataclass, field

import numpy as np

from harness.documents import EncodedText

WINDOW = 64  # tokens that two texts share word for word: about 40 words
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
BATCH_TOKENS = 1 << 19  # hashed at a time: the arrays stay in the processor's cache


class RollingHash:
    """Hashes of all runs of WINDOW tokens of an array.

    With a random number R[t] for each token t, a multiplier K and all sums modulo 2**64, the hash
    of the run that begins at i is  sum over j < WINDOW of R[t[i+j]] * K**j.  It is the difference
    of two running sums of R[t[i]] * K**i, divided by K**i.
    """

    def __init__(self, longest: int = 2 * BATCH_TOKENS):
        self.random = np.random.default_rng(0).integers(0, 2**64, 2**16, np.uint64)
        self.grow(longest)

    def grow(self, longest: int) -> None:
        """Powers of the multiplier and of its inverse, for arrays of up to `longest` tokens."""
        inverse = pow(MULTIPLIER, -1, 2**64)
        self.powers = powers_of(MULTIPLIER, longest)
        self.inverse_powers = powers_of(inverse, longest)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """uint64 [max(0, n - WINDOW + 1)] for uint16 [n] tokens."""
        n = len(tokens)
        if n < WINDOW:
            return np.empty(0, np.uint64)
        if n > len(self.powers):
            self.grow(n)
        sums = np.empty(n + 1, np.uint64)
        sums[0] = 0
        terms = self.random[tokens]
        terms *= self.powers[:n]
        np.cumsum(terms, out=sums[1:])
        hashes = sums[WINDOW:] - sums[:-WINDOW]
        hashes *= self.inverse_powers[: len(hashes)]
        return hashes


def powers_of(base: int, n: int) -> np.ndarray:
    """base**0 ... base**(n-1) modulo 2**64."""
    powers = np.full(n, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


@dataclass
class Dropped:
    """Documents and tokens that were kept out of a shard."""

    copies: int = 0  # documents whose text is held out, white space aside
    half_copies: int = 0  # documents that share a run of WINDOW tokens with held-out rows
    half_copy_tokens: int = 0


@dataclass
class HeldOutRows:
    """The windows of one set of rows."""

    hashes: np.ndarray  # uint64, for each token; 0 where no window begins
    starts: np.ndarray = field(init=False)  # bool: whether a window begins here

    def __post_init__(self):
        self.starts = self.hashes != 0

    def share(self, found: np.ndarray) -> float:
        """Share of the tokens that lie in windows whose hash is in `found` (sorted)."""
        hit = self.starts & is_in(self.hashes, found)
        change = np.zeros(len(hit) + WINDOW, np.int64)
        change[: len(hit)] += hit
        change[WINDOW:] -= hit
        return float((change.cumsum() > 0).sum() / max(1, len(hit)))


def without(
    removed: np.ndarray, tokens: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, lengths) of the documents that are not removed (bool, for each document)."""
    if not removed.any():
        return tokens, lengths
    return tokens[np.repeat(~removed, lengths)], lengths[~removed]


def is_in(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """bool [n]: whether each value is in a sorted array."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[places] == values


class HeldOut:
    """What training must not contain. Keeps count of which held-out windows were met."""

    def __init__(self, text_hashes: np.ndarray, rows: dict[str, np.ndarray], bos: int):
        """
        text_hashes: uint64 [n], of every held-out document.
        rows: name -> uint16 [n, row_len], the held-out rows.
        """
        self.text_hashes = np.sort(text_hashes)
        self.hash = RollingHash()
        self.rows = {name: self.windows(array, bos) for name, array in rows.items()}
        every = [part.hashes[part.starts] for part in self.rows.values()]
        self.ordered = np.unique(np.concatenate(every))
        self.met = np.zeros(len(self.ordered), bool)
        # A table of bits, more than 32 for each window: at most 3% of other hashes pass it.
        self.n_bits = max(10, int(32 * len(self.ordered)).bit_length())
        self.table = np.zeros(1 << (self.n_bits - 3), np.uint8)
        byte, bit = self.places(self.ordered)
        np.bitwise_or.at(self.table, byte, bit)

    def windows(self, rows: np.ndarray, bos: int) -> HeldOutRows:
        """The windows inside the documents of these rows: none holds a BOS."""
        flat = rows.ravel()
        hashes = np.zeros(len(flat), np.uint64)
        for start in range(0, len(flat), BATCH_TOKENS):
            part = self.hash(flat[start : start + BATCH_TOKENS + WINDOW - 1])
            hashes[start : start + len(part)] = part
        n_bos = np.concatenate([[0], np.cumsum(flat == bos), np.full(WINDOW, (flat == bos).sum())])
        hashes[n_bos[WINDOW : len(flat) + WINDOW] > n_bos[: len(flat)]] = 0
        return HeldOutRows(hashes)

    def places(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(byte of the table, bit in it) for each hash."""
        place = hashes >> np.uint64(64 - self.n_bits)
        bit = np.left_shift(np.uint8(1), (place & np.uint64(7)).astype(np.uint8))
        return place >> np.uint64(3), bit

    def find(self, tokens: np.ndarray) -> np.ndarray:
        """Where held-out windows begin in uint16 [n] tokens; they are marked as met."""
        hashes = self.hash(tokens)
        if not len(self.ordered):
            return np.empty(0, np.int64)
        byte, bit = self.places(hashes)
        maybe = np.flatnonzero(self.table[byte] & bit)
        candidates = hashes[maybe]
        places = np.minimum(np.searchsorted(self.ordered, candidates), len(self.ordered) - 1)
        equal = self.ordered[places] == candidates
        self.met[places[equal]] = True
        return maybe[equal]

    def filter(self, texts: list[EncodedText], dropped: Dropped) -> tuple[np.ndarray, int]:
        """What of these texts may be trained on; the other documents are counted.

        Returns:
            uint16 [n], the tokens of the documents that stay, one after another; their number.
        """
        tokens = np.concatenate([text.tokens for text in texts])
        lengths = np.array([length for text in texts for length in text.lengths])
        hashes = np.array([value for text in texts for value in text.hashes], np.uint64)
        copies = is_in(hashes, self.text_hashes)
        dropped.copies += int(copies.sum())
        tokens, lengths = without(copies, tokens, lengths)
        half_copies = np.zeros(len(lengths), bool)
        half_copies[np.searchsorted(lengths.cumsum(), self.find(tokens), "right")] = True
        dropped.half_copies += int(half_copies.sum())
        dropped.half_copy_tokens += int(lengths[half_copies].sum())
        tokens, lengths = without(half_copies, tokens, lengths)
        return tokens, len(lengths)

    def shares(self) -> dict[str, float]:
        """Of each set of rows: share of its tokens in windows met since the last call."""
        found = self.ordered[self.met]
        self.met[:] = False
        return {name: rows.share(found) for name, rows in self.rows.items()}
