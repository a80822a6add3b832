"""The real cycle in temporary repositories: experiment.py and autoresearch.sh as they are, a stand-in train.py."""

import ast
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import experiment

ROOT = Path(__file__).resolve().parent.parent

TRAIN = '''
import json, os, sys, time
SCORE = 1.0
SPREAD = 0.0

def main():
    seed = int(os.environ.get("AUTORESEARCH_SEED", 1337))
    score = SCORE + SPREAD * (seed - 1337) + float(os.environ.get("FAKE_LOSS", 0))
    budget = float(os.environ.get("AUTORESEARCH_TIME_BUDGET", 300))
    record = {"run_id": os.environ["AUTORESEARCH_RUN_ID"], "val_bpb": score, "data_id": "0123456789ab", "seed": seed,
              "profile": "tiny", "device": os.environ.get("FAKE_DEVICE", "cpu"), "budget": budget, "marks": ""}
    folder = os.environ["AUTORESEARCH_RUN_DIR"]
    if os.environ.get("GATE"):
        open(os.path.join(folder, "started"), "w").write(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        while not os.path.exists(os.environ["GATE"]):
            time.sleep(0.02)
    #BODY
    with open(os.path.join(folder, "eval.jsonl"), "w") as file:
        file.write(json.dumps(record) + "\\n")
    print(f"\\nMETRIC val_bpb={score:.6f}\\nMETRIC peak_memory_mb=2048.0\\nMETRIC num_steps=7")

if __name__ == "__main__":
    main()
'''


