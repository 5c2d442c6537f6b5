"""Run a pipeline as a module: outputs of a whole batch, with or without a backward.

pipe(x)            forwards of all micro-batches ──► outputs, gathered
loss.backward()    ... ──► gradient of the outputs, cut ──► backwards of all micro-batches
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, RandomnessError, shown
from penstock.model.pytree import flatten, flatten_by, unflatten
from penstock.schedules.lower import Mode
from penstock.types import Outputs

from .caller import CallerContext, others_may_draw
from .engine import Engine
from .microbatches import Call
from .outputs import gather, is_unjoined, share
from .random.generators import rewound_default_generators
from .run import Run


def accumulate_into_inputs(inputs: Any, run: Run) -> None:
    """Run autograd from the tensors of `inputs` with the gradients that the pipeline found."""
    in_order = zip(wanting(inputs), input_gradients(run), strict=False)
    pairs = [(leaf, gradient) for leaf, gradient in in_order if gradient is not None]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])


def wanting(inputs: Any) -> list[Tensor]:
    """Return the tensors that require gradients, in the same order for a micro-batch of them.

    In a list with one entry per sample each micro-batch has other tensors.
    """
    return [leaf for leaf in flatten(inputs)[0] if leaf.requires_grad]


def input_gradients(run: Run) -> list[Tensor | None]:
    """Return the gradients of the inputs in the order of `wanting`; None if one has none."""
    sizes = run.batch.sizes
    rows = []
    for i, part in enumerate(run.batch.inputs):
        leaves = flatten(part)[0]
        gradients = run.input_gradients.get(i, (None,) * len(leaves))
        pairs = zip(leaves, gradients, strict=False)
        rows.append([gradient for leaf, gradient in pairs if leaf.requires_grad])
    devices = [leaf.device for leaf in wanting(run.batch.inputs[0])]
    return [
        _join(column, sizes, device)
        for column, device in zip(zip(*rows, strict=True), devices, strict=False)
    ]


def _join(
    pieces: Sequence[Tensor | None], sizes: Sequence[int], device: torch.device
) -> Tensor | None:
    """Concatenate one input's gradients of the micro-batches; None if none has one."""
    some = next((piece for piece in pieces if piece is not None), None)
    if some is None:
        return None
    whole = torch.cat(
        [
            some.new_zeros((size, *some.shape[1:])) if piece is None else piece
            for piece, size in zip(pieces, sizes, strict=True)
        ]
    )
    return whole.to(device)


def evaluate(engine: Engine, value: Any, call: Call, evaluation: int) -> Any:
    """Run forwards only, and return the gathered outputs on all processes.

    `evaluation` is the number of the call: it keys the streams of layers that draw in evaluation.
    """
    batch = engine.splitter.cut(value, None, call)

    def forwards(*, trusting: bool) -> Run:
        run = engine.new_run(batch, "eval", evaluation, with_grad=False)
        run.trusts_evaluation = trusting
        engine.drive(run, Mode.EVAL)
        return run

    # 1. Run, trusting that no layer draws; if one does, run again.  A mesh cannot go back.
    is_several = engine.mesh.world_size > 1
    try:
        with rewound_default_generators(engine.devices):
            run = forwards(trusting=not (is_several or others_may_draw()))
    except RandomnessError:
        if is_several:
            raise
        run = forwards(trusting=False)
    # 2. Give the outputs of the last stage to all stages.
    last = engine.mesh.speaker_of(engine.processes.places[-1])
    with torch.no_grad():
        parts = [run.outputs[i] for i in range(len(batch.sizes)) if i in run.outputs]
        whole = gather(parts, batch.sizes, batch.output_weights) if parts else None
        return share(engine.mesh.stages, last, whole, engine.mesh.device)


def check_undivided(sharding: object) -> None:
    """Raise ConfigError for outputs with gradients if weights or operators are divided."""
    if sharding is not None:
        raise ConfigError(
            "pipe(inputs) with gradients needs stages whose weights and operators are whole, and "
            f"sharding={shown(sharding)} divides them; use train_step with loss=, or eval_step "
            "for outputs"
        )


