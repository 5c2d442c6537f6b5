"""Sum gradients and BatchNorm moments over the replicas of a pipeline.

last backward of a stage   begin an all-reduce of each bucket (one dtype, one device)
end of the step            wait for it; then sum partial gradients over shards
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, sparse_gradient
from penstock.mesh.collectives import Begun, Collectives
from penstock.model.stage_plan import Step
from penstock.torch_private import AnyBatchNorm

from .batch_norm import pooled
from .gradient_hooks import SummedHooks
from .run import Moments, MomentsByModule
from .shards.at_rest import cut_into_buckets
from .shards.divided import Shards


@dataclass(frozen=True, slots=True)
class _Bucket:
    parameters: list[Tensor]
    flat: Tensor
    has_gradient: Tensor
    sums: list[Begun[Tensor]]


class Replicas:
    """Sums gradients of this process's stages over the replicas, and partial ones over shards.

    `partial` are, by axis of shards, the weights of whose gradients each shard has a part.
    """

    def __init__(self, group: Collectives, *, pools_statistics: bool) -> None:
        self._group = group
        self.partial: Sequence[tuple[Collectives, Sequence[Tensor]]] = ()
        self.pools_statistics = pools_statistics
        self._buckets: list[_Bucket] = []
        self._before: dict[Tensor, Tensor] = {}
        self.hooks = SummedHooks(())
        """The hooks that get the sums of the current step."""

    def start_equal(self, tensors: Sequence[Tensor], cut: Collection[Tensor]) -> None:
        """Copy parameters and buffers from the first replica; weights that are `cut` have them.

        Raises:
            ConfigError: torch cannot sum gradients of a parameter's dtype.
        """
        if self._group.size == 1:
            return
        _check_can_be_summed(tensors)
        whole = [tensor for tensor in tensors if tensor not in cut]
        self._group.copy_from_first(whole, "for the first replica's parameters and buffers")

    def set_aside(self, parameters: Sequence[Tensor]) -> None:
        """Set aside gradients of earlier steps, which are sums already, and remove hooks."""
        self.hooks.take()
        self._before = {p: p.grad for p in parameters if p.grad is not None}
        for parameter in self._before:
            parameter.grad = None

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Begin to sum the gradients over replicas.

        Raises:
            ConfigError: a gradient is sparse, or torch cannot sum its dtype.
        """
        if self._group.size > 1:
            self._buckets += _begun(self._group, parameters)

    def finish(self) -> None:
        """Wait for the sums, put them into `.grad`, and free the buckets."""
        buckets, self._buckets = self._buckets, []
        _finish(self._group, buckets, "for the gradients of the other replicas")
        for axis, weights in self.partial:
            _finish(axis, _begun(axis, weights), "for the gradients of the other shards")
        self.hooks.run_found()

    def finish_for_update(self) -> None:
        """Finish the sums for an update within a run; the first one includes earlier gradients."""
        self.finish()
        self.add_earlier()

    def add_earlier(self) -> None:
        """Add the gradients of earlier steps to `.grad`."""
        before, self._before = self._before, {}
        for parameter, gradient in before.items():
            now = parameter.grad
            parameter.grad = gradient if now is None else gradient.add_(now)
        self.hooks.run_added()

    def pool(self, moments: MomentsByModule, modules: Sequence[AnyBatchNorm]) -> MomentsByModule:
        """Pool each BatchNorm layer's moments over all replicas, in their order; all take part."""
        mine = [pooled(moments[m]) if m in moments else None for m in modules]
        sent = torch.cat([_as_row(m, of) for m, of in zip(modules, mine, strict=True)])
        rows = self._group.all_gather(sent, "for the BatchNorm moments of the other replicas")
        gathered: MomentsByModule = {}
        widths = [1 + 2 * module.num_features for module in modules]
        for row in rows:
            for module, part in zip(modules, row.split(widths), strict=True):
                if part[0] > 0:
                    assert module.running_mean is not None
                    here = part[1:].to(module.running_mean.device)
                    mean, variance = here.split(module.num_features)
                    gathered.setdefault(module, []).append((int(part[0]), mean, variance))
        return gathered


def refuse_sparse(steps: Iterable[Step], shards: Shards) -> None:
    """Refuse embeddings whose sparse gradients would need a sum over processes, or slices.

    Raises:
        ConfigError: names the layer.
    """
    summed = {weight for _, weights in shards.partial for weight in weights}
    modules = ((step.label, module) for step in steps for module in step.module.modules())
    for label, module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            weight, whole = module.weight, (module.num_embeddings, module.embedding_dim)
            meets = shards.has_replicas or weight in summed or weight in shards.cut
            if weight.requires_grad and meets:
                raise sparse_gradient(f"layer {label}", whole)


def _begun(group: Collectives, parameters: Sequence[Tensor]) -> list[_Bucket]:
    """Begin to sum gradients over a group; all its processes have them in the same order."""
    trained = [p for p in parameters if p.requires_grad]
    _check_can_be_summed(trained)
    begun = []
    for bucket in cut_into_buckets(trained):
        # A parameter without a gradient here may have one elsewhere: all send zeros and a flag.
        has_gradient = torch.tensor([p.grad is not None for p in bucket], dtype=torch.float32)
        has_gradient = has_gradient.to(bucket[0].device)
        flat = torch.cat([_flat_gradient(p) for p in bucket])
        sums = [group.begin_all_reduce(tensor) for tensor in (flat, has_gradient)]
        begun.append(_Bucket(bucket, flat, has_gradient, sums))
    return begun


def _finish(group: Collectives, buckets: Sequence[_Bucket], purpose: str) -> None:
    """Wait for sums, and put them into `.grad`."""
    group.finish([one for bucket in buckets for one in bucket.sums], purpose)
    for bucket in buckets:
        parts = bucket.flat.split([p.numel() for p in bucket.parameters])
        counts = bucket.has_gradient.tolist()
        for parameter, part, count in zip(bucket.parameters, parts, counts, strict=True):
            if count and parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter.grad))
            elif count:
                parameter.grad = part.view(parameter.shape).clone()


def _as_row(module: AnyBatchNorm, moments: Moments | None) -> Tensor:
    """Return count, means and variances in one row; zeros if the layer did not run."""
    if moments is None:
        return torch.zeros(1 + 2 * module.num_features, dtype=torch.float64)
    count, mean, variance = moments
    number = torch.tensor([float(count)], dtype=torch.float64)
    return torch.cat([number, mean.cpu(), variance.cpu()])


def _check_can_be_summed(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_floating_point() and tensor.element_size() < 2:
            raise ConfigError(
                f"a parameter of shape {tuple(tensor.shape)} is {tensor.dtype} and requires grad: "
                "torch cannot add gradients of that type, neither over replicas nor over "
                "micro-batches. Keep the parameter in bfloat16 or float32 and cast it in the "
                "forward, or freeze it (requires_grad_(False))"
            )


def _flat_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    if parameter.grad.layout is not torch.strided:
        raise sparse_gradient("a layer", tuple(parameter.shape))
    return parameter.grad.reshape(-1)
