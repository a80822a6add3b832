"""Model, loss, optimizer, schedules and knobs of train.py, each against a second implementation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import prepare
import train
from harness import parameters

SIZES = {
    "vocab_size": 61,
    "seq_len": 24,
    "n_layer": 4,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 64,
    "window_pattern": "SSSL",
}


def small_model(dtype=torch.float32, attend=train.sdpa_attention, **changes) -> train.GPT:
    """A model of four layers with first values, the same at every call."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = train.GPT(train.GPTConfig(**SIZES | changes, dtype=dtype), attend)
    parameters.initialize(model, torch.device("cpu"))
    return model


def brute_attention(q, k, v, window):
    """Query by query, in float64, over the keys i-window ... i."""
    B, T, H, D = q.shape
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            group = h * k.size(2) // H
            for i in range(T):
                seen = slice(max(0, i - window), i + 1)
                scores = k[b, seen, group] @ q[b, i, h] / math.sqrt(D)
                out[b, i, h] = scores.softmax(0) @ v[b, seen, group]
    return out


# ---------------------------------------------------------------------------- attention


@pytest.mark.parametrize("attend", [train.sdpa_attention, train.plain_attention])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("seq_len", [32, 21])
def test_attention_equals_brute_force(attend, group, seq_len):
    torch.manual_seed(seq_len)
    for window in (0, 1, 16, seq_len // 2, seq_len):
        q = torch.randn(2, seq_len, 2, 8, requires_grad=True)
        k, v = (torch.randn(2, seq_len, 2 // group, 8, requires_grad=True) for _ in range(2))
        mine, want = attend(q, k, v, window), brute_attention(q, k, v, window)
        torch.testing.assert_close(mine.double(), want, atol=2e-6, rtol=1e-5)
        weights = torch.randn_like(mine)
        my_grads = torch.autograd.grad((mine * weights).sum(), (q, k, v))
        grads = torch.autograd.grad((want * weights).sum(), (q, k, v))
        for a, b in zip(my_grads, grads, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 5, 100, 199])
@pytest.mark.parametrize("attend", [train.sdpa_attention, train.plain_attention])
def test_several_blocks_equal_one_mask(attend, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 200, heads, 16) for heads in (4, 2, 2))
    distance = torch.arange(200)[:, None] - torch.arange(200)
    mask = (distance >= 0) & (distance <= window)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    want = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, window), want.transpose(1, 2), atol=2e-6, rtol=1e-5)


def test_a_short_window_costs_less():
    q = torch.randn(1, 512, 2, 8)
    flops = {}
    for window in (16, 128, 512):
        with FlopCounterMode(display=False) as counter:
            train.plain_attention(q, q, q, window)
        flops[window] = counter.get_total_flops()
    assert flops[16] < 0.6 * flops[128]
    assert flops[128] < 0.6 * flops[512]


def fake_varlen(q, k, v, starts, ends, longest_q, longest_k, window_size, enable_gqa):
    """What varlen_attn's documentation says, row by row."""
    assert starts.dtype == torch.int32
    assert window_size[1] == 0
    assert enable_gqa == (q.size(1) != k.size(1))
    rows = []
    for a, b in zip(starts.tolist(), ends.tolist()[1:], strict=False):
        row = (t[None, a:b] for t in (q, k, v))
        rows.append(brute_attention(*row, window_size[0])[0].float())
    return torch.cat(rows)


def test_flash_attention_packs_the_rows(monkeypatch):
    monkeypatch.setattr(train, "varlen_attn", fake_varlen)
    q, k, v = (torch.randn(3, 12, heads, 8) for heads in (4, 2, 2))
    mine, want = train.flash_attention(q, k, v, 4), brute_attention(q, k, v, 4)
    torch.testing.assert_close(mine.double(), want, atol=1e-5, rtol=1e-5)


def test_fa3_attention_uses_an_inclusive_window(monkeypatch):
    def flash_attn_func(q, k, v, causal, window_size):  # as the kernel's documentation says
        assert causal and window_size == (4, 0)
        return brute_attention(q, k, v, window_size[0]).float()

    monkeypatch.setitem(train.fa3_kernel.__dict__, "flash_attn_func", flash_attn_func)
    q, k, v = (torch.randn(2, 9, heads, 8) for heads in (4, 2, 2))
    want = brute_attention(q, k, v, 4).float()
    torch.testing.assert_close(train.fa3_attention(q, k, v, 4), want)


