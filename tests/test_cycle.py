"""`try` in temporary repositories: the real harness around a stand-in train.py."""

import shutil

import helpers
import pytest
from helpers import ROOT
from lab import QUICK_TRY, Lab, finished, score_in

from harness.session import CLOCKLESS, LIMIT_OF_CHECK, OUTSIDE_CLOCK

EVIL = 'quotes \' " `id`\n\ttab $(touch pwned) \\ # é <script> --amend\n{"run": 9}'


# ---- keep ----


def test_a_kept_candidate_is_one_commit_on_the_branch(based):
    based.edit(0.9)
    out = based.attempt("better", "--asi", '{"hypothesis": "é"}')
    row = based.rows()[-1]
    assert (row["status"], row["reason"], row["metric"]) == ("keep", "better", 0.9)
    assert "0.900000" in out and "-0.100000" in out
    assert row["asi"] == {"hypothesis": "é"} and row["metrics"]["num_steps"] == 7
    assert based.subjects() == ["better", "start"] and based.score_at() == 0.9
    assert score_in(based.train.read_text()) == 0.9
    based.assert_settled()


def test_a_kept_commit_has_the_numbers_as_trailers(based):
    based.edit(0.9)
    based.attempt("better")
    trailers = based.git("log", "-1", "--format=%(trailers:only,unfold)").splitlines()
    names = [line.split(":")[0] for line in trailers]
    assert names == ["Val-bpb", "Noise-floor", "Run"]
    assert trailers[0] == "Val-bpb: 0.900000"
    assert trailers[2] == f"Run: 2 {based.rows()[1]['ref']}"


def test_a_dropped_candidate_leaves_the_branch_alone_and_stays_reachable(based):
    head = based.git("rev-parse", "HEAD")
    based.edit(1.1)
    out = based.attempt("worse")
    row = based.rows()[-1]
    assert (row["status"], row["reason"]) == ("discard", "worse")
    assert based.git("rev-parse", "HEAD") == head and based.subjects() == ["start"]
    assert score_in(based.train.read_text()) == 1.0
    based.assert_settled()
    based.git("reflog", "expire", "--expire=now", "--all")
    based.git("gc", "-q", "--prune=now")
    assert based.score_at(row["ref"]) == 1.1
    assert f"git restore -s {row['ref']} train.py" in out
    based.git("restore", "-s", row["ref"], "train.py")
    assert score_in(based.train.read_text()) == 1.1


def test_the_folder_of_a_run_has_its_log_record_and_diff(based):
    based.edit(0.9)
    based.attempt("better")
    folder = based.runs / f"2-{based.rows()[1]['commit']}"
    names = {file.name for file in folder.iterdir()}
    assert names >= {"eval.jsonl", "run.log", "train.diff", "record.json", "settings.json"}
    assert not names & {"lock", "reserve", "index"}
    assert "+SCORE = 0.9" in (folder / "train.diff").read_text()


@pytest.mark.slow
def test_candidates_are_compared_with_what_was_kept(based):
    for score, status in ((0.9, "keep"), (0.95, "discard"), (0.8, "keep")):
        based.edit(score)
        based.attempt(f"score {score}")
        assert based.rows()[-1]["status"] == status
    assert based.column("parent_metric") == [None, 1.0, 0.9, 0.9]
    assert based.subjects() == ["score 0.8", "score 0.9", "start"]


def test_the_first_try_makes_its_own_baseline(lab):
    lab.edit(0.9)
    lab.attempt("better at once")
    assert lab.column("metric") == [1.0, 0.9]
    assert lab.column("description") == ["baseline", "better at once"]
    lab.assert_settled()


def test_simpler_is_kept_when_equal_and_shorter_only(based):
    based.edit(1.0, "x = 1\ny = 2")
    based.attempt("longer", "--simpler")
    based.edit(1.0)
    based.train.write_text(based.train.read_text().replace("NOISE = [0.0]\n", "").replace(
        "NOISE[(seed - 1337) % len(NOISE)]", "0.0"))  # fmt: skip
    based.attempt("shorter", "--simpler")
    rows = based.rows()
    assert [row["status"] for row in rows[1:]] == ["discard", "keep"]
    assert rows[2]["reason"] == "simpler" and rows[2]["lines"] == [1, 2]
    assert based.subjects() == ["shorter", "start"]


