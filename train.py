"""A GPT trained for a fixed time: the one file that an agent edits.

    uv run train.py                      train for the time budget, print the score
    uv run train.py --save               keep the two newest checkpoints in checkpoints/
    uv run train.py --resume [PATH]      go on from the newest checkpoint (or that one), keep saving
    uv run train.py --sample N           afterwards, let the model continue N training texts
    uv run torchrun --standalone --nproc-per-node=8 train.py        on 8 GPUs

prepare.py decides the number (data, clock, evaluation), harness/ holds what no experiment changes:
both are fixed.
Exit codes: 0 done, 1 crash, 2 refused knobs or missing data, 3 diverged, 4 out of memory,
5 the evaluator refused the model.
"""

import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # GPU memory fragments less

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint

import prepare
from harness import checkpoint as checkpoints
from harness import compiler, parameters
from harness import device as machine
from harness.attention import fa3_kernel, pick_attention
from harness.common import UserError, ceil_div
from harness.exit_codes import exit_codes
from harness.training_log import TrainingLog, print_samples
from prepare import Clock, Tokenizer, evaluate_bpb, make_dataloader

with exit_codes():  # a wrong environment variable ends here
    from prepare import MAX_SEQ_LEN, PROFILE, SEED, TIME_BUDGET

# ------------------------------ knobs

# First the values of the profile "full" (a GPU with 16 GB or more), then what smaller profiles
# change. Where no source is named, 125 published runs of an agent on an H100 kept them
# (karpathy/autoresearch, pull request 44); they were not measured here.

# Model
DEPTH = 9  # layers
ASPECT_RATIO = 57  # width = DEPTH * ASPECT_RATIO, rounded up to whole heads: here 513 -> 640
HEAD_DIM = 128  # channels of an attention head
KV_GROUP = 1  # query heads that share a key/value head
MLP_RATIO = 4  # hidden channels of an MLP per channel of the model
WINDOW_PATTERN = "SSSSL"  # attention of each layer, repeated: S short, L full; the last is full
SHORT_WINDOW = 8  # a short window is the context divided by this
ROPE_BASE = 200_000
QK_SCALE = 1.2  # of queries and keys after their norm: sharper attention (nanochat)
VALUE_EVERY = 2  # every second layer has a value embedding, counted back from the last
GATE_CHANNELS = 32  # channels that a value embedding's gate reads
SHIFT_TAPS = 3  # earlier tokens that TokenShift mixes into the input of attention
BIGRAM_RATIO = 5  # rows of the table of token pairs, in vocabularies
BIGRAM_HASH = (36313, 27191)  # multipliers of the pair's two tokens
SOFTCAP = 15.0  # logits stay between -SOFTCAP and SOFTCAP

# Initial values; where nothing is named here, see init_weights
INIT_SCALE = 0.68  # of q, k, v, MLP input, value embeddings: standard deviation * sqrt(width)
HEAD_INIT_STD = 0.001  # of the output matrix: the first predictions are nearly uniform
RESID_LAMBDA = (1.15, 1.05)  # factor of the residual stream, in the first and in the last layer
X0_LAMBDA = (0.20, 0.05)  # of the token embedding, the same way
BIGRAM_LAMBDA = 0.1  # of the pair embedding
BACKOUT_LAMBDA = 0.1  # of the stream before the middle layer, subtracted at the end

# Batch
TOTAL_BATCH_SIZE = 2**18  # tokens per optimizer step
DEVICE_BATCH_SIZE = 128  # rows per forward pass; automatically fewer if memory runs out
MAX_LOGITS = 2**27  # logits in memory at once; above this the loss is computed in chunks

# Rates
MATRIX_LR = 0.04  # Muon: the matrices of the blocks
EMBEDDING_LR = 0.9  # AdamW: all embeddings, times sqrt(768 / width)
UNEMBEDDING_LR = 0.005  # AdamW: the output matrix, times sqrt(768 / width)
LAMBDA_LR = 0.5  # AdamW: the factors of token and pair embedding
RESID_LR = 0.005  # AdamW: the factors of the residual stream and of backout
SHIFT_LR = 0.05  # AdamW: the taps of TokenShift
WEIGHT_DECAY = 0.2  # Muon; falls to 0 over the run
EMBEDDING_WD = 0.001  # AdamW; the high EMBEDDING_LR needed it
VALUE_WD = 0.003  # AdamW: value embeddings
UNEMBEDDING_WD = 0.01
ADAM_BETAS = (0.8, 0.95)
ADAM_EPS = 1e-10
MUON_BETA2 = 0.95  # of the running mean square of each neuron's update
MUON_MOMENTUM = (0.85, 0.97)  # at the first step, and from MUON_MOMENTUM_STEPS on (nanochat)
MUON_MOMENTUM_STEPS = 400  # steps, not time: a slow machine may never get there

