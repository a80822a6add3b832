"""Which attention function of train.py is used: the first that loads and passes a trial call."""

import json
import sys
from pathlib import Path

import torch

import prepare
from harness.common import UserError, write_atomic

FA3_REPOSITORY = "kernels-community/flash-attn3"  # on the Hugging Face hub
FA3_VERSION = 1  # of its interface; the revision is chosen once, by fetch_fa3


def has_hopper_gpu() -> bool:
    """Flash Attention 3 runs on compute capability 9.x only: H100, H200, GH200."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def fa3_note(root: Path) -> Path:
    """The file that says which revision of Flash Attention 3 is used, and where it lies."""
    return root / "flash-attn3.json"


def fetch_fa3(root: Path) -> None:
    """Download Flash Attention 3 once, on a machine that can use it.

    From then on every run takes this revision, from the disk: whether the hub answers cannot
    change which attention a run has. Without it training goes on with torch's own.
    """
    note = fa3_note(root)
    if note.exists() or not has_hopper_gpu():
        return
    try:
        from kernels import install_kernel

        folder = install_kernel(FA3_REPOSITORY, version=FA3_VERSION).parent.parent
    except Exception as error:  # no network, no build for this torch: dozens of kinds
        text = str(error).strip().partition("\n")[0][:200]
        print(
            f"prepare.py: no Flash Attention 3 ({type(error).__name__}: {text}); training uses "
            "torch's own attention. hint: run prepare.py again with a network",
            file=sys.stderr,
        )
        return
    content = {"repository": FA3_REPOSITORY, "revision": folder.name, "path": str(folder)}
    write_atomic(note, json.dumps(content).encode())


class FA3Kernel:
    """Flash Attention 3 as prepare.py has fetched it: loaded when it is first used."""

    def __getattr__(self, name: str):
        if name != "flash_attn_func":
            raise AttributeError(name)
        if not has_hopper_gpu():
            raise RuntimeError("no Hopper GPU")
        note = fa3_note(prepare.settings().root)
        if not note.exists():
            raise RuntimeError("not downloaded. hint: run prepare.py with a network")
        from kernels import get_local_kernel

        kernel = get_local_kernel(Path(json.loads(note.read_text())["path"]))
        self.flash_attn_func = kernel.flash_attn_func
        return self.flash_attn_func


fa3_kernel = FA3Kernel()

# Which backends are tried, by device and type of the activations. The last ones run everywhere.
AUTO = {
    "cpu": ["plain", "sdpa"],  # compiled, at short contexts, plain is faster than torch's kernel
    "cuda, bfloat16": ["fa3", "flash", "sdpa", "plain"],
}
FALLBACKS = ["sdpa", "plain"]


def try_attention(attend, plain_attention, config, device: torch.device) -> None:
    """One real call, forward and backward, against plain_attention.

    A backend with another window would train another model without a word.

    Raises:
        ValueError: other numbers. Anything else: the backend does not run here.
    """
    heads = (config.n_head, config.n_kv_head, config.n_kv_head)
    head_dim = config.n_embd // config.n_head
    made = {"device": device, "dtype": config.dtype}
    qkv = [torch.randn(2, 96, n, head_dim, **made).requires_grad_() for n in heads]
    for window in (17, 96):
        results = []
        for function in (attend, plain_attention):
            y = function(*qkv, window)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), qkv)])
        for mine, plain in zip(*results, strict=True):
            if not (mine - plain).norm() <= 0.03 * plain.norm():
                raise ValueError("wrong numbers in a trial call")


def pick_attention(backends: dict, wanted: str, config, device: torch.device):
    """(function, name and why): the first backend for this device that passes its trial.

    backends: name -> attention function. wanted: a name, or "auto".

    Raises:
        UserError: none works.
    """
    kind = f"{device.type}, {str(config.dtype).removeprefix('torch.')}"
    names = [wanted, *FALLBACKS]
    reasons = ["set by ATTENTION"]
    if wanted == "auto":
        names = AUTO.get(kind, AUTO.get(device.type, FALLBACKS))
        reasons = [kind]
    for name in names:
        try:
            try_attention(backends[name], backends["plain"], config, device)
            return backends[name], f"{name} ({'; '.join(reasons)})"
        except Exception as error:  # whatever it is: the next backend computes the same
            text = str(error).strip().partition("\n")[0][:200]
            reasons.append(f"no {name}: {type(error).__name__}: {text}")
    raise UserError(f"no attention works here: {'; '.join(reasons)}")
