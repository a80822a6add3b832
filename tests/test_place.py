"""The choice of the place that a run trains at, as far as no cluster is needed to test it."""

import subprocess
import sys

import pytest
from helpers import ROOT

from harness import place
from harness.common import UserError
from harness.fleet_worker import check_facts
from harness.place import INSTALL, Place
from harness.session import OtherSettings, Session


def test_without_the_package_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(place, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="uv sync --extra fleet"):
        Place(on="ray").check()
    Place().check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpus": 2}, "hint: add --on ray"),
        ({"on": "ray", "cpus": 0}, "a worker needs 1 or more"),
        ({"on": "ray", "gpu": "0"}, "drop one of them"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Place(**options).check()


def test_no_command_imports_ray():
    code = "import sys, harness.__main__; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", ["device", "torch", "processor"])
def test_what_a_node_is_must_be_what_the_session_has(name):
    session = Session({"device": "a GPU", "torch": "2", "processor": None, name: "ours"})
    check_facts(session, {"device": "a GPU", "torch": "2", name: "ours"})
    with pytest.raises(OtherSettings, match=f"{name} is other, the session has ours"):
        check_facts(session, {"device": "a GPU", "torch": "2", name: "other"})


def test_the_version_in_the_hint_is_the_pinned_one():
    pin = INSTALL.split("'")[-2]
    assert f'fleet = ["{pin}"]' in (ROOT / "pyproject.toml").read_text()


def test_a_record_of_an_older_version_is_of_this_machine():
    assert Place.of({"gpu": "1", "once": True}) == Place(gpu="1") and Place.of({}).label is None
    assert Place(on="ray").label == "ray" and Place(on="ray", cpus=2).label == "ray, 2 CPUs"


@pytest.mark.parametrize(
    ("ours", "theirs", "hint"), [(None, "ray", "drop '--on ray'"), ("ray, 2 CPUs", "ray", "add")]
)
def test_a_run_of_another_place_is_refused(ours, theirs, hint):
    with pytest.raises(OtherSettings, match=hint):
        Session({"on": ours}).check_place(theirs)
    Session({"on": ours}).check_place(ours)
    Session({}).check_place(None)