# ---------------------------------------------------------------------------- model


def test_windows_and_value_embeddings_follow_the_layer(monkeypatch):
    monkeypatch.setattr(train, "VALUE_EVERY", 2)
    monkeypatch.setattr(train, "SHORT_WINDOW", 2)
    config = small_model(n_layer=6, window_pattern="SL").config
    assert [config.window(i) for i in range(6)] == [12, 24, 12, 24, 12, 24]
    assert [config.has_value_embedding(i) for i in range(6)] == [False, True] * 3
    only_short = small_model(n_layer=5, window_pattern="S").config
    assert [only_short.window(i) for i in (3, 4)] == [12, 24]  # the last is full
    odd = small_model(n_layer=3).config
    assert [odd.has_value_embedding(i) for i in range(3)] == [True, False, True]


def test_rope_makes_scores_depend_on_distance_only():
    model = small_model()
    q, k = torch.randn(8), torch.randn(8)

    def rotated(x, position):
        cos, sin = model.cos[position, 0], model.sin[position, 0]
        return train.rotate(x.repeat(1, 2), cos, sin)[0]

    scores = [(rotated(q, i + 5) @ rotated(k, i)).item() for i in range(10)]
    assert max(scores) - min(scores) < 1e-4
    assert abs((rotated(q, 9) @ rotated(k, 0)).item() - scores[0]) > 1e-3


def test_the_first_predictions_are_uniform():
    model = small_model()
    x = torch.randint(61, (2, 24))
    logits = model(x)
    assert logits.shape == (2, 24, 61)
    assert logits.dtype == torch.float32
    loss = F.cross_entropy(logits.flatten(0, 1), x.flatten())
    assert loss.item() == pytest.approx(math.log(61), abs=0.02)


def test_the_model_sees_the_past_and_nothing_else():
    model = small_model()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randint(61, (2, 24))
    before = model(x)
    x[:, 10] = (x[:, 10] + 1) % 61
    changed = (model(x) - before).abs().amax((0, 2))
    assert (changed[:10] == 0).all()
    assert (changed[10:] > 0).all()
    assert before.abs().max() < train.SOFTCAP


@pytest.mark.parametrize("length", [1, 2, 9])
def test_token_shift_equals_brute_force(length):
    shift = small_model().blocks[0].shift
    torch.nn.init.normal_(shift.taps)
    x = torch.randn(2, length, 64)
    want = x.clone()
    for t in range(length):
        for i in range(train.SHIFT_TAPS):
            if t - 1 - i >= 0:
                want[:, t] += shift.taps[i] * x[:, t - 1 - i]
    torch.testing.assert_close(shift(x), want)


def test_a_pair_has_one_row_and_the_table_is_used():
    model = small_model()
    seen = []
    model.bigram_embed.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0]))
    x = torch.randint(61, (40, 24))
    model(x)
    rows_of_pair = {}
    for rows, tokens in zip(seen[0].tolist(), x.tolist(), strict=True):
        for i, row in enumerate(rows):
            pair = (tokens[i - 1] if i else 0, tokens[i])
            rows_of_pair.setdefault(pair, set()).add(row)
    assert all(len(rows) == 1 for rows in rows_of_pair.values())
    used = len(set().union(*rows_of_pair.values()))
    n = model.bigram_embed.num_embeddings
    assert used > 0.8 * n * (1 - math.exp(-len(rows_of_pair) / n))  # as many as if drawn at random


def test_the_gate_of_a_value_embedding_is_neutral_at_first():
    attention = small_model().blocks[3].attention
    torch.nn.init.normal_(attention.out_proj.weight)
    x, idx = torch.randn(1, 24, 64), torch.randint(61, (1, 24))
    cos, sin = torch.ones(24, 1, 8), torch.zeros(24, 1, 8)
    value = attention.value_embed(idx)
    gated = attention(x, value, cos, sin)
    # what a gate of exactly 1 means
    attention.v_proj.forward = lambda t: F.linear(t, attention.v_proj.weight) + value
    torch.testing.assert_close(gated, attention(x, None, cos, sin))


def test_flops_count_the_products_that_are_made():
    model = small_model(window_pattern="L", attend=train.plain_attention)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(61, (1, 24))).sum().backward()
    assert model.flops_per_token() * 24 == pytest.approx(counter.get_total_flops(), rel=0.02)


