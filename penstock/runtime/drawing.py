"""Which layers draw random numbers: found out as they run, so that only those pay for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from .random_streams import KeyedRandomness, holds_generator, runs_and_draws, stream_key
from .run import Kept, Run


@dataclass(slots=True)
class LayerCall:
    """One call of one layer, or of the loss, on one micro-batch."""

    run: Run
    microbatch: int
    layer: int
    training: bool
    kept: Kept

    @property
    def key(self) -> int:
        run = self.run
        microbatch = run.first_microbatch + self.microbatch
        return stream_key(run.seed, run.phase, run.step, self.layer, microbatch)


class Drawing:
    """Runs the layers of a stage so that each draws from its own stream; plainly if it draws none.

    What was seen of a layer holds for its mode and its dropout probabilities: a schedule may
    raise one from 0.
    """

    def __init__(self, layers: Iterable[tuple[int, nn.Module]], device: torch.device) -> None:
        self._device = device
        self._draws: dict[tuple[float, ...], bool] = {}
        self._own_generators = set()
        self._dropouts = {}
        for index, module in layers:
            self._dropouts[index] = [m for m in module.modules() if isinstance(m, _DropoutNd)]
            if holds_generator(module):
                self._own_generators.add(index)

    def forget(self) -> None:
        """Look at every layer again before trusting that it draws no random numbers."""
        self._draws.clear()

    def run(self, call: LayerCall, function: Callable[[], Any]) -> Any:
        """Run `function`, the layer; note in `call.kept` if its backward may draw again."""
        layer, training = call.layer, call.training
        known = (layer, training, *(m.p for m in self._dropouts.get(layer, ())))
        draws = self._draws.get(known)
        if draws is False or (draws is None and not training and call.run.trusts_evaluation):
            return function()
        if draws is None and layer not in self._own_generators:
            call.run.has_seeded = True
            result, drew = runs_and_draws(call.key, function, self._device)
            self._draws[known] = drew
            call.kept.reruns_in_backward |= drew  # or not: it was not watched this once
            return result
        with KeyedRandomness(call.key, repeatable=call.kept.graph_dropped) as mode:
            result = function()
        call.kept.reruns_in_backward |= mode.drew_in_checkpoint
        return result
