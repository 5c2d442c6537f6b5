"""The training loop: the same result wherever, and however often, a run is resumed."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from penstock import GradScaler, Mesh, Plan, Trace, load_checkpoint
from penstock.errors import CheckpointError
from penstock_recipes.errors import DivergedError
from penstock_recipes.optim.averaging import Averaging
from penstock_recipes.recipe.recipe import Recipe, check_asynchronous, check_divided
from penstock_recipes.train.weights import mean_weights, tensor_names

from .build import (
    autocast,
    build_layers,
    build_model,
    build_pipeline,
    names_of,
    optimizer_maker,
    parameter_groups,
)
from .display import Display
from .interrupt import Interrupt
from .layout import make_mesh, replica_share
from .learning_rate import Rates
from .meter import Meter
from .position import Position, why_ended
from .run_files import DAMAGED_METRICS, SKIPPED, TENSORBOARD
from .run_folder import RunFolder
from .saver import Saver
from .start import (
    begun_from,
    check_start,
    check_state,
    checkpoint_of,
    note_start,
    start_from,
    way_out,
)
from .tasks import build_task
from .tasks.task import Batch
from .weight_update import WeightUpdate, Windows, scores_of


class Trainer:
    """Owns the task, its model, the pipeline, the optimizer and the position of one run.

    Each process of a mesh makes a trainer and calls it alike.  The recipe must agree with `plan`.

    With `resumes`, the constructor does not load the weights of the recipe's [start]: `resume`
    prefers a checkpoint of the run itself.

    Raises:
        PenstockError: the recipe cannot be built; nothing has run then.
    """

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh | None = None,
        *,
        resumes: bool = False,
        plan: Plan | None = None,
    ) -> None:
        # Check the recipe before the model takes memory.
        check_asynchronous(recipe)
        check_divided(recipe)
        self.recipe = recipe
        self.mesh = mesh if mesh is not None else make_mesh(recipe, plan)
        self.task = build_task(recipe)
        self.task.check(recipe.pipeline.num_replicas)
        if not resumes:
            check_start(recipe, self.task)
        # Build the whole model; then each process keeps the weights of its own stages only.
        self.model = build_model(recipe, self.task)
        self._names = tensor_names(self.model)
        layers = build_layers(self.model, self.task)
        self.layer_names = names_of(layers)
        self._example: tuple[Any, Any] | None = None
        inputs, _ = self.example_part()
        self.pipe = build_pipeline(recipe, self.task, layers, inputs, self.mesh, plan)
        self._begun_from: Path | None = None
        if not resumes:
            self._start(lambda: checkpoint_of(recipe.start))
        # The optimizer holds the weights that are left.
        self.optimizer = optimizer_maker(recipe)(parameter_groups(recipe, self.pipe))
        self._rates = Rates(recipe, self.optimizer, self.steps_per_epoch)
        decay = recipe.train.average_decay
        modules = self.model.modules()
        self._average = Averaging(self.optimizer, decay, modules) if decay else None
        self.scaler = GradScaler(self.pipe, enabled=recipe.train.precision == "float16")
        max_norm = recipe.train.max_grad_norm
        self._weights = WeightUpdate(self.pipe, self.optimizer, self.scaler, max_norm)
        self.position = Position()
        self.meter = Meter(recipe.train.trace_every)
        self.result = ""
        """The task's report on the finished run."""
        self.num_skipped = 0
        """Number of unreadable samples so far."""
        self._batches: Iterator[Batch] | None = None
        self._windows = Windows(recipe.train.window)
        self._saver = Saver(recipe, self.pipe, self.optimizer, self.scaler, self.task.measures[0])
        self._scalars: Any = None

    def devices_text(self) -> str:
        """Name the devices of all processes, and the key that chooses them."""
        own = list(map(str, self.pipe.devices))
        of_all = self.mesh.world.gather(own, "for the devices of the others")
        names = dict.fromkeys(name for names in of_all for name in names)
        return f'on {", ".join(names)} (pipeline.device = "{self.recipe.pipeline.device}")'

    def _share(self, num_samples: int) -> slice:
        """Return this replica's slice of a mini-batch of `num_samples`."""
        section = self.recipe.pipeline
        return replica_share(
            num_samples, section.num_microbatches, section.num_replicas, self.mesh.replica
        )

    def example_part(self) -> tuple[Any, Any]:
        """Return inputs and targets of the first part of the first batch."""
        if self._example is None:
            part = next(self.task.batches(0, 0, self._share)).parts[0]
            self._example = part.inputs, part.targets
        return self._example

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch; with parallel text, later epochs may differ a little."""
        return self.task.num_steps(0)

    @property
    def finished(self) -> bool:
        return bool(self.why_ended)

    @property
    def why_ended(self) -> str:
        """Why the run has ended, as a clause; empty while it has not."""
        return why_ended(self.position, self.recipe.train, self.task.measures[0])

    def resume(self, folder: RunFolder, *, falls_back: bool = False) -> list[str]:
        """Load the newest checkpoint of `folder`, or the initial weights if there is none.

        With `falls_back`, a checkpoint that cannot be loaded is renamed, and the one before it is
        loaded.

        Returns:
            Warnings: the renamed files, and the reasons.

        Raises:
            CheckpointError: the checkpoint is damaged or of another model; or there is none, and
                the weights that the run began with are gone.
            RunFolderError: the checkpoint is of another run.
            ConfigError: the run began with other data.
        """
        self._begin(folder)
        # Load the newest checkpoint that can be loaded.
        warnings = []
        while (newest := self._newest(folder)) is not None:
            try:
                self.load(newest)
                break
            except CheckpointError as error:
                if not falls_back:
                    advice = self.mesh.world.from_first(lambda: way_out(folder), "for a way out")
                    raise CheckpointError(f"{error}\n{advice}") from None
                warnings.append(f"{newest} is set aside: {error}")
                folder.set_aside(newest)
        else:
            if warnings:
                warnings.append("no checkpoint is left: the run begins again at step 0")
            self._start(lambda: begun_from(self.recipe.start, folder))
        # Remove the lines and files after it.
        folder.remove_unfinished()
        damaged = folder.drop_metrics_after(self.position.step)
        if damaged:
            warnings.append(
                f"{damaged} damaged lines of {folder.metrics_path} are set aside in "
                f"{DAMAGED_METRICS}"
            )
        return warnings

    def _start(self, find: Callable[[], Path]) -> None:
        """Load the weights of the recipe's [start], if any; rank 0 finds the checkpoint."""
        start = self.recipe.start
        if start.checkpoint:
            checkpoint: Path = self.mesh.world.from_first(find, "for the weights to start from")
            load = partial(start_from, start, checkpoint, self.pipe, self._names)
            self.mesh.world.work(load, "for the weights to start from")
            self._begun_from = checkpoint

    def _newest(self, folder: RunFolder) -> Path | None:
        """Return the newest checkpoint that rank 0 sees."""
        newest: Path | None = self.mesh.world.from_first(
            lambda: next(reversed(folder.checkpoints()), None), "for the newest checkpoint"
        )
        return newest

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint of this run.

        Raises:
            CheckpointError, RunFolderError: it is damaged, or of another run.
        """
        check = partial(check_state, checkpoint, self.recipe)
        self.mesh.world.from_first(check, "to see that the checkpoint is of this run")
        state = load_checkpoint(checkpoint, self.pipe, self.optimizer)
        self.position = Position.of(state["position"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    def run(self, folder: RunFolder, display: Display, interrupt: Interrupt) -> None:
        """Train to the end, or to a stop that any process requests; save before returning."""
        self._begin(folder)
        self.num_skipped = folder.add_lines(SKIPPED, self.task.skipped)
        if self.recipe.train.tensorboard and folder.writes:
            from torch.utils.tensorboard import SummaryWriter  # the package is optional

            place, next_step = str(folder.path / TENSORBOARD), self.position.step + 1
            self._scalars = SummaryWriter(place, purge_step=next_step)
        # Train, evaluate after each epoch, save when due, until the end or a stop.
        stopping = self._must_stop(interrupt)
        interval = self.recipe.train.checkpoint_every
        while not self.finished and not stopping:
            saved = self.position.step // interval
            self._step(folder, display)
            if self.position.batch == self.task.num_steps(self.position.epoch):
                self._end_epoch(folder, display)
            stopping = self._must_stop(interrupt)
            due = self.position.step // interval > saved
            if due or self.position.is_best or self.finished or stopping:
                self._saver.save(folder, self.position)
        # Wait for the last checkpoint, as the results are made of checkpoints.
        self._saver.settle(folder)
        if self.finished:
            self.finish(folder)

    def _begin(self, folder: RunFolder) -> None:
        """Let rank 0 write, or compare, the digests of the data and of the first weights."""

        def begin() -> None:
            self.task.begin(folder.path)
            if self._begun_from is not None:
                note_start(self._begun_from, folder)

        self.mesh.world.from_first(begin, "for what belongs to the run")

    def _must_stop(self, interrupt: Interrupt) -> bool:
        """Agree with the other processes on stopping here; share the signal that one received.

        A signal during this call counts in the next call, as the others do not know of it.
        """
        number = self.mesh.world.highest(interrupt.number, "for the others to finish their step")
        interrupt.number = interrupt.number or number
        return number != 0

    def raise_if_wanted(self, interrupt: Interrupt) -> None:
        """End all processes if one of them should stop, before there is anything to save."""
        if self._must_stop(interrupt):
            raise KeyboardInterrupt

    def _step(self, folder: RunFolder, display: Display) -> None:
        # Prepare the step: batches, learning rate, drop-path, trace.
        if self._batches is None:
            epoch, batch_number = self.position.epoch, self.position.batch
            self._batches = self.task.batches(epoch, batch_number, self._share)
        window = self._windows.take(self._batches)
        self._rates.set(self.position.step)
        progress = min(1.0, self.position.step / self._rates.num_steps)
        self.task.begin_step(self.model, progress)
        if self._average is not None:
            self._average.step = self.position.step
        self.pipe.trace = self.meter.choose_trace(full_batch=window[0].is_full)
        # Train, and measure it.
        start_s = time.perf_counter()
        losses = self._updates(window)
        took_s = time.perf_counter() - start_s
        timeline = self.pipe.last_timeline if self.pipe.trace is not Trace.OFF else None
        num_samples = sum(batch.count for batch in window)
        in_one = all(len(batch.parts) == 1 for batch in window)
        optimizer_s = self._weights.seconds if in_one else None
        self.meter.add_step(took_s, num_samples, timeline, optimizer_s)
        # Count the steps, and log those that are due.
        for batch, loss in zip(window, losses, strict=True):
            rate = self._rates.of(self.position.step)
            self.position = self.position.after_batch(loss, batch.count)
            if self.position.step % self.recipe.train.log_every == 0:
                norm = {} if self._weights.norm is None else {"gradient_norm": self._weights.norm}
                self._log(folder, "step", {"loss": loss, "learning_rate": rate, **norm})
        display.show_step(self.position, self.meter)

    def _updates(self, window: list[Batch]) -> list[float]:
        """Train on batches, update the weights, and return the losses."""
        if not self.pipe.plan.schedule.is_asynchronous:
            return [self._update(batch) for batch in window]
        batches = [(part.inputs, part.targets) for batch in window for part in batch.parts]
        with autocast(self.recipe, self.pipe.devices[0]):
            tensor = self.pipe.train_steps(batches, self.optimizer, lr_scheduler=self._rates)
        losses: list[float] = tensor.tolist()
        for loss in losses:
            self._check_loss("loss", loss)
        return losses

    def _update(self, batch: Batch) -> float:
        """Run a step, part by part, update the weights, and return the loss."""
        scale, loss = self.scaler.get_scale(), 0.0
        for part in batch.parts:
            with autocast(self.recipe, self.pipe.devices[0]):
                of_part = self.pipe.train_step(
                    part.inputs, part.targets, loss_scale=scale * part.share
                )
            loss += float(of_part) * part.share
        self._check_loss("loss", loss)
        self._weights.run(is_logged=(self.position.step + 1) % self.recipe.train.log_every == 0)
        return loss

    def _check_loss(self, name: str, value: float) -> None:
        """Refuse a non-finite loss.

        A loss in float16 may overflow while the loss scale is still too high.

        Raises:
            DivergedError: the loss is not finite.
        """
        if math.isfinite(value) or (self.scaler.is_enabled() and self.scaler.get_scale() >= 1):
            return
        rate = self.optimizer.param_groups[0]["lr"]
        raise DivergedError(
            f"the {name} is {value} in step {self.position.step + 1}, at a learning rate of "
            f"{rate:.3g}: the run has diverged. Start a new one with a lower optimizer.lr, a "
            "longer warm-up, or a train.max_grad_norm; checkpoints from before are kept"
        )

    def _end_epoch(self, folder: RunFolder, display: Display) -> None:
        train_loss, self._batches = self.position.mean_loss, None
        self.pipe.trace = Trace.OFF
        scores = self.evaluate()
        for name, value in scores.items():
            self._check_loss(name, value)
        self.position = self.position.after_epoch(scores, self.task.measures[0])
        of_all = self.mesh.world.gather(list(self.task.skipped), "for what was skipped")
        self.num_skipped = folder.add_lines(SKIPPED, [name for names in of_all for name in names])
        more = {"num_skipped": self.num_skipped} if self.num_skipped else {}
        self._log(folder, "epoch", {"train_loss": train_loss, **scores, **more})
        display.show_epoch(self.position, self.meter, train_loss, self.num_skipped)

    def evaluate(self) -> dict[str, float]:
        """Compute the task's scores, with the averaged weights if there are any."""
        with self._average.in_place() if self._average is not None else nullcontext():
            device = self.pipe.devices[0]
            return scores_of(self.task, self.pipe, lambda: autocast(self.recipe, device))

    def _log(self, folder: RunFolder, kind: str, values: Mapping[str, Any]) -> None:
        where = {"kind": kind, "step": self.position.step, "epoch": self.position.epoch}
        folder.append_metrics({**where, **values, "samples_per_s": self.meter.samples_per_s})
        if self._scalars is not None:
            speed = {"samples_per_s": self.meter.samples_per_s} if kind == "step" else {}
            for name, value in {**values, **speed}.items():
                self._scalars.add_scalar(name, value, self.position.step)

    def is_made(self, folder: RunFolder) -> bool:
        """Tell whether rank 0 sees the results of the finished run."""
        is_made: bool = self.mesh.world.from_first(
            lambda: self.task.is_made(folder.path), "for what is made of the run"
        )
        return is_made

    def finish(self, folder: RunFolder) -> None:
        """Let rank 0 write the results of the finished run.

        They use the mean of the newest checkpoints that were due; interruptions do not count.
        """
        if not self.mesh.is_first_rank:
            return
        section = self.recipe.train
        due = folder.due(section.checkpoint_every)[-section.average_checkpoints :]
        self.result = self.task.finish(mean_weights(due, self._names), folder.path)

    def close(self) -> None:
        """Close the pipeline and the TensorBoard writer."""
        if self._scalars is not None:
            self._scalars.close()
        self.pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
