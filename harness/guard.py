"""What watches a run from inside its process: replaced functions, changed weights.

Evidence against accidents and easy cheats, not a sandbox: see docs/evaluator.md.
"""

import types
from pathlib import Path


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


def versions(model) -> list:
    """Where every parameter and buffer is stored and how often it was written to."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor.data_ptr(), tensor._version) for name, tensor in named]
