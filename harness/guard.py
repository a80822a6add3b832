"""What watches a run from inside its process: files read, functions replaced, weights changed.

Evidence against accidents and easy cheats, not a sandbox: docs/evaluator.md says what is not seen.
"""

import contextlib
import os
import re
import stat
import sys
import sysconfig
import time
import types
from pathlib import Path

import torch

# ---- files ----

ROW_FILES = ("val_rows.bin", "holdout_rows.bin", "preview_rows.bin")
TRAINING_DATA = re.compile(r"manifest\.json|tokenizer\.json|train_.*\.bin")
HELD_OUT = (*ROW_FILES, "held_out_hashes.bin")
SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")
SOURCES = (".py", ".toml", ".md", ".sh", ".cfg", ".ini", ".yaml", ".yml")
# Modules through which a program reads files or the network. Whoever calls them is the reader.
# All other libraries (torch's compiler, the import system, tiktoken) read for themselves.
READERS = (
    "_compression", "_pyio", "abc", "asyncio", "bz2", "codecs", "collections", "concurrent",
    "configparser", "contextlib", "copy", "csv", "dbm", "email", "fileinput", "functools",
    "genericpath", "glob", "gzip", "html", "http", "httpcore", "httpx", "huggingface_hub", "io",
    "itertools", "json", "lzma", "marshal", "mmap", "multiprocessing", "ntpath", "numpy", "os",
    "pathlib", "pickle", "pkgutil", "posixpath", "pyarrow", "queue", "random", "re", "requests",
    "safetensors", "shelve", "shutil", "socket", "ssl", "string", "tarfile", "tempfile",
    "threading", "tokenize", "tomllib", "tqdm", "typing", "urllib", "urllib3", "xml", "zipfile",
)  # fmt: skip
READER_MODULES = (
    "harness.checkpoint", "importlib.resources", "torch._utils", "torch.hub",
    "torch.serialization", "torch.storage", "torch.utils._contextlib", "torch.utils.data",
)  # fmt: skip
UNSEEN_READERS = ("pyarrow", "pandas", "datasets", "polars", "duckdb")  # they read in C++ or Rust
LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


class Watch:
    """Notes what a run reads that is not its own: files of other data, held-out rows, hosts.

    Python's audit events tell of every file that Python code opens, also through numpy, torch.load
    and mmap; not of those that C++ or Rust code or another process opens.
    """

    def __init__(self, cache: Path, repository: Path):
        self.cache = os.path.realpath(cache)
        self.caches = os.path.dirname(self.cache)
        self.repository = os.path.join(os.path.realpath(repository), "")
        self.fixed = (self.repository + "prepare.py", self.repository + "harness" + os.sep)
        self.since = time.time()
        self.evaluating = False  # while the evaluator itself reads
        self.held_out = {}  # names of held-out files that were read, as keys: in order, once each
        self.other = {}  # paths of other files, and hosts

    def is_read(self, path: str) -> None:
        """A regular file is about to be opened for reading."""
        try:
            path = os.path.realpath(path)
            status = os.stat(path)
        except (OSError, ValueError):
            return  # opening it fails as well
        if not stat.S_ISREG(status.st_mode) or path.startswith(SYSTEM):
            return
        folder, name = os.path.split(path)
        if name in HELD_OUT and os.path.dirname(folder) == self.caches:
            if not self.evaluating:
                self.held_out[name] = None
        elif (
            not (folder == self.cache and TRAINING_DATA.fullmatch(name))
            and not self._is_source(path)
            and status.st_ctime < self.since  # else it was written by this run
            and self._by_the_run()
        ):
            self.other[path] = None

    def is_connected(self, address) -> None:
        """A socket is about to be connected."""
        host = str(address[0]) if isinstance(address, tuple) and address else ""
        local = host in ("", "localhost", "::1") or host.startswith("127.")
        if not local and self._by_the_run():
            self.other[host] = None

    def _is_source(self, path: str) -> bool:
        """Whether this is source text of the repository, and not of what is installed in it."""
        if not path.startswith(self.repository) or path.startswith(LIBRARIES):
            return False
        inside = path[len(self.repository) :]
        hidden = inside.startswith(".") or os.sep + "." in inside
        return not hidden and path.endswith(SOURCES)

    def _by_the_run(self) -> bool:
        """Whether train.py itself reads, maybe through READERS; no library and no fixed code."""
        frame = sys._getframe().f_back.f_back.f_back  # the hook's caller; None if that is C code
        while frame is not None:
            module = str(frame.f_globals.get("__name__"))
            file = frame.f_code.co_filename
            if module.partition(".")[0] not in READERS and not module.startswith(READER_MODULES):
                return not file.startswith((*self.fixed, *LIBRARIES, "<frozen "))
            frame = frame.f_back
        return True  # a thread's work, READERS only


