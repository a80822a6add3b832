"""The compiler: where its results are kept, what a killed run leaves, and what happens without."""

import fcntl
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

from harness import compiler

CPU = torch.device("cpu")


@pytest.fixture
def library(tmp_path) -> Path:
    """A shared library in tmp_path / "compiled" / "ab", built by the C++ compiler."""
    folder = tmp_path / "compiled" / "ab"
    folder.mkdir(parents=True)
    path = folder / "kernel.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input="int answer() { return 42; }", text=True, check=True)
    return path


def test_a_library_cut_anywhere_is_truncated_and_a_whole_one_is_not(library):
    whole = library.read_bytes()
    assert not compiler.is_truncated(library)
    for size in [*range(0, len(whole), 997), 63, 64, len(whole) - 1]:
        library.write_bytes(whole[:size])
        assert compiler.is_truncated(library), size


def test_only_half_written_libraries_are_deleted(library, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    folder = tmp_path / "compiled"
    shutil.copy(library, library.with_name("whole.so"))
    library.with_name("other.so").write_text("no library, " * 10)
    library.write_bytes(library.read_bytes()[:-100])
    compiler.set_up_compiler(folder)
    assert sorted(path.name for path in folder.rglob("*.so")) == ["other.so", "whole.so"]
    assert "deleted 1 half-written files" in capsys.readouterr().err


def test_nothing_is_deleted_while_another_run_compiles(library, tmp_path):
    library.write_bytes(b"")
    folder = tmp_path / "compiled"
    with open(folder / "in-use.lock", "w") as other_run:
        fcntl.flock(other_run, fcntl.LOCK_SH)
        compiler.remove_truncated(folder)
        assert library.exists()
    compiler.remove_truncated(folder)  # but our own first call holds it now
    assert library.exists()


def test_a_path_with_a_space_reaches_the_compiler_without_one(tmp_path, monkeypatch):
    folder = tmp_path / "my cache" / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("CXX", raising=False)
    compiler.set_up_compiler(folder)
    link = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert " " not in str(link)
    (link / "x").write_text("kept")
    assert (folder / "x").read_text() == "kept"
    compiler.set_up_compiler(folder)  # a second run finds the same link
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(link)
    link.unlink()


def test_a_compiler_of_several_words_becomes_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("CXX", "env LABEL=1 echo")
    compiler.set_up_compiler(tmp_path)
    done = subprocess.run([os.environ["CXX"], "a b", "c"], capture_output=True, text=True)
    assert done.stdout == "a b c\n"


def test_no_compiler_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert compiler.why_not_compiled(CPU) == "no C++ compiler"


# ---- what the first kernel waits for ----


@pytest.mark.slow
def test_an_empty_kernel_is_compiled_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("CXX", raising=False)
    compiler.set_up_compiler(tmp_path)
    thread = compiler.prepare_kernels(CPU)
    thread.join()
    sources = [path for path in tmp_path.rglob("*.main.cpp") if "kernel" in path.read_text()]
    assert len(sources) == 1
    assert sources[0].with_suffix(".so").exists()


def test_a_failure_in_the_background_is_left_to_the_first_real_kernel(monkeypatch):
    calls, uncaught = [], []

    def fail(*arguments):
        calls.append(arguments)
        raise OSError("no compiler")

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", fail)
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    compiler.prepare_kernels(CPU).join()
    assert len(calls) == 1
    assert not uncaught
    assert compiler.prepare_kernels(torch.device("cuda")) is None


# ---- a step that cannot be compiled ----


@pytest.fixture
def facts():
    """Of a compiled run; afterwards torch compiles again."""
    yield {"compiled": True, "eager_reason": ""}
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def test_a_step_that_cannot_be_compiled_runs_uncompiled(facts, capsys):
    def broken_backend(graph, inputs):
        raise OSError("Python.h: no such file")

    compiled = torch.compile(lambda x: 2 * x + 1, backend=broken_backend)
    results = []
    step = compiler.compiled_or_eager(lambda: results.append(compiled(torch.ones(3))), facts)
    step()
    step()
    assert [result.tolist() for result in results] == [[3.0] * 3] * 2
    assert facts["compiled"] is False
    assert "Python.h" in facts["eager_reason"]
    assert capsys.readouterr().err.count("slow, because the model is not compiled") == 1


def test_an_error_of_the_model_itself_is_raised(facts, capsys):
    compiled = torch.compile(lambda x: x @ torch.ones(4, 4), backend="eager")
    step = compiler.compiled_or_eager(lambda: compiled(torch.ones(3, 3)), facts)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        step()
    assert raised.type is RuntimeError  # not one of the compiler's
    assert capsys.readouterr().err == ""


def test_a_lack_of_memory_is_not_taken_for_a_broken_compiler(facts):
    def step():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        compiler.compiled_or_eager(step, facts)()
    assert facts["compiled"] is True
