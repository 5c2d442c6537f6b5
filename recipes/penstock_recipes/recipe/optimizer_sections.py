"""The optimizers and learning rate schedules of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .section import Above0, Count, From0, Mark, Section, Share


class _Optimizer(Section):
    """The keys of all optimizers."""

    lr: Above0
    """Highest learning rate, reached after the warm-up."""


class AdamW(_Optimizer):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]
    """adamw."""
    weight_decay: From0 = 0.01
    """Decoupled weight decay per step, times the learning rate."""
    beta1: Share = 0.9
    """Decay of the mean of the gradient."""
    beta2: Share = 0.999
    """Decay of the mean of its square."""
    eps: Above0 = 1e-8
    """Added to the denominator."""


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]
    """sgd."""
    momentum: Share = 0.9
    """Decay of the mean of the gradients."""
    nesterov: bool = False
    """Look ahead by one step of momentum."""
    weight_decay: From0 = 0.0
    """Share of a weight that is added to its gradient."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("optimizer.nesterov = true needs optimizer.momentum above 0")
        return self


class RMSProp(_Optimizer):
    """TensorFlow's RMSProp, with which AmoebaNet was trained."""

    name: Literal["rmsprop"]
    """rmsprop."""
    decay: Share = 0.9
    """Decay of the mean of the squared gradient."""
    momentum: Share = 0.9
    """Decay of the mean of the steps."""
    eps: Above0 = 0.1
    """Added to the squared gradient, under the root."""
    weight_decay: From0 = 4e-5
    """Share of a weight that is added to its gradient; not for norms and biases."""


class Adafactor(Section):
    """Adafactor (Shazeer and Stern 2018): a row and a column of second moments for each matrix."""

    name: Literal["adafactor"]
    """adafactor."""
    lr: Above0
    """Highest learning rate, reached after the warm-up; relative to each weight's own size."""
    beta2_decay: Annotated[float, Field(lt=0)] = -0.8
    """The second moments remember 1 - step ** beta2_decay."""
    clip: Above0 = 1.0
    """Steps of one tensor are scaled down to this root mean square."""
    weight_decay: From0 = 0.0
    """Decoupled weight decay per step, times the learning rate."""


class _InEpochs(Section):
    """The keys of all schedules in epochs."""

    warmup_epochs: From0 = 0.0
    """Epochs of linear warm-up from near zero to optimizer.lr; at most the run's epochs."""
    epochs: Annotated[Count | None, Mark.LENGTH] = None
    """Epochs that the learning rate, and drop-path, are made for; the epochs after them keep the
    final values.  Left out: train.epochs, also when a resumed run gets more of them."""


class Cosine(_InEpochs):
    """Linear warm-up, then cosine decay."""

    name: Literal["cosine"] = "cosine"
    """cosine: decay to a share of the peak at the end of the last epoch."""
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final share of optimizer.lr."""


class Exponential(_InEpochs):
    """Linear warm-up, then exponential decay in steps, as AmoebaNet's."""

    name: Literal["exponential"]
    """exponential: multiply by a factor after every `every_epochs`."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.97
    """Factor of the learning rate."""
    every_epochs: Above0 = 2.0
    """Epochs between two multiplications."""
    final_share: Annotated[float, Field(ge=0, le=1)] = 1e-4
    """Least share of optimizer.lr."""


class InverseSqrt(Section):
    """Linear warm-up, then decay by the inverse square root of the step (the Transformer's)."""

    name: Literal["inverse_sqrt"]
    """inverse_sqrt: halved when the number of steps is four times as high."""
    warmup_steps: Count = 4000
    """Steps of linear warm-up from near zero to optimizer.lr."""


Optimizer = AdamW | SGD | RMSProp | Adafactor
LearningRate = Cosine | Exponential | InverseSqrt
