"""Replicas of a pipeline: gradients and BatchNorm moments summed over them.

Gradients travel in buckets of one type each.  A bucket's sum begins when the stage's last backward
has run, and is awaited where the step ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError
from penstock.mesh import Mesh

from .batch_norm import Moments, MomentsByModule, pooled

_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class _Bucket:
    parameters: list[Tensor]
    flat: Tensor
    has_gradient: Tensor
    works: list[Any]


class Replicas:
    """This process's stage and its twins in the other replicas."""

    def __init__(self, mesh: Mesh, *, pools_statistics: bool) -> None:
        self._mesh = mesh
        self.pools_statistics = pools_statistics
        self._group = mesh.group("replica")
        self._buckets: list[_Bucket] = []
        self._before: dict[Tensor, Tensor] = {}

    def start_equal(self, tensors: Sequence[Tensor]) -> None:
        """Give parameters and buffers the values they have in the first replica."""
        source = self._mesh.stage
        with torch.no_grad():
            for tensor in tensors:
                values = tensor.detach().contiguous()
                self._run(
                    partial(dist.broadcast, values, src=source, group=self._group),
                    "for the first replica's parameters and buffers",
                )
                tensor.copy_(values)

    def set_aside(self, parameters: Sequence[Tensor]) -> None:
        """Take away gradients of earlier steps, which are sums over all replicas already."""
        self._before = {p: p.grad for p in parameters if p.grad is not None}
        for parameter in self._before:
            parameter.grad = None

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Begin to sum the gradients.

        Raises:
            ConfigError: a gradient is sparse.
        """
        for bucket in _cut([p for p in parameters if p.requires_grad]):
            has_gradient = torch.tensor([p.grad is not None for p in bucket], dtype=torch.float32)
            has_gradient = has_gradient.to(bucket[0].device)
            flat = torch.cat([_flat_gradient(p) for p in bucket])
            works = [
                dist.all_reduce(tensor, group=self._group, async_op=True)
                for tensor in (flat, has_gradient)
            ]
            self._buckets.append(_Bucket(bucket, flat, has_gradient, works))

    def finish(self) -> None:
        """Wait for the sums, and put them where gradients belong; keeps no bucket."""
        buckets, self._buckets = self._buckets, []
        before, self._before = self._before, {}
        if buckets:
            self._run(
                lambda: [work.wait() for bucket in buckets for work in bucket.works],
                "for the gradients of the other replicas",
            )
        for bucket in buckets:
            _put_gradients(bucket)
        for parameter, gradient in before.items():
            now = parameter.grad
            parameter.grad = gradient if now is None else gradient.add_(now)

    def pool(self, moments: MomentsByModule) -> MomentsByModule:
        """Pool the moments of each BatchNorm layer over all replicas, in their order."""
        return {module: self._pool(pooled(rows)) for module, rows in moments.items()}

    def _pool(self, mine: Moments) -> list[Moments]:
        count, mean, variance = mine
        sent = torch.cat(
            [torch.tensor([float(count)], dtype=torch.float64), mean.cpu(), variance.cpu()]
        )
        rows = [torch.empty_like(sent) for _ in range(self._mesh.num_replicas)]
        self._run(
            lambda: dist.all_gather(rows, sent, group=self._group),
            "for the BatchNorm moments of the other replicas",
        )
        return [
            (int(row[0]), *(half.to(mean.device) for half in row[1:].split(mean.numel())))
            for row in rows
        ]

    def _run(self, job: Callable[[], Any], what: str) -> None:
        assert self._mesh.background is not None
        self._mesh.background.run(job, what)


def _cut(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut parameters into buckets of one type and device, the last ones first."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in reversed(parameters):
        bucket = kinds.setdefault((parameter.dtype, parameter.device), [])
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= _BUCKET_BYTES:
            yield kinds.pop((parameter.dtype, parameter.device))
    yield from kinds.values()


def _flat_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    if parameter.grad.layout is not torch.strided:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which replicas "
            "cannot add up; make the embedding with sparse=False, or use num_replicas=1"
        )
    return parameter.grad.reshape(-1)


def _put_gradients(bucket: _Bucket) -> None:
    parts = bucket.flat.split([p.numel() for p in bucket.parameters])
    for parameter, part, count in zip(
        bucket.parameters, parts, bucket.has_gradient.tolist(), strict=True
    ):
        if count and parameter.grad is not None:
            parameter.grad.copy_(part.view_as(parameter.grad))
        elif count:
            parameter.grad = part.view(parameter.shape).clone()
