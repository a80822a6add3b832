"""What the user and the agent read: status, resume."""

import json

import pytest
from lab import many_rows

from harness.status import direction_lines


@pytest.mark.parametrize("command", ["status", "resume"])
def test_without_a_log_it_says_how_to_begin(lab, command):
    out = lab.call(command).out
    assert "no scored run yet" in out and "bash autoresearch.sh try" in out


@pytest.mark.parametrize("command", ["status", "resume"])
def test_a_thousand_rows_stay_short(based, command):
    many_rows(based, 1000)
    out = based.call(command).out
    assert "idea 996" in out and len(out) < 4000


@pytest.mark.parametrize("command", ["status", "resume"])
def test_a_log_of_failures_only_is_shown(based, command):
    many_rows(based, 9)
    lines = [json.loads(line) for line in based.log.read_text().splitlines()[1:]]
    crashes = [json.dumps(row | {"metric": 0, "status": "crash"}) for row in lines]
    based.log.write_text("\n".join(crashes) + '\n{"run": 9, "com')
    assert "no scored run yet" in based.call(command).out
    assert "nothing to measure" in based.call("noise", code=2).err


@pytest.mark.parametrize("command", ["status", "resume"])
def test_rows_of_another_tool_are_shown(lab, command):
    config = {"type": "config", "name": "x", "metricName": "val_bpb", "metricUnit": "bpb"}
    row = {"run": 1, "commit": "0123abc", "metric": 0.5, "status": "keep", "metrics": None}
    row |= {"description": "theirs", "seconds": "12"}
    lab.log.write_text(json.dumps(config) + "\n" + json.dumps(row) + "\n")
    assert "theirs" in lab.call(command).out


def test_a_session_begins_after_the_rows_of_another_tool(lab):
    config = {"type": "config", "name": "x", "metricName": "val_bpb", "metricUnit": "bpb"}
    config |= {"bestDirection": "lower"}
    row = {"run": 1, "commit": "0123abc", "metric": 0.5, "status": "keep", "timestamp": 1}
    lab.log.write_text(json.dumps(config) + "\n" + json.dumps(row) + "\n")
    lab.edit(0.9)
    lab.attempt("ours")
    lines = [json.loads(line) for line in lab.log.read_text().splitlines()][2:]
    assert lines[0]["type"] == "config"
    assert [(row["run"], row["segment"], row["status"]) for row in lines[1:]] == [
        (2, 1, "keep"),
        (3, 1, "keep"),
    ]


@pytest.mark.slow
def test_three_dropped_ideas_ask_for_another_direction(based):
    for score in (1.1, 1.2, 1.3):
        assert "step back" not in based.call("status").out
        based.edit(score)
        based.attempt(f"try {score}", "--asi", json.dumps({"learned": f"not {score}"}))
    assert "3 ideas in a row were not kept" in based.call("status").out


@pytest.mark.slow
def test_a_typo_is_no_idea_that_was_not_kept(based):
    for score in (1.1, 1.2):
        based.edit(score)
        based.attempt(f"score {score}")
    based.edit(1.3, "nonsense")
    assert "step back" not in based.attempt("a typo", code=1)
    based.edit(1.3)
    assert "step back" in based.attempt("the third idea")  # where it is read: in the verdict


def test_the_verdict_has_steps_and_those_of_the_incumbent(based):
    based.edit(0.9)
    based.train.write_text(based.train.read_text().replace("num_steps=7", "num_steps=9"))
    out = based.attempt("more steps")
    assert "steps 9 (incumbent 7)" in out and "kept" in out


@pytest.mark.slow
def test_interrupted_refused_and_crashed_are_three_words(based):
    based.edit(0.9, "sys.exit(2)")
    assert "refused " in based.attempt("refused by train.py", code=1)
    based.edit(0.9, "raise ValueError")
    assert "crashed " in based.attempt("a typo", code=1)


def test_a_near_miss_names_the_command_that_confirms_it(based):
    based.edit(0.9995)
    assert "confirm 2 (" in based.attempt("near")
    based.edit(1.1)
    assert "confirm" not in based.attempt("far")


def test_memory_is_no_matter_on_a_cpu(based):
    based.edit(0.9)
    based.train.write_text(based.train.read_text().replace("2048.0", "4096.0"))
    assert "peak memory" not in based.attempt("compiles more")


