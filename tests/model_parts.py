"""Layers for the test models: plain modules, each with one thing that is hard for a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock


class Does(nn.Module):
    """Apply a function; it has no weights."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Checkpointed(nn.Module):  # a module under torch's activation checkpoint, while `on`
    def __init__(self, module: nn.Module, *, reentrant: bool, on: bool = True) -> None:
        super().__init__()
        self.module, self.reentrant, self.on = module, reentrant, on

    def forward(self, x: Tensor) -> Any:
        if not self.on:
            return self.module(x)
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Tokens(nn.Module):
    """Token and position embedding with dropout: integers in, (batch, time, width) out."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        embedded: Tensor = self.dropout(self.token(ids) + self.position(places))
        return embedded


class Noting(nn.Module):
    """A linear layer and BatchNorm that have a note to save beside their tensors."""

    def __init__(self, width: int, note: Any = None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.note = note
        self.given: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state
        self.given.append(state)


class Noted(nn.Module):
    """Two blocks with a note each, and one of the whole; captured, as it is no chain."""

    def __init__(self, first: Any = None, second: Any = None, own: Any = None) -> None:
        super().__init__()
        self.first, self.second, self.note = Noting(2, first), Noting(2, second), own

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y

    @property
    def notes(self) -> tuple[Any, Any, Any]:
        """All notes."""
        return self.first.note, self.second.note, self.note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def noted_pipeline(model: nn.Module, **options: Any) -> penstock.Pipeline:
    """Cut a model with notes into two stages."""
    example = torch.linspace(-1, 1, 8).view(4, 2)
    given = {"num_stages": 2, "num_microbatches": 1, "loss": nn.MSELoss(), **options}
    given |= {"threads_per_stage": 1}
    return penstock.Pipeline(model, example_inputs=example, **given)


class Attention(nn.Module):
    """Causal attention by scaled_dot_product_attention, with dropout on the attention weights."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return mixed


class SelfAttention(nn.Module):
    """nn.MultiheadAttention with dropout, on itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Lstm(nn.Module):
    """A two-layer LSTM with dropout between; passes its last hidden state on beside its output."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        sequence, state = (x, None) if isinstance(x, Tensor) else x
        output, (hidden, _) = self.lstm(sequence)
        hidden = hidden.transpose(0, 1)
        return output, hidden if state is None else hidden + state


class LstmHead(nn.Module):
    """Read the last output and the hidden states."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(3 * hidden, classes)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        scores: Tensor = self.output(torch.cat((x[0][:, -1], x[1].flatten(1)), dim=1))
        return scores


class InPlaceAffine(nn.Module):
    """Change its input in place, differently each time it is applied."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5).add_(0.25)


class Heads(nn.Module):
    """A view with more dimensions, transposed: neither contiguous nor a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1).transpose(1, 2)


class Unheads(nn.Module):
    """Undo Heads, as a copy in another memory order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(1)


class Expanded(nn.Module):
    """The same values seen three times through a stride of 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(-1, 3, -1)


class Columns(nn.Module):
    """Some columns, as a view: it starts at an odd address, or leaves gaps."""

    def __init__(self, start: int, step: int) -> None:
        super().__init__()
        self.columns = slice(start, None, step)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.columns]


class Pooled(nn.Module):
    """The mean over dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


@dataclass
class Pair:
    """A dataclass at a boundary."""

    left: Tensor
    right: Tensor
    scale: float


class Named(NamedTuple):
    """A named tuple at a boundary."""

    x: Tensor
    mask: Tensor
    nothing: None


class Doubled(Tensor):
    """A subclass at a boundary: its class says that layers are to use twice its values."""

    @classmethod
    def used(cls, x: Tensor) -> Tensor:
        """Return the values to use of a tensor that may be one."""
        return 2 * x.as_subclass(Tensor) if isinstance(x, cls) else x


class ToDict(nn.Module):
    """Tensor in; a dict with a tensor twice, one that needs no gradient, a number and None out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "again": y, "mask": y.detach() > 0, "copies": 2, "none": None}


class DictToPair(nn.Module):
    """Dict in, dataclass out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values: dict[str, Any]) -> Pair:
        assert values["none"] is None
        right = values["again"] * values["mask"] * values["copies"]
        return Pair(self.linear(values["y"]), right, 0.5)


class PairToNamed(nn.Module):
    """Dataclass in, named tuple out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair: Pair) -> Named:
        return Named(self.linear(pair.left).tanh() + pair.right * pair.scale, pair.right > 0, None)


class NamedToTuple(nn.Module):
    """Named tuple in; a tuple out, of which the first value is of a subclass, and nobody uses the
    last.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, named: Named) -> tuple[Tensor, list[Tensor], Tensor]:
        return (
            self.linear(named.x).as_subclass(Doubled),
            [named.x, named.mask],
            self.spare(named.x),
        )


class TupleToTensor(nn.Module):
    """Tuple in, tensor out."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, values: tuple[Tensor, list[Tensor], Tensor]) -> Tensor:
        first, (second, mask), _ = values
        return self.linear(Doubled.used(first) * mask + second)


class Concatenate(nn.Module):
    """Concatenate several values, then a linear layer."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, outputs)

    def forward(self, *values: Tensor) -> Tensor:
        return self.linear(torch.cat(values, dim=1)).tanh()


class TwoValues(nn.Module):
    """Two outputs, one of which is the other's input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x).tanh()
        return y, self.second(y)


class Twice(nn.Module):
    """Use a value twice, and another beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return x + self.first(shared).tanh() * self.second(shared).sigmoid()


class Odd(nn.Module):
    """Parameters nobody uses, one without gradient, and one used only if the input says so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.unused = nn.Parameter(torch.ones(3))
        self.fixed = nn.Parameter(torch.ones(width), requires_grad=False)
        self.sometimes = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * self.fixed
        return y * self.sometimes if bool(x.detach().sum() > 0) else y


class Ema(nn.Module):
    """Divide by a running scale that every forward moves, in place or by a new buffer."""

    scale: Tensor

    def __init__(self, width: int, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        moved = 0.8 * self.scale + 0.2 * x.detach().float().abs().mean(0)
        if self.in_place:
            self.scale.copy_(moved)
        else:
            self.scale = moved
        return x / (self.scale.clone() if self.in_place else self.scale)


class EmaAttribute(Ema):
    """The same with a plain attribute, which is in no state_dict."""

    def __init__(self, width: int, *, in_place: bool) -> None:
        super().__init__(width, in_place=in_place)
        del self.scale
        self.scale = torch.ones(width)


class Noise(nn.Module):
    """Draw in the ways a layer without dropout modules may: by shape, like, and in place."""

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.empty_like(x).bernoulli_(0.8)
        shift = torch.rand(x.shape[1], dtype=x.dtype) + torch.randn_like(x) * 0.1
        return x * keep + shift[:, torch.randperm(x.shape[1])]


class StochasticDepth(nn.Module):
    """Skip a layer by the toss of a coin."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(torch.rand(()) < 0.5) else x + self.layer(x)


class Tied(nn.Module):
    """One weight used twice in one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight).tanh(), self.weight.t())


class Masters(torch.optim.SGD):
    """Keeps a float32 copy of each parameter, under keys with a dot, and steps that."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # one thing to test
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("master.50%", parameter.detach().float())
            state["steps.taken"] = state.get("steps.taken", 0) + 1
            state["master.50%"].sub_(parameter.grad.float(), alpha=1e-3)
            parameter.data.copy_(state["master.50%"])
