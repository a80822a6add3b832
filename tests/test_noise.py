"""Noise first, then verdicts from several runs: what is measured counts, also after a kill."""

import json
import os
import signal

import pytest
from helpers import wait_until
from lab import Lab, finished, killed

NOISE = [0.0, 0.004, -0.004, 0.002, -0.002]  # by seed: a standard deviation of 0.0032


class NoisyLab(Lab):
    """A lab whose train.py has another score on each seed, and `try` as a user types it."""

    def edit(self, score=1.0, body="", noise=None):
        super().edit(score, body, noise or NOISE)

    def attempt(self, description, *args, code=0, **environment):
        return self.call("try", description, *args, code=code, **environment).text

    def scores(self) -> list[dict]:
        """All entries of scores.jsonl."""
        path = self.root / ".autoresearch" / "scores.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def lab(tmp_path):
    return NoisyLab(tmp_path / "repo")


@pytest.fixture(scope="module")
def checkout_with_noise(tmp_path_factory):
    lab = NoisyLab(tmp_path_factory.mktemp("lab") / "repo")
    lab.attempt("baseline")
    return lab.root


@pytest.fixture
def based(checkout_with_noise, tmp_path):
    return NoisyLab(tmp_path / "repo", original=checkout_with_noise)


def test_the_first_try_measures_the_noise_before_its_idea(lab):
    lab.edit(0.9)
    out = lab.attempt("clearly better")
    assert "measuring the noise: 4 more runs" in out and "minutes" in out
    kinds = [entry["kind"] for entry in lab.scores()[:6]]
    assert kinds == ["baseline", *["repeat"] * 4, "run"]
    assert [entry["seed"] for entry in lab.scores()[:6]] == [*range(1337, 1342), 1337]
    assert lab.rows()[0]["repeats"] == [entry["score"] for entry in lab.scores()[:5]]
    assert lab.column("description") == ["baseline", "clearly better"]
    assert "measured" in lab.rows()[1]["floor_source"]


@pytest.mark.slow
def test_repeats_that_an_interruption_cut_off_are_not_lost(lab, tmp_path):
    slow = "if seed == 1340:\n    open(folder + '/third', 'w').close(); time.sleep(60)"
    lab.edit(1.0, slow)
    lab.git("commit", "-qam", "slow on the fourth seed")
    process = lab.start("try", "baseline")
    wait_until(lambda: list(lab.runs.glob("*/third")))
    killed(process)
    lab.call("status")
    assert [entry["seed"] for entry in lab.scores()] == [1337, 1338, 1339]
    assert len(lab.rows()) == 1
    assert not lab.living()
    out = lab.call("noise", "--repeats", "3").out
    assert "n 3" in out and len(lab.scores()) == 3  # nothing had to be measured again


def test_noise_prints_the_floor_of_all_scores_of_the_incumbent(based):
    out = based.call("noise", "--repeats", "6").out
    assert "mean 1.000000" in out and "n 6" in out
    assert len(based.scores()) == 6


@pytest.mark.slow
def test_a_doubtful_candidate_is_run_again_on_other_seeds(based):
    based.edit(0.995)
    out = based.attempt("1.6 standard deviations better")
    row = based.rows()[-1]
    assert row["runs"] > 1 and len(row["repeats"]) == row["runs"]
    assert len(based.rows()) == 2 and "of the candidate" in out
    seeds = [entry["seed"] for entry in based.scores() if entry["code"] == row["code"]]
    assert seeds == list(range(1337, 1337 + row["runs"]))
    assert abs(row["metric"] - 0.995) < 0.004


def test_once_judges_by_one_run(based):
    based.edit(0.995)
    based.attempt("1.6 standard deviations better", "--once")
    row = based.rows()[-1]
    assert (row["status"], row["reason"], row["runs"]) == ("discard", "within noise", 1)


@pytest.mark.parametrize(("score", "status", "runs"), [(1.1, "discard", 1), (0.9, "keep", 2)])
def test_a_clear_result_takes_few_runs(based, score, status, runs):
    based.edit(score)
    based.attempt("clear")
    row = based.rows()[-1]
    assert row["status"] == status and row["runs"] <= runs


@pytest.mark.slow
def test_the_same_code_tried_twice_counts_twice(based):
    based.edit(0.995)
    based.attempt("a near miss", "--once")
    first = based.rows()[-1]["runs"]
    based.edit(0.995)
    based.attempt("the same again", "--once")
    assert based.rows()[-1]["runs"] == first + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_scored_candidate_is_no_crash_when_its_confirmation_is_cut_off(based, number):
    based.edit(0.995, "if seed == 1338:\n    time.sleep(60)")
    process = based.start("try", "cut off")
    wait_until(lambda: list(based.runs.glob("open-probe-*/settings.json")))
    os.kill(process.pid, number)
    finished(process)
    based.call("status")
    row = based.rows()[-1]
    assert (row["status"], row["reason"]) == ("discard", "undecided")
    assert row["metric"] == 0.995
    based.assert_settled()
    assert not based.living()


