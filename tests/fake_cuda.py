"""The step of profile "full" on CUDA tensors without data: python tests/fake_cuda.py LIBRARY ...

    LIBRARY     tests/fakecuda.cpp, built
    ATTENTION   a name of train.ATTENTION_BACKENDS
    MODE        eager, compiled (by aot_eager: everything but the code generator) or checkpointing
    DTYPE       bfloat16, or float16 with a GradScaler

Prints one line of JSON: what devices, types and sizes came out, and what was compiled. Finds wrong
devices, shapes and operator calls; not wrong types within a product, and no error of a kernel.
"""

import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

LIBRARY, ATTENTION, MODE, DTYPE = sys.argv[1:]
TORCH = Path(importlib.util.find_spec("torch").origin).parent
for path in (TORCH / "lib" / "libtorch_cpu.so", LIBRARY):
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
os.environ["AUTORESEARCH_PROFILE"] = "full"

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import train  # noqa: E402

torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # or autocast turns itself off
torch.cuda.is_bf16_supported = lambda *args, **kwargs: True
torch.cuda.get_device_capability = lambda device=None: (9, 0)
DEVICE = torch.device("cuda", 0)
VOCAB_SIZE = 8192 + 4


@torch.library.custom_op("fake_fa3::forward", mutates_args=())
def fa3_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator of Flash Attention 3: output and log-sum-exp, float32 [B, H, T]."""
    raise NotImplementedError


@fa3_forward.register_fake
def _(q, k, v, causal, left, right):
    B, T, H, _ = q.shape
    return torch.empty_like(q), q.new_empty(B, H, T, dtype=torch.float32)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output)


def backward(ctx, grad, _):
    q, k, v, *_ = ctx.saved_tensors
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None, None


fa3_forward.register_autograd(backward, setup_context=setup_context)


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    """The kernel's Python function: [B, T, H, D] in half precision, returns the output alone."""
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert q.dtype == k.dtype == v.dtype
    assert causal and q.size(3) <= 256
    return fa3_forward(q, k, v, causal, *window_size)[0]


class Kept:
    """Bytes that the forward pass keeps for the backward pass, each storage once."""

    def __init__(self, parameters):
        self.storages = {}
        self.not_counted = {p.untyped_storage()._cdata for p in parameters}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.not_counted:
            self.storages[storage._cdata] = (storage.nbytes(), storage)  # kept alive: unique ids
        return tensor

    def gib(self) -> float:
        return sum(size for size, _ in self.storages.values()) / 2**30


def main() -> None:
    dtype = getattr(torch, DTYPE)
    train.fa3_kernel.flash_attn_func = flash_attn_func
    config = train.build_config(VOCAB_SIZE, dtype)
    rows = train.split_batch(1)[1]
    graphs = []

    def count_graphs(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager_decomp_partition

        graphs.append(graph)
        return aot_eager_decomp_partition(graph, inputs)

    compiler = torch.compile
    torch.compile = lambda f, **options: compiler(f, backend=count_graphs, **options)
    with torch.device("meta"):
        model = train.GPT(config, train.ATTENTION_BACKENDS[ATTENTION])
    model.checkpointing = MODE == "checkpointing"
    counts = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=DEVICE)
        compiled = MODE == "compiled"
        optimizer = train.build_optimizer(model, dtype, compiled=compiled)
        if compiled:
            model.compile_parts(by_block=False)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        x = torch.zeros(rows, train.MAX_SEQ_LEN, dtype=torch.int64, device=DEVICE)
        for step in range(3):
            train.set_schedules(optimizer, step / 3, step)
            kept = Kept(model.parameters())
            hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor)
            with torch.autocast("cuda", dtype), hooks:
                loss = model(x, x)
            scaler.scale(loss).backward()
            grads = [p.grad for p in model.parameters()]
            if dtype != torch.float16:  # the scaler asks whether a value is infinite: there is none
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            counts.append(len(graphs))
        with torch.autocast("cuda", dtype), torch.no_grad():
            logits = model(x[:2])
    result = {
        "loss": [str(loss.dtype), str(loss.device), list(loss.shape)],
        "logits": [str(logits.dtype), str(logits.device), list(logits.shape)],
        "grads": sorted({f"{g.dtype} {g.device}" for g in grads}),
        "state": sorted(
            {f"{t.dtype} {t.device}" for s in optimizer.state.values() for t in s.values()}
        ),
        "graphs": counts,
        "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
        "kept_gib": round(kept.gib(), 2),
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
