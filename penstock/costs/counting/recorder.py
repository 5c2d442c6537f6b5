"""Record a forward on meta tensors as a graph.

    layer ──► function mode   one `Call` for each function of torch, with its tensors
                  │
                  ▼
              dispatch mode   the operators that torch runs for it
                  │
                  ▼
              saving hooks    the tensors that it keeps for its backward

Autograd numbers its nodes as it makes them.  A mark at each call tells which nodes are the call's,
and so which operators of the backward are.
"""

import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name

from penstock.costs.records import Operator
from penstock.model.capture.ghost import Ghost, is_question, map_tensors
from penstock.torch_private import (
    TorchDispatchMode,
    next_node_number,
    storage_id,
    version_counter,
)

from .classify import argument_of, dtype_name, tensors_in
from .fused_kernels import LOOKED_INTO, run_as_on
from .graph import Call, Graph, Ref, TensorSpec
from .layer_calls import as_it_is
from .meta import MetaResults

_USUAL = (Tensor, torch.nn.Parameter)
"""Classes of tensors that are recorded; other subclasses run as they are."""
NoteBackward = Callable[[Any, Sequence[Operator]], None]
"""Notes an operator of a backward, with its descriptions."""


class NeedsValues(Exception):
    """An operator asks for the values of a tensor that has none."""


@dataclass(slots=True)
class _Draft:
    """A call that is being recorded, and what is noted until the forward has run."""

    call: Call
    operators: list[Operator] = field(default_factory=list)
    packed: list["weakref.ref[Tensor]"] = field(default_factory=list)
    """Tensors that it has saved."""
    kept: dict[int, int] = field(default_factory=dict)
    """Bytes that are still saved when the forward has run, by storage."""
    saved: dict[int, int] = field(default_factory=dict)
    """Numbers of saved arguments and results, by storage."""
    draws: bool = False