# Schedule, in shares of the time budget
WARMUP_RATIO = 0.0
WARMDOWN_RATIO = 0.75
FINAL_LR_FRAC = 0.05  # of every rate, at the end

# Machine
ATTENTION = "auto"  # or one of ATTENTION_BACKENDS
COMPILE = True
CHECKPOINT_EVERY = 180  # seconds, with --save; saving uses time of the budget
PREVIEW_EVERY = 600  # seconds: long runs show a score on other text; the clock stands still

if PROFILE == "small":  # smaller GPUs, Apple's MPS
    DEPTH = 6
    ASPECT_RATIO = 64
    HEAD_DIM = 64
    WINDOW_PATTERN = "L"  # without flash attention short windows cost more than they save
    TOTAL_BATCH_SIZE = 2**14
    DEVICE_BATCH_SIZE = 16
elif PROFILE == "tiny":  # CPU; width 128; rates were chosen at width 192 on two cores
    DEPTH = 4
    ASPECT_RATIO = 32
    HEAD_DIM = 64
    WINDOW_PATTERN = "SSSL"
    SHORT_WINDOW = 2
    VALUE_EVERY = 1  # identical layers share one compilation
    BIGRAM_RATIO = 64
    TOTAL_BATCH_SIZE = 2**12
    DEVICE_BATCH_SIZE = 16
    EMBEDDING_LR = 0.3
    UNEMBEDDING_LR = 0.008  # 0.3 and 0.008 beat 0.6 and 0.004 by 0.01 bpb after 600 steps

# ------------------------------ attention

# Every backend takes q [B, T, H, D] and k, v [B, T, H / KV_GROUP, D], returns [B, T, H, D] and
# means the same: query i sees the keys i-window ... i.


def in_blocks(attend, q, k, v, window: int):
    """attend(q, k, v, mask) on [B, H, T, D], block by block of queries with the keys they see."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    seq_len = q.size(2)
    size = max(64, min(window, seq_len // 2))  # smaller ones compile longer
    out = []
    for start in range(0, seq_len, size):
        end = min(start + size, seq_len)
        first = max(0, start - window)
        queries = torch.arange(start, end, device=q.device)[:, None]
        distance = queries - torch.arange(first, end, device=q.device)
        mask = (distance >= 0) & (distance <= window)
        out.append(attend(q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], mask))
    return torch.cat(out, 2).transpose(1, 2)


def plain_attention(q, k, v, window: int):
    """Two products and a float32 softmax: on a CPU, compiled, faster than torch's own kernel."""

    def attend(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)).float() * q.size(-1) ** -0.5
        return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v

    group = q.size(2) // k.size(2)
    k = k.repeat_interleave(group, 2)
    v = v.repeat_interleave(group, 2)
    return in_blocks(attend, q, k, v, window)


def sdpa_attention(q, k, v, window: int):
    """torch's scaled_dot_product_attention, which knows causal but no windows."""
    gqa = q.size(2) != k.size(2)

    def attend(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

    if window < q.size(1) - 1:
        return in_blocks(attend, q, k, v, window)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    return out.transpose(1, 2)


def flash_attention(q, k, v, window: int):
    """Flash Attention 2 as built into torch for CUDA, from Ampere on: knows windows."""
    batch, seq_len = q.shape[:2]
    tokens = batch * seq_len
    starts = torch.arange(0, tokens + 1, seq_len, dtype=torch.int32, device=q.device)
    gqa = q.size(2) != k.size(2)
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    options = {"window_size": (window, 0), "enable_gqa": gqa}
    out = varlen_attn(q, k, v, starts, starts, seq_len, seq_len, **options)
    return out.unflatten(0, (batch, seq_len))


def fa3_attention(q, k, v, window: int):
    """Flash Attention 3, for Hopper GPUs: a kernel that prepare.py has downloaded."""
    return fa3_kernel.flash_attn_func(q, k, v, causal=True, window_size=(window, 0))


ATTENTION_BACKENDS = {
    "fa3": fa3_attention,
    "flash": flash_attention,
    "sdpa": sdpa_attention,
    "plain": plain_attention,
}

# ------------------------------ model


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
        """How many earlier tokens a query of this layer sees."""
        kind = self.window_pattern[layer % len(self.window_pattern)]
        last = layer == self.n_layer - 1
        return self.seq_len if last or kind == "L" else self.seq_len // SHORT_WINDOW

    def has_value_embedding(self, layer: int) -> bool:
        """The last layer has one, and every VALUE_EVERY-th before it."""
        return layer % VALUE_EVERY == (self.n_layer - 1) % VALUE_EVERY


def norm(x):
    """RMSNorm without weights, in the type of x (CUDA's autocast would return float32)."""
    return F.rms_norm(x, (x.size(-1),)).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) on the two halves of each head."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def between(ends: tuple[float, float], share: float) -> float:
    """The value at this share of the way from the first of the two ends to the last."""
    return ends[0] + (ends[1] - ends[0]) * share


