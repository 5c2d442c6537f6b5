"""Properties of torch's operations: they draw random numbers, read values or return new memory.

Operations that draw are events, also between blocks, so that only one stage draws.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.pytree import flatten
from penstock.torch_private import DRAWING_FUNCTIONS, OpOverload, without_any_torch_function

from .errors import calling_line
from .events import Operation

_functional: Any = nn.functional
_ALWAYS = frozenset(
    (
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like),
        *(torch.randn_like, torch.randint_like, torch.bernoulli, torch.normal),
        *(torch.multinomial, torch.poisson, torch.binomial, *DRAWING_FUNCTIONS),
        _functional.gumbel_softmax,
        *(_functional.fractional_max_pool2d_with_indices, nn.init.normal_, nn.init.uniform_),
        *(_functional.fractional_max_pool3d_with_indices, nn.init.kaiming_uniform_),
        *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.uniform_),
        *(Tensor.normal_, Tensor.random_, Tensor.exponential_, Tensor.log_normal_),
        *(Tensor.cauchy_, Tensor.geometric_),
    )
)
_SWITCHES: dict[Any, tuple[str, int, Any]] = {
    **dict.fromkeys(
        (
            *(_functional.dropout, _functional.dropout1d, _functional.dropout2d),
            _functional.dropout3d,
        ),
        ("training", 2, True),
    ),
    **dict.fromkeys(
        (_functional.alpha_dropout, _functional.feature_alpha_dropout), ("training", 2, False)
    ),
    **dict.fromkeys(
        (
            *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
            *(torch.feature_dropout, torch.feature_dropout_, torch.native_dropout),
            *(torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
        ),
        ("train", 2, True),
    ),
    **dict.fromkeys((_functional.rrelu, torch.rrelu, torch.rrelu_), ("training", 3, False)),
    _functional.multi_head_attention_forward: ("training", 13, True),
    _functional.scaled_dot_product_attention: ("dropout_p", 4, 0.0),
}
"""(name, position, default) of an argument; the operation draws if the argument is true."""


def draws(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of an operation draws random numbers."""
    if isinstance(function, OpOverload):  # called by its own name
        return torch.Tag.nondeterministic_seeded in function.tags
    if function in _ALWAYS:
        return True
    switch = _SWITCHES.get(function)
    if switch is None:
        return False
    name, place, default = switch
    return bool(kwargs.get(name, args[place] if len(args) > place else default))


@contextmanager
def drawing_nothing(function: Any) -> Iterator[None]:
    """Refuse an operation between blocks that draws without being in the lists above."""
    with without_any_torch_function():
        before = torch.get_rng_state()
    yield
    with without_any_torch_function():
        has_drawn = not torch.equal(torch.get_rng_state(), before)
    if has_drawn:
        raise CutError(
            f"'{getattr(function, '__name__', function)}' draws random numbers between blocks "
            f"({calling_line()}), and is not known to do so: every stage would draw others. Draw "
            "by torch.rand or nn.functional.dropout, say, or inside a block"
        )


_PLAIN_VALUES = (bool, int, float, list, numpy.ndarray)
_SHAPED_BY_VALUES = frozenset(
    (
        *(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere),
        *(torch.masked_select, Tensor.masked_select, torch.bincount, Tensor.bincount),
        *(torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive),
        torch.nn.functional.one_hot,
    )
)
_SHARING = ("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack", "from_file")
"""Functions that may return memory which outlives the forward."""
_MASKS = (torch.bool, torch.uint8)


def decides(operation: Operation, result: Any) -> bool:
    """Tell whether an operation returned a Python value, or a shape that depends on values."""
    if isinstance(result, _PLAIN_VALUES) or operation.function in _SHAPED_BY_VALUES:
        return True
    if operation.function is torch.where:
        return isinstance(result, tuple)
    if operation.function in (torch.repeat_interleave, Tensor.repeat_interleave):
        args = operation.args
        return len(args) == 1 or isinstance(args[1], Tensor)
    is_index = operation.function is Tensor.__getitem__
    return is_index and any(t.dtype in _MASKS for t in flatten(operation.args[1])[0])


def makes_anew(function: Any, *, has_source: bool) -> bool:
    """Tell whether a function of torch always returns new memory."""
    name = getattr(function, "__name__", "")
    if has_source:
        return name == "clone" or name.startswith("new_") or name.endswith("_like")
    return name not in _SHARING and getattr(torch, name, None) is function
