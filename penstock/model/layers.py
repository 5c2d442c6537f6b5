"""The model as data: an ordered list of layers, and which values each of them reads and gives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from penstock.errors import ConfigError, PartitionError
from penstock.torch_private import CHILDREN, children_of, has_hooks

from .stage_plan import MODEL_INPUT, Perform, StagePlan, Step, Value, call, join_output

_INPUT_NAME = "input"
_INPUTS = "inputs"
"""The one value that a pipeline of layers is called with, by name."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A module whose inputs and outputs are named values, for models that are not a plain chain.

    `module` is called as module(*inputs).  `inputs` are names given as outputs by layers before
    it, or "input" for the model's own input; None means what the layer before gave.  With several
    `outputs` the module returns a tuple of that many values.  A name used again stands for the
    newest value.  `name` is the prefix of its parameters in `state_dict()`; default: its position.

        [Layer(encoder, outputs="skip"), middle, Layer(decoder, inputs=("x", "skip"))]
    """

    module: nn.Module
    inputs: str | Sequence[str] | None = None
    outputs: str | Sequence[str] | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers in order; iterating gives `Step`s.  The last one's outputs are the model's."""

    steps: tuple[Step, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def output(self) -> tuple[Value, ...]:
        return self.steps[-1].outputs

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Give (start, end) of what is to be on one stage: each layer, if nothing else is said."""
        return tuple((index, index + 1) for index in range(len(self.steps)))

    def check_enough(self, num_stages: int) -> None:
        """Refuse more stages than there are layers.

        Raises:
            PartitionError: says how many there are.
        """
        if num_stages > len(self):
            raise PartitionError(
                f"num_stages={num_stages}, but the model has only {len(self)} layers; choose at "
                f"most {len(self)} stages, or give the model as more, smaller layers"
            )

    def __str__(self) -> str:
        counts = self.parameter_counts()
        rows = [
            (str(step.index), step.name, type(step.module).__name__, f"{count:,}")
            for step, count in zip(self.steps, counts, strict=True)
        ]
        head = f"{len(self)} layers, {sum(counts):,} parameters"
        return "\n".join([head, *columns([("layer", "name", "module", "parameters"), *rows])])

    @property
    def original(self) -> nn.Module | None:
        """The captured model; None of a chain."""
        return None

    def parameter_counts(self) -> tuple[int, ...]:
        """Parameters of each layer; one that layers share is counted in the first of them."""
        seen: set[int] = set()
        counts = []
        for step in self.steps:
            new = {id(p): p.numel() for p in step.module.parameters() if id(p) not in seen}
            seen |= new.keys()
            counts.append(sum(new.values()))
        return tuple(counts)

    def keep_only(self, plans: Sequence[StagePlan]) -> None:
        """Give back the memory of all layers but those of `plans`; their shapes stay."""
        kept = {step.index for plan in plans for step in plan.steps}
        for step in self.steps:
            if step.index not in kept:
                step.module.to("meta")

    def check_sharing(self, stage_of: Sequence[int]) -> None:
        """Refuse a parameter or buffer that layers on different stages share.

        Raises:
            PartitionError: names the two layers and the tensor, and the partitions that would
                work.
        """
        check_sharing(self, stage_of, lambda module: [*_parameters(module), *_buffers(module)])

    def registered(self, holds: Callable[[int], bool]) -> dict[str, Any]:
        """Give what a module registers that has the layers for which `holds`, under their names.

        The keys are those of an nn.Module's own dictionaries, such as `_modules`.
        """
        return {CHILDREN: {s.name: s.module for s in self.steps if holds(s.index)}}

    def elsewhere(self, holds: Callable[[int], bool]) -> tuple[str, ...]:
        """Name the modules in `registered` that only layers of other processes run."""
        return ()

    @property
    def own_loss(self) -> Callable[[Any, Any], Tensor] | None:
        """Find the loss that the model computes itself in its output; None if it has none."""
        return None

    def own_modules(self) -> list[nn.Module]:
        """Give what has a mode of its own, beside the modules of `registered`."""
        return []

    def places(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Give what must stay as it is between two cuts: where it is held, its name, and it."""
        return []

    def holders(self) -> list[tuple[str, nn.Module]]:
        """Give what holds all parameters and buffers, with the prefix of their names."""
        return [(f"{step.name}.", step.module) for step in self.steps]

    def as_one_value(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return what a pipeline of these layers is called with as one value: the model's input.

        Raises:
            ConfigError: the first layer takes one value, and the call gives something else.
        """
        if len(args) + len(keywords) == 1 and (args or _INPUTS in keywords):
            return args[0] if args else keywords[_INPUTS]
        given = [f"{len(args)} positional"] if args or not keywords else []
        raise ConfigError(
            f"a pipeline of layers is called with one value, which its first layer is given, and "
            f"was called with these arguments: {', '.join([*given, *keywords])}. Give them as one "
            "tuple or dict, which the first layer takes apart; or capture the model, which is "
            "then called as it was: Pipeline(model, example_inputs=...)"
        )

    def run(self, inputs: Any, perform: Perform | None = None) -> Any:
        """Run all layers, one after the other, as the unsplit model does.

        With `perform`, as `StagePlan.run` would: it is given each layer, and a function that runs
        it.
        """
        values: dict[Value, Any] = {MODEL_INPUT: inputs}
        for step in self.steps:
            run_step = partial(call, step, [values[v] for v in step.inputs])
            values.update(run_step() if perform is None else perform(step, run_step))
        return join_output([values[v] for v in self.output])


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lay out rows of cells; what looks like a number stands right in its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [rows[-1][n].replace(",", "").isdigit() for n in range(len(widths))]
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def is_plain_chain(model: object) -> bool:
    """Tell whether a model is nothing but its layers in a row, so that its forward is not needed.

    An nn.Sequential with a forward or hooks of its own is not, and neither is an nn.ModuleList
    with a forward.
    """
    if not isinstance(model, nn.Sequential | nn.ModuleList):
        return isinstance(model, Sequence | Layers)
    plain = nn.Sequential if isinstance(model, nn.Sequential) else nn.Module
    return type(model).forward is plain.forward and not has_hooks(model)


def as_layers(model: "nn.Sequential | Sequence[nn.Module | Layer] | Layers") -> Layers:
    """Resolve an nn.Sequential, or a list of modules and `Layer`s, into `Layers`.

    Raises:
        ConfigError: the model is something else, is empty, or names a value nobody gave.
    """
    if isinstance(model, Layers):
        return model
    if isinstance(model, nn.Module) and not is_plain_chain(model):
        raise ConfigError(
            f"{type(model).__name__} is no plain nn.Sequential: give example_inputs= too, a batch "
            "as train_step is given; the model is run on it to see how its parts work together"
        )
    if isinstance(model, nn.Sequential | nn.ModuleList):
        named: list[tuple[str, Any]] = list(model.named_children())
        if len(named) != len(model):  # named_children skips a module that comes a second time
            named = [(name, module) for name, module in children_of(model).items()]
    elif isinstance(model, Sequence):
        named = [(str(n), layer) for n, layer in enumerate(model)]
    else:
        raise ConfigError(
            f"layers must be an nn.Sequential or a list of modules, got {type(model).__name__}; "
            "give its layers in order, as a list"
        )
    if not named:
        raise ConfigError("the model has no layers; a pipeline needs at least one")
    return Layers(tuple(_resolve(named)))


def _resolve(named: list[tuple[str, Any]]) -> Iterator[Step]:
    known: dict[str, Value] = {_INPUT_NAME: MODEL_INPUT}
    previous: tuple[Value, ...] = (MODEL_INPUT,)
    names: set[str] = set()
    for index, (position, entry) in enumerate(named):
        layer = entry if isinstance(entry, Layer) else Layer(entry)
        name = layer.name or position
        _check_layer(layer, name, index, names)
        names.add(name)
        inputs = previous
        if layer.inputs is not None:
            inputs = tuple(_known_value(v, known, name) for v in _names(layer.inputs))
        outputs = _names(layer.outputs) if layer.outputs is not None else (None,)
        previous = tuple((index, place) for place in range(len(outputs)))
        known.update({v: (index, place) for place, v in enumerate(outputs) if v is not None})
        yield Step(index, name, layer.module, inputs, previous)


def _check_layer(layer: Layer, name: str, index: int, names: set[str]) -> None:
    if not isinstance(layer.module, nn.Module):
        raise ConfigError(
            f"layer {index} is a {type(layer.module).__name__}, not an nn.Module; wrap a function "
            "in a module"
        )
    if name in names:
        raise ConfigError(
            f"two layers are named {name!r}; parameter names must differ: rename one"
        )
    if layer.outputs is not None and not _names(layer.outputs):
        raise ConfigError(
            f"layer {name!r} names no outputs; leave `outputs` out or name at least one"
        )
    if layer.inputs is not None and not _names(layer.inputs):
        raise ConfigError(
            f"layer {name!r} names no inputs; leave `inputs` out or name at least one"
        )
    for tensor in (*layer.module.parameters(), *layer.module.buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"layer {name!r} has parameters or buffers without a shape yet (a lazy module); "
                "run the model once on an example batch before giving it to the pipeline"
            )


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _known_value(value: str, known: dict[str, Value], layer: str) -> Value:
    if value not in known:
        raise ConfigError(
            f"layer {layer!r} reads {value!r}, which no layer before it gives; known here: "
            f"{', '.join(known)}"
        )
    return known[value]


def _parameters(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_parameters())


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers())


def check_sharing(
    layers: Layers,
    stage_of: Sequence[int],
    tensors_of: Callable[[nn.Module], list[tuple[str, Tensor]]] = _buffers,
) -> None:
    """Refuse a tensor of `tensors_of` that layers on different stages share.

    Raises:
        PartitionError: names the two layers and the tensor, and the partitions that would work.
    """
    owner: dict[int, tuple[Step, str]] = {}
    for step in layers:
        for name, tensor in tensors_of(step.module):
            first, first_name = owner.setdefault(id(tensor), (step, name))
            if stage_of[first.index] != stage_of[step.index]:
                raise PartitionError(
                    f"layers {first.label} on stage {stage_of[first.index]} and {step.label} on "
                    f"stage {stage_of[step.index]} share one tensor ({first.name}.{first_name} is "
                    f"{step.name}.{name}). Choose a partition that keeps layers {first.index} to "
                    f"{step.index} on one stage, or untie them. Stages share parameters, not "
                    "buffers, of a model that is captured: penstock.capture(model, example_inputs)"
                )
