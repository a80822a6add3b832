"""The counters of the machine during a run."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import wait_until

from harness import machine_load
from harness.machine_load import Counters, LoadMeter, Sample, rates
from harness.process import run_variables

linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs the counters of Linux")


def test_rates_are_cpu_seconds_per_second():
    first = Sample(time=100, own=10, waited=1, busy=1000, steal=5, throttled=0)
    last = Sample(time=110, own=25, waited=3, busy=1020, steal=6, throttled=0.5)
    assert rates(first, last) == {
        "cpu": 1.5, "others": 0.5, "steal": 0.1, "waited": 0.2, "throttled": 0.05, "seconds": 10,
    }  # fmt: skip


def test_others_are_never_negative():
    first = Sample(0, own=0, waited=0, busy=0, steal=0, throttled=0)
    assert rates(first, Sample(1, 1.01, 0, busy=1, steal=0, throttled=0))["others"] == 0


@pytest.mark.parametrize(
    ("record", "cpu"),
    [
        # 20 s of starting at one core, 60 s of training at two, 10 s of scoring at three
        ({"training_seconds": 60.0, "seconds": 10.0}, 2.0),
        ({"training_seconds": 60.0}, (50 * 2 + 10 * 3) / 60),
        ({}, (20 * 1 + 60 * 2 + 10 * 3) / 90),
    ],
)
def test_the_load_is_that_of_the_training_alone(record, cpu):
    meter = LoadMeter("run")
    own = 0.0
    for second in range(91):
        meter.samples.append(Sample(float(second), own, 0, own, 0, 0))
        own += 1 if second < 20 else 2 if second < 80 else 3
    meter.ended = 90.0
    assert meter.load(record)["cpu"] == pytest.approx(cpu, abs=0.001)


def test_too_few_samples_give_no_load():
    meter = LoadMeter("run")
    meter.samples, meter.ended = [Sample(1, 0, 0, 0, 0, 0)], 2.0
    assert meter.load({}) == {}


@linux
def test_the_counters_see_a_run_and_its_children_and_keep_what_they_used(tmp_path):
    burn = "t = time.process_time()\nwhile time.process_time() < t + 0.3: pass\n"
    child = f"import time\n{burn}"
    code = (
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {child!r}])\n{burn}"
    )
    counters = Counters("load-test")
    before = counters.read()
    process = subprocess.Popen(
        [sys.executable, "-c", code + "print(1, flush=True)\ntime.sleep(60)"],
        env=run_variables("load-test", tmp_path), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "1\n"
    used = counters.read()
    process.kill()
    process.wait()
    after = counters.read()
    assert before.own == 0 and used.own > 0.5 and used.busy - before.busy > 0.5
    assert after.own == used.own
    assert counters.read().busy >= after.busy >= used.busy


def test_a_child_that_is_just_being_started_is_found_at_the_next_look(monkeypatch):
    """Between fork and exec it shows the environment of its parent."""
    ours, others = ["AUTORESEARCH_RUN_ID=run"], ["HOME=/h"]
    looks = [{5: others, 6: others}, {5: ours, 6: others}, {5: ours}]
    passed = []

    def look(foreign):
        passed.append(set(foreign))
        return list(looks[len(passed) - 1].items())

    monkeypatch.setattr(machine_load, "environments", look)
    counters = Counters("run")
    assert [counters.find() for _ in looks] == [[], [5], [5]]
    assert passed == [set(), set(), {6}]  # another's process is looked at twice


@linux
def test_a_meter_samples_while_it_is_open(monkeypatch):
    monkeypatch.setattr(machine_load, "INTERVAL", 0.01)
    with LoadMeter("run") as meter:
        wait_until(lambda: len(meter.samples) > 2)
    assert not meter.thread.is_alive() and meter.load({})["cpu"] == 0
