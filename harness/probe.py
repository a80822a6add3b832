"""The probe: refuse a model that sees future tokens or other rows of its batch."""

import numpy as np
import torch

from harness.common import VoidScore


def ask(model, x: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """model(x), checked to be logits [B, T, vocab_size]: the model never sees a target."""
    logits = model(x)
    expected = (*x.shape, vocab_size)
    is_tensor = isinstance(logits, torch.Tensor)
    if not is_tensor or tuple(logits.shape) != expected:
        got = tuple(logits.shape) if is_tensor else type(logits).__name__
        raise VoidScore(
            f"model(x) must return logits {expected}, it returned {got}. "
            "hint: no tuple, no loss, no padded vocabulary"
        )
    return logits


def draw_cuts(n: int, seq_len: int, seed: int) -> tuple[list[int], list[int]]:
    """Positions 1 ... seq_len-1 in random order: the first n of them, and the rest."""
    cuts = (np.random.default_rng(seed).permutation(seq_len - 1) + 1).tolist()
    return cuts[:n], cuts[n:]


def precision(model, logits: torch.Tensor) -> float:
    """Unit of rounding of the coarsest type at work: autocast, parameters or logits."""
    dtypes = {logits.dtype, *(p.dtype for p in model.parameters())}
    if torch.is_autocast_enabled(logits.device.type):
        dtypes.add(torch.get_autocast_dtype(logits.device.type))
    return max(torch.finfo(d).eps for d in dtypes if d.is_floating_point)


class Probe:
    """Refuses a model that sees future tokens or other rows.

    For each cut, one row is given to the model again with other tokens from the cut on, and the
    logits before the cut must not change. Kernels that get equal shapes round equally, whatever the
    precision, so almost nothing is allowed: 64 units of float32. Only if that is exceeded, a third
    pass measures how well the model repeats itself. Four times that is allowed then, but never more
    than rounding in the model's precision explains.
    """

    def __init__(self, model, vocab_size: int, cuts: list[int]):
        self.model = model
        self.vocab_size = vocab_size
        self.cuts = list(cuts)  # those still to be checked
        self.limit = 64 * 2**-23  # change of a logit that is allowed, grows with the logits
        self.noise = 0.0  # how much a repeat differs; 0 if that was not needed
        self.eps = 0.0  # unit of rounding of the model
        self.random = np.random.default_rng()

    def check(self, x: torch.Tensor, logits: torch.Tensor, n: int) -> None:
        """Check one cut in each of the first n rows of x [B, T], whose logits are known.

        Raises:
            VoidScore: a logit before a cut changed.
        """
        taken, self.cuts = self.cuts[:n], self.cuts[n:]
        if not taken:
            return
        n = len(taken)
        seq_len = x.size(1)
        if not self.eps:
            self.eps = precision(self.model, logits)
            self.limit *= max(1.0, logits.abs().max().item())
        cut = torch.tensor(taken, device=x.device)[:, None]
        before = torch.arange(seq_len, device=x.device) < cut
        shift = torch.from_numpy(self.random.integers(1, self.vocab_size, (n, seq_len)))
        other = x.clone()
        other[:n] = torch.where(before, x[:n], (x[:n] + shift.to(x.device)) % self.vocab_size)
        after = ask(self.model, other, self.vocab_size)[:n]
        if not ((logits[:n] != after).any(-1) & before).any():
            return
        change = (logits[:n] - after).abs().amax(-1).float().masked_fill(~before, 0.0)
        if not change.max() <= self.limit:
            self._measure_noise(x, logits)
        if not change.max() <= self.limit:
            row, position = divmod(int((~(change <= self.limit)).flatten().nonzero()[0]), seq_len)
            raise VoidScore(
                "the model sees the future or other rows: with other tokens from position "
                f"{taken[row]} on, a logit at position {position} changed by "
                f"{change[row, position]:.3g} (tolerance {self.limit:.3g})"
            )

    def _measure_noise(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        """Allow for a model that does not repeat itself."""
        scale = max(1.0, logits.abs().max().item())
        repeat = ask(self.model, x, self.vocab_size)
        self.noise = max(self.noise, (logits - repeat).abs().max().item())
        exact = max(self.limit, 64 * 2**-23 * scale)
        self.limit = min(max(exact, 4 * self.noise), max(exact, 4 * self.eps * scale))
