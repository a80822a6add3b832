"""The commands of autoresearch: `bash autoresearch.sh COMMAND` or `python -m harness COMMAND`."""

import argparse
import os
import sys
from pathlib import Path

from harness import attempt, detach, fixed, fleet_check, report, run, status, sweep
from harness.common import UserError, say
from harness.process import raise_on_signals

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION = """\
One experiment trains train.py for the time budget and prints METRIC lines:

    bash autoresearch.sh                  the same as the command `run`

METRIC lines go to stdout and only after exit code 0; all else goes to stderr. Exit codes:

    one experiment          0 scored, 1 crash, 2 refused settings or usage, 3 diverged,
                            4 out of memory, 5 void score, 124 timeout, 130 interrupted
    try, confirm, wait      0 kept or dropped, 1 failed, 2 not started, 3 the baseline fails,
                            75 still running, 130 interrupted
"""
ENVIRONMENT = """\
Environment: AUTORESEARCH_TIME_BUDGET (seconds), _PROFILE, _DATA, _CACHE, _SEED, see README.md;
_RANKS (processes that train together; default: one per NVIDIA GPU, else 1),
_HARD_LIMIT (seconds until a run is killed; default: twice the budget and 120),
_RUN_DIR (folder for the record of a run; default: .autoresearch/last),
_PYTHON (an interpreter to use as it is; nothing is set up then).
"""
# Each registers its commands.
MODULES = (run, attempt, sweep, detach, status, report, fleet_check, fixed)


def add_test_parser(commands) -> None:
    """Register the command `test`."""
    words = "run the quick tests, or with --all every test; other arguments go to pytest"
    # Without a prefix character argparse passes every argument on, also those that begin with "-".
    parser = commands.add_parser(
        "test", help=words, description=words, prefix_chars="\0", add_help=False
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(func=test)


def test(args: argparse.Namespace) -> int:
    """Become pytest, in the same environment; whole suites run on all cores."""
    command = [sys.executable, "-m", "pytest"]
    if "--all" not in args.arguments:
        say("the quick tests; 'bash autoresearch.sh test --all' runs all of them")
        command += ["-m", "not slow and not gpu"]
    others = [argument for argument in args.arguments if argument != "--all"]
    command += others or ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    os.chdir(args.root)
    os.execv(sys.executable, command)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="bash autoresearch.sh",
        description=DESCRIPTION,
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(root=ROOT, func=run.run_command)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in MODULES:
        module.add_parser(commands)
    add_test_parser(commands)
    return parser


def main() -> int:
    """Run one command; returns its exit code."""
    raise_on_signals()
    try:
        args = make_parser().parse_args()
        return args.func(args)
    except UserError as error:
        say(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        say(f"{error}. hint: if the disk is full, make room and repeat the command")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