def test_memory_that_grows_on_a_gpu_is_a_warning_not_a_verdict(lab):
    lab.attempt("baseline", FAKE_DEVICE="a GPU")
    lab.edit(0.9)
    lab.train.write_text(lab.train.read_text().replace("2048.0", "4096.0"))
    assert "2.00 times" in lab.attempt("twice the memory", FAKE_DEVICE="a GPU")
    assert lab.rows()[-1]["status"] == "keep"


def test_a_run_that_was_not_compiled_says_so_against_one_that_was(lab):
    setup = "record |= {'compiled': True, 'torch': '2'}"
    lab.edit(1.0, setup)
    lab.git("commit", "-qam", "compiled")
    lab.attempt("baseline")
    lab.edit(1.1, setup.replace("True", "False"))
    assert "compiled: False, incumbent True" in lab.attempt("fell back to eager")
    assert lab.rows()[-1]["compiled"] is False and lab.rows()[-1]["torch"] == "2"


@pytest.mark.slow
def test_the_users_checks_can_fail_a_run(based):
    (based.root / "autoresearch.checks.sh").write_text("! grep -q 0.5 train.py\n")
    based.edit(0.5)
    based.attempt("fails the checks", code=1)
    based.edit(0.9)
    based.attempt("passes them")
    assert based.column("status") == ["keep", "checks_failed", "keep"]
    assert based.rows()[-1]["parent_metric"] == 1.0


def test_a_description_is_never_a_shell_word_or_a_line(based):
    based.edit(0.9)
    based.attempt(EVIL)
    assert based.rows()[-1]["description"] == EVIL
    assert "$(touch pwned)" in based.git("log", "-1", "--format=%B")
    assert not (based.root / "pwned").exists()


@pytest.mark.slow
def test_a_signing_key_that_is_not_there_stops_nothing(lab):
    lab.git("config", "commit.gpgsign", "true")
    lab.git("config", "gpg.program", "/bin/false")
    for score in (1.0, 0.9, 1.1):
        lab.edit(score)
        lab.attempt(f"score {score}")
    assert lab.column("status") == ["keep", "keep", "discard"]
    lab.git("config", "autoresearch.sign", "true")
    lab.edit(0.8)
    assert "could not be committed" in lab.attempt("asked to sign", code=1)
    assert lab.call("status").code == 0 and lab.score_at() == 0.9


def test_a_commit_hooks_environment_is_not_ours(based):
    based.edit(0.9)
    based.attempt(
        "from a hook",
        GIT_INDEX_FILE=".git/index",
        GIT_DIR="/nonexistent",
        GIT_WORK_TREE="/nonexistent",
    )
    assert based.score_at() == 0.9
    based.assert_settled()


@pytest.mark.slow
def test_in_a_subfolder_of_a_larger_repository(tmp_path):
    lab = Lab(tmp_path / "big" / "lab", top=tmp_path / "big")
    (tmp_path / "big" / "other.txt").write_text("")
    lab.edit(0.9)
    lab.attempt("better")
    lab.edit(1.1)
    lab.attempt("worse")
    assert lab.column("status") == ["keep", "keep", "discard"] and lab.score_at() == 0.9
    assert lab.git("ls-tree", "-r", "--name-only", "HEAD~1", "--full-tree").count("train.py") == 1
    lab.git("add", "../other.txt")
    lab.edit(0.8)
    assert "other.txt" in lab.attempt("with an edit elsewhere", code=2)


def test_a_data_path_is_meant_from_the_checkout_and_a_name_is_none(lab):
    (lab.root / "text").mkdir()
    lab.edit(1.0, "assert os.path.isabs(os.environ['AUTORESEARCH_DATA'])")
    lab.git("commit", "-qam", "wants a path")
    lab.attempt("baseline", AUTORESEARCH_DATA="text")
    lab.edit(1.0, "assert os.environ['AUTORESEARCH_DATA'] == 'embedded'")
    lab.git("commit", "-qam", "wants a name")
    lab.attempt("baseline", "--new-session", AUTORESEARCH_DATA="embedded")


# ---- failures ----

