"""Which attention function of train.py is used: the first that loads and passes a trial call."""

import torch

from harness.common import UserError


class FA3Kernel:
    """Flash Attention 3 (kernels-community/flash-attn3): loaded when it is first used."""

    def __getattr__(self, name: str):
        if name != "flash_attn_func":
            raise AttributeError(name)
        from kernels import get_kernel

        if torch.cuda.get_device_capability()[0] != 9:
            raise RuntimeError("no Hopper GPU")
        kernel = get_kernel("kernels-community/flash-attn3", version=1)
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
