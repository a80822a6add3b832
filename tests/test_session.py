"""A session has the settings of its baseline, and belongs to one checkout."""

import pytest
from helpers import git
from lab import Lab, finished, score_in


@pytest.fixture(scope="module")
def checkout_with_settings(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab") / "repo")
    lab.attempt("baseline", AUTORESEARCH_TIME_BUDGET="60", AUTORESEARCH_SEED="7")
    return lab.root


@pytest.fixture
def based(checkout_with_settings, tmp_path):
    return Lab(tmp_path / "repo", original=checkout_with_settings)


def test_a_shell_without_the_variables_goes_on_with_the_sessions_settings(based):
    based.edit(0.9)
    based.attempt("in a fresh shell")
    assert based.column("budget") == [60, 60] and based.column("seed") == [7, 7]
    assert based.column("segment") == [0, 0]
    assert "budget 60 s, seed 7" in based.call("resume").out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AUTORESEARCH_TIME_BUDGET", "300"),
        ("AUTORESEARCH_SEED", "8"),
        ("AUTORESEARCH_PROFILE", "full"),
        ("AUTORESEARCH_DATA", "tinystories"),
    ],
)
def test_another_setting_is_refused_unless_a_new_session_is_asked_for(based, variable, value):
    based.edit(0.9)
    out = based.attempt("elsewhere", code=2, **{variable: value})
    assert variable in out and value in out and "--new-session" in out
    assert len(based.rows()) == 1 and score_in(based.train.read_text()) == 0.9
    based.attempt("begin again", "--new-session", **{variable: value})
    assert based.column("segment") == [0, 1, 1]
    assert based.column("description") == ["baseline", "baseline", "begin again"]
    based.edit(0.8)
    based.attempt("in the new session")
    assert based.rows()[-1]["segment"] == 1


def test_check_names_a_setting_that_try_would_refuse(based):
    based.edit(0.9)
    assert "ok    settings: those of the session" in based.call("check").out
    out = based.call("check", code=2, AUTORESEARCH_SEED="8").out
    assert "FAIL  settings" in out and "AUTORESEARCH_SEED" in out
    out = based.call("check", code=2, AUTORESEARCH_SEED="-8").out
    assert "FAIL  settings: AUTORESEARCH_SEED='-8' is not a whole number" in out


def test_a_setting_out_of_range_is_refused_before_the_baseline(lab):
    lab.edit(0.9)
    out = lab.attempt("nonsense", code=2, AUTORESEARCH_TIME_BUDGET="-5")
    assert "AUTORESEARCH_TIME_BUDGET='-5'" in out and not lab.log.exists()


def test_the_same_value_in_other_words_is_no_other_setting(based):
    based.edit(0.9)
    based.attempt("the same", AUTORESEARCH_TIME_BUDGET="60.0", AUTORESEARCH_SEED="007")
    assert based.column("segment") == [0, 0]


@pytest.mark.parametrize(
    ("change", "trains"),
    [
        ({"FAKE_DEVICE": "cuda"}, False),
        ({"FAKE_DATA": "ba9876543210"}, False),
        ({"FAKE_DEVICE": "cpu of another make"}, True),  # only the record has the name
    ],
)
def test_a_device_or_data_that_changed_meanwhile_is_refused(based, tmp_path, change, trains):
    based.edit(0.9, f"open({str(tmp_path / 'trained')!r}, 'w').close()")
    out = based.attempt("at 2 am", code=2, **change)
    assert next(iter(change.values())) in out and "--new-session" in out
    assert (tmp_path / "trained").exists() == trains
    assert len(based.rows()) == 1 and score_in(based.train.read_text()) == 0.9
    based.assert_settled(edited=True)
    assert not based.git("for-each-ref", "refs/autoresearch/runs")


def test_accepted_changes_of_fixed_files_begin_a_session_with_its_own_baseline(based):
    (based.root / "prepare.py").write_text(based.git("show", "HEAD:prepare.py") + "\n# easier\n")
    based.git("commit", "-qam", "accepted")
    based.call("session")
    based.edit(0.9)
    based.attempt("under other rules")
    assert based.column("segment") == [0, 1, 1]
    rows = based.rows()
    assert rows[0]["fixed"] != rows[1]["fixed"] == rows[2]["fixed"]


START_IN = """
import os, sys
os.chdir({folder!r})
os.execv(sys.executable, [sys.executable, "-m", "harness", "session"])
"""


def test_accepting_changes_in_one_worktree_is_none_of_the_others_business(based, tmp_path):
    other = tmp_path / "other"
    based.git("worktree", "add", "-q", "-b", "autoresearch/other", str(other))
    (other / "prepare.py").write_text((other / "prepare.py").read_text() + "\n# easier\n")
    git(other, "commit", "-qam", "accepted there")
    done = finished(based.start(script=("-c", START_IN.format(folder=str(other)))))
    assert "a new session starts" in done.err
    based.edit(0.9)
    based.attempt("here nothing changed")
    assert based.rows()[-1]["status"] == "keep"


# ---- seeds ----


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("random.seed(seed)", "random.seed(seed + 2)"),
        ("SEED = 1", "SEED = 2"),
        ("torch.manual_seed(seed)", "torch.manual_seed(42)"),
    ],
)
def test_an_edit_of_the_seed_only_is_named_and_not_run(lab, before, after):
    stand_in = "import random\nfrom unittest.mock import Mock\ntorch = Mock()\n"
    lab.edit(1.0, stand_in + before)
    lab.git("commit", "-qam", "uses the seed")
    lab.attempt("baseline")
    lab.edit(1.0, stand_in + after)
    out = lab.attempt("a luckier seed", code=2)
    assert "the seed only" in out and len(lab.rows()) == 1


def test_an_edit_of_the_seed_and_of_more_is_an_idea(based):
    based.edit(0.9, "SEED = 3")
    based.attempt("a better score, too")
    assert based.rows()[-1]["status"] == "keep"
