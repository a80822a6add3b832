"""Profile "full" from its data to its score, on a CPU: small model, few rows, all else real."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from test_devices import read_lines

import prepare
from harness.common import file_hash

pytestmark = pytest.mark.slow
ROW = 2049  # tokens of a row of this profile, with the last target
ROWS = 24


@pytest.fixture(scope="module")
def full(prepared, tmp_path_factory) -> dict:
    """The environment of a "full-embedded" cache: that of "tiny", with rows of the other length."""
    root = tmp_path_factory.mktemp("full")
    cache = root / "full-embedded"
    shutil.copytree(Path(prepared["AUTORESEARCH_CACHE"]) / "tiny-embedded", cache)
    manifest = prepare.load_manifest(cache)
    for path in cache.glob("*_rows.bin"):
        data = path.read_bytes()
        path.write_bytes(data[: min(ROWS, len(data) // (2 * ROW)) * 2 * ROW])
        manifest["files"][path.name] = [path.stat().st_size, file_hash(path)]
    manifest["data_id"] = prepare.data_id(manifest)
    (cache / "manifest.json").write_text(json.dumps(manifest))
    changes = {
        "AUTORESEARCH_CACHE": str(root),
        "AUTORESEARCH_PROFILE": "full",
        "AUTORESEARCH_DATA": "embedded",
        "AUTORESEARCH_TIME_BUDGET": "5",
        "OMP_NUM_THREADS": "1",
    }
    return prepared | changes


def test_the_full_profile_trains_and_is_scored(full, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/full_on_cpu.py")], cwd=tmp_path, capture_output=True,
        text=True, env=full | {"AUTORESEARCH_RUN_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "batch      8192 tokens = 1 ranks x 2 x 2 rows x 2048" in done.stdout
    assert "METRIC val_bpb=" in done.stdout
    record = read_lines(tmp_path / "eval.jsonl")[0]
    assert record["profile"] == "full"
    assert record["tokens"] <= ROWS * 2048
    assert 1 < record["val_bpb"] < 8
    assert record["marks"] == ""
    assert record["attention"] == "plain"
    assert record["compiled"] is False
    steps = read_lines(tmp_path / "steps.jsonl")
    assert steps[-1]["loss"] < steps[0]["loss"]
