"""A GPT trained for a fixed time: the one file that an agent edits.

    uv run train.py          train for the budget, print the score (prepare.py must have run)

Order of the file: knobs, model, optimizer, schedules, loop. Exit codes: 0 done, 1 crash, 2 refused knobs or missing data,
3 diverged, 4 out of memory, 5 the evaluator refused the model.
"""

import gc
import math
import os
import resource
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import prepare
from prepare import (
    MAX_SEQ_LEN,
    PROFILE,
    SEED,
    TIME_BUDGET,
    Clock,
    Tokenizer,
    UserError,
    VoidScore,
    evaluate_bpb,
    get_device,
    make_dataloader,
    synchronize,
)

# ---------------------------------------------------------------------------- knobs

# Size: layers, width per layer, channels per head, tokens per optimizer step, rows per forward pass.
DEPTH, ASPECT_RATIO, HEAD_DIM, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE = {
    "full": (8, 64, 128, 2**19, 128),
    "small": (6, 64, 64, 2**16, 16),
    "tiny": (4, 48, 64, 2**12, 16),
}[PROFILE]
KV_GROUP = 1  # query heads that share one key/value head
WINDOW_PATTERN = "SSSL"  # a layer's attention: S half the context, L all of it; repeated; the last layer is always L
ROPE_BASE = 10_000
SOFTCAP = 15.0  # logits stay within +- this

MATRIX_LR = 0.04  # Muon: the matrices of the blocks
EMBEDDING_LR = 0.6  # AdamW: token and value embeddings
UNEMBEDDING_LR = 0.004  # AdamW: the output matrix
SCALAR_LR = 0.5  # AdamW: per-layer scales (those of the residual stream take a hundredth)
ADAM_BETAS = (0.8, 0.95)
WEIGHT_DECAY = 0.2  # Muon only, falls to 0 over the run
WARMUP_RATIO = 0.0  # share of the budget
WARMDOWN_RATIO = 0.5
FINAL_LR_FRAC = 0.0

ATTENTION = "auto"  # fa3, sdpa or plain
COMPILE = True

# ---------------------------------------------------------------------------- attention

# All three take q [B, T, H, D] and k, v [B, T, H/g, D] and mean the same: query i sees keys i-window ... i.


def window_mask(seq_len: int, window: int, device) -> torch.Tensor:
    """bool [T, T]: whether query (row) sees key (column)."""
    distance = torch.arange(seq_len, device=device)[:, None] - torch.arange(seq_len, device=device)
    return (distance >= 0) & (distance <= window)


def sdpa_attention(q, k, v, window: int):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if window >= q.size(2) - 1 else window_mask(q.size(2), window, q.device)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1))
    return y.transpose(1, 2)


def plain_attention(q, k, v, window: int):
    """Two products and a float32 softmax: compiled on a CPU faster than its flash attention at short contexts."""
    group = q.size(2) // k.size(2)
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = (q @ k.transpose(-2, -1)).float() * q.size(-1) ** -0.5
    scores = scores.masked_fill(~window_mask(q.size(2), window, q.device), float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def pick_attention(device: torch.device):
    """(function, why): Flash Attention 3 on Hopper, else torch's own."""
    name, why = ATTENTION, "set by ATTENTION"
    if name == "auto":
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
            name, why = "fa3", "Hopper GPU"
        else:
            name, why = ("plain", "CPU") if device.type == "cpu" else ("sdpa", "no Hopper GPU")
    if name == "fa3":
        try:
            from kernels import get_kernel

            flash = get_kernel("kernels-community/flash-attn3", version=1).flash_attn_func
            return (lambda q, k, v, window: flash(q, k, v, causal=True, window_size=(window, 0))), f"fa3 ({why})"
        except Exception as e:  # any failure to load is a reason to go on without it
            name, why = "sdpa", f"fa3 could not be loaded: {type(e).__name__}: {e}"
    return {"sdpa": sdpa_attention, "plain": plain_attention}[name], f"{name} ({why})"


# ---------------------------------------------------------------------------- model


@dataclass
class GPTConfig:
    vocab_size: int
    seq_len: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str = "L"
    dtype: torch.dtype = torch.float32  # of activations; weights are float32

    def window(self, layer: int) -> int:
        """How many tokens before itself a query of this layer sees."""
        short = layer < self.n_layer - 1 and self.window_pattern[layer % len(self.window_pattern)] == "S"
        return self.seq_len // 2 if short else self.seq_len

    def has_value_embedding(self, layer: int) -> bool:
        return layer % 2 == (self.n_layer - 1) % 2


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


def rotate(x, cos, sin):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) on the two halves of each head."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


