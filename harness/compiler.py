"""torch.compile: whether it works here, and the folder in which its results are kept."""

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from harness.common import is_out_of_memory, say, write_atomic


def path_without_spaces(folder: Path) -> Path:
    """The folder, or a link to it: torch puts paths into a compiler's command line as they are."""
    if not re.search(r"\s", str(folder)):
        return folder
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]
    link = Path(tempfile.gettempdir(), f"autoresearch-{os.getuid()}-{name}")
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another rank was faster
            link.symlink_to(folder.resolve(), target_is_directory=True)
    return link


ELF_HEADER = 64  # bytes


def is_truncated(library: Path) -> bool:
    """Whether a shared library (64-bit ELF) is shorter than its header says.

    The table of sections is the last part that a linker writes (ELF-64 Object File Format, 1998).
    """
    with open(library, "rb") as file:
        header = file.read(ELF_HEADER)
    if len(header) < ELF_HEADER:
        return True
    if header[:5] != b"\x7fELF\x02":
        return False
    (table,) = struct.unpack_from("<Q", header, 40)
    entry_size, entries = struct.unpack_from("<2H", header, 58)
    return library.stat().st_size < table + entry_size * entries


def remove_truncated(folder: Path) -> None:
    """Delete the libraries that a killed run left half written: loading one ends every later run.

    Nothing is deleted while another run uses the folder, because it may be writing there.
    """
    lock = os.open(folder / "in-use.lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        damaged = [path for path in folder.rglob("*.so") if is_truncated(path)]
        for path in damaged:
            path.unlink()
        if damaged:
            say(f"deleted {len(damaged)} half-written files from {folder}")
    except OSError:
        pass  # in use, or a file system without locks
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)  # until this process ends


def set_up_compiler(folder: Path) -> None:
    """Keep compiled code in that folder, so that a second run starts in seconds.

    CXX may hold several words, such as "ccache g++"; torch wants one, so it gets a script.
    """
    # Layers with other windows or value embeddings, training and evaluation, smaller batches when
    # memory runs out: each is compiled once. From the limit on (8) torch would stop compiling.
    torch._dynamo.config.recompile_limit = 64
    folder.mkdir(parents=True, exist_ok=True)
    folder = path_without_spaces(folder)
    # Set in any case: importing torch has already named a folder in /tmp
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    remove_truncated(folder)
    command = os.environ.get("CXX", "")
    if len(shlex.split(command)) > 1 and not shutil.which(command):
        name = hashlib.sha256(command.encode()).hexdigest()[:12]
        script = folder / f"cxx-{name}.sh"
        write_atomic(script, f'#!/bin/sh\nexec {command} "$@"\n'.encode())
        script.chmod(0o755)
        os.environ["CXX"] = str(script)


def why_not_compiled(device: torch.device) -> str:
    """Empty if torch.compile may work here, else why it cannot."""
    if device.type == "mps":
        return "not on MPS"
    compilers = (os.environ.get("CXX") or "g++", "clang++")
    if device.type == "cpu" and not any(map(shutil.which, compilers)):
        return "no C++ compiler"
    return ""


EMPTY_KERNEL = 'extern "C" void kernel(float* x) {}'


def prepare_kernels(device: torch.device) -> threading.Thread | None:
    """Begin, in the background, what the first kernel for a CPU would wait for.

    That is a test of the vector instructions and the header of all kernels: about ten seconds where
    nothing is cached, one or two later. Compiling an empty kernel needs both. If it fails, so will
    the first real kernel, and compiled_or_eager says why. The process ends after the thread: else
    the lock of the header would be gone while the compiler still writes it.
    """
    if device.type != "cpu":
        return None
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # takes a second

    def compile_empty() -> None:
        with contextlib.suppress(Exception):
            CppPythonBindingsCodeCache.load_pybinding(["float*"], EMPTY_KERNEL)

    thread = threading.Thread(target=compile_empty)
    thread.start()
    return thread


def compiled_or_eager(step: Callable[[], None], facts: dict) -> Callable[[], None]:
    """The same step; when it fails compiled, it and everything after it runs uncompiled.

    Much can be missing (Python's headers, a working compiler), and a model may hold what torch
    cannot compile. An error of the model itself is raised again by the uncompiled step.

    Args:
        facts: "compiled" and "eager_reason" are changed, see harness.device.run_facts.
    """

    def attempt() -> None:
        try:
            step()
        except Exception as error:
            if not facts["compiled"] or is_out_of_memory(error):
                raise
            torch.compiler.set_stance("force_eager")
            facts["compiled"] = False
            facts["eager_reason"] = in_one_line(error)
            step()
            say_slow(facts["eager_reason"])

    return attempt


def in_one_line(error: Exception) -> str:
    """Name and beginning of an error; the compiler's own begin with a line that says nothing."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:160]}"


def say_slow(reason: str) -> None:
    """Tell the user that training runs without the compiler."""
    print(f"train.py: slow, because the model is not compiled: {reason}", file=sys.stderr)