class TokenShift(nn.Module):
    """Adds to each channel a learned mix of its values at the SHIFT_TAPS tokens before.

    A depthwise convolution, as in Primer (arXiv 2109.08668) but on the input of q, k and v: local
    patterns need no attention head.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.taps = nn.Parameter(torch.empty(SHIFT_TAPS, config.n_embd))

    def forward(self, x):
        position = torch.arange(x.size(1), device=x.device)[:, None]
        y = x
        for distance, tap in enumerate(self.taps.to(x.dtype), start=1):
            # Roll and mask: compiled, this keeps less for the backward pass than padded copies
            y = y + torch.where(position >= distance, x.roll(distance, 1), 0) * tap
        return y


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, attend):
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.window = config.window(layer)
        self.attend = attend
        kv_dim = config.n_kv_head * self.head_dim
        self.q_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k_proj = nn.Linear(config.n_embd, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.n_embd, kv_dim, bias=False)
        self.out_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.value_embed = None
        self.ve_gate = None
        if config.has_value_embedding(layer):
            gate_channels = min(GATE_CHANNELS, config.n_embd)
            self.value_embed = nn.Embedding(config.vocab_size, kv_dim)
            self.ve_gate = nn.Linear(gate_channels, config.n_kv_head, bias=False)

    def forward(self, x, value, cos, sin):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if value is not None:
            # A second embedding of the token, straight into the values: capacity for almost no
            # arithmetic. The gate is 1 at first (modded-nanogpt, nanochat).
            gate = 2 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate.in_features]))
            v = v + gate.unsqueeze(-1) * value.unflatten(-1, (-1, self.head_dim))
        q = QK_SCALE * norm(rotate(q, cos, sin))
        k = QK_SCALE * norm(rotate(k, cos, sin))
        return self.out_proj(self.attend(q, k, v, self.window).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, MLP_RATIO * config.n_embd, bias=False)
        self.proj = nn.Linear(MLP_RATIO * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.proj(F.relu(self.fc(x)).square())  # squared ReLU (Primer, arXiv 2109.08668)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int, attend):
        super().__init__()
        self.shift = TokenShift(config)
        self.attention = Attention(config, layer, attend)
        self.mlp = MLP(config)
        self.resid_lambda = nn.Parameter(torch.empty(()))
        self.x0_lambda = nn.Parameter(torch.empty(()))
        self.bigram_lambda = nn.Parameter(torch.empty(()))

    def forward(self, x, x0, bigram, value, cos, sin):
        # Every layer sees token (x0) and pair (bigram) again, so the stream need not carry them
        # (modded-nanogpt; x0 also in nanochat).
        x = self.resid_lambda * x + self.x0_lambda * x0 + self.bigram_lambda * bigram
        x = x + self.attention(self.shift(norm(x)), value, cos, sin)
        return x + self.mlp(norm(x))


def softcap(logits):
    """Keeps logits within +-SOFTCAP (Gemma 2); faster than tanh (modded-nanogpt)."""
    return logits * torch.rsqrt(1 + (logits / SOFTCAP) ** 2)


class GPT(nn.Module):
    """model(idx) gives logits, model(idx, targets) their mean cross-entropy, by the same code.

    idx and targets: int64 [B, T]; logits: float32 [B, T, vocab]; loss: float32, 0-dim.
    Build it on the meta device and let harness.parameters.initialize give it memory and values.
    """

    def __init__(self, config: GPTConfig, attend=sdpa_attention):
        super().__init__()
        self.config = config
        self.checkpointing = False  # True: the backward pass computes activations a second time
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        # A hashed table of token pairs: pairs are learned without a layer (modded-nanogpt)
        self.bigram_embed = nn.Embedding(BIGRAM_RATIO * config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i, attend) for i in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.backout_lambda = nn.Parameter(torch.empty(()))
        half = config.n_embd // config.n_head // 2
        self.register_buffer("cos", torch.empty(config.seq_len, 1, half), persistent=False)
        self.register_buffer("sin", torch.empty(config.seq_len, 1, half), persistent=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Every parameter and float buffer needs a line here: one that is forgotten is refused."""
        bound = INIT_SCALE * (3 / self.config.n_embd) ** 0.5
        nn.init.normal_(self.wte.weight)
        nn.init.zeros_(self.bigram_embed.weight)
        nn.init.normal_(self.lm_head.weight, std=HEAD_INIT_STD)
        nn.init.constant_(self.backout_lambda, BACKOUT_LAMBDA)
        for i, block in enumerate(self.blocks):
            attention, mlp = block.attention, block.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.fc):
                nn.init.uniform_(linear.weight, -bound, bound)
            for linear in (attention.out_proj, mlp.proj):  # a block adds nothing at first
                nn.init.zeros_(linear.weight)
            if attention.value_embed is not None:
                nn.init.uniform_(attention.value_embed.weight, -bound, bound)
                nn.init.zeros_(attention.ve_gate.weight)
            nn.init.zeros_(block.shift.taps)
            depth = i / max(1, len(self.blocks) - 1)
            nn.init.constant_(block.resid_lambda, between(RESID_LAMBDA, depth))
            nn.init.constant_(block.x0_lambda, between(X0_LAMBDA, depth))
            nn.init.constant_(block.bigram_lambda, BIGRAM_LAMBDA)
        half = self.cos.size(-1)
        channel = torch.arange(half, device=self.cos.device, dtype=torch.float32)
        position = torch.arange(self.config.seq_len, device=self.cos.device, dtype=torch.float32)
        angles = position[:, None, None] * ROPE_BASE ** (-channel / half)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def pair_hash(self, idx):
        """Row in the table of token pairs, for each token and the one before it (id 0 at first)."""
        first, second = BIGRAM_HASH
        previous = F.pad(idx, (1, 0))[:, :-1]
        return ((previous * first) ^ (idx * second)) % self.bigram_embed.num_embeddings

    def hidden_states(self, idx):
        """What the output matrix reads: [B, T, n_embd]."""
        dtype = self.config.dtype
        cos = self.cos[: idx.size(1)].to(dtype)
        sin = self.sin[: idx.size(1)].to(dtype)
        bigram = self.bigram_embed(self.pair_hash(idx)).to(dtype)
        x0 = norm(self.wte(idx).to(dtype))
        x = x0.clone()  # if it were the same tensor, the first block would be compiled separately
        for i, block in enumerate(self.blocks):
            if i == len(self.blocks) // 2:
                middle = x
            # Looked up outside of the compiled block: there its gradient would be slow
            value_embed = block.attention.value_embed
            value = None if value_embed is None else value_embed(idx).to(dtype)
            inputs = (x, x0, bigram, value, cos, sin)
            if self.checkpointing and self.training:
                x = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x = block(*inputs)
        # Backout: subtracts a part of the middle stream, which later layers needed as context and
        # the output matrix does not (modded-nanogpt, record 40)
        return x - self.backout_lambda * middle

    def logits(self, hidden):
        """[..., n_embd] -> float32 [..., vocab]."""
        return softcap(self.lm_head(norm(hidden)).float())

    def loss_sum(self, hidden, targets):
        """Summed cross-entropy in nats: hidden [N, n_embd], targets [N]."""
        return F.cross_entropy(self.logits(hidden), targets, reduction="sum")

    def forward(self, idx, targets=None):
        # In evaluation too with gradients: otherwise the blocks would be compiled a second time
        with torch.set_grad_enabled(not self.checkpointing or torch.is_grad_enabled()):
            hidden = self.hidden_states(idx)
        if targets is None:
            return self.logits(hidden)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        chunks = ceil_div(len(targets) * self.config.vocab_size, MAX_LOGITS)
        if chunks == 1:
            return self.loss_sum(hidden, targets) / len(targets)
        total = 0.0
        for part, wanted in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True):
            # The logits of a chunk are freed at once and computed again in the backward pass
            total = total + checkpoint(self.loss_sum, part, wanted, use_reentrant=False)
        return total / len(targets)

    def compile_parts(self, by_block: bool) -> None:
        """Compile the parts of forward; by_block: identical blocks share one compilation."""
        if by_block:
            for block in self.blocks:
                block.compile(dynamic=False)
        else:
            self.hidden_states = torch.compile(self.hidden_states, dynamic=False)
        self.logits = torch.compile(self.logits, dynamic=False)
        self.loss_sum = torch.compile(self.loss_sum, dynamic=False)

    def matrices(self) -> list[nn.Parameter]:
        """What Muon trains: the weights of all nn.Linear in the blocks."""
        return [m.weight for m in self.blocks.modules() if isinstance(m, nn.Linear)]

    def flops_per_token(self) -> int:
        """Of forward and backward: 6 per weight, 12 per channel and key in the window."""
        weights = sum(p.numel() for p in self.matrices()) + self.lm_head.weight.numel()
        keys = sum(self.config.window(i) for i in range(self.config.n_layer))
        return 6 * weights + 12 * self.config.n_embd * keys


