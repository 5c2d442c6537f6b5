"""The BatchNorm running statistics that a step should leave, from a run of plain torch.

The unsplit model runs with its own statistics and momentum.  What each BatchNorm layer is given is
seen by a hook, and what it computes from that is computed beside it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(slots=True)
class _Seen:
    """A layer's statistics before the step, and (values per channel, mean, unbiased variance) of
    each of its calls.
    """

    mean: Tensor
    variance: Tensor
    num_batches: Tensor | None
    calls: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)


class ExpectedStatistics:
    """Watches layers whose statistics are to move once per mini-batch."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self._seen: dict[nn.Module, _Seen] = {}
        for norm in norms:
            buffers = {n: b.clone() for n, b in norm.named_buffers(recurse=False)}
            self._seen[norm] = _Seen(
                buffers["running_mean"],
                buffers["running_var"],
                buffers.get("num_batches_tracked"),
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the calls in training mode that are made inside."""
        handles = [
            norm.register_forward_pre_hook(self._note, with_kwargs=True) for norm in self._seen
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not norm.training:
            return
        x = (args[0] if args else kwargs["input"]).detach()
        seen = self._seen[norm]
        mean, variance = torch.zeros_like(seen.mean), torch.zeros_like(seen.variance)
        with torch.no_grad():  # momentum 1: nothing but what this call saw
            F.batch_norm(x, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)
        seen.calls.append((x.numel() // x.shape[1], mean, variance))

    def put(self) -> None:
        """Let the layers that were called have the statistics that the mini-batch should give."""
        with torch.no_grad():
            for norm, seen in self._seen.items():
                if seen.calls:
                    _put(norm, seen)


def _put(norm: Any, seen: _Seen) -> None:
    count = sum(n for n, _, _ in seen.calls)
    mean = torch.zeros_like(seen.mean, dtype=torch.float64)
    for n, of_call, _ in seen.calls:
        mean += n * of_call.double()
    mean /= count
    squares = torch.zeros_like(mean)
    for n, of_call, variance in seen.calls:
        squares += (n - 1) * variance.double() + n * (of_call.double() - mean) ** 2
    share = norm.momentum
    if seen.num_batches is not None:
        norm.num_batches_tracked.copy_(seen.num_batches + 1)
        share = 1.0 / int(norm.num_batches_tracked) if share is None else share
    norm.running_mean.copy_((1 - share) * seen.mean.double() + share * mean)
    norm.running_var.copy_(seen.variance)
    if count > 1:
        variance = squares / (count - 1)
        norm.running_var.copy_((1 - share) * seen.variance.double() + share * variance)
