"""A model as torch.export writes it: a graph for training, and one for evaluation."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import CutError
from penstock.torch_private import buffers_of, parameters_of, registered_of


class Exported(nn.Module):
    """A model as two graphs; its parameters and buffers are the model's own."""

    graphs: dict[bool, nn.Module]
    """By whether it is for training; no modules of this one, which has the first one's."""
    original: nn.Module
    """What was exported."""
    signature: inspect.Signature
    """Of the original's forward."""

    def __init__(self, model: nn.Module, graphs: Mapping[bool, nn.Module]) -> None:
        mode = model.training
        signature = inspect.signature(model.forward)
        self.__dict__.update(graphs=dict(graphs), original=model, signature=signature)
        super().__init__()
        first = graphs[True]
        for graph in graphs.values():
            _adopt(model, graph)
        self.__dict__.update(registered_of(first))
        self.train(mode)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode: there is no other mode here."""
        return self.original.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.original.training = mode

    def train(self, mode: bool = True) -> "Exported":
        """Set the mode, of the model too."""
        self.original.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph of the mode that the model is in.

        Raises:
            CutError: a part of the model is in another mode than the whole.
        """
        check_modes(self.original)
        for module in self.modules():
            module.training = self.training
        given = self.signature.bind(*args, **kwargs)  # however given, by position if it can be
        return self.graphs[self.training](*given.args, **given.kwargs)

    def owners(self, path: str) -> Iterator[nn.Module]:
        """Yield the modules that have the parameters of one of the model's modules."""
        yield self.original.get_submodule(path)
        for graph in self.graphs.values():
            yield from (module for name, module in graph.named_modules() if _plain(name) == path)

    def twins(self, name: str) -> Iterator[nn.Module]:
        """Yield the modules that one block is in the graphs."""
        for graph in self.graphs.values():
            try:
                yield graph.get_submodule(name)
            except AttributeError:  # not called in this mode
                continue


def check_modes(model: nn.Module) -> None:
    """Refuse a model of which a part is in another mode than the whole: no graph is for that.

    Raises:
        CutError: names the part.
    """
    for path, module in model.named_modules():
        if module.training != model.training:
            modes = {True: "training", False: "evaluation"}
            raise CutError(
                f"'{path}' is in {modes[module.training]} mode, and the model in "
                f"{modes[model.training]} mode; what torch.export wrote is one graph for each "
                "mode of the whole. Call train() or eval() of the model, or capture it with "
                "method='rerun'"
            )


def _adopt(model: nn.Module, graph: nn.Module) -> None:
    """Put the model's own parameters and buffers in place of a graph's copies."""
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own.update(model.named_buffers(remove_duplicate=False))
    for path, module in graph.named_modules():
        for kept in (parameters_of(module), buffers_of(module)):
            for name in kept:
                kept[name] = own.get(f"{_plain(path)}.{name}".removeprefix("."), kept[name])


def _plain(path: str) -> str:
    """Return the name of a module that a graph has once for each call."""
    return re.sub(r"@\d+", "", path)
