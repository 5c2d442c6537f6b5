"""Profile a model as one device of each stage's mesh runs it, where a plan divides operators.

a mesh of 2    shard 0 ── measured here: its slices of weights and values
                  │ collectives: nothing is sent, but counted, and priced by the cluster's links
               shard 1    there is none: what would come from it has shard 0's values
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
)
from penstock.costs.counting.count import count_layers, record_graph
from penstock.costs.counting.layer_weights import MakeOptimizer, layer_weights
from penstock.costs.measuring.layer_run import LayerRun, run_alone, untouched, untouched_gradients
from penstock.costs.measuring.measure import THOROUGH, How, Objective, with_seconds
from penstock.costs.measuring.measure_bytes import measure_bytes
from penstock.costs.profile import Profile
from penstock.costs.records import AtSize, LayerKind
from penstock.errors import ConfigError
from penstock.mesh.collectives import Collectives, Shape
from penstock.model.capture.capture import resolve_layers
from penstock.model.entries import layout_on, mark_layout
from penstock.model.layer_list import Layer
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, unflatten
from penstock.model.stage_plan import Step
from penstock.planner.plan import Plan
from penstock.planner.plan_sharding import sharding_of
from penstock.runtime.planning import StageCalls
from penstock.runtime.profiling import CPU_CORE, divided_backward, of_samples
from penstock.runtime.shards.at_rest import keep_slices
from penstock.runtime.shards.divided import DividedLayer, called_whole
from penstock.runtime.unsplit import left_bytes
from penstock.sharding.layouts import S, as_on
from penstock.sharding.plan import Sharding


def profile_shards(  # noqa: PLR0913 - the front door: each a keyword with a default
    layers: "nn.Module | Sequence[nn.Module | Layer] | Layers",
    example_inputs: Any,
    plan: Plan,
    cluster: Cluster,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Any = None,
    optimizer: MakeOptimizer = torch.optim.AdamW,
) -> Profile:
    """Return what each layer costs the first device of its stage's mesh, measured on this CPU.

        profile = profile_shards(model, inputs, plan, cluster, loss=loss, targets=targets)
        timeline = penstock.simulate(profile, cluster, plan)

    Seconds are those of its part alone, with what the collectives take over the cluster's links;
    bytes are those of its slices.  The profile holds for this plan, and for micro-batches of its
    size.  The model is as it was afterwards.

    Args:
        layers: as `Pipeline` takes them, on the CPU.
        example_inputs: a batch, of at least a micro-batch.
        plan: with a `batch_size`.
        cluster: whose device r runs rank r.
        loss: (output, target) -> scalar tensor, to be part of the profile.
        targets: of the batch, for the loss.
        optimizer: makes the optimizer of a list of parameters, whose state is counted.

    Raises:
        ConfigError: the plan names no batch size, or cuts weights along replicas.
    """
    if plan.batch_size is None:
        raise ConfigError("the plan has no batch_size; give it the samples of a step")
    size = -(-plan.batch_size // (plan.num_microbatches * plan.placement.num_replicas))
    own = copy.deepcopy(resolve_layers(layers, example_inputs))
    inputs, target = of_samples(example_inputs, size), of_samples(targets, size)
    counted = count_layers(
        own,
        inputs,
        microbatch_size=size,
        loss=loss,
        targets=target,
        left=left_bytes,
        torch_type="cpu",
    )
    sharding = None
    if plan.placement.most_shards > 1:
        names = [step.path for step in own]
        sharding = sharding_of(plan, record_graph(own, inputs), names)
    if sharding is not None and sharding.gathers:
        raise ConfigError(
            f"sharding={plan.sharding!r} gathers weights once a step, which is not priced; use "
            "'zero3', which gathers them for each layer, or a plan that keeps what it divides"
        )
    calls = _ShardCalls(own, plan, sharding, cluster.between_processes())
    calls.note(own, inputs)
    found = _sized(counted, measure_bytes(own, inputs, left_bytes, call=calls))
    moved_s = calls.moved_s(own, inputs)
    threads = plan.threads_per_stage
    how = How(threads=threads, call=lambda _: calls, divide=divided_backward, repeats=THOROUGH)
    objective = None if loss is None else Objective(loss, target)
    found = with_seconds(found, own, inputs, how, objective)
    kinds = tuple(map(_with_moves, found.kinds, moved_s))
    return Profile(
        name=type(layers).__name__,
        layers=plan.layers,
        spans=own.spans,
        weights=tuple(
            replace(each, partial_bytes=calls.partial_bytes(n))
            for n, each in enumerate(layer_weights(own, optimizer))
        ),
        sizes=(replace(found, kinds=kinds),),
        measured_on=CPU_CORE,
        threads=threads,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Silent(Collectives):
    """An axis of which this is the first device, and the others are not there: what would be sent
    takes seconds over the cluster's links, and what comes has the values of what is here.
    """

    cluster: Cluster
    spent_s: list[float]

    def all_reduce(self, tensor: Tensor, what: str, by: Any = None) -> None:
        self.spent_s.append(all_reduce_s(self.cluster, self.ranks, tensor.nbytes))

    def all_gather(
        self, tensor: Tensor, what: str, shapes: Sequence[Shape] | None = None
    ) -> list[Tensor]:
        shapes = [tensor.shape] * self.size if shapes is None else shapes
        num_bytes = tensor.element_size() * sum(map(prod, shapes))
        self.spent_s.append(all_gather_s(self.cluster, self.ranks, num_bytes))
        return [_of_shape(tensor, shape) for shape in shapes]

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        num_bytes = sum(part.nbytes for part in parts)
        self.spent_s.append(reduce_scatter_s(self.cluster, self.ranks, num_bytes))
        return parts[self.rank]

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], what: str
    ) -> list[Tensor]:
        num_bytes = sum(part.nbytes for part in parts)
        self.spent_s.append(all_to_all_s(self.cluster, self.ranks, num_bytes))
        return [_of_shape(parts[0], shape) for shape in shapes]


def _of_shape(tensor: Tensor, shape: Shape) -> Tensor:
    return torch.zeros(*shape, dtype=tensor.dtype)


class _ShardCalls:
    """Calls layers as the first device of their stage's mesh does.

    The layouts of what each layer is given are noted in the first run, which passes tensors on as
    they are; later runs pass copies of them, without their layouts.
    """

    def __init__(
        self, layers: Layers, plan: Plan, sharding: Sharding | None, cluster: Cluster
    ) -> None:
        self._call = StageCalls(layers)
        places = plan.placement.cluster_places or range(plan.placement.num_ranks)
        self._given: dict[int, list[Any]] = {}
        ends = pairwise(accumulate(plan.partition, initial=0))
        self._stage_of = [n for n, run in enumerate(ends) for _ in range(*run)]
        self._spent_s: list[list[float]] = [[] for _ in plan.partition]
        self._axes = [
            tuple(
                _Silent(ranks=[places[rank] for rank in lines[0]], cluster=cluster, spent_s=own)
                for lines in plan.placement.shard_lines(stage)
            )
            for stage, own in enumerate(self._spent_s)
        ]
        self._divided: dict[int, DividedLayer] = {}
        self._calls: dict[int, Callable[..., Any]] = {}
        if sharding is None:
            return
        for step in layers:
            own, axes = sharding.layers[step.index], self._axes[self._stage_of[step.index]]
            if own.is_divided and prod(axis.size for axis in axes) > 1:
                layer = DividedLayer(step.index, step.module, own, axes, keeps=sharding.keeps)
                self._divided[step.index], self._calls[step.index] = layer, layer.call
            elif own.gives_slices:
                self._calls[step.index] = partial(called_whole, own.multiple)
        for layer in self._divided.values():
            keep_slices(layer.cut)

    def note(self, layers: Layers, inputs: Any) -> None:
        """Run all layers, and note in which layouts they are given what."""
        with untouched([step.module for step in layers]), torch.no_grad():
            layers.run(inputs, self)

    def __call__(self, step: Step, function: Any) -> Any:
        """Call one layer, or the loss, which all devices compute alike."""
        if step.index < len(self._stage_of):
            function = partial(self._run, step, function)
        return self._call(step, function)

    def _run(self, step: Step, function: "partial[Any]") -> Any:
        leaves, structure = flatten((function.args, function.keywords))
        layouts = self._given.setdefault(step.index, [layout_on(leaf) for leaf in leaves])
        axes = self._axes[self._stage_of[step.index]]
        entered = [_entered(*each, axes) for each in zip(leaves, layouts, strict=True)]
        args, kwargs = unflatten(structure, entered)
        again = partial(function.func, *args, **kwargs)
        call = self._calls.get(step.index)
        return again() if call is None else call(again, {})

    def moved_s(self, layers: Layers, inputs: Any) -> list[tuple[float, float]]:
        """Return the seconds of the collectives of each layer, in its forward and its backward."""
        found: list[tuple[float, float]] = []

        def perform(layer: LayerRun) -> Any:
            stage = self._stage_of[layer.step.index]
            self._spent_s[stage].clear()  # what was sent before is of no layer
            result = self(layer.step, layer.run)
            forward_s = sum(self._spent_s[stage])
            roots = [tensor for tensor in flatten(result)[0] if tensor.requires_grad]
            weights = [p for p in layer.step.module.parameters() if p.requires_grad]
            wanted = [*(entry.tensor for entry in layer.entries), *weights]
            if roots and wanted:
                seeds = [torch.ones_like(root) for root in roots]
                with untouched_gradients(weights):
                    torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
            found.append((forward_s, sum(self._spent_s[stage]) - forward_s))
            return result

        with untouched([step.module for step in layers]):
            run_alone(layers, inputs, perform)
        return found

    def partial_bytes(self, number: int) -> int:
        """Return the bytes of gradients of a layer of which each shard has a part."""
        layer = self._divided.get(number)
        return sum(w.nbytes for own in layer.partial for w in own) if layer else 0


def _entered(leaf: Any, layout: Any, axes: Sequence[_Silent]) -> Any:
    """Return what a layer is given as the first device of its mesh has it: slices stay slices, and
    those of a mesh of another shape become its own.
    """
    if layout is None:
        return leaf
    shape = [axis.size for axis in axes]
    own = as_on(layout, shape, 0)
    state = own[-1]
    if own != layout and isinstance(state, S):
        rows = state.sizes[0]
        leaf = torch.cat([leaf] * -(-rows // len(leaf)))[:rows].clone()
    if prod(shape) > 1:
        mark_layout(leaf, own)
    return leaf


def _sized(counted: AtSize, kept: AtSize) -> AtSize:
    """Return what one device keeps, with the loss of the whole model."""
    return replace(
        kept,
        microbatch_size=counted.microbatch_size,
        loss=counted.loss,
        loss_saved=counted.loss_saved,
        target_bytes=counted.target_bytes,
    )


def _with_moves(kind: LayerKind, moved_s: tuple[float, float]) -> LayerKind:
    own, (forward_s, backward_s) = kind.seconds, moved_s
    assert own is not None, "it was measured"
    forwards = {"forward_s": own.forward_s + forward_s, "recompute_s": own.recompute_s + forward_s}
    backwards = {"backward_s": own.backward_s + backward_s, "input_s": own.input_s + backward_s}
    seconds = replace(own, **forwards, **backwards)  # type: ignore[arg-type]  # by name
    return replace(kind, seconds=seconds)