@pytest.mark.slow
def test_best_and_code_agree_after_a_simplification(based):
    based.edit(0.9)
    based.attempt("better")
    based.edit(0.9)
    text = based.train.read_text().replace("NOISE = [0.0]\n", "")
    based.train.write_text(text.replace("NOISE[(seed - 1337) % len(NOISE)]", "0.0"))
    based.attempt("shorter", "--simpler")
    assert based.rows()[-1]["status"] == "keep"
    assert "best     0.900000 (run 3): shorter" in based.call("status").out


@pytest.mark.slow
def test_no_output_shows_the_score_on_the_hold_out_text(lab):
    lab.edit(1.0, "record['holdout_bpb'] = 0.777777")
    lab.git("commit", "-qam", "with a hold-out score")
    shown = lab.attempt("baseline")
    lab.edit(0.9, "record['holdout_bpb'] = 0.777778")
    shown += lab.attempt("better") + lab.call("status").text + lab.call("resume").text
    assert lab.column("holdout_bpb") == [0.777777, 0.777778] and "0.77777" not in shown


# ---- note, curve ----


def test_note_adds_what_was_learned_and_resume_shows_it(based):
    before = based.log.read_text().splitlines()
    based.call("note", "1", "learned it is slow to start")
    based.call("note", based.rows()[0]["id"], "and memory is no limit")
    assert based.rows()[0]["asi"] == {"learned": "it is slow to start; and memory is no limit"}
    assert "it is slow to start; and memory" in based.call("resume").out
    assert based.log.read_text().splitlines()[0] == before[0]
    assert "there is no run" in based.call("note", "9", "x", code=2).err


def test_note_leaves_all_other_bytes_of_the_log(based):
    odd = b'{"run": "theirs", \xff}\n# by hand\n'
    based.log.write_bytes(based.log.read_bytes() + odd)
    based.call("note", "1", "é")
    assert based.log.read_bytes().endswith(odd)


def test_curve_draws_the_loss_in_thirty_lines(lab):
    steps = "with open(os.path.join(folder, 'steps.jsonl'), 'w') as file:\n"
    steps += "    for n in range(500):\n"
    steps += "        line = {'elapsed': n / 10, 'step': n, 'loss': 8 - n / 100}\n"
    steps += "        file.write(json.dumps(line) + chr(10))"
    lab.edit(1.0, steps)
    lab.git("commit", "-qam", "with steps")
    lab.attempt("baseline")
    lines = lab.call("curve", "1").out.splitlines()
    assert len(lines) == 30
    losses = [float(line.split()[2]) for line in lines[1:]]
    assert losses == sorted(losses, reverse=True) and losses[-1] == 3.01


def test_curve_of_a_run_without_steps_says_so(based):
    assert "left no steps" in based.call("curve", "1", code=2).err


# ---- resume ----


def test_resume_at_a_hundred_runs_shows_the_kept_the_last_and_the_other_directions(based):
    many_rows(based, 100)
    out = based.call("resume").out
    assert len(out) < 4000
    assert all(f"idea {n} " in out for n in range(85, 100))
    assert "kept before that" in out and "idea 1 " in out
    assert "NEXT" in out and "report --tsv" in out


def test_ideas_of_one_direction_share_a_line():
    ideas = [("windows: a quarter", 1.2), ("a wider model", 0.0), ("windows: an eighth", 1.1)]
    ideas += [("windows: none", 0.0), ("rates: halved", 0.0), ("rates: doubled", 0.0)]
    rows = [{"run": n, "description": d, "metric": m} for n, (d, m) in enumerate(ideas, start=1)]
    assert direction_lines(rows) == [
        "  rates: 2 ideas, none scored",
        "  windows: 3 ideas, best 1.1000",
        "  2 a wider model",
    ]


def test_resume_names_rules_settings_ideas_and_the_next_command(based):
    based.edit(1.1)
    based.attempt("an idea", "--asi", '{"learned": "not this"}')
    out = based.call("resume").out
    assert all(word in out for word in ("GOAL", "an idea", "not this", "NEXT  edit train.py"))
    assert "budget 300 s" in out and "seed 1337" in out and "data embedded" in out
    assert based.rows()[-1]["ref"].split("/")[-1] in out


def test_the_harness_is_read_without_torch(based):
    code = "import sys, harness.__main__; assert not {'torch', 'prepare'} & set(sys.modules)"
    assert based.start(script=("-c", code)).wait() == 0
