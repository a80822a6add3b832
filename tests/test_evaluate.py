"""The evaluator against brute force, against written-out cheats, and against honest models."""

import json
import math
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prepare
import train
from harness import parameters
from harness.known_answers import FunctionModel, block_mean
from harness.probe import Probe, draw_cuts
from prepare import UserError, VoidScore, evaluate_bpb

V, T = 300, 32  # vocabulary and context of the fixture scored_cache


def table_model(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def honest(seed=0, attend=train.sdpa_attention, **changes):
    """A GPT of train.py with random weights, none of them zero, as after training."""
    config = {"vocab_size": V, "seq_len": T, "n_layer": 2, "n_head": 2, "n_kv_head": 1}
    config |= {"n_embd": 64, "window_pattern": "SL"} | changes
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = train.GPT(train.GPTConfig(**config), attend)
    parameters.initialize(model, torch.device("cpu"))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=1.5 * p.size(-1) ** -0.5)
    return model


def score(function, cache, batch_size=16):
    return evaluate_bpb(FunctionModel(function), cache.tokenizer, batch_size)


def uniform(x):
    return torch.zeros(*x.shape, V)


# ---- the number ----


def brute_force(model, cache, rows) -> tuple[float, int]:
    """(nats, bytes) of rows, one position after the other in float64."""
    nats = 0.0
    n_bytes = 0
    for row in rows.astype(np.int64):
        with torch.no_grad():
            logits = model(torch.from_numpy(row[None, :-1]))[0].double()
        for t, target in enumerate(row[1:]):
            special = target >= len(cache.tokenizer.tokens)
            if not special:
                total = sum(math.exp(value) for value in logits[t].tolist())
                nats += math.log(total) - logits[t, target].item()
                n_bytes += len(cache.tokenizer.tokens[target])
    return nats, n_bytes


@pytest.mark.slow
def test_score_equals_brute_force(scored_cache):
    model = honest()
    nats, n_bytes = brute_force(model, scored_cache, scored_cache.rows)
    bpb = evaluate_bpb(model, scored_cache.tokenizer, 32)
    assert bpb == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)
    record = scored_cache.record()
    assert record["bytes"] == n_bytes
    assert record["nats"] == pytest.approx(nats, rel=1e-6)
    targets = scored_cache.rows[:, 1:]
    assert record["tokens"] == (targets < len(scored_cache.tokenizer.tokens)).sum()


def test_held_out_rows_are_scored_for_the_record_only(scored_cache):
    model = honest()
    nats, n_bytes = brute_force(model, scored_cache, scored_cache.holdout)
    bpb = evaluate_bpb(model, scored_cache.tokenizer, 32)
    record = scored_cache.record()
    assert record["holdout_bpb"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)
    assert record["val_bpb"] == bpb != record["holdout_bpb"]


def test_the_record_says_what_the_run_was(scored_cache):
    facts = {"attention": "plain", "val_bpb": 0.1}  # can't replace what the evaluator says
    bpb = evaluate_bpb(FunctionModel(uniform), scored_cache.tokenizer, 16, facts)
    record = scored_cache.record()
    assert record["run_id"] == "run-7" and record["val_bpb"] == bpb
    assert record["data_id"] == scored_cache.data_id
    assert record["attention"] == "plain" and record["torch"] == torch.__version__
    assert record["fixed"] == prepare.fixed_hash(prepare.Path(prepare.__file__).parent)
    assert record["eval_version"] == prepare.EVAL_VERSION


@pytest.mark.slow
def test_every_batch_size_gives_the_same_score(scored_cache):
    model = honest()
    n = len(scored_cache.rows)
    scores = [evaluate_bpb(model, scored_cache.tokenizer, b) for b in (1, 7, 32, 128, n + 50)]
    assert max(scores) - min(scores) < 1e-6
    assert len({(r["bytes"], r["tokens"]) for r in scored_cache.records()}) == 1


def test_the_model_sees_one_shape_only(scored_cache):
    """Another shape would compile another graph: the last batch is filled up."""
    table = table_model(V, V)
    shapes = set()

    def forward(x):
        shapes.add(tuple(x.shape))
        return table[x]

    score(forward, scored_cache, 32)
    assert shapes == {(32, T)}


