"""Count small models, and find operators in what was counted."""

from typing import Any

import torch
from torch import nn

from penstock import Layers, capture
from penstock.costs.counting.count import count_layers
from penstock.costs.records import AtSize, LayerKind, Operator, Part
from penstock.model.layer_list import as_layers, is_plain_chain


def layers_of(model: Any, inputs: Any) -> Layers:
    return as_layers(model) if is_plain_chain(model) else capture(model, inputs)


def operators(counted: AtSize, *parts: Part) -> list[Operator]:
    every = [o for n in counted.kind_of for o in counted.kinds[n].operators]
    return [operator for operator in every if not parts or operator.part in parts]


def flops(counted: AtSize, *parts: Part) -> int:
    return sum(operator.flops * operator.count for operator in operators(counted, *parts))


def of_class(kind: LayerKind, name: str, part: Part) -> list[Operator]:
    return [o for o in kind.operators if (o.name, o.part) == (name, part)]


def count_one(module: nn.Module, *shape: int, **options: Any) -> LayerKind:
    """Count a layer whose input wants a gradient."""
    layers = as_layers([module])
    return count_layers(layers, torch.empty(shape, requires_grad=True), **options).layer(0)
