"""Where a run trains: on this machine, on one of its GPUs, or on a Ray cluster."""

import argparse
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec

from harness.common import UserError
from harness.workspace import Workspace

OPTIONS = ("gpu", "on", "cpus")  # kept in a run's record
INSTALL = f"uv sync --extra fleet, or {sys.executable} -m pip install 'ray==2.60.0'"


@dataclass(frozen=True)
class Place:
    """The choice that a run was started with; the names are those of the options."""

    gpu: str | None = None  # CUDA_VISIBLE_DEVICES on this machine
    on: str | None = None  # "ray", or None for this machine
    cpus: int | None = None  # of a worker; None: a worker with a GPU

    @classmethod
    def of(cls, options: Mapping) -> "Place":
        """From a command's arguments or a run's record; older records lack some names."""
        return cls(**{field.name: options.get(field.name) for field in fields(cls)})

    @property
    def label(self) -> str | None:
        """What a session keeps of it: scores of two labels can't be compared; None: here."""
        many = "s" if self.cpus != 1 else ""
        return f"{self.on}, {self.cpus} CPU{many}" if self.on and self.cpus else self.on

    def check(self) -> None:
        """Raise UserError for options that contradict each other, or without the ray package."""
        if self.cpus is not None and not self.on:
            raise UserError("--cpus is for the workers of a cluster. hint: add --on ray")
        if self.cpus is not None and self.cpus < 1:
            raise UserError(f"--cpus {self.cpus}: a worker needs 1 or more")
        if self.on and self.gpu is not None:
            raise UserError(
                f"--gpu {self.gpu} is a GPU of this machine, --on ray leaves the choice to Ray. "
                "hint: drop one of them"
            )
        if self.on and not find_spec("ray"):
            raise UserError(f"--on ray needs the package ray, which is missing. hint: {INSTALL}")

    def hold(self, workspace: Workspace):
        """Hold the device for a command; on a cluster Ray gives one to each run."""
        return contextlib.nullcontext() if self.on else workspace.device(self.gpu)


def add_place(parser: argparse.ArgumentParser, many: bool = False) -> None:
    """The options --gpu, --on and --cpus of every command that trains; `many`: one run per GPU."""
    words = "the GPUs to run on, a run on each" if many else "the GPU to run on"
    name = "N,N" if many else "N"
    parser.add_argument("--gpu", metavar=name, help=f"{words} (CUDA_VISIBLE_DEVICES)")
    add_cluster(parser)


def add_cluster(parser: argparse.ArgumentParser, on: str | None = None) -> None:
    """The options --on and --cpus. `on` is the default of the first."""
    parser.add_argument(
        "--on", choices=("ray",), default=on,
        help="run on a Ray cluster: that of RAY_ADDRESS, else the one this machine belongs to",
    )  # fmt: skip
    parser.add_argument(
        "--cpus", type=int, metavar="N", help="with --on: workers of N CPUs, without a GPU"
    )
