"""The unsplit model in plain torch: what a pipeline must equal bit by bit.  No Penstock code.

A model is its modules and a `forward(call, inputs)` that runs them: `call(l, *values)` runs layer
l on values.  Everything happens on the calling thread, micro-batch after micro-batch.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

Call = Callable[..., Any]
Forward = Callable[[Call, Any], Any]
Loss = Callable[[Any, Any], Tensor]
Weigh = Callable[[Sequence[Any], Sequence[int]], list[float]]


def chain(num_layers: int) -> Forward:
    """Give the forward of a plain chain: each layer reads what the one before it gave."""

    def forward(call: Call, value: Any) -> Any:
        for layer in range(num_layers):
            value = call(layer, value)
        return value

    return forward


def mean(targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Weigh each micro-batch by its share of the samples."""
    return [size / sum(sizes) for size in sizes]


def total(targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Weigh every micro-batch by 1, for losses that sum over samples."""
    return [1.0 for _ in sizes]


def shares_of(count: Callable[[Any], Any]) -> Weigh:
    """Weigh each micro-batch by its share of what `count` counts in its target."""

    def weigh(targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
        counts = [float(count(target)) for target in targets]
        return [number / sum(counts) for number in counts]

    return weigh


@dataclass(slots=True)
class Unsplit:
    """A model that is run as it is; `step` counts its training steps, for the random streams."""

    modules: Sequence[nn.Module]
    forward: Forward
    num_microbatches: int = 1
    weigh: Weigh = mean
    seed: int = 0
    step: int = field(default=0)

    def train_step(self, inputs: Any, targets: Any, loss: Loss) -> Tensor:
        """Add the mini-batch's gradients to `.grad`; give its loss."""
        pieces, sizes = split(inputs, self.num_microbatches)
        wanted, _ = split(targets, self.num_microbatches)
        losses: list[Tensor] = []
        with pooled_batch_norm(self.modules):
            for i, weight in enumerate(self.weigh(wanted, sizes)):
                weighted = loss(self.run(pieces[i], i), wanted[i]) * weight
                with torch.autocast("cpu", enabled=False):  # as torch advises
                    weighted.backward()
                losses.append(weighted.detach())
        self.step += 1
        whole = losses[0]
        for term in losses[1:]:
            whole = whole + term
        return whole

    def module_forward(self, inputs: Any) -> "Outstanding":
        """Run all micro-batches forward; the caller computes a whole-batch loss on the outputs."""
        pieces, _ = split(inputs, self.num_microbatches)
        for i in range(len(pieces)):  # a copy for each: one changed in place must not touch others
            pieces[i] = split(tree_map(_copy, inputs), self.num_microbatches)[0][i]
        with pooled_batch_norm(self.modules):
            outputs = [self.run(piece, i) for i, piece in enumerate(pieces)]
        self.step += 1
        leaves = [tree_map(_leaf, output) for output in outputs]
        return Outstanding(inputs, pieces, outputs, leaves)

    def module_step(self, inputs: Any, targets: Any, loss: Loss) -> "Outstanding":
        """Run forward, and backward from a loss over the whole batch's output."""
        outstanding = self.module_forward(inputs)
        loss(outstanding.output, targets).backward()
        outstanding.backward()
        return outstanding

    def evaluate(self, inputs: Any) -> Any:
        """Run all micro-batches in eval mode without gradients; give the gathered outputs."""
        modes = [(m, m.training) for module in self.modules for m in module.modules()]
        pieces, _ = split(inputs, self.num_microbatches)
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            outputs = [
                self.forward(lambda number, *v: self.modules[number](*v), piece)
                for piece in pieces
            ]
        for module, mode in modes:
            module.training = mode
        return gather(outputs)

    def run(self, piece: Any, microbatch: int) -> Any:
        """Run one micro-batch, each layer with random numbers of its own key."""

        def call(layer: int, *values: Any) -> Any:
            key = stream_key(self.seed, self.step, layer, microbatch)
            torch.default_generator.manual_seed(key)
            random.seed(key)
            numpy.random.seed([key % 2**32, key >> 32])
            return self.modules[layer](*values)

        return self.forward(call, piece)


def plain_step(model: nn.Module, batch: Any, loss: Loss, num_microbatches: int = 3) -> None:
    """Add up the gradients of equal micro-batches, as plain torch does."""
    for part, target in zip(*(t.chunk(num_microbatches) for t in batch), strict=True):
        found = loss(model(part), target)
        found.backward(torch.full_like(found, 1 / num_microbatches))


@dataclass(frozen=True, slots=True)
class Outstanding:
    """The micro-batches of one forward pass that still await their backward pass."""

    inputs: Any
    pieces: list[Any]
    outputs: list[Any]
    leaves: list[Any]

    @property
    def output(self) -> Any:
        """Give the whole batch's output; gradients that reach it stay in the leaves."""
        return gather(self.leaves)

    def backward(self) -> None:
        """Take the gradients in the leaves through each micro-batch, in ascending order."""
        for output, leaf in zip(self.outputs, self.leaves, strict=True):
            pairs = [
                (y, g.grad)
                for y, g in zip(_tensors(output), _tensors(leaf), strict=True)
                if g.grad is not None
            ]
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        for n, whole in enumerate(_tensors(self.inputs)):
            if whole.requires_grad:
                parts = [_tensors(piece)[n].grad for piece in self.pieces]
                gradient = torch.cat([part for part in parts if part is not None])
                whole.grad = gradient if whole.grad is None else whole.grad + gradient


def whole_batch_step(
    modules: Sequence[nn.Module], forward: Forward, batch: Any, loss: Loss
) -> Tensor:
    """Add the gradients of one loss over the whole (inputs, targets) batch; give that loss."""
    inputs, targets = batch
    result = loss(forward(lambda layer, *values: modules[layer](*values), inputs), targets)
    result.backward()
    return result.detach()


def stream_key(seed: int, step: int, layer: int, microbatch: int) -> int:
    """Give the seed of one layer call's random numbers."""
    digest = hashlib.blake2b(
        f"{seed}:train:{step}:{layer}:{microbatch}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


def split(value: Any, num_microbatches: int) -> tuple[list[Any], list[int]]:
    """Cut tensors along dimension 0, arrays and lists of plain values; give pieces and sizes."""
    leaves, structure = tree_flatten(value, is_leaf=is_list)
    sizes = [n for n in map(len, leaves[0].tensor_split(num_microbatches)) if n]
    ends = list(itertools.accumulate(sizes, initial=0))
    rows = [
        _cut(leaf, sizes)
        if isinstance(leaf, Tensor)
        else [leaf[a:b] for a, b in itertools.pairwise(ends)]
        if is_list(leaf)
        else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree_unflatten(list(row), structure) for row in zip(*rows, strict=True)], sizes


def gather(values: Sequence[Any]) -> Any:
    """Put the micro-batches' values together along dimension 0."""
    flat = [tree_flatten(value) for value in values]
    rows = zip(*(leaves for leaves, _ in flat), strict=True)
    whole = [torch.cat(row) if isinstance(row[0], Tensor) else row[0] for row in rows]
    return tree_unflatten(whole, flat[0][1])


@contextmanager
def pooled_batch_norm(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Move BatchNorm running statistics once for all micro-batches inside, by pooled moments."""
    norms = [m for module in modules for m in module.modules() if isinstance(m, _BatchNorm)]
    norms = [m for m in dict.fromkeys(norms) if m.training and m.track_running_stats]
    kept = [(m, m.momentum, dict(m.named_buffers())) for m in norms]
    moments: dict[nn.Module, list[tuple[int, Tensor, Tensor]]] = {m: [] for m in norms}

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        count = args[0].numel() // args[0].shape[1]
        running = dict(
            module.named_buffers()
        )  # momentum 1: these are the micro-batch's own moments
        moments[module].append((count, running["running_mean"], running["running_var"]))
        module.register_buffer("running_mean", running["running_mean"].clone())
        module.register_buffer("running_var", running["running_var"].clone())

    handles = [m.register_forward_hook(note) for m in norms]
    for module, _, before in kept:
        module.momentum = 1.0
        for name, buffer in before.items():
            module.register_buffer(name, buffer.clone())
    yield
    for handle in handles:
        handle.remove()
    for module, momentum, before in kept:
        module.momentum = momentum
        for name, buffer in before.items():
            module.register_buffer(name, buffer)
        _move_statistics(module, moments[module])


def _move_statistics(module: _BatchNorm, rows: list[tuple[int, Tensor, Tensor]]) -> None:
    if not rows:
        return
    running_mean, running_var, batches = (
        module.running_mean,
        module.running_var,
        module.num_batches_tracked,
    )
    assert running_mean is not None
    assert running_var is not None
    assert batches is not None
    count = sum(n for n, _, _ in rows)
    average = torch.zeros_like(running_mean, dtype=torch.float64)
    for n, micro_mean, _ in rows:
        average += n * micro_mean.double()
    average /= count
    squares = torch.zeros_like(average)
    for n, micro_mean, micro_var in rows:
        squares += (n - 1) * micro_var.double() + n * (micro_mean.double() - average) ** 2
    with torch.no_grad():
        batches += 1
        factor = 1.0 / batches.item() if module.momentum is None else module.momentum
        running_mean.copy_((1 - factor) * running_mean.double() + factor * average)
        running_var.copy_((1 - factor) * running_var.double() + factor * (squares / (count - 1)))


def is_list(value: Any) -> bool:
    """Tell whether a value holds one entry per sample, and is cut like a tensor."""
    if isinstance(value, list):
        return not any(isinstance(entry, Tensor) for entry in value)
    return isinstance(value, numpy.ndarray)


def _cut(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    parts = [part.detach() for part in tensor.split(list(sizes))]
    return [part.requires_grad_(tensor.requires_grad) for part in parts]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
