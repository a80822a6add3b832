"""train.py on a tiny eager model, for tests: python tests/ranks.py STEPS [DRILL [options ...]].

The clock counts STEPS steps instead of seconds; 0: a real clock. The schedules see a progress fixed
at 0.2. The drills:
    oom:N   a device on which more than N rows run out of memory; N = 0: anything without
            activation checkpointing does
    die     rank 1 ends without a word; void: the evaluator refuses its model
    unused  the model has a matrix that its loss does not use
    nan     the loss of rank 1 is NaN from the third step on
    kill:N  schedules as in a real run, and kill -9 after N steps
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import prepare
import train
from harness import device as machine

STEPS = int(sys.argv[1])
DRILL = sys.argv[2] if len(sys.argv) > 2 else ""
RANK = int(os.environ.get("RANK", 0))
COUNTED = STEPS > 0  # a clock on which each step takes the same time
KILL = DRILL.startswith("kill")
KNOBS = {
    "COMPILE": False,
    "DEPTH": 2,
    "ASPECT_RATIO": 16,
    "HEAD_DIM": 16,
    "TOTAL_BATCH_SIZE": 1024 if KILL else 4096,  # many steps of little, or few for exact sums
    "DEVICE_BATCH_SIZE": 2 if KILL else 8,
    "EMBEDDING_LR": 0.01,  # low rates: rounding stays small
    "UNEMBEDDING_LR": 0.001,
    "LAMBDA_LR": 0.01,
    "RESID_LR": 0.0001,
    "SHIFT_LR": 0.001,
    "MATRIX_LR": 0.005,
    "CHECKPOINT_EVERY": 4.5 * prepare.TIME_BUDGET / (STEPS or 1),
    "PREVIEW_EVERY": prepare.TIME_BUDGET / 3.5,
}


class CountingClock(prepare.Clock):
    """Ends after STEPS steps."""

    def start(self, resumed: float = 0.0):
        super().start(resumed)
        self.count = round(resumed * STEPS / prepare.TIME_BUDGET - 0.5) if resumed else -1

    def done(self):
        self.count += 1
        if DRILL == "die" and RANK == 1 and self.count == 3:
            os._exit(9)
        if KILL and DRILL.removeprefix("kill:") == str(self.count):
            os.kill(os.getpid(), 9)
        over = super().done()
        return self.count == STEPS if STEPS else over

    def elapsed(self):
        if COUNTED and self.started is not None:
            return (self.count + 0.5) * prepare.TIME_BUDGET / STEPS
        return super().elapsed()


class DrilledGPT(train.GPT):
    """The model, with the fault of the drill."""

    calls = 0

    def __init__(self, config, attend):
        super().__init__(config, attend)
        if DRILL == "unused":
            self.blocks[0].unused = torch.nn.Linear(config.n_embd, config.n_embd, bias=False)

    def init_weights(self):
        super().init_weights()
        if DRILL == "unused":
            torch.nn.init.zeros_(self.blocks[0].unused.weight)

    def forward(self, idx, targets=None):
        if DRILL.startswith("oom") and targets is not None:
            limit = int(DRILL[4:])
            if len(idx) > max(limit, 1) or (limit == 0 and not self.checkpointing):
                raise torch.OutOfMemoryError("CUDA out of memory (drill)")
        self.calls += 1
        out = super().forward(idx, targets)
        if RANK == 1 and DRILL == "void" and targets is None:
            out = out + float("nan")
        if RANK == 1 and DRILL == "nan" and self.calls > 4:
            out = out * float("nan")
        return out


def set_schedules_at_a_fixed_progress(optimizer, progress, step):
    set_schedules(optimizer, 0.2, step)


def normalize(g, dtype):
    """Orthogonalization blows rounding up where a gradient has no direction, as in first steps."""
    return g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-6)


if __name__ == "__main__":
    sys.argv[1:] = sys.argv[3:]
    for name, value in KNOBS.items():
        setattr(train, name, value)
    machine.compute_dtype = lambda device: torch.float32
    machine.peak_flops = lambda device, dtype: (1e12, "fixed")
    set_schedules = train.set_schedules
    if not KILL:
        train.set_schedules = set_schedules_at_a_fixed_progress
    train.orthogonalize = normalize
    train.Clock = CountingClock
    train.GPT = DrilledGPT
    with train.exit_codes():
        train.main()
    steps = prepare._run.timed_steps + prepare._run.untimed_steps
    print(f"rank {RANK} did {steps} steps", file=sys.stderr)
