"""Shared fixtures: one real tiny-embedded cache, prepared once a session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> dict:
    """The environment of subprocesses that see a prepared tiny-embedded cache (AUTORESEARCH_CACHE names its root)."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("AUTORESEARCH_")}
    env |= {"AUTORESEARCH_CACHE": str(tmp_path_factory.mktemp("cache")), "AUTORESEARCH_PROFILE": "tiny"}
    done = subprocess.run([sys.executable, "prepare.py"], cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return env
