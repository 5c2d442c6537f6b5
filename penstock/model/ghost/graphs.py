"""A model as torch.export writes it: a graph for training, and one for evaluation."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class Exported(nn.Module):
    """A model as two graphs; its parameters and buffers are the model's own."""

    graphs: dict[bool, nn.Module]
    """By whether it is for training; no modules of this one, which has the first one's."""
    original: nn.Module
    """What was exported."""

    def __init__(self, model: nn.Module, graphs: Mapping[bool, nn.Module]) -> None:
        super().__init__()
        self.__dict__.update(graphs=dict(graphs), original=model)
        first = graphs[True]
        for graph in graphs.values():
            _adopt(model, graph)
        self._modules, self._parameters = first._modules, first._parameters
        self._buffers = first._buffers
        self._non_persistent_buffers_set = first._non_persistent_buffers_set
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.graphs[self.training](*args, **kwargs)

    def owners(self, path: str) -> Iterator[nn.Module]:
        """Give the modules that have the parameters of one of the model's modules."""
        yield self.original.get_submodule(path)
        for graph in self.graphs.values():
            yield from (module for name, module in graph.named_modules() if _plain(name) == path)

    def twins(self, name: str) -> Iterator[nn.Module]:
        """Give the modules that one block is in the graphs."""
        for graph in self.graphs.values():
            try:
                yield graph.get_submodule(name)
            except AttributeError:  # not called in this mode
                continue


def _adopt(model: nn.Module, graph: nn.Module) -> None:
    """Give a graph the model's own parameters and buffers in place of its copies."""
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own.update(model.named_buffers(remove_duplicate=False))
    for path, module in graph.named_modules():
        for kept in (module._parameters, module._buffers):
            for name in kept:
                kept[name] = own.get(f"{_plain(path)}.{name}".removeprefix("."), kept[name])


def _plain(path: str) -> str:
    """Give the name of a module that a graph has once for each call."""
    return re.sub(r"@\d+", "", path)
