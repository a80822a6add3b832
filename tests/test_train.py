"""The model, the optimizer, the schedules and the knobs of train.py, each against a second implementation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import machine
import prepare
import train


def brute_attention(q, k, v, window):
    """Query by query, in float64, over the keys i-window ... i."""
    B, T, H, D = q.shape
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            g = h * k.size(2) // H
            for i in range(T):
                keys = range(max(0, i - window), i + 1)
                scores = torch.stack([q[b, i, h] @ k[b, j, g] for j in keys]) / math.sqrt(D)
                weights = (scores - scores.max()).exp()
                out[b, i, h] = sum(w * v[b, j, g] for w, j in zip(weights / weights.sum(), keys, strict=True))
    return out


@pytest.mark.parametrize("attend", [machine.sdpa_attention, machine.plain_attention])
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
        for a, b in zip(torch.autograd.grad((mine * weights).sum(), (q, k, v)),
                        torch.autograd.grad((want * weights).sum(), (q, k, v)), strict=True):  # fmt: skip
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def small_model(seed=0, dtype=torch.float32, attend=machine.sdpa_attention, **changes):
    config = dict(vocab_size=61, seq_len=24, n_layer=4, n_head=4, n_kv_head=2, n_embd=64, window_pattern="SSSL") | changes
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = train.GPT(train.GPTConfig(**config, dtype=dtype), attend)
    return model.init_weights("cpu")


def test_windows_and_value_embeddings_follow_the_layer(monkeypatch):
    monkeypatch.setattr(train, "VALUE_EVERY", 2)
    monkeypatch.setattr(train, "SHORT_WINDOW", 2)
    config = small_model(n_layer=6, window_pattern="SL").config
    assert [config.window(i) for i in range(6)] == [12, 24, 12, 24, 12, 24]
    assert [small_model(n_layer=5, window_pattern="S").config.window(i) for i in (3, 4)] == [12, 24]  # the last is full
    assert [config.has_value_embedding(i) for i in range(6)] == [False, True] * 3
    assert [small_model(n_layer=3).config.has_value_embedding(i) for i in range(3)] == [True, False, True]


def test_rope_makes_scores_depend_on_distance_only():
    model = small_model()
    q, k = torch.randn(8), torch.randn(8)
    cos, sin = (t[:, 0] for t in (model.cos, model.sin))
    at = lambda x, i: train.rotate(x.repeat(1, 2), cos[i], sin[i])[0]  # noqa: E731
    scores = [(at(q, i + 5) @ at(k, i)).item() for i in range(10)]
    assert max(scores) - min(scores) < 1e-4
    assert abs((at(q, 9) @ at(k, 0)).item() - scores[0]) > 1e-3


def test_model_predicts_uniformly_at_first_and_sees_only_the_past():
    model = small_model()
    x = torch.randint(61, (2, 24))
    logits = model(x)
    assert logits.shape == (2, 24, 61) and logits.dtype == torch.float32
    assert F.cross_entropy(logits.flatten(0, 1), x.flatten()).item() == pytest.approx(math.log(61), abs=0.02)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    before = model(x)
    assert before.abs().max() < train.SOFTCAP
    x[:, 10] = (x[:, 10] + 1) % 61
    changed = (model(x) - before).abs().amax((0, 2))
    assert (changed[:10] == 0).all() and (changed[10:] > 0).all()


def test_shift_equals_brute_force():
    shift = small_model().blocks[0].shift
    torch.nn.init.normal_(shift.taps)
    x = torch.randn(2, 9, 64)
    want = torch.zeros_like(x)
    for t in range(9):
        want[:, t] = x[:, t] + sum(shift.taps[i] * x[:, t - 1 - i] for i in range(train.TAPS) if t - 1 - i >= 0)
    torch.testing.assert_close(shift(x), want)


def test_a_pair_has_one_row_and_the_table_is_used():
    model = small_model()
    seen = []
    model.bigrams.register_forward_hook(lambda module, inputs, out: seen.append(inputs[0]))
    x = torch.randint(61, (40, 24))
    model(x)
    rows = {}
    for row, tokens in zip(seen[0].tolist(), x.tolist(), strict=True):
        for i, at in enumerate(row):
            rows.setdefault((tokens[i - 1] if i else 0, tokens[i]), set()).add(at)
    assert all(len(places) == 1 for places in rows.values())
    used = len(set().union(*rows.values()))
    n = model.bigrams.num_embeddings
    assert used > 0.8 * n * (1 - math.exp(-len(rows) / n))  # about as many as if drawn at random


def test_value_embedding_gate_is_neutral_at_first():
    attention = small_model().blocks[3].attention
    torch.nn.init.normal_(attention.proj.weight)
    x, idx = torch.randn(1, 24, 64), torch.randint(61, (1, 24))
    cos, sin = torch.ones(24, 1, 8), torch.zeros(24, 1, 8)
    with_gate, values = attention(x, idx, cos, sin), attention.values(idx)
    attention.v.forward = lambda t: F.linear(t, attention.v.weight) + values  # what a gate of exactly 1 means
    attention.values = None
    torch.testing.assert_close(with_gate, attention(x, idx, cos, sin))


def test_flops_count_the_products_that_are_made():
    model = small_model(window_pattern="L", attend=machine.plain_attention)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(61, (1, 24))).sum().backward()
    assert model.flops_per_token() * 24 == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_model_trains_on_one_batch_to_near_zero_loss():
    model = small_model(n_kv_head=4)
    optimizer = train.build_optimizer(model, torch.float32, compile=False)
    x = torch.randint(61, (4, 25))
    for step in range(60):
        train.set_schedules(optimizer, 0.0, step)
        loss = train.train_loss(model, x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96), (64, 8)])
def test_orthogonalize_against_svd(shape):
    g = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = train.orthogonalize(g, torch.float64)
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    values = torch.linalg.svdvals(x)
    assert values.max() < 1.25 and values[s > 0.05 * s.amax(-1, keepdim=True)].min() > 0.75
    # same singular vectors: u' x v is diagonal
    inner = u.mT @ x @ vt.mT
    torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)), atol=1e-6, rtol=0)


def reference_muon(p, g, m, v, lr, wd, mu, beta2):
    """One matrix, plainly: see muon_update for the papers."""
    m.mul_(mu).add_(g, alpha=1 - mu)
    o = train.orthogonalize(((1 - mu) * g + mu * m)[None], torch.float64)[0]
    rows, cols = p.shape
    axis = 1 if rows >= cols else 0
    v.mul_(beta2).add_((o**2).mean(axis, keepdim=True), alpha=1 - beta2)
    n = o / (v + 1e-10).sqrt()
    n = n * o.norm() / n.norm()
    decay = torch.where(n * p >= 0, p, torch.zeros_like(p))
    return p - lr * max(1.0, rows / cols) ** 0.5 * (n + wd * decay)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
def test_muon_batch_equals_one_matrix_at_a_time(shape):
    torch.manual_seed(0)
    params = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    vshape = (shape[0], 1) if shape[0] >= shape[1] else (1, shape[1])
    m, v = torch.zeros(3, *shape, dtype=torch.float64), torch.zeros(3, *vshape, dtype=torch.float64)
    ref = [[p.clone(), torch.zeros_like(p), torch.zeros(vshape, dtype=torch.float64)] for p in params]
    lr, wd, mu, beta2 = (torch.tensor(x, dtype=torch.float64) for x in (0.05, 0.3, 0.9, 0.8))
    for _ in range(4):
        grads = [torch.randn(shape, dtype=torch.float64) for _ in params]
        train.muon_update(params, grads, m, v, lr, wd, mu, beta2, torch.float64)
        for r, g in zip(ref, grads, strict=True):
            r[0] = reference_muon(*r[:1], g, *r[1:], 0.05, 0.3, 0.9, 0.8)
    for p, r in zip(params, ref, strict=True):
        torch.testing.assert_close(p, r[0], atol=1e-9, rtol=1e-9)


def test_adamw_equals_torch():
    torch.manual_seed(0)
    mine = [torch.randn(5, 3), torch.randn(7)]
    theirs = [p.clone().requires_grad_() for p in mine]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(theirs, (0.1, 0.02), strict=True)]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.03)
    firsts, seconds = ([torch.zeros_like(p) for p in mine] for _ in range(2))
    for t in range(1, 6):
        grads = [torch.randn_like(p) for p in mine]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        reference.step()
        rates, decays = [torch.tensor(0.1), torch.tensor(0.02)], [torch.tensor(0.03)] * 2
        train.adamw_update(mine, grads, firsts, seconds, rates, decays, torch.tensor(float(t)), 0.8, 0.95)
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q.detach())


def test_optimizer_covers_every_parameter_once_and_scales_rates():
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compile=False)
    ids = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rates[id(model.wte.weight)] == pytest.approx(train.EMBEDDING_LR * math.sqrt(768 / 64))
    assert rates[id(model.lm_head.weight)] == pytest.approx(train.UNEMBEDDING_LR * math.sqrt(768 / 64))
    assert rates[id(model.blocks[0].mlp.fc.weight)] == train.MATRIX_LR
    block = model.blocks[0]
    assert rates[id(block.resid_scale)] == pytest.approx(rates[id(block.x0_scale)] / 100)


def test_new_rates_recompile_nothing(monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compiler(f, backend=backend, **kw))
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compile=True)
    for step in range(6):
        train.set_schedules(optimizer, step / 6, 50 * step)
        model(torch.randint(61, (2, 24))).sum().backward()
        optimizer.step()
    assert len(graphs) == 1


def test_schedules(monkeypatch):
    monkeypatch.setattr(train, "WARMUP_RATIO", 0.1)
    monkeypatch.setattr(train, "WARMDOWN_RATIO", 0.4)
    monkeypatch.setattr(train, "FINAL_LR_FRAC", 0.2)
    points = {0.0: 0.0, 0.05: 0.5, 0.1: 1.0, 0.6: 1.0, 0.8: 0.6, 1.0: 0.2}
    assert {p: pytest.approx(train.lr_multiplier(p)) for p in points} == points
    monkeypatch.setattr(train, "WARMUP_RATIO", 0.0)
    assert train.lr_multiplier(0.0) == 1.0
    optimizer = train.build_optimizer(small_model(), torch.float32, compile=False)
    train.set_schedules(optimizer, 0.8, 150)
    muon = optimizer.param_groups[-1]
    assert muon["lr"] == pytest.approx(0.6 * train.MATRIX_LR)
    assert muon["momentum"] == pytest.approx(0.895)
    assert muon["weight_decay"] == pytest.approx(0.2 * train.WEIGHT_DECAY)


def test_warmup_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(prepare, "_run", prepare.RunState())
    model = small_model()
    optimizer = train.build_optimizer(model, torch.float32, compile=False)
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
    assert not optimizer.state and [g["lr"] for g in optimizer.param_groups] == rates
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state()) and prepare._run.untimed_steps == 0


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"TOTAL_BATCH_SIZE": 5000}, r"5000 .* 16 rows x 256 tokens x 1 ranks = 4096.*4096 or 8192"),
        ({"TOTAL_BATCH_SIZE": 100}, r"hint: TOTAL_BATCH_SIZE = 256,"),
        ({"KV_GROUP": 2}, r"3 heads .*one of \[1, 3\]"),
        ({"WINDOW_PATTERN": "SSX"}, "only S and L"),
        ({"HEAD_DIM": 33}, "HEAD_DIM=33"),
        ({"DEPTH": 0}, "DEPTH=0"),
    ],
)
def test_bad_knobs_are_refused_with_the_numbers(monkeypatch, knobs, message):
    base = dict(DEPTH=4, ASPECT_RATIO=48, HEAD_DIM=64, TOTAL_BATCH_SIZE=4096, DEVICE_BATCH_SIZE=16, MAX_SEQ_LEN=256)
    for name, value in (base | knobs).items():
        monkeypatch.setattr(train, name, value)
    with pytest.raises(prepare.UserError, match=message):
        train.build_config(2048, torch.float32)
        train.split_batch(1)


def test_width_is_rounded_up_to_whole_heads(monkeypatch):
    for name, value in dict(DEPTH=9, ASPECT_RATIO=57, HEAD_DIM=128, MAX_SEQ_LEN=256, DEVICE_BATCH_SIZE=1).items():
        monkeypatch.setattr(train, name, value)
    config = train.build_config(2048, torch.float32)
    assert (config.n_embd, config.n_head) == (640, 5)
