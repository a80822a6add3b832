"""The command line of `python prepare.py`: prepare the data, look at them, check the evaluator."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

import prepare
from harness.attention import fetch_fa3
from harness.common import UserError, write_atomic
from harness.fixed import fixed_hash
from harness.folder import folder_source
from harness.known_answers import known_answers
from harness.retrying import Limits
from harness.settings import choice_file
from harness.shards import prepare_data
from harness.sources import Source, climbmix_source, embedded_source, tinystories_source
from harness.statistics import report, show_stats
from prepare import DATASETS, Settings

CHECKOUT = Path(prepare.__file__).resolve().parent
MAX_VOCABULARY = 1 << 16  # token shards hold uint16


def open_source(settings: Settings, num_shards: int, limits: Limits | None = None) -> Source:
    """The source that the settings name."""
    if settings.data_path:
        return folder_source(settings.data_path, settings)
    if settings.data == "climbmix":
        return climbmix_source(settings, num_shards, limits)
    if settings.data == "tinystories":
        return tinystories_source(settings, limits)
    return embedded_source()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prepare.py", description="Prepare the data, look at them, or check the evaluator."
    )
    add = parser.add_argument
    names = ", ".join(DATASETS)
    add("--data", help=f"{names}, or the path of a folder or file; noted for this checkout")
    add("--num-shards", type=int, default=10, help="climbmix shards (default 10, -1 for all)")
    add("--allow-missing", action="store_true", help="go on without shards that the hub lacks")
    add("--verify", action="store_true", help="re-read every file and repair damage")
    add("--stats", action="store_true", help="show statistics worth checking before training")
    add("--check", action="store_true", help="score models whose result is known")
    add("--settings-file", type=Path, help="write the resolved settings to this file, as JSON")
    return parser.parse_args(arguments)


def check_vocabulary(settings: Settings) -> None:
    """Raises UserError for a vocabulary that token shards cannot hold."""
    if settings.vocab_size > MAX_VOCABULARY:
        raise UserError(
            f"profile '{settings.profile}' has vocab_size {settings.vocab_size}, but token shards "
            f"hold 16-bit numbers. hint: at most {MAX_VOCABULARY} in PROFILES of prepare.py"
        )


def run(
    arguments: Sequence[str] | None = None,
    make_settings: Callable[[str | None], Settings] = prepare.make_settings,
    open_source: Callable[[Settings, int], Source] = open_source,
    checkout: Path = CHECKOUT,
) -> int:
    """Do what the arguments say. Returns the exit code. The other parameters are for tests.

    Raises:
        UserError: bad settings, text that cannot be used, a hub that cannot be reached.
    """
    args = parse(arguments)
    settings = make_settings(args.data)
    check_vocabulary(settings)
    if args.check:
        return 0 if known_answers(settings) else 1
    if args.stats:
        show_stats(settings)
        return 0
    if settings.profile == "full":
        fetch_fa3(settings.root)
    source = open_source(settings, args.num_shards)
    manifest = prepare_data(settings, source, args.allow_missing, args.verify)
    if manifest["made"]:
        report(settings, manifest)
    data_id = manifest["data_id"]
    print(f"{settings.profile}-{settings.data} is prepared in {settings.cache}, data_id {data_id}")
    if args.data:
        remember(settings, checkout)
    if args.settings_file:
        write_settings(settings, data_id, args.settings_file)
    return 0


def remember(settings: Settings, checkout: Path) -> None:
    """Note the data set as this checkout's choice, unless the environment decides."""
    choice = data_choice(settings)
    if os.environ.get("AUTORESEARCH_DATA", choice) != choice:
        print(f"prepare.py: set AUTORESEARCH_DATA={choice} to train on it", file=sys.stderr)
        return
    path = choice_file(checkout)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, f"{choice}\n".encode())
    print(f"prepare.py: this checkout now trains on {choice} (noted in {path})", file=sys.stderr)


def data_choice(settings: Settings) -> str:
    """What AUTORESEARCH_DATA has to be for these settings."""
    return str(settings.data_path or settings.data)


def write_settings(settings: Settings, data_id: str, path: Path) -> None:
    """The resolved settings for the outer process, which does not import prepare.py."""
    device = prepare.get_device().type
    content = {
        "profile": settings.profile,
        "data": data_choice(settings),
        "data_id": data_id,
        "time_budget": settings.time_budget,
        "seed": settings.seed,
        "cache": str(settings.cache),
        "device": device,
        "gpus": torch.cuda.device_count() if device == "cuda" else 0,  # a rank each
        "eval_version": prepare.EVAL_VERSION,
        "fixed": fixed_hash(CHECKOUT),
    }
    write_atomic(path, json.dumps(content, indent=1).encode())


def main(*arguments, **replaced) -> NoReturn:
    """run(), printing errors without a traceback, and exit.

    The exit does not wait for threads that wait for the network.
    """
    code = 2
    try:
        code = run(*arguments, **replaced)
    except UserError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
    except OSError as error:  # disk full, no permission
        hint = "hint: free some space, or set AUTORESEARCH_CACHE to another folder"
        print(f"prepare.py: {error}. {hint}", file=sys.stderr)
    except KeyboardInterrupt:
        hint = "hint: run it again, it goes on from here"
        print(f"prepare.py: interrupted. {hint}", file=sys.stderr)
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
