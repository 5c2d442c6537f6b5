"""Which leaves a backward pass reaches: each may belong to one stage only.

Gradients of one parameter from two stages would be added by two threads, in an order that differs
from run to run.  Registered parameters are checked when the layers are cut; this finds the rest: a
loss that reads the weights of other stages, modules that reach each other by a side door.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node

from penstock.errors import PartitionError

from .run import Run


def claim_leaves(run: Run, stage: int, roots: Iterable[Tensor], entries: Iterable[Tensor]) -> None:
    """Note that `stage` adds to the gradients of all leaves behind `roots`, bar its entries.

    Raises:
        PartitionError: another stage does so in this run.
    """
    own = set(map(id, entries))
    for leaf in _leaves(roots):
        if id(leaf) in own:
            continue
        other, _ = run.claimed.setdefault(id(leaf), (stage, leaf))
        if other != stage:
            raise PartitionError(
                f"stages {other} and {stage} both compute a gradient of one tensor of shape "
                f"{tuple(leaf.shape)}, so its sum would depend on which comes first. A loss that "
                "reads the weights of other stages does this (use the optimizer's weight_decay, "
                "or add the penalty's gradient yourself after train_step), and so does a layer "
                "that reaches into another one. Zero the gradients; keep all that use the tensor "
                "on one stage, or use num_stages=1"
            )


def _leaves(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    for root in roots:
        if root.grad_fn is None:
            yield root
    seen: set[Node] = set()
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [after for after, _ in node.next_functions if after is not None]
