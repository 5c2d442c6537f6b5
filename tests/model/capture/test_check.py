"""How much of the example the comparison with the whole model takes, and what it finds."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CheckError
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs

SIZES: list[int] = []


class Recording(Chain):  # notes how many samples the model as it is was trained on
    def between(self, x: Tensor, _number: int) -> Tensor:
        if type(x) is Tensor and x.requires_grad:  # the model as it is, not a stage of it
            SIZES.append(len(x))
        return x


class Contrasting(Recording):  # compares the samples: of one there is nothing to learn
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x - x.mean(0)


class Normalised(Recording):  # refuses one sample in training
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = nn.BatchNorm1d(WIDTH)


class OfOneSize(Recording):  # works for three samples only
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(3, WIDTH))


class Spreading(Recording):  # divides by a number of samples that is zero for one
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (x.var(0, keepdim=True) + 0)


class OneByOne(Recording):  # takes another way between its blocks for another number of samples
    def between(self, x: Tensor, number: int) -> Tensor:
        return torch.stack([row * 2 for row in super().between(x, number).unbind()])


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (Recording, 1),
        (Contrasting, 2),
        (Normalised, 2),
        (Spreading, 2),
        (OfOneSize, 3),
        (OneByOne, 3),
    ],
)
def test_the_proof_takes_as_many_samples_as_show_gradients(kind: Any, size: int) -> None:
    SIZES.clear()
    layers = penstock.capture(kind(), inputs(batch=3))
    assert "outputs and gradients over 3 stages are the model's, to the bit" in str(layers)
    assert SIZES[-1] == size


class Drawing(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


def test_stages_draw_in_the_proof_as_the_model_does() -> None:
    layers = penstock.capture(Drawing(), inputs(batch=64))
    assert "over 3 stages are the model's, to the bit" in str(layers)


class Written(nn.Linear):  # returns a tensor that was written to
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(2)


class Wrong(nn.Linear):
    """Reads in one mode how often its input was written to: on another stage that is not known."""

    def __init__(self, is_wrong_in_training: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_wrong_in_training = is_wrong_in_training

    def forward(self, x: Tensor) -> Tensor:
        is_wrong = self.training == self.is_wrong_in_training
        return super().forward(x) + (x._version if is_wrong else 0)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_cut_model_that_is_wrong_in_one_mode_is_refused(is_training: bool) -> None:
    model = Chain()
    model.blocks = nn.ModuleList([Written(WIDTH, WIDTH), Wrong(is_training)])
    with pytest.raises(CheckError, match="output 0 differs by"):
        penstock.capture(model, inputs())


NOISE = torch.Generator().manual_seed(0)


class AddNoise(torch.autograd.Function):
    """Returns its input, and its gradient with noise that no seed of torch's repeats."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float) -> Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + ctx.size * torch.randn(gradient.shape, generator=NOISE), None


class Shifted(nn.Linear):
    """Has a parameter whose gradient is zero but for noise, as the bias of attention's keys."""

    def __init__(self, noise: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.shift, self.noise = nn.Parameter(torch.ones(WIDTH)), noise

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * AddNoise.apply(self.shift, self.noise)

    def extra_repr(self) -> str:
        return f"{self.noise}"


class WrongBackward(nn.Linear):
    """Gives a parameter a gradient that depends on where the model is cut, `share` of others."""

    def __init__(self, share: float, noise: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.offset, self.share, self.noise = nn.Parameter(torch.zeros(WIDTH)), share, noise

    def forward(self, x: Tensor) -> Tensor:
        offset = AddNoise.apply(self.offset, self.noise)
        return super().forward(x) + offset * (self.share * (1 + x._version))


ROUNDED = 1e-7


def noisy(noise: float, last: nn.Module) -> Chain:
    model = Chain()
    model.blocks = nn.ModuleList([Shifted(noise), Written(WIDTH, WIDTH), last])
    return model


def test_a_model_whose_gradients_differ_by_rounding_each_time_is_checked() -> None:
    layers = penstock.capture(noisy(ROUNDED, nn.Linear(WIDTH, WIDTH)), inputs())
    assert "are the model's, but for rounding (the gradient of 'blocks.0.shift')" in str(layers)


@pytest.mark.parametrize(
    ("share", "noise", "of"),
    [(1e-8, 0.0, "its largest value"), (1.0, ROUNDED, "the largest value of its kind")],
)
def test_among_such_gradients_a_wrong_one_is_refused(share: float, noise: float, of: str) -> None:
    model = noisy(ROUNDED, WrongBackward(share, noise))
    with pytest.raises(CheckError, match=rf"'blocks\.2\.offset' differs by \S+ of {of}"):
        penstock.capture(model, inputs())


def test_a_model_whose_gradients_differ_by_more_each_time_is_not_called_checked() -> None:
    with pytest.warns(UserWarning, match="gives other bits each time, in evaluation mode too"):
        layers = penstock.capture(noisy(1e-2, nn.Linear(WIDTH, WIDTH)), inputs())
    assert "not checked: the model gives other bits each time" in str(layers)
