"""Operations on slices between blocks: they wait until a result is needed, and then run at once.

    last block ──slice──► float ──► view ──► cross_entropy ──► the model's output
                          └──── one function of the slice ───┘

Until then they have run on meta tensors only.  Their function can be divided as a layer is.
Autocast leaves meta tensors alone; there, fake tensors of the device show dtypes.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import GlueError
from penstock.model.entries import is_plain_class, layout_on, version_of, whole_size
from penstock.model.open_containers import DictOf
from penstock.model.pytree import Constant, Leaf, Node, Structure, flatten, unflatten
from penstock.torch_private import fake_tensors, storage_id

from .forward_pass import GRADIENT_HOOKS, unchanged
from .operations import draws

OF_THE_GRAPH = frozenset(
    (*GRADIENT_HOOKS, torch.autograd.grad, torch.autograd.backward, Tensor.backward)
)
"""Functions that look at the graph behind a tensor."""
_READS = frozenset((Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__))
"""Functions that read values, and neither change nor share them."""
_FEW = 8
"""Integers below this count as dimensions, and others as sizes."""


class _Waiting(NamedTuple):
    """An operation that waits; tensors have numbers."""

    function: Callable[..., Any]
    structure: Structure
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    with_grad: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]
    """The autocast of each type of device: is it on, and to what."""


class Code:
    """Operations as a function of their tensors.

    Codes are equal if they run the same functions in the same order, on tensors of any size.
    """

    def __init__(
        self, operations: Sequence[_Waiting], takes: Sequence[int], gives: Sequence[int]
    ) -> None:
        self._operations, self._takes, self._gives = operations, takes, gives
        facts = ((own.function, *own[2:], form(own.structure)) for own in operations)
        self._key = tuple(facts), tuple(takes), tuple(gives)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Code) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(self._takes, tensors, strict=True))
        for own in self._operations:
            args, kwargs = unflatten(own.structure, [values[n] for n in own.takes])
            with _as_then(own):
                result = own.function(*args, **kwargs)
            values.update(zip(own.gives, flatten(result)[0], strict=True))
        return tuple([values[n] for n in self._gives])


class Later:
    """The operations of one pass that wait, on tensors of which each has a number."""

    def __init__(self) -> None:
        self._operations: list[_Waiting] = []
        self._numbers: dict[int, int] = {}
        """Numbers of tensors and of their stand-ins, by id."""
        self._stand_ins: list[Tensor] = []
        """Meta tensors of whole sizes, by number."""
        self._known: dict[int, Tensor] = {}
        """Tensors with values or slices, by number; all others wait."""
        self._versions: dict[int, int] = {}
        self._device = torch.device("meta")
        """That of the slices, and of what waits."""
        self._entered: set[int] = set()
        """Numbers of tensors that no operation here has returned."""

    def waits(self, tensor: Tensor | None) -> bool:
        """Tell whether a tensor is the stand-in of a result that waits."""
        return self._numbers.get(id(tensor), -1) not in {-1, *self._known}

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Add an operation on tensors and stand-ins; return its result, of arguments or stand-ins.

        None: it has to run now, since it draws, changes an argument, or needs values.
        """
        if function in OF_THE_GRAPH or draws(function, args, kwargs):
            return None
        tensors, structure = flatten((args, kwargs))
        if not all(is_plain_class(own) and own.layout is torch.strided for own in tensors):
            return None
        takes = tuple(map(self._number_of, tensors))
        casts, given = _casts(), [self._stand_ins[n] for n in takes]
        is_cast = any(is_on for _, is_on, _ in casts)
        try:
            with fake_tensors() if is_cast else nullcontext():
                given = [*map(self._on_device, takes)] if is_cast else given
                versions = [*map(version_of, given)]
                args, kwargs = unflatten(structure, given)
                leaves, form = flatten(function(*args, **kwargs))
        except Exception:  # of any class: the operation runs now, and then raises its own
            return None
        if not leaves or versions != [*map(version_of, given)]:
            return None
        if is_cast:
            same = {id(own): self._stand_ins[n] for own, n in zip(given, takes, strict=True)}
            leaves = [same.get(id(leaf), stand_in_of(leaf, None)) for leaf in leaves]
        if not all(leaf.is_meta for leaf in leaves):
            return None
        gives = tuple([self._number_of_result(leaf) for leaf in leaves])
        how = torch.is_grad_enabled(), casts
        self._operations.append(_Waiting(function, structure, takes, gives, *how))
        return unflatten(form, [self._known.get(n, self._stand_ins[n]) for n in gives])

    def results(
        self, stand_ins: Sequence[Tensor], perform: Callable[..., Any]
    ) -> tuple[Tensor, ...]:
        """Run the operations behind stand-ins by `perform(code, *tensors)`; return the results.

        Raises:
            GlueError: one of their tensors has been changed in place since.
        """
        # 1. Find the operations that the results need, and the tensors that these take.
        gives = [self._numbers[id(tensor)] for tensor in stand_ins]
        needed, operations = {*gives} - self._known.keys(), list[_Waiting]()
        for own in reversed(self._operations):
            if not needed.isdisjoint(own.gives):
                operations.insert(0, own)
                needed |= {*own.takes} - self._known.keys()
        takes = dict.fromkeys(n for own in operations for n in own.takes if n in self._known)
        tensors = self._unchanged([*takes])
        # 2. Run them, and keep the results: nothing runs twice.
        code = Code(operations, [*takes], gives)
        with _grad_mode(any(own.with_grad for own in operations)):
            results: tuple[Tensor, ...] = perform(code, *tensors)
        for number, result in zip(gives, results, strict=True):
            self._note(number, result)
        return results

    def is_entangled(self, function: Callable[..., Any], tensors: Sequence[Tensor | None]) -> bool:
        """Tell whether a function that runs now could change, or watch, what others were made of.

        That is so if an operation has taken one of the tensors, or shares its memory:

            flat = logits.view(-1, 9)      waits
            logits[:, 0] = 0               changes `flat`, which has to be a view of whole logits
        """
        numbers = {self._numbers[id(own)] for own in tensors if id(own) in self._numbers}
        if function in _READS or not numbers:
            return False
        memories = [storage_id(own) for own in self._stand_ins]
        is_used = any(not numbers.isdisjoint(own.takes) for own in self._operations)
        return is_used or any(memories.count(memories[n]) > 1 for n in numbers)

    def whole_again(self, perform: Callable[..., Any]) -> dict[int, Tensor]:
        """Run all operations on whole values, as if there had been no slices.

        Return the new tensors by the ids of slices, of stand-ins and of earlier results.  All of
        these are kept, so that an id means one tensor; keep the results and drop this object.
        """
        # 1. Find all tensors, and those that come from outside.
        takes = dict.fromkeys(n for own in self._operations for n in own.takes)
        entered = [n for n in takes if n in self._entered]
        gives = [*(takes | dict.fromkeys(n for own in self._operations for n in own.gives))]
        # 2. Gather slices, and run the operations.
        tensors = self._unchanged(entered)
        wholes = [own if layout_on(own) is None else perform(unchanged, own) for own in tensors]
        with torch.set_grad_enabled(any(own.with_grad for own in self._operations)):
            results = perform(Code(self._operations, entered, gives), *wholes)
        new = dict(zip(gives, results, strict=True))
        return {old: new[n] for old, n in self._numbers.items() if n in new}

    def _unchanged(self, numbers: Sequence[int]) -> list[Tensor]:
        tensors = [self._known[n] for n in numbers]
        if [*map(version_of, tensors)] != [self._versions[n] for n in numbers]:
            raise GlueError(
                "the code after a block changes a tensor in place that it has used before with "
                "slices of the block's result. Change a copy (clone()), or put that code into an "
                "nn.Module with parameters, and name it in blocks="
            )
        return tensors

    def _number_of(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None or self._is_changed(number, tensor):
            number, layout = len(self._stand_ins), layout_on(tensor)
            self._device = self._device if layout is None else tensor.device
            self._stand_ins.append(stand_in_of(tensor, layout))
            self._note(number, tensor)
            self._entered.add(number)
        return number

    def _on_device(self, number: int) -> Tensor:
        """Return a tensor like a stand-in on the device that the tensor is on."""
        known = self._known.get(number)
        device = self._device if known is None else known.device
        like = self._stand_ins[number]
        found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return found.requires_grad_(like.requires_grad)

    def _is_changed(self, number: int, tensor: Tensor) -> bool:
        return number in self._known and version_of(tensor) != self._versions[number]

    def _number_of_result(self, stand_in: Tensor) -> int:
        """Return the number of a result, which may be the stand-in of an argument."""
        for number, known in enumerate(self._stand_ins):
            if known is stand_in:
                return number
        self._stand_ins.append(stand_in)
        return self._numbers.setdefault(id(stand_in), len(self._stand_ins) - 1)

    def _note(self, number: int, tensor: Tensor) -> None:
        self._known[number], self._versions[number] = tensor, version_of(tensor)
        self._numbers[id(tensor)] = number


def stand_in_of(tensor: Tensor, layout: Any) -> Tensor:
    """Return a meta tensor of the whole size of a tensor, or of a slice, without a graph."""
    shape, strides = whole_size(tuple(tensor.shape), tensor.stride(), layout or ())
    whole = torch.empty_strided(shape, strides or (), dtype=tensor.dtype, device="meta")
    return whole.requires_grad_(tensor.requires_grad)


def _grad_mode(with_grad: bool) -> Any:
    is_so = torch.is_grad_enabled() == with_grad
    return nullcontext() if is_so else torch.set_grad_enabled(with_grad)


def _casts() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


@contextmanager
def _as_then(own: _Waiting) -> Iterator[None]:
    """Set grad mode and autocast as they were where the model called an operation."""
    with _grad_mode(own.with_grad), ExitStack() as stack:
        for kind, is_on, dtype in {*own.casts} - {*_casts()}:
            stack.enter_context(torch.autocast(kind, dtype, enabled=is_on))
        yield


def form(structure: Structure) -> Hashable:
    """Return a structure without what differs between batches: numbers, and large sizes."""
    match structure:
        case Leaf(index):
            return index
        case Constant(value):
            return _alike(value)
        case Node(rebuild, children):
            kind = rebuild if isinstance(rebuild, type | DictOf) else None
            return kind, *map(form, children)


def _alike(value: Any) -> Hashable:
    kind = type(value).__name__  # True is no 1
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    if isinstance(value, tuple):  # a size is one, too
        return kind, *map(_alike, value)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) >= _FEW):
        return kind
    return kind, value if isinstance(value, Hashable) else repr(value)