# ---------------------------------------------------------------------------- loss


@pytest.mark.parametrize("max_logits", [10**9, 61 * 7, 1])
def test_the_loss_is_the_cross_entropy_of_the_logits(monkeypatch, max_logits):
    monkeypatch.setattr(train, "MAX_LOGITS", max_logits)
    model = small_model()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, y = torch.randint(61, (2, 24)), torch.randint(61, (2, 24))
    wanted = list(model.parameters())
    loss, whole = model(x, y), F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    torch.testing.assert_close(loss, whole)
    grads = torch.autograd.grad(loss, wanted)
    for mine, want in zip(grads, torch.autograd.grad(whole, wanted), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-6)


def test_the_softcap_bounds_logits_and_leaves_small_ones_alone():
    x = torch.tensor([-1e6, -15.0, -0.01, 0.0, 0.01, 8.0, 15.0, 1e6], requires_grad=True)
    capped = train.softcap(x)
    want = [-15.0, -15 / 2**0.5, -0.01, 0.0, 0.01, 120 / 17, 15 / 2**0.5, 15.0]
    torch.testing.assert_close(capped, torch.tensor(want))
    (slope,) = torch.autograd.grad(capped.sum(), x)
    torch.testing.assert_close(slope[3:7], torch.tensor([1.0, 1.0, (15 / 17) ** 3, 0.125**0.5]))


def test_an_edit_of_the_softcap_changes_training_and_score_together(monkeypatch):
    monkeypatch.setattr(train, "softcap", lambda logits: 3 * torch.tanh(logits.float() / 3))
    model = small_model()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x = torch.randint(61, (2, 24))
    logits = model(x)
    assert logits.abs().max() < 3
    torch.testing.assert_close(model(x, x), F.cross_entropy(logits.flatten(0, 1), x.flatten()))


def test_no_chunk_holds_all_logits(monkeypatch):
    monkeypatch.setattr(train, "MAX_LOGITS", 16 * 61)
    softcap, sizes = train.softcap, []

    def recorded(logits):
        sizes.append(len(logits))
        return softcap(logits)

    monkeypatch.setattr(train, "softcap", recorded)
    model = small_model()
    x = torch.randint(61, (4, 24))
    model(x, x)
    assert max(sizes) == 16
    assert sum(sizes) == x.numel()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_evaluation_keeps_less_than_training_did(checkpointing):
    model = small_model()
    model.checkpointing = checkpointing
    idx = torch.randint(61, (2, 24))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        model(idx, idx)
        in_training = len(kept)
        with torch.no_grad():
            assert not model.eval()(idx).requires_grad
    in_evaluation = len(kept) - in_training
    assert in_evaluation < in_training
    assert (in_evaluation == 0) == checkpointing


def test_evaluation_uses_the_blocks_that_training_compiled():
    torch.compiler.reset()
    model = small_model()
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph

    for block in model.blocks:
        block.compile(dynamic=False, backend=count)
    idx = torch.arange(20)[None] % 61
    model(idx, idx).backward()
    assert compiled
    in_training = len(compiled)
    with torch.no_grad():
        logits = model.eval()(idx)
    assert len(compiled) == in_training
    torch.compiler.reset()
    torch.testing.assert_close(logits, small_model()(idx).detach())


def test_activation_checkpointing_changes_no_gradient():
    model, x = small_model(), torch.randint(61, (2, 24))
    grads = []
    for checkpointing in (False, True):
        model.checkpointing = checkpointing
        model.zero_grad()
        model(x, x).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_model_learns_one_batch_by_heart():
    model = small_model(n_layer=2, n_kv_head=4)
    optimizer = train.build_optimizer(model, torch.float32, compiled=False)
    x = torch.randint(61, (4, 25))
    for step in range(60):
        train.set_schedules(optimizer, 0.0, step)
        loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05


# ---------------------------------------------------------------------------- optimizer


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96), (64, 8)])
def test_orthogonalize_against_svd(shape):
    g = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = train.orthogonalize(g, torch.float64)
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    values = torch.linalg.svdvals(x)
    assert values.max() < 1.25
    assert values[s > 0.05 * s.amax(-1, keepdim=True)].min() > 0.75
    # the same singular vectors: u' x v is diagonal
    inner = u.mT @ x @ vt.mT
    diagonal = torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(inner, diagonal, atol=1e-6, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-7])