FAILURES = {
    "raise ValueError('boom')": "crash",
    "sys.exit(0)": "void",
    "print('METRIC val_bpb=0.5'); sys.exit(0)": "void",
    "record['val_bpb'] = 0.2": "void",
    "score = -1.0\nrecord['val_bpb'] = -1.0": "void",
    "print('loss is nan'); sys.exit(3)": "nan",
    "print('torch.OutOfMemoryError: CUDA out of memory'); sys.exit(1)": "oom",
    "sys.exit(2)": "refused",
    "open('prepare.py', 'a').write('#')": "void",
}


@pytest.mark.parametrize("body", FAILURES)
def test_a_failure_is_a_crash_row_with_its_reason_and_no_number(based, body):
    head = based.git("rev-parse", "HEAD")
    based.edit(0.5, body)
    based.attempt("fails", code=1)
    row = based.rows()[-1]
    assert (row["status"], row["reason"], row["metric"]) == ("crash", FAILURES[body], 0)
    assert not any(row["metrics"].values()) and row["detail"]
    assert based.git("rev-parse", "HEAD") == head and score_in(based.train.read_text()) == 1.0
    based.assert_settled()


def test_a_timeout_is_a_crash_row(based):
    based.edit(0.5, "time.sleep(60)")
    based.attempt("sleeps", code=1, AUTORESEARCH_HARD_LIMIT="1")
    assert based.rows()[-1]["reason"] == "timeout"
    based.assert_settled()


def test_a_failing_baseline_leaves_everything_as_it_was(lab):
    lab.edit(1.0, "raise ValueError('boom')")
    lab.git("commit", "-qam", "broken")
    lab.edit(0.9)
    mine, head = lab.train.read_text(), lab.git("rev-parse", "HEAD")
    assert "boom" in lab.attempt("on a broken base", code=3)
    assert not lab.log.exists() and lab.train.read_text() == mine
    assert lab.git("rev-parse", "HEAD") == head


def test_a_marked_run_is_never_kept(based):
    mark = "3 optimizer steps outside the clock"
    based.edit(0.7, f"record['marks'] = '{mark}; logits repeat only to 1'")
    out = based.attempt("marked")
    row = based.rows()[-1]
    assert (row["status"], row["reason"], row["metric"]) == ("discard", "marked", 0.7)
    assert row["detail"] == mark and mark in out
    assert based.score_at() == 1.0


def test_a_marked_run_is_no_baseline(lab):
    lab.edit(0.7, "record['marks'] = '3 optimizer steps outside the clock'")
    lab.git("commit", "-qam", "a marked start")
    assert "3 optimizer steps outside the clock" in lab.attempt("baseline", code=3)


def test_a_mark_that_names_a_limit_of_the_check_is_no_fault(based):
    based.edit(0.9, "record['marks'] = 'logits repeat only to 1e-05: smaller leaks are not seen'")
    based.attempt("on a device that does not repeat itself")
    assert based.rows()[-1]["status"] == "keep"


def test_a_mark_that_the_whole_session_bears_is_no_fault(lab):
    mark = "record['marks'] = '%s; 12 optimizer steps outside the clock'"
    lab.edit(1.0, mark % CLOCKLESS)
    lab.git("commit", "-qam", "an old-style train.py")
    assert "clock of prepare.py was not used" in lab.attempt("baseline")
    lab.edit(0.9, mark.replace("12", "34") % CLOCKLESS)
    lab.attempt("as old as the baseline")
    assert lab.rows()[-1]["status"] == "keep"


def test_the_marks_that_are_told_apart_are_those_of_the_evaluator():
    files = [ROOT / "prepare.py", *(ROOT / "harness").glob("*.py")]
    texts = [path.read_text() for path in files if path.name != "session.py"]
    for words in (CLOCKLESS, OUTSIDE_CLOCK, LIMIT_OF_CHECK):
        assert any(words in text for text in texts)


def test_the_mark_of_an_old_style_file_is_a_fault_where_the_baseline_has_none(based):
    based.edit(0.9, "record['marks'] = 'the clock of prepare.py was not used'")
    based.attempt("trains as long as it likes")
    assert based.rows()[-1]["reason"] == "marked"


# ---- the user's hooks ----


@pytest.mark.slow
def test_no_hook_runs_for_a_candidate(based, tmp_path):
    for name in ("pre-commit", "commit-msg", "post-checkout", "reference-transaction"):
        based.add_hook(name, f"touch '{tmp_path}/{name}'\n")
    based.edit(1.1)
    based.attempt("worse")
    assert not list(tmp_path.glob("*-*"))
    based.edit(0.9)
    based.attempt("better")
    assert (tmp_path / "pre-commit").exists() and (tmp_path / "commit-msg").exists()


