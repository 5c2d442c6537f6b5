"""How captured models are cut, run and compared, in tests and for the table in the documentation.

A model is run on batches of three sizes, so that micro-batches are uneven and few, three times:
for outputs, in evaluation mode for gradients, and in training.
"""

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline, Recompute, schedules
from penstock.errors import BoundaryError
from penstock.model.capture.captured import Captured, record_model
from penstock.model.capture.inputs import EVERYWHERE, ROUTED, as_call
from penstock.model.capture.source import CapturedLayers, captured_layers
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, unflatten
from tests.every_schedule import IN_TWO_PARTS
from tests.model.capture.any_models.made import AnyModel

BATCH, MICROBATCHES = 4, 3
SIZES = {BATCH: [2, 1, 1], 2: [1, 1], 1: [1]}
"""Batch size -> the sizes of its micro-batches."""
Tensors = dict[str, Tensor | None]
Given = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Way:  # how a model is cut and run; at most as many stages as it has block calls
    num_stages: int
    schedule: Callable[..., Any]
    recompute: Recompute
    inputs: str = ROUTED
    transport: penstock.Transport | None = None

    def __str__(self) -> str:
        return f"{self.num_stages} stages, inputs {self.inputs}"


WHOLE = Way(1, schedules.gpipe, Recompute.NEVER)
WAYS = (
    Way(2, schedules.one_f_one_b, Recompute.NEVER),
    Way(2, schedules.gpipe, Recompute.STAGE, EVERYWHERE),
    Way(3, IN_TWO_PARTS, Recompute.STAGE),
    Way(3, IN_TWO_PARTS, Recompute.NEVER, EVERYWHERE),
    Way(4, schedules.eager_1f1b, Recompute.STAGE),
)


@dataclass(frozen=True, slots=True)
class Found:  # what a model gave; without outputs that cannot be put together to a batch's
    outputs: Tensors
    in_evaluation: Tensors
    """Losses and gradients, of parameters and inputs."""
    in_training: Tensors
    """The same, and buffers."""


def run(model: AnyModel, way: Way) -> Found:
    made, inputs_of = model.make()
    with model.within():
        captured = record_model(made, inputs_of(BATCH), inputs=way.inputs)
        with make_pipeline(captured_layers(captured), way) as pipe:
            outputs = _numbered("output", (evaluated(pipe, inputs_of(n)) for n in SIZES))
            made.eval()
            in_evaluation = _steps(pipe, made, inputs_of)
            made.zero_grad()
            made.train()
            in_training = {**_steps(pipe, made, inputs_of), **buffers(made)}
    return Found(outputs, in_evaluation, in_training)


def captured_of(layers: Layers) -> Captured:
    assert isinstance(layers, CapturedLayers)
    return layers.captured


def make_pipeline(layers: Layers, way: Way, mesh: penstock.Mesh | None = None) -> Pipeline:
    options: dict[str, Any] = {"mesh": mesh, "num_microbatches": MICROBATCHES, "loss": loss}
    options |= {"schedule": way.schedule, "recompute": way.recompute, "threads_per_stage": 1}
    options |= {"transport": way.transport}
    return Pipeline(layers, partition=random_cut(len(layers), way.num_stages), **options)


def evaluated(pipe: Pipeline, inputs: Any) -> list[Tensor]:
    """Give the tensors of a pipeline's outputs, if they can be put together."""
    try:
        return flatten(pipe.eval_step(inputs))[0]
    except BoundaryError:  # a loss, say, or a row for each word
        return []


def _steps(pipe: Pipeline, made: nn.Module, inputs_of: Callable[[int], Any]) -> Tensors:
    batches = {size: inputs_of(size) for size in SIZES}
    losses = [[pipe.train_step(batch, torch.zeros(n))] for n, batch in batches.items()]
    return {**_numbered("loss", losses), **gradients(made), **_of_inputs(batches.values())}


@cache
def whole(model: AnyModel) -> Found:
    """Run a model as it is, micro-batch by micro-batch; in training, as a pipeline of one stage.

    Random numbers are keyed there, which plain torch does not do.
    """
    made, inputs_of = model.make()
    made.eval()
    outputs, losses = [], []
    batches = {size: inputs_of(size) for size in SIZES}
    for size, batch in batches.items():
        parts = list(zip(_parts(batch, SIZES[size]), SIZES[size], strict=True))
        with torch.no_grad():
            outputs.append(_joined([(_call(model, made, part), n) for part, n in parts]))
        terms = [loss(_call(model, made, part), None) * (n / size) for part, n in parts]
        for term in terms:
            term.backward()
        losses.append([torch.stack([term.detach() for term in terms]).sum()])
    in_evaluation = {**gradients(made), **_of_inputs(batches.values())}
    return Found(
        _numbered("output", outputs),
        {**_numbered("loss", losses), **in_evaluation},
        run(model, WHOLE).in_training,
    )


