"""The learning rate as a function of the step: a resumed run needs no scheduler state."""

import math
from dataclasses import dataclass

from torch.optim import Optimizer

from penstock_recipes.recipe.optimizer_sections import (
    Cosine,
    Exponential,
    InverseSqrt,
    LearningRate,
)
from penstock_recipes.recipe.recipe import Recipe


def learning_rate(
    section: LearningRate, step: int, *, peak: float, steps_per_epoch: int, epochs: int
) -> float:
    """Compute the learning rate of `step` (from 0).

    A warm-up longer than the run is shortened to the run's steps.
    """
    match section:
        case Cosine():
            return warmup_cosine(
                step,
                num_steps=epochs * steps_per_epoch,
                warmup_steps=_warmup_steps(section, steps_per_epoch, epochs),
                peak=peak,
                final_share=section.final_share,
            )
        case Exponential():
            warmup_steps = _warmup_steps(section, steps_per_epoch, epochs)
            if step < warmup_steps:
                return peak * (step + 1) / warmup_steps
            times = math.floor(step / steps_per_epoch / section.every_epochs)
            return peak * max(section.factor**times, section.final_share)
        case InverseSqrt(warmup_steps=warmup_steps):
            number = step + 1
            return peak * min(number / warmup_steps, math.sqrt(warmup_steps / number))


def _warmup_steps(section: Cosine | Exponential, steps_per_epoch: int, epochs: int) -> int:
    return round(min(section.warmup_epochs, epochs) * steps_per_epoch)


def warmup_cosine(
    step: int, *, num_steps: int, warmup_steps: int, peak: float, final_share: float
) -> float:
    """Compute a linear warm-up to `peak`, then a cosine decay to `final_share` of it.

    Steps count from 0; step number `num_steps` would have the final rate.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * (
        final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    )


@dataclass(slots=True)
class Rates:
    """Sets the learning rate of a run in its optimizer; `step` works as torch's schedulers do."""

    recipe: Recipe
    optimizer: Optimizer
    steps_per_epoch: int
    _number: int = 0

    @property
    def num_steps(self) -> int:
        """Steps that the learning rate is made for: those of the run, unless a key says others."""
        return self.recipe.rate_epochs * self.steps_per_epoch

    def of(self, step: int) -> float:
        """Return the learning rate of a step."""
        return learning_rate(
            self.recipe.learning_rate,
            step,
            peak=self.recipe.optimizer.lr,
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.recipe.rate_epochs,
        )

    def set(self, step: int) -> None:
        """Set the learning rate of a step."""
        self._number = step
        for group in self.optimizer.param_groups:
            group["lr"] = self.of(step)

    def step(self) -> None:
        """Set the learning rate of the next step."""
        self.set(self._number + 1)
