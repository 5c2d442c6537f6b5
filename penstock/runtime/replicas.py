"""Sum gradients over replicas and shards, and BatchNorm moments over replicas.

last backward of a stage   begin an all-reduce of each bucket (one dtype, one device) once its last
                           gradient is there, in one order on all processes that sum it
end of that backward       begin the rest, and tell which buckets changed after their sum began
end of the step            wait; sum changed buckets again; then sum along further axes

Gradients are summed over replicas first, then along each axis of shards along which they are
parts of a sum: along the first of these beside the backward, and along others at the step's end.

    backward   ── layer 9 ── layer 8 ── layer 7 ── layer 6 ──
    sums                  └─ bucket 0 ──►    └─ bucket 1 ──►
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, sparse_gradient
from penstock.mesh.collectives import Begun, Collectives
from penstock.model.entries import version_of
from penstock.model.stage_plan import Step
from penstock.torch_private import AnyBatchNorm

from .batch_norm import pooled
from .gradient_hooks import SummedHooks
from .run import Moments, MomentsByModule
from .shards.at_rest import cut_into_buckets
from .shards.divided import Shards


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are summed at once, and their gradients side by side.

    `summed` are the gradients whose sum was begun, and their versions.  Flags follow: 1 for each
    parameter that has a gradient here, and a last 1 if one has changed since.
    """

    parameters: list[Tensor]
    group: Collectives
    summed: list[tuple[Tensor | None, int]] = field(default_factory=list)
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    sums: list[Begun[Tensor]] = field(default_factory=list)

    def begin(self) -> None:
        """Begin to sum the gradients that are here now; zeros stand for those that are not."""
        gradients = [p.grad for p in self.parameters]
        self.summed = [(g, 0 if g is None else version_of(g)) for g in gradients]
        self.flat = torch.cat([_flat_gradient(p) for p in self.parameters])
        self.sums = [self.group.begin_all_reduce(self.flat)]

    def tell(self) -> None:
        """Begin to sum the flags; no gradient changes any more."""
        has_changed = any(
            p.grad is not before or (before is not None and version_of(before) != version)
            for p, (before, version) in zip(self.parameters, self.summed, strict=True)
        )
        self.summed = []
        flags = [*(p.grad is not None for p in self.parameters), has_changed]
        told = torch.tensor(flags, dtype=torch.float32)  # on the CPU, which reads their sum
        self.sums.append(self.group.begin_all_reduce(told))

    def put(self, counts: Sequence[float], purpose: str) -> None:
        """Put the sums into `.grad`, given the summed flags."""
        *counts, num_changed = counts
        if num_changed:  # on any replica: all know, and sum once more
            self.flat = torch.cat([_flat_gradient(p) for p in self.parameters])
            self.group.all_reduce(self.flat, purpose)
        parts = self.flat.split([p.numel() for p in self.parameters])
        for parameter, part, count in zip(self.parameters, parts, counts, strict=True):
            if count and parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter.grad))
            elif count:
                parameter.grad = part.view(parameter.shape).clone()


class _InBackward:
    """Begins to sum buckets of gradients during a backward, each when its last gradient is there.

    All replicas begin their buckets in the same order.  So a bucket waits for those before it, and
    a parameter that gets no gradient holds up its bucket and the later ones until `end`.
    """

    def __init__(self, buckets: list[_Bucket]) -> None:
        self._buckets, self._num_begun = buckets, 0
        self._waiting = [set(bucket.parameters) for bucket in buckets]
        self._number_of = {p: n for n, bucket in enumerate(buckets) for p in bucket.parameters}
        self._hooks = [p.register_post_accumulate_grad_hook(self._add) for p in self._number_of]

    def _add(self, parameter: Tensor) -> None:
        self._waiting[self._number_of[parameter]].discard(parameter)
        while self._num_begun < len(self._buckets) and not self._waiting[self._num_begun]:
            self._buckets[self._num_begun].begin()
            self._num_begun += 1

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def end(self) -> list[_Bucket]:
        """Begin the rest after the backward, and tell what has changed; return all buckets."""
        self.leave()
        for bucket in self._buckets[self._num_begun :]:
            bucket.begin()
        for bucket in self._buckets:
            bucket.tell()
        return self._buckets