def test_orthogonalize_keeps_small_gradients_in_float16(scale):
    g = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(1))
    want = train.orthogonalize(g, torch.float32).flatten()
    half = train.orthogonalize(g * scale, torch.float16).float().flatten()
    assert torch.cosine_similarity(half, want, dim=0) > 0.999


def reference_muon(p, g, momentum, variance, lr, wd, mu):
    """One matrix, plainly: see muon_update for the papers. Returns the new p."""
    momentum.mul_(mu).add_(g, alpha=1 - mu)
    o = train.orthogonalize(((1 - mu) * g + mu * momentum)[None], torch.float64)[0]
    rows, cols = p.shape
    axis = 1 if rows >= cols else 0
    variance.mul_(train.MUON_BETA2)
    variance.add_((o**2).mean(axis, keepdim=True), alpha=1 - train.MUON_BETA2)
    n = o / (variance + 1e-10).sqrt()
    n = n * o.norm() / n.norm()
    decay = torch.where(n * p >= 0, p, torch.zeros_like(p))
    return p - lr * max(1.0, rows / cols) ** 0.5 * (n + wd * decay)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
def test_muon_on_a_batch_equals_one_matrix_at_a_time(shape):
    torch.manual_seed(0)
    params = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    want = [p.clone() for p in params]
    kept = (shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])
    momenta = torch.zeros(3, *shape, dtype=torch.float64)
    variances = torch.zeros(3, *kept, dtype=torch.float64)
    states = [(torch.zeros_like(p), torch.zeros(kept, dtype=torch.float64)) for p in params]
    rates = [torch.tensor(x, dtype=torch.float64) for x in (0.05, 0.3, 0.9)]
    for _ in range(4):
        grads = [torch.randn(shape, dtype=torch.float64) for _ in params]
        train.muon_update(params, grads, momenta, variances, *rates, torch.float64)
        for i, g in enumerate(grads):
            want[i] = reference_muon(want[i], g, *states[i], 0.05, 0.3, 0.9)
    for p, w in zip(params, want, strict=True):
        torch.testing.assert_close(p, w, atol=1e-9, rtol=1e-9)


def test_adamw_group_equals_torch():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(()))]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    group = {"kind": "adamw", "params": params, "lr": 0.1, "weight_decay": 0.03}
    mine = train.MuonAdamW([group], torch.float32, compiled=False)
    betas, eps = train.ADAM_BETAS, train.ADAM_EPS
    theirs = torch.optim.AdamW(copies, lr=0.1, betas=betas, eps=eps, weight_decay=0.03)
    for _ in range(5):
        for p, q in zip(params, copies, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        mine.step()
        theirs.step()
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q)


def test_optimizer_covers_every_parameter_once_and_scales_rates():
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compiled=False)
    rates = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert id(p) not in rates
            rates[id(p)] = group["lr"]
    assert set(rates) == {id(p) for p in model.parameters()}
    scale = math.sqrt(768 / 64)
    assert rates[id(model.wte.weight)] == pytest.approx(train.EMBEDDING_LR * scale)
    assert rates[id(model.lm_head.weight)] == pytest.approx(train.UNEMBEDDING_LR * scale)
    assert rates[id(model.blocks[0].mlp.fc.weight)] == train.MATRIX_LR
    assert rates[id(model.blocks[0].resid_lambda)] == train.RESID_LR
    assert rates[id(model.blocks[0].x0_lambda)] == train.LAMBDA_LR


def test_a_parameter_without_gradient_is_skipped():
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compiled=False)
    x = torch.randint(61, (2, 24))
    model(x, x).backward()
    idle = [model.blocks[0].mlp.fc.weight, model.backout_lambda]
    before = [p.detach().clone() for p in idle]
    for p in idle:
        p.grad = None
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(idle, before, strict=True))


@pytest.mark.slow
def test_new_rates_recompile_nothing(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compiler(f, backend=backend, **kw))
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compiled=True)
    counts = []
    for step in range(4):
        train.set_schedules(optimizer, step / 6, 50 * step)
        model(torch.randint(61, (2, 24))).sum().backward()
        optimizer.step()
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[-1] == counts[0]


