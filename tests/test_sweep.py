"""`sweep`: combinations of knobs, as candidates that are judged like all others."""

import ast

import pytest
from helpers import ROOT
from lab import Lab

from harness.common import UserError
from harness.knobs import find_knobs, read_knob, with_values

TRAIN = (ROOT / "train.py").read_bytes()
SAMPLE = b"""
RATE = 0.04  # a rate
DEPTH = 9
PAIR = (0.8, 0.95)
NAME = "auto"
ON = True
SIZE = 2**18
WIDTH = DEPTH * 64
lower = 3
if PROFILE == "small":
    DEPTH = 6
elif PROFILE == "tiny":
    DEPTH, OTHER = 4, 5
    RATE = 0.3
"""


def values(source: bytes, profile: str) -> dict:
    """The value of each knob."""
    return {name: knob.value for name, knob in find_knobs(source, profile).items()}


def changed(word: str, profile: str = "full", source: bytes = SAMPLE) -> list[bytes]:
    """The file for each value of the word."""
    knob, texts = read_knob(word, find_knobs(source, profile))
    return [with_values(source, {knob: text}) for text in texts]


# ---- knobs ----


@pytest.mark.parametrize("profile", ["full", "small", "tiny"])
def test_the_values_of_the_real_train_py_are_those_that_python_computes(profile):
    """Second way: execute the assignments of the knobs section."""
    text = TRAIN.decode()
    section = text[text.index("# Model\n") : text.index("# ------", text.index("# Model\n"))]
    names = {"PROFILE": profile}
    exec(section, names)
    computed = {name: value for name, value in names.items() if name.isupper()}
    del computed["PROFILE"]
    found = values(TRAIN, profile)
    assert computed.items() <= found.items() and len(computed) > 40


@pytest.mark.parametrize("profile", ["full", "small", "tiny"])
@pytest.mark.parametrize("name", ["MATRIX_LR", "EMBEDDING_LR", "DEPTH", "SHORT_WINDOW"])
def test_a_knob_is_changed_where_the_profile_takes_it_from(profile, name):
    present = values(TRAIN, profile)
    wanted = present[name] * 2
    (new,) = changed(f"{name}={wanted}", profile, TRAIN)
    assert values(new, profile) == present | {name: wanted}
    before, after = TRAIN.splitlines(), new.splitlines()
    assert sum(one != two for one, two in zip(before, after, strict=True)) == 1


def test_nothing_else_of_a_line_changes():
    assert b"RATE = 0.02  # a rate\n" in changed("RATE=0.02")[0]
    assert b"    RATE = 0.02\n" in changed("RATE=0.02", "tiny")[0]
    assert b"RATE = 0.04  # a rate\n" in changed("RATE=0.02", "tiny")[0]


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        ("RATE=1,2e-3", [b"RATE = 1.0 ", b"RATE = 2e-3 "]),
        ("SIZE=2**17,1024", [b"SIZE = 2**17\n", b"SIZE = 1024\n"]),
        ("PAIR=(1,0.9),(0.5, 0.6)", [b"PAIR = (1,0.9)\n", b"PAIR = (0.5, 0.6)\n"]),
        ("NAME=plain,'sdpa',a-b", [b"NAME = 'plain'\n", b"NAME = 'sdpa'\n", b"NAME = 'a-b'\n"]),
        ("ON=False", [b"ON = False\n"]),
        ("RATE=-0.5,-0.5", [b"RATE = -0.5 "]),
    ],
)
def test_values_are_written_as_they_were_given(word, lines):
    files = changed(word)
    assert len(files) == len(lines)
    for content, line in zip(files, lines, strict=True):
        assert line in content


@pytest.mark.parametrize("word", ["RATE=4e-2", "SIZE=262144", "PAIR=(0.80, 0.95)", 'NAME="auto"'])
def test_the_present_value_in_another_notation_is_the_same_file(word):
    assert changed(word) == [SAMPLE]


def test_two_knobs_change_independently_of_their_order():
    knobs = find_knobs(SAMPLE, "full")
    new = with_values(SAMPLE, {knobs["SIZE"]: "2**9", knobs["RATE"]: "0.001"})
    assert values(new, "full") == values(SAMPLE, "full") | {"SIZE": 512, "RATE": 0.001}


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("RTAE=1", "no knob RTAE.*did you mean RATE"),
        ("depth=1", "no knob depth.*did you mean DEPTH"),
        ("lower=1", "no knob lower"),
        ("WIDTH=1", "no knob WIDTH"),
        ("RATE", "has no values. hint: MATRIX_LR"),
        ("RATE=", "has no values"),
        ("RATE=0.1,,0.2", "does not parse. hint: RATE=0.04,..."),
        ("RATE=fast", "RATE=fast: this is not a number, as the present value 0.04 is"),
        ("RATE=True", "this is not a number"),
        ("RATE=1e999", "this is not a number"),
        ("DEPTH=4.0", "this is not a whole number, as the present value 9 is"),
        ("DEPTH=9**9**9", "this is not a whole number"),
        ("ON=1", "this is not True or False"),
        ("PAIR=(1,2,3)", "this is not a tuple of 2"),
        ("NAME=3", "this is not a text"),
    ],
)
def test_a_misspelt_knob_or_value_is_refused(word, words):
    with pytest.raises(UserError, match=words):
        changed(word)