def test_chunks_do_not_change_the_score(scored_cache, monkeypatch):
    model = honest()
    in_one = evaluate_bpb(model, scored_cache.tokenizer, 16)
    sizes = []
    cross_entropy = prepare._cross_entropy

    def noted(logits, *args, **options):
        sizes.append(logits.numel())
        return cross_entropy(logits, *args, **options)

    noted.__code__ = noted.__code__.replace(co_filename=F.__file__)  # else it counts as replaced
    monkeypatch.setattr(prepare, "CHUNK", 7 * V)
    monkeypatch.setattr(prepare, "_cross_entropy", noted)
    in_chunks = evaluate_bpb(model, scored_cache.tokenizer, 16)
    assert in_chunks == pytest.approx(in_one, abs=1e-9)
    assert max(sizes) <= prepare.CHUNK


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("can't allocate memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_out_of_memory_halves_the_batch(scored_cache, error, capsys):
    model = honest()
    expected = evaluate_bpb(model, scored_cache.tokenizer, 16)

    def small(x):
        if x.size(0) > 5:
            raise error
        return model(x)

    assert score(small, scored_cache) == pytest.approx(expected, abs=1e-6)
    assert "trying batches of 4" in capsys.readouterr().err


def test_other_errors_are_not_taken_for_memory(scored_cache):
    def broken(x):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        score(broken, scored_cache)


def test_a_model_without_parameters_is_scored(scored_cache):
    class Uniform(torch.nn.Module):
        def forward(self, x):
            return uniform(x)

    expected = score(uniform, scored_cache)
    assert evaluate_bpb(Uniform(), scored_cache.tokenizer, 16) == expected


def test_a_preview_uses_rows_of_its_own_and_marks_nothing(scored_cache):
    nats, n_bytes = brute_force(FunctionModel(uniform), scored_cache, scored_cache.preview)
    clock = prepare.Clock()
    clock.start()
    bpb = prepare.preview_bpb(FunctionModel(uniform), 16)
    assert bpb == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)
    assert clock.paused > 0 and not scored_cache.records()
    score(uniform, scored_cache)
    assert "preview" not in scored_cache.record()["marks"]


# ---- what the model returns ----


def test_a_model_that_cheats_when_given_targets_never_gets_them(scored_cache):
    class Cheat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x, targets=None, reduction="mean"):
            return uniform(x) if targets is None else torch.zeros(x.shape)

    expected = score(uniform, scored_cache)
    assert evaluate_bpb(Cheat(), scored_cache.tokenizer, 16) == expected


def test_unnormalized_outputs_are_normalized(scored_cache):
    table = table_model(V, V)
    plain = score(lambda x: table[x], scored_cache)
    shifted = score(lambda x: table[x] + 100.0, scored_cache)  # "probabilities" far above 1
    assert shifted == pytest.approx(plain, rel=1e-4)


def with_one(value: str):
    """Logits in which one token has this value."""
    return lambda z: z.masked_fill(torch.arange(z.size(-1)) == 3, float(value))


@pytest.mark.parametrize(
    "change, message",
    [
        (with_one("nan"), "NaN or infinity"),
        (with_one("inf"), "NaN or infinity"),
        (with_one("-inf"), "NaN or infinity"),
        (lambda z: z[..., :-1], r"must return logits \(16, 32, 300\), it returned \(16, 32, 299\)"),
        (lambda z: F.pad(z, (0, 20)), "no padded vocabulary"),
        (lambda z: z[:, -1:], r"it returned \(16, 1, 300\)"),
        (lambda z: (z, None), "it returned tuple"),
        (lambda z: z.mean(), r"it returned \(\)"),
    ],
)
def test_improper_logits_are_refused(scored_cache, change, message):
    table = table_model(V, V)
    with pytest.raises(VoidScore, match=message):
        score(lambda x: change(table[x]), scored_cache)
    assert not scored_cache.records()


def test_nan_in_one_late_row_only_is_refused(scored_cache):
    table = table_model(V, V)
    late = torch.from_numpy(scored_cache.rows[100, 1:5].astype(np.int64))

    def forward(x):
        is_late = (x[:, 1:5] == late).all(1)
        return table[x] / (~is_late).float()[:, None, None]

    with pytest.raises(VoidScore, match="NaN"):
        score(forward, scored_cache)


# ---- causality and independent rows ----


def shifted(h, by):
    return torch.cat([h[:, by:], h[:, :by]], 1)


def attention_with_mask(table, offset):
    """One layer of attention over token vectors whose query i sees keys up to i + offset."""

    def forward(x):
        h = table[x]
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril(offset)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask) @ table.T / 4

    return forward


E = table_model(V, 64)


def out(h):
    return h @ E.T / 8


def row_before(x):
    return out(E[x] + E[x].roll(1, 0))


def ends_like_it(x):
    """How often the last token of the row occurs in it."""
    return out(E[x]) + (x == x[:, -1:]).sum(1)[:, None, None] * 0.1


