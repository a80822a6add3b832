"""A GPT trained for a fixed time: the one file that an agent edits.

    uv run train.py                                             train for the budget, print the score
    uv run train.py --save [--sample N]                         keep checkpoints; at the end write N continuations
    uv run train.py --resume                                    go on from the newest checkpoint, to the same end
    uv run torchrun --standalone --nproc-per-node=8 train.py    the same on 8 GPUs (prepare.py must have run)

Order of the file: knobs, model, optimizer, schedules, loop. Exit codes: 0 done, 1 crash, 2 refused knobs or missing data,
3 diverged, 4 out of memory, 5 the evaluator refused the model.
"""

import argparse
import gc
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import machine
import prepare
from prepare import MAX_SEQ_LEN, PROFILE, SEED, TIME_BUDGET, Clock, Tokenizer, UserError, VoidScore, evaluate_bpb, get_device

# ---------------------------------------------------------------------------- knobs

# The values of "full" are what 125 published runs of an agent on an H100 kept (karpathy/autoresearch, PR 44) where no other
# source is named; they were not measured here.
# Starting sizes by profile and GB of device memory: layers, tokens per optimizer step, rows per forward pass: a batch that
# leaves 1,000 steps or more, then the largest model that still gets them.
TIERS = {
    "full": {80: (9, 2**18, 128), 32: (8, 2**16, 32), 24: (8, 2**16, 32), 0: (6, 2**15, 16)},
    "small": {12: (6, 2**14, 16), 8: (6, 2**14, 16), 0: (4, 2**14, 8)},
    "tiny": {0: (4, 2**12, 16)},
}[PROFILE]
MEMORY_GB = torch.cuda.get_device_properties(get_device()).total_memory / 1e9 if torch.cuda.is_available() else 8  # MPS
DEPTH, TOTAL_BATCH_SIZE, DEVICE_BATCH_SIZE = next(TIERS[gb] for gb in TIERS if 0.9 * gb <= MEMORY_GB)  # a "24 GB" card shows less
ASPECT_RATIO, HEAD_DIM = {"full": (57, 128), "small": (64, 64), "tiny": (32, 64)}[PROFILE]  # width per layer, channels per head
KV_GROUP = 1  # query heads that share one key/value head
VALUE_EVERY = 1 if PROFILE == "tiny" else 2  # every how many layers has a value embedding (all alike compile sooner)
# A layer's attention: S the context divided by SHORT_WINDOW, L all of it; repeated; the last layer is always L.
WINDOW_PATTERN, SHORT_WINDOW = {"full": ("SSSSL", 8), "small": ("L", 2), "tiny": ("SSSL", 2)}[PROFILE]
ROPE_BASE = 200_000
QK_SCALE = 1.2  # of queries and keys after their norm: sharper attention (nanochat)
BIGRAM_RATIO = 16 if PROFILE == "tiny" else 5  # rows of the table of token pairs, in vocabularies (modded-nanogpt, record 62)
TAPS = 3  # previous tokens that a depthwise convolution mixes into the input of attention
SOFTCAP = 15.0  # logits stay within +- this

MATRIX_LR = 0.04  # Muon: the matrices of the blocks
# AdamW: embeddings, and the output matrix (tiny, at width 192: 0.01 bpb better after 600 steps than 0.6 and 0.004).
EMBEDDING_LR, UNEMBEDDING_LR = (0.3, 0.008) if PROFILE == "tiny" else (0.9, 0.005)
SCALAR_LR = 0.5  # AdamW: per-layer scales (those of the residual stream take a hundredth)
ADAM_BETAS = (0.8, 0.95)
WEIGHT_DECAY = 0.2  # Muon, falls to 0 over the run
EMBEDDING_WD, VALUE_WD, UNEMBEDDING_WD = 0.001, 0.003, 0.01  # AdamW; the high embedding rate works only with them
WARMUP_RATIO = 0.0  # share of the budget
WARMDOWN_RATIO = 0.75
FINAL_LR_FRAC = 0.05

