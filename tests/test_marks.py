"""Clock and marks: what a run spent outside the clock, and what it changed there."""

import json
from dataclasses import dataclass

import pytest
import torch

import prepare
from harness.known_answers import FunctionModel
from prepare import UserError, evaluate_bpb

V = 300  # vocabulary of the fixture scored_cache
BUDGET = 300.0


class FakeTime:
    """The clock's time, set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(scored_cache, monkeypatch):
    """FakeTime for a run whose prepare.py was imported just now."""
    fake = FakeTime()
    monkeypatch.setattr(prepare, "_now", fake)
    monkeypatch.setattr(prepare, "STARTED", fake.now)
    return fake


class Table(torch.nn.Module):
    """One row of logits for each token."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(V, V))

    def forward(self, x):
        return self.weight[x]


def warmed_up(clock, time, seconds: float = 0.0) -> Table:
    model = Table()
    with clock.warmup(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        time.now += seconds
    return model


def marks(scored_cache, model=None) -> str:
    evaluate_bpb(model or Table(), scored_cache.tokenizer, 16)
    return scored_cache.record()["marks"]


# ---- the clock ----


def test_the_clock_runs_once_and_stops_at_the_budget(scored_cache, time, use_settings):
    use_settings(scored_cache.folder.parent, TIME_BUDGET=10)
    clock = prepare.Clock()
    assert clock.elapsed() == 0 and not clock.done()
    time.now += 50
    clock.start()
    time.now += 4
    assert clock.elapsed() == 4 and clock.progress() == pytest.approx(0.4) and not clock.done()
    time.now += 6
    assert clock.done()
    time.now += 1
    clock.stop()
    time.now += 30
    assert clock.elapsed() == 11 and clock.progress() == 1.0
    with pytest.raises(UserError, match="starts once"):
        clock.start()
    with pytest.raises(UserError, match="exactly one"):
        prepare.Clock()


@dataclass
class TwoRanks:
    """A clock of one of two ranks; the sums of rank 0 are kept, and rank 1 gets them."""

    sums: list[float]
    rank: int = 0
    asked: int = 0

    def sum_over_ranks(self, value: float) -> float:
        if self.rank == 0:
            self.sums.append(value)
        self.asked += 1
        return self.sums[self.asked - 1]

    def train(self, time, seconds_of_step, resumed: float = 0.0) -> tuple[list[float], float]:
        """(progress before each step, seconds of the budget at the end)."""
        clock = prepare.Clock()
        clock.start(resumed)
        progress = []
        while not clock.done():
            progress.append(clock.progress())
            time.now += seconds_of_step(len(progress))
        clock.stop()
        return progress, clock.elapsed()


@pytest.fixture
def two_ranks(monkeypatch, scored_cache, use_settings) -> TwoRanks:
    """With a budget of 100 s."""
    use_settings(scored_cache.folder.parent, TIME_BUDGET=100)
    both = TwoRanks([])
    monkeypatch.setattr(prepare, "ranks", lambda: (both.rank, 2))
    monkeypatch.setattr(prepare, "sum_over_ranks", both.sum_over_ranks)
    return both


@pytest.mark.parametrize("resumed", [0.0, 60.0])
@pytest.mark.parametrize("seconds", [0.07, 0.3, 1.0, 30.0])
def test_ranks_that_agree_now_and_then_stop_as_if_they_agreed_at_each_step(
    two_ranks, time, seconds, resumed
):
    progress, used = two_ranks.train(time, lambda step: seconds, resumed)
    assert 100 <= used < 100 + seconds + 1e-6
    exact = [(resumed + i * seconds) / 100 for i in range(len(progress))]
    assert progress == pytest.approx(exact, abs=1e-6)
    if seconds < 0.5:
        assert two_ranks.asked < len(progress) / 3


def test_a_rank_with_another_speed_stops_at_the_same_step(two_ranks, time, monkeypatch):
    def uneven(step):
        return 0.05 if step < 1880 else 0.5  # from 94 s on

    progress, used = two_ranks.train(time, uneven)
    assert 100 <= used < 104  # at most ten steps went by before that was noticed
    monkeypatch.setattr(prepare, "_run", prepare.RunState())
    two_ranks.rank = 1
    two_ranks.asked = 0
    assert two_ranks.train(time, lambda step: 0.02)[0] == progress


def test_the_clock_stands_still_in_a_preview(scored_cache, time):
    clock = prepare.Clock()
    clock.start()
    time.now += 10

    def slow(x):
        time.now += 5
        return torch.zeros(*x.shape, V)

    prepare.preview_bpb(FunctionModel(slow), 16)
    assert clock.elapsed() == 10 and clock.paused >= 5


def test_steps_outside_the_clock_are_counted(scored_cache, time):
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(times=1):
        for _ in range(times):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()

    step()
    clock = prepare.Clock()
    with clock.warmup(model, optimizer):
        step(5)
    step()
    clock.start()
    step(3)
    time.now += BUDGET
    clock.stop()
    step()
    assert (prepare._run.timed_steps, prepare._run.untimed_steps) == (3, 3)
    assert "3 optimizer steps outside the clock" in marks(scored_cache, model)
    assert scored_cache.record()["untimed_steps"] == 3


# ---- seconds ----


def test_a_run_without_the_clock_is_marked(scored_cache):
    assert marks(scored_cache) == "the clock of prepare.py was not used"


def test_a_clock_that_never_started_was_not_used(scored_cache):
    prepare.Clock()
    assert marks(scored_cache) == "the clock of prepare.py was not used"


def test_a_fair_run_has_no_marks(scored_cache, time):
    clock = prepare.Clock()
    model = warmed_up(clock, time, seconds=100)
    time.now += 20
    clock.start()
    time.now += BUDGET + 1
    clock.stop()
    assert marks(scored_cache, model) == ""
    record = scored_cache.record()
    assert record["training_seconds"] == BUDGET + 1
    assert record["outside_seconds"] == 120 and record["warmup_seconds"] == 100


@pytest.mark.parametrize(
    "warmup, setup, marked", [(0, 29, ""), (0, 31, "31 s"), (100, 79, ""), (100, 81, "181 s")]
)
def test_seconds_outside_are_judged_by_what_compiling_took(
    scored_cache, time, warmup, setup, marked
):
    clock = prepare.Clock()
    model = warmed_up(clock, time, warmup)
    time.now += setup
    clock.start()
    time.now += BUDGET
    clock.stop()
    found = marks(scored_cache, model)
    assert found.startswith(f"{marked} outside training") if marked else found == ""


def test_seconds_of_fixed_code_are_accounted_for(scored_cache, time):
    clock = prepare.Clock()
    with prepare.accounted_time():
        time.now += 60
    clock.start()
    time.now += BUDGET
    assert marks(scored_cache) == ""


def test_overlong_training_is_marked(scored_cache, time):
    clock = prepare.Clock()
    clock.start()
    time.now += 400
    assert "trained 400 s of a budget of 300 s" in marks(scored_cache)


def test_a_resumed_run_is_marked(scored_cache, time):
    clock = prepare.Clock()
    clock.start(used=200.0)
    time.now += 100
    assert marks(scored_cache) == "resumed after 200 s"


def test_an_evaluation_much_slower_than_training_is_marked(scored_cache, time):
    clock = prepare.Clock()
    clock.start()
    prepare._run.count_batch(10 * scored_cache.rows.size)  # ten validation sets in the budget
    time.now += BUDGET
    clock.stop()

    def slow(x):
        time.now += 20
        return torch.zeros(*x.shape, V)

    assert "scoring took" in marks(scored_cache, FunctionModel(slow))
    quick = json.loads((scored_cache.folder / "eval.jsonl").read_text().splitlines()[0])
    assert quick["seconds"] > 200


# ---- weights and batches ----


def test_weights_changed_before_the_start_are_marked(scored_cache, time):
    """Training by hand, without an optimizer, after the warm-up."""
    clock = prepare.Clock()
    model = warmed_up(clock, time)
    model.weight.data -= 1e-3 * torch.randn(V, V)
    clock.start()
    time.now += BUDGET
    expected = "the weights changed between the warm-up and the start of the clock"
    assert marks(scored_cache, model) == expected


def test_weights_changed_after_the_stop_are_marked(scored_cache, time):
    clock = prepare.Clock()
    model = warmed_up(clock, time)
    clock.start()
    time.now += BUDGET
    clock.stop()
    model.weight.data[3, 4] += 1e-3
    assert marks(scored_cache, model) == "the weights changed after the clock stopped"


def test_time_after_the_stop_is_harmless_if_the_weights_stay(scored_cache, time):
    """Writing a checkpoint takes a while."""
    clock = prepare.Clock()
    model = warmed_up(clock, time)
    clock.start()
    model.weight.data += 0.1  # trained
    time.now += BUDGET
    clock.stop()
    time.now += 20
    assert marks(scored_cache, model) == ""


def test_time_after_the_stop_is_marked_if_other_weights_are_scored(scored_cache, time):
    clock = prepare.Clock()
    warmed_up(clock, time)
    clock.start()
    time.now += BUDGET
    clock.stop()
    averaged = Table()
    averaged.weight.data += 0.1
    time.now += 1
    assert marks(scored_cache, averaged) == ""
    time.now += 15
    assert "16 s passed between the clock's stop and the score" in marks(scored_cache, averaged)


def test_batches_outside_the_clock_are_counted(scored_cache, time):
    clock = prepare.Clock()
    for _ in range(9):
        prepare._run.count_batch(512)
    clock.start()
    prepare._run.count_batch(512)
    time.now += BUDGET
    assert "9 batches were taken outside the clock" in marks(scored_cache)
    record = scored_cache.record()
    assert record["untimed_batches"] == 9 and prepare._run.timed_tokens == 512


def test_a_few_batches_before_the_start_are_normal(scored_cache, time):
    clock = prepare.Clock()
    for _ in range(8):
        prepare._run.count_batch(512)
    clock.start()
    time.now += BUDGET
    assert marks(scored_cache) == ""