def _call(model: AnyModel, made: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_call(inputs)
    with model.within():
        return made(*args, **kwargs)


def _parts(inputs: Any, sizes: list[int]) -> list[Any]:
    leaves, structure = flatten(inputs)
    cut = [leaf.split(sizes) for leaf in leaves]
    return [unflatten(structure, list(row)) for row in zip(*cut, strict=True)]


def _joined(outputs: list[tuple[Any, int]]) -> list[Tensor]:
    """Put the outputs of micro-batches together, those that have a row for each sample.

    A loss becomes the mean over the samples, and so do the scalars beside it.
    """
    sizes = [size for _, size in outputs]
    columns = list(zip(*(flatten(output)[0] for output, _ in outputs), strict=True))
    if len(outputs) == 1:
        return [tensor for (tensor,) in columns]
    has_loss = any(getattr(output, "loss", None) is not None for output, _ in outputs)
    joined = []
    for column in columns:
        if has_loss and column[0].dim() == 0:
            shares = [t * (n / sum(sizes)) for t, n in zip(column, sizes, strict=True)]
            joined.append(torch.stack(shares).sum())
        elif all(t.shape == (n, *column[0].shape[1:]) for t, n in zip(column, sizes, strict=True)):
            joined.append(torch.cat(column))
    return joined


def loss(output: Any, _target: Any) -> Tensor:
    """Give a number that depends on everything that the model gives."""
    parts = [t for t in flatten(output)[0] if t.is_floating_point()]
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def random_cut(num_layers: int, num_stages: int) -> list[int]:
    draw = random.Random(num_layers * num_stages)
    cuts = sorted(draw.sample(range(1, num_layers), min(num_stages, num_layers) - 1))
    return [b - a for a, b in pairwise([0, *cuts, num_layers])]


def gradients(model: nn.Module) -> Tensors:
    named = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: None if g is None else g.clone().to_dense() for name, g in named}


def buffers(model: nn.Module) -> Tensors:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _of_inputs(batches: Iterable[Any]) -> Tensors:
    given = [leaf for batch in batches for leaf in flatten(batch)[0] if leaf.requires_grad]
    return {f"input {number}": leaf.grad for number, leaf in enumerate(given)}


def _numbered(what: str, groups: Iterable[list[Tensor]]) -> Tensors:
    return {
        f"{what} {group}, {number}": tensor
        for group, tensors in enumerate(groups)
        for number, tensor in enumerate(tensors)
    }


def differing(found: Given, expected: Given) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not _same(found[name], value)]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def assert_equal(found: Given, expected: Given) -> None:
    assert differing(found, expected) == [], "not the same to the bit"


def assert_trains_as_whole(
    model: nn.Module,
    x: Tensor,
    *,
    whole: nn.Module | None = None,
    check: bool = True,
    num_microbatches: int = 1,
    **options: Any,
) -> None:
    """Train a model in stages (three, unless `options` say otherwise), and `whole` or else its
    copy as it is: the gradients and buffers are the same.
    """
    whole = copy.deepcopy(model) if whole is None else whole
    if "partition" not in options:
        options.setdefault("num_stages", 3)
    for part in x.tensor_split(num_microbatches):
        (loss(whole(part), None) / num_microbatches).backward()
    told: dict[str, Any] = {"num_microbatches": num_microbatches, "loss": loss}
    told |= {"threads_per_stage": 1}
    with Pipeline(penstock.capture(model, x, check=check), **options, **told) as pipe:
        pipe.train_step(x)
    expected = gradients(whole)
    assert any(gradient is not None and gradient.any() for gradient in expected.values())
    assert_equal(gradients(model), expected)
    torch.testing.assert_close(buffers(model), buffers(whole))


def assert_close(found: Tensors, expected: Tensors) -> None:
    """Compare to the rounding of bfloat16: each tensor by its largest value."""
    for name in differing(found, expected):
        one, other = found[name], expected[name]
        assert one is not None and other is not None
        largest, rounding = float(other.abs().max()), torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(one, other, rtol=0, atol=rounding * largest)