class Replicas:
    """Sums gradients of this process's stages over the replicas, and partial ones over shards.

    `partial` are, by axis of shards, the weights of whose gradients each shard has a part.
    """

    def __init__(self, group: Collectives, *, pools_statistics: bool) -> None:
        self._group = group
        self.partial: Sequence[tuple[Collectives, Sequence[Tensor]]] = ()
        self.pools_statistics = pools_statistics
        self._buckets: list[_Bucket] = []
        self._in_backward: list[_InBackward] = []
        self._before: dict[Tensor, Tensor] = {}
        self.hooks = SummedHooks(())
        """The hooks that get the sums of the current step."""

    def start_equal(self, tensors: Sequence[Tensor], cut: Collection[Tensor]) -> None:
        """Copy the first replica's values, except `cut` ones; ConfigError if torch cannot sum."""
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
        """Sum gradients as the backward makes them; ConfigError for a dtype torch cannot sum."""
        self._in_backward += [
            _InBackward(_buckets(group, summed)) for group, summed in self._first_sums(parameters)
        ]

    def _first_sums(
        self, parameters: Sequence[Tensor]
    ) -> Iterator[tuple[Collectives, Sequence[Tensor]]]:
        """Yield the parameters that are summed over replicas, or else along an axis of shards."""
        if self._group.size > 1:
            yield self._group, parameters
            return
        left = set(parameters)
        for axis, weights in self.partial:
            if first := [weight for weight in weights if weight in left]:
                yield axis, first
                left.difference_update(first)

    def end_backward(self) -> None:
        """Begin the sums that the backward has not begun; ConfigError if a gradient is sparse."""
        ended, self._in_backward = self._in_backward, []
        for sums in ended:
            self._buckets += sums.end()

    def give_up(self) -> None:
        """Leave no hook behind after a step that failed."""
        for sums in self._in_backward:
            sums.leave()
        self._in_backward, self._buckets = [], []

    def finish(self) -> None:
        """Wait for the sums, put them into `.grad`, and free the buckets."""
        buckets, self._buckets = self._buckets, []
        begun: dict[Collectives, list[_Bucket]] = {self._group: []}
        for bucket in buckets:
            begun.setdefault(bucket.group, []).append(bucket)
        _finish(self._group, begun.pop(self._group), "for the gradients of the other replicas")
        for axis, weights in self.partial:
            of_axis = begun.pop(axis, [])
            summed = {weight for bucket in of_axis for weight in bucket.parameters}
            for bucket in _buckets(axis, [own for own in weights if own not in summed]):
                bucket.begin()
                bucket.tell()
                of_axis.append(bucket)
            _finish(axis, of_axis, "for the gradients of the other shards")
        self.hooks.run_found()

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
    """Raise ConfigError for embeddings whose sparse gradients would need a sum, or slices."""
    summed = {weight for _, weights in shards.partial for weight in weights}
    modules = ((step.label, module) for step in steps for module in step.module.modules())
    for label, module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            weight, whole = module.weight, (module.num_embeddings, module.embedding_dim)
            meets = shards.has_replicas or weight in summed or weight in shards.cut
            if weight.requires_grad and meets:
                raise sparse_gradient(f"layer {label}", whole)


def _buckets(group: Collectives, parameters: Sequence[Tensor]) -> list[_Bucket]:
    """Deal the parameters out into buckets, on all processes of a group alike."""
    trained = [p for p in parameters if p.requires_grad]
    _check_can_be_summed(trained)
    return [_Bucket(bucket, group) for bucket in cut_into_buckets(trained)]


def _finish(group: Collectives, buckets: Sequence[_Bucket], purpose: str) -> None:
    summed = group.finish([one for bucket in buckets for one in bucket.sums], purpose)
    for bucket, counts in zip(buckets, summed[1::2], strict=True):
        bucket.put(counts.tolist(), purpose)


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
        return torch.zeros(parameter.numel(), dtype=parameter.grad_dtype, device=parameter.device)
    if parameter.grad.layout is not torch.strided:
        raise sparse_gradient("a layer", tuple(parameter.shape))
    return parameter.grad.reshape(-1)
