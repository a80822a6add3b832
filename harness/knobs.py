"""The knobs of train.py: constants at its top level, found and replaced without running it.

A knob is a name in capitals with a literal value. Where a block `if PROFILE == "tiny":` gives it
another value, that one counts for this profile.
"""

import ast
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from harness.common import UserError

CLOSE = 3  # names that are offered for a misspelt one
MAX_EXPONENT = 64
KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Knob:
    """A constant: its value for the present profile, and where that stands in the file."""

    name: str
    value: object
    node: ast.expr


def find_knobs(source: bytes, profile: str) -> dict[str, Knob]:
    """The knobs of a train.py that parses, by name."""
    found = {}
    for name, node in assignments(ast.parse(source).body, profile):
        try:
            found[name] = Knob(name, constant(node), node)
        except ValueError:
            found.pop(name, None)  # computed from something else
    return found


def assignments(statements: Iterable[ast.stmt], profile: str) -> Iterable[tuple[str, ast.expr]]:
    """(name, value) of each assignment to a name in capitals that this profile executes."""
    for statement in statements:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name) and target.id.isupper():
                    yield target.id, statement.value
        elif isinstance(statement, ast.If) and (wanted := profile_of(statement.test)):
            branch = statement.body if wanted == profile else statement.orelse
            yield from assignments(branch, profile)


def profile_of(test: ast.expr) -> str:
    """NAME of a condition `PROFILE == "NAME"`, "" for any other condition."""
    match test:
        case ast.Compare(ast.Name("PROFILE"), [ast.Eq()], [ast.Constant(str(name))]):
            return name
    return ""


def constant(node: ast.expr) -> object:
    """The value of a literal, of a product or a power of numbers, or of a tuple of those.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(constant(element) for element in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Pow)):
        left, right = constant(node.left), constant(node.right)
        if any(isinstance(value, (str, tuple)) for value in (left, right)):
            raise ValueError("not a number")
        if isinstance(node.op, ast.Mult):
            return left * right
        if abs(right) > MAX_EXPONENT:
            raise ValueError("the exponent is too large")
        return left**right
    value = ast.literal_eval(node)
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError("not a number, a text, True or False")
    return value


# ---- what a user asks for ----


def read_knob(word: str, knobs: dict[str, Knob]) -> tuple[Knob, list[str]]:
    """A knob and its wanted values as they shall stand in the file, from "NAME=VALUE,VALUE".

    Raises:
        UserError: there is no such knob, or a value is of another type than its present one.
    """
    name, separator, text = word.partition("=")
    if not separator or not text:
        raise UserError(f"{word!r} has no values. hint: MATRIX_LR=0.02,0.04")
    if name not in knobs:
        close = difflib.get_close_matches(name.upper(), knobs, CLOSE) or sorted(knobs)[:CLOSE]
        raise UserError(
            f"train.py has no knob {name}: no constant in capitals with a literal value. "
            f"hint: did you mean {' or '.join(close)}?"
        )
    knob = knobs[name]
    listing = f"({text},)"
    try:
        elements = ast.parse(listing, mode="eval").body.elts
    except (SyntaxError, ValueError):
        raise UserError(f"{word!r} does not parse. hint: {name}={as_text(knob)},...") from None
    segments = [ast.get_source_segment(listing, element) for element in elements]
    pairs = zip(elements, segments, strict=True)
    return knob, list(dict.fromkeys(value_text(knob, *pair) for pair in pairs))


def value_text(knob: Knob, node: ast.expr, segment: str) -> str:
    """A value as it shall stand in the file. Raises UserError unless it is of the knob's type."""
    try:
        value = constant(node)
    except (ValueError, ArithmeticError):
        value = segment if isinstance(knob.value, str) else None  # a text without quotes
    if value is None or not same_type(value, knob.value):
        raise UserError(
            f"{knob.name}={segment}: this is not {type_words(knob.value)}, as the present value "
            f"{as_text(knob)} is. hint: nothing was run"
        )
    if value == knob.value:
        return as_text(knob)  # the same file, however it is written
    if isinstance(value, str):
        return repr(value)
    if isinstance(knob.value, float) and isinstance(value, int):
        return repr(float(value))
    return segment


def as_text(knob: Knob) -> str:
    """The present value as the file has it, written in the usual way."""
    return ast.unparse(knob.node)


def same_type(value: object, present: object) -> bool:
    """Whether a value may stand in the place of the present one."""
    if isinstance(present, tuple):
        alike = isinstance(value, tuple) and len(value) == len(present)
        return alike and all(map(same_type, value, present))
    if isinstance(present, float) and type(value) in (int, float):
        return math.isfinite(value)
    return type(value) is type(present)


def type_words(value: object) -> str:
    """What a value of this type is called."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else KINDS[type(value)]


def with_values(source: bytes, changes: dict[Knob, str]) -> bytes:
    """The file with these values in the places of the present ones; all else stays as it is."""
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    for knob, text in sorted(changes.items(), key=position, reverse=True):
        node = knob.node
        if text == as_text(knob):
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        source = source[:begin] + text.encode() + source[end:]
    return source


def position(change: tuple[Knob, str]) -> tuple[int, int]:
    """Where a knob's value stands."""
    return change[0].node.lineno, change[0].node.col_offset
