"""DeepSpeed's PipelineModule, one process a stage, on the CPU.

Its engine runs a step together with the optimizer's, and drops the gradients after that.  The
optimizer here changes nothing, and gives the gradients back when the step has ended.
"""

import logging
import os
import warnings
from typing import Any

from torch import Tensor, nn, optim
from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import NUM_STAGES, Work
from benchmarks.throughput.processes import Key, Part

NAME = "DeepSpeed PipelineModule"
NAMES = (NAME,)


class _Idle(optim.SGD):
    """An optimizer that only keeps hold of the gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters())
        self.kept: list[tuple[nn.Parameter, Tensor | None]] = []

    def step(self, closure: Any = None) -> Any:
        self.kept = [(p, p.grad) for group in self.param_groups for p in group["params"]]

    def give_back(self) -> None:
        """Let the parameters have their gradients again."""
        for parameter, gradient in self.kept:
            parameter.grad = gradient
        self.kept = []


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make an engine for every number of micro-batches."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.simplefilter("ignore")  # a peer's are its own affair
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # its own all-reduce, for inference, would be compiled now
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    return {(NAME, count): _part(count, rank, work) for count in counts}


def _part(num_microbatches: int, rank: int, work: Work) -> Part:
    import deepspeed
    from deepspeed.pipe import PipelineModule

    layers = list(work.model())
    module = PipelineModule(
        layers, num_stages=NUM_STAGES, loss_fn=mse_loss, partition_method="uniform"
    )
    optimizer = _Idle(module)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": work.batch // num_microbatches,
            "gradient_accumulation_steps": num_microbatches,
            "gradient_clipping": 0.0,
            "steps_per_print": None,
        },
    )
    engine.pipeline_enable_backward_allreduce = False  # there is one replica
    inputs, targets = work.data()
    xs, ys = inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches)

    def run_step() -> None:
        module.zero_grad()
        engine.train_batch(iter(zip(xs, ys, strict=True)))
        optimizer.give_back()

    first = sum(work.per_stage[:rank])
    mine = range(first, first + work.per_stage[rank])
    return Part(run_step, {place: layers[place] for place in mine})
