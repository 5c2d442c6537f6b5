"""A mixture of experts: each position goes to the two experts that its gate likes best.

Shapes: B sequences, each a group with places of its own, T positions, D channels, E experts, P
places of an expert in a group.  All of them are known beforehand, whatever the gate decides.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock_recipes.zoo.attention import Activation
from penstock_recipes.zoo.drawn import Draw, Draws, Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """The sizes of a mixture; `capacity_factor` says how many places there are for each position.

    An expert has places for 2 * T / E positions of a group, which are enough if all experts are
    liked equally, times the factor, rounded up.
    """

    width: int
    ff_width: int
    num_experts: int
    capacity_factor: float
    random_second: bool

    def places(self, length: int) -> int:
        """Count the places of each expert for a sequence of `length` positions."""
        return math.ceil(self.capacity_factor * 2 * length / self.num_experts)


@dataclass(frozen=True, slots=True)
class Choice:
    """One expert for each position, and how much it counts."""

    expert_BT: Tensor
    weight_BT: Tensor
    is_chosen_BTE: Tensor
    """1 for the expert, if the position goes to one; else 0."""


class ExpertLinear(nn.Module):
    """A linear layer for each expert: weights (E, in, out), biases (E, 1, out)."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(num_experts, 1, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of each expert as those of a layer of its own; biases start at 0."""
        for weight in self.weight.detach().mT:
            self.draw(weight)
        nn.init.zeros_(self.bias)

    def forward(self, rows_ENI: Tensor) -> Tensor:
        """Compute (E, N, out) for (E, N, in)."""
        return torch.baddbmm(self.bias, rows_ENI, self.weight)


class Experts(nn.Module):
    """Feed-forward layers with parameters of their own, all run at once."""

    def __init__(self, shape: MixtureShape, draws: Draws, activation: Activation) -> None:
        super().__init__()
        number, width, wide = shape.num_experts, shape.width, shape.ff_width
        self.widen = ExpertLinear(number, width, wide, draws.read)
        self.activation = activation
        self.narrow = ExpertLinear(number, wide, width, draws.write)

    def forward(self, rows_ENI: Tensor) -> Tensor:
        """Compute (E, N, D) for (E, N, D): each expert has its own rows."""
        result: Tensor = self.narrow(self.activation(self.widen(rows_ENI)))
        return result


class Mixture(nn.Module):
    """Experts under a top-2 gate with limited places (GShard, algorithm 1).

    Each place holds at most one position and each position has at most two places, so that no
    gradient is a sum of more than two terms beside zeros, whose order cannot matter.  Everything
    that decides who goes where is a whole number.  Results are therefore the same to the bit in
    every run.
    """

    def __init__(self, shape: MixtureShape, draws: Draws, activation: Activation) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Linear(shape.width, shape.num_experts, draws.read, bias=False)
        self.experts = Experts(shape, draws, activation)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what the experts add, 0 where a position has no place, and the balance loss."""
        gates_BTE = self._gates(x_BTD)
        first, second = choose(gates_BTE)
        balance = balance_loss(gates_BTE, first)
        second = _by_chance(second, is_random=self.training and self.shape.random_second)
        places = self.shape.places(x_BTD.shape[1])
        slots_BT2 = find_slots(first, second, places)
        weights_BT2 = torch.stack((first.weight_BT, second.weight_BT), dim=2).to(x_BTD.dtype)
        return self._run_experts(x_BTD, slots_BT2, weights_BT2, places), balance

    def _gates(self, x_BTD: Tensor) -> Tensor:
        """Compute each expert's gate, at least in float32, autocast or not, as GShard."""
        precise = torch.promote_types(x_BTD.dtype, torch.float32)
        with without_autocast(x_BTD.device):
            return F.linear(x_BTD.to(precise), self.gate.weight.to(precise)).softmax(dim=2)

    def _run_experts(
        self, x_BTD: Tensor, slots_BT2: Tensor, weights_BT2: Tensor, places: int
    ) -> Tensor:
        """Gather the rows of all slots, run the experts on them, and gather what they found.

        Slots that stay empty have the first row, and who has no place looks at the last slot with
        a weight of 0: nothing comes of either.
        """
        batch, length, _ = x_BTD.shape
        num_slots = self.shape.num_experts * places
        slots_BN = slots_BT2.flatten(1)
        positions_N = torch.arange(length, device=x_BTD.device).repeat_interleave(2)
        nobody_BS = positions_N.new_zeros(batch, num_slots + 1)
        who_BS = nobody_BS.scatter(1, slots_BN, positions_N.expand(batch, -1))[:, :-1]
        rows_BEPD = _rows(x_BTD, who_BS).unflatten(1, (-1, places))
        # (E, B * P, D): where experts are cut, this is where rows change hands
        found_END = self.experts(rows_BEPD.transpose(0, 1).flatten(1, 2))
        found_BEPD = found_END.unflatten(1, (batch, places)).transpose(0, 1)
        found_BND = _rows(found_BEPD.flatten(1, 2), slots_BN.clamp(max=num_slots - 1))
        weights_BT2 = weights_BT2.masked_fill(slots_BT2 == num_slots, 0.0)
        return (found_BND.view(batch, length, 2, -1) * weights_BT2.unsqueeze(3)).sum(2)


