"""Runs on a Ray cluster of several nodes on this machine, and what may go wrong there."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import helpers
import pytest
from cluster import FleetLab, RayCluster, kill
from helpers import clean_environment, wait_until
from lab import finished

from harness.process import RUN_ID, run_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("ray"), reason="needs the package ray: uv sync --extra fleet"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes, for the tests that leave them as they are."""
    cluster = RayCluster(tmp_path_factory.mktemp("cluster"))
    cluster.nodes = [cluster.add_node() for _ in range(2)]
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def template(tmp_path_factory, cluster):
    """A checkout with a baseline that was measured on the cluster."""
    lab = FleetLab(tmp_path_factory.mktemp("template") / "repo", cluster)
    lab.attempt("baseline")
    return lab.root


@pytest.fixture
def based(tmp_path, cluster, template):
    """A copy of it for one test."""
    return FleetLab(tmp_path / "repo", cluster, template)


@pytest.fixture(scope="module")
def other_cluster(tmp_path_factory):
    """A head without nodes, for the tests that lose some."""
    cluster = RayCluster(tmp_path_factory.mktemp("other"))
    yield cluster
    cluster.stop()


class Gate:
    """What a train.py waits for, on whatever node it runs. Its attempts can be counted."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.body = (
            f"open({str(folder)!r} + '/' + os.environ['AUTORESEARCH_RUN_ID'], 'w').close()\n"
            f"while not os.path.exists({str(folder / 'open')!r}):\n    time.sleep(0.02)"
        )

    @property
    def attempts(self) -> int:
        """How often train.py was started."""
        return sum(path.name != "open" for path in self.folder.iterdir())

    def wait_for(self, attempts: int) -> None:
        wait_until(lambda: self.attempts == attempts)

    def open(self) -> None:
        (self.folder / "open").touch()


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


def training(run_id: str) -> list[int]:
    """The processes of a run that still train, on any node."""
    return [pid for pid, found in run_processes() if found[RUN_ID].startswith(f"{run_id}-")]


def owner_of(run_id: str) -> int:
    """The process that works on a detached run."""
    listing = subprocess.run(["pgrep", "-f", f"harness work {run_id}"], capture_output=True)
    return int(listing.stdout)


def started(lab, gate, score=0.9):
    """A detached run whose train.py waits for the gate; returns its id."""
    lab.edit(score, gate.body)
    run_id = lab.attempt(f"score {score}", "--detach").split()[1]
    gate.wait_for(1)
    return run_id


def assert_counted_once(lab, run_id, score=0.9):
    """One row and one score of the run, kept; nothing of it is left anywhere."""
    assert [row["id"] for row in lab.rows()].count(run_id) == 1
    scores = (lab.root / ".autoresearch/scores.jsonl").read_text()
    assert scores.count(f'"id": "{run_id}"') == 1
    assert lab.rows()[-1]["metric"] == score == lab.score_at()
    wait_until(lambda: not training(run_id))
    lab.assert_settled()


# ---- a run on the cluster is a run ----


def test_a_run_has_the_verdict_row_and_files_that_it_would_have_here(based):
    based.edit(0.9)
    based.attempt("better")
    row = based.rows()[-1]
    assert (row["status"], row["metric"], row["on"]) == ("keep", 0.9, "ray, 1 CPU")
    assert based.subjects() == ["better", "start"] and row["node"]
    folder = based.runs / f"2-{row['commit']}"
    names = {file.name for file in folder.iterdir()}
    assert names == {"eval.jsonl", "run.log", "train.diff", "record.json", "settings.json"}
    assert "METRIC val_bpb=0.900000" in (folder / "run.log").read_text()
    assert json.loads((folder / "eval.jsonl").read_text())["val_bpb"] == 0.9
    based.assert_settled()


def test_a_failure_comes_home_with_the_end_of_its_log(based):
    based.edit(0.9, "print('\\udc80 \\u00e9', flush=True)\nraise ValueError('boom')")
    out = based.attempt("fails", code=1)
    assert based.rows()[-1]["reason"] == "crash" and "ValueError: boom" in out


def test_a_fixed_file_that_is_changed_there_makes_the_score_void(based):
    based.edit(0.5, "open('prepare.py', 'a').write('#')")
    based.attempt("cheats", code=1)
    assert based.rows()[-1]["reason"] == "void"


def test_a_repeat_runs_there_on_a_seed_of_its_own(based):
    assert "n 2" in based.call("noise", "--repeats", "2").out
    text = (based.root / ".autoresearch/scores.jsonl").read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    assert sorted(entry["seed"] for entry in entries) == [1337, 1338]


def test_a_session_stays_where_it_is_measured(based):
    based.edit(0.9)
    command = [sys.executable, "-m", "harness", "try", "here"]
    options = {"cwd": based.root, "env": clean_environment(), "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 2
    assert "this run is for this machine, the session is measured on ray, 1 CPU" in done.stderr
    assert "hint: add '--on ray'" in done.stderr


def test_several_run_at_once_and_are_judged_as_they_end(based, tmp_path):
    gates = [Gate(tmp_path / name) for name in ("slow", "fast")]
    slow, fast = (
        started(based, gate, score) for gate, score in zip(gates, (0.95, 0.9), strict=True)
    )
    gates[1].open()
    based.call("wait", fast)
    gates[0].open()
    based.call("wait", slow)
    assert based.column("metric") == [1.0, 0.9, 0.95]
    assert based.column("status") == ["keep", "keep", "discard"]
    assert based.column("parent_metric")[-1] == 0.9  # the best kept one when it ended
    based.assert_settled()


def test_a_sweep_runs_as_many_at_once_as_there_is_room_for(based, gate):
    based.edit(1.0, gate.body)
    based.git("commit", "-qam", "waits")
    process = based.start("sweep", "SCORE=1.2,0.9,1.1", "--once", "--repeats", "1")
    gate.wait_for(2)
    gate.open()
    done = finished(process)
    assert done.code == 0 and "3 of them to run, up to 2 at once" in done.err
    assert sorted(based.column("metric")) == [0.9, 1.0, 1.1, 1.2]
    assert {row["on"] for row in based.rows()} == {"ray, 1 CPU"}
    assert "best: SCORE=0.9, val_bpb 0.900000; it is the kept train.py" in done.out
    based.assert_settled()


# ---- nodes that differ from the session ----


def test_nodes_with_other_data_are_named_and_not_used(based):
    text = based.log.read_text().replace("0123456789ab", "ba9876543210")
    based.log.write_text(text)  # now it is the session that differs from both nodes
    based.edit(0.9)
    out = based.attempt("nowhere", code=2)
    assert out.count("data_id is 0123456789ab, the session has ba9876543210") == 4  # and an error
    assert out.count("a node is not used for this session: ") == 2 and "hint:" in out
    assert len(based.rows()) == 1
    based.assert_settled(edited=True)
    out = based.attempt("nowhere", code=2)  # it is known by now: no node is asked
    assert "a node is not used" not in out and "no node can be used" in out


def test_nodes_with_another_torch_do_not_train(based, gate):
    based.log.write_text(based.log.read_text().replace('"torch": null', '"torch": "3"'))
    based.edit(0.9, gate.body)
    assert "torch is 2, the session has 3" in based.attempt("nowhere", code=2)
    assert not gate.attempts


def test_a_run_goes_to_a_node_that_is_like_the_session(based, cluster):
    names = {node.node_id[:8]: node for node in cluster.nodes}
    used = based.rows()[0]["node"].split()[1]
    based.forbid(names.pop(used))
    based.edit(0.9)
    based.attempt("on the other node")
    assert based.rows()[-1]["node"].split()[1] in names


def test_fleet_check_has_a_line_for_each_node(based, cluster):
    def lines(code):
        return based.call("fleet", "check", "--cpus", "1", code=code).out.splitlines()

    assert sorted(line[:5] for line in lines(0)) == ["-    ", "2 of ", "ok   ", "ok   "]
    odd = cluster.add_node(FAKE_DATA="ba9876543210")
    found = lines(2)
    cluster.lose(odd)
    assert sorted(line[:5] for line in found) == ["-    ", "2 of ", "ok   ", "ok   ", "other"]
    assert any("data_id is ba9876543210, the session has 0123456789ab" in line for line in found)


def test_a_cluster_without_room_says_what_is_missing(based):
    based.edit(0.9)
    out = based.attempt("too large", "--new-session", "--on", "ray", "--cpus", "64", code=2)
    assert "no node of the cluster has 64 CPU" in out
    based.assert_settled(edited=True)


# ---- refused before anything runs ----


def test_a_cluster_that_is_not_there_is_named_and_the_edit_stays(based):
    based.edit(0.9)
    command = [sys.executable, "-m", "harness", "try", "nowhere", "--on", "ray", "--cpus", "1"]
    environment = clean_environment(**based.cluster.variables(RAY_ADDRESS="127.0.0.1:9"))
    done = subprocess.run(
        command, cwd=based.root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "no Ray cluster at 127.0.0.1:9" in done.stderr
    assert "hint: 'ray start --head'" in done.stderr
    assert len(based.rows()) == 1
    based.assert_settled(edited=True)


# ---- faults ----


def test_a_worker_that_is_killed_is_replaced_and_its_training_ends(based, gate):
    run_id = started(based, gate)
    first = training(run_id)
    kill(based.cluster.processes(f"ray::autoresearch {run_id}")[0])
    gate.wait_for(2)
    wait_until(lambda: not set(first) & set(training(run_id)))
    gate.open()
    based.call("wait", run_id)
    assert_counted_once(based, run_id)


def test_a_killed_harness_process_of_a_worker_leaves_no_training(based, gate):
    run_id = started(based, gate)
    first = training(run_id)
    kill(max(based.cluster.processes("harness.fleet_worker")))  # the second of two
    gate.wait_for(2)  # on the other node
    wait_until(lambda: not set(first) & set(training(run_id)))
    gate.open()
    based.call("wait", run_id)
    assert_counted_once(based, run_id)


def test_a_killed_command_ends_what_trains_and_wait_logs_it_once(based, gate):
    run_id = started(based, gate)
    kill(owner_of(run_id))
    done = based.call("wait", run_id, code=1)
    assert "interrupted" in done.out
    assert based.call("wait", run_id, code=1).out == done.out
    assert based.column("reason").count("interrupted") == 1
    assert based.score_at(based.rows()[-1]["ref"]) == 0.9
    wait_until(lambda: not training(run_id))
    based.assert_settled()


def test_ctrl_c_ends_the_training_on_the_node(based, gate):
    based.edit(0.9, gate.body)
    process = based.start("try", "interrupted", "--once", "--repeats", "1")
    gate.wait_for(1)
    os.kill(process.pid, signal.SIGINT)
    assert finished(process).code == 130
    row = based.rows()[-1]
    assert row["reason"] == "interrupted"
    wait_until(lambda: not training(row["id"]))
    based.assert_settled()


def test_a_lost_node_and_a_silent_one_cost_an_attempt_each(template, other_cluster, tmp_path, gate):
    lab = FleetLab(tmp_path / "repo", other_cluster, template)
    lost = other_cluster.add_node()
    run_id = started(lab, gate)
    silent = other_cluster.add_node()
    other_cluster.lose(lost)
    gate.wait_for(2)
    other_cluster.add_node()
    # The network of the node is gone: nobody hears of it, but the training goes on.
    raylet = silent.all_processes["raylet"][0].process
    unheard = [raylet.pid, *other_cluster.processes("ray::autoresearch")]
    for pid in unheard:
        os.kill(pid, signal.SIGSTOP)
    gate.wait_for(3)
    for pid in unheard:
        os.kill(pid, signal.SIGCONT)  # it is back, and hears that it counts as lost
    wait_until(lambda: raylet.poll() is not None)
    wait_until(lambda: len(training(run_id)) == 1)
    gate.open()
    lab.call("wait", run_id)
    assert_counted_once(lab, run_id)


def test_a_restarted_head_costs_an_attempt(template, other_cluster, tmp_path, gate):
    lab = FleetLab(tmp_path / "repo", other_cluster, template)
    other_cluster.add_node()
    run_id = started(lab, gate)
    port = int(other_cluster.address.rpartition(":")[2])
    other_cluster.cluster.shutdown()
    wait_until(lambda: not training(run_id))
    other_cluster.start_head(port)
    other_cluster.add_node()
    gate.wait_for(2)
    gate.open()
    lab.call("wait", run_id)
    assert_counted_once(lab, run_id)


def test_files_that_do_not_unpack_are_no_run(based, tmp_path):
    shim = tmp_path / "bin" / "git"
    shim.parent.mkdir()
    real = subprocess.run(["which", "git"], capture_output=True, text=True).stdout.strip()
    shim.write_text(
        f'#!/bin/bash\n{real} "$@"\ncode=$?\n'
        'for word; do case $word in --output=*) truncate -s 100 "${word#*=}";; esac; done\n'
        "exit $code\n"
    )
    shim.chmod(0o755)
    based.edit(0.9)
    out = based.attempt("damaged", code=2, PATH=f"{shim.parent}:{os.environ['PATH']}")
    assert "the files do not unpack" in out and len(based.rows()) == 1
    based.assert_settled(edited=True)


@pytest.fixture
def small_disk(tmp_path):
    """A disk with less room than a run needs."""
    with helpers.small_disk(tmp_path / "disk", megabytes=20) as disk:
        yield disk


def test_a_node_with_a_full_disk_is_named_and_runs_nothing(based, cluster, small_disk):
    full = cluster.add_node(TMPDIR=str(small_disk))
    based.forbid(*cluster.nodes)
    based.edit(0.9)
    out = based.attempt("no room", code=2)
    cluster.lose(full)
    assert "its disk is full: " in out and "100 are needed" in out and len(based.rows()) == 1
    based.assert_settled(edited=True)
    based.forbid()
    based.attempt("room on the others")
    assert based.column("status") == ["keep", "keep"]


# ---- the real one ----


@pytest.fixture
def new_cluster(tmp_path):
    """A head without nodes that no other test has used."""
    cluster = RayCluster(tmp_path / "new")
    yield cluster
    cluster.stop()


def test_the_real_train_py_survives_a_killed_worker(new_cluster, tmp_path, few_rows):
    lab = FleetLab(tmp_path / "repo", new_cluster)
    lab.use_real_files()
    cache = few_rows["AUTORESEARCH_CACHE"]
    new_cluster.add_node(PYTHONPATH="", AUTORESEARCH_CACHE=cache)
    settings = {"AUTORESEARCH_TIME_BUDGET": "5", "AUTORESEARCH_PROFILE": "tiny"}
    settings["AUTORESEARCH_HARD_LIMIT"] = "600"
    process = lab.start("try", "baseline", "--once", "--repeats", "1", **settings)
    running = partial(new_cluster.processes, "train.py")
    wait_until(lambda: running() or process.poll() is not None, seconds=300)
    first = running()
    assert first, finished(process).text
    kill(new_cluster.processes("ray::autoresearch")[0])
    done = finished(process, seconds=600)
    assert done.code == 0, done.text
    wait_until(lambda: not set(first) & set(running()))
    row = lab.rows()[0]
    assert row["status"] == "keep" and row["metrics"]["num_steps"] > 0 and len(lab.rows()) == 1
    assert (lab.runs / f"1-{row['commit']}" / "steps.jsonl").stat().st_size
    assert row["torch"] and row["threads"] == 1
    lab.assert_settled()
