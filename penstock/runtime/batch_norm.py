"""BatchNorm over micro-batches: GPipe's rule (Huang et al. 2019, section 2.2).

In training each micro-batch is normalised by its own statistics.  The running statistics, used in
evaluation, move once per mini-batch, by the moments pooled over all its micro-batches.

That holds for layers that run torch's own forward, which in training writes the running statistics
and does not read them.  A forward of the user's may do anything with them (batch renormalisation
reads them): it runs as any module does, and its statistics move with every micro-batch.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, StatisticsWarning
from penstock.model.capture.watch import original_class
from penstock.model.entries import version_of
from penstock.torch_private import AnyBatchNorm, buffers_of

from .random.streams import autograd_mode
from .run import Moments, MomentsByModule, Run
from .stage.guards import Context, LayersGuard, RerunGuard, same_bits
from .stage.tape import Tape

Pool = Callable[[MomentsByModule, Sequence[AnyBatchNorm]], MomentsByModule]
"""(moments, BatchNorm layers) -> the moments of all replicas."""

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norms(modules: Iterable[nn.Module]) -> tuple[AnyBatchNorm, ...]:
    """Return the BatchNorm layers whose running statistics move once per mini-batch.

    A ConfigError refuses SyncBatchNorm, which already pools over processes.
    """
    return tuple(module for module in _tracking(modules) if _runs_torchs_forward(module))


def warn_of_unpooled(modules: Iterable[nn.Module], *, over_replicas: bool) -> None:
    """Warn of BatchNorm layers whose running statistics move with every micro-batch.

    With `over_replicas` these cannot be pooled, as the user asked: a ConfigError.
    """
    # 1. Find layers with a forward of their own, and scripted ones, whose forward is unknown.
    modules = list(modules)
    unpooled: list[Any] = [m for m in _tracking(modules) if not _runs_torchs_forward(m)]
    for module in chain.from_iterable(module.modules() for module in modules):
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        if is_scripted and getattr(module, "original_name", "").startswith("BatchNorm"):
            unpooled.append(module)
    if not unpooled:
        return
    # 2. Raise if the user asked for pooling, else warn.
    kinds = {getattr(module, "original_name", type(module).__name__) for module in unpooled}
    reason = (
        f"{len(unpooled)} BatchNorm layers ({', '.join(sorted(kinds))}) are scripted or have a "
        "forward of their own, which may read their running statistics or move them in its own way"
    )
    if over_replicas:
        raise ConfigError(
            f"batch_norm_over_replicas=True, but {reason}, so they cannot be pooled. Use torch's "
            "nn.BatchNorm1d, 2d or 3d, or leave out batch_norm_over_replicas"
        )
    warnings.warn(
        f"{reason}; these move with every micro-batch, as where the unsplit model runs "
        "micro-batch after micro-batch, not once per mini-batch, and each replica has its own. To "
        "have them pooled, use torch's nn.BatchNorm1d, 2d or 3d and add the rest as a module "
        "after it",
        StatisticsWarning,
        stacklevel=4,
    )


def _tracking(modules: Iterable[nn.Module]) -> list[AnyBatchNorm]:
    norms = {
        m: None for module in modules for m in module.modules() if isinstance(m, AnyBatchNorm)
    }
    for module in norms:
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(
                "SyncBatchNorm normalises by statistics of all processes, which would make the "
                "result depend on the layout; use BatchNorm (micro-batch statistics, pooled once "
                "per mini-batch)"
            )
    return [module for module in norms if module.track_running_stats]


def _runs_torchs_forward(module: AnyBatchNorm) -> bool:
    """Tell whether a call runs torch's own forward, with a momentum that can be set."""
    kind: Any = original_class(module)
    attributes = vars(module)
    return (
        kind.forward is nn.BatchNorm1d.forward
        and kind.__call__ is nn.Module.__call__
        and "forward" not in attributes
        and "momentum" in attributes
    )


class Norms(LayersGuard, RerunGuard):
    """Moves running statistics once per mini-batch; `pool` adds the other replicas' moments."""

    def __init__(self, stage: int, modules: Sequence[nn.Module], pool: Pool | None) -> None:
        self._stage, self._modules, self._pool = stage, modules, pool
        self.layers = batch_norms(modules)
        self.are_pooled = pool is not None and bool(self.layers)

    def check_all_known(self) -> None:
        """Raise ConfigError if BatchNorm layers were added or removed since the stage was made."""
        if batch_norms(self._modules) != self.layers:
            raise ConfigError(
                f"stage {self._stage} was made with {len(self.layers)} BatchNorm layers, and "
                "others are there now, whose running statistics would move more than once per "
                "mini-batch; make the pipeline after the last change of the model's layers"
            )

    @contextmanager
    def around_forward(self, run: Run, tape: Tape) -> Iterator[None]:
        """Record the moments of each call."""
        with separate_statistics(self.layers, run.stages[self._stage].moments) as in_checkpoint:
            yield
        tape.reruns_in_backward |= bool(in_checkpoint)

    def around_recompute(self, run: Run, tape: Tape) -> Context:
        """Note nothing twice."""
        return separate_statistics(self.layers, into=None)

    def around_rerun(self, run: Run, tape: Tape) -> Context | None:
        """Note nothing twice if the user's own checkpoint runs layers again."""
        return separate_statistics(self.layers, into=None) if tape.may_rerun else None

    def commit(self, run: Run) -> None:
        """Move the running statistics by the moments of all micro-batches; free the moments."""
        here = run.stages[self._stage]
        moments, here.moments = here.moments, {}
        if self._pool is not None:
            moments = self._pool(moments, self.layers)
        with torch.no_grad():
            for module, rows in moments.items():
                _commit(module, rows)


