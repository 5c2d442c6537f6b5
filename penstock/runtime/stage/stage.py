"""Run the forward, recompute and backward of one stage's layers on a micro-batch.

          ReceiveActivation                                     SendActivation
    peer ──► Activation ──► entries ──► layers ──► exported leaves ──► Activation ──► peer
                              [1]                     [2]
    peer ◄── Gradient ◄── caught by [1] ◄── one backward call from all of [2] ◄── Gradient ◄── peer

[1] are leaves of this stage's own autograd graph; [2] are its roots.  Between forward and backward
a `Tape` holds both.  Guards (`guards.py`) check for causes of wrong gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from penstock.errors import RecomputeError
from penstock.model.owned import modules_of_loss
from penstock.model.stage_plan import StagePlan, Step, join_output
from penstock.runtime.batch_norm import Norms
from penstock.runtime.devices import StageDevice
from penstock.runtime.memory.kept_bytes import KeptBytes
from penstock.runtime.memory.layer_recompute import LayerRecompute
from penstock.runtime.memory.offload import Offloading, OutlivingTensors, Slotting
from penstock.runtime.memory.recompute import Repeatable, StageRecompute
from penstock.runtime.memory.stores import MakeStore
from penstock.runtime.random.drawing import Drawing, LayerCall
from penstock.runtime.random.generators import StreamBetween
from penstock.runtime.random.streams import BETWEEN
from penstock.runtime.replicas import Replicas
from penstock.runtime.run import Run, StageRun
from penstock.runtime.shards.divided import NO_LAYER, Called
from penstock.runtime.unsplit import why_stage_unsplit
from penstock.runtime.window import changed_in_forward
from penstock.torch_private import AnyBatchNorm, next_node_number
from penstock.transport.channels import Activation
from penstock.types import Trace

from .guards import (
    Context,
    InPlaceChanges,
    InputGuard,
    LayersGuard,
    LeafClaims,
    RerunGuard,
    inside,
)
from .handover import Handover, once
from .notes import backward_of, note_failure
from .state import BackwardState
from .tape import Segment, Tape
from .weights import Owned, Weights


class Stage:
    """Runs the layers of one stage; the `Run` holds its values between instructions.

    `loss` is the user's loss if this stage computes it: a module may hold state too.  `replicas`
    sums gradients over the stage's copies in other replicas.  `make_store` makes the store for
    offloaded activations, if any.  `dropped_layers` recompute one by one, without them the whole
    stage.  `divided` are the layers, by number, that run in shards.
    """

    def __init__(  # noqa: PLR0913 - what a stage is made of
        self,
        plan: StagePlan,
        device: torch.device,
        loss_index: int,
        loss: Any = None,
        replicas: Replicas | None = None,
        make_store: MakeStore | None = None,
        dropped_layers: frozenset[int] = frozenset(),
        divided: Mapping[int, Called] = MappingProxyType({}),
    ) -> None:
        # 1. The tensors and modules that the stage owns, the loss's included.
        self.plan, self._replicas, self._divided = plan, replicas, divided
        self.index = plan.index
        self.device = StageDevice(device)
        self._layers = layers = [(step.index, step.module) for step in plan.steps]
        layers += [(loss_index, module) for module in modules_of_loss(loss)]
        modules = tuple(module for _, module in layers)
        self._owned = owned = Owned(modules, plan.between)
        self.weights = Weights(owned)
        # 2. The parts that run with every micro-batch.
        pools = replicas is not None and replicas.pools_statistics
        self._norms = Norms(plan.index, modules, replicas.pool if replicas and pools else None)
        self._drawing = Drawing(layers, device)
        self._changes = changes = InPlaceChanges(plan.index)
        self.handover = Handover(plan, self.device, changes, self._drawing, loss_index, divided)
        # 3. Activation memory: what may be offloaded, dropped and counted.
        outliving = OutlivingTensors(owned, computes_loss=bool(plan.output))
        self._dropped_layers = dropped_layers
        self._offloading = make_store and Offloading(
            plan.index, outliving, partial(make_store, self.device)
        )
        self._slotting = Slotting(outliving) if make_store or dropped_layers else None
        self._kept_bytes = KeptBytes(plan.index, outliving, self.weights)
        has_peers = bool(plan.imports or plan.exports)
        self._claims = LeafClaims(plan.index, decides=plan.decides) if has_peers else None
        everyone, norms = owned.everyone, set(self._norms.layers)
        self._stateful = [module for module in everyone if module not in norms]
        self._layer_recompute = LayerRecompute(self._stateful)
        whole = Repeatable(everyone, self._stateful)
        self._whole = StageRecompute(whole, self.weights, differentiates=plan.differentiates)
        # 4. Guards, the outermost first; a stage without BatchNorm or slots pays for none.
        of_norms = [self._norms] if norms else []
        slotting = [self._slotting] if self._slotting else []
        self._around_layers: list[LayersGuard] = [*slotting, self._whole, *of_norms]
        watching = [self._layer_recompute] if self._slotting else []
        self._of_inputs: list[InputGuard] = [*watching, self._changes]
        self._around_reruns: list[RerunGuard] = [self._drawing, *of_norms]
        self._watch_state()

    def _watch_state(self) -> None:
        """Watch state around backwards, until the first one shows whether there is any."""
        self._state: BackwardState | None = BackwardState(self.index, self._stateful, self.weights)
        self._is_settled = self._is_hooked = False

    def check_norms(self) -> None:
        """Raise ConfigError if BatchNorm layers were added or removed since the stage was made."""
        if self._norms.layers or any(isinstance(m, AnyBatchNorm) for m in self._owned.everyone):
            self._norms.check_all_known()

    def begin(self, run: Run) -> None:
        """Prepare for a run, or for the backwards of an earlier one."""
        if self._is_settled and self._is_hooked != self.weights.are_hooked:
            self._watch_state()  # a hook was put on a weight since
        run.stages.setdefault(self.index, StageRun())
        traces = [self._kept_bytes] if run.batch.trace is Trace.MEMORY else []
        self._watching = [*self._around_layers, *traces]
        if run.window is not None:
            moving, elsewhere = run.window.moving(self.index)
            self.weights.begin(moving, elsewhere, run.window.uses[self.index])

    def end(self, run: Run) -> None:
        """Leave the newest weights in place after a run."""
        if run.window is not None:
            self.weights.end()

    def forget(self, error: BaseException) -> None:
        """Forget the facts learned of layers: how they draw, which inputs they change."""
        self._drawing.forget(error)
        for guard in self._of_inputs:
            guard.forget(error)

    # -- one method per instruction -----------------------------------------------------------

    def forward(self, run: Run, microbatch: int, keep_graph: bool, version: int) -> None:
        """Run the layers; leave the activations to send, and a tape for the backward."""
        # 1. Take the inputs; under the guards, run the layers.
        self.weights.show(version)
        here = run.stages[self.index]
        received = self.handover.receive(run, here, microbatch)
        drops, some = run.caller.with_grad and not keep_graph, self._dropped_layers
        tape = Tape(microbatch, received, drops and not some, version)
        tape.dropped_layers = some if drops else tape.dropped_layers
        seen = None if run.window is None else self.weights.shown
        contexts = [guard.around_forward(run, tape) for guard in self._watching]
        with inside(contexts):
            leaving = self._run_layers(run, tape)
        # 2. Leave the activations and the tape; without its graph, if a recompute builds it again.
        if seen is not None and not self.weights.holds(seen):
            raise changed_in_forward(self.index)
        for peer, activation in leaving.items():
            here.leaving[microbatch, peer] = activation if seen is None else once(activation)
        if run.caller.with_grad:
            if tape.graph_dropped:
                tape.drop_graph()
            here.tapes[microbatch] = tape

    def recompute(self, run: Run, microbatch: int) -> None:
        """Build the graph again; or let the backward run layers again, if these dropped theirs."""
        tape = self._tape(run, microbatch)
        self.weights.show(tape.version)
        try:
            if tape.dropped_layers:
                self._whole.unchanged(tape)
                self._layer_recompute.ready(tape, partial(self._rerun, run))
            else:
                caller = run.caller.entered() if run.output_gradients is not None else None
                contexts = [guard.around_recompute(run, tape) for guard in self._watching]
                with inside([caller, *contexts]):
                    self._run_layers(run, tape)
        except RecomputeError as error:
            note_failure(error, self.index, "the recompute", microbatch)
            raise

    def _rerun(self, run: Run, tape: Tape, segment: Segment) -> None:
        """Run one layer again, as in its forward, in the thread in which autograd needs it."""
        contexts = [guard.around_recompute(run, tape) for guard in self._watching]
        call = partial(self._perform, run, tape, again=True)
        with inside([run.caller.entered(), *contexts]):
            self._layer_recompute.rerun(tape, segment, call)

    def backward(self, run: Run, microbatch: int) -> None:
        """Run autograd once from all roots; leave the gradients to send; free the graph."""
        tape = self._tape(run, microbatch)
        del run.stages[self.index].tapes[microbatch]
        self._run_backward(run, tape)
        self._end(run, tape)

    def backward_input(self, run: Run, microbatch: int) -> None:
        """Compute the gradients to send; leave weight gradients to `backward_weight`."""
        tape = self._tape(run, microbatch)
        self._run_backward(run, tape, in_parts=True)
        tape.drop_graph()
        if run.batch.trace is Trace.MEMORY:
            self._kept_bytes.after_input(run, tape)
        tape.received = {}

    def backward_weight(self, run: Run, microbatch: int) -> None:
        """Add the weight gradients that `backward_input` left, in the order of micro-batches."""
        tape = run.stages[self.index].tapes.pop(microbatch)
        self._run_weight_backward(run, tape)
        self._end(run, tape)

    def offload(self, run: Run, microbatch: int) -> None:
        """Move the activations of a micro-batch out of the device's memory."""
        assert self._offloading is not None
        tape = run.stages[self.index].tapes[microbatch]
        self._offloading.offload(run, tape)
        if run.batch.trace is Trace.MEMORY:
            self._kept_bytes.after_move(run, tape)

    def fetch(self, run: Run, microbatch: int) -> None:
        """Bring back the activations that `offload` moved away."""
        assert self._offloading is not None
        tape = run.stages[self.index].tapes[microbatch]
        self._offloading.fetch(tape)
        tape.copied = self.device.mark_copies()
        if run.batch.trace is Trace.MEMORY:
            self._kept_bytes.after_move(run, tape)

    def _tape(self, run: Run, microbatch: int) -> Tape:
        """Return a tape; on a GPU, let the compute stream wait for its fetched values."""
        tape = run.stages[self.index].tapes[microbatch]
        if tape.copied is not None:
            self.device.wait(tape.copied)
        return tape

    def commit_statistics(self, run: Run) -> None:
        """Move the BatchNorm running statistics by the moments of all micro-batches."""
        self._norms.commit(run)

    @property
    def sums_gradients(self) -> bool:
        """Tell whether replicas or shards sum this stage's gradients."""
        return self._replicas is not None

    @property
    def pools_statistics(self) -> bool:
        """Tell whether replicas pool the statistics of BatchNorm layers of this stage."""
        return self._norms.are_pooled

    def reduce_gradients(self, run: Run) -> None:
        """Sum the gradients over all replicas from now on; `Engine.drive` waits for the sums."""
        assert self._replicas is not None
        self._replicas.begin(self._owned.parameters)

    def reduce_after(self) -> None:
        """Begin to sum the gradients over all replicas, after all backwards."""
        if self._replicas is not None:
            self._replicas.begin(self._owned.parameters)
            self._replicas.end_backward()

    def update_weights(self, run: Run) -> None:
        """Let the optimizer update the weights; free the gradients."""
        assert run.window is not None
        if self._replicas is not None:
            self._replicas.finish()
            self._replicas.add_earlier()  # in the first update of a run
        try:
            self.weights.update(run.window.optimizers[self.index].step)
        except Exception as error:
            last = run.window.per_update * (self.weights.number + 1) - 1
            note_failure(error, self.index, "the optimizer", last)
            raise

    # -- forward ------------------------------------------------------------------------------

    def _run_layers(self, run: Run, tape: Tape) -> dict[int, Activation]:
        """Run all layers on the received values; store roots and loss in the tape."""
        values, inputs = self.handover.enter(run, tape)
        tape.layer_marks = []
        perform: Callable[..., Any] = partial(self._perform, run, tape)
        if self.plan.draws_between:
            with StreamBetween(LayerCall(run, tape, BETWEEN, training=True).key) as stream:
                self.plan.run(values, partial(stream.run_layer, perform))
        else:
            self.plan.run(values, perform)
        for guard in self._of_inputs:
            guard.after_layers(run, tape, inputs)
        if run.aside is not None:
            run.aside.look(run, tape)
        leaving = self.handover.export(values, inputs, tape)
        if self.plan.output:
            output = join_output([values[v] for v in self.plan.output])
            self.handover.take_output(run, tape, output)
        tape.disarm()
        return leaving

    def _perform(
        self, run: Run, tape: Tape, step: Step, function: Any, again: bool = False
    ) -> Any:
        """Run one layer, with its own random stream if it draws.

        A layer that drops its saved tensors comes here twice: `LayerRecompute` calls the second
        time, with `again`, as in a recompute.
        """
        if not again:
            tape.layer_marks.append((next_node_number(), step))
            if step.index in tape.dropped_layers:
                call = partial(self._perform, run, tape, again=True)
                return self._layer_recompute.run(tape, step, function, call)
        training, calls = step.module.training, self._divided
        if calls and (divided := calls.get(step.index) or calls.get(NO_LAYER)) is not None:
            function = partial(divided, function, tape.layouts)
        try:
            if (step.index, training) in self._drawing.silent:
                return function()
            return self._drawing.run(LayerCall(run, tape, step.index, training), function)
        except Exception as error:
            note_failure(error, self.index, f"layer {step.label}", tape.microbatch)
            raise

    # -- backward -----------------------------------------------------------------------------

    def _run_backward(self, run: Run, tape: Tape, *, in_parts: bool = False) -> None:
        self.weights.show(tape.version)
        here = run.stages[self.index]
        roots, gradients = self.handover.roots(run, here, tape)
        if roots:
            if self._claims is not None:
                self._claims.claim(run, tape, roots)
            try:
                if in_parts:
                    self._divide(run, tape, roots)
                self._run_autograd(run, tape, partial(tape.backward, roots, gradients))
            except Exception as error:
                where = backward_of(error, tape.layer_marks)
                note_failure(error, self.index, where, tape.microbatch)
                raise
        for peer in tape.entries:
            self.handover.leave_gradient(run, here, tape, peer)

    def _divide(self, run: Run, tape: Tape, roots: Sequence[Tensor]) -> None:
        """Split this backward if possible; else run all pending weight backwards first.

        So weight gradients add up in the order of the micro-batches:

            F0 F1 I0 [B1 whole]   ──►   I0 W0 B1      not I0 B1 W0
        """
        division = tape.divide(roots)
        if run.looks:
            reasons = why_stage_unsplit(self._layers, division, tape.layer_marks)
            run.stages[self.index].divided.append(reasons)
        if tape.parts is None:
            for _, earlier in sorted(run.stages[self.index].tapes.items()):
                if earlier.parts is not None:
                    self._run_weight_backward(run, earlier)

    def _run_weight_backward(self, run: Run, tape: Tape) -> None:
        self.weights.show(tape.version)
        try:
            self._run_autograd(run, tape, tape.backward_weight)
        except Exception as error:
            note_failure(error, self.index, "the weight backward", tape.microbatch)
            raise

    def _end(self, run: Run, tape: Tape) -> None:
        """Begin sums that are due, free the tape's weight version, and settle the guards."""
        if self._replicas is not None:
            self._replicas.end_backward()
        if run.window is not None:
            self.weights.let_go(tape.version)
        if run.batch.trace is Trace.MEMORY:
            self._kept_bytes.after_backward(run, tape)
        if not self._is_settled:  # stop watching state if the first backward found none
            if self._state is not None and self._state.is_idle:
                self._state = None
            self._is_settled, self._is_hooked = True, self.weights.are_hooked

    def _run_autograd(self, run: Run, tape: Tape, backward: Callable[[], None]) -> None:
        kind = self.device.device.type
        casts = run.output_gradients is None and torch.is_autocast_enabled(kind)
        # Under autocast a backward would cast again; operators must use their forwards' types.
        uncast: Context | None = torch.autocast(kind, enabled=False) if casts else None
        state = None if self._state is None else self._state.around_backward(run, tape)
        contexts = [uncast, state]
        if run.has_seeded or tape.may_rerun:
            contexts += [guard.around_rerun(run, tape) for guard in self._around_reruns]
        with inside(contexts):
            tape.variables = copy_context()  # with the locks that this thread holds
            backward()
