"""What the user and the agent read: status, resume."""

import json

import pytest

from tests.lab import Lab, many_rows


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path / "repo")


@pytest.fixture
def based(lab):
    lab.attempt("baseline")
    return lab


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


def test_three_dropped_ideas_ask_for_another_direction(based):
    for score in (1.1, 1.2, 1.3):
        assert "step back" not in based.call("status").out
        based.edit(score)
        based.attempt(f"try {score}", "--asi", json.dumps({"learned": f"not {score}"}))
    assert "three runs in a row were not kept" in based.call("status").out


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
