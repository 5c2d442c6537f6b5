"""Layers from a list of modules: the values that each reads and returns, and their execution."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from penstock.errors import ConfigError, PartitionError
from penstock.schedules.transfers import Transfer
from penstock.torch_private import children_of, has_hooks
from penstock.trace.units import columns, count_text

from .layers import Layers
from .materialize import Made, Mine, Placed, give_rest, move_or_make, tied_groups
from .pytree import flatten
from .stage_plan import (
    MODEL_INPUT,
    Crossing,
    Perform,
    StagePlan,
    Step,
    Value,
    join_output,
    relays,
    run_steps,
    stage_of_layers,
)

_INPUT_NAME = "input"
_INPUTS = "inputs"
"""The name of the input of a list of layers."""


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
class ListOfModules(Layers):
    """Layers that run one after the other."""

    def run(self, inputs: Any, perform: Perform | None = None) -> Any:
        (whole,) = self.plan_stages((len(self.steps),))
        values: dict[Value, Any] = {MODEL_INPUT: inputs}
        whole.run(values, perform or (lambda step, function: function()))
        return join_output([values[v] for v in whole.output])

    def run_noting(self, inputs: Any, perform: Perform) -> tuple[Any, tuple[Crossing, ...]]:
        given: dict[Value, Any] = {MODEL_INPUT: inputs}

        def noted(step: Step, function: Callable[[], Any]) -> Any:
            result = perform(step, function)
            given.update(result)
            return result

        output = self.run(inputs, noted)
        readers = {v: tuple(s.index for s in self.steps if v in s.inputs) for v in given}
        crossings = (
            Crossing(value[0], readers[value], tuple(flatten(content)[0]))
            for value, content in given.items()
            if readers[value] or value in self.steps[-1].outputs
        )
        return output, tuple(crossing for crossing in crossings if crossing.tensors)

    def plan_stages(self, partition: tuple[int, ...]) -> tuple[StagePlan, ...]:
        # 1. Find the stages of each value, and the next stage that each one sends it to.
        stage_of = stage_of_layers(partition)
        holders: dict[Value, set[int]] = {}
        for step in self.steps:
            for value in (*step.inputs, *step.outputs):
                holders.setdefault(value, set()).add(stage_of[step.index])
        held = {value: sorted(stages) for value, stages in sorted(holders.items())}
        sent = relays(held, len(partition))
        plans = []
        for stage, exports in enumerate(sent):
            own = tuple(step for step in self.steps if stage_of[step.index] == stage)
            # 2. Free a value after its last use on the stage, unless it leaves the stage.
            output = self.steps[-1].outputs if stage == max(stage_of) else ()
            leaving = {v for values in exports.values() for v in values} | set(output)
            last_use: dict[Value, int] = {}
            for n, step in enumerate(own):
                last_use.update(dict.fromkeys((*step.inputs, *step.outputs), n))
            dead_after: list[list[Value]] = [[] for _ in own]
            for value, n in last_use.items():
                if value not in leaving:
                    dead_after[n].append(value)
            # 3. Plan the stage.
            named = {f"{s.path}.{n}": p for s in own for n, p in s.module.named_parameters()}
            plans.append(
                StagePlan(
                    index=stage,
                    steps=own,
                    reads_input=held.get(MODEL_INPUT, [None])[0] == stage,
                    imports={peer: to[stage] for peer, to in enumerate(sent) if stage in to},
                    exports=dict(sorted(exports.items(), reverse=True)),
                    transfers=tuple(_transfer(stage, peer, v) for peer, v in exports.items()),
                    output=output,
                    parameters=tuple(named),
                    num_parameters=sum({id(p): p.numel() for p in named.values()}.values()),
                    run=partial(run_steps, own, dead_after),
                )
            )
        return tuple(plans)

    def place(self, mine: Mine, seed: int, *, draws: bool, placed: Placed | None = None) -> None:
        made: Made = {}
        for plan, device in mine:
            for group in tied_groups(plan.steps):
                for step in group:
                    move_or_make(step, device, seed, made, draws=draws, later=placed is not None)
                if placed is not None:
                    placed(group)
                    give_rest(group)
        kept = {step.index for plan, _ in mine for step in plan.steps}
        for step in self.steps:
            if step.index not in kept:
                step.module.to("meta")

    def names(self) -> Sequence[str]:
        return [f"{s.path}.{name}" for s in self.steps for name, _ in s.module.named_parameters()]

    def as_one_value(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if len(args) + len(keywords) == 1 and (args or _INPUTS in keywords):
            return args[0] if args else keywords[_INPUTS]
        given = [f"{len(args)} positional"] if args or not keywords else []
        raise ConfigError(
            f"a pipeline of layers is called with one value, which its first layer is given, and "
            f"was called with these arguments: {', '.join([*given, *keywords])}. Give them as one "
            "tuple or dict, which the first layer takes apart; or capture the model, which is "
            "then called as it was: Pipeline(model, example_inputs=...)"
        )

    def too_few(self, num_stages: int, most: int) -> PartitionError:
        return PartitionError(
            f"num_stages={num_stages}, but the model has only {count_text(most, 'layer')}; choose "
            f"at most {count_text(most, 'stage')}, or give the model as more, smaller layers"
        )

    def describe(self, counts: Sequence[int]) -> str:
        rows = [
            (str(step.index), step.name, type(step.module).__name__, f"{count:,}")
            for step, count in zip(self.steps, counts, strict=True)
        ]
        head = f"{count_text(len(self.steps), 'layer')}, {count_text(sum(counts), 'parameter')}"
        return "\n".join([head, *columns([("layer", "name", "module", "parameters"), *rows])])


def is_plain_chain(model: object) -> bool:
    """Tell whether a model is a plain chain of layers, without a forward or hooks of its own."""
    if not isinstance(model, nn.Sequential | nn.ModuleList):
        return isinstance(model, Sequence | Layers)
    plain = nn.Sequential if isinstance(model, nn.Sequential) else nn.Module
    return type(model).forward is plain.forward and not has_hooks(model)


def as_layers(model: "nn.Sequential | Sequence[nn.Module | Layer] | Layers") -> Layers:
    """Resolve an nn.Sequential, or a list of modules and `Layer`s, into `Layers`.

    A ConfigError refuses anything else, an empty model, and a read of an unknown value.
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
    return ListOfModules(tuple(_resolve(named)))


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
        yield Step(index, name, name, layer.module, inputs, previous)


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
    for kind, names_of_values in (("outputs", layer.outputs), ("inputs", layer.inputs)):
        if names_of_values is not None and not _names(names_of_values):
            raise ConfigError(
                f"layer {name!r} names no {kind}; leave `{kind}` out or name at least one"
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


def _transfer(producer: int, consumer: int, values: Sequence[Value]) -> Transfer:
    names = tuple(map(_name_of, values))
    return Transfer(producer=producer, consumer=consumer, values=names)


def _name_of(value: Value) -> str:
    layer, place = value
    name = "input" if value == MODEL_INPUT else f"layer {layer}"
    return f"{name}, output {place}" if place else name