class Recorder:
    """Records calls; `names` has the names of parameters and buffers by the tensor's id.

    Attention and dropout run as on devices of `torch_type`.  A tensor with values becomes a meta
    tensor where it meets one.
    """

    def __init__(self, names: Mapping[int, str], torch_type: str) -> None:
        self._names = names
        self._functions = _Functions(self, torch_type)
        self._operators = _Operators(self)
        self._drafts: list[_Draft] = []
        self._of_layer = self._now = -1
        self._is_paused = False
        self._specs: list[TensorSpec] = []
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._outputs: tuple[int, ...] = ()
        self._note_backward: NoteBackward | None = None
        self._entering: dict[int, frozenset[int]] = {}
        self.marks: list[tuple[int, int]] = []
        """Pairs (number, call): autograd nodes from the number on are the call's."""
        self.starts: dict[int, int] = {}
        """The number of the first tensor that is met in a layer, or later, by layer."""

    @property
    def layer(self) -> int:
        return self._drafts[self._now].call.layer

    def layer_of(self, call: int) -> int:
        """Return the layer of a call, by its number in `marks`."""
        return self._drafts[call].call.layer

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record the calls inside, and the tensors that are still saved at the end."""
        with saved_tensors_hooks(self._pack, as_it_is), self._functions, self._operators:
            yield
        for draft in self._drafts:  # tensors saved for unused results are freed by now
            draft.kept = _alive(draft)

    @contextmanager
    def backward(self, note: NoteBackward) -> Iterator[None]:
        """Pass the operators inside to `note`, as operators of a backward."""
        self._note_backward = note
        try:
            with self._operators:
                yield
        finally:
            self._note_backward = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside; operators still run on meta tensors."""
        self._is_paused = True
        try:
            with saved_tensors_hooks(as_it_is, as_it_is):
                yield
        finally:
            self._is_paused = False

    def begin(self, layer: int, *, is_between: bool = False) -> None:
        """Note that a layer begins: its own call, or the code around it."""
        self._of_layer = len(self._drafts)
        self.starts.setdefault(layer, len(self._specs))
        self._drafts.append(_Draft(Call(layer=layer, is_between=is_between)))
        self._go_to(self._of_layer)

    def enter(self, tensors: Sequence[Tensor]) -> None:
        """Note the arguments of the layer that begins."""
        self._entering[self.layer] = frozenset(map(self._number_of, tensors))

    def end(self, output: Any) -> None:
        """Note the model's outputs."""
        self._outputs = tuple(self._number_of(tensor) for tensor in tensors_in(output))

    def blame(self, call: int) -> None:
        """Note that an error comes from the backward of a call."""
        self._now = call

    def graph(
        self,
        backward: Mapping[int, Sequence[Operator]],
        lasting: Collection[int],
        custom: Collection[int] = (),
    ) -> Graph:
        """Return the recorded graph, with the operators of each call's `backward`.  No call saves
        `lasting` storages, of parameters and buffers; `custom` calls have an autograd function.
        """
        # 1. Complete all drafts; leave out calls that run no operator.
        drafted = [
            self._finished(draft, backward.get(number, ()), lasting)
            for number, draft in enumerate(self._drafts)
        ]
        numbers = [n for n, c in enumerate(drafted) if c.function or c.operators or n in custom]
        # 2. Number the remaining calls from 0, also as the makers of tensors.
        place = {number: place for place, number in enumerate(numbers)}
        tensors = [
            spec if spec.maker is None else replace(spec, maker=place[spec.maker])
            for spec in self._specs
        ]
        calls = tuple(drafted[number] for number in numbers)
        return Graph(tuple(tensors), calls, self._outputs, self._entering)

    def saved_of_layers(self) -> dict[int, dict[int, int]]:
        """Return the bytes that each layer saves, by layer and storage."""
        saved: dict[int, dict[int, int]] = {}
        for draft in self._drafts:
            saved.setdefault(draft.call.layer, {}).update(draft.kept)
        return saved

    # -- calls ------------------------------------------------------------------------------------

    def call(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a function of torch; note it if it makes tensors or runs operators."""
        if self._is_paused or is_question(function, args, kwargs):
            return run()
        # 1. note the arguments before the call, which may change them in place
        number, now = len(self._drafts), self._drafts[self._now].call
        told = {"arguments": self._told(tuple(args)), "options": self._told(kwargs)}
        draft = _Draft(Call(layer=now.layer, is_between=now.is_between, **told))
        versions = [(tensor, version_counter(tensor)) for tensor in tensors_in((args, kwargs))]
        self._drafts.append(draft)
        self._go_to(number)
        # 2. run it; operators and saved tensors are noted at the draft meanwhile
        result = run()
        gives = list(tensors_in(result))
        changed = (tensor for tensor, before in versions if version_counter(tensor) != before)
        changes = tuple(self._number_of(tensor) for tensor in changed)
        self._go_to(self._of_layer)
        if not gives and not draft.operators and not draft.packed:
            self._drafts.pop()
            return result
        # 3. note the results, and which saved tensors are arguments or results
        name = resolve_name(function) or getattr(function, "__name__", "")
        numbers = self._storages_of((args, kwargs))
        results = tuple(self._numbered(tensor, number) for tensor in gives)
        draft.call = replace(draft.call, function=name, gives=results, changes=changes)
        numbers.update(self._storages_of(gives))
        packed = _alive(draft)
        draft.saved = {storage: numbers[storage] for storage in packed.keys() & numbers.keys()}
        return result

    def _go_to(self, call: int) -> None:
        self._now = call
        self.marks.append((next_node_number(), call))

    def _finished(
        self, draft: _Draft, backward: Sequence[Operator], lasting: Collection[int]
    ) -> Call:
        kept = draft.kept
        return replace(
            draft.call,
            operators=(*draft.operators, *backward),
            saved=tuple(dict.fromkeys(draft.saved[s] for s in kept if s in draft.saved)),
            inner_bytes=sum(kept[s] for s in kept.keys() - draft.saved.keys() - set(lasting)),
            draws=draft.draws,
        )

    def _told(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self._number_of(value))
        if isinstance(value, tuple | list):
            return tuple(map(self._told, value))
        if isinstance(value, dict):
            return tuple((name, self._told(part)) for name, part in value.items())
        if isinstance(value, str) and _DEVICE.fullmatch(value):
            return torch.device.__name__
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value) if isinstance(value, _SAID) else type(value).__name__

    def _storages_of(self, value: Any) -> dict[int, int]:
        tensors = (t for t in tensors_in(value) if t.layout is torch.strided)
        return {storage_id(tensor): self._number_of(tensor) for tensor in tensors}

    def _number_of(self, tensor: Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is not None and known[0]() is tensor:  # the id may be another tensor's by now
            return known[1]
        return self._numbered(tensor, None)

    def _numbered(self, tensor: Tensor, maker: int | None) -> int:
        number = len(self._specs)
        self._numbers[id(tensor)] = weakref.ref(tensor), number
        self._specs.append(
            TensorSpec(
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                num_bytes=tensor.numel() * tensor.element_size(),
                wants_gradient=tensor.requires_grad,
                maker=maker,
                name=self._names.get(id(tensor), ""),
            )
        )
        return number

    # -- operators and saved tensors --------------------------------------------------------------

    def note(self, func: Any, args: Any, kwargs: Any, operators: Sequence[Operator]) -> None:
        """Note an operator that torch has run, with its descriptions."""
        if self._is_paused:
            return
        if self._note_backward is not None:
            self._note_backward(func, operators)
            return
        draft = self._drafts[self._now]
        draft.operators.extend(operators)
        if torch.Tag.nondeterministic_seeded in func.tags:  # attention without dropout, too
            draft.draws |= argument_of(func, args, kwargs, "dropout_p") != 0

    def _pack(self, tensor: Tensor) -> Tensor:
        # The graph alone holds the detached tensor, so the reference ends with its node.
        saved = tensor.detach()
        self._drafts[self._now].packed.append(weakref.ref(saved))
        return saved


_SAID = (torch.dtype, torch.layout, torch.memory_format, slice, type(...))
"""Classes of objects that are recorded by their text.

Others are recorded by their class alone, as devices are: each process has another.
"""
_DEVICE = re.compile(r"(cpu|meta|cuda|xpu|mps)(:\d+)?")
"""The text of a device."""


def _alive(draft: _Draft) -> dict[int, int]:
    """Return the bytes that the graph keeps for a call, by storage."""
    tensors = (packed() for packed in draft.packed)
    return {storage_id(t): t.untyped_storage().nbytes() for t in tensors if t is not None}


class _Functions(TorchFunctionMode):
    """Shows a recorder the functions of torch, and runs some as on another device."""

    def __init__(self, recorder: Recorder, torch_type: str) -> None:
        super().__init__()
        self._recorder, self._torch_type = recorder, torch_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Ghost in types:  # between blocks of a captured model: calls its function inside
            with self:
                return Ghost.__torch_function__(func, types, args, kwargs)
        if any(kind not in _USUAL for kind in types):
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return LOOKED_INTO(*args, **kwargs)
        return self._recorder.call(
            func, args, kwargs, lambda: run_as_on(self._torch_type, func, args, kwargs)
        )


class _Operators(TorchDispatchMode):
    """Runs the operators of torch on meta tensors, and shows them to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._recorder, self._results = recorder, MetaResults()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _USUAL for kind in types):
            return func(*args, **kwargs)
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            if torch.Tag.data_dependent_output in func.tags:
                raise NeedsValues(str(func))
            args, kwargs = map_tensors(_as_meta, (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = torch.device("meta")
            if torch.Tag.dynamic_output_shape in func.tags:
                is_index = func is torch.ops.aten.index.Tensor
                if not is_index or any(t.dtype in _TRUTH for t in tensors_in(args[1])):
                    raise NeedsValues(str(func))  # by numbers, their shape says how many
        elif kwargs.get("device") not in (None, torch.device("cpu")):
            kwargs["device"] = torch.device("meta")
        result, operators = self._results.run(func, args, kwargs)
        self._recorder.note(func, args, kwargs, operators)
        return result


_TRUTH = (torch.bool, torch.uint8)
"""Dtypes of masks: the number of true values decides the result's shape."""


def _as_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
