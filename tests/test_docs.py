"""The documents name what exists."""

import re

import pytest
from helpers import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "program.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_layout_names_every_module_and_no_other():
    text = (ROOT / "docs/contributing.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+\.(?:py|html))`", row)}
    there = {path.name for path in (ROOT / "harness").iterdir() if path.suffix in (".py", ".html")}
    assert named - {"train.py", "prepare.py"} == there - {"__init__.py"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing
