"""`python prepare.py --check`: score models whose result is known, and models to be refused."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import prepare
from harness.probe import draw_cuts

ROWS = 512  # of the validation rows, for the closed forms
BATCH_SIZE = 16


class FunctionModel(torch.nn.Module):
    """A model given as a function from token ids int64 [B, T] to logits [B, T, vocab]."""

    def __init__(self, function: Callable):
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))  # tells the evaluator the device
        self.function = function

    def forward(self, x):
        return self.function(x)


@dataclass(frozen=True)
class Answer:
    """One line of the table."""

    model: str
    expected: str
    got: str
    right: bool


def _scored_bpb(function: Callable, rows: np.ndarray, token_bytes: np.ndarray, device) -> float:
    model = FunctionModel(function).to(device)
    nats = prepare.score_rows(model, rows, token_bytes, BATCH_SIZE, device)
    return nats.sum().item() / math.log(2) / int(token_bytes[rows[:, 1:]].sum())


def closed_forms(rows: np.ndarray, tokenizer, device) -> list[Answer]:
    """Models whose bits per byte follow from counting. rows: uint16 [N, T+1]."""
    token_bytes = tokenizer.token_bytes
    vocab_size = len(token_bytes)
    targets = rows[:, 1:]
    counted = token_bytes[targets] > 0

    counts = np.bincount(targets[counted], minlength=vocab_size)
    frequency = np.maximum(counts / counts.sum(), 1e-9)
    frequency /= frequency.sum()
    unigram = torch.tensor(np.log(frequency), dtype=torch.float32, device=device)

    # Special tokens have no bytes: each is a class of its own.
    special = range(256, 256 + vocab_size - len(tokenizer.tokens))
    first_byte = np.array([token[0] for token in tokenizer.tokens] + [*special])
    class_size = np.bincount(first_byte)[first_byte]
    classes = torch.from_numpy(first_byte).to(device)
    upcoming = prepare.batches(rows, BATCH_SIZE, device)

    def knows_first_byte(x):  # told from outside its input, so that no rule is broken
        _, y, _ = next(upcoming)
        return torch.where(classes == classes[y][..., None], 0.0, -1e9)

    def uniform(x):
        return torch.zeros(1, device=device).expand(*x.shape, vocab_size)

    def token_frequency(x):
        return unigram.expand(*x.shape, vocab_size)

    cases = {
        "uniform": (uniform, counted.sum() * np.log2(vocab_size)),
        "token frequency": (token_frequency, -(counts * np.log2(frequency)).sum()),
        "first byte known": (knows_first_byte, np.log2(class_size[targets])[counted].sum()),
    }
    n_bytes = int(token_bytes[targets].sum())

    def answer(name: str, function: Callable, bits: float) -> Answer:
        expected = bits / n_bytes
        got = _scored_bpb(function, rows, token_bytes, device)
        right = abs(got - expected) < 1e-5 * expected
        return Answer(name, f"{expected:.6f}", f"{got:.6f}", right)

    answers = [answer(name, function, bits) for name, (function, bits) in cases.items()]
    with loss_replaced():
        answers.append(answer("uniform, loss replaced", *cases["uniform"]))
    return answers


@contextlib.contextmanager
def loss_replaced():
    """Within, torch's cross_entropy gives half the loss: the evaluator has its own reference."""
    original = F.cross_entropy
    F.cross_entropy = lambda *args, **options: original(*args, **options) / 2
    try:
        yield
    finally:
        F.cross_entropy = original


def block_mean(h: torch.Tensor, size: int) -> torch.Tensor:
    """Replace vectors [B, T, C] by their mean over blocks of positions: sees the future."""
    filled = F.pad(h, (0, 0, 0, -h.size(1) % size))
    means = filled.unflatten(1, (-1, size)).mean(2)
    return means.repeat_interleave(size, 1)[:, : h.size(1)]


def one_position(h: torch.Tensor) -> torch.Tensor:
    """The last position of the first half sees the first one of the second half: off by one."""
    half = h.size(1) // 2
    seen = h.clone()
    seen[:, half - 1] += h[:, half]
    return seen


MIXERS = {  # of token vectors [B, T, C] over positions or rows
    "honest": lambda h: h + h.cumsum(1),
    "next token": lambda h: h + h.roll(-1, 1),
    "small gate": lambda h: h + 1e-3 * h.roll(-1, 1),
    "one position": one_position,
    "block of 2": lambda h: block_mean(h, 2),
    "block of 64": lambda h: block_mean(h, 64),
    "FFT over time": lambda h: torch.fft.fft(h.cpu(), dim=1).real.to(h.device),
    "batch mean": lambda h: h - h.mean(0),
    "NaN": lambda h: h / 0.0 * 0.0,
}


def refusals(rows: np.ndarray, token_bytes: np.ndarray, device) -> list[Answer]:
    """Models that mix what they must not, each probed; the honest one must be accepted.

    As many rows as there are positions: each position is probed.
    """
    seq_len = rows.shape[1] - 1
    cuts, _ = draw_cuts(len(rows), seq_len, seed=0)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(len(token_bytes), 64, generator=generator).to(device)
    answers = []
    for name, mix in MIXERS.items():
        expected = "accepted" if name == "honest" else "refused"
        model = FunctionModel(lambda x, mix=mix: mix(table[x]) @ table.T / 8).to(device)
        try:
            with torch.no_grad():
                prepare.guarded_score(model, rows, token_bytes, BATCH_SIZE, device, cuts)
            got = "accepted"
        except prepare.VoidScore:
            got = "refused"
        answers.append(Answer(name, expected, got, got == expected))
    return answers


def known_answers(settings: "prepare.Settings") -> bool:
    """Print the table of answers for a prepared cache. Returns whether all of them are right."""
    manifest = prepare.load_manifest(settings.cache)
    tokenizer = prepare.Tokenizer.from_directory(settings.cache)
    device = prepare.get_device()
    path = prepare.checked(settings.cache, manifest, "val_rows.bin")
    rows = np.fromfile(path, np.uint16).reshape(-1, settings.seq_len + 1)
    answers = closed_forms(rows[:ROWS], tokenizer, device)
    answers += refusals(rows[: settings.seq_len], tokenizer.token_bytes, device)
    print(f"{'model':<24}{'expected':>12}{'got':>12}")
    for answer in answers:
        verdict = "ok" if answer.right else "WRONG"
        print(f"{answer.model:<24}{answer.expected:>12}{answer.got:>12}  {verdict}")
    return all(answer.right for answer in answers)