# ---------------------------------------------------------------------------- schedules, knobs


def test_learning_rate_schedule(monkeypatch):
    monkeypatch.setattr(train, "WARMUP_RATIO", 0.1)
    monkeypatch.setattr(train, "WARMDOWN_RATIO", 0.4)
    monkeypatch.setattr(train, "FINAL_LR_FRAC", 0.2)
    points = {0.0: 0.0, 0.05: 0.5, 0.1: 1.0, 0.6: 1.0, 0.8: 0.6, 1.0: 0.2}
    assert {p: pytest.approx(train.lr_multiplier(p)) for p in points} == points
    monkeypatch.setattr(train, "WARMUP_RATIO", 0.0)
    assert train.lr_multiplier(0.0) == 1.0


def test_muon_schedules(monkeypatch):
    monkeypatch.setattr(train, "WARMDOWN_RATIO", 0.4)
    monkeypatch.setattr(train, "FINAL_LR_FRAC", 0.2)
    optimizer = train.build_optimizer(small_model(), torch.float32, compiled=False)
    for _ in range(2):  # from the first rates, not from those of the step before
        train.set_schedules(optimizer, 0.8, 150)
    muon = optimizer.param_groups[-1]
    assert muon["lr"] == pytest.approx(0.6 * train.MATRIX_LR)
    assert muon["momentum"] == pytest.approx(0.895)
    assert muon["weight_decay"] == pytest.approx(0.2 * train.WEIGHT_DECAY)


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"TOTAL_BATCH_SIZE": 5000}, r"5000 .* 16 rows x 256 .* 1 ranks = 4096.*4096 or 8192"),
        ({"TOTAL_BATCH_SIZE": 100}, r"hint: TOTAL_BATCH_SIZE = 256,"),
        ({"KV_GROUP": 2}, r"3 heads .*one of \[1, 3\]"),
        ({"WINDOW_PATTERN": "SSX"}, "only S and L"),
        ({"HEAD_DIM": 33}, "HEAD_DIM=33"),
        ({"DEPTH": 0}, "DEPTH=0"),
        ({"VALUE_EVERY": 0}, "VALUE_EVERY=0"),
    ],
)
def test_bad_knobs_are_refused_with_the_numbers(monkeypatch, knobs, message):
    base = {"DEPTH": 4, "ASPECT_RATIO": 48, "HEAD_DIM": 64, "MAX_SEQ_LEN": 256}
    base |= {"TOTAL_BATCH_SIZE": 4096, "DEVICE_BATCH_SIZE": 16}
    for name, value in (base | knobs).items():
        monkeypatch.setattr(train, name, value)
    with pytest.raises(prepare.UserError, match=message):
        train.build_config(2048, torch.float32)
        train.split_batch(1)


def test_width_is_rounded_up_to_whole_heads(monkeypatch):
    for name, value in {"DEPTH": 9, "ASPECT_RATIO": 57, "HEAD_DIM": 128}.items():
        monkeypatch.setattr(train, name, value)
    config = train.build_config(2048, torch.float32)
    assert (config.n_embd, config.n_head) == (640, 5)


def test_the_batch_is_divided_over_ranks_or_refused(monkeypatch):
    for name, value in {"MAX_SEQ_LEN": 256, "TOTAL_BATCH_SIZE": 4096 * 3}.items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(train, "DEVICE_BATCH_SIZE", 16)
    assert [train.split_batch(world) for world in (1, 3, 6)] == [(48, 16), (16, 16), (8, 8)]
    message = r"12288 .* 9 rows x 256 tokens x 5 ranks = 11520.*11520 or 23040"
    with pytest.raises(prepare.UserError, match=message):
        train.split_batch(5)


# ---------------------------------------------------------------------------- warm-up


def test_warmup_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(prepare, "_run", prepare.RunState())
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compiled=False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rates = [g["lr"] for g in optimizer.param_groups]
    random = torch.get_rng_state()
    clock = prepare.Clock()
    with clock.warmup(model, optimizer):
        train.set_schedules(optimizer, 0.9, 10)
        model(torch.randint(61, (2, 24))).square().sum().backward()
        optimizer.step()
        assert any((before[k] != v).any() for k, v in model.state_dict().items())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not optimizer.state
    assert [g["lr"] for g in optimizer.param_groups] == rates
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
