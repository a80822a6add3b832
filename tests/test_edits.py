"""An agent's edits of train.py: each trains and scores, or is refused with what is wrong.

The edits are patches in tests/edits/. After a change of train.py that moves what they touch, apply
them by hand and write them again with `git diff -U2`.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import ROOT
from test_devices import read_lines

pytestmark = pytest.mark.slow
EDITS = ROOT / "tests" / "edits"

REFUSED = {  # exit code and what the last line must say
    "mlp_gain_without_first_value": (2, "no first value: blocks.0.mlp.gain"),
    "mlp_gain_in_no_group": (2, "in no group of the optimizer: blocks.0.mlp.gain"),
    "tied_head_in_two_groups": (2, r"in two groups .*: wte.weight \(= lm_head.weight"),
    "more_heads_than_fit": (2, r"2 heads do not divide by KV_GROUP=5. hint: one of \[1, 2\]"),
    "odd_head_dim": (2, "HEAD_DIM even: .*HEAD_DIM=63"),
    "a_batch_that_does_not_divide": (2, "TOTAL_BATCH_SIZE=5000 .* = 4096 or 8192"),
    "a_rate_that_diverges": (3, "loss nan at step 2"),
    "leaks_the_future": (5, "sees the future"),
    "logits_with_a_loss": (5, "must return logits"),
}


@dataclass
class Edit:
    """How an edited train.py did."""

    code: int
    out: str
    err: str
    record: dict | None  # of the evaluator
    facts: dict  # of tests/edits/run.py


@pytest.fixture(scope="module")
def edits(few_rows, tmp_path_factory) -> dict[str, Edit]:
    """All edits by name, run once."""
    folder = tmp_path_factory.mktemp("edits")
    files = []
    for patch in sorted(EDITS.glob("*.patch")):
        work = folder / "files" / patch.stem
        work.mkdir(parents=True)
        shutil.copy(ROOT / "train.py", work / "train.py")
        subprocess.run(["git", "apply", str(patch)], cwd=work, check=True)
        files.append((work / "train.py").rename(work.with_suffix(".py")))
    files.append(EDITS / "old_style.py")
    runs = folder / "runs"
    runs.mkdir()
    command = [sys.executable, str(EDITS / "run.py"), str(runs), *map(str, files)]
    subprocess.run(command, env=few_rows, check=True)
    return {file.stem: read_edit(runs / file.stem) for file in files}


def read_edit(folder: Path) -> Edit:
    facts = folder / "facts.json"
    return Edit(
        code=int((folder / "code.txt").read_text()),
        out=(folder / "out.txt").read_text(),
        err=(folder / "err.txt").read_text(),
        record=next(iter(read_lines(folder / "eval.jsonl")), None),
        facts=json.loads(facts.read_text()) if facts.exists() else {},
    )


NAMES = sorted(path.stem for path in EDITS.glob("*.patch"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_an_edit_trains_and_what_trains_is_scored(edits, name):
    edit = edits[name]
    assert edit.code == 0, edit.out + edit.err
    assert edit.record["val_bpb"] > 0
    assert edit.record["marks"] == ""
    assert len(re.findall("^METRIC val_bpb=", edit.out, re.M)) == 1
    assert edit.facts["loss"] == pytest.approx(edit.facts["cross_entropy"], rel=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_an_edit_that_cannot_work_is_refused_by_name(edits, name):
    edit, (code, message) = edits[name], REFUSED[name]
    assert edit.code == code, edit.err
    assert re.search(message, edit.err.strip().splitlines()[-1])
    assert "Traceback" not in edit.err
    assert edit.record is None
    assert "METRIC" not in edit.out


def test_a_lower_softcap_holds_in_the_score_too(edits):
    assert edits["softcap"].facts["largest_logit"] <= 3


def test_an_unused_module_is_named_once_and_found_unchanged(edits):
    out = edits["unused_linear"].out
    unused = [line for line in out.splitlines() if "blocks.0.unused.weight" in line]
    assert [line.split()[0] for line in unused] == ["unused", "unchanged"]


def test_parameters_that_a_rate_leaves_alone_are_named(edits):
    line = re.search("^unchanged .*", edits["a_rate_of_zero"].out, re.M)
    assert re.fullmatch(r"unchanged  .*: blocks.0.shift.taps, blocks.1.shift.taps", line[0])
    assert "unchanged" not in edits["gelu"].out


def test_tied_weights_are_one_parameter(edits):
    names = edits["tied_head"].facts["parameters"]
    assert "wte.weight" in names
    assert "lm_head.weight" not in names


def test_another_batch_is_trained_in_two_passes(edits):
    assert "8192 tokens = 1 ranks x 2 x 16 rows" in edits["another_batch"].out


def test_half_the_value_embeddings_are_left_out(edits):
    names = edits["half_the_value_embeddings"].facts["parameters"]
    assert [n for n in names if "value_embed" in n] == ["blocks.1.attention.value_embed.weight"]


def test_an_old_style_file_is_scored_and_marked(edits):
    edit = edits["old_style"]
    assert edit.code == 0, edit.err
    assert edit.record["val_bpb"] > 0
    assert "the clock of prepare.py was not used" in edit.record["marks"]
