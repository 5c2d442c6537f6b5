"""Guards: what watches a stage while it works, one small object for each thing that can go wrong.

    around_forward    ┌ layers ┐ after_layers       before_backward  ┌ autograd ┐ after_backward
    around_recompute  └────────┘                    around_backward  └──────────┘
                                                    around_rerun

A stage calls only the hooks that a guard defines itself, in the order of the guards.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from penstock.errors import BoundaryError, PartitionError, RecomputeError
from penstock.model.entries import version_of
from penstock.runtime.run import Run
from penstock.transport.channels import check_still_as_sent

from .tape import FROM_CALLER, Given, Tape

_T = TypeVar("_T")
Context = AbstractContextManager[Any]
Around = Callable[[Run, Tape], Context | None]


class Guard:
    """Base of all guards: nothing is watched.  An `around` hook may return None for nothing."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to watch, as the first backward has shown."""
        return False

    def around_forward(self, run: Run, tape: Tape) -> Context | None:
        """Return what the first run of the layers is to happen in."""

    def around_recompute(self, run: Run, tape: Tape) -> Context | None:
        """Return what the second run of the layers is to happen in."""

    def after_layers(self, run: Run, tape: Tape, given: Sequence[Given]) -> None:
        """Look at what the layers were given, and were given again."""

    def before_backward(self, run: Run, tape: Tape, roots: Sequence[Tensor]) -> None:
        """Look at the roots that autograd is about to start from."""

    def around_backward(self, run: Run, tape: Tape) -> Context | None:
        """Return what autograd is to run in."""

    def around_rerun(self, run: Run, tape: Tape) -> Context | None:
        """Return what autograd is to run in where it may run layers again."""

    def after_input(self, run: Run, tape: Tape) -> None:
        """Take notice that all but the gradients of weights is done."""

    def after_backward(self, run: Run, tape: Tape) -> None:
        """Take notice that the tape is used up."""

    def after_move(self, run: Run, tape: Tape) -> None:
        """Take notice that what is kept was moved away, or back."""

    def forget(self, error: BaseException) -> None:
        """Forget what was seen of the layers in a run that failed: it may be the cause."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of several guards, by where they are called."""

    around_forward: Sequence[Around]
    around_recompute: Sequence[Around]
    after_layers: Sequence[Callable[[Run, Tape, Sequence[Given]], None]]
    before_backward: Sequence[Callable[[Run, Tape, Sequence[Tensor]], None]]
    around_backward: Sequence[Around]
    around_rerun: Sequence[Around]
    after_input: Sequence[Callable[[Run, Tape], None]]
    after_backward: Sequence[Callable[[Run, Tape], None]]
    after_move: Sequence[Callable[[Run, Tape], None]]
    forget: Sequence[Callable[[BaseException], None]]

    @classmethod
    def of(cls, guards: Iterable[Guard]) -> "Hooks":
        """Collect the hooks that the guards define."""
        guards = tuple(guards)
        return cls(
            **{
                name: tuple(
                    getattr(guard, name)
                    for guard in guards
                    if getattr(type(guard), name) is not getattr(Guard, name)
                )
                for name in cls.__slots__
            }
        )


def within(arounds: Sequence[Around], run: Run, tape: Tape, function: Callable[[], _T]) -> _T:
    """Call a function inside what the hooks return, the first one outermost."""
    contexts = [found for around in arounds if (found := around(run, tape)) is not None]
    return _inside(contexts, function)


def _inside(contexts: Sequence[Context], function: Callable[[], _T]) -> _T:
    if not contexts:
        return function()
    with contexts[0]:
        return _inside(contexts[1:], function)


class Changes(Guard):
    """What was seen of the layers of one stage: a value that they change is copied first.

    In the first forward with gradients every value is copied, to find out.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._seen: dict[tuple[int, int], bool] = {}

    def forget(self, error: BaseException) -> None:
        self._seen.clear()

    def copies(self, key: tuple[int, int], *, lasts: bool) -> bool:
        """Tell whether a value is to be copied; one that lasts is so only if it was changed."""
        return self._seen.get(key, not lasts)

    def after_layers(self, run: Run, tape: Tape, given: Sequence[Given]) -> None:
        """Note which values the layers have changed.

        Raises:
            RecomputeError: a value was changed for the first time, and there is no copy of it.
            BoundaryError: a value was changed that another one shares memory with, or by its
                sender.
        """
        with_grad = run.with_grad
        for value in given:
            peer, place = value.key
            if value.copied and with_grad and peer != FROM_CALLER:
                check_still_as_sent(value.sent, tape.received[peer].versions[place], peer)
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

    def _is_changed(self, value: Given) -> bool:
        if value.before is not None:  # evaluation, where versions may not be counted
            return not same_bits(value.tensor, value.before)
        if version_of(value.tensor) != value.version:
            return True
        first = value.copied and value.key not in self._seen  # `.data` has no versions
        is_dense = value.tensor.layout is torch.strided
        return first and is_dense and not same_bits(value.tensor, value.sent)


class Claims(Guard):
    """Sees that no other stage adds to the gradients that this one adds to, bar its entries'.

    One micro-batch is looked at, or all where values decide what runs (`decides`).
    """

    def __init__(self, stage: int, *, decides: bool) -> None:
        self._stage, self._decides = stage, decides

    def before_backward(self, run: Run, tape: Tape, roots: Sequence[Tensor]) -> None:
        """Claim all leaves behind `roots`.

        Raises:
            PartitionError: another stage has claimed one in this run.
        """
        here = run.stages[self._stage]
        if here.has_claimed_leaves and not self._decides:
            return
        here.has_claimed_leaves = True
        own = set(map(id, tape.entry_tensors))
        for leaf in _leaves(roots):
            if id(leaf) in own:
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
    """Compare to the bit; a NaN is equal to itself."""
    if a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