def test_a_hook_that_refuses_a_kept_commit_is_reported_and_the_code_reachable(based):
    based.add_hook("pre-commit", "echo no tabs please >&2\nexit 1\n")
    based.edit(0.9)
    out = based.attempt("hooked", code=1)
    row = based.rows()[-1]
    assert "no tabs please" in out and row["ref"] in out
    assert (row["status"], row["reason"], row["metric"]) == ("checks_failed", "hook", 0.9)
    assert based.score_at() == 1.0 and based.score_at(row["ref"]) == 0.9
    based.assert_settled()


def test_a_hook_that_changes_train_py_is_a_refusal(based):
    based.add_hook("pre-commit", "echo '# linted' >>train.py\ngit add train.py\n")
    based.edit(0.9)
    assert "changed the files" in based.attempt("hooked", code=1)
    assert based.score_at() == 1.0
    based.assert_settled()


# ---- refusals ----


@pytest.fixture
def refused(based):
    """`try` says why, and HEAD, the log and the working tree are as before."""

    def state():
        return (
            based.git("status", "--porcelain"),
            based.train.read_bytes(),
            based.rows(),
            based.git("for-each-ref"),
        )

    def attempt(*words, **environment):
        before = state()
        out = based.attempt("refused", code=2, **environment)
        assert all(word in out for word in (*words, "hint:")), out
        assert state() == before
        assert "FAIL" in based.call("check", code=2, **environment).out

    return attempt


@pytest.mark.parametrize("staged", [False, True])
def test_refuses_other_edits_and_names_them(based, refused, staged):
    based.edit(0.9)
    (based.root / "README.md").write_text("mine\n")
    if staged:
        based.git("add", "README.md")
    refused("README.md")
    assert (based.root / "README.md").read_text() == "mine\n"


def test_refuses_no_change(refused):
    refused("did not change")


def test_refuses_a_change_of_comments_only(based, refused):
    code = based.train.read_text().replace("SCORE = 1.0", "SCORE   =  1.0  # same")
    based.train.write_text("# a comment\n" + code)
    refused("did not change")


def test_refuses_a_file_that_does_not_parse(based, refused):
    based.train.write_text("def broken(:\n")
    refused("does not parse")


@pytest.mark.slow
def test_refuses_a_changed_fixed_file_even_when_committed(based, refused):
    based.edit(0.9)
    (based.root / "prepare.py").write_text(based.git("show", "HEAD:prepare.py") + "\n# easier\n")
    refused("prepare.py")
    based.git("commit", "-qm", "sneaky", "prepare.py")
    refused("fixed file", "prepare.py")
    based.call("session")
    based.attempt("accepted by the user")
    assert based.rows()[-1]["status"] == "keep"


def test_refuses_a_helper_that_is_not_committed(based, refused):
    based.edit(0.9, "import helper")
    (based.root / "helper.py").write_text("")
    refused("helper.py")


@pytest.mark.slow
def test_an_untracked_file_neither_reaches_the_run_nor_is_lost(based):
    (based.root / "notes.txt").write_text("mine")
    based.edit(0.9, "open('notes.txt')")
    based.attempt("reads an untracked file", code=1)
    based.edit(0.8)
    based.attempt("does not")
    assert (based.root / "notes.txt").read_text() == "mine"


def test_refuses_a_detached_head_and_the_default_branch(based, refused):
    based.edit(0.9)
    based.git("checkout", "-q", "--detach")
    refused("detached", "git switch -c autoresearch/")
    based.git("switch", "-q", "-c", "main")
    refused("default branch", "git switch -c autoresearch/")


def test_refuses_without_an_identity(based, refused):
    based.edit(0.9)
    based.git("config", "--unset", "user.email")
    based.git("config", "user.useConfigOnly", "true")
    refused("git config user.email", HOME="/nonexistent", EMAIL="", GIT_CONFIG_GLOBAL="/dev/null")


