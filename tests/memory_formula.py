"""What GPipe's paper says a stage must keep, computed from the model in plain torch.

Huang et al. 2019, section 2.3: O(N + L/K * N/M).  Written out for stage s:

    live(s) * input_bytes(s) + graphs(s) * activation_bytes(s)

    live(s)               most micro-batches between their forward and their backward on s
    input_bytes(s)        what one micro-batch brings to the stage: batch, boundary values, targets
    activation_bytes(s)   what autograd saves for a micro-batch beyond inputs, parameters, buffers
    graphs(s)             1 with recompute; live(s) without, since nothing is dropped

`live` is M for GPipe and min(M, K - s) for 1F1B.  Where micro-batches differ in size, each counts
with its own: the result is the most that is kept at any time of the schedule.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.runtime.microbatches import microbatch_sizes
from penstock.schedules.ir import Backward, Forward, Schedule
from penstock.types import Recompute

Loss = Callable[[Tensor, Tensor], Tensor]


def formula_bytes(
    stages: Sequence[nn.Sequential],
    batch: tuple[Tensor, Tensor],
    loss: Loss,
    schedule: Schedule,
    recompute: Recompute,
    *,
    only: Collection[int] | None = None,
) -> dict[int, int]:
    """Compute the formula's bytes for each stage, or for those in `only`.

    `batch` is (inputs, targets) of all micro-batches of the schedule.  Stages that are not asked
    for may be on the meta device.
    """
    sizes = microbatch_sizes(len(batch[1]), schedule.num_microbatches)
    value, targets = (part[: sizes[0]] for part in batch)
    result = {}
    for number, stage in enumerate(stages):
        last = number == len(stages) - 1
        if only is not None and number not in only:
            value = _shape_behind(stage, value)
            continue
        entering = _as_leaf(value, wants_grad=number > 0)
        activation_bytes, value = _run(stage, entering, (loss, targets) if last else None)
        input_bytes = _bytes(entering) + (_bytes(targets) if last else 0)
        kept_bytes, passing_bytes = input_bytes, activation_bytes
        if recompute is Recompute.NEVER:
            kept_bytes, passing_bytes = input_bytes + activation_bytes, 0
        weights = [size / sizes[0] for size in sizes]
        result[number] = round(
            most_kept(schedule, number, weights, kept=kept_bytes, passing=passing_bytes)
        )
    return result


def _as_leaf(value: Tensor, *, wants_grad: bool) -> Tensor:
    """Return what enters a stage; where only its shape is known, zeros."""
    value = torch.zeros_like(value, device="cpu") if value.is_meta else value.detach()
    return value.requires_grad_(wants_grad)


def _shape_behind(stage: nn.Sequential, value: Tensor) -> Tensor:
    """Return what leaves a stage, without its values."""
    with torch.no_grad():
        result: Tensor = copy.deepcopy(stage).to("meta")(value.to("meta"))
    return result


def cut(model: nn.Sequential, partition: Sequence[int]) -> Iterator[nn.Sequential]:
    """Yield the layers of each stage, under their names."""
    layers = list(model.named_children())
    for first, end in pairwise(accumulate(partition, initial=0)):
        yield nn.Sequential(OrderedDict(layers[first:end]))


def most_kept(
    schedule: Schedule, stage: int, weights: Sequence[float], *, kept: float, passing: float
) -> float:
    """Compute the most that `stage` keeps at any time.

    A micro-batch i adds `weights[i] * kept` from its forward to the end of its backward, and
    `weights[i] * passing` during its backward.
    """
    now = most = 0.0
    for _, instruction in schedule:
        match instruction:
            case Forward(s, i) if s == stage:
                now += weights[i] * kept
                most = max(most, now)
            case Backward(s, i) if s == stage:
                most = max(most, now + weights[i] * passing)
                now -= weights[i] * kept
    return most


def _run(
    stage: nn.Sequential, inputs: Tensor, objective: tuple[Loss, Tensor] | None
) -> tuple[int, Tensor]:
    """Run a copy of the stage; give the bytes that autograd saves, and the output."""
    twin = copy.deepcopy(stage)
    known = [inputs, *twin.parameters(), *twin.buffers(), *(objective[1:] if objective else ())]
    ignored = {_place(tensor) for tensor in known}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _place(tensor) not in ignored:
            saved[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.random.fork_rng(devices=[]), saved_tensors_hooks(pack, lambda tensor: tensor):
        output = twin(inputs)
        kept = objective[0](output, objective[1]) if objective else output
    del kept
    return sum(saved.values()), output.detach()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