def normalized_over_the_batch(x):
    return F.batch_norm(out(E[x]).flatten(0, 1), None, None, training=True).view(*x.shape, -1)


def drop_over_capacity(x):
    """Mixture of experts with too little room: a token that comes late in the batch is dropped."""
    expert = x.flatten() % 4
    place = F.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0]
    kept = place <= x.numel() // 6
    return out(E[x] * kept.view(*x.shape, 1))


CHEATS = {
    **{
        f"block of {k}": (lambda x, k=k: out(E[x] + block_mean(E[x], k)))
        for k in (2, 3, 4, 5, 7, 8, 16, 31, 32)
    },
    **{f"sees {d} ahead": (lambda x, d=d: out(E[x] + shifted(E[x], d))) for d in (1, 2, 3, 9, 30)},
    "FFT over time": lambda x: out(torch.fft.fft(E[x], dim=1).real),
    "mean over time": lambda x: out(E[x] + E[x].mean(1, keepdim=True)),
    "mask off by one": attention_with_mask(E, 1),
    "mask off by three": attention_with_mask(E, 3),
    "gate of 1e-4": lambda x: out(E[x] + 1e-4 * shifted(E[x], 1)),
    "mean of the batch": lambda x: out(E[x] - E[x].mean(0)),
    "batch normalization": normalized_over_the_batch,
    "experts without room": drop_over_capacity,
    "the row before": row_before,
    "length of the text": ends_like_it,
    "last token only": lambda x: out(E[x] + 0.01 * E[x[:, -1:]]),
    "noise": lambda x: out(E[x]) + 0.1 * torch.randn(*x.shape, V),
}
NEED_OTHER_ROWS = ("the row before", "mean of the batch", "experts without room")


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("name", CHEATS)
def test_models_that_leak_are_refused(scored_cache, name, batch_size):
    if batch_size == 1 and name in NEED_OTHER_ROWS:
        pytest.skip("a batch of one row has no other row")
    with pytest.raises(VoidScore, match="sees the future or other rows: .* position|differ by"):
        score(CHEATS[name], scored_cache, batch_size)
    assert not scored_cache.records()


def leak_at(position: int):
    """A model whose logits at one position see the next token, and nothing else wrong."""

    def forward(x):
        h = E[x].clone()
        h[:, position] += E[x[:, position + 1]]
        return out(h)

    return forward


@pytest.mark.parametrize("position", range(T - 1))
def test_a_leak_at_any_single_position_is_refused_where_every_position_fits(
    scored_cache, monkeypatch, position
):
    monkeypatch.setattr(prepare, "PROBE_SHARE", 1)
    message = rf"from position {position + 1} on, a logit at position {position} changed"
    with pytest.raises(VoidScore, match=message):
        score(leak_at(position), scored_cache)


def test_a_score_that_may_be_kept_is_probed_everywhere(scored_cache, monkeypatch):
    def cuts_elsewhere(n, seq_len, seed):
        cuts = [c for c in range(1, seq_len) if c != 6]
        return cuts[:n], [*cuts[n:], 6]

    monkeypatch.setattr(prepare, "draw_cuts", cuts_elsewhere)
    bpb = score(leak_at(5), scored_cache)  # not found: no cut is there
    assert scored_cache.record()["swept"] is False
    monkeypatch.setenv("AUTORESEARCH_SWEEP_BELOW", str(bpb - 0.01))
    score(leak_at(5), scored_cache)  # not found, and not good enough to be kept
    monkeypatch.setenv("AUTORESEARCH_SWEEP_BELOW", str(bpb + 0.01))
    with pytest.raises(VoidScore, match="from position 6 on, a logit at position 5"):
        score(leak_at(5), scored_cache)
    score(uniform, scored_cache)  # better still, and no leak
    assert scored_cache.record()["swept"] is True


def test_cuts_are_drawn_without_repetition_and_reach_everywhere():
    for n, seq_len in ((1, 32), (16, 256), (300, 256), (16, 2), (16, 1)):
        cuts, rest = draw_cuts(n, seq_len, seed=n)
        assert len(cuts) == min(n, seq_len - 1)
        assert sorted(cuts + rest) == list(range(1, seq_len))
    assert draw_cuts(16, 256, 1) == draw_cuts(16, 256, 1) != draw_cuts(16, 256, 2)


def test_every_run_draws_its_own_cuts(scored_cache, monkeypatch):
    drawn = []

    def noted(n, seq_len, seed):
        drawn.append(seed)
        return draw_cuts(n, seq_len, seed)

    monkeypatch.setattr(prepare, "draw_cuts", noted)
    score(uniform, scored_cache)
    score(uniform, scored_cache)
    assert len(set(drawn)) == 2


