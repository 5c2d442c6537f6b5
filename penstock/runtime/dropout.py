"""Dropout modules that draw from the layer call's own generator, without a dispatch mode.

A dispatch mode costs Python at every operator of a layer.  Where all draws of a layer are those of
plain `nn.Dropout` modules inside it, only these are called otherwise: they make the noise from the
generator they are given, as torch's own dropout makes it from the default one.
"""

import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from .lent_generators import runs_and_draws
from .random_streams import KeyedRandomness

_lock = threading.Lock()
_users: dict[nn.Dropout, int] = {}
_current = threading.local()


def is_plain(module: nn.Module) -> bool:
    """Tell whether a module is torch's own dropout, with torch's own forward."""
    return type(module) is nn.Dropout and (
        "forward" not in vars(module) or module in _users  # put there by another thread's call
    )


def with_keyed_dropouts(
    modules: Iterable[nn.Module], stream: KeyedRandomness, function: Callable[[], Any]
) -> Any:
    """Run `function`, and let plain dropout modules that it calls draw from `stream`.

    Other threads may call them meanwhile, on another stage: each with a stream of its own.
    """
    outer = getattr(_current, "stream", None)
    _current.stream = stream
    replaced = [module for module in modules if _replace(module)]
    try:
        return function()
    finally:
        _current.stream = outer
        for module in replaced:
            _put_back(module)


def _replace(module: Any) -> bool:
    with _lock:
        if module not in _users:
            if not is_plain(module):
                return False
            module.__dict__["forward"] = partial(_forward, module)
        _users[module] = _users.get(module, 0) + 1
    return True


def _put_back(module: Any) -> None:
    with _lock:
        _users[module] -= 1
        if not _users[module]:
            del _users[module], module.__dict__["forward"]


def _forward(module: nn.Dropout, x: Tensor) -> Tensor:
    stream: KeyedRandomness | None = getattr(_current, "stream", None)
    if stream is None or not module.training or not 0 < module.p < 1:
        return nn.Dropout.forward(module, x)
    stream.note_checkpoint()
    if type(x) is not Tensor or x.device.type != "cpu" or not x.numel() or not _is_torchs(x.dtype):
        with stream:
            return nn.Dropout.forward(module, x)
    return dropout(x, module.p, stream.generator(x.device), inplace=module.inplace)


def dropout(x: Tensor, p: float, generator: Generator, *, inplace: bool = False) -> Tensor:
    """Compute torch's dropout on the CPU, with its noise from `generator`."""
    noise = torch.empty_like(x)
    noise.bernoulli_(1 - p, generator=generator).div_(1 - p)
    return x.mul_(noise) if inplace else x * noise


@cache
def _is_torchs(dtype: torch.dtype) -> bool:
    """Compare with torch's own, once for each type; other versions may make noise otherwise."""
    with torch.no_grad():
        x = torch.linspace(-2, 2, 57).to(dtype)
        cpu = torch.device("cpu")
        torchs, _ = runs_and_draws(3, partial(F.dropout, x, 0.3), cpu)
        return torch.equal(torchs, dropout(x, 0.3, Generator().manual_seed(3)))
