"""The evaluator against brute force, against cheats written out, and against honest models of every kind."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prepare
import train
from harness import parameters
from harness.common import file_hash, write_atomic
from harness.documents import save_tokenizer, train_tokenizer
from harness.known_answers import FunctionModel
from prepare import UserError, VoidScore, evaluate_bpb

T, ROWS = 32, 150


@pytest.fixture
def cache(tmp_path, monkeypatch, use_settings):
    """A small prepared cache: 150 rows of 32 tokens of a real tokenizer, and a folder for records."""
    folder = use_settings(tmp_path, seq_len=T)
    tokenizer = train_tokenizer([Path(__file__).read_text() + "\u00e9\u4e2d"], 300)
    save_tokenizer(tokenizer, folder / "tokenizer.json")
    shape = (ROWS, T + 1)
    rows = np.random.default_rng(0).integers(0, tokenizer.get_vocab_size(), shape).astype(np.uint16)
    rows[:, 0] = tokenizer.get_bos_token_id()
    rows[:, 7] = tokenizer.get_bos_token_id()  # a target of no bytes in every row
    write_atomic(folder / "val_rows.bin", rows.tobytes())
    write_atomic(folder / "holdout_rows.bin", rows[::-4].tobytes())
    paths = [folder / f for f in ("tokenizer.json", "val_rows.bin", "holdout_rows.bin")]
    files = {path.name: [path.stat().st_size, file_hash(path)] for path in paths}
    manifest = {"settings": {}, "files": files, "train": [], "stats": {}}
    manifest["data_id"] = prepare.data_id(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setenv("AUTORESEARCH_RUN_DIR", str(folder))
    monkeypatch.setenv("AUTORESEARCH_RUN_ID", "run-7")
    return folder, tokenizer, rows


def honest(vocab_size, seed=0, **changes):
    torch.manual_seed(seed)
    config = dict(vocab_size=vocab_size, seq_len=T, n_layer=2, n_head=2, n_kv_head=1, n_embd=64, window_pattern="SL") | changes
    attend = changes.pop("attend", train.sdpa_attention)
    config.pop("attend", None)
    with torch.device("meta"):
        model = train.GPT(train.GPTConfig(**config), attend)
    parameters.initialize(model, torch.device("cpu"))
    with torch.no_grad():  # as after training: nothing is zero
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=1.5 * p.size(-1) ** -0.5)
    return model


def score(function, cache, batch_size=16):
    return evaluate_bpb(FunctionModel(function), cache[1], batch_size)


def test_score_equals_brute_force(cache):
    _, tokenizer, rows = cache
    model = honest(tokenizer.get_vocab_size())
    nats, n_bytes = 0.0, 0
    for row in rows[:, :].astype(np.int64):
        with torch.no_grad():
            logits = model(torch.from_numpy(row[None, :-1]))[0].double()
        for t, target in enumerate(row[1:]):
            length = len(tokenizer.tokens[target]) if target < len(tokenizer.tokens) else 0
            if length:
                nats += math.log(sum(math.exp(v) for v in logits[t].tolist())) - logits[t, target].item()
                n_bytes += length
    assert evaluate_bpb(model, tokenizer, 32) == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)
    record = json.loads((cache[0] / "eval.jsonl").read_text())
    assert record["bytes"] == n_bytes and record["nats"] == pytest.approx(nats, rel=1e-6)
    assert record["tokens"] == sum(len(tokenizer.tokens) > t for t in rows[:, 1:].flatten())
    assert record["run_id"] == "run-7" and record["data_id"] == json.loads((cache[0] / "manifest.json").read_text())["data_id"]


def test_every_batch_size_gives_the_same_score(cache):
    model = honest(cache[1].get_vocab_size())
    scores = [evaluate_bpb(model, cache[1], b) for b in (1, 7, 32, 128, ROWS + 50)]
    assert max(scores) - min(scores) < 1e-6
    records = [json.loads(line) for line in (cache[0] / "eval.jsonl").read_text().splitlines()]
    assert len({(r["bytes"], r["tokens"]) for r in records}) == 1


def test_the_model_sees_one_shape_only(cache):
    """Another shape would compile another graph: the last batch is filled up."""
    table, shapes = torch.randn(300, 300), set()
    score(lambda x: shapes.add(tuple(x.shape)) or table[x], cache, 32)
    assert shapes == {(32, T)}


def test_chunks_do_not_change_the_score(cache, monkeypatch):
    model = honest(cache[1].get_vocab_size())
    whole = evaluate_bpb(model, cache[1], 16)
    sizes = []
    monkeypatch.setattr(prepare, "CHUNK", 7 * cache[1].get_vocab_size())
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda a, *r, **k: sizes.append(a.numel()) or cross_entropy(a, *r, **k))
    assert evaluate_bpb(model, cache[1], 16) == pytest.approx(whole, abs=1e-9)
    assert max(sizes) <= prepare.CHUNK


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_out_of_memory_halves_the_batch(cache, error, capsys):
    model = honest(cache[1].get_vocab_size())
    want = evaluate_bpb(model, cache[1], 16)

    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            if x.size(0) > 5:
                raise error
            return self.inner(x)

    assert evaluate_bpb(Small(), cache[1], 16) == pytest.approx(want, abs=1e-6)
    assert "trying batches of 4" in capsys.readouterr().err


def test_other_errors_are_not_taken_for_memory(cache):
    def broken(x):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        score(broken, cache)


# ---------------------------------------------------------------------------- what the model returns


def test_a_model_that_cheats_when_given_targets_never_gets_them(cache):
    V = cache[1].get_vocab_size()

    class Cheat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x, targets=None, reduction="mean"):
            if targets is not None:
                return torch.zeros(x.shape)
            return torch.zeros(*x.shape, V)

    uniform = math.log2(V) * (cache[2][:, 1:] < len(cache[1].tokens)).sum() / cache[1].token_bytes[cache[2][:, 1:]].sum()
    assert evaluate_bpb(Cheat(), cache[1], 16) == pytest.approx(uniform, rel=1e-6)


def test_unnormalized_outputs_are_normalized(cache):
    V = cache[1].get_vocab_size()
    table = torch.randn(V, V)
    plain = score(lambda x: table[x], cache)
    assert score(lambda x: table[x] + 100.0, cache) == pytest.approx(plain, rel=1e-4)  # "probabilities" far above 1


@pytest.mark.parametrize(
    "bend, message",
    [
        (lambda z: z.masked_fill(torch.arange(z.size(-1)) == 3, float("nan")), "NaN or infinity"),
        (lambda z: z.masked_fill(torch.arange(z.size(-1)) == 3, float("inf")), "NaN or infinity"),
        (lambda z: z.masked_fill(torch.arange(z.size(-1)) == 3, float("-inf")), "NaN or infinity"),
        (lambda z: z[..., :-1], r"must return logits \(16, 32, 300\), it returned \(16, 32, 299\)"),
        (lambda z: F.pad(z, (0, 20)), "no padded vocabulary"),
        (lambda z: z[:, -1:], r"it returned \(16, 1, 300\)"),
        (lambda z: (z, None), "it returned tuple"),
        (lambda z: z.mean(), r"it returned \(\)"),
    ],
)
def test_improper_logits_are_refused(cache, bend, message):
    table = torch.randn(cache[1].get_vocab_size(), cache[1].get_vocab_size())
    with pytest.raises(VoidScore, match=message):
        score(lambda x: bend(table[x]), cache)
    assert not (cache[0] / "eval.jsonl").exists()


def test_nan_in_one_late_row_only_is_refused(cache):
    table, late = torch.randn(300, 300), torch.from_numpy(cache[2][100, 1:5].astype(np.int64))
    with pytest.raises(VoidScore, match="NaN"):
        score(lambda x: table[x] / (~(x[:, 1:5] == late).all(1)).float()[:, None, None], cache)


# ---------------------------------------------------------------------------- causality and independent rows


def shifted(h, by):
    return torch.cat([h[:, by:], h[:, :by]], 1)


def block_mean(h, size):
    return F.pad(h, (0, 0, 0, -h.size(1) % size)).unflatten(1, (-1, size)).mean(2).repeat_interleave(size, 1)[:, : h.size(1)]


def attention_with_mask(table, offset):
    """One layer of attention over token vectors whose query i sees keys up to i + offset."""

    def forward(x):
        h = table[x]
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril(offset)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask) @ table.T / 4

    return forward


def cheats():
    g = torch.Generator().manual_seed(0)
    E = torch.randn(300, 64, generator=g)
    out = lambda h: h @ E.T / 8  # noqa: E731
    found = {f"block of {k}": (lambda x, k=k: out(E[x] + block_mean(E[x], k))) for k in (2, 3, 4, 5, 7, 8, 16, 31, 32)}
    found |= {f"sees {d} ahead": (lambda x, d=d: out(E[x] + shifted(E[x], d))) for d in (1, 2, 3, 9, 30)}
    found |= {
        "FFT over time": lambda x: out(torch.fft.fft(E[x], dim=1).real),
        "mean over time": lambda x: out(E[x] + E[x].mean(1, keepdim=True)),
        "mask off by one": attention_with_mask(E, 1),
        "mask off by three": attention_with_mask(E, 3),
        "gate of 1e-4": lambda x: out(E[x] + 1e-4 * shifted(E[x], 1)),
        "mean of the batch": lambda x: out(E[x] - E[x].mean(0)),
        "batch normalization": lambda x: F.batch_norm(out(E[x]).flatten(0, 1), None, None, training=True).view(*x.shape, -1),
        "the row before": lambda x: out(E[x] + E[x].roll(1, 0)),
        "length of the text": lambda x: out(E[x]) + (x == x[:, -1:]).sum(1)[:, None, None] * 0.1,
        "last token only": lambda x: out(E[x] + 0.01 * E[x[:, -1:]]),
        "noise": lambda x: out(E[x]) + 0.1 * torch.randn(*x.shape, 300),
    }
    return found


@pytest.mark.parametrize("name", cheats())
@pytest.mark.parametrize("batch_size", [1, 16])
def test_models_that_leak_are_refused(cache, name, batch_size):
    if batch_size == 1 and ("row" in name or name == "mean of the batch"):
        pytest.skip("a batch of one row has no other row")
    with pytest.raises(VoidScore, match="sees the future or other rows: .* position|differ by"):
        score(cheats()[name], cache, batch_size)
    assert not (cache[0] / "eval.jsonl").exists()


def test_rounding_is_no_excuse_for_a_model_that_repeats_itself(cache):
    """A leak smaller than a unit of bfloat16: allowed to a model that is as noisy, not to one that is exact."""
    table = torch.randn(300, 300)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(VoidScore, match="sees the future"):
        score(lambda x: table[x] + 0.003 * table[x.roll(-1, 1)], cache)


def test_a_leak_is_reported_where_it_begins(cache):
    E = torch.randn(300, 64)
    with pytest.raises(VoidScore, match="from position 1 on, a logit at position 0 changed by"):
        score(lambda x: E[x] @ E.T / 8 + (E[shifted(x, 1)] @ E.T / 8), cache)


def causal_kin():
    E = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    W = torch.randn(64, 64, 5, generator=torch.Generator().manual_seed(1)) / 16
    return {
        "causal convolution": lambda x: F.conv1d(F.pad(E[x].mT, (4, 0)), W).mT @ E.T / 8,
        "token shift backwards": lambda x: (E[x] + F.pad(E[x], (0, 0, 1, 0))[:, :-1]) @ E.T / 8,
        "running mean": lambda x: E[x].cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None] @ E.T / 8,
        "attention": attention_with_mask(E, 0),
        "kernel noise": lambda x: (z := E[x] @ E.T / 8) * (1 + 2**-24 * torch.randn_like(z)),
        "bfloat16 with kernel noise": lambda x: ((z := E[x] @ E.T / 8) * (1 + 2**-9 * torch.randn_like(z))).bfloat16(),
    }


@pytest.mark.parametrize("name", causal_kin())
def test_causal_models_pass(cache, name):
    assert score(causal_kin()[name], cache) > 0


def test_cuts_hold_the_ends_and_reach_everywhere():
    for n, seq_len in ((1, 32), (2, 256), (16, 256), (128, 2048), (16, 2), (400, 256)):
        cuts = prepare.probe_cuts(n, seq_len)
        assert len(cuts) == n and cuts[0] == 1 and all(1 <= c < seq_len for c in cuts)
        assert n < 2 or seq_len - 1 in cuts
    cuts = prepare.probe_cuts(128, 2048)
    assert {64, 65, 63, 1024, 1025} <= set(cuts) and len(set(cuts)) == 128
    assert set(prepare.probe_cuts(400, 256)) == set(range(1, 256))


@pytest.mark.slow
def test_no_false_alarm_in_200_honest_models(cache, monkeypatch):
    """Random depth, width, windows, grouped heads, attention, precision; every fiftieth compiled."""
    draw = random.Random(5)
    V = cache[1].get_vocab_size()
    for seed in range(200):
        heads = draw.choice([1, 2, 4])
        dtype = draw.choice([torch.float32, torch.bfloat16])
        model = honest(
            V, seed, n_layer=draw.randint(1, 4), n_head=heads, n_kv_head=draw.choice([h for h in (1, 2, 4) if heads % h == 0]),
            n_embd=heads * draw.choice([32, 64]), window_pattern=draw.choice(["L", "S", "SL", "SSSL"]), dtype=dtype,
            attend=draw.choice([train.sdpa_attention, train.plain_attention]),
        )  # fmt: skip
        run = torch.compile(model, dynamic=False) if seed % 50 == 0 else model
        rows = cache[2][: 16 if seed % 50 else 32]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            prepare.guarded_score(run, rows, cache[1].token_bytes, draw.choice([4, 16]), torch.device("cpu"))


# ---------------------------------------------------------------------------- models that change while they are scored


def test_a_model_that_trains_on_what_it_is_scored_on_is_refused(cache):
    class Learner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(300, 300))

        def forward(self, x):
            logits = self.table[x]
            with torch.enable_grad():
                loss = F.cross_entropy(self.table[x[:, :-1]].flatten(0, 1), x[:, 1:].flatten())
                grad = torch.autograd.grad(loss, self.table)[0]
            with torch.no_grad():
                self.table -= 10 * grad
            return logits

    with pytest.raises(VoidScore, match="changed|sees|differ"):
        evaluate_bpb(Learner(), cache[1], 16)


def test_changed_parameters_and_buffers_are_noticed(cache):
    class Drifting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(300, 300))
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return self.table[x]

    with pytest.raises(VoidScore, match="changed its parameters or buffers"):
        evaluate_bpb(Drifting(), cache[1], 16)


def test_state_between_batches_is_noticed(cache):
    """A cache of what was seen, kept out of sight: the rows scored first and again last differ."""
    seen = torch.zeros(300)

    def forward(x):
        logits = seen.clone().expand(*x.shape, 300)
        seen.add_(torch.bincount(x.flatten(), minlength=300) * 0.01)
        return logits

    with pytest.raises(VoidScore, match="differ by .* keeps state|sees the future"):
        score(forward, cache)

    calls = [0]

    def patient(x):  # waits until the probe is over
        calls[0] += 1
        return torch.zeros(*x.shape, 300) + (calls[0] > 4) * F.one_hot(torch.tensor(5), 300)

    with pytest.raises(VoidScore, match="keeps state between batches"):
        score(patient, cache)


def test_dropout_is_off_and_the_mode_comes_back(cache):
    class Dropping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(300, 300))
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.table[x])

    model = Dropping().train()
    evaluate_bpb(model, cache[1], 16)
    assert model.training


# ---------------------------------------------------------------------------- identity, tampering, clock


def test_data_id_follows_settings_tokenizer_and_rows():
    base = {"settings": {"a": 1}, "files": {"tokenizer.json": [1, "t"], "val_rows.bin": [1, "v"], "train_x.bin": [1, "x"]}}
    ids = {prepare.data_id(base)}
    for change in ({"settings": {"a": 2}}, {"files": base["files"] | {"tokenizer.json": [1, "T"]}},
                   {"files": base["files"] | {"val_rows.bin": [1, "V"]}}):  # fmt: skip
        ids.add(prepare.data_id(base | change))
    assert len(ids) == 4
    assert prepare.data_id(base | {"files": base["files"] | {"train_x.bin": [2, "y"]}}) in ids  # more training data: same id
    assert all(len(i) == 12 and int(i, 16) >= 0 for i in ids)


@pytest.mark.parametrize("name", ["val_rows.bin", "tokenizer.json"])
def test_a_changed_or_cut_cache_file_is_named(cache, name):
    path = cache[0] / name
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    with pytest.raises(UserError, match=rf"{name} is {len(data) - 2} bytes, {len(data)} expected.*hint"):
        score(lambda x: torch.zeros(*x.shape, 300), cache)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UserError, match=f"{name} is changed.*hint"):
        score(lambda x: torch.zeros(*x.shape, 300), cache)


@pytest.mark.parametrize("name", ["token_nats", "probe", "checked", "data_id", "timing"])
def test_replaced_functions_of_prepare_are_noticed(cache, monkeypatch, name):
    original = getattr(prepare, name)
    monkeypatch.setattr(prepare, name, lambda *a, **k: original(*a, **k))
    with pytest.raises(VoidScore, match=f"prepare.{name} is not the function of its file"):
        score(lambda x: torch.zeros(*x.shape, 300), cache)


def test_replaced_methods_of_prepare_are_noticed(cache, monkeypatch):
    monkeypatch.setattr(prepare.Clock, "elapsed", lambda self: 1.0)
    with pytest.raises(VoidScore, match="prepare.Clock.elapsed is not the function"):
        score(lambda x: torch.zeros(*x.shape, 300), cache)


def set_budget(monkeypatch, seconds: float) -> None:
    monkeypatch.setenv("AUTORESEARCH_TIME_BUDGET", str(seconds))
    prepare.settings.cache_clear()


class FakeTime:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(prepare.time, "perf_counter", lambda: self.now)


def test_clock_runs_once_and_stops_at_the_budget(cache, monkeypatch):
    fake = FakeTime(monkeypatch)
    set_budget(monkeypatch, 10)
    clock = prepare.Clock()
    assert clock.elapsed() == 0 and not clock.done()
    fake.now += 50
    clock.start()
    fake.now += 4
    assert clock.elapsed() == 4 and clock.progress() == pytest.approx(0.4) and not clock.done()
    fake.now += 6
    assert clock.done()
    fake.now += 1
    clock.stop()
    fake.now += 30
    assert clock.elapsed() == 11 and clock.progress() == 1.0
    with pytest.raises(UserError, match="starts once"):
        clock.start()
    with pytest.raises(UserError, match="exactly one"):
        prepare.Clock()


def test_steps_outside_the_clock_are_counted(cache, monkeypatch):
    set_budget(monkeypatch, 10)
    fake = FakeTime(monkeypatch)
    monkeypatch.setattr(prepare, "STARTED", fake.now)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step():
        weight.grad = torch.ones(1)
        optimizer.step()

    step()
    clock = prepare.Clock()
    with clock.warmup(torch.nn.ParameterList([weight]), optimizer):
        step()
    step()
    clock.start()
    for _ in range(3):
        step()
    fake.now += 10
    clock.stop()
    step()
    assert (prepare._run.timed_steps, prepare._run.untimed_steps) == (3, 3)
    spent = prepare.timing()
    assert spent["training_seconds"] == 10 and spent["untimed_steps"] == 3 and "3 optimizer steps outside" in spent["marks"]


def test_marks_name_what_was_outside(cache, monkeypatch):
    fake = FakeTime(monkeypatch)
    monkeypatch.setattr(prepare, "STARTED", fake.now)
    set_budget(monkeypatch, 300)
    assert prepare.timing()["marks"] == "the clock of prepare.py was not used"
    clock = prepare.Clock()
    fake.now += 60
    clock.start()
    fake.now += 301
    clock.stop()
    assert prepare.timing()["marks"] == ""
    fake.now += 200
    assert "260 s outside training (150 s allowed)" in prepare.timing()["marks"]
    clock.training_seconds = 400.0
    assert "trained 400 s of a budget of 300 s" in prepare.timing()["marks"]
