"""Guard a stage against causes of wrong gradients; each guard watches one of them.

    LayersGuard   around_forward, around_recompute   around the layers, whenever they run
    InputGuard    after_layers                       in-place changes of inputs
    RerunGuard    around_rerun                       around autograd, if it may run layers again

A stage calls guards in their order: the first context is the outermost.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from penstock.errors import BoundaryError, PartitionError, RecomputeError
from penstock.model.entries import version_of
from penstock.runtime.run import Run
from penstock.transport.channels import check_still_as_sent

from .tape import FROM_CALLER, StageInput, Tape

Context = AbstractContextManager[Any]


class LayersGuard(Protocol):
    """Works around the layers of a stage: both methods return a context, or None for nothing."""

    def around_forward(self, run: Run, tape: Tape) -> Context | None:
        """Return a context manager for the forward, or None."""

    def around_recompute(self, run: Run, tape: Tape) -> Context | None:
        """Return a context manager for the recompute, or None."""
        return None


class InputGuard(Protocol):
    """Looks at the layers' inputs after they ran, and learns about the layers."""

    def after_layers(self, run: Run, tape: Tape, inputs: Sequence[StageInput]) -> None:
        """Check the inputs after a forward or a recompute."""

    def forget(self, error: BaseException) -> None:
        """Forget the facts learned in a run that failed: they may be the cause."""


class RerunGuard(Protocol):
    """Works around autograd if it may run layers again, in the user's own checkpoint."""

    def around_rerun(self, run: Run, tape: Tape) -> Context | None:
        """Return a context manager for autograd, or None."""


def inside(contexts: Iterable[Context | None]) -> Context:
    """Combine contexts into one, the first one outermost; mostly there is one or none."""
    present = [context for context in contexts if context is not None]
    if len(present) < 2:
        return present[0] if present else nullcontext()
    with ExitStack() as stack:
        for context in present:
            stack.enter_context(context)
        return stack.pop_all()


class InPlaceChanges(InputGuard):
    """Finds the inputs that layers of a stage change in place; the stage then copies these.

    first forward with gradients   copy all inputs, and compare
    later ones                     copy the inputs that were changed
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._seen: dict[tuple[int, int], bool] = {}

    def forget(self, error: BaseException) -> None:
        self._seen.clear()

    def copies(self, key: tuple[int, int], *, lasts: bool) -> bool:
        """Tell whether to copy a value; one that lasts for the run only after a change."""
        return self._seen.get(key, not lasts)

    def after_layers(self, run: Run, tape: Tape, inputs: Sequence[StageInput]) -> None:
        """Note which values the layers have changed.

        Raises:
            RecomputeError: layers changed a value for the first time, and there is no copy.
            BoundaryError: layers changed a value that shares memory with another one, or its
                sender changed it.
        """
        with_grad = run.caller.with_grad
        for value in inputs:
            peer, place = value.key
            if value.copied and with_grad and peer != FROM_CALLER:
                check_still_as_sent(value.sent, tape.received[peer].versions[place], peer)
            # The first change without a copy is lost; with `_seen` the next run has a copy.
            changed = self._is_changed(value)
            if with_grad:
                self._seen[value.key] = self._seen.get(value.key, False) or changed
                if changed and not value.copied:
                    raise RecomputeError(
                        f"a layer of stage {self._stage} changed its input in place, which it did "
                        "not do before; the value its backward needs is gone. Zero the gradients "
                        "and run the step again: from now on the stage works on a copy"
                    )
            if changed and value.is_alias:
                raise BoundaryError(
                    f"a layer of stage {self._stage} changed a tensor of shape "
                    f"{tuple(value.tensor.shape)} in place that shares memory with another value "
                    "which crosses stages, and there the change would be missing. Give a copy "
                    "(x.clone()) as one of the two, or keep their users on one stage"
                )

    def _is_changed(self, value: StageInput) -> bool:
        if value.before is not None:  # in evaluation torch may not count versions
            return not same_bits(value.tensor, value.before)
        if version_of(value.tensor) != value.version:
            return True
        first = value.copied and value.key not in self._seen  # a change of `.data` is not counted
        is_dense = value.tensor.layout is torch.strided
        return first and is_dense and not same_bits(value.tensor, value.sent)


class LeafClaims:
    """Checks that each leaf gets its gradient from one stage only, received inputs excepted.

    It checks one micro-batch, or all if values decide which code runs (`decides`).
    """

    def __init__(self, stage: int, *, decides: bool) -> None:
        self._stage, self._decides = stage, decides

    def claim(self, run: Run, tape: Tape, roots: Sequence[Tensor]) -> None:
        """Claim all leaves behind a backward's roots; PartitionError if another stage has one."""
        here = run.stages[self._stage]
        if here.has_claimed_leaves and not self._decides:
            return
        here.has_claimed_leaves = True
        entries = set(map(id, tape.entry_tensors))
        for leaf in _leaves(roots):
            if id(leaf) in entries:
                continue
            other, _ = run.claimed.setdefault(id(leaf), (self._stage, leaf))
            if other != self._stage:
                raise PartitionError(
                    f"stages {other} and {self._stage} both compute a gradient of one tensor of "
                    f"shape {tuple(leaf.shape)}, so its sum would depend on which comes first. A "
                    "loss that reads the weights of other stages does this (use the optimizer's "
                    "weight_decay, or add the penalty's gradient yourself after train_step), and "
                    "so does a layer that reaches into another one. Zero the gradients; keep all "
                    "that use the tensor on one stage, or use num_stages=1"
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


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether tensors are equal to the bit; a NaN equals itself."""
    if a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