def test_rounding_is_no_excuse_for_a_model_that_repeats_itself(scored_cache):
    """A leak below a unit of bfloat16: allowed to a model that is as noisy, not to an exact one."""
    table = table_model(V, V)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(VoidScore, match="sees the future"):
        score(lambda x: table[x] + 0.003 * table[x.roll(-1, 1)], scored_cache)


W = table_model(64, 64, 5, seed=1) / 16


def running_mean(x):
    return out(E[x].cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None])


def noisy_kernel(x, unit: float):
    z = out(E[x])
    return z * (1 + unit * torch.randn_like(z))


CAUSAL = {
    "causal convolution": lambda x: out(F.conv1d(F.pad(E[x].mT, (4, 0)), W).mT),
    "token shift backwards": lambda x: out(E[x] + F.pad(E[x], (0, 0, 1, 0))[:, :-1]),
    "running mean": running_mean,
    "attention": attention_with_mask(E, 0),
    "kernel noise": lambda x: noisy_kernel(x, 2**-24),
    "bfloat16 with kernel noise": lambda x: noisy_kernel(x, 2**-9).bfloat16(),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models_pass(scored_cache, name):
    assert score(CAUSAL[name], scored_cache) > 0


class Experts(torch.nn.Module):
    """A mixture of experts with room for every token."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, 32)
        self.router = torch.nn.Linear(32, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.head = torch.nn.Linear(32, V)

    def forward(self, x):
        h = self.embedding(x).flatten(0, 1)
        weight, chosen = self.router(h).softmax(-1).max(-1)
        result = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            result[chosen == i] = expert(h[chosen == i]).to(h.dtype)
        return self.head(h + weight[:, None] * result).unflatten(0, x.shape)


class BatchNormalized(torch.nn.Module):
    """Batch normalization, which at evaluation uses its running statistics."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.head = torch.nn.Linear(32, V)

    def forward(self, x):
        h = self.norm(self.embedding(x).flatten(0, 1))
        return self.head(h).unflatten(0, x.shape)


class Tied(torch.nn.Module):
    """One matrix for input and output, a recurrent layer in between."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, 32)
        self.layer = torch.nn.GRU(32, 32, batch_first=True)
        self.head = torch.nn.Linear(32, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layer(self.embedding(x))[0])


@pytest.mark.parametrize("kind", [Experts, BatchNormalized, Tied])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_other_architectures_pass(scored_cache, kind, bfloat16):
    torch.manual_seed(0)
    model = kind()
    model(torch.randint(V, (16, T)))  # a step of training, for the running statistics
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        evaluate_bpb(model, scored_cache.tokenizer, 16)
    assert "repeat" not in scored_cache.record()["marks"]


@pytest.mark.slow
def test_no_false_alarm_in_200_honest_models(scored_cache):
    """Random depth, width, windows, heads, attention, precision; every hundredth compiled."""
    draw = random.Random(5)
    for seed in range(200):
        heads = draw.choice([1, 2, 4])
        dtype = draw.choice([torch.float32, torch.bfloat16])
        model = honest(
            seed,
            attend=draw.choice([train.sdpa_attention, train.plain_attention]),
            n_layer=draw.randint(1, 4),
            n_head=heads,
            n_kv_head=draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
            n_embd=heads * draw.choice([32, 64]),
            window_pattern=draw.choice(["L", "S", "SL", "SSSL"]),
            dtype=dtype,
        )
        compiled = seed % 100 == 0
        run = torch.compile(model, dynamic=False) if compiled else model
        rows = scored_cache.rows[: 32 if compiled else 16]
        cuts, _ = draw_cuts(len(rows), T, seed)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            _, probe = prepare.guarded_score(
                run, rows, scored_cache.token_bytes, draw.choice([4, 16]), torch.device("cpu"), cuts
            )
        assert probe.noise == 0


def test_the_tolerance_follows_the_size_of_the_logits():
    probe = Probe(FunctionModel(lambda x: 10 * E[x] @ E.T), V, [5])
    x = torch.randint(V, (1, T))
    logits = probe.model(x)
    probe.check(x, logits, 1)
    assert probe.limit == pytest.approx(64 * 2**-23 * logits.abs().max().item())


# ---- models that change while they are scored ----


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(V, V))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        return self.table[x]


def test_a_model_that_trains_on_what_it_is_scored_on_is_refused(scored_cache):
    class Learner(Table):
        def forward(self, x):
            logits = self.table[x]
            with torch.enable_grad():
                loss = F.cross_entropy(self.table[x[:, :-1]].flatten(0, 1), x[:, 1:].flatten())
                grad = torch.autograd.grad(loss, self.table)[0]
            with torch.no_grad():
                self.table -= 10 * grad
            return logits

    with pytest.raises(VoidScore, match="changed|sees|differ"):
        evaluate_bpb(Learner(), scored_cache.tokenizer, 16)


def test_changed_buffers_are_noticed(scored_cache):
    class Counting(Table):
        def forward(self, x):
            self.calls += 1
            return self.table[x]

    with pytest.raises(VoidScore, match="changed its parameters or buffers"):
        evaluate_bpb(Counting(), scored_cache.tokenizer, 16)


def test_parameters_changed_behind_autograd_are_noticed(scored_cache):
    class Hidden(Table):
        def forward(self, x):
            self.table.data[0, 0] += 1e-6  # no version counter sees this
            return self.table[x]

    with pytest.raises(VoidScore, match="changed its parameters or buffers"):
        evaluate_bpb(Hidden(), scored_cache.tokenizer, 16)


def test_a_table_of_what_was_seen_is_noticed(scored_cache):
    """Kept out of sight: but the rows that are scored first and again last differ."""
    seen = torch.zeros(V)

    def forward(x):
        logits = seen.clone().expand(*x.shape, V)
        seen.add_(torch.bincount(x.flatten(), minlength=V) * 0.01)
        return logits

    with pytest.raises(VoidScore, match="differ by .* keeps state|sees the future"):
        score(forward, scored_cache)


def test_a_model_that_changes_after_the_first_batches_is_noticed(scored_cache):
    calls = [0]

    def forward(x):
        calls[0] += 1
        return uniform(x) + (calls[0] > 4) * F.one_hot(torch.tensor(5), V)

    with pytest.raises(VoidScore, match="keeps state between batches|sees the future"):
        score(forward, scored_cache)


def test_dropout_is_off_and_the_mode_comes_back(scored_cache):
    class Dropping(Table):
        def forward(self, x):
            return F.dropout(self.table[x] + 1.0, 0.5, self.training)

    model = Dropping().train()
    evaluate_bpb(model, scored_cache.tokenizer, 16)
    assert model.training


# ---- the data of the run ----


def test_data_id_follows_settings_tokenizer_and_held_out_rows():
    names = ("tokenizer.json", "val_rows.bin", "holdout_rows.bin", "train_x.bin")
    base = {"settings": {"a": 1}, "files": {name: [1, name] for name in names}}

    def with_other(name):
        return base | {"files": base["files"] | {name: [1, "other"]}}

    others = [base | {"settings": {"a": 2}}, *(with_other(name) for name in names[:3])]
    ids = {prepare.data_id(manifest) for manifest in (base, *others)}
    assert len(ids) == 5
    assert prepare.data_id(with_other("train_x.bin")) == prepare.data_id(base)
    assert all(re.fullmatch("[0-9a-f]{12}", i) for i in ids)


@pytest.mark.parametrize("name", ["val_rows.bin", "holdout_rows.bin", "tokenizer.json"])
def test_a_changed_or_cut_cache_file_is_named(scored_cache, name):
    path = scored_cache.folder / name
    data = path.read_bytes()
    scored_cache.begin_run()
    path.write_bytes(data[:-2])
    expected = rf"{name} is {len(data) - 2} bytes, {len(data)} expected.*hint"
    with pytest.raises(UserError, match=expected):
        score(uniform, scored_cache)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UserError, match=f"{name} is changed.*hint"):
        score(uniform, scored_cache)


def test_data_that_change_during_the_run_make_it_void(scored_cache):
    prepare.Tokenizer.from_directory()  # the run begins
    manifest = prepare.load_manifest(scored_cache.folder)
    manifest["settings"] = {"other": 1}
    (scored_cache.folder / "manifest.json").write_text(json.dumps(manifest))
    expected = (
        rf"changed during.* data_id {scored_cache.data_id} became {prepare.data_id(manifest)}"
    )
    with pytest.raises(VoidScore, match=expected):
        score(uniform, scored_cache)
    with pytest.raises(VoidScore, match=expected):
        prepare.make_dataloader(scored_cache.tokenizer, 2, T, "train")


def test_a_preparation_under_way_makes_the_run_void(scored_cache):
    path = scored_cache.folder / "manifest.json"
    complete = path.read_text()
    path.unlink()
    with pytest.raises(UserError, match="run 'python prepare.py' first"):
        prepare.Tokenizer.from_directory()  # nothing was ever prepared
    path.write_text(complete)
    prepare.Tokenizer.from_directory()
    path.unlink()
    with pytest.raises(VoidScore, match="the prepared data changed during the run: .*unfinished"):
        score(uniform, scored_cache)
