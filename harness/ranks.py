"""One train.py on several GPUs: a process for each, found by the others through the environment.

torchrun does the same for a run by hand. It is not used here: when a rank fails it ends with exit
code 1 and a report of its own, whatever the rank's exit code and last words were.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from harness.common import UserError


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def rank_environments(environment: Mapping[str, str], ranks: int) -> list[Mapping[str, str]]:
    """The environment of each rank, with the variables that torch.distributed reads (env://)."""
    if ranks == 1:
        return [environment]
    shared = dict(environment)
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    # Without it each rank would start a thread for every core, and they would wait for each other.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def rank_logs(log: Path, run_dir: Path, ranks: int) -> list[Path]:
    """Where each rank's output goes: the first one's to run.log, the others' to run_dir."""
    return [log, *(run_dir / f"rank{rank}.log" for rank in range(1, ranks))]


def number_of_ranks(asked: int | None, settings: Mapping) -> int:
    """AUTORESEARCH_RANKS, or one per CUDA GPU that prepare.py saw, or 1.

    Raises:
        UserError: more ranks than GPUs.
    """
    gpus = settings.get("gpus") or 0
    if asked and gpus and asked > gpus:
        raise UserError(
            f"AUTORESEARCH_RANKS={asked}, but there are {gpus} GPUs. hint: at most one rank per GPU"
        )
    return asked or gpus or 1