@contextmanager
def separate_statistics(
    modules: tuple[AnyBatchNorm, ...], into: MomentsByModule | None
) -> Iterator[set[AnyBatchNorm]]:
    """Protect the running statistics of layers, and record the moments of each call.

        before a call   running_mean = zeros, momentum = 1
        the kernel      running_mean = mean of this micro-batch      no second pass over the data
        after a call    moments noted; the layer's own buffers and momentum put back

    With `into` None the moments are dropped: a recompute counts nothing twice.  A ConfigError
    refuses code that moves the running statistics without calling the layer.

    Yields:
        The layers that ran inside the user's own checkpoint; the backward will run them again.
    """
    in_checkpoint: set[AnyBatchNorm] = set()
    swaps = [
        _Swap(m, into, in_checkpoint)
        for m in modules
        if m.running_mean is not None and (m.training or torch.is_grad_enabled())
    ]
    # A layer is restored after an error too; only a forward that ended well is checked.
    try:
        yield in_checkpoint
    finally:
        for swap in swaps:
            swap.end()
    for swap in swaps:
        swap.check_untouched()


class _Swap:
    """Swaps the running statistics of one layer for stand-ins during each call."""

    def __init__(
        self, module: AnyBatchNorm, into: MomentsByModule | None, in_checkpoint: set[AnyBatchNorm]
    ) -> None:
        self._module, self._into, self._in_checkpoint = module, into, in_checkpoint
        self._outside = autograd_mode()
        self._own = {name: buffers_of(module)[name] for name in _STATISTICS}
        self._momentum = module.momentum
        self._seen = [  # with a copy on a CPU: its kernels change buffers without a new version
            (b, version_of(b), None if b.is_cuda else b.clone())
            for b in self._own.values()
            if b is not None
        ]
        self._handles = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after, prepend=True, with_kwargs=True),
        )

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._put_back()

    def check_untouched(self) -> None:
        """Raise ConfigError if the running statistics moved before the end of the mini-batch."""
        if any(
            version_of(buffer) != version or (copy is not None and not same_bits(buffer, copy))
            for buffer, version, copy in self._seen
        ):
            raise ConfigError(
                f"the running statistics of a {type(self._module).__name__} were changed in a "
                "forward, other than by a call of the layer (bn.forward(x), or "
                "F.batch_norm(x, bn.running_mean, bn.running_var, training=True), say); they move "
                "once per mini-batch, by what its calls saw. Call the layer itself: bn(x)"
            )

    def _put_back(self) -> None:
        buffers_of(self._module).update(self._own)
        self._module.momentum = self._momentum

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not module.training:
            self._put_back()  # a call that raised may have left stand-ins behind
            return
        buffers_of(module).update(
            {n: None if b is None else torch.zeros_like(b) for n, b in self._own.items()}
        )
        self._module.momentum = 1.0

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not module.training:
            return
        mean, variance = self._module.running_mean, self._module.running_var
        self._put_back()
        if self._into is None:
            return
        if autograd_mode() != self._outside:
            self._in_checkpoint.add(self._module)
        x = args[0] if args else kwargs["input"]
        assert mean is not None
        assert variance is not None
        self._into.setdefault(self._module, []).append((x.numel() // x.shape[1], mean, variance))


def _commit(module: AnyBatchNorm, rows: list[Moments]) -> None:
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
    """Pool moments of several sets of values into those of their union (float64).

    Few operators handle all rows: with one per row, pooling 32 micro-batches of a deep network
    took longer than two micro-batches.
    """
    # variance = (sum of squares within the sets + squares of the means' distances) / (count - 1)
    counts, means, variances = zip(*rows, strict=True)
    count = sum(counts)
    stacked = torch.stack(means).double()
    weights: Tensor | float = counts[0]
    if len(set(counts)) > 1:  # else no copy to a GPU, which no CUDA graph could capture
        weights = torch.tensor(counts, dtype=torch.float64)[:, None]
        weights = weights.to(stacked.device, non_blocking=True)
    mean = (weights * stacked).sum(0) / count
    squares = (weights - 1) * torch.stack(variances).double() + weights * (stacked - mean) ** 2
    return count, mean, squares.sum(0) / max(count - 1, 1)