# ------------------------------ optimizer

# Polar Express (arXiv 2505.16932): the odd polynomials that bring singular values to 1 fastest
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(g, dtype: torch.dtype):
    """The nearest orthogonal matrices to g [n, rows, cols], roughly: singular values near 1."""
    # Before the cast: small gradients would be lost in float16. 1.02: the polynomials need
    # singular values of at most 1, also after rounding.
    g = g / (g.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-12)
    tall = g.size(-2) > g.size(-1)
    x = (g.mT if tall else g).to(dtype)
    for a, b, c in POLAR_EXPRESS:
        s = x @ x.mT
        s = torch.baddbmm(s, s, s, beta=b, alpha=c)  # b s + c s s
        x = torch.baddbmm(x, s, x, beta=a)  # a x + s x
    return x.mT if tall else x


def muon_update(params, grads, momenta, variances, lr, wd, mu, dtype: torch.dtype):
    """One step of Muon (Keller Jordan, 2024) on matrices of one shape, in place, as one batch.

    Nesterov momentum, orthogonalization, normalization per neuron (NorMuon, arXiv 2510.05491), and
    weight decay only where it agrees with the update (arXiv 2510.12402).

    params, grads: lists of n [rows, cols]; momenta: [n, rows, cols]; variances: the same with the
    shorter of the two dimensions 1; lr, wd, mu: 0-dim tensors, so that new values compile nothing.
    """
    g = torch.stack(grads)
    momenta.add_((1 - mu) * (g - momenta))  # lerp_ has given wrong numbers on MPS
    nesterov = g + mu * (momenta - g)
    update = orthogonalize(nesterov, dtype).to(g.dtype)

    rows, cols = update.shape[-2:]
    mean_square = update.square().mean(-1 if rows >= cols else -2, keepdim=True)
    variances.add_((1 - MUON_BETA2) * (mean_square - variances))
    scaled = update * (variances + 1e-10).rsqrt()
    # The normalization shifts weight between neurons; the size of the step stays
    size = update.norm(dim=(-2, -1), keepdim=True)
    update = scaled * (size / (scaled.norm(dim=(-2, -1), keepdim=True) + 1e-10))

    # Muon's factor for the shape belongs to the learning rate, so it scales the decay too
    p = torch.stack(params)
    decay = wd * p * (update * p >= 0)
    update = (update + decay) * (lr * max(1, rows / cols) ** 0.5)
    torch._foreach_sub_(params, update.unbind())


