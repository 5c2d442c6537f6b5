"""What blocks put into lists and dicts that they are given is there on every stage, or refused."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import Pipeline
from penstock.errors import CutError, GlueError
from penstock.model.capture.captured import record_model
from penstock.model.capture.stages import CutModel
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs
from tests.model.capture.any_models.filling import Filling
from tests.model.capture.running import assert_equal, assert_trains_as_whole


def squares(y: Tensor, _target: Any) -> Tensor:
    return y.square().mean()


class Grow(nn.Linear):  # adds what it computes to whatever it is given
    def forward(self, x: Tensor, found: Any) -> Any:  # type: ignore[override]
        y = super().forward(x)
        match found:
            case Kept():
                found.value = y
            case set():
                found.add(y)
            case Named():
                found.name = "grown"
            case {}:
                return y, found.setdefault("made", [y])
            case first, *_ if isinstance(first, list):
                first.append(y)
            case _:
                found.append(y)
        return y


@dataclass
class Kept:
    value: Tensor | None = None


class Given(Chain):  # gives its blocks a list, or what it is made with
    found: list[Tensor]

    def __init__(self, given: Callable[[], Any] = list) -> None:
        super().__init__()
        self.given = given

    kinds = (Grow,) * 3

    def forward(self, x: Tensor) -> Tensor:
        found = self.given()
        for block in self.blocks:
            x = block(x, found)
        return x + torch.stack(found[:2]).sum(0) if type(found) is list else x


class Named(list[Tensor]):
    name = "none"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: [[]] * 2, r"'blocks\.0' changes a list that it was given .* only once in a call"),
        (Kept, r"'blocks\.0' changes a Kept that it was given .*Return"),
        (set, r"'blocks\.0' changes a set that it was given .*a list or a dict"),
        (Named, r"'blocks\.0' changes a Named that it was given .*Return"),
        (dict, r"'blocks\.0' makes a list and gives it in two places .* a copy"),
    ],
)
def test_what_only_one_stage_would_see_is_refused(given: Callable[[], Any], message: str) -> None:
    with pytest.raises(CutError, match=message):
        penstock.capture(Given(given), inputs(), check=False)


def test_a_list_of_the_models_own_is_refused() -> None:
    message = "the forward of the model itself changes its 'found'.* local variable"
    model = Given(lambda: model.found)
    model.found = []
    with pytest.raises(CutError, match=message):
        penstock.capture(model, inputs(), check=False)


class Default(Given):  # grows the default value of an argument, which is one object for all calls
    def forward(self, x: Tensor, found: list[Tensor] = []) -> Tensor:  # noqa: B006 - on purpose
        for block in self.blocks:
            x = block(x, found)
        return x


def test_a_default_value_that_grows_with_each_forward_is_refused() -> None:
    with pytest.raises(GlueError, match=r"of another micro-batch is read .* local variables"):
        penstock.capture(Default(), inputs(), check=False)


class Count(nn.Linear):  # counts itself in a list, and multiplies by its number
    def forward(self, x: Tensor, numbers: list[int]) -> Tensor:  # type: ignore[override]
        if self.training or not hasattr(self, "only_in_training"):
            numbers.append(len(numbers) + 1)
        return super().forward(x) * len(numbers)


class Cleared(Chain):  # clears at its end a list that it keeps, which is then as before
    kinds = (Count,) * 3

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x, self.numbers)

    def through(self, x: Tensor, numbers: list[int]) -> Tensor:
        for block in self.blocks:
            x = block(x, numbers)
        x = x * sum(numbers)
        numbers.clear()
        return x


class ClearedDefault(Cleared):
    def forward(self, x: Tensor, numbers: list[int] = []) -> Tensor:  # noqa: B006 - on purpose
        return self.through(x, numbers)


NUMBERS: list[int] = []


class ClearedGlobal(Cleared):
    def forward(self, x: Tensor) -> Tensor:
        return self.through(x, NUMBERS)


class ClearedInTraining(Cleared):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.only_in_training = True  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Cleared, ClearedDefault, ClearedGlobal, ClearedInTraining])
def test_a_list_that_outlives_the_forward_may_not_be_changed_by_blocks(kind: type[Chain]) -> None:
    message = r"'blocks\.0' changes a list that outlives the model's forward.* inside the forward"
    with pytest.raises(CutError, match=message):
        penstock.capture(kind(), inputs(), check=False)


class OfTheCaller(Cleared):
    def forward(self, x: Tensor, numbers: list[int]) -> Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x, numbers)
        return x * sum(numbers)


@pytest.mark.parametrize("where", ["first", "everywhere"])
def test_a_list_in_the_example_stays_as_it_is(where: str) -> None:
    model, numbers = OfTheCaller(), [5]
    expected = copy.deepcopy(model)(inputs(2), [5])
    layers = penstock.capture(model, (inputs(2), penstock.Whole(numbers)), inputs=where)
    with Pipeline(
        layers, num_stages=3, loss=squares, threads_per_stage=1, num_microbatches=1
    ) as pipe:
        found = pipe.eval_step(inputs(2), penstock.Whole(numbers))
    assert numbers == [5]
    assert_equal({"output": found}, {"output": expected})


class Scaled(Chain):  # is given a list with an attribute
    def forward(self, xs: Any) -> Tensor:
        return super().forward(xs[0]) * len(xs.name)


def test_a_list_of_the_users_class_keeps_its_attributes() -> None:
    model, given = Scaled(), Named([inputs(4)])
    given.name = "longer"
    expected, layers = copy.deepcopy(model)(given), penstock.capture(model, given)
    with Pipeline(
        layers, num_stages=2, loss=squares, threads_per_stage=1, num_microbatches=1
    ) as pipe:
        assert_equal({"output": pipe.eval_step(given)}, {"output": expected})


class Frozen(dict[str, float]):  # refuses changes, as the configurations of some libraries do
    def __setitem__(self, name: str, value: float) -> None:
        raise TypeError(name)


class Scale(nn.Linear):
    def forward(self, x: Tensor, settings: Frozen) -> Tensor:  # type: ignore[override]
        return super().forward(x) * settings["scale"]


class Settings(Chain):  # gives its blocks a dict that cannot be changed
    kinds = (Scale,) * 3

    def forward(self, x: Tensor, settings: Frozen) -> Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x, settings)
        return x


@pytest.mark.parametrize("where", ["first", "everywhere"])
def test_a_dict_that_refuses_changes_is_given_to_blocks_as_it_is(where: str) -> None:
    model, settings = Settings(), Frozen(scale=2.0)
    expected = copy.deepcopy(model)(inputs(2), settings)
    layers = penstock.capture(model, (inputs(2), penstock.Whole(settings)), inputs=where)
    with Pipeline(
        layers, num_stages=3, loss=squares, threads_per_stage=1, num_microbatches=1
    ) as pipe:
        found = pipe.eval_step(inputs(2), penstock.Whole(settings))
    assert_equal({"output": found}, {"output": expected})


class Replace(nn.Linear):
    def forward(self, xs: list[Tensor]) -> None:  # type: ignore[override]
        xs[0] = super().forward(xs[0]).tanh()


class Rerun(Chain):  # has its blocks in checkpoints, or not
    within: Any = staticmethod(lambda block, xs: block(xs))

    kinds = (Replace,) * 3

    def forward(self, x: Tensor) -> Tensor:
        xs = [x]
        for block in self.blocks:
            self.within(block, xs)
        return xs[0]


class RerunInCheckpoint(Rerun):
    within = staticmethod(partial(checkpoint, use_reentrant=False))


def test_a_checkpoint_runs_a_block_again_on_the_list_as_it_was() -> None:
    model, whole = RerunInCheckpoint(), Rerun()
    whole.load_state_dict(model.state_dict())
    check = False  # torch alone gives it the changed list
    assert_trains_as_whole(model, inputs(), whole=whole, check=check, num_stages=2)


def test_other_stages_are_told_of_a_filled_list_in_the_same_words_each_time() -> None:
    model = Filling()
    cut = CutModel(record_model(model, inputs()), (2, 2))
    one, other = (cut.run_stage(0, ((inputs(),), {}), {}).told for _ in range(2))
    assert one is other and one is not None
    told = pickle.loads(pickle.dumps(one)).header
    assert [event.name for event in told.values()] == [event.name for event in one.header.values()]


class ReplaceAndReturn(Replace):
    def forward(self, xs: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        super().forward(xs)
        return xs


class Returned(Rerun):  # its blocks return the list that they change
    kinds = (ReplaceAndReturn,) * 3


def test_what_is_kept_of_a_block_is_the_list_as_that_block_gave_it() -> None:
    model = Returned()
    layers = penstock.capture(model, inputs(), keep=["blocks.0"])
    with Pipeline(
        layers, num_stages=3, loss=squares, threads_per_stage=1, num_microbatches=1
    ) as pipe:
        _, kept = pipe.eval_step(inputs())
    with torch.no_grad():
        expected = model.blocks[0]([inputs()])[0]
    assert_equal({"kept": kept["blocks.0"][0]}, {"kept": expected})


def test_a_model_without_values_is_captured_with_the_lists_that_its_blocks_fill() -> None:
    with torch.device("meta"):
        empty = Filling()
    layers = penstock.capture(empty, inputs())
    assert [step.name for step in layers] == [f"blocks.{n}" for n in range(4)]


class ByForward(Chain):  # calls the forward of a block itself, in which a count goes up
    def __init__(self) -> None:
        super().__init__()
        norms = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3))
        self.blocks = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.forward(x)
        return x


def test_a_block_whose_forward_is_called_directly_runs_on_its_stage_only() -> None:
    layers = penstock.capture(ByForward(), inputs())
    assert [step.name for step in layers] == [f"blocks.{n}" for n in range(3)]
    assert_trains_as_whole(ByForward(), inputs())
