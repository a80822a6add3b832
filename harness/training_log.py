"""What a training run says: progress, steps.jsonl, the summary with its METRIC lines, samples."""

import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import prepare
from harness import device as machine
from harness.compiler import say_slow
from harness.exit_codes import Diverged

RECORDS = 300  # at most about so many lines in steps.jsonl


def show(line: str, last: bool = False) -> None:
    """Progress: one rewritten line on a terminal, plain lines in a log."""
    if sys.stdout.isatty():
        print(f"\r{line}\033[K", end="\n" if last else "", flush=True)
    else:
        print(line, flush=True)


def grad_norms(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Norm of all gradients of each kind of group, 0-dim: {"muon": ..., "adamw": ...}.

    Of a sparse gradient (nn.Embedding with sparse=True), the rows that it has are taken.
    """
    kinds: dict[str, list] = {}
    for group in optimizer.param_groups:
        grads = [p.grad for p in group["params"] if p.grad is not None]
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        kinds.setdefault(group.get("kind", "all"), []).extend(grads)
    return {kind: torch.nn.utils.get_total_norm(grads) for kind, grads in kinds.items() if grads}


@dataclass
class Pending:
    """The values of one step, on their way from the device."""

    step: int
    elapsed: float
    lr_multiplier: float
    names: list[str]  # of the gradient norms, [] if this step is not recorded
    values: torch.Tensor  # the loss, then the norms
    copied: torch.cuda.Event | None

    def read(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.values.tolist()


class TrainingLog:
    """Collects the losses of a run; prints progress, writes steps.jsonl, ends a run that diverged.

    On a GPU a loss is read one step late: reading the present one would wait for the step.
    """

    def __init__(
        self,
        device: torch.device,
        tokens_per_step: int,
        time_budget: float,
        max_loss: float,
        flops_per_token: int,
        peak_flops: float | None,
    ):
        """peak_flops: of all ranks together, per second; None if unknown (then no mfu is shown)."""
        self.device = device
        self.tokens_per_step = tokens_per_step
        self.time_budget = time_budget
        self.max_loss = max_loss
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.run_dir = os.environ.get("AUTORESEARCH_RUN_DIR") if not prepare.ranks()[0] else None
        self.ema_loss = 0.0
        self.pending: list[Pending] = []
        self.previews: list[str] = []
        self.last_print = 0.0
        self.last_record = -math.inf

    def say(self, name: str, text: str) -> None:
        """A line about the run's setup."""
        print(f"{name:<10} {text}", flush=True)

    def describe(self, model, why_eager: str, attention: str, peak: str) -> None:
        """Say what will be trained, on what, and how; why_eager: "" if the model is compiled."""
        settings, config = prepare.settings(), model.config
        data_id = prepare.load_manifest(settings.cache)["data_id"]
        size = f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads"
        n_params = sum(p.numel() for p in model.parameters()) / 1e6
        dtype = str(config.dtype).removeprefix("torch.")
        mode = f"not compiled ({why_eager})" if why_eager else "compiled"
        self.say("data", f"{settings.profile}, data_id {data_id}, seed {settings.seed}")
        self.say("model", f"{size}, {n_params:.1f} M parameters")
        self.say("device", f"{prepare.ranks()[1]} x {self.device.type}, {dtype}, {mode}")
        self.say("attention", attention)
        self.say("peak", peak)
        if why_eager and prepare.ranks()[0] == 0:
            say_slow(why_eager)

    def print_summary(
        self,
        model,
        val_bpb: float,
        *,
        steps: int,
        training_seconds: float,
        startup_seconds: float,
        eval_seconds: float,
    ) -> None:
        """The result of the run, with its METRIC lines."""
        tokens = steps * self.tokens_per_step
        print_values({
            "val_bpb": val_bpb,
            "training_seconds": training_seconds,
            "total_seconds": time.perf_counter() - prepare.STARTED,
            "startup_seconds": startup_seconds,
            "eval_seconds": eval_seconds,
            "peak_vram_mb": machine.peak_memory_mb(self.device),
            "mfu_percent": self.mfu(tokens / training_seconds),
            "total_tokens_M": tokens / 1e6,
            "num_steps": steps,
            "num_params_M": sum(p.numel() for p in model.parameters()) / 1e6,
            "depth": model.config.n_layer,
        })  # fmt: skip

    def state_dict(self) -> dict:
        return {"ema_loss": self.ema_loss}

    def load_state_dict(self, state: dict) -> None:
        self.ema_loss = state["ema_loss"]

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization in percent, None where the peak is unknown."""
        if not self.peak_flops:
            return None
        return 100 * self.flops_per_token * tokens_per_second / self.peak_flops

    def add_step(
        self,
        step: int,
        elapsed: float,
        loss: torch.Tensor,
        lr_multiplier: float,
        optimizer: torch.optim.Optimizer,
        epoch: int,
    ) -> None:
        """Take up a step, before its gradients are cleared.

        loss: 0-dim, this rank's; elapsed: seconds of the budget at the end of the step.

        Raises:
            Diverged: the loss of this step (on a GPU: of the one before) is NaN or too high.
        """
        norms = {}
        if self.run_dir and elapsed - self.last_record > self.time_budget / RECORDS:
            self.last_record = elapsed
            norms = grad_norms(optimizer)
        values = torch.stack([machine.mean_over_ranks(loss), *norms.values()])
        copied = None
        if self.device.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.pending.append(Pending(step, elapsed, lr_multiplier, list(norms), values, copied))
        while len(self.pending) > (0 if self.device.type == "cpu" else 1):
            self.take_up(self.pending.pop(0))
        if elapsed - self.last_print > (0.2 if sys.stdout.isatty() else 5):
            self.last_print = elapsed
            self.print_progress(step, elapsed, epoch)

    def take_up(self, entry: Pending) -> None:
        loss, *norms = entry.read()
        if not loss <= self.max_loss:
            guessing = self.max_loss / 2
            raise Diverged(f"loss {loss:.3f} at step {entry.step} (guessing has {guessing:.3f})")
        self.ema_loss += (loss - self.ema_loss) / min(entry.step, 50)
        if not entry.names:
            return
        record = {
            "step": entry.step,
            "elapsed": entry.elapsed,
            "loss": loss,
            "lrm": entry.lr_multiplier,
            "grad_norm": dict(zip(entry.names, norms, strict=True)),
            "tokens_per_second": entry.step * self.tokens_per_step / entry.elapsed,
            "memory_mb": machine.peak_memory_mb(self.device),
        }
        with open(Path(self.run_dir, "steps.jsonl"), "a") as file:
            file.write(json.dumps(record) + "\n")

    def print_progress(self, step: int, elapsed: float, epoch: int) -> None:
        speed = step * self.tokens_per_step / elapsed
        mfu = self.mfu(speed)
        parts = [
            f"step {step:6d}",
            f"{min(100 * elapsed / self.time_budget, 100):5.1f}%",
            f"loss {self.ema_loss:.4f}",
            f"{speed / 1e3:.1f} k tokens/s",
            *([] if mfu is None else [f"mfu {mfu:.1f}%"]),
            f"epoch {epoch}",
            f"{max(self.time_budget - elapsed, 0):.0f} s left",
        ]
        show(" | ".join(parts))

    def add_preview(self, elapsed: float, bits_per_byte: float) -> None:
        self.previews.append(f"{elapsed:.0f} s {bits_per_byte:.4f}")
        show(f"preview    bits per byte: {', '.join(self.previews)}", last=True)

    def finish(self, step: int, elapsed: float) -> None:
        """Read what is still on its way, print the last line of progress."""
        while self.pending:
            self.take_up(self.pending.pop(0))
        speed = step * self.tokens_per_step / max(elapsed, 1e-9)
        line = f"step {step:6d} | 100.0% | loss {self.ema_loss:.4f} | {speed / 1e3:.1f} k tokens/s"
        show(line, last=True)
        mfu = self.mfu(speed)
        if mfu is not None and mfu > 100:
            self.say("mfu", "above 100% is impossible: the peak rate is wrong for this device")


DECIMALS = {"val_bpb": 6, "mfu_percent": 2, "num_steps": 0, "depth": 0}  # all others 1
NOT_METRICS = ("depth",)  # shown, but no result


def print_values(values: dict[str, float | None]) -> None:
    """The block after "---" as in karpathy/autoresearch, then METRIC lines; None is left out."""
    shown = {name: value for name, value in values.items() if value is not None}
    print("---")
    for name, value in shown.items():
        print(f"{name + ':':<18}{value:.{DECIMALS.get(name, 1)}f}")
    for name, value in shown.items():
        if name not in NOT_METRICS:
            metric = name.lower().replace("vram", "memory")
            print(f"\nMETRIC {metric}={value:.{DECIMALS.get(name, 1)}f}", end="", flush=True)
    print(flush=True)


@torch.no_grad()
def draw(model, x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Token ids int64 [B, T], positions start ... end-1 drawn from the model one by one."""
    for i in range(start, end):
        x[:, i] = model(x)[:, i - 1].softmax(-1).multinomial(1)[:, 0]
    return x


def print_samples(model, tokenizer, loader, autocast, count: int) -> None:
    """Print count pieces of training text, each with the model's continuation.

    It comes after the score and cannot cost it: whatever goes wrong is printed.
    """
    try:
        done = 0
        while done < count:
            x = next(loader)[0]
            start, end = x.size(1) // 4, x.size(1) // 2
            with autocast:
                rows = draw(model, x, start, end)[:, :end].tolist()
            for ids in rows[: count - done]:
                text = tokenizer.decode(ids[:start]) + " >>> " + tokenizer.decode(ids[start:])
                # Indented: a line of it could look like a METRIC
                print("sample\n" + re.sub("(?m)^", "  | ", text), flush=True)
            done += len(rows)
    except Exception as error:
        print(f"sample: {type(error).__name__}: {error}", file=sys.stderr)
