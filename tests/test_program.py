"""program.md: what the agent is told exists, and is not too much to read."""

import ast
import re

from helpers import ROOT

from harness.__main__ import make_parser

TEXT = (ROOT / "program.md").read_text()
LIMIT = 50_000  # characters before the first experiment


def test_every_command_that_it_names_exists():
    named = set(re.findall(r"bash autoresearch\.sh (\w+)", TEXT))
    parser = make_parser()
    known = next(action for action in parser._actions if action.dest == "command" or action.choices)
    assert named and named <= set(known.choices)


def test_what_it_tells_to_read_fits_into_fifty_thousand_characters():
    source = (ROOT / "prepare.py").read_text()
    tree = ast.parse(source)
    names = ("Profile", "make_dataloader", "Clock")
    parts = {node.name: node for node in tree.body if getattr(node, "name", "") in names}
    assert all(f"`{name}`" in TEXT for name in names) and parts.keys() == set(names)
    constants = source[source.index("class Profile") : source.index("class Settings")]
    read = [TEXT, (ROOT / "train.py").read_text(), constants]
    read += [ast.get_source_segment(source, parts[name]) for name in names[1:]]
    assert sum(map(len, read)) <= LIMIT


def test_it_does_not_send_the_agent_to_the_readme():
    assert "README" not in TEXT