class Cycle:
    """A repository on an experiment branch, and the commands in it."""

    def __init__(self, root, top=None):
        self.root = root
        root.mkdir(parents=True)
        for name in ("autoresearch.sh", "experiment.py", "pyproject.toml", ".gitignore"):
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(ROOT / "harness", root / "harness", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("prepare.py", "data.py"):
            (root / name).write_text("")
        (root / "README.md").write_text("about\n")
        self.git("init", "-q", "-b", "autoresearch/test", str(top or root))
        self.git("config", "user.name", "A Person")
        self.git("config", "user.email", "person@example.com")
        self.edit()
        self.git("add", "-A")
        self.git("commit", "-qm", "start")

    def git(self, *args):
        done = subprocess.run(["git", *args], cwd=self.root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def edit(self, score=1.0, body="", spread=0.0):
        code = TRAIN.replace("SCORE = 1.0", f"SCORE = {score}").replace("SPREAD = 0.0", f"SPREAD = {spread}")
        (self.root / "train.py").write_text(code.replace("#BODY", body.replace("\n", "\n    ")))

    def start(self, *args, script="experiment.py", **env):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AUTORESEARCH_")}
        return subprocess.Popen([sys.executable, script, *args], cwd=self.root, env=clean | env,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def call(self, *args, **env):
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def run(self, description, *args, code=0, **env):
        """`run`, which must end with this code; returns stdout and stderr as one text."""
        done, out, err = self.call("run", description, *args, **env)
        assert done == code, out + err
        return out + err

    def rows(self):
        log = self.root / "autoresearch.jsonl"
        return read_strictly(log) if log.exists() else []

    def score_at_head(self):
        """The score that the committed train.py has."""
        lines = self.git("show", "HEAD:./train.py").splitlines()
        return next(float(line[8:]) for line in lines if line.startswith("SCORE ="))

    def assert_settled(self, edited=False):
        """Nothing is open, no worktree is left, and only an edit that was never committed differs from HEAD."""
        assert not list((self.root / ".autoresearch/runs").glob("open-*"))
        assert len(self.git("worktree", "list").splitlines()) == 1
        assert self.git("status", "--porcelain") == (" M train.py" if edited else "").strip()


def read_strictly(path):
    """An independent reader with the rules of the strictest tools of this family: one wrong line is an error."""

    def no_twins(pairs):
        assert len({k for k, _ in pairs}) == len(pairs)
        return dict(pairs)

    def no_nan(word):
        raise AssertionError(word)

    text = path.read_bytes().decode()
    assert text.endswith("\n")
    lines = [json.loads(line, object_pairs_hook=no_twins, parse_constant=no_nan) for line in text[:-1].split("\n")]
    order = ["run", "commit", "metric", "metrics", "status", "description", "timestamp", "segment", "confidence", "asi"]
    rows, segment = [], -1
    for line, before in zip(lines, [{}, *lines], strict=False):
        if line.get("type") == "config":
            assert before.get("type") != "config"
            segment += 1
            assert line["metricName"] == "val_bpb" and line["metricUnit"] and line["name"]
            assert line["bestDirection"] == "lower"
            continue
        assert segment >= 0 and "type" not in line and not {"op", "parent"} & set(line)
        assert list(line)[:10] == order
        assert line["run"] == len(rows) + 1 and line["segment"] == segment
        assert len(line["commit"]) == 7 and int(line["commit"], 16) >= 0
        assert math.isfinite(line["metric"]) and line["metric"] >= 0
        assert (line["metric"] == 0) == (line["status"] == "crash")
        assert all(math.isfinite(value) for value in line["metrics"].values())
        assert not rows or line["metrics"].keys() == rows[0]["metrics"].keys()
        assert line["status"] in ("keep", "discard", "crash", "checks_failed")
        assert abs(line["timestamp"] / 1000 - time.time()) < 86400
        assert line["confidence"] is None or math.isfinite(line["confidence"])
        assert isinstance(line["asi"], dict) and isinstance(line["description"], str)
        if before.get("type") == "config":
            assert line["status"] == "keep" and line["metric"] > 0
        rows.append(line)
    return rows


@pytest.fixture
def cycle(tmp_path):
    return Cycle(tmp_path / "repo")


@pytest.fixture
def based(cycle):
    cycle.run("baseline")
    return cycle


# ---- verdicts ----


def test_keep_then_discard(based):
    based.edit(0.9)
    out = based.run("better", "--asi", '{"hypothesis": "é"}')
    assert "0.900000" in out and "-0.100000" in out and "a guess" in out
    based.edit(0.95)
    based.run("worse")
    based.edit(0.8995)
    based.run("hardly better")
    rows = based.rows()
    assert [r["status"] for r in rows] == ["keep", "keep", "discard", "discard"]
    assert [r["reason"] for r in rows] == ["baseline", "better", "worse", "within noise"]
    assert rows[1]["asi"] == {"hypothesis": "é"} and rows[1]["metrics"]["num_steps"] == 7
    assert [r["parent_metric"] for r in rows] == [None, 1.0, 0.9, 0.9]
    assert based.score_at_head() == 0.9
    based.assert_settled()
    subjects = based.git("log", "--format=%s").splitlines()
    assert subjects == ['Revert "experiment: hardly better"', "experiment: hardly better", 'Revert "experiment: worse"',
                        "experiment: worse", "experiment: better", "start"]
    folder = based.root / ".autoresearch/runs" / f"2-{rows[1]['commit']}"
    assert {"eval.jsonl", "run.log", "train.diff", "record.json"} <= {f.name for f in folder.iterdir()}
    assert "+SCORE = 0.9" in (folder / "train.diff").read_text()


def test_the_first_run_makes_its_own_baseline(cycle):
    cycle.edit(0.9)
    cycle.run("better at once")
    assert [(r["metric"], r["status"], r["description"]) for r in cycle.rows()] == [
        (1.0, "keep", "baseline"), (0.9, "keep", "better at once")]
    cycle.assert_settled()


FAILURES = {
    "raise ValueError('boom')": "crash",
    "sys.exit(0)": "void",
    "print('METRIC val_bpb=0.5'); sys.exit(0)": "void",
    "score = 0.1\nrecord['val_bpb'] = 0.2": "void",
    "score = -1.0\nrecord['val_bpb'] = -1.0": "void",
    "print('loss is nan'); sys.exit(3)": "nan",
    "print('torch.OutOfMemoryError: CUDA out of memory'); sys.exit(1)": "oom",
    "os.kill(os.getpid(), 9)": "oom",
    "sys.exit(2)": "refused",
    "time.sleep(60)": "timeout",
    "open('prepare.py', 'a').write('#')": "void",
}


@pytest.mark.parametrize("body", FAILURES)
def test_a_failure_is_a_crash_row_with_its_reason_and_no_number(based, body):
    before = based.git("rev-parse", "HEAD:train.py")
    based.edit(0.5, body)
    based.run("fails", code=1, AUTORESEARCH_HARD_LIMIT="1" if "sleep" in body else "30")
    row = based.rows()[-1]
    assert (row["status"], row["reason"], row["metric"]) == ("crash", FAILURES[body], 0)
    assert not any(row["metrics"].values()) and row["detail"]
    assert based.git("rev-parse", "HEAD:train.py") == before
    based.assert_settled()
    based.edit(0.999)
    assert "within noise" in based.run("still compared with the baseline")


def test_a_failing_baseline_leaves_everything_as_it_was(cycle):
    cycle.edit(1.0, "raise ValueError('boom')")
    cycle.git("commit", "-qam", "broken")
    cycle.edit(0.9)
    mine, head = (cycle.root / "train.py").read_text(), cycle.git("rev-parse", "HEAD")
    assert "boom" in cycle.run("on a broken base", code=3)
    assert not (cycle.root / "autoresearch.jsonl").exists()
    assert (cycle.root / "train.py").read_text() == mine and cycle.git("rev-parse", "HEAD") == head


def test_simpler_is_kept_when_equal_and_shorter_only(based):
    based.edit(1.0, "x = 1\ny = 2")
    based.run("longer", "--simpler")
    code = (based.root / "train.py").read_text()
    (based.root / "train.py").write_text(code.replace("SPREAD = 0.0\n", "").replace("SPREAD * (seed - 1337)", "0.001"))
    based.run("shorter", "--simpler")
    code = (based.root / "train.py").read_text()
    (based.root / "train.py").write_text(code.replace('"profile": "tiny", ', "").replace("0.001", "0.0015\n"))
    rows = based.rows()
    assert [(r["status"], r["reason"]) for r in rows[1:]] == [("discard", "within noise"), ("keep", "simpler")]
    assert rows[2]["lines"] == [1, 2] and based.score_at_head() == 1.0


def test_judge_by_rule():
    assert experiment.judge(0.989, 1.0, 0.01) == ("keep", "better")
    assert experiment.judge(0.5, 1.0, 0.5) == ("discard", "within noise")  # a gain of exactly the floor is none
    assert experiment.judge(0.998, 1.0, 0.002)[0] == "discard"  # also where floating point says a little more
    assert experiment.judge(1.005, 1.0, 0.01, (3, 4), simpler=True) == ("keep", "simpler")
    assert experiment.judge(1.005, 1.0, 0.01, (3, 4)) == ("discard", "within noise")
    assert experiment.judge(1.02, 1.0, 0.01, (0, 9), simpler=True) == ("discard", "worse")
    assert experiment.confirmed([(0.98, 1.0), (1.0, 1.02)], 0.01) == ("keep", "confirmed")
    assert experiment.confirmed([(0.98, 1.0), (1.02, 1.0)], 0.01)[0] == "discard"
    assert experiment.confirmed([(0.992, 1.0)] * 2, 0.01)[0] == "keep"  # 0.008 exceeds 0.01 / sqrt(2)


def test_confirm_runs_both_interleaved_on_other_seeds(based):
    based.edit(0.9995, spread=-0.01)
    out = based.run("seed-dependent", "--confirm")
    row = based.rows()[-1]
    assert (row["status"], row["reason"]) == ("keep", "confirmed"), out
    assert row["metric"] == 0.9995 and row["confirm"] == [[0.9895, 1.0], [0.9795, 1.0]]


def test_noise_gives_the_floor_of_this_segment_only(based):
    based.edit(0.9, spread=0.01)
    based.run("varies by seed")
    code, out, err = based.call("noise", "--repeats", "3")
    assert code == 0, err
    noise = json.loads((based.root / ".autoresearch/noise.json").read_text())
    assert noise["scores"] == [0.91, 0.92, 0.93] and math.isclose(noise["sd"], 0.01)
    floor = 2 * 0.01 / 0.886227  # c4(3), as tables give it
    assert f"{floor:.6f}" in out
    based.edit(0.88, spread=0.01)
    assert f"noise floor {floor:.6f} (measured, n=3)" in based.run("inside the measured noise")
    assert based.rows()[-1]["reason"] == "within noise"
    based.edit(0.88)
    assert "a guess" in based.run("other budget, other floor", AUTORESEARCH_TIME_BUDGET="60")


def test_a_marked_run_is_a_discard_and_no_baseline_and_counts_in_no_mean(cycle):
    cheat = "record['marks'] = '3 optimizer steps outside the clock; logits repeat only to 1e-05: smaller leaks are not seen'"
    cycle.edit(0.7, cheat)
    cycle.git("commit", "-qam", "a marked start")
    assert "(marked: 3 optimizer steps outside the clock)" in cycle.run("baseline", code=3)
    cycle.edit()
    cycle.git("commit", "-qam", "an honest one")
    cycle.edit(0.7, cheat)
    out = cycle.run("marked")
    row = cycle.rows()[-1]
    assert (row["status"], row["reason"], row["metric"]) == ("discard", "marked", 0.7), out
    assert row["detail"] == "3 optimizer steps outside the clock" and row["detail"] in out and row["marks"] in out
    assert cycle.score_at_head() == 1.0
    cycle.edit(0.9995, f"if seed != 1337:\n    {cheat}", spread=-0.01)
    cycle.run("marked on the other seeds", "--confirm")
    assert cycle.rows()[-1]["reason"] == "within noise"
    cycle.edit(0.9, "record['marks'] = 'logits repeat only to 1e-05: smaller leaks are not seen'")
    cycle.run("on a device that does not repeat itself")
    assert cycle.rows()[-1]["status"] == "keep" and cycle.rows()[-1]["parent_metric"] == 1.0
    assert f'f"{experiment.UNMARKED} ' in (ROOT / "prepare.py").read_text()


def test_memory_that_grows_is_a_warning_not_a_verdict(based):
    based.edit(0.9)
    (based.root / "train.py").write_text((based.root / "train.py").read_text().replace("2048.0", "4096.0"))
    assert "2.00 times" in based.run("twice the memory")
    assert based.rows()[-1]["status"] == "keep"


def test_checks_failed(based):
    (based.root / "autoresearch.checks.sh").write_text("! grep -q 0.5 train.py\n")
    based.edit(0.5)
    based.run("fails the checks", code=1)
    based.edit(0.9)
    based.run("passes them")
    assert [r["status"] for r in based.rows()] == ["keep", "checks_failed", "keep"]
    assert based.rows()[-1]["parent_metric"] == 1.0 and based.score_at_head() == 0.9


def test_another_budget_or_device_is_a_new_segment_with_its_own_baseline(based):
    based.edit(0.9)
    based.run("short", AUTORESEARCH_TIME_BUDGET="60")
    based.edit(0.8)
    based.run("elsewhere", AUTORESEARCH_TIME_BUDGET="60", FAKE_DEVICE="gpu")
    rows = based.rows()
    assert [(r["segment"], r["metric"], r["description"]) for r in rows] == [
        (0, 1.0, "baseline"), (1, 1.0, "baseline"), (1, 0.9, "short"), (2, 0.9, "baseline"), (2, 0.8, "elsewhere")]
    assert [r["status"] for r in rows] == ["keep"] * 5


def test_a_description_is_never_a_shell_word_or_a_line(based):
    text = "quotes ' \" `id`\n\ttab $(touch pwned) \\ # é <script> --amend\n{\"run\": 9}"
    based.edit(0.9)
    based.run(text)
    assert based.rows()[-1]["description"] == text
    assert "$(touch pwned)" in based.git("log", "-1", "--format=%B") and not (based.root / "pwned").exists()
    tsv = based.call("report", "--tsv")[1].split("\n")
    assert tsv[0] == "commit\tval_bpb\tmemory_gb\tstatus\tdescription" and tsv[2].count("\t") == 4 and len(tsv) == 4


# ---- refusals ----


def refused(cycle, *words, head=None):
    """`run` says why, and HEAD, the log and the working tree are as before."""
    before = (cycle.git("status", "--porcelain"), (cycle.root / "train.py").read_bytes(), cycle.rows(),
              cycle.git("log", "--all", "--format=%H"))
    out = cycle.run("refused", code=2)
    assert all(word in out for word in (*words, "hint:")), out
    assert before == (cycle.git("status", "--porcelain"), (cycle.root / "train.py").read_bytes(), cycle.rows(),
                      cycle.git("log", "--all", "--format=%H"))
    code, out, _ = cycle.call("check")
    assert code == 2 and "FAIL" in out


def test_refuses_other_edits_and_names_them(based):
    based.edit(0.9)
    (based.root / "README.md").write_text("mine\n")
    refused(based, "README.md")
    based.git("add", "README.md")
    refused(based, "README.md")
    assert (based.root / "README.md").read_text() == "mine\n"


def test_refuses_no_change_or_only_comments(based):
    refused(based, "did not change")
    train = based.root / "train.py"
    train.write_text("# a comment\n" + train.read_text().replace("SCORE = 1.0", "SCORE   =  1.0  # same"))
    refused(based, "did not change")
    train.write_text("def broken(:\n")
    refused(based, "does not parse")


def test_refuses_a_changed_fixed_file_even_when_committed(based):
    based.edit(0.9)
    (based.root / "prepare.py").write_text("# easier\n")
    refused(based, "prepare.py")
    based.git("commit", "-qm", "sneaky", "prepare.py")
    refused(based, "fixed file", "prepare.py")
    subprocess.run(["bash", "autoresearch.sh", "session"], cwd=based.root, check=True, capture_output=True)
    assert "keep" in based.run("accepted by a person")


def test_refuses_a_helper_that_is_not_committed(based):
    based.edit(0.9, "import helper")
    (based.root / "helper.py").write_text("")
    refused(based, "helper.py")


def test_an_untracked_file_neither_reaches_the_run_nor_is_lost(based):
    (based.root / "notes.txt").write_text("mine")
    based.edit(0.9, "open('notes.txt')")
    based.run("reads an untracked file", code=1)
    based.edit(0.8)
    based.run("does not")
    assert (based.root / "notes.txt").read_text() == "mine"


def test_a_pre_commit_hook_that_refuses_leaves_everything(based):
    hook = based.root / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho linted >> train.py\necho no tabs please >&2\nexit 1\n")
    hook.chmod(0o755)
    based.edit(0.9)
    mine, head = (based.root / "train.py").read_text(), based.git("rev-parse", "HEAD")
    assert "no tabs please" in based.run("hooked", code=2)
    assert (based.root / "train.py").read_text() == mine and based.git("rev-parse", "HEAD") == head
    based.assert_settled(edited=True)
    assert len(based.rows()) == 1


def test_a_hook_cannot_stop_a_revert(based):
    hook = based.root / ".git/hooks/commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\n! grep -q Revert "$1"\n')
    hook.chmod(0o755)
    based.edit(1.1)
    based.run("worse")
    assert based.score_at_head() == 1.0
    based.assert_settled()


def test_git_states_are_handled_with_a_hint(based):
    based.edit(0.9)
    based.git("checkout", "-q", "--detach")
    refused(based, "detached", "git switch -c autoresearch/")
    based.git("switch", "-q", "-c", "main")
    refused(based, "default branch", "git switch -c autoresearch/")
    based.git("switch", "-q", "-c", "autoresearch/next")
    based.git("config", "--unset", "user.email")
    based.git("config", "user.useConfigOnly", "true")
    nobody = {"HOME": "/nonexistent", "EMAIL": "", "GIT_CONFIG_GLOBAL": "/dev/null"}
    assert "git config user.email" in based.run("who", code=2, **nobody)
    shutil.rmtree(based.root / ".git")
    assert "git init" in based.run("no repository", code=2)
    assert "git is not installed" in based.run("no git", code=2, PATH="/nonexistent")
    code, out, _ = based.call("check")
    assert code == 2 and "git init" in out
    assert based.call("status")[0] == 0
    assert "1.0" in (based.root / "train.py").read_text() or "0.9" in (based.root / "train.py").read_text()


def test_check_passes_when_run_would_start(cycle):
    assert cycle.call("check")[0] == 0
    cycle.run("baseline")
    cycle.edit(0.9)
    code, out, _ = cycle.call("check")
    assert code == 0 and "FAIL" not in out


# ---- the user's files while a run is under way ----


def held(cycle, score, gate, *args, first_line="", **env):
    """Start a run that waits for the file `gate`; returns when its train.py is running."""
    cycle.edit(score)
    train = cycle.root / "train.py"
    train.write_text(first_line + train.read_text())
    before = set(cycle.root.glob(".autoresearch/runs/*/started"))
    process = cycle.start("run", f"score {score}", *args, GATE=str(gate), **env)
    wait_for(lambda: set(cycle.root.glob(".autoresearch/runs/open-*/started")) - before, process)
    return process


def wait_for(condition, process=None):
    for _ in range(1000):
        if condition():
            return
        if process and process.poll() is not None:
            raise AssertionError(process.communicate())
        time.sleep(0.02)
    raise AssertionError("waited for nothing")


@pytest.mark.parametrize("score", [0.9, 1.1])
def test_a_linter_edit_during_the_run_neither_enters_it_nor_is_lost(based, tmp_path, score):
    process = held(based, score, tmp_path / "gate")
    linted = (based.root / "train.py").read_text().replace(f"SCORE = {score}", "SCORE = 0.1")
    (based.root / "train.py").write_text(linted)
    (based.root / "README.md").write_text("mine")
    (tmp_path / "gate").touch()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert based.rows()[-1]["metric"] == score
    assert (based.root / "train.py").read_text() == linted and (based.root / "README.md").read_text() == "mine"
    assert based.score_at_head() == (0.9 if score == 0.9 else 1.0)
    assert ("your edits stay" in err) == (score == 1.1)


def test_two_runs_side_by_side_each_with_its_gpu(based, tmp_path):
    one = held(based, 0.9, tmp_path / "one", "--gpu", "0")
    two = held(based, 0.8, tmp_path / "two", "--gpu", "1")
    (based.root / ".git/index.lock").touch()  # a person's git, busy meanwhile
    assert "under way: 'score 0.9'" in based.call("status")[1]
    (based.root / ".git/index.lock").unlink()
    (tmp_path / "two").touch()
    two.communicate(timeout=30)
    (tmp_path / "one").touch()
    one.communicate(timeout=30)
    assert [(r["metric"], r["status"]) for r in based.rows()] == [(1.0, "keep"), (0.8, "keep"), (0.9, "discard")]
    assert based.score_at_head() == 0.8
    assert [f.read_text() for f in sorted(based.root.glob(".autoresearch/runs/*/started"))] == ["1", "0"]
    based.assert_settled()


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
@pytest.mark.parametrize("first_line", ["", "ONE = 1\n"], ids=["same lines", "other lines"])
def test_side_by_side_the_branch_ends_with_the_bytes_that_were_measured(based, tmp_path, order, first_line):
    """The second run is built on the first one's commit, which is discarded: without it, it was never measured."""
    one = held(based, 1.0 if first_line else 1.5, tmp_path / "one", first_line=first_line, FAKE_LOSS="0.5")
    two = held(based, 0.8, tmp_path / "two", first_line=first_line)
    measured = based.git("rev-parse", "HEAD:train.py")
    for name in order:
        (tmp_path / name).touch()
        {"one": one, "two": two}[name].communicate(timeout=30)
    assert sorted(r["status"] for r in based.rows()) == ["discard", "keep", "keep"]
    assert based.git("rev-parse", "HEAD:train.py") == measured
    if order[0] == "two":  # the first one's change is part of what was kept: no commit takes it back, even for a moment
        assert "Revert" not in based.git("log", "--format=%s")
    based.assert_settled()


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_side_by_side_two_discards_leave_the_incumbent(based, tmp_path, order):
    wanted = based.git("rev-parse", "HEAD:train.py")
    runs = {"one": held(based, 1.5, tmp_path / "one"), "two": held(based, 1.6, tmp_path / "two")}
    for name in order:
        (tmp_path / name).touch()
        runs[name].communicate(timeout=30)
    assert [r["status"] for r in based.rows()] == ["keep", "discard", "discard"]
    assert based.git("rev-parse", "HEAD:train.py") == wanted
    based.assert_settled()


def test_a_persons_own_commit_during_the_run_is_never_taken_back(based, tmp_path):
    process = held(based, 1.5, tmp_path / "gate")
    (based.root / "train.py").write_text((based.root / "train.py").read_text() + "\n# by hand\n")
    based.git("commit", "-qam", "by hand")
    (tmp_path / "gate").touch()
    process.communicate(timeout=30)
    assert "# by hand" in based.git("show", "HEAD:train.py") and based.score_at_head() == 1.0
    based.assert_settled()


# ---- interruptions ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_logged_and_reverted_at_once(based, tmp_path, number):
    process = held(based, 0.9, tmp_path / "gate")
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert (based.rows()[-1]["status"], based.rows()[-1]["reason"]) == ("crash", "interrupted")
    assert based.score_at_head() == 1.0
    based.assert_settled()
    assert not alive(based)


def test_nohup_goes_on_when_its_terminal_hangs_up(based, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; a child inherits it
    try:
        process = held(based, 0.9, tmp_path / "gate")
    finally:
        signal.signal(signal.SIGHUP, before)
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.2)
    (tmp_path / "gate").touch()
    process.communicate(timeout=30)
    assert process.returncode == 0 and based.score_at_head() == 0.9


def test_ctrl_c_during_the_commit_waits_for_its_end(based, tmp_path):
    hook = based.root / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/hooked'\nwhile [ ! -e '{tmp_path}/gate' ]; do sleep 0.02; done\n")
    hook.chmod(0o755)
    based.edit(0.9)
    process = based.start("run", "interrupted in its commit")
    wait_for((tmp_path / "hooked").exists, process)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    (tmp_path / "gate").touch()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert [r["reason"] for r in based.rows()] == ["baseline", "interrupted"] and based.score_at_head() == 1.0
    based.assert_settled()


def alive(cycle):
    """Processes that still run a train.py of this repository."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inside = os.readlink(process / "cwd").startswith(str(cycle.root))
            found += [process.name] * (inside and b"train.py" in (process / "cmdline").read_bytes())
    return found


def test_kill_9_during_the_run_ends_its_processes_at_the_next_command(based, tmp_path):
    process = held(based, 0.9, tmp_path / "gate")
    process.kill()
    process.communicate()
    assert alive(based)
    assert "interrupted" in based.call("status")[1]
    assert not alive(based)
    assert based.rows()[-1]["reason"] == "interrupted" and based.score_at_head() == 1.0
    based.assert_settled()


# Kills itself before the n-th of the steps that a kill could fall between: each git call, each write, each rename.
KILLER = '''
import os, shutil, signal, sys, pathlib
sys.path.insert(0, os.getcwd())
import experiment
left = int(os.environ["KILL_BEFORE"])
def counted(name, function):
    def wrapper(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapper
step = os.environ["STEPS"].split()
for name in step:
    setattr(experiment, name, counted(name, getattr(experiment, name)))
experiment.Run.close = counted("close", experiment.Run.close)
experiment.Run.clear = counted("clear", experiment.Run.clear)
pathlib.Path.rename = counted("rename", pathlib.Path.rename)
sys.exit(experiment.main())
'''
STEPS = "git write_synced commit_candidate call read_outcome append settle commit_on_branch sync_checkout"


@pytest.mark.slow
@pytest.mark.parametrize(("score", "verdict"), [(0.9, "keep"), (1.1, "discard")])
def test_kill_9_anywhere_then_the_next_command_mends(cycle, tmp_path, score, verdict):
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER)
    kills = 0
    for n in range(1, 200):
        cycle.edit(score)
        rows, reference = len(cycle.rows()), cycle.git("rev-parse", "HEAD:train.py")
        process = cycle.start("run", f"kill {n}", script=str(killer), KILL_BEFORE=str(n), STEPS=STEPS)
        out, err = process.communicate(timeout=30)
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, err
            break
        kills += 1
        code, out, err = cycle.call("status")
        assert code == 0, err
        new = [row for row in cycle.rows()[rows:] if row["reason"] != "baseline"]
        if new:  # it had been committed: one row, and the branch is what the row says
            assert len(new) == 1 and new[0]["status"] in ("crash", verdict)
            cycle.assert_settled()
        else:  # it had not: the edit is still there
            cycle.assert_settled(edited=True)
            assert float((cycle.root / "train.py").read_text().split("SCORE = ")[1].split()[0]) == score
        if new and new[0]["status"] == "keep":
            assert cycle.score_at_head() == score
            score = round(score - 0.01, 3)
        else:
            assert cycle.git("rev-parse", "HEAD:train.py") == reference
    assert kills >= 40


def test_half_a_last_line_is_put_aside_and_the_log_stays_strict(based):
    with open(based.root / "autoresearch.jsonl", "a") as log:
        log.write('{"run": 2, "commit": "abc')
    assert based.call("status")[0] == 0
    based.edit(0.9)
    based.run("after a power cut")
    assert [r["run"] for r in based.rows()] == [1, 2]
    assert '"abc' in (based.root / ".autoresearch/torn.txt").read_text()
    log = based.root / "autoresearch.jsonl"
    log.write_text(log.read_text().rstrip("\n"))  # an editor that saved without the last line's end
    based.edit(0.8)
    based.run("after an edit by hand")
    assert [r["run"] for r in based.rows()] == [1, 2, 3]


@pytest.mark.parametrize("half", ["", '{"run": 1, "com'])
def test_a_segment_that_has_only_its_config_line_is_begun_not_doubled(cycle, half):
    config = {"type": "config", "name": "x", "metricName": "val_bpb", "metricUnit": "bpb", "bestDirection": "lower"}
    (cycle.root / "autoresearch.jsonl").write_text(json.dumps(config) + "\n" + half)
    cycle.run("begin", "--asi", '{"learned": "a"}')
    assert [(r["run"], r["segment"], r["status"], r["asi"]) for r in cycle.rows()] == [(1, 0, "keep", {"learned": "a"})]
    with open(cycle.root / "autoresearch.jsonl", "a") as log:
        log.write("a note by hand\n")
    cycle.edit(0.9)
    cycle.run("is logged all the same")
    assert json.loads((cycle.root / "autoresearch.jsonl").read_text().splitlines()[-1])["run"] == 2


def test_a_log_that_was_deleted_during_a_run_begins_again(based, tmp_path):
    process = held(based, 0.9, tmp_path / "gate")
    (based.root / "autoresearch.jsonl").unlink()
    (tmp_path / "gate").touch()
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert [(r["metric"], r["status"]) for r in based.rows()] == [(1.0, "keep"), (0.9, "keep")]


@pytest.mark.parametrize("killed", [False, True])
def test_a_failure_after_the_log_was_deleted_is_reverted_too(based, tmp_path, killed):
    process = held(based, 0.9, tmp_path / "gate", FAKE_LOSS="-5")
    (based.root / "autoresearch.jsonl").unlink()
    if killed:
        process.kill()
    else:
        (tmp_path / "gate").touch()
    process.communicate(timeout=30)
    assert based.call("status")[0] == 0
    row = json.loads((based.root / "autoresearch.jsonl").read_text().splitlines()[-1])
    assert (row["status"], row["reason"]) == ("crash", "interrupted" if killed else "void")
    assert based.score_at_head() == 1.0
    based.assert_settled()


def test_rows_of_another_tool_are_read_and_continued(cycle):
    config = {"type": "config", "name": "x", "metricName": "val_bpb", "metricUnit": "bpb", "bestDirection": "lower"}
    row = {"run": 1, "commit": "0123abc", "metric": 0.5, "status": "keep", "description": "theirs", "timestamp": 1}
    log = cycle.root / "autoresearch.jsonl"
    log.write_text("\n".join(map(json.dumps, (config, row | {"status": "crash", "metric": 0}, row | {"run": 2}))) + "\n")
    for command in (["status"], ["resume"], ["report", "--tsv"]):
        code, out, err = cycle.call(*command)
        assert code == 0 and "theirs" in out, err
    cycle.edit(0.9)
    cycle.run("ours")
    rows = [json.loads(line) for line in log.read_text().splitlines()][3:]
    assert rows[0]["type"] == "config" and [(r["run"], r["segment"], r["status"]) for r in rows[1:]] == [
        (3, 1, "keep"), (4, 1, "keep")]


def test_in_a_subfolder_of_a_larger_repository(tmp_path):
    cycle = Cycle(tmp_path / "big" / "lab", top=tmp_path / "big")
    (cycle.root / "text").mkdir()
    cycle.edit(1.1, "assert os.path.isabs(os.environ['AUTORESEARCH_DATA'])")
    cycle.run("worse", AUTORESEARCH_DATA="text")
    cycle.edit(1.2, "assert os.environ['AUTORESEARCH_DATA'] == 'embedded'  # a name, not a path")
    cycle.run("worse again", AUTORESEARCH_DATA="embedded")
    assert [(r["metric"], r["status"]) for r in cycle.rows()] == [(1.0, "keep"), (1.1, "discard"), (1.2, "discard")]
    assert cycle.score_at_head() == 1.0
    cycle.assert_settled()
    (tmp_path / "big" / "other.txt").write_text("")
    cycle.git("add", "../other.txt")
    cycle.edit(0.9)
    assert "other.txt" in cycle.run("with an edit elsewhere", code=2)


@pytest.fixture
def small_disk(tmp_path):
    mount = tmp_path / "disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=130m", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


FILL = """
with open(os.path.join(folder, 'eval.jsonl'), 'w') as file: file.write(json.dumps(record) + '\\n')
print(f'\\nMETRIC val_bpb={score:.6f}', flush=True)
try:
    with open(os.path.join(folder, 'big'), 'wb', 0) as file:
        while True: file.write(bytes(4096))
except OSError: sys.exit(0)
"""


def test_a_run_that_fills_the_disk_is_still_logged_and_reverted(small_disk):
    cycle = Cycle(small_disk / "repo")
    cycle.run("baseline")
    cycle.edit(1.1, FILL)
    code, out, err = cycle.call("run", "fills the disk")
    row = cycle.rows()[-1]
    assert code == 0 and (row["run"], row["status"], row["metric"]) == (2, "discard", 1.1), err
    assert cycle.score_at_head() == 1.0
    cycle.assert_settled()
    next(small_disk.glob("repo/.autoresearch/runs/*/big")).unlink()
    cycle.edit(0.9)
    cycle.run("room again")
    with open(small_disk / "big", "wb") as file:
        file.write(bytes(60 * 2**20))
    cycle.edit(0.8)
    assert "MB free" in cycle.run("no room to start", code=2)


# ---- what the other commands print ----


def many_rows(cycle, count):
    """A log of `count` rows, made from the one real row that is there."""
    config, line = (cycle.root / "autoresearch.jsonl").read_text().splitlines()
    row = json.loads(line)
    statuses = ["discard", "keep", "crash", "discard", "checks_failed"]
    with open(cycle.root / "autoresearch.jsonl", "w") as log:
        log.write(config + "\n")
        for n in range(count):
            status = statuses[n % 5] if n else "keep"
            metric = 0 if status == "crash" else round(1.0 - 0.0003 * n + 0.01 * (status != "keep"), 6)
            row |= {"run": n + 1, "status": status, "metric": metric, "description": f"idea {n} " + "long " * 40}
            log.write(json.dumps(row | {"asi": {"learned": "much " * 30}, "timestamp": row["timestamp"] + n}) + "\n")


@pytest.mark.parametrize("command", ["status", "resume"])
def test_status_and_resume_on_logs_of_any_kind(cycle, command):
    code, out, err = cycle.call(command)
    assert code == 0 and "run baseline" in out or "NEXT" in out, err
    cycle.run("baseline")
    code, out, err = cycle.call(command)
    assert code == 0 and "1.000000" in out and "a guess" in out
    many_rows(cycle, 1000)
    code, out, err = cycle.call(command)
    assert code == 0 and "idea 996" in out and len(out) < 4000
    log = cycle.root / "autoresearch.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    crashes = [json.dumps(row | {"metric": 0, "status": "crash"}) for row in lines[1:9]]
    log.write_text("\n".join(crashes) + '\n{"run": 9, "com')
    code, out, err = cycle.call(command)
    assert code == 0 and "no scored run yet" in out, err
    assert "nothing to measure" in cycle.call("noise")[2]


def test_three_discards_ask_for_another_direction_and_resume_remembers(based):
    for score in (1.1, 1.2, 1.3):
        assert "step back" not in based.call("status")[1]
        based.edit(score)
        based.run(f"try {score}", "--asi", json.dumps({"learned": f"not {score}"}))
    out = based.call("status")[1]
    assert "three runs in a row were not kept" in out and "kept 1" in out and "try 1.3" in out
    out = based.call("resume")[1]
    assert all(word in out for word in ("GOAL", '"not 1.2"', based.rows()[0]["commit"], "NEXT  edit train.py"))


def test_confidence_is_gain_over_median_deviation():
    rows = [{"metric": m, "status": s} for m, s in ((1.0, "keep"), (0.9, "keep"), (0.97, "discard"), (0, "crash"))]
    assert experiment.confidence(rows) == 3.333  # scores 1, 0.9, 0.97: median 0.97, deviations 0.03, 0.07, 0
    assert experiment.confidence(rows[:2]) is None
    assert experiment.confidence(rows[:1] * 5) is None


def test_one_list_of_fixed_files():
    text = (ROOT / "autoresearch.sh").read_text()
    assert f'FIXED="{" ".join(experiment.FIXED)}"' in text and f"SESSION={experiment.SESSION} " in text


def test_nothing_runs_at_import_and_only_the_standard_library_is_needed():
    tree = ast.parse((ROOT / "experiment.py").read_text())
    names = {a.name.split(".")[0] for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split(".")[0] for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names)


@pytest.mark.slow
def test_the_real_train_py_goes_through_the_cycle_once(tmp_path, request):
    cycle = Cycle(tmp_path / "repo")
    for name in ("prepare.py", "data.py", "train.py"):
        shutil.copy(ROOT / name, cycle.root / name)
    shutil.copytree(ROOT / "harness", cycle.root / "harness")
    cycle.git("add", "-A")
    cycle.git("commit", "-qam", "the real ones")
    cycle.git("update-ref", experiment.SESSION, "HEAD")
    cache = request.getfixturevalue("prepared")["AUTORESEARCH_CACHE"]
    process = cycle.start("run", "baseline", AUTORESEARCH_TIME_BUDGET="5", AUTORESEARCH_HARD_LIMIT="900",
                          AUTORESEARCH_PROFILE="tiny", AUTORESEARCH_CACHE=cache)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    row = cycle.rows()[0]
    assert row["status"] == "keep" and row["data_id"] and row["metrics"]["num_steps"] > 0
    assert (cycle.root / ".autoresearch/runs" / f"1-{row['commit']}" / "steps.jsonl").exists()
    assert shutil.which("g++") is None or any(Path(cache, "compiled").iterdir())  # kept for the next run
    cycle.assert_settled()
