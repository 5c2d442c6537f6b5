"""Say which of a layer's gradients a backward in two parts cannot leave to the second, and why;
and how much memory those need that it can.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from penstock.torch_private import has_tensor_hooks, results_of, storage_id

from .split_backward import CHECKPOINT, arrivals_of, leaves_and_cuts, settle


def why_unsplit(module: nn.Module, results: Sequence[Tensor]) -> str | None:
    """Look at the graph of what a layer gave, and tell why gradients of its weights would be
    computed with all others; None where they can wait.

    Biases and the scales of norms never wait, for their gradients are but sums.
    """
    arrivals = arrivals_of([get_gradient_edge(t).node for t in results if t.requires_grad])
    if any(node.name() == CHECKPOINT for node in arrivals):
        return "a checkpoint with use_reentrant=True runs a backward of its own"
    leaves, cuts = leaves_and_cuts(arrivals)
    apart = settle(cuts, arrivals, set())
    names = {id(p): name for name, p in module.named_parameters()}
    now = [leaf for leaf in leaves if leaf not in apart]
    for leaf in now:
        if id(leaf.variable) in names and has_tensor_hooks(leaf.variable):
            name = names[id(leaf.variable)]
            return f"{name} has a hook on its gradient, and is no weight that can wait"
    weights = [leaf for leaf in leaves if id(leaf.variable) in names and leaf.variable.dim() > 1]
    unsplit = [leaf for leaf in weights if leaf not in apart]
    if not unsplit:
        return None
    share = _num_elements(unsplit) / _num_elements(weights)
    return f"{share:.0%} of its weights: {_reason(unsplit, arrivals)}"


def left_bytes(module: nn.Module, results: Sequence[Tensor]) -> int:
    """Count from the graph of what a layer gave what the first part of its backward leaves, at
    most: what operators have read, gradients of their results, and those of all other weights.
    """
    arrivals = arrivals_of([get_gradient_edge(t).node for t in results if t.requires_grad])
    leaves, cuts = leaves_and_cuts(arrivals)
    own = {id(parameter) for parameter in module.parameters()}
    inputs = {leaf for leaf in leaves if id(leaf.variable) not in own}
    apart = settle(cuts, arrivals, inputs)
    lasting = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    reads = [tensor for cut in cuts.values() for tensor, _ in cut.reads]
    kept = {storage_id(t): t.untyped_storage().nbytes() for t in reads}
    of_reads = sum(kept[storage] for storage in kept.keys() - lasting)
    of_results: int = sum(
        prod(r.shape) * r.dtype.itemsize for node in cuts for r in results_of(node)[:1]
    )
    late = {*apart, *inputs}
    now: list[Tensor] = [leaf.variable for leaf in leaves if leaf not in late]
    return of_reads + of_results + sum(p.numel() * p.element_size() for p in now)


def _num_elements(leaves: Sequence[Any]) -> int:
    return sum(leaf.variable.numel() for leaf in leaves)


def _reason(unsplit: Sequence[Any], arrivals: Mapping[Node, int]) -> str:
    """Tell why the gradient of the largest of some weights cannot wait."""
    largest = max(unsplit, key=lambda leaf: leaf.variable.numel())
    if arrivals[largest] > 2:
        return f"one is used {arrivals[largest]} times"
    users = {
        node.name().removesuffix("0").removesuffix("Backward")
        for node in arrivals
        if any(after is largest for after, _ in node.next_functions)
    }
    return f"{' and '.join(sorted(users))} cannot be cut"
