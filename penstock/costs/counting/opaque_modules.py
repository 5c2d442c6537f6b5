"""Opaque modules: classes whose forward reads values, recorded as one function.

    experts(x, which, shares)  ──►  function(x, which, shares, up, down)    one call of a graph
                                        │
            on tensors without values   │   on values
            the stand-in: as much work  ▼   `run`, on shards

Dimensions have letters, as in the rules of sharding; one with a letter may be cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueModule:
    """A class of modules whose calls are recorded, and sharded, as one function.

    Attributes:
        name: the full name of the class.
        takes: letters of the dimensions of each tensor argument of the forward, in order.
        weights: letters of each parameter that it uses, by name.
        gives: letters of its result.
        stand_in: a function of the module, its arguments and weights, all without values.  It does
            as much work as the forward, and returns a tensor of the result's shape.
        run: the same function on shards.  `starts` has the offset of this device's slice by
            letter.  It returns this device's part of the result.
    """

    name: str
    takes: tuple[str, ...]
    weights: Mapping[str, str]
    gives: str
    stand_in: "Callable[..., Tensor]"
    run: "Callable[..., Tensor]"

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of all arguments of its function."""
        return (*self.takes, *self.weights.values())


OPAQUE: dict[str, OpaqueModule] = {}
"""Opaque modules by the name of the class, which is also the name of the function."""


def opaque_module(described: OpaqueModule) -> None:
    """Register a class of opaque modules."""
    OPAQUE[described.name] = described


# -- those of transformers ------------------------------------------------------------------------

# t tokens, e experts: x (t, D), which expert and its share (t, K), up (e, 2H, D), down (e, D, H)


def _like_experts(
    module: Any, x: "Tensor", which: "Tensor", shares: "Tensor", up: "Tensor", down: "Tensor"
) -> "Tensor":
    """Run the first expert once for each expert of a token."""
    rows = x.repeat_interleave(which.shape[1], 0)
    weighted = _expert(module, rows, up[0], down[0]) * shares.reshape(-1, 1)
    summed: Tensor = weighted.view(*which.shape, -1).sum(1).to(x.dtype)
    return summed


def _run_experts(  # noqa: PLR0913 - all that experts take
    module: Any,
    x: "Tensor",
    which: "Tensor",
    shares: "Tensor",
    up: "Tensor",
    down: "Tensor",
    *,
    starts: Mapping[str, int],
) -> "Tensor":
    import torch  # the letters are known without it

    result = torch.zeros_like(x)
    for number, (wide, narrow) in enumerate(zip(up, down, strict=True), starts.get("e", 0)):
        token, place = torch.where(which == number)
        weighted = _expert(module, x[token], wide, narrow) * shares[token, place, None]
        result = result.index_add(0, token, weighted.to(result.dtype))
    return result


def _expert(module: Any, rows: "Tensor", up: "Tensor", down: "Tensor") -> "Tensor":
    from torch.nn.functional import linear  # the letters are known without it

    gate, wide = linear(rows, up).chunk(2, dim=-1)
    return linear(module.act_fn(gate) * wide, down)


opaque_module(
    OpaqueModule(
        name="transformers.models.mixtral.modeling_mixtral.MixtralExperts",
        takes=("t.", "t.", "t."),
        weights={"gate_up_proj": "e..", "down_proj": "e.."},
        gives="t.",
        stand_in=_like_experts,
        run=_run_experts,
    )
)
