"""Run a model and its inputs on the meta device for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.pytree import tree_map
from penstock.model.state import ABSENT, attributes, put_state, read_state
from penstock.torch_private import parameters_of


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