_watch: Watch | None = None
_hooked = False


def watch(cache: Path, repository: Path) -> None:
    """Begin to note what is read, in this process and for its whole life.

    cache: the folder of the run's own data; repository: the folder of prepare.py.
    """
    global _watch, _hooked
    _watch = Watch(cache, repository)
    if _hooked:
        return
    _hooked = True  # an audit hook can't be removed

    def hook(event: str, args: tuple, reads=(None, os.O_RDONLY, os.O_RDWR)) -> None:
        if event == "open":
            path, mode, flags = args
            if not isinstance(path, (str, bytes, os.PathLike)):
                return  # a file that is already open
            if mode is None:
                reads_it = (flags & os.O_ACCMODE) in reads
            else:
                reads_it = "r" in mode or "+" in mode and "w" not in mode
            if reads_it:
                _watch.is_read(os.fsdecode(path))
        elif event == "socket.connect":
            _watch.is_connected(args[1])

    sys.addaudithook(hook)


@contextlib.contextmanager
def evaluating():
    """Within this block the evaluator reads held-out rows."""
    if _watch is None:
        yield
        return
    _watch.evaluating = True
    try:
        yield
    finally:
        _watch.evaluating = False


def held_out_reads() -> list[str]:
    """Names of held-out files that were read outside evaluating()."""
    return list(_watch.held_out) if _watch else []


def other_reads(except_folder: Path | None = None) -> list[str]:
    """Paths and hosts that the run read and should not have, but for those below a folder."""
    found = list(_watch.other) if _watch else []
    if except_folder is not None:
        folder = os.path.join(os.path.realpath(except_folder), "")
        found = [path for path in found if not path.startswith(folder)]
    loaded = [name for name in UNSEEN_READERS if name in sys.modules]
    found += [f"through the module {name}, which reads unseen" for name in loaded]
    # Marks are one line, separated by semicolons.
    return [re.sub(r"[^\x20-\x3a\x3c-\x7e]", "?", path) for path in found]


# ---- functions ----


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    if (a.co_code, a.co_names, len(a.co_consts)) != (b.co_code, b.co_names, len(b.co_consts)):
        return False
    for x, y in zip(a.co_consts, b.co_consts, strict=True):
        both_code = isinstance(x, types.CodeType) and isinstance(y, types.CodeType)
        if not (_same_code(x, y) if both_code else repr(x) == repr(y)):
            return False
    return True


def _first_replaced(space: dict, code: types.CodeType) -> str | None:
    """The name of the first function in the code of a module or class that space lacks."""
    for inner in code.co_consts:
        if not isinstance(inner, types.CodeType) or inner.co_name[0] == "<":
            continue
        found = space.get(inner.co_name)
        if isinstance(found, type):
            if name := _first_replaced(vars(found), inner):
                return f"{inner.co_name}.{name}"
            continue
        for wrapper in ("__func__", "fget", "__wrapped__"):  # class method, property, decorator
            found = getattr(found, wrapper, found)
        if not isinstance(found, types.FunctionType) or not _same_code(found.__code__, inner):
            return inner.co_name
    return None


def replaced_functions(*modules: types.ModuleType) -> str | None:
    """The name of a function or method that is not the one of its module's file, or None."""
    for module in modules:
        path = Path(module.__file__)
        code = compile(path.read_bytes(), str(path), "exec")
        if name := _first_replaced(vars(module), code):
            return f"{path.stem}.{name}"
    return None


# ---- weights ----


def checksums(model: torch.nn.Module) -> list[int]:
    """A sum over the bits of each parameter and buffer: any update of the weights changes it."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for tensor in (*model.parameters(), *model.buffers()):
        values = tensor.detach().contiguous()
        if values.is_complex():
            values = torch.view_as_real(values)
        sums.append(values.view(integers[values.element_size()]).sum(dtype=torch.int64))
    return [int(value) for value in sums]


def model_state(model: torch.nn.Module) -> list:
    """Of every parameter and buffer: its place, how often it was written to, its checksum."""
    named = (*model.named_parameters(), *model.named_buffers())
    places = [(name, tensor.data_ptr(), tensor._version) for name, tensor in named]
    return [*places, *checksums(model)]