def test_a_candidate_that_fails_on_another_seed_is_dropped_with_the_reason(based):
    based.edit(0.995, "if seed == 1338:\n    raise ValueError('boom')")
    out = based.attempt("fragile")
    row = based.rows()[-1]
    assert (row["status"], row["reason"]) == ("discard", "undecided")
    assert "boom" in row["detail"] and "boom" in out


@pytest.mark.slow
def test_confirm_keeps_what_all_scores_support(based):
    based.edit(0.95, "if seed == 1337:\n    score = record['val_bpb'] = 0.9995")
    based.attempt("unlucky at first", "--once")
    assert based.rows()[-1]["status"] == "discard"
    based.call("confirm", based.rows()[-1]["id"])
    row = based.rows()[-1]
    assert row["status"] == "keep" and row["runs"] > 2
    assert based.subjects()[0] == "confirm: unlucky at first"


# ---- a machine that is busy ----

# The speed of the fixed product, by the attempts that were made: slow while the file is there.
PROBE = """
record['probe_tflops'] = [1.0, 1.0]
if os.path.exists(os.environ.get('BUSY', '')):
    record['probe_tflops'] = [0.5, 0.6]
    if os.environ.get('ONCE'):
        os.remove(os.environ['BUSY'])
"""


@pytest.fixture(scope="module")
def checkout_with_probes(tmp_path_factory):
    lab = NoisyLab(tmp_path_factory.mktemp("lab") / "repo")
    lab.edit(1.0, PROBE)
    lab.git("commit", "-qam", "with the speed of a fixed product")
    lab.attempt("baseline")
    return lab.root


@pytest.fixture
def probed(checkout_with_probes, tmp_path):
    return NoisyLab(tmp_path / "repo", original=checkout_with_probes)


def test_a_disturbed_run_is_repeated_once_and_judged_by_the_second(probed, tmp_path):
    (tmp_path / "busy").touch()
    probed.edit(1.1, PROBE)
    out = probed.attempt("on a busy machine", BUSY=str(tmp_path / "busy"), ONCE="1")
    row = probed.rows()[-1]
    assert "slower than usual" in out and "repeated once" in out
    assert (row["status"], row["reason"], row["runs"]) == ("discard", "worse", 1)
    assert [bool(entry.get("disturbed")) for entry in probed.scores()[-2:]] == [True, False]


@pytest.mark.slow
def test_a_run_that_is_disturbed_twice_is_not_judged(probed, tmp_path):
    (tmp_path / "busy").touch()
    probed.edit(0.9, PROBE)
    out = probed.attempt("on a busy machine", code=1, BUSY=str(tmp_path / "busy"))
    row = probed.rows()[-1]
    assert (row["status"], row["reason"]) == ("checks_failed", "disturbed")
    assert "confirm" in out and probed.score_at() == 1.0
    done = probed.call("sweep", "SCORE=0.8", code=1, BUSY=str(tmp_path / "busy"))
    assert "SCORE=0.8: failed (disturbed), run 3" in done.err and "not measured" in done.out
    probed.call("confirm", str(row["run"]))
    assert probed.rows()[-1]["status"] == "keep"


def test_an_edit_that_is_itself_slower_is_judged(probed):
    probed.edit(1.1, PROBE + "time.sleep(1)\n")
    probed.attempt("slower by itself")
    assert probed.rows()[-1]["reason"] == "worse"


# ---- whole sessions ----

# Normal scatter with a standard deviation of 0.003, another for each text of train.py and seed.
SCATTER = """
import hashlib, random
with open(__file__, 'rb') as file:
    digest = hashlib.sha256(file.read() + str(seed).encode()).hexdigest()
score = record['val_bpb'] = score + random.Random(digest).gauss(0, 0.003)
"""


@pytest.mark.slow
@pytest.mark.parametrize("session", ["a", "b"])
def test_a_session_keeps_the_gain_and_not_the_neutral_edits(lab, session):
    lab.edit(1.0, SCATTER + f"'session {session}'", noise=[0.0])
    lab.git("commit", "-qam", "with scatter")
    for n in range(12):
        score = 1.0 if n < 6 else 0.985  # edit 6 gains five standard deviations
        lab.edit(score, SCATTER + f"'session {session}, edit {n}'", noise=[0.0])
        lab.attempt(f"edit {n}")
    kept = [row["description"] for row in lab.rows()[1:] if row["status"] == "keep"]
    assert "edit 6" in kept and len(kept) <= 2
    runs = [row["runs"] for row in lab.rows()[1:]]
    assert sum(runs) / len(runs) < 2.5
