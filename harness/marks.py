"""The marks of a run: what it did that makes its score no fair one. Marked runs are not kept."""

from dataclasses import dataclass
from pathlib import Path

import torch

from harness import guard

SETUP_SECONDS = 30  # outside the clock, besides 1.5 times the seconds that are accounted for
BATCHES_OUTSIDE = 8  # taken from the loader before the start or after the stop
LATE_SECONDS = 2  # from the stop to the score, where the scored weights are not those at the stop
SCORING_SECONDS = 60  # of the evaluation, besides compiling and 3 times the speed of training


@dataclass
class RunState:
    """What this process has done so far."""

    clock: object = None  # the one prepare.Clock
    data_id: str = ""  # of the prepared data when they were first used
    timed_steps: int = 0  # optimizer steps while the clock runs
    untimed_steps: int = 0  # all others, except those of the warm-up
    timed_tokens: int = 0  # taken from the loader by this rank while the clock runs
    untimed_batches: int = 0  # taken from the loader at other times, except in the warm-up
    accounted_seconds: float = 0.0  # outside the clock, spent by fixed code before training

    def trained_here(self) -> float:
        """Seconds that this process trained while the clock ran."""
        clock = self.clock
        return clock.training_seconds - clock.resumed if clock and clock.stopped else 0.0

    def count_step(self) -> None:
        """An optimizer step was taken."""
        if self.clock is not None and self.clock.running():
            self.timed_steps += 1
        elif self.clock is None or not self.clock.warming_up:
            self.untimed_steps += 1

    def count_batch(self, tokens: int) -> None:
        """The loader gave a batch."""
        if self.clock is not None and self.clock.running():
            self.timed_tokens += tokens
        elif self.clock is None or not self.clock.warming_up:
            self.untimed_batches += 1


def training_marks(
    run: RunState, model: torch.nn.Module, budget: float, started: float, ended: float
) -> list[str]:
    """The marks of all that came before the evaluation, in words.

    budget: seconds of training; started, ended: when prepare.py was imported and the evaluation
    began, by the clock's time.
    """
    marks = []
    clock = run.clock
    if clock is None or not clock.stopped:
        marks.append("the clock of prepare.py was not used")
    else:
        if clock.resumed:
            marks.append(f"resumed after {clock.resumed:.0f} s")
        if clock.training_seconds > 1.1 * budget + 5:
            trained = clock.training_seconds
            marks.append(f"trained {trained:.0f} s of a budget of {budget:.0f} s")
        marks += weight_marks(clock, model, ended)
        outside = ended - started - run.trained_here() - clock.paused
        accounted = clock.warmup_seconds + run.accounted_seconds
        allowed = SETUP_SECONDS + 1.5 * accounted
        if outside > allowed:
            why = f"{allowed:.0f} s allowed, with {accounted:.0f} s of compiling and reading"
            marks.append(f"{outside:.0f} s outside training ({why})")
    if run.untimed_steps:
        marks.append(f"{run.untimed_steps} optimizer steps outside the clock")
    if run.untimed_batches > BATCHES_OUTSIDE:
        marks.append(f"{run.untimed_batches} batches were taken outside the clock")
    resumed = clock is not None and clock.resumed
    if reads := guard.other_reads(Path("checkpoints") if resumed else None):
        more = f" and {len(reads) - 1} more" if len(reads) > 1 else ""
        marks.append(f"other data was read: {reads[0]}{more}")
    return marks


def weight_marks(clock, model: torch.nn.Module, ended: float) -> list[str]:
    """Training that no clock sees leaves other weights behind."""
    marks = []
    if clock.changed_early:
        marks.append("the weights changed between the warm-up and the start of the clock")
    known = clock.last_weights
    late = ended - clock.stopped
    if known is not None and guard.checksums(clock.model) != known:
        marks.append("the weights changed after the clock stopped")
    elif late > LATE_SECONDS and guard.checksums(model) != known:
        marks.append(f"{late:.0f} s passed between the clock's stop and the score")
    return marks


def scoring_marks(run: RunState, seconds: float, tokens: int, noise: float) -> list[str]:
    """The marks of an evaluation of so many seconds and tokens, whose logits repeat up to noise."""
    marks = []
    if run.timed_tokens:
        expected = run.trained_here() * tokens / run.timed_tokens
        if seconds > SCORING_SECONDS + run.clock.warmup_seconds + 3 * expected:
            words = f"in training as many tokens took {expected:.0f} s"
            marks.append(f"scoring took {seconds:.0f} s ({words})")
    if noise:
        marks.append(f"logits repeat only to {noise:.2g}: smaller leaks are not seen")
    return marks