def test_without_git_it_says_so_and_status_still_works(based):
    based.edit(0.9)
    assert "git is not installed" in based.attempt("no git", code=2, PATH="/nonexistent")
    shutil.rmtree(based.root / ".git")
    assert "git init" in based.attempt("no repository", code=2)
    assert "git init" in based.call("check", code=2).out
    assert "1.000000" in based.call("status").out
    assert score_in(based.train.read_text()) == 0.9


def test_a_checkout_that_cannot_be_written_is_named(lab):
    (lab.root / ".autoresearch").touch()  # stands for a read-only checkout, also for root
    lab.edit(0.9)
    assert "cannot write to the checkout" in lab.attempt("nowhere", code=2)
    assert "no scored run yet" in lab.call("status").out


def test_refuses_a_bad_note_and_an_empty_description(based):
    based.edit(0.9)
    assert "hint: --asi" in based.attempt("x", "--asi", "[1]", code=2)
    assert "hint:" in based.attempt("  ", code=2)


def test_check_passes_when_try_would_start(lab):
    lab.call("check")
    lab.attempt("baseline")
    lab.edit(0.9)
    assert "FAIL" not in lab.call("check").out


# ---- the user's files while a run is under way ----


@pytest.mark.parametrize("score", [0.9, 1.1])
def test_an_edit_during_the_run_neither_enters_it_nor_is_lost(based, tmp_path, score):
    process = based.hold(score, tmp_path / "gate")
    edited = based.train.read_text().replace(f"SCORE = {score}", "SCORE = 0.1")
    based.train.write_text(edited)
    (based.root / "README.md").write_text("mine")
    (tmp_path / "gate").touch()
    done = finished(process)
    assert done.code == 0 and "your edits stay" in done.err
    assert based.rows()[-1]["metric"] == score
    assert based.train.read_text() == edited
    assert (based.root / "README.md").read_text() == "mine"
    assert based.score_at() == min(score, 1.0)


@pytest.mark.parametrize("score", [0.9, 1.1])
def test_files_staged_during_the_run_stay_staged_and_are_not_committed(based, tmp_path, score):
    process = based.hold(score, tmp_path / "gate")
    (based.root / "README.md").write_text("mine")
    based.git("add", "README.md")
    (tmp_path / "gate").touch()
    assert finished(process).code == 0
    assert based.git("diff", "--cached", "--name-only") == "README.md"
    assert based.git("status", "--porcelain") == "M  README.md"
    assert based.git("show", "HEAD:README.md") == "about"


def test_a_train_py_staged_during_the_run_is_not_touched(based, tmp_path):
    process = based.hold(1.1, tmp_path / "gate")
    based.edit(0.3)
    based.git("add", "train.py")
    based.edit(1.1)
    (tmp_path / "gate").touch()
    assert finished(process).code == 0
    assert score_in(based.git("show", ":train.py")) == 0.3


@pytest.mark.parametrize("score", [0.9, 1.5])
def test_a_commit_made_during_the_run_stays(based, tmp_path, score):
    process = based.hold(score, tmp_path / "gate")
    based.train.write_text(based.train.read_text() + "\n# by hand\n")
    based.git("commit", "-qam", "by hand")
    (tmp_path / "gate").touch()
    assert finished(process).code == 0
    if score == 0.9:
        assert based.subjects() == ["score 0.9", "by hand", "start"]
        assert "# by hand" not in based.git("show", "HEAD:train.py")
    else:
        assert based.subjects() == ["by hand", "start"]
        assert "# by hand" in based.train.read_text()
    based.assert_settled()


def test_a_branch_deleted_during_the_run_loses_no_result(based, tmp_path):
    process = based.hold(0.9, tmp_path / "gate")
    based.git("checkout", "-q", "--detach")
    based.git("branch", "-qD", "autoresearch/test")
    (tmp_path / "gate").touch()
    assert "is gone" in finished(process).err
    assert based.score_at(based.rows()[-1]["ref"]) == 0.9


def test_another_branch_checked_out_during_the_run_is_not_touched(based, tmp_path):
    process = based.hold(0.9, tmp_path / "gate")
    based.git("checkout", "-qf", "-b", "elsewhere")
    (tmp_path / "gate").touch()
    assert finished(process).code == 0
    assert based.subjects() == ["start"] and based.score_at() == 1.0
    assert based.score_at("autoresearch/test") == 0.9
    based.assert_settled()


