"""Call layers alone as a stage calls them, to see what that takes."""

from collections.abc import Callable
from typing import Any

import torch

from penstock.model.layers import Layers
from penstock.model.stage_plan import Step

from .batch_norm import batch_norms, separate_statistics
from .caller import CallerContext
from .drawing import Drawing, LayerCall
from .microbatches import Batch
from .run import Run, Streams
from .tape import Tape


class StageCalls:
    """Calls layers: each draws from a stream of its own, and BatchNorm notes its moments, which
    are lost.
    """

    def __init__(self, layers: Layers) -> None:
        modules = [(step.index, step.module) for step in layers]
        self._norms = {index: batch_norms([module]) for index, module in modules}
        tensors = (t for _, m in modules for t in (*m.parameters(), *m.buffers()))
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self._drawing = Drawing(modules, device)
        self._run = Run(
            batch=Batch([1], [], [], [1.0]),
            streams=Streams(0, "train", 0, 1),
            caller=CallerContext.capture(False, [device]),
        )

    def __call__(self, step: Step, function: Callable[[], Any]) -> Any:
        """Call one layer."""
        training = step.module.training
        with separate_statistics(self._norms.get(step.index, ()), into={}):
            if (step.index, training) in self._drawing.silent:
                return function()
            call = LayerCall(self._run, Tape(0, {}, graph_dropped=False), step.index, training)
            return self._drawing.run(call, function)
