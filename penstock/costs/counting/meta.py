"""Run a model, its inputs and its operators on the meta device.

There torch runs many operators in slow Python code to find a shape.  Results of equal calls are
remembered, so that equal layers run quickly.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.records import Operator
from penstock.model.pytree import tree_map
from penstock.model.state import ABSENT, attributes, put_state, read_state
from penstock.torch_private import arguments_of, parameters_of, storage_id

from .classify import described
from .layer_calls import memory_facts


@contextmanager
def on_meta(modules: Iterable[nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Replace parameters, buffers and tensor attributes of modules by meta tensors inside.

    Shared tensors stay shared.  Afterwards the modules have their own tensors and values again.

    Yields:
        The stand-in of each tensor, by the id of the tensor.
    """
    # 1. Find all tensors of the modules.
    parts = list(dict.fromkeys(part for module in modules for part in module.modules()))
    parameters = [
        (part, name, parameter)
        for part in parts
        for name, parameter in parameters_of(part).items()
        if parameter is not None
    ]
    state = read_state(parts, attributes(parts))
    # 2. Make one stand-in for each, however many names it has.
    lent: dict[int, Tensor] = {}

    def lend(tensor: Tensor) -> Tensor:
        if id(tensor) not in lent:
            lent[id(tensor)] = _stand_in(tensor)
        return lent[id(tensor)]

    try:
        for part, name, parameter in parameters:
            _put_parameter(part, name, lend(parameter))
        put_state({at: None if t is None else lend(t) for at, t in state.items()})
        yield lent
    finally:
        # 3. Put the tensors back, and remove attributes that the run has added.
        after = read_state(parts, attributes(parts))
        put_state({place: state.get(place, ABSENT) for place in after.keys() | state.keys()})
        for part, name, parameter in parameters:
            _put_parameter(part, name, parameter)


def inputs_on_meta(inputs: Any) -> Any:
    """Return a value with meta tensors in the place of tensors of real or complex numbers.

    Others keep their values, since a model may decide by a mask, or by words.
    """

    def on_meta(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
            return _bare(tensor).requires_grad_(tensor.requires_grad)
        return tensor.detach().to("cpu", copy=True)

    return tree_map(on_meta, inputs)


def _put_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    if isinstance(module, nn.RNNBase):  # keeps a list of them beside
        setattr(module, name, parameter)
    else:
        parameters_of(module)[name] = parameter


def _stand_in(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(_bare(tensor), requires_grad=tensor.requires_grad)
    if not tensor.dim() and tensor.dtype is torch.long:  # a count, as BatchNorm reads one
        return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()
    return _bare(tensor).requires_grad_(tensor.requires_grad)


def _bare(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor.detach(), device="meta")
    if tensor.layout is not torch.strided or bare.stride() == tensor.stride():
        return bare
    return torch.empty_strided(bare.shape, tensor.stride(), dtype=bare.dtype, device="meta")


# -- operators, each kind of call once ------------------------------------------------------------

_Spec = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result in new memory."""


class MetaResults:
    """Runs operators; a second one with equal arguments only gets new results."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[tuple[Operator, ...], Any]] = {}
        """Descriptions of a call, and the specs of its results; None if some are not new."""

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Operator, ...]]:
        """Run an operator on tensors that all are on the meta device, or all have values.

        Returns:
            The result, and the descriptions of the operator.
        """
        storages: dict[int, int] = {}
        facts = _fact(args, storages), _fact(tuple(kwargs.items()), storages)
        is_known = bool(storages) and None not in facts
        if is_known and (func, facts) in self._known:
            operators, specs = self._known[func, facts]
            return func(*args, **kwargs) if specs is None else _made(specs), operators
        result = func(*args, **kwargs)
        operators = described(func, args, kwargs, result)
        if is_known:
            self._known[func, facts] = operators, _specs(func, storages, result)
        return result, operators


def _fact(value: Any, storages: dict[int, int]) -> Hashable:
    """Return facts about an argument that decide the result; None if there may be others."""
    if isinstance(value, Tensor):
        return memory_facts(value, storages)
    if isinstance(value, tuple | list):
        parts = [_fact(part, storages) for part in value]
        return None if None in parts else (type(value), *parts)
    is_plain = value is None or isinstance(value, _PLAIN)
    return (type(value), value) if is_plain else None


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _specs(func: Any, storages: Mapping[int, int], result: Any) -> Any:
    """Return specs from which `_made` makes equal results; None if one shares `storages`."""
    if any(argument.is_write for argument in arguments_of(func)):
        return None
    parts = result if isinstance(result, tuple | list) else [result]
    specs = [None if part is None else _spec(part, storages) for part in parts]
    if not specs or any(s is None and p is not None for s, p in zip(specs, parts, strict=True)):
        return None
    return tuple(specs) if isinstance(result, tuple | list) else specs[0]


def _spec(part: Any, storages: Mapping[int, int]) -> _Spec | None:
    if not isinstance(part, Tensor) or not part.is_meta or part.layout is not torch.strided:
        return None
    spec = part.shape, part.stride(), part.dtype
    same = _made(spec).untyped_storage().nbytes() == part.untyped_storage().nbytes()
    return spec if same and storage_id(part) not in storages else None


def _made(specs: Any) -> Any:
    if specs is None:
        return None
    if isinstance(specs[0], torch.Size):
        shape, strides, dtype = specs
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return tuple(map(_made, specs))