def run_as_module(engine: Engine, run: Run, inputs: Any, where: Outputs) -> Any:
    """Run the forwards of `run`; return the gathered outputs, tied to the pipeline's backward.

        inputs, anchor ──► _TieToBackward ──► outputs     one node of the caller's graph

    Between processes each has such a node, and those of other stages than the last get the outputs
    as `where` says.  A BoundaryError refuses outputs that cannot be gathered.
    """
    # 1. Run the forwards; gather the outputs where the last stage is.
    engine.drive(run, Mode.FORWARDS)
    batch, sizes = run.batch, run.batch.sizes
    mesh, has_outputs = engine.mesh, engine.plan.num_stages - 1 in run.stages
    outputs: Any = torch.zeros((), device=mesh.device)
    wants_grad, weights = list[bool](), list[float]()
    if has_outputs:
        parts = [run.outputs.pop(i) for i in range(len(sizes))]
        outputs = gather(parts, sizes, batch.output_weights)
        leaves = flatten_by(outputs, is_unjoined)[0]
        tapes = run.stages[engine.plan.num_stages - 1].tapes.values()
        wants_grad = [any(tape.output_wants_grad[n] for tape in tapes) for n in range(len(leaves))]
        has_scalars = any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in leaves)
        weights = batch.output_weights() if has_scalars and any(wants_grad) else []
    # 2. Give them to the other processes of the replica.
    if mesh.stages.size > 1:
        last = mesh.speaker_of(engine.processes.places[-1])
        facts = wants_grad, weights
        wants_grad, weights = mesh.stages.broadcast(facts, last, "for the outputs' gradients")
        if where is Outputs.ALL:
            outputs, has_outputs = share(mesh.stages, last, outputs, mesh.device), True
    if not has_outputs:
        wants_grad = [any(wants_grad)]
    leaves, structure = flatten_by(outputs, is_unjoined)
    tensors = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    # 3. Tie them to a node whose backward runs the second half of the schedule.  The anchor makes
    #    autograd call it even if no input requires a gradient.
    if not any(wants_grad[n] for n in tensors):
        return outputs
    pending = _Pending(engine, run, (sizes, weights), tensors, wants_grad, has_outputs=has_outputs)
    del outputs, tensors
    for n in pending.places:
        leaves[n] = None
    anchor = torch.empty(0, requires_grad=True)
    tied = _TieToBackward.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        pending, anchor, *wanting(inputs)
    )
    for n, leaf in zip(pending.places, tied, strict=True):
        leaves[n] = leaf
    return unflatten(structure, leaves)


class _Pending:
    """A run whose backwards are still to come.

    `cut` are the sizes of its micro-batches, and their weights in the model's own loss.  `tensors`
    are the gathered outputs by place; `wants_grad` also covers outputs that were not gathered.
    Without `has_outputs` there is a scalar instead, whose gradient says nothing.
    """

    def __init__(
        self,
        engine: Engine,
        run: Run,
        cut: tuple[list[int], list[float]],
        tensors: dict[int, Tensor],
        wants_grad: list[bool],
        *,
        has_outputs: bool,
    ) -> None:
        self.engine = engine
        self.call, self.has_outputs = engine.splitter.call, has_outputs
        self.sizes, self.weights = cut
        self.run: Run | None = run
        self.places = tuple(tensors)
        self.tensors = tensors
        self.wants_grad = wants_grad

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Run the backwards from the outputs' gradients; return the inputs' gradients."""
        run, self.run = self.run, None
        if run is None:
            raise PenstockError(
                "the backward of this pipeline call ran already, and each stage freed its "
                "activations as it went; call pipe(inputs) again instead of "
                "backward(retain_graph=True)"
            )
        if not self.engine.is_current:
            raise PenstockError(
                "the pipeline was moved or cut anew between its forward and this backward; run "
                "both again"
            )
        with self.engine.reporting():
            given = gradients if self.has_outputs else None
            self.engine.splitter.begin_backward(self.call, given)
        cut: list[Sequence[Tensor | None] | None] = [None] * len(self.wants_grad)
        for n, gradient in zip(self.places, given or (), strict=bool(given)):
            cut[n] = None if gradient is None else self._pieces(gradient)
        run.output_gradients = [
            [None if pieces is None else pieces[i] for pieces in cut]
            for i in range(len(self.sizes))
        ]
        # On a GPU autograd's device thread runs this function.  Workers would wait for that thread
        # while it waits for them, so the run stays in it.
        on_gpu = any(device.type == "cuda" for device in self.engine.devices)
        with self.engine.shared.lock.taken(backward=True), self.engine.reporting():
            here = CallerContext.capture(run.caller.with_grad, self.engine.devices)
            self.engine.drive(run, Mode.BACKWARDS, caller=here, in_caller=on_gpu)
        return input_gradients(run)

    def _pieces(self, gradient: Tensor) -> Sequence[Tensor | None]:
        """Cut an output's gradient into micro-batches; a loss of weight 0 has none.

        The gradients of all replicas are added up, so that each counts as its share of their mean.
        """
        if self.engine.mesh.num_replicas > 1:
            gradient = gradient / self.engine.mesh.num_replicas
        if gradient.dim():
            several = len(self.sizes) > 1  # one micro-batch takes the gradient itself
            return list(gradient.split(self.sizes)) if several else [gradient]
        return [gradient * weight if weight != 0 else None for weight in self.weights]


class _TieToBackward(torch.autograd.Function):
    """Returns the outputs in the forward; runs the pipeline's backwards in the backward."""

    @staticmethod
    def forward(
        ctx: Any, pending: _Pending, anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        tensors, pending.tensors = pending.tensors, {}  # a reference would keep the outputs alive
        without_grad = [t for n, t in tensors.items() if not pending.wants_grad[n]]
        ctx.mark_non_differentiable(*without_grad)
        return tuple(tensors.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise PenstockError(
                "create_graph=True, but the gradients of a pipeline have no graph of their own: "
                "what is computed from them (a gradient penalty, say) would train nothing. "
                "Compute it inside one layer with recompute=Recompute.NEVER, or from the unsplit "
                "model"
            )
        return (None, None, *ctx.pending.backward(list(gradients)))
