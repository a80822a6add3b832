"""What train.py's speed measures bring: python tests/bench_train.py [rounds]. Not a test: prints ratios, asserts nothing.

The same model, weights and batch, trained side by side in one process, a few steps in turn: as it is, and read plainly
(eager, torch's attention, the loss on all logits at once, an optimizer that takes one matrix after the other).
"""

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

import machine
import prepare
import train


def plain_step(optimizer):
    """MuonAdamW.step without stacking or compiling."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.setdefault(("plain", p), {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0})
            state["t"] += 1
            lr, wd = torch.tensor(group["lr"]), torch.tensor(group["weight_decay"])
            if group["kind"] == "adamw":
                train.adamw_update([p], [p.grad], [state["m"]], [state["v"]], [lr], [wd], state["t"], *train.ADAM_BETAS)
            else:
                dim = -1 if p.size(0) >= p.size(1) else -2
                v = state.setdefault("rows", torch.zeros_like(p[None].mean(dim, keepdim=True)))
                rates = (torch.tensor(group[k]) for k in ("momentum", "beta2"))
                train.muon_update([p], [p.grad], state["m"][None], v, lr, wd, *rates, optimizer.dtype)


def build(plain: bool, device, dtype, tokenizer):
    """A function that trains one step."""
    torch.manual_seed(prepare.SEED)
    config = train.build_config(tokenizer.get_vocab_size(), dtype)
    attend = machine.sdpa_attention if plain else machine.pick_attention(config, device)[0]
    with torch.device("meta"):
        model = train.GPT(config, attend)
    model.init_weights(device)
    compiled = not plain and not machine.can_compile(device)
    optimizer = train.build_optimizer(model, dtype, compile=compiled)
    if compiled:
        model.compile_parts()
    x, y, _ = next(prepare.make_dataloader(tokenizer, train.split_batch(1)[1], prepare.MAX_SEQ_LEN, "train"))

    def step():
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) if plain else train.train_loss(model, x, y)
        loss.backward()
        with torch.no_grad():
            plain_step(optimizer) if plain else optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, model.flops_per_token(), x.numel()


def main() -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(prepare.ROOT / "compiled")
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    device, tokenizer = prepare.get_device(), prepare.Tokenizer.from_directory()
    dtype = machine.compute_dtype(device)
    steps = {}
    for name in ("as it is", "plain"):
        steps[name], flops, tokens = build(name == "plain", device, dtype, tokenizer)
        print(f"{name:<10} loss of the first steps {steps[name]():.4f} {steps[name]():.4f}", flush=True)
    seconds, peaks = {name: [] for name in steps}, []
    for _ in range(rounds):
        peaks.append(machine.peak_flops(device, dtype)[0])
        for name, step in steps.items():
            for _ in range(3):
                start = time.perf_counter()
                step()
                prepare.synchronize()
                seconds[name].append(time.perf_counter() - start)
    peak = statistics.median(peaks)
    speeds = {name: tokens / statistics.median(taken) for name, taken in seconds.items()}
    for name, speed in speeds.items():
        print(f"{name:<10} {speed / 1e3:7.1f} k tokens/s   mfu {100 * flops * speed / peak:5.1f}% of {peak / 1e12:.2f} TFLOP/s")
    print(f"ratio to plain   {speeds['as it is'] / speeds['plain']:.2f} times the tokens/s")
    print(f"ratio to peak    {flops * speeds['as it is'] / peak:.3f} (mfu)")


if __name__ == "__main__":
    main()
