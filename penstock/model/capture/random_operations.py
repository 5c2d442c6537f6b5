"""Operations that draw: between blocks, too, they are events, so that only one stage draws."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.torch_private import DRAWING_FUNCTIONS, OpOverload, without_any_torch_function

from .errors import calling_line

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
"""An argument by name and place, and its default: the operation draws if it is true."""


def draws(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation, so called, draws random numbers."""
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
    """Refuse an operation between blocks that draws, and is not known to."""
    before = _torchs_random_state()
    yield
    if _torchs_random_state() != before:
        raise CutError(
            f"'{getattr(function, '__name__', function)}' draws random numbers between blocks "
            f"({calling_line()}), and is not known to do so: every stage would draw others. Draw "
            "by torch.rand or nn.functional.dropout, say, or inside a block"
        )


def _torchs_random_state() -> bytes:
    with without_any_torch_function():
        return torch.get_rng_state().numpy().tobytes()
