"""Outputs without gradients: the forwards of all micro-batches, put together."""

from typing import Any

import torch

from penstock.errors import RandomnessError
from penstock.schedules.lower import Mode

from .default_generators import others_may_draw, rewound_default_generators
from .engine import Engine
from .microbatches import Batch
from .outputs import gather, share
from .run import Run


def evaluate(engine: Engine, batch: Batch, number: int) -> Any:
    """Return the model's outputs for a batch, on every process; evaluations count as `number`.

    Raises:
        BoundaryError: the outputs of the micro-batches cannot be put together.
        RandomnessError: a layer drew random numbers outside its stream.
    """
    run = _run_twice_if_needed(engine, batch, number)
    processes, mesh = engine.processes, engine.mesh
    last = processes.place_of(processes.rank_of(engine.plan.num_stages - 1))
    with torch.no_grad():
        parts = [run.outputs[i] for i in range(len(batch.sizes)) if i in run.outputs]
        whole = gather(parts, batch.sizes, batch.output_weights) if parts else None
        return share(mesh.stages, last, whole, mesh.device)


def _run_twice_if_needed(engine: Engine, batch: Batch, number: int) -> Run:
    """Run the forwards; where a layer draws in them, once more, with a look at each layer."""
    is_several = engine.mesh.is_distributed
    try:
        trusting = not (is_several or others_may_draw())
        with rewound_default_generators(engine.devices):
            return _run(engine, batch, number, trusting=trusting)
    except RandomnessError:
        if is_several:
            raise
        return _run(engine, batch, number, trusting=False)


def _run(engine: Engine, batch: Batch, number: int, *, trusting: bool) -> Run:
    run = engine.new_run(batch, "eval", number, with_grad=False)
    run.trusts_evaluation = trusting
    engine.drive(run, Mode.EVAL)
    return run