@pytest.mark.slow
def test_three_at_once_each_with_its_gpu(based, tmp_path):
    gates = [tmp_path / name for name in "abc"]
    scores = (0.9, 0.8, 1.2)
    pairs = zip(scores, gates, strict=True)
    processes = [based.hold(s, gate, "--gpu", gate.name) for s, gate in pairs]
    (based.root / ".git/index.lock").touch()  # the user's git, busy meanwhile
    assert "'score 0.9': measuring" in based.call("status").out
    (based.root / ".git/index.lock").unlink()
    for process, gate in reversed(list(zip(processes, gates, strict=True))):
        gate.touch()
        assert finished(process).code == 0
    assert based.column("metric") == [1.0, 1.2, 0.8, 0.9]
    assert based.column("status") == ["keep", "discard", "keep", "discard"]
    assert sorted(file.read_text() for file in based.runs.glob("*/started")) == ["a", "b", "c"]
    assert based.subjects() == ["score 0.8", "start"] and based.score_at() == 0.8
    assert score_in(based.train.read_text()) == 0.8
    based.assert_settled()


@pytest.mark.slow
def test_two_that_are_both_better_are_two_commits_of_measured_bytes(based, tmp_path):
    one = based.hold(0.9, tmp_path / "one", "--gpu", "0", first_line="ONE = 1\n")
    two = based.hold(0.8, tmp_path / "two", "--gpu", "1", first_line="TWO = 2\n")
    for name, process in (("one", one), ("two", two)):
        (tmp_path / name).touch()
        assert finished(process).code == 0
    assert based.subjects() == ["score 0.8", "score 0.9", "start"]
    assert based.git("show", "HEAD:train.py").startswith("TWO = 2")
    assert based.git("show", "HEAD~1:train.py").startswith("ONE = 1")
    based.assert_settled()


def test_a_log_deleted_during_a_run_begins_again(based, tmp_path):
    process = based.hold(0.9, tmp_path / "gate")
    based.log.unlink()
    (tmp_path / "gate").touch()
    assert finished(process).code == 0
    assert based.column("metric") == [1.0, 0.9] and based.column("status") == ["keep", "keep"]


# ---- a full disk ----


@pytest.fixture
def small_disk(tmp_path):
    with helpers.small_disk(tmp_path / "disk", megabytes=130) as disk:
        yield disk


FILL = """
with open(os.path.join(folder, 'eval.jsonl'), 'w') as file:
    file.write(json.dumps(record) + '\\n')
print(f'METRIC val_bpb={score:.6f}', flush=True)
try:
    with open(os.path.join(folder, 'big'), 'wb', 0) as file:
        while True:
            file.write(bytes(4096))
except OSError:
    sys.exit(0)
"""


@pytest.mark.parametrize("score", [0.9, 1.1])
def test_a_run_that_fills_the_disk_still_gets_its_verdict(small_disk, score):
    lab = Lab(small_disk / "repo")
    lab.attempt("baseline")
    lab.edit(score, FILL)
    lab.attempt("fills the disk")
    row = lab.rows()[-1]
    assert row["metric"] == score and row["status"] == ("keep" if score < 1 else "discard")
    assert lab.score_at() == min(1.0, score)
    lab.assert_settled()


def test_a_disk_without_room_is_refused(small_disk):
    lab = Lab(small_disk / "repo")
    (small_disk / "big").write_bytes(bytes(60 * 2**20))
    assert "MB free" in lab.attempt("no room to start", code=2)


# ---- all of it ----


@pytest.mark.slow
def test_the_real_train_py_goes_through_the_cycle_once(tmp_path, few_rows):
    lab = Lab(tmp_path / "repo")
    lab.use_real_files()
    settings = {
        "AUTORESEARCH_TIME_BUDGET": "5",
        "AUTORESEARCH_HARD_LIMIT": "900",
        "AUTORESEARCH_PROFILE": "tiny",
        "AUTORESEARCH_CACHE": few_rows["AUTORESEARCH_CACHE"],
    }
    done = finished(lab.start(*QUICK_TRY, "baseline", **settings), seconds=1200)
    assert done.code == 0, done.text
    row = lab.rows()[0]
    assert row["status"] == "keep" and row["data_id"] and row["metrics"]["num_steps"] > 0
    assert (lab.runs / f"1-{row['commit']}" / "steps.jsonl").exists()
    lab.assert_settled()
