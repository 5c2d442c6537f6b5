"""BatchNorm over micro-batches: GPipe's rule (Huang et al. 2019, section 2.2).

In training each micro-batch is normalised by its own statistics.  The running statistics, used in
evaluation, move once per mini-batch, by the moments pooled over all its micro-batches.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ConfigError

from .users_checkpoint import autograd_mode

Moments = tuple[int, Tensor, Tensor]
"""(values per channel, their mean, their unbiased variance): one call of one BatchNorm layer."""
MomentsByModule = dict[_BatchNorm, list[Moments]]


def batch_norms(modules: Iterable[nn.Module]) -> tuple[_BatchNorm, ...]:
    """Find the BatchNorm layers that track running statistics.

    Raises:
        ConfigError: one of them is a SyncBatchNorm, which pools over processes on its own.
    """
    found = {m: None for module in modules for m in module.modules() if isinstance(m, _BatchNorm)}
    for module in found:
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                "SyncBatchNorm normalises by statistics of all processes, which would make the "
                "result depend on the layout; use BatchNorm (micro-batch statistics, pooled once "
                "per mini-batch)"
            )
    return tuple(module for module in found if module.track_running_stats)


@contextmanager
def separate_statistics(
    modules: tuple[_BatchNorm, ...], into: MomentsByModule | None
) -> Iterator[set[_BatchNorm]]:
    """Let the given layers leave their running statistics alone, and note each call's moments.

    Inside, a layer's running statistics are stand-ins which its own kernel overwrites (momentum
    1), so the moments cost no pass over the data.  With `into` None they are dropped: a recompute
    counts nothing twice.

    Yields:
        The layers that ran inside a checkpoint of the user's own, and will run again in the
        backward.
    """
    in_checkpoint: set[_BatchNorm] = set()
    active = [m for m in modules if m.training and m.running_mean is not None]
    before = [(m._buffers.copy(), m.momentum) for m in active]
    handles = []
    note = None if into is None else _noting(into, in_checkpoint)
    try:
        for module in active:
            module.momentum = 1.0
            _put_stand_ins(module)
            if note is not None:
                handles.append(module.register_forward_hook(note, with_kwargs=True))
        yield in_checkpoint
    finally:
        for handle in handles:
            handle.remove()
        for module, (buffers, momentum) in zip(active, before, strict=True):
            module._buffers.update(buffers)
            module.momentum = momentum


def _put_stand_ins(module: _BatchNorm) -> None:
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        buffer = module._buffers[name]
        module._buffers[name] = None if buffer is None else torch.zeros_like(buffer)


def _noting(into: MomentsByModule, in_checkpoint: set[_BatchNorm]) -> Callable[..., None]:
    outside = autograd_mode()

    def note(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        assert isinstance(module, _BatchNorm)
        if not module.training:
            return
        if autograd_mode() != outside:
            in_checkpoint.add(module)
        x = args[0] if args else kwargs["input"]
        assert module.running_mean is not None
        assert module.running_var is not None
        into.setdefault(module, []).append(
            (x.numel() // x.shape[1], module.running_mean, module.running_var)
        )
        _put_stand_ins(module)

    return note


def commit_statistics(moments: MomentsByModule) -> None:
    """Move each layer's running statistics once, by the moments pooled over the mini-batch."""
    with torch.no_grad():
        for module, rows in moments.items():
            _commit(module, rows)


def _commit(module: _BatchNorm, rows: list[Moments]) -> None:
    running_mean, running_var = module.running_mean, module.running_var
    assert running_mean is not None
    assert running_var is not None
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:  # the cumulative average: every mini-batch weighs the same
            factor = 1.0 / float(module.num_batches_tracked)
    assert factor is not None
    count, mean, variance = pooled(rows)
    running_mean.copy_((1 - factor) * running_mean.double() + factor * mean)
    if count > 1:
        running_var.copy_((1 - factor) * running_var.double() + factor * variance)


def pooled(rows: list[Moments]) -> Moments:
    """Pool moments of several sets of values into those of their union (float64, in order)."""
    count = sum(n for n, _, _ in rows)
    mean = sum((n * m.double() for n, m, _ in rows), start=torch.zeros(())) / count
    squares = sum(
        ((n - 1) * v.double() + n * (m.double() - mean) ** 2 for n, m, v in rows),
        start=torch.zeros(()),
    )
    return count, mean, squares / max(count - 1, 1)
