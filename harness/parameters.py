"""Nothing is silently untrained: every parameter is initialized, optimized, used and changed."""

from collections.abc import Iterable

import torch
import torch.nn as nn

from harness.common import UserError


def names_of(model: nn.Module) -> dict[int, str]:
    """id of each parameter -> its name; a tied parameter has all its names: "a (= b)"."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {
        key: first + (f" (= {', '.join(others)})" if others else "")
        for key, (first, *others) in names.items()
    }


def shorten(names: Iterable[str], most: int = 8) -> str:
    """The names for a message, at most that many of them."""
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model on the meta device its memory, filled with NaN.

    Like Module.to_empty, except that tied parameters stay tied: to_empty makes two of one.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) not in made:
                empty = torch.empty_like(p, device=device)
                made[id(p)] = nn.Parameter(fill_nan(empty), requires_grad=p.requires_grad)
            setattr(module, name, made[id(p)])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, fill_nan(torch.empty_like(buffer, device=device)))


def fill_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, all NaN where its type has one, else zero."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()


def initialize(model: nn.Module, device: torch.device) -> None:
    """Memory and first values for a model that was built on the meta device.

    Raises:
        UserError: model.init_weights() forgets a parameter or buffer, or a part of one.
    """
    materialize(model, device)
    model.init_weights()
    names = names_of(model)
    forgotten = [names[id(p)] for p in model.parameters() if p.isnan().any()]
    forgotten += [n for n, b in model.named_buffers() if b.is_floating_point() and b.isnan().any()]
    if forgotten:
        raise UserError(
            f"no first value: {shorten(forgotten)}. hint: init_weights needs a line for each "
            "(a NaN in the formula looks the same)"
        )


def check_groups(model: nn.Module, groups: list[dict]) -> None:
    """Refuse an optimizer that forgets a parameter, or that has one twice.

    Raises:
        UserError: with the names of those parameters.
    """
    names = names_of(model)
    counts = dict.fromkeys(names, 0)
    foreign = 0
    for group in groups:
        for p in group["params"]:
            if id(p) in counts:
                counts[id(p)] += 1
            else:
                foreign += 1
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    missing = [names[key] for key, n in counts.items() if n == 0 and key in trained]
    double = [names[key] for key, n in counts.items() if n > 1]
    if missing:
        raise UserError(
            f"in no group of the optimizer: {shorten(missing)}. hint: add it to build_optimizer, "
            "or set requires_grad=False for what shall not be trained"
        )
    if double:
        raise UserError(f"in two groups of the optimizer: {shorten(double)}. hint: keep it in one")
    if foreign:
        raise UserError(f"{foreign} tensors in the optimizer are no parameters of the model")


def without_gradient(model: nn.Module) -> list[str]:
    """Names of the parameters that should have a gradient after a backward pass, and have none."""
    names = names_of(model)
    return [names[id(p)] for p in model.parameters() if p.requires_grad and p.grad is None]


@torch.no_grad()
def fingerprint(p: torch.Tensor) -> int:
    """A number that changes when a bit of the tensor does (by chance equal once in 2**32)."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
    return p.detach().contiguous().view(integers).sum(dtype=torch.int64).item()


def fingerprints(model: nn.Module) -> dict[str, int]:
    """What unchanged() needs to know of the model before training."""
    return {name: fingerprint(p) for name, p in model.named_parameters()}


def unchanged(model: nn.Module, before: dict[str, int]) -> list[str]:
    """Names of the parameters that have the same bits as before training."""
    names = names_of(model)
    same = []
    for name, p in model.named_parameters():
        if p.requires_grad and before.get(name) == fingerprint(p):
            same.append(names[id(p)])
    return same