class Attention(nn.Module):
    GATE_CHANNELS = 32

    def __init__(self, config: GPTConfig, layer: int, attend):
        super().__init__()
        self.head_dim, self.window, self.attend = config.n_embd // config.n_head, config.window(layer), attend
        kv_dim = config.n_kv_head * self.head_dim
        self.q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k = nn.Linear(config.n_embd, kv_dim, bias=False)
        self.v = nn.Linear(config.n_embd, kv_dim, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        gated = config.has_value_embedding(layer)
        self.gate = nn.Linear(self.GATE_CHANNELS, config.n_kv_head, bias=False) if gated else None

    def forward(self, x, value_embedding, cos, sin):
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        if self.gate is not None:  # value residual, gated by the input: 1 at the start
            gate = 2 * torch.sigmoid(self.gate(x[..., : self.GATE_CHANNELS]))
            v = v + gate.unsqueeze(-1) * value_embedding.unflatten(-1, (-1, self.head_dim))
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        return self.proj(self.attend(q, k, v, self.window).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.proj(F.relu(self.fc(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, attend):
        super().__init__()
        self.attention, self.mlp = Attention(config, layer, attend), MLP(config)

    def forward(self, x, value_embedding, cos, sin):
        x = x + self.attention(norm(x), value_embedding, cos, sin)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Token ids int64 [B, T] -> logits float32 [B, T, vocab]. Build it on the meta device, then call init_weights."""

    def __init__(self, config: GPTConfig, attend=sdpa_attention):
        super().__init__()
        self.config = config
        layers, kv_dim = range(config.n_layer), config.n_embd // config.n_head * config.n_kv_head
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.value_embeddings = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, kv_dim) for i in layers if config.has_value_embedding(i)}
        )
        self.blocks = nn.ModuleList(Block(config, i, attend) for i in layers)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid_scale = nn.Parameter(torch.empty(config.n_layer))
        self.x0_scale = nn.Parameter(torch.empty(config.n_layer))
        half = config.n_embd // config.n_head // 2
        self.register_buffer("cos", torch.empty(config.seq_len, 1, half), persistent=False)
        self.register_buffer("sin", torch.empty(config.seq_len, 1, half), persistent=False)

    @torch.no_grad()
    def init_weights(self, device) -> "GPT":
        """Give a model on the meta device its memory and its first weights."""
        self.to_empty(device=device)
        bound = (3 / self.config.n_embd) ** 0.5  # uniform with standard deviation n_embd ** -0.5
        nn.init.normal_(self.wte.weight)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        for embedding in self.value_embeddings.values():
            nn.init.uniform_(embedding.weight, -bound, bound)
        for block in self.blocks:
            a = block.attention
            for linear in (a.q, a.k, a.v, block.mlp.fc):
                nn.init.uniform_(linear.weight, -bound, bound)
            for linear in (a.proj, block.mlp.proj, *([a.gate] if a.gate else [])):
                nn.init.zeros_(linear.weight)
        nn.init.ones_(self.resid_scale)
        nn.init.constant_(self.x0_scale, 0.1)
        half = self.cos.size(-1)
        rates = ROPE_BASE ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = torch.arange(self.config.seq_len, device=device, dtype=torch.float32)[:, None, None] * rates
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())
        return self

    def forward(self, idx):
        dtype = self.config.dtype
        cos, sin = self.cos[: idx.size(1)].to(dtype), self.sin[: idx.size(1)].to(dtype)
        x = x0 = norm(self.wte(idx).to(dtype))
        for i, block in enumerate(self.blocks):
            x = self.resid_scale[i] * x + self.x0_scale[i] * x0
            embedding = self.value_embeddings[str(i)](idx).to(dtype) if str(i) in self.value_embeddings else None
            x = block(x, embedding, cos, sin)
        return SOFTCAP * torch.tanh(self.lm_head(norm(x)).float() / SOFTCAP)

    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains."""
        return [*self.blocks.parameters()]

    def flops_per_token(self) -> int:
        """Floating-point operations of forward and backward: 6 a weight, 12 a channel and key that a query sees."""
        c = self.config
        weights = sum(p.numel() for p in self.matrices()) + self.lm_head.weight.numel()
        keys = sum(min(c.window(i), c.seq_len) for i in range(c.n_layer))
        return 6 * weights + 12 * c.n_embd * keys


# ---------------------------------------------------------------------------- optimizer

# Polar Express (arXiv 2505.16932): the odd polynomials that take singular values to 1 fastest, five rounds.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(g, dtype: torch.dtype):
    """The nearest orthogonal matrices to g [n, rows, cols], roughly: singular values end near 1."""
    x = g.to(dtype)
    tall = g.size(-2) > g.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.mT if tall else x


def muon_update(params, grads, momenta, variances, lr, wd, mu, beta2, dtype: torch.dtype):
    """One Muon step (Jordan 2024) on same-shaped matrices, in place, as one batch.

    Nesterov momentum, orthogonalization, per-neuron variance normalization (NorMuon, arXiv 2510.05491), and weight
    decay only where it agrees with the update (cautious, arXiv 2411.16085). lr, wd, mu: 0-dim tensors.
    """
    g = torch.stack(grads)
    momenta.lerp_(g, 1 - mu)
    update = orthogonalize(g.lerp(momenta, mu), dtype).to(g.dtype)
    rows, cols = update.shape[-2:]
    dim = -1 if rows >= cols else -2
    variances.lerp_(update.square().mean(dim, keepdim=True), 1 - beta2)
    scaled = update * (variances + 1e-10).rsqrt()
    # the normalization changes directions between neurons, not the size of the step
    update = scaled * (update.norm(dim=(-2, -1), keepdim=True) / (scaled.norm(dim=(-2, -1), keepdim=True) + 1e-10))
    lr = lr * max(1, rows / cols) ** 0.5
    for p, u in zip(params, update.unbind(), strict=True):
        p.sub_(lr * u + lr * wd * p * (u * p >= 0))


def adamw_update(params, grads, firsts, seconds, lrs, t, beta1: float, beta2: float, eps: float = 1e-10):
    """One AdamW step (arXiv 1711.05101, no decay) in place; lrs: one 0-dim tensor a parameter, t: step from 1."""
    for p, g, m, v, lr in zip(params, grads, firsts, seconds, lrs, strict=True):
        m.lerp_(g, 1 - beta1)
        v.lerp_(g.square(), 1 - beta2)
        p.sub_(lr / (1 - beta1**t) * m / ((v / (1 - beta2**t)).sqrt() + eps))


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups of kind "muon" (same shape within a group), AdamW for those of kind "adamw".

    Rates are read from the groups at every step and reach the compiled updates as tensors: a new rate recompiles nothing.
    """

    def __init__(self, groups, dtype: torch.dtype, compile: bool):
        super().__init__(groups, {"weight_decay": 0.0, "momentum": 0.95, "beta2": 0.95})
        wrap = (lambda f: torch.compile(f, dynamic=False, fullgraph=True)) if compile else (lambda f: f)
        self.dtype, self.update, self.steps = dtype, wrap(self._update), 0

    def _update(self, adamw, muon, t):
        adamw_update(*adamw, t, *ADAM_BETAS)
        for group in muon:
            muon_update(*group, self.dtype)

    @torch.no_grad()
    def step(self):
        adamw, muon = [[] for _ in range(5)], []
        for group in self.param_groups:
            params, lr = group["params"], torch.tensor(group["lr"])
            if group["kind"] == "adamw":
                for p in params:
                    state = self.state[p] = self.state[p] or {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0}
                    state["t"] += 1
                    t = state["t"]
                    for column, value in zip(adamw, (p, p.grad, state["m"], state["v"], lr), strict=True):
                        column.append(value)
            else:
                state = self.state[params[0]]
                if not state:
                    rows, cols = params[0].shape
                    state["m"] = params[0].new_zeros(len(params), rows, cols)
                    state["v"] = params[0].new_zeros(len(params), *((rows, 1) if rows >= cols else (1, cols)))
                rates = [torch.tensor(group[k]) for k in ("weight_decay", "momentum", "beta2")]
                muon.append((params, [p.grad for p in params], state["m"], state["v"], lr, *rates))
        self.update(adamw, muon, torch.tensor(float(t)))


def build_optimizer(model: GPT, dtype: torch.dtype, compile: bool) -> MuonAdamW:
    scale = (model.config.n_embd / 768) ** -0.5  # Adam's rates were tuned at width 768
    embeddings = [model.wte.weight, *model.value_embeddings.parameters()]
    groups = [
        {"kind": "adamw", "params": embeddings, "lr": EMBEDDING_LR * scale},
        {"kind": "adamw", "params": [model.lm_head.weight], "lr": UNEMBEDDING_LR * scale},
        {"kind": "adamw", "params": [model.resid_scale], "lr": SCALAR_LR * 0.01},
        {"kind": "adamw", "params": [model.x0_scale], "lr": SCALAR_LR},
    ]
    shapes = {}
    for p in model.matrices():
        shapes.setdefault(p.shape, []).append(p)
    groups += [{"kind": "muon", "params": params, "lr": MATRIX_LR} for params in shapes.values()]
    for group in groups:
        group["initial_lr"] = group["lr"]
    return MuonAdamW(groups, dtype, compile)


# ---------------------------------------------------------------------------- schedules


def lr_multiplier(progress: float) -> float:
    """Of every rate, at this share of the time budget: up, flat, down to FINAL_LR_FRAC."""
    if progress < WARMUP_RATIO:
        return progress / WARMUP_RATIO
    if progress <= 1 - WARMDOWN_RATIO:
        return 1.0
    left = (1 - progress) / WARMDOWN_RATIO
    return left + (1 - left) * FINAL_LR_FRAC


def set_schedules(optimizer: MuonAdamW, progress: float, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * lr_multiplier(progress)
        if group["kind"] == "muon":
            group["momentum"] = 0.85 + 0.10 * min(step / 300, 1)
            group["weight_decay"] = WEIGHT_DECAY * (1 - progress)


# ---------------------------------------------------------------------------- device

PEAK_TFLOPS = {  # dense bf16, from the makers' data sheets; first match wins
    "H200": 989.5, "H100 PCIe": 756.0, "H100 NVL": 835.5, "H100": 989.5, "H800": 989.5, "A100": 312.0, "A10G": 70.0,
    "A10": 125.0, "L40S": 362.05, "L4": 121.0, "RTX 3090": 71.0, "RTX 4090": 165.2, "RTX 5090": 209.5, "6000 Ada": 364.2,
    "B200": 2250.0, "MI300X": 1307.4,
}  # fmt: skip


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 only where the device computes it natively: emulated it is many times slower than float32."""
    native = {
        "cuda": lambda: torch.cuda.is_bf16_supported(including_emulation=False),
        "cpu": lambda: torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    }
    return torch.bfloat16 if native.get(device.type, lambda: False)() else torch.float32


def can_compile(device: torch.device) -> str:
    """"" if torch.compile works here (it needs a compiler and Python's headers), else why not."""
    if not COMPILE:
        return "COMPILE is off"
    if device.type == "mps":
        return "not on MPS"
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        return "no C++ compiler"
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
        return ""
    except Exception as e:  # whatever is missing: training goes on without
        return f"{type(e).__name__}: {str(e).strip().splitlines()[0][:100]}"


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(floating-point operations a second, where the number is from)."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        for key, tflops in PEAK_TFLOPS.items():
            if key in name:
                return tflops * 1e12, f"table, {key}"
    n, best = 2048, math.inf
    a = torch.randn(n, n, device=device).to(dtype)
    for _ in range(8):
        start = time.perf_counter()
        a @ a
        synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best, f"measured, {str(dtype)[6:]} {n}x{n} product"


def peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# ---------------------------------------------------------------------------- loop


class Diverged(Exception):
    """The loss is no number any more, or far above that of guessing."""


def build_config(vocab_size: int, dtype: torch.dtype) -> GPTConfig:
    """The model that the knobs describe.

    Raises:
        UserError: knobs that do not fit together, with the numbers and the nearest good value.
    """
    n_head = -(-DEPTH * ASPECT_RATIO // HEAD_DIM)
    if min(DEPTH, ASPECT_RATIO, HEAD_DIM, DEVICE_BATCH_SIZE, TOTAL_BATCH_SIZE, KV_GROUP) < 1 or HEAD_DIM % 2:
        raise UserError(f"sizes must be positive and HEAD_DIM even: {DEPTH=}, {ASPECT_RATIO=}, {HEAD_DIM=}, {KV_GROUP=}")
    if n_head % KV_GROUP:
        good = [g for g in range(1, n_head + 1) if n_head % g == 0]
        raise UserError(f"{n_head} heads do not divide into groups of {KV_GROUP=}. hint: one of {good}")
    if not WINDOW_PATTERN or set(WINDOW_PATTERN) - set("SL"):
        raise UserError(f"{WINDOW_PATTERN=} may hold only S and L")
    micro = DEVICE_BATCH_SIZE * MAX_SEQ_LEN
    if TOTAL_BATCH_SIZE % micro:
        low = TOTAL_BATCH_SIZE // micro * micro
        raise UserError(
            f"{TOTAL_BATCH_SIZE=} is not a multiple of {DEVICE_BATCH_SIZE} rows x {MAX_SEQ_LEN} tokens = {micro}. "
            f"hint: TOTAL_BATCH_SIZE = {' or '.join(str(n) for n in (low, low + micro) if n)}, or another DEVICE_BATCH_SIZE"
        )
    return GPTConfig(vocab_size, MAX_SEQ_LEN, DEPTH, n_head, n_head // KV_GROUP, n_head * HEAD_DIM, WINDOW_PATTERN, dtype)


def train_loss(model: GPT, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def show(line: str, last: bool = False) -> None:
    """Progress: one rewritten line on a terminal, plain lines in a log."""
    if sys.stdout.isatty():
        print(f"\r{line}\033[K", end="\n" if last else "", flush=True)
    else:
        print(line, flush=True)


def main() -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(prepare.ROOT / "compiled"))  # kept: a second run starts in seconds
    device = get_device()
    dtype = compute_dtype(device)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_directory()
    config = build_config(tokenizer.get_vocab_size(), dtype)
    why_eager = can_compile(device)
    attend, attention = pick_attention(device)
    autocast = torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext()

    with torch.device("meta"):
        model = GPT(config, attend)
    model.init_weights(device)
    optimizer = build_optimizer(model, dtype, compile=not why_eager)
    loss_of = train_loss if why_eager else torch.compile(train_loss, dynamic=False)
    loader = make_dataloader(tokenizer, DEVICE_BATCH_SIZE, MAX_SEQ_LEN, "train")
    x, y, epoch = next(loader)
    grad_accum_steps = TOTAL_BATCH_SIZE // (DEVICE_BATCH_SIZE * MAX_SEQ_LEN)
    n_params = sum(p.numel() for p in model.parameters())
    peak, peak_source = peak_flops(device, dtype)
    print(f"data       {PROFILE}, data_id {prepare.load_manifest(prepare.CACHE)['data_id']}, seed {SEED}")
    print(f"model      {config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, {n_params / 1e6:.1f} M parameters")
    print(f"batch      {TOTAL_BATCH_SIZE} tokens = {grad_accum_steps} x {DEVICE_BATCH_SIZE} rows x {MAX_SEQ_LEN}")
    print(f"device     {device}, {str(dtype)[6:]}, {'compiled' if not why_eager else f'eager ({why_eager})'}")
    print(f"attention  {attention}")
    print(f"peak       {peak / 1e12:.2f} TFLOP/s ({peak_source})", flush=True)

    def micro_step():
        with autocast:
            loss = loss_of(model, x, y)
        (loss / grad_accum_steps).backward()
        return loss.detach()

    clock = Clock()
    with clock.warmup(model, optimizer):  # compiles; its steps are undone
        for _ in range(2):
            micro_step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    gc.collect()
    gc.freeze()  # a collection in the middle of a run costs half a second
    gc.disable()

    startup_seconds = time.perf_counter() - prepare.STARTED
    clock.start()
    step, shown, losses, smooth = 0, 0.0, [], 0.0
    explodes = 2 * math.log(config.vocab_size)
    while not clock.done():
        set_schedules(optimizer, clock.progress(), step)
        loss = 0.0
        for _ in range(grad_accum_steps):
            loss = loss + micro_step() / grad_accum_steps
            x, y, epoch = next(loader)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        step += 1
        if step > 1 or device.type == "cpu":  # a GPU is asked for the step before this one: it never waits for us
            value = losses[-1 if device.type == "cpu" else -2].item()
            if not value <= explodes:
                raise Diverged(f"loss {value:.3f} at step {step} (guessing has {explodes / 2:.3f})")
            smooth += (value - smooth) / min(step, 50)
            losses = losses[-1:]
        elapsed = clock.elapsed()
        if elapsed - shown > (0.2 if sys.stdout.isatty() else 5):
            shown, speed = elapsed, step * TOTAL_BATCH_SIZE / elapsed
            show(
                f"step {step:6d} | {100 * clock.progress():5.1f}% | loss {smooth:.4f} | {speed / 1e3:.1f} k tokens/s | "
                f"mfu {100 * speed * model.flops_per_token() / peak:.1f}% | epoch {epoch} | {TIME_BUDGET - elapsed:.0f} s left"
            )
    clock.stop()
    training_seconds = clock.elapsed()
    tokens = step * TOTAL_BATCH_SIZE
    show(f"step {step:6d} | 100.0% | loss {smooth:.4f} | {tokens / training_seconds / 1e3:.1f} k tokens/s", last=True)

    start = time.perf_counter()
    with autocast:
        val_bpb = evaluate_bpb(model if why_eager else torch.compile(model, dynamic=False), tokenizer, DEVICE_BATCH_SIZE)
    now = time.perf_counter()
    summary = {
        "val_bpb": f"{val_bpb:.6f}",
        "training_seconds": f"{training_seconds:.1f}",
        "total_seconds": f"{now - prepare.STARTED:.1f}",
        "startup_seconds": f"{startup_seconds:.1f}",
        "eval_seconds": f"{now - start:.1f}",
        "peak_vram_mb": f"{peak_memory_mb(device):.1f}",
        "mfu_percent": f"{100 * tokens / training_seconds * model.flops_per_token() / peak:.2f}",
        "total_tokens_M": f"{tokens / 1e6:.1f}",
        "num_steps": f"{step}",
        "num_params_M": f"{n_params / 1e6:.1f}",
        "depth": f"{DEPTH}",
    }
    print("---")
    for name, value in summary.items():
        print(f"{name + ':':<18}{value}")
    metrics = {name.replace("vram", "memory").lower(): value for name, value in summary.items() if name != "depth"}
    print("\n" + "\n".join(f"METRIC {name}={value}" for name, value in metrics.items()), flush=True)


if __name__ == "__main__":
    codes = {UserError: 2, Diverged: 3, torch.OutOfMemoryError: 4, MemoryError: 4, VoidScore: 5}
    try:
        main()
    except tuple(codes) as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in codes.items() if isinstance(error, kind)))
