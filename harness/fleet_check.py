"""`fleet check`: may runs be started on the nodes of a Ray cluster?"""

import argparse

from harness.checks import present_session
from harness.fixed import check_fixed
from harness.fleet import ask_once
from harness.place import Place, add_cluster
from harness.workspace import Workspace

UNUSABLE = 2  # exit code when a node, or the whole cluster, cannot be used


def add_parser(commands) -> None:
    """Register the command `fleet check`."""
    words = "`fleet check`: may runs be started on the nodes of a Ray cluster? a line for each"
    parser = commands.add_parser("fleet", help=words, description=words)
    parser.add_argument("what", choices=("check",))
    parser.add_argument(
        "--timeout", type=float, default=1800, metavar="S",
        help="seconds for busy nodes and for first preparations of data (default 1800)",
    )  # fmt: skip
    add_cluster(parser, on="ray")
    parser.set_defaults(func=check_command)


def check_command(args: argparse.Namespace) -> int:
    """Check every node of the cluster; exit code 0 only if all that can run something would."""
    place = Place.of(vars(args))
    place.check()
    workspace = Workspace(args.root)
    check_fixed(workspace.root)
    session = present_session(workspace, workspace.rows())
    nodes = ask_once(workspace, place, "check", session, limit=args.timeout)["nodes"]
    for node in sorted(nodes, key=lambda node: node["name"]):
        word, text = verdict_on(node)
        print(f"{word:<5} {node['name']}: {text}")
    usable = [node for node in nodes if "line" in node]
    print(f"{len(usable)} of {len(nodes)} nodes can be used")
    wrong = [node for node in nodes if not {"line", "none"} & node.keys()]
    return UNUSABLE if wrong or not usable else 0


def verdict_on(node: dict) -> tuple[str, str]:
    """A word and the reason for the line of a node."""
    words = {"line": "ok", "none": "-", "busy": "busy", "unlike": "other", "broken": "FAIL"}
    key = next(name for name in words if name in node)
    return words[key], node[key]
