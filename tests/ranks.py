"""train.py on a tiny eager model, for tests: python tests/ranks.py STEPS [DRILL [options of train.py ...]].

STEPS 0: until the time is up. The schedules see a progress fixed at 0.2, so that the losses do not depend on the machine's
speed. DRILL: "oom:N" is a device on which more than N rows, or (N = 0) anything without activation checkpointing, runs out
of memory; "die" and "void" on rank 1; "kill:N" is a clock that counts steps, for schedules and all else, and kill -9 after N.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import machine
import prepare
import train

steps, drill = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
sys.argv[1:] = sys.argv[3:]
knobs = dict(COMPILE=False, DEPTH=2, ASPECT_RATIO=16, HEAD_DIM=16, TOTAL_BATCH_SIZE=4096, DEVICE_BATCH_SIZE=8)
knobs |= dict(EMBEDDING_LR=0.01, UNEMBEDDING_LR=0.001, SCALAR_LR=0.01, MATRIX_LR=0.005)  # rounding stays small
for name, value in knobs.items():
    setattr(train, name, value)
machine.compute_dtype = lambda device: torch.float32
machine.peak_flops = lambda device, dtype: (1e12, "fixed")
# orthogonalization blows rounding up to full size where a gradient has no direction, as in the first steps: not here
train.orthogonalize = lambda g, dtype: g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-6)
schedules, loss_of = train.set_schedules, train.train_loss
if not drill.startswith("kill"):
    train.set_schedules = lambda optimizer, progress, step: schedules(optimizer, 0.2, step)
rank = int(os.environ.get("RANK", 0))


class Steps(prepare.Clock):
    def done(self):
        self.count += 1
        if drill == "die" and rank == 1 and self.count == 3:
            os._exit(9)
        if drill == f"kill:{self.count}":
            os.kill(os.getpid(), 9)
        over = super().done()
        return self.count == steps if steps else over

    def start(self, used=0.0):
        super().start(used)
        self.count = int(used * steps / prepare.TIME_BUDGET) if used else -1

    def elapsed(self):
        counted = drill.startswith("kill") and self.started is not None
        return (self.count + 0.5) * prepare.TIME_BUDGET / steps if counted else super().elapsed()


def limited(model, x, y):
    limit = int(drill[4:])
    if len(x) > max(limit, 1) or (limit == 0 and not model.checkpointing):
        raise torch.OutOfMemoryError("CUDA out of memory (drill)")
    return loss_of(model, x, y)


class Void(train.GPT):
    def forward(self, idx):
        return super().forward(idx) + (float("nan") if rank == 1 else 0.0)


train.Clock = Steps
train.CHECKPOINT_EVERY, train.PREVIEW_EVERY = 4.5 * prepare.TIME_BUDGET / (steps or 1), prepare.TIME_BUDGET / 3.5
if drill.startswith("oom"):
    train.train_loss = limited
if drill == "void":
    train.GPT = Void
train.main()
print(f"rank {rank} did {prepare._run.timed_steps + prepare._run.untimed_steps} steps", file=sys.stderr)