class MuonAdamW(torch.optim.Optimizer):
    """Muon for groups of kind "muon" (all of one shape), torch's AdamW for those of kind "adamw".

    One optimizer, not two: in float16 a gradient that overflows must skip the step of both.
    A parameter without a gradient is skipped.
    """

    def __init__(self, groups: list[dict], dtype: torch.dtype, compiled: bool):
        defaults = {"weight_decay": 0.0, "betas": ADAM_BETAS, "eps": ADAM_EPS}
        super().__init__(groups, defaults | {"momentum": MUON_MOMENTUM[0]})
        self.dtype = dtype  # of the products in orthogonalize
        self.muon_update = muon_update
        if compiled:
            self.muon_update = torch.compile(muon_update, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            if group["kind"] == "muon":
                self.muon_step(group, params)
            else:
                self.adamw_step(group, params)

    def muon_step(self, group: dict, params: list) -> None:
        state = self.state[params[0]]
        if not state:
            rows, cols = params[0].shape
            kept = (rows, 1) if rows >= cols else (1, cols)
            state["momenta"] = params[0].new_zeros(len(params), rows, cols)
            state["variances"] = params[0].new_zeros(len(params), *kept)
        rates = [torch.tensor(group[name]) for name in ("lr", "weight_decay", "momentum")]
        grads = [p.grad for p in params]
        self.muon_update(
            params, grads, state["momenta"], state["variances"], *rates, dtype=self.dtype
        )

    def adamw_step(self, group: dict, params: list) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def build_optimizer(model: GPT, dtype: torch.dtype, compiled: bool) -> MuonAdamW:
    """Every parameter belongs into exactly one group: anything else is refused.

    Raises:
        UserError: a parameter is in no group, or in two.
    """
    scale = (model.config.n_embd / 768) ** -0.5  # AdamW's rates were tuned at width 768
    embedding_lr = EMBEDDING_LR * scale
    value_embeds = [b.attention.value_embed for b in model.blocks]
    values = [embed.weight for embed in value_embeds if embed is not None]
    taps = [b.shift.taps for b in model.blocks]
    resid = [model.backout_lambda, *(b.resid_lambda for b in model.blocks)]
    lambdas = [p for b in model.blocks for p in (b.x0_lambda, b.bigram_lambda)]

    def adamw_group(params, lr, weight_decay=0.0):
        return {"kind": "adamw", "params": params, "lr": lr, "weight_decay": weight_decay}

    groups = [
        adamw_group([model.wte.weight, model.bigram_embed.weight], embedding_lr, EMBEDDING_WD),
        adamw_group(values, embedding_lr, VALUE_WD),
        adamw_group([model.lm_head.weight], UNEMBEDDING_LR * scale, UNEMBEDDING_WD),
        adamw_group(taps, SHIFT_LR),
        adamw_group(resid, RESID_LR),
        adamw_group(lambdas, LAMBDA_LR),
    ]
    by_shape = {}
    for p in model.matrices():
        by_shape.setdefault(p.shape, []).append(p)
    for params in by_shape.values():
        groups.append({"kind": "muon", "params": params, "lr": MATRIX_LR})
    parameters.check_groups(model, groups)
    return MuonAdamW(groups, dtype, compiled)


# ------------------------------ schedules


def lr_multiplier(progress: float) -> float:
    """Of every rate, at this share of the time budget: up, flat, down to FINAL_LR_FRAC."""
    if progress < WARMUP_RATIO:
        return progress / WARMUP_RATIO
    if progress <= 1 - WARMDOWN_RATIO:
        return 1.0
    left = (1 - progress) / WARMDOWN_RATIO
    return left + (1 - left) * FINAL_LR_FRAC


def set_schedules(optimizer: torch.optim.Optimizer, progress: float, step: int) -> None:
    """Write this step's rates into the groups; those of kind "muon" get momentum and decay too."""
    for group in optimizer.param_groups:
        initial_lr = group.setdefault("initial_lr", group["lr"])
        group["lr"] = initial_lr * lr_multiplier(progress)
        if group["kind"] == "muon":
            group["momentum"] = between(MUON_MOMENTUM, min(step / MUON_MOMENTUM_STEPS, 1))
            group["weight_decay"] = WEIGHT_DECAY * (1 - progress)


# ------------------------------ training


@dataclass
class Run:
    """One training run: built by setup, completed by fit_batch, carried through the loop."""

    device: torch.device
    tokenizer: Tokenizer
    model: GPT
    optimizer: MuonAdamW
    scaler: torch.amp.GradScaler
    log: TrainingLog
    facts: dict  # for the record of the score: compiled or not, attention, versions
    rank_rows: int  # rows of this rank in an optimizer step
    rows: int  # rows per forward pass, a divisor of rank_rows
    unused: list[str] = field(default_factory=list)  # parameters that get no gradient
    step: int = 0
    elapsed: float = 0.0  # seconds of the budget
    loader: Iterator | None = None  # of batches (inputs, targets, epoch), int64 [rows, T]
    batch: tuple | None = None  # the next one

    def autocast(self):
        dtype = self.model.config.dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def load_batches(self) -> None:
        """Start the loader at this step."""
        skip = self.step * self.micro_steps
        self.loader = make_dataloader(self.tokenizer, self.rows, MAX_SEQ_LEN, "train", skip=skip)
        self.batch = next(self.loader)

    @property
    def micro_steps(self) -> int:
        """Forward passes per optimizer step."""
        return self.rank_rows // self.rows


def build_config(vocab_size: int, dtype: torch.dtype) -> GPTConfig:
    """The model that the knobs describe.

    Raises:
        UserError: knobs that do not fit together, with values that do.
    """
    sizes = {"DEPTH": DEPTH, "ASPECT_RATIO": ASPECT_RATIO, "HEAD_DIM": HEAD_DIM}
    sizes |= {"KV_GROUP": KV_GROUP, "VALUE_EVERY": VALUE_EVERY, "SHORT_WINDOW": SHORT_WINDOW}
    sizes |= {"TOTAL_BATCH_SIZE": TOTAL_BATCH_SIZE, "DEVICE_BATCH_SIZE": DEVICE_BATCH_SIZE}
    if min(sizes.values()) < 1 or HEAD_DIM % 2:
        shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
        raise UserError(f"sizes must be positive and HEAD_DIM even: {shown}")
    n_head = ceil_div(DEPTH * ASPECT_RATIO, HEAD_DIM)
    if n_head % KV_GROUP:
        good = [g for g in range(1, n_head + 1) if n_head % g == 0]
        raise UserError(f"{n_head} heads do not divide by {KV_GROUP=}. hint: one of {good}")
    if not WINDOW_PATTERN or set(WINDOW_PATTERN) - set("SL"):
        raise UserError(f"{WINDOW_PATTERN=} may hold only S and L")
    return GPTConfig(
        vocab_size=vocab_size,
        seq_len=MAX_SEQ_LEN,
        n_layer=DEPTH,
        n_head=n_head,
        n_kv_head=n_head // KV_GROUP,
        n_embd=n_head * HEAD_DIM,
        window_pattern=WINDOW_PATTERN,
        dtype=dtype,
    )


def split_batch(world: int) -> tuple[int, int]:
    """(rows of each rank in an optimizer step, rows of each forward pass).

    Raises:
        UserError: TOTAL_BATCH_SIZE does not divide, with the nearest sizes that do.
    """
    rank_rows = TOTAL_BATCH_SIZE // (MAX_SEQ_LEN * world)
    rows = min(DEVICE_BATCH_SIZE, max(rank_rows, 1))
    unit = rows * MAX_SEQ_LEN * world
    if TOTAL_BATCH_SIZE % unit:
        below = TOTAL_BATCH_SIZE // unit * unit
        good = " or ".join(str(n) for n in (below, below + unit) if n)
        raise UserError(
            f"{TOTAL_BATCH_SIZE=} is not a multiple of {rows} rows x {MAX_SEQ_LEN} tokens x "
            f"{world} ranks = {unit}. hint: TOTAL_BATCH_SIZE = {good}, or another DEVICE_BATCH_SIZE"
        )
    return rank_rows, rows


def setup() -> Run:
    """Device, model, optimizer. Knobs that do not fit are refused here, before the clock."""
    device = machine.start_process()
    world = prepare.ranks()[1]
    dtype = machine.compute_dtype(device)
    tokenizer = Tokenizer.from_directory()
    config = build_config(tokenizer.get_vocab_size(), dtype)
    rank_rows, rows = split_batch(world)
    peak_flops, peak = machine.peak_flops(device, dtype)  # before anything works beside it
    why_eager = compiler.why_not_compiled(device) if COMPILE else "COMPILE is off"
    attend, attention = pick_attention(ATTENTION_BACKENDS, ATTENTION, config, device)

    torch.manual_seed(SEED)
    with torch.device("meta"):
        model = GPT(config, attend)
    parameters.initialize(model, device)
    # On a CPU, compiling Muon takes longer than the rest of the start
    optimizer = build_optimizer(model, dtype, compiled=not why_eager and device.type != "cpu")
    parameters.check_groups(model, optimizer.param_groups)  # of any optimizer put in its place
    if not why_eager:
        compiler.prepare_kernels(device)
        # On one GPU all blocks as one: it fuses what lies between them. Block by block, a CPU
        # compiles sooner, and on several GPUs gradients travel while others are computed.
        model.compile_parts(by_block=device.type != "cuda" or world > 1)
    # float16 only: without a scale, small gradients would become 0
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    log = TrainingLog(
        device=device,
        tokens_per_step=TOTAL_BATCH_SIZE,
        time_budget=TIME_BUDGET,
        max_loss=2 * math.log(config.vocab_size),  # twice that of guessing: diverged
        flops_per_token=model.flops_per_token(),
        peak_flops=peak_flops * world if peak_flops else None,
    )
    log.describe(model, why_eager, attention, peak)
    facts = machine.run_facts(dtype, why_eager, attention)
    return Run(device, tokenizer, model, optimizer, scaler, log, facts, rank_rows, rows)


def add_gradients(run: Run, model: nn.Module):
    """Forward and backward pass of the next rows: returns their share of the loss, detached."""
    x, y, _ = run.batch
    with run.autocast():
        loss = model(x, y) / run.micro_steps
    run.scaler.scale(loss).backward()
    return loss.detach()


def use_less_memory(run: Run) -> None:
    """Half the rows per pass, or the next smaller divisor; at one row, activation checkpointing."""
    if run.rows == 1:
        run.model.checkpointing = True
        run.log.say("memory", "out of memory: 1 row at a time, activation checkpointing")
        return
    smaller = range(run.rows // 2, 0, -1)
    run.rows = next(n for n in smaller if run.rank_rows % n == 0)
    run.log.say("memory", f"out of memory: {run.rows} rows at a time")


def fit_batch(run: Run, clock: Clock) -> None:
    """Compile, and reduce the rows per pass until they fit into memory; the steps are undone.

    Raises:
        torch.OutOfMemoryError: not even one row fits.
    """

    def trial_step():
        add_gradients(run, run.model)
        run.unused = parameters.without_gradient(run.model)
        run.optimizer.step()

    first_step = compiler.compiled_or_eager(trial_step, run.facts)
    with clock.warmup(run.model, run.optimizer):
        while True:
            run.load_batches()
            if machine.fits(first_step, run.optimizer):
                break
            if run.rows == 1 and run.model.checkpointing:
                raise torch.OutOfMemoryError("out of memory with one row. hint: a smaller model")
            use_less_memory(run)
    if run.unused:
        run.log.say("unused", f"not trained, no part of the loss: {parameters.shorten(run.unused)}")
    parts = f"{prepare.ranks()[1]} ranks x {run.micro_steps} x {run.rows} rows x {MAX_SEQ_LEN}"
    run.log.say("batch", f"{TOTAL_BATCH_SIZE} tokens = {parts}")


def train_loop(run: Run, clock: Clock, saver: checkpoints.Saver) -> None:
    """Train until the clock says that the time budget is used."""
    model = machine.data_parallel(run.model, run.device, find_unused=bool(run.unused))
    last_save = last_preview = run.elapsed
    machine.steady_memory(run.device)
    dtype = run.model.config.dtype
    speed_before = machine.speed_now(run.device, dtype)
    clock.start(run.elapsed)
    while not clock.done():
        set_schedules(run.optimizer, clock.progress(), run.step)
        loss = 0.0
        for micro_step in range(run.micro_steps):
            last = micro_step == run.micro_steps - 1
            with contextlib.nullcontext() if last else machine.no_sync(model):
                loss = loss + add_gradients(run, model)
            run.batch = next(run.loader)
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.step += 1
        run.elapsed = clock.progress() * TIME_BUDGET
        rate = lr_multiplier(clock.progress())  # of the next step
        run.log.add_step(run.step, run.elapsed, loss, rate, run.optimizer, epoch=run.batch[2])
        run.optimizer.zero_grad(set_to_none=True)
        if saver.enabled and run.elapsed - last_save > CHECKPOINT_EVERY:
            last_save = run.elapsed
            saver.save(run)
        if run.elapsed - last_preview > PREVIEW_EVERY:
            last_preview = run.elapsed
            with run.autocast():
                run.log.add_preview(run.elapsed, prepare.preview_bpb(run.model, run.rows))
    clock.stop()
    run.facts["probe_tflops"] = [speed_before, machine.speed_now(run.device, dtype)]
    run.log.finish(run.step, clock.elapsed())


def summarize(run: Run, training_seconds: float, startup_seconds: float) -> None:
    """Score the model and print the result."""
    start = time.perf_counter()
    with run.autocast():
        val_bpb = evaluate_bpb(run.model, run.tokenizer, run.rows, run.facts)
    run.log.print_summary(
        run.model,
        val_bpb,
        steps=run.step,
        training_seconds=training_seconds,
        startup_seconds=startup_seconds,
        eval_seconds=time.perf_counter() - start,
    )


def main() -> None:
    args = checkpoints.parse_arguments()
    run = setup()
    clock = Clock()
    fit_batch(run, clock)
    saver = checkpoints.Saver(sys.modules[__name__], enabled=args.save or bool(args.resume))
    if args.resume:
        saver.resume(run, args.resume)
        run.load_batches()  # the loader goes on at the resumed step
    before = parameters.fingerprints(run.model)
    startup_seconds = time.perf_counter() - prepare.STARTED
    train_loop(run, clock, saver)
    saver.save(run, finished=True)
    if unchanged := parameters.unchanged(run.model, before):
        run.log.say("unchanged", f"not changed by training: {parameters.shorten(unchanged)}")
    summarize(run, clock.elapsed(), startup_seconds)
    print_samples(run.model, run.tokenizer, run.loader, run.autocast(), args.sample)
    machine.end_process()


if __name__ == "__main__":
    with exit_codes():
        main()