ATTENTION = "auto"  # or fa3, flash, sdpa, plain
COMPILE = True

CHECKPOINT_EVERY = 180  # seconds, with --save
PREVIEW_EVERY = 600  # seconds: long runs are scored on some of the validation rows now and then, off the clock

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
        return self.seq_len // SHORT_WINDOW if short else self.seq_len

    def has_value_embedding(self, layer: int) -> bool:
        return layer % VALUE_EVERY == (self.n_layer - 1) % VALUE_EVERY


def norm(x):
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)  # CUDA's autocast would make the whole stream float32


def rotate(x, cos, sin):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) on the two halves of each head."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


class Shift(nn.Module):
    """Adds to every channel a learned mix of its TAPS values before: a depthwise convolution (Primer, arXiv 2109.08668)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.taps = nn.Parameter(torch.empty(TAPS, config.n_embd))

    def forward(self, x):
        return x + sum(F.pad(x, (0, 0, i, 0))[:, : x.size(1)] * tap for i, tap in enumerate(self.taps.to(x.dtype), 1))


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
        self.values = self.gate = None
        if config.has_value_embedding(layer):
            self.values = nn.Embedding(config.vocab_size, kv_dim)
            self.gate = nn.Linear(min(self.GATE_CHANNELS, config.n_embd), config.n_kv_head, bias=False)

    def forward(self, x, idx, cos, sin):
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        if self.values is not None:  # value residual, gated by the input: 1 at the start
            gate = 2 * torch.sigmoid(self.gate(x[..., : self.GATE_CHANNELS]))
            v = v + gate.unsqueeze(-1) * self.values(idx).to(v.dtype).unflatten(-1, (-1, self.head_dim))
        q, k = (QK_SCALE * norm(rotate(t, cos, sin)) for t in (q, k))  # the norm may come first: a rotation changes no length
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
        self.attention, self.mlp, self.shift = Attention(config, layer, attend), MLP(config), Shift(config)
        self.resid_scale, self.x0_scale, self.bigram_scale = (nn.Parameter(torch.empty(())) for _ in range(3))

    def forward(self, x, x0, bigram, idx, cos, sin):
        x = self.resid_scale * x + self.x0_scale * x0 + self.bigram_scale * bigram
        x = x + self.attention(self.shift(norm(x)), idx, cos, sin)
        return x + self.mlp(norm(x))


def softcap(logits):
    return SOFTCAP * torch.tanh(logits.float() / SOFTCAP)


class Head(nn.Linear):
    """The output matrix: hidden states [B, T, n_embd] -> logits float32 [B, T, vocab], or their mean loss."""

    def forward(self, x):
        return softcap(super().forward(norm(x)))

    def loss(self, x, y):
        return ChunkedLoss.apply(norm(x).flatten(0, 1), self.weight, y.flatten())


class GPT(nn.Module):
    """Token ids int64 [B, T] -> logits float32 [B, T, vocab]. Build it on the meta device, then call init_weights."""

    def __init__(self, config: GPTConfig, attend=machine.sdpa_attention):
        super().__init__()
        self.config, self.checkpointing = config, False  # checkpointing: activations are computed again in the backward pass
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.bigrams = nn.Embedding(BIGRAM_RATIO * config.vocab_size, config.n_embd)  # rows are hashes of token pairs
        self.blocks = nn.ModuleList(Block(config, i, attend) for i in range(config.n_layer))
        self.lm_head = Head(config.n_embd, config.vocab_size, bias=False)
        self.backout = nn.Parameter(torch.empty(()))
        half = config.n_embd // config.n_head // 2
        self.register_buffer("cos", torch.empty(config.seq_len, 1, half), persistent=False)
        self.register_buffer("sin", torch.empty(config.seq_len, 1, half), persistent=False)

    @torch.no_grad()
    def init_weights(self, device) -> "GPT":
        """Give a model on the meta device its memory and its first weights."""
        self.to_empty(device=device)
        bound = 0.68 * (3 / self.config.n_embd) ** 0.5  # uniform with standard deviation 0.68 * n_embd ** -0.5
        nn.init.normal_(self.wte.weight)
        nn.init.zeros_(self.bigrams.weight)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        nn.init.constant_(self.backout, 0.1)
        for i, block in enumerate(self.blocks):
            a, depth = block.attention, i / max(1, len(self.blocks) - 1)
            for part in (a.q, a.k, a.v, block.mlp.fc, *([a.values] if a.values else [])):
                nn.init.uniform_(part.weight, -bound, bound)
            for linear in (a.proj, block.mlp.proj, *([a.gate] if a.gate else [])):
                nn.init.zeros_(linear.weight)
            nn.init.zeros_(block.shift.taps)
            nn.init.constant_(block.resid_scale, 1.15 - 0.10 * depth)
            nn.init.constant_(block.x0_scale, 0.20 - 0.15 * depth)
            nn.init.constant_(block.bigram_scale, 0.1)
        half = self.cos.size(-1)
        rates = ROPE_BASE ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        angles = torch.arange(self.config.seq_len, device=device, dtype=torch.float32)[:, None, None] * rates
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())
        return self

    def trunk(self, idx):
        """What the head reads: [B, T, n_embd]."""
        dtype = self.config.dtype
        cos, sin = self.cos[: idx.size(1)].to(dtype), self.sin[: idx.size(1)].to(dtype)
        x0 = norm(self.wte(idx).to(dtype))
        x = x0.clone()  # the same tensor twice would be compiled as another kind of block
        pairs = (F.pad(idx, (1, 0))[:, :-1] * 36313 ^ idx * 27191) % self.bigrams.num_embeddings
        bigram = self.bigrams(pairs).to(dtype)
        for i, block in enumerate(self.blocks):
            if i == len(self.blocks) // 2:
                middle = x
            args = (x, x0, bigram, idx, cos, sin)
            x = checkpoint(block, *args, use_reentrant=False) if self.checkpointing and self.training else block(*args)
        return x - self.backout * middle  # what only the blocks needed is taken out again (modded-nanogpt, record 40)

    def forward(self, idx):
        with torch.set_grad_enabled(not self.checkpointing):  # the evaluator, too, finds the blocks compiled, as for training
            x = self.trunk(idx)
        return self.lm_head(x if torch.is_grad_enabled() else x.detach())

    def compile_parts(self) -> None:
        """Part by part: alike blocks share one compilation."""
        for part in (*self.blocks, self.lm_head):
            part.compile(dynamic=False)
        self.lm_head.loss = torch.compile(self.lm_head.loss, dynamic=False)

    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains."""
        return [m.weight for m in self.blocks.modules() if isinstance(m, nn.Linear)]

    def flops_per_token(self) -> int:
        """Floating-point operations of forward and backward: 6 a weight, 12 a channel and key that a query sees."""
        c = self.config
        weights = sum(p.numel() for p in self.matrices()) + self.lm_head.weight.numel()
        keys = sum(min(c.window(i), c.seq_len) for i in range(c.n_layer))
        return 6 * weights + 12 * c.n_embd * keys


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of softcap(x @ weight.T), never holding all logits: x [N, C], weight [V, C], y int64 [N].

    The gradient of a chunk is taken while its logits are at hand, in the forward pass, and written out: for another loss
    start from F.cross_entropy(model(x).flatten(0, 1), y.flatten()).
    """

    @staticmethod
    def forward(ctx, x, weight, y):
        rows = max(len(x) // 16, 2**21 // len(weight))
        w, dx, dw, total = weight.to(x.dtype), [], 0.0, 0.0
        for x_part, y_part in zip(x.split(rows), y.split(rows), strict=True):
            z = softcap(x_part @ w.T)
            log_sum = z.logsumexp(-1, keepdim=True)
            total = total + (log_sum - z.gather(1, y_part[:, None])).sum()
            target = torch.arange(len(w), device=y.device) == y_part[:, None]
            dz = (((z - log_sum).exp() - target.float()) * (1 - (z / SOFTCAP).square())).to(x.dtype)
            dx.append(dz @ w)
            dw = dw + (dz.T @ x_part).float()
        ctx.save_for_backward(torch.cat(dx), dw)
        return total / len(x)

    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        scale = grad / len(dx)
        return (dx * scale).to(dx.dtype), dw * scale, None


def train_loss(model: GPT, x, y):
    return model.lm_head.loss(model.trunk(x), y)


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
    momenta.add_((1 - mu) * (g - momenta))  # lerp_ has given wrong numbers on MPS
    update = orthogonalize(g + mu * (momenta - g), dtype).to(g.dtype)
    rows, cols = update.shape[-2:]
    dim = -1 if rows >= cols else -2
    variances.add_((1 - beta2) * (update.square().mean(dim, keepdim=True) - variances))
    scaled = update * (variances + 1e-10).rsqrt()
    # the normalization changes directions between neurons, not the size of the step
    update = scaled * (update.norm(dim=(-2, -1), keepdim=True) / (scaled.norm(dim=(-2, -1), keepdim=True) + 1e-10))
    lr = lr * max(1, rows / cols) ** 0.5
    for p, u in zip(params, update.unbind(), strict=True):
        p.sub_(lr * u + lr * wd * p * (u * p >= 0))


def adamw_update(params, grads, firsts, seconds, lrs, wds, t, beta1: float, beta2: float, eps: float = 1e-10):
    """One AdamW step (arXiv 1711.05101) in place; lrs, wds: one 0-dim tensor a parameter, t: step from 1."""
    for p, g, m, v, lr, wd in zip(params, grads, firsts, seconds, lrs, wds, strict=True):
        m.add_((1 - beta1) * (g - m))
        v.add_((1 - beta2) * (g.square() - v))
        p.sub_(lr * wd * p + lr / (1 - beta1**t) * m / ((v / (1 - beta2**t)).sqrt() + eps))


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups of kind "muon" (same shape within a group), AdamW for those of kind "adamw".

    Rates are read from the groups at every step and reach the compiled updates as tensors: a new rate recompiles nothing.
    Of several ranks each updates its share of the matrices and of the tables' rows, then they exchange the results.
    """

    def __init__(self, groups, dtype: torch.dtype, compile: bool):
        super().__init__(groups, {"weight_decay": 0.0, "momentum": 0.95, "beta2": 0.95})
        wrap = (lambda f: torch.compile(f, dynamic=False, fullgraph=True)) if compile else (lambda f: f)
        self.dtype, self.update = dtype, wrap(self._update)

    def _update(self, adamw, muon, t):
        adamw_update(*adamw, t, *ADAM_BETAS)
        for group in muon:
            muon_update(*group, self.dtype)

    @torch.no_grad()
    def step(self):
        rank, world = prepare.ranks()
        adamw, muon, shares = [[] for _ in range(6)], [], []
        for group in self.param_groups:
            params, lr = group["params"], torch.tensor(group["lr"])
            wd = torch.tensor(group["weight_decay"])
            if group["kind"] == "adamw":
                for p in params:
                    split = world > 1 and p.dim() == 2 and len(p) % world == 0
                    mine, grad = (p.chunk(world)[rank], p.grad.chunk(world)[rank]) if split else (p, p.grad)
                    shares += [(p.chunk(world), [mine])] if split else []
                    state = self.state[p] = self.state[p] or {"m": torch.zeros_like(mine), "v": torch.zeros_like(mine), "t": 0}
                    state["t"] += 1
                    t = state["t"]
                    for column, value in zip(adamw, (mine, grad, state["m"], state["v"], lr, wd), strict=True):
                        column.append(value)
            else:
                share = -(-len(params) // world)  # where it does not divide, some matrices are updated twice, alike
                mine = [params[i % len(params)] for i in range(rank * share, (rank + 1) * share)]
                shares += [(params, mine)] if world > 1 else []
                state = self.state[params[0]]
                if not state:
                    rows, cols = params[0].shape
                    state["m"] = params[0].new_zeros(share, rows, cols)
                    state["v"] = params[0].new_zeros(share, *((rows, 1) if rows >= cols else (1, cols)))
                momentum, beta2 = torch.tensor(group["momentum"]), torch.tensor(group["beta2"])
                muon.append((mine, [p.grad for p in mine], state["m"], state["v"], lr, wd, momentum, beta2))
        self.update(adamw, muon, torch.tensor(float(t)))
        for parts, mine in shares:
            mine = torch.stack(mine)
            everyones = mine.new_empty(world * len(mine), *mine.shape[1:])
            dist.all_gather_single(everyones, mine)
            for part, new in zip(parts, everyones, strict=False):
                part.copy_(new)


def build_optimizer(model: GPT, dtype: torch.dtype, compile: bool) -> MuonAdamW:
    scale = (model.config.n_embd / 768) ** -0.5  # Adam's rates were tuned at width 768
    values = nn.ModuleList(b.attention.values for b in model.blocks if b.attention.values)
    groups = [
        {"params": [model.wte.weight, model.bigrams.weight], "lr": EMBEDDING_LR * scale, "weight_decay": EMBEDDING_WD},
        {"params": [*values.parameters()], "lr": EMBEDDING_LR * scale, "weight_decay": VALUE_WD},
        {"params": [model.lm_head.weight], "lr": UNEMBEDDING_LR * scale, "weight_decay": UNEMBEDDING_WD},
        {"params": [b.shift.taps for b in model.blocks], "lr": SCALAR_LR * 0.1},
        {"params": [model.backout, *(b.resid_scale for b in model.blocks)], "lr": SCALAR_LR * 0.01},
        {"params": [s for b in model.blocks for s in (b.x0_scale, b.bigram_scale)], "lr": SCALAR_LR},
    ]
    groups = [group | {"kind": "adamw"} for group in groups]
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
            group["momentum"] = 0.85 + 0.12 * min(step / 400, 1)  # nanochat
            group["weight_decay"] = WEIGHT_DECAY * (1 - progress)


# ---------------------------------------------------------------------------- loop


class Diverged(Exception):
    """The loss is no number any more, or far above that of guessing."""


def build_config(vocab_size: int, dtype: torch.dtype) -> GPTConfig:
    """The model that the knobs describe. Raises UserError for knobs that do not fit together, with a good value."""
    n_head = -(-DEPTH * ASPECT_RATIO // HEAD_DIM)
    if min(DEPTH, ASPECT_RATIO, HEAD_DIM, DEVICE_BATCH_SIZE, TOTAL_BATCH_SIZE, KV_GROUP) < 1 or HEAD_DIM % 2:
        raise UserError(f"sizes must be positive and HEAD_DIM even: {DEPTH=}, {ASPECT_RATIO=}, {HEAD_DIM=}, {KV_GROUP=}")
    if n_head % KV_GROUP:
        good = [g for g in range(1, n_head + 1) if n_head % g == 0]
        raise UserError(f"{n_head} heads do not divide into groups of {KV_GROUP=}. hint: one of {good}")
    if not WINDOW_PATTERN or set(WINDOW_PATTERN) - set("SL"):
        raise UserError(f"{WINDOW_PATTERN=} may hold only S and L")
    return GPTConfig(vocab_size, MAX_SEQ_LEN, DEPTH, n_head, n_head // KV_GROUP, n_head * HEAD_DIM, WINDOW_PATTERN, dtype)


def split_batch(world: int) -> tuple[int, int]:
    """(rows of each rank in a step, rows of each forward pass). Raises UserError where TOTAL_BATCH_SIZE does not divide."""
    rows = TOTAL_BATCH_SIZE // (MAX_SEQ_LEN * world)
    micro = min(DEVICE_BATCH_SIZE, max(rows, 1))
    unit = micro * MAX_SEQ_LEN * world
    if TOTAL_BATCH_SIZE % unit:
        good = [n for n in (TOTAL_BATCH_SIZE // unit * unit, TOTAL_BATCH_SIZE // unit * unit + unit) if n]
        raise UserError(
            f"{TOTAL_BATCH_SIZE=} is not a multiple of {micro} rows x {MAX_SEQ_LEN} tokens x {world} ranks = {unit}. "
            f"hint: TOTAL_BATCH_SIZE = {' or '.join(map(str, good))}, or another DEVICE_BATCH_SIZE"
        )
    return rows, micro


def grad_norms(optimizer) -> dict:
    """{"muon": norm of all its gradients, "adamw": ...} as 0-dim tensors."""
    kinds = {}
    for group in optimizer.param_groups:
        kinds.setdefault(group["kind"], []).extend(p.grad for p in group["params"])
    return {kind: torch.nn.utils.get_total_norm(grads) for kind, grads in kinds.items()}


@torch.no_grad()
def sample(model: GPT, x, start: int, end: int):
    """Token ids int64 [B, T] with positions start ... end-1 drawn anew from the model, each from all before it."""
    for i in range(start, end):
        x[:, i] = model(x)[:, i - 1].softmax(-1).multinomial(1)[:, 0]
    return x


def show(line: str, last: bool = False) -> None:
    """Progress: one rewritten line on a terminal, plain lines in a log."""
    if sys.stdout.isatty():
        print(f"\r{line}\033[K", end="\n" if last else "", flush=True)
    else:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the model for the time budget.")
    parser.add_argument("--save", action="store_true", help=f"keep the two newest checkpoints in {machine.CHECKPOINTS}/")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, and keep saving")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="at the end write N continuations of training text")
    args = parser.parse_args()
    saving = args.save or args.resume
    # Kept, so that a second run starts in seconds. Set, not defaulted: importing torch has named a folder in /tmp already.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(prepare.ROOT / "compiled")
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(timeout=timedelta(minutes=10))  # a first compilation can keep the others waiting
    rank, world = prepare.ranks()
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (rank 0 alone prints)
    dtype = machine.compute_dtype(device)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_directory()
    config = build_config(tokenizer.get_vocab_size(), dtype)
    rank_rows, rows = split_batch(world)
    why_eager = machine.can_compile(device) if COMPILE else "COMPILE is off"
    attend, attention = machine.pick_attention(config, device, ATTENTION)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = GPT(config, attend)
    model.init_weights(device)
    optimizer = build_optimizer(model, dtype, compile=not why_eager)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)  # gradients below float16 would become 0
    n_params = sum(p.numel() for p in model.parameters())
    peak, peak_source = machine.peak_flops(device, dtype)
    mfu_of_speed = 100 * model.flops_per_token() / peak / world
    with torch.no_grad(), autocast:
        stream = model.trunk(torch.zeros(1, 8, dtype=torch.int64, device=device)).dtype  # wider: something promotes it
    if not why_eager:
        model.compile_parts()
    data_id = prepare.load_manifest(prepare.CACHE)["data_id"]
    print(f"data       {PROFILE}, data_id {data_id}, seed {SEED}")
    print(f"model      {config.n_layer} layers, width {config.n_embd}, {config.n_head} heads, {n_params / 1e6:.1f} M parameters")
    print(f"device     {world} x {device.type}, {f'eager ({why_eager})' if why_eager else 'compiled'}")
    print(f"precision  {str(dtype)[6:]}, residual stream {str(stream)[6:]}")
    print(f"attention  {attention}")
    print(f"peak       {peak / 1e12:.2f} TFLOP/s ({peak_source})", flush=True)

    def micro_step():
        with autocast:
            loss = train_loss(model, x, y) * (rows / rank_rows / world)
        scaler.scale(loss).backward()
        return loss.detach()

    def add_up(p):  # over the ranks, as soon as the last micro-step has a gradient, while the backward pass goes on
        if last:
            sums.append(dist.all_reduce(p.grad, async_op=True))

    last, sums = False, []
    for p in model.parameters() if world > 1 else []:
        p.register_post_accumulate_grad_hook(add_up)

    clock = Clock()
    with clock.warmup(model, optimizer):  # compiles, and finds what fits into memory; its steps are undone
        while True:
            loader = prepare.make_dataloader(tokenizer, rows, MAX_SEQ_LEN, "train")
            x, y, epoch = next(loader)
            if machine.fits(micro_step, optimizer):
                break
            if rows == 1 and model.checkpointing:
                raise torch.OutOfMemoryError("one row does not fit, even with activation checkpointing. hint: a smaller model")
            model.checkpointing = rows == 1
            rows = next(n for n in range(max(rows // 2, 1), 0, -1) if rank_rows % n == 0)
            print(f"memory     out of memory: {rows} rows at a time{', activation checkpointing' * model.checkpointing}")
            optimizer.zero_grad(set_to_none=True)
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    grad_accum_steps = rank_rows // rows
    print(f"batch      {TOTAL_BATCH_SIZE} tokens = {world} ranks x {grad_accum_steps} x {rows} rows x {MAX_SEQ_LEN}", flush=True)
    gc.collect()
    gc.freeze()  # a collection in the middle of a run costs half a second
    gc.disable()

    began = time.localtime(prepare.sum_over_ranks(time.time() if rank == 0 else 0.0))  # one folder for all ranks
    step, smooth, elapsed, folder = 0, 0.0, 0.0, machine.CHECKPOINTS / time.strftime("%Y%m%d-%H%M%S", began)
    like = {"data": data_id, "seed": SEED, "budget": TIME_BUDGET, "batch": TOTAL_BATCH_SIZE, "ranks": world, "model": str(config)}

    def save():
        state = {"like": like, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        state |= {"step": step, "smooth": smooth, "used": elapsed, "rng": torch.get_rng_state()}
        machine.save_checkpoint(folder, step, state)

    if args.resume:
        folder, state = machine.load_checkpoint(like, device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"].cpu())
        step, smooth, elapsed = state["step"], state["smooth"], state["used"]
        loader = prepare.make_dataloader(tokenizer, rows, MAX_SEQ_LEN, "train", skip=step * grad_accum_steps)
        x, y, epoch = next(loader)
        print(f"resumed    {folder}, step {step}, {elapsed:.0f} s", flush=True)

    run_dir = os.environ.get("AUTORESEARCH_RUN_DIR") if rank == 0 else None
    startup_seconds = time.perf_counter() - prepare.STARTED
    clock.start(elapsed)
    shown, recorded, saved, previewed, curve, queue = elapsed, -math.inf, elapsed, elapsed, [], []
    explodes = 2 * math.log(config.vocab_size)
    while not clock.done():
        set_schedules(optimizer, clock.progress(), step)
        loss = 0.0
        for i in range(grad_accum_steps):
            last = i == grad_accum_steps - 1
            loss = loss + micro_step()
            x, y, epoch = next(loader)
        if world > 1:
            sums.append(dist.all_reduce(loss, async_op=True))
        while sums:
            sums.pop(0).wait()
        scaler.step(optimizer)
        scaler.update()
        step += 1
        elapsed, norms = clock.progress() * TIME_BUDGET, None
        if run_dir and elapsed - recorded > TIME_BUDGET / 300:
            recorded, norms = elapsed, grad_norms(optimizer)
        optimizer.zero_grad(set_to_none=True)
        queue.append((step, elapsed, loss, norms))
        if step > 1 or device.type == "cpu":  # a GPU is asked for the step before this one: it never waits for us
            at, then, loss, norms = queue.pop(0)
            value = loss.item()
            if not value <= explodes:
                raise Diverged(f"loss {value:.3f} at step {at} (guessing has {explodes / 2:.3f})")
            smooth += (value - smooth) / min(at, 50)
            if norms:
                line = {"step": at, "elapsed": then, "loss": value, "lrm": lr_multiplier(clock.progress())}
                line["grad_norm"] = {kind: norm.item() for kind, norm in norms.items()}
                line |= {"tokens_per_second": at * TOTAL_BATCH_SIZE / then, "memory_mb": machine.peak_memory_mb(device)}
                with open(Path(run_dir, "steps.jsonl"), "a") as f:
                    f.write(json.dumps(line) + "\n")
        if elapsed - shown > (0.2 if sys.stdout.isatty() else 5):
            shown, speed = elapsed, step * TOTAL_BATCH_SIZE / elapsed
            show(
                f"step {step:6d} | {100 * clock.progress():5.1f}% | loss {smooth:.4f} | {speed / 1e3:.1f} k tokens/s | "
                f"mfu {mfu_of_speed * speed:.1f}% | epoch {epoch} | {TIME_BUDGET - elapsed:.0f} s left"
            )
        if saving and elapsed - saved > CHECKPOINT_EVERY:
            saved = elapsed
            save()
        if elapsed - previewed > PREVIEW_EVERY:
            previewed = elapsed
            with autocast:
                curve.append(f"{elapsed:.0f} s {prepare.preview_bpb(model, rows):.4f}")
            show(f"preview    bits per byte: {', '.join(curve)}", last=True)
    clock.stop()
    if saving:
        save()
    training_seconds, tokens = clock.elapsed(), step * TOTAL_BATCH_SIZE
    speed = tokens / training_seconds
    show(f"step {step:6d} | 100.0% | loss {smooth:.4f} | {speed / 1e3:.1f} k tokens/s", last=True)
    if mfu_of_speed * speed > 100:
        print(f"mfu        over 100% cannot be: the peak of {peak / 1e12:.1f} TFLOP/s ({peak_source}) is wrong for this device")

    start = time.perf_counter()
    with autocast:
        val_bpb = evaluate_bpb(model, tokenizer, rows)
    now = time.perf_counter()
    summary = {  # name: value, decimals
        "val_bpb": (val_bpb, 6), "training_seconds": (training_seconds, 1), "total_seconds": (now - prepare.STARTED, 1),
        "startup_seconds": (startup_seconds, 1), "eval_seconds": (now - start, 1),
        "peak_vram_mb": (machine.peak_memory_mb(device), 1), "mfu_percent": (mfu_of_speed * speed, 2),
        "total_tokens_M": (tokens / 1e6, 1), "num_steps": (step, 0), "num_params_M": (n_params / 1e6, 1), "depth": (DEPTH, 0),
    }  # fmt: skip
    for _ in range(-(-args.sample // rows)):  # a quarter of a training row, and what the model makes of it
        with autocast:
            drawn = sample(model, next(loader)[0], MAX_SEQ_LEN // 4, MAX_SEQ_LEN // 2)[:, : MAX_SEQ_LEN // 2].tolist()
        for ids in drawn[: args.sample]:
            text = tokenizer.decode(ids[: MAX_SEQ_LEN // 4]) + " >>> " + tokenizer.decode(ids[MAX_SEQ_LEN // 4 :])
            print("sample\n" + re.sub("(?m)^", "  | ", text))  # never at the start of a line: it could look like a METRIC
        args.sample -= rows
    print("---")
    for name, (value, decimals) in summary.items():
        print(f"{name + ':':<18}{value:.{decimals}f}")
    del summary["depth"]
    for name, (value, decimals) in summary.items():
        print(f"\nMETRIC {name.replace('vram', 'memory').lower()}={value:.{decimals}f}", end="", flush=True)
    print(flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    codes = {UserError: 2, Diverged: 3, torch.OutOfMemoryError: 4, MemoryError: 4, VoidScore: 5}
    try:
        main()
    except tuple(codes) as error:
        print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(next(code for kind, code in codes.items() if isinstance(error, kind)))