def test_every_value_that_is_accepted_leaves_a_file_that_parses():
    for word in ("NAME='it\\'s',ab", "PAIR=(-1,2**2)"):
        for content in changed(word):
            ast.parse(content)


# ---- the command ----


@pytest.fixture
def lab(tmp_path):
    """A baseline of 1.0; the score is SCORE + SHIFT."""
    lab = Lab(tmp_path / "repo")
    text = lab.train.read_text().replace("SCORE = 1.0", "SCORE = 1.0\nSHIFT = 0.0")
    lab.train.write_text(text.replace("score = SCORE +", "score = SCORE + SHIFT +"))
    lab.git("commit", "-qam", "two knobs")
    lab.attempt("baseline")
    return lab


QUICK = ("--once", "--repeats", "1")


@pytest.mark.slow
def test_every_combination_is_a_candidate_and_the_best_one_is_kept(lab):
    done = lab.call("sweep", "SCORE=0.9,1.1", "SHIFT=0.0,-0.1", *QUICK)
    assert sorted(lab.column("metric")) == [0.8, 0.9, 1.0, 1.0, 1.1]
    assert lab.rows()[1]["description"] == "SCORE=0.9 SHIFT=0.0"
    assert {row["asi"]["sweep"] for row in lab.rows()[1:]} == {"SCORE=0.9,1.1 SHIFT=0.0,-0.1"}
    lines = done.out.splitlines()
    assert [line.split()[2] for line in lines[1:5]] == [
        "0.800000",
        "0.900000",
        "1.000000",
        "1.100000",
    ]
    assert lines[5] == "best: SCORE=0.9 SHIFT=-0.1, val_bpb 0.800000; it is the kept train.py"
    assert "SHIFT = -0.1\n" in lab.git("show", "HEAD:train.py")
    lab.assert_settled()
    again = lab.call("sweep", "SCORE=0.9,1.1", "SHIFT=0.0,-0.1", *QUICK)
    assert "0 of them to run" in again.err and again.out == done.out


@pytest.mark.slow
def test_the_same_sweep_again_runs_only_what_is_missing(lab):
    lab.call("sweep", "SCORE=1.1,1.2", *QUICK)
    done = lab.call("sweep", "SCORE=1.0,1.1,1.2,1.3", *QUICK)
    assert "4 combinations, 1 of them to run" in done.err
    assert lab.column("metric") == [1.0, 1.1, 1.2, 1.3]
    assert "best: SCORE=1.0, val_bpb 1.000000" in done.out  # the kept one was among them


def test_each_combination_gets_the_seeds_that_were_asked_for(lab):
    lab.call("sweep", "SCORE=1.5", "--seeds", "2", *QUICK)
    row = lab.rows()[-1]
    assert row["runs"] == 2 and row["status"] == "discard"


def test_a_combination_that_crashes_is_a_row_like_any_other(lab):
    text = lab.train.read_text().replace("def main():", "def main():\n    assert SHIFT < 5")
    lab.train.write_text(text)
    lab.git("commit", "-qam", "may fail")
    done = lab.call("sweep", "SHIFT=9.0", *QUICK)
    assert "crashed (crash), run 2" in done.out and lab.column("status") == ["keep", "crash"]
    assert "none is better than the kept train.py: val_bpb 1.000000" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("SCROE=1.0",), "did you mean SCORE"),
        (("SCORE=low",), "this is not a number"),
        (("SCORE=0.9", "SCORE=0.8"), "named twice"),
        (("SCORE=0.9", "--seeds", "0"), "--seeds 0 is not from 1 to 20"),
        (("SCORE=0.9", "--cpus", "2"), "hint: add --on ray"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(lab, words, message):
    assert message in lab.call("sweep", *words, code=2).err
    assert len(lab.rows()) == 1
    lab.assert_settled()


def test_an_edited_train_py_is_refused_and_stays(lab):
    lab.edit(0.9)
    edited = lab.train.read_text()
    assert "begins with the kept one" in lab.call("sweep", "SCORE=0.8", code=2).err
    assert lab.train.read_text() == edited


def test_without_a_session_it_says_what_to_do_first(tmp_path):
    lab = Lab(tmp_path / "repo")
    assert "hint: bash autoresearch.sh try baseline" in lab.call("sweep", "SCORE=1", code=2).err