def _rows(x_BTD: Tensor, which_BN: Tensor) -> Tensor:
    """Take these rows of each group: (B, N, D)."""
    return x_BTD.gather(1, which_BN.unsqueeze(2).expand(-1, -1, x_BTD.shape[2]))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in the types that are there; the meta device knows no autocast."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def choose(gates_BTE: Tensor) -> tuple[Choice, Choice]:
    """Choose the two experts that each position likes best; their weights add up to 1."""
    experts_E = torch.arange(gates_BTE.shape[2], device=gates_BTE.device)
    first_BT = gates_BTE.argmax(2)
    is_first_BTE = first_BT.unsqueeze(2) == experts_E
    second_BT = gates_BTE.masked_fill(is_first_BTE, -1.0).argmax(2)
    is_second_BTE = second_BT.unsqueeze(2) == experts_E
    like_first_BT = gates_BTE.gather(2, first_BT.unsqueeze(2)).squeeze(2)
    like_second_BT = gates_BTE.gather(2, second_BT.unsqueeze(2)).squeeze(2)
    both_BT = like_first_BT + like_second_BT
    return (
        Choice(first_BT, like_first_BT / both_BT, is_first_BTE.long()),
        Choice(second_BT, like_second_BT / both_BT, is_second_BTE.long()),
    )


def balance_loss(gates_BTE: Tensor, first: Choice) -> Tensor:
    """Return 1 where all experts are liked equally, and up to E where all like one.

    It is E times the sum over experts of (share of positions whose first choice it is) times
    (mean gate), the mean over groups: GShard's section 2.2 divides by E, where lingvo's code and
    later papers multiply, so that one weight suits every number of experts.  The share has no
    gradient; the mean gate has.
    """
    share_BE = first.is_chosen_BTE.to(gates_BTE.dtype).mean(1)
    return gates_BTE.shape[2] * (share_BE * gates_BTE.mean(1)).sum(1).mean()


def find_slots(first: Choice, second: Choice, places: int) -> Tensor:
    """Compute the slots of both choices, (B, T, 2); without a place, the number of all slots.

    An expert's places are taken in order of position, by first choices before all second ones.
    The slots of a group are numbered by expert, then place.
    """
    taken_BE = first.is_chosen_BTE.sum(1)
    first_place_BT = _place(first)
    second_place_BT = _place(second) + taken_BE.gather(1, second.expert_BT)
    slots = []
    for choice, place_BT in ((first, first_place_BT), (second, second_place_BT)):
        slot_BT = choice.expert_BT * places + place_BT
        has_place_BT = (place_BT < places) & (choice.is_chosen_BTE.sum(2) > 0)
        slots.append(slot_BT.where(has_place_BT, taken_BE.shape[1] * places))
    return torch.stack(slots, dim=2)


def _place(choice: Choice) -> Tensor:
    """Count the positions of the group that come before and chose the same expert: (B, T)."""
    before_BTE = choice.is_chosen_BTE.cumsum(1) - choice.is_chosen_BTE
    return before_BTE.gather(2, choice.expert_BT.unsqueeze(2)).squeeze(2)


def _by_chance(second: Choice, *, is_random: bool) -> Choice:
    """Keep second choices with a chance of twice their weight, as GShard does in training; all of
    them where it is not random, by the same calls: those of which a plan of shards knows.
    """
    chance = torch.rand_like if is_random else torch.zeros_like
    is_kept_BT = chance(second.weight_BT) <= 2 * second.weight_BT
    return Choice(
        second.expert_BT, second.weight_BT, second.is_chosen_BTE * is_kept_BT.unsqueeze(2)
    )
