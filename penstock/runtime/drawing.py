"""Which layers draw random numbers: found out as they run, so that only those pay for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.torch_private import AnyDropout

from .random_streams import (
    KeyedRandomness,
    WatchCheckpoints,
    holds_generator,
    runs_and_draws,
    stream_key,
)
from .run import Kept, Run


class Draws(Enum):
    """What is known of a layer: that it draws, and whether it will draw again in its backward."""

    NEVER = auto()
    SOMEHOW = auto()
    ONCE = auto()
    AGAIN = auto()


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

    first call     alone, from the default generators: does it draw?
    second call    likewise, and watched: does it draw inside a checkpoint of the user's own?
    from then on   from a generator of its own; or as before, if a checkpoint will draw again
    """

    def __init__(self, layers: Iterable[tuple[int, nn.Module]], device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[float, ...], Draws] = {}
        self._own_generators = set()
        self._dropouts = {}
        for index, module in layers:
            self._dropouts[index] = [m for m in module.modules() if isinstance(m, AnyDropout)]
            if holds_generator(module):
                self._own_generators.add(index)

    def forget(self) -> None:
        """Look at every layer again before trusting that it draws no random numbers."""
        self._known = {key: how for key, how in self._known.items() if how is Draws.AGAIN}

    def run(self, call: LayerCall, function: Callable[[], Any]) -> Any:
        """Run `function`, the layer; note in `call.kept` if its backward may draw again."""
        layer, training = call.layer, call.training
        key = (layer, training, *(m.p for m in self._dropouts.get(layer, ())))
        known = self._known.get(key)
        if known is Draws.NEVER or (known is None and not training and call.run.trusts_evaluation):
            return function()
        if known is Draws.ONCE or layer in self._own_generators:
            return self._run_keyed(key, call, function)
        watch = WatchCheckpoints()
        watched = function if known is not Draws.SOMEHOW else partial(_under, watch, function)
        call.run.has_seeded = True
        result, drew = runs_and_draws(call.key, watched, self._device)
        if known is None:
            self._known[key] = Draws.SOMEHOW if drew else Draws.NEVER
        elif known is Draws.SOMEHOW and drew:
            self._known[key] = Draws.AGAIN if watch.drew_in_checkpoint else Draws.ONCE
        call.kept.draws_again |= drew and self._known[key] is not Draws.ONCE
        return result

    def _run_keyed(
        self, key: tuple[float, ...], call: LayerCall, function: Callable[[], Any]
    ) -> Any:
        with KeyedRandomness(call.key, repeatable=call.kept.graph_dropped) as mode:
            result = function()
        if mode.drew_in_checkpoint:  # one that was switched on since
            self._known[key] = Draws.AGAIN
            call.kept.reruns_in_backward = call.kept.must_not_draw = True
        return result


def _under(watch: WatchCheckpoints, function: Callable[[], Any]) -> Any:
    with watch:
        return function()
