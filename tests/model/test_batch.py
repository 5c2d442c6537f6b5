"""What of a batch is cut, what every micro-batch is given whole, and what outputs become."""

from array import array
from collections import UserList, deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import PerSample, Whole
from penstock.errors import BatchError, BoundaryError, OutputWarning
from penstock.model.batch import batch_size, flat_batch, of_size, undeclared

Pair = namedtuple("Pair", "x names")
X = torch.arange(10.0).reshape(5, 2)
NAMES = ["a", "b", "c", "d", "e"]
ABC, DE = NAMES[:3], NAMES[3:]
DICTS = [{"id": n} for n in range(5)]
SCALE, ROW = torch.zeros((), requires_grad=True), torch.zeros(1, requires_grad=True)
NESTED = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)


@dataclass
class Sample:
    x: Any
    names: Any


CUT = [
    pytest.param(NAMES, [["a", "b", "c"], ["d", "e"]], id="a list of strings"),
    pytest.param(tuple(NAMES), [("a", "b", "c"), ("d", "e")], id="a tuple of strings"),
    pytest.param([[1], [2, 3], [4], [], [5]], [[[1], [2, 3], [4]], [[], [5]]], id="lists of ids"),
    pytest.param(DICTS, [DICTS[:3], DICTS[3:]], id="a list of dicts"),
    pytest.param([None] * 5, [[None] * 3, [None] * 2], id="a list of nothing"),
    pytest.param((NAMES, (*range(5),)), [(ABC, (0, 1, 2)), (DE, (3, 4))], id="a tuple of lists"),
    pytest.param({"names": NAMES}, [{"names": ["a", "b", "c"]}, {"names": ["d", "e"]}], id="dict"),
    pytest.param(range(2, 12, 2), [range(2, 8, 2), range(8, 12, 2)], id="a range"),
    pytest.param(deque(NAMES, 9), [deque(NAMES[:3], 9), deque(NAMES[3:], 9)], id="a deque"),
    pytest.param(
        deque([NAMES, Whole(7)]), [deque([ABC, 7]), deque([DE, 7])], id="a deque of lists"
    ),
    pytest.param(Whole(NAMES), [NAMES, NAMES], id="said to be whole"),
    pytest.param(Whole(range(5)), [range(5)] * 2, id="a range said to be whole"),
    pytest.param([Whole(7), NAMES], [[7, ["a", "b", "c"]], [7, ["d", "e"]]], id="beside whole"),
    pytest.param((), [(), ()], id="nothing"),
    pytest.param("strings", ["strings", "strings"], id="a string"),
    *(
        pytest.param(value, [value, value], id=f"{type(value).__name__} of as many entries")
        for value in ("abcde", b"abcde", set(NAMES), torch.Size([1] * 5), numpy.array(5), range(0))
    ),
    pytest.param(torch.Size([7, 7]), [torch.Size([7, 7])] * 2, id="a shape"),
]


def split(value: Any, sizes: list[int]) -> list[Any]:
    return flat_batch(value, "inputs").split(sizes)


@pytest.mark.parametrize("value, parts", CUT)
@pytest.mark.parametrize(
    "around", (lambda v: {"x": X, "v": v}, lambda v: [X, v], lambda v: Pair(X, v))
)
def test_one_entry_per_sample_is_cut_with_the_tensors(around: Any, value: Any, parts: Any) -> None:
    batch = around(value)
    assert batch_size(batch, "inputs") == 5
    found = split(batch, [3, 2])
    for part, x, expected in zip(found, X.split([3, 2]), parts, strict=True):
        assert type(part) is type(batch)
        left, right = part.values() if isinstance(part, dict) else part
        assert torch.equal(left, x) and right == expected


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(numpy.arange(15.0).reshape(5, 3), id="numbers"),
        pytest.param(numpy.array(NAMES), id="strings"),
        pytest.param(numpy.array([None, {}, (), 1, "e"], dtype=object), id="objects"),
    ],
)
def test_arrays_are_cut_like_tensors(array: Any) -> None:
    assert batch_size((X, array), "inputs") == batch_size(array, "targets") == 5
    for part, expected in zip(split((X, array), [2, 3]), (array[:2], array[2:]), strict=True):
        assert numpy.array_equal(part[1], expected)


def test_a_batch_may_be_lists_alone() -> None:
    assert batch_size(NAMES, "targets") == 5
    assert split(Sample(NAMES, 3), [4, 1]) == [Sample(["a", "b", "c", "d"], 3), Sample(["e"], 3)]


def test_a_tensor_for_every_micro_batch_is_said_so() -> None:
    table = torch.randn(3, 4)
    first, second = split({"x": X, "table": Whole(table)}, [4, 1])
    assert first["table"] is second["table"] is table
    assert undeclared((X, Whole(table)))[1] is table


def test_a_tensor_without_dimensions_is_for_every_micro_batch() -> None:
    scale = torch.tensor(2.0)
    assert batch_size({"x": X, "scale": scale}, "inputs") == len(X)
    first, second = split({"x": X, "scale": scale}, [4, 1])
    assert first["scale"] is second["scale"] is scale
    assert of_size((X, scale), 7, "inputs")[1] is scale


@pytest.mark.parametrize(
    "value, message",
    [
        pytest.param((X, ["a", "b"]), r"5 samples and a list of 2 entries.*Whole", id="list"),
        pytest.param({"x": X, "size": (224, 224)}, r"a tuple of 2 entries.*Whole", id="tuple"),
        pytest.param((X, range(2)), r"5 samples and a range of 2 entries.*Whole", id="range"),
        pytest.param((X, deque("ab")), r"5 samples and a deque of 2 entries.*Whole", id="deque"),
        pytest.param((X, deque([X[:4]])), r"\[4, 5\].*Stack", id="a deque of tensors"),
        pytest.param((X, numpy.zeros((3, 5))), r"an array of 3 entries.*Whole", id="array"),
        pytest.param({"a": NAMES, "b": ["a"]}, r"5 samples and a list of 1", id="two lists"),
        pytest.param([torch.zeros(2, 3), torch.zeros(4, 3)], r"\[2, 4\].*Stack", id="ragged"),
        pytest.param({"x": X, "scale": SCALE}, "without dimensions. requires grad", id="a scale"),
        pytest.param(X.to_sparse(), r"sparse or nested.*to_dense.*Whole", id="sparse"),
        pytest.param(NESTED, r"to_padded_tensor", id="nested"),
        pytest.param(Whole(X), "no batch to cut", id="only whole"),
        pytest.param([X, Whole(X)], "a second time", id="both"),
        pytest.param((X, Whole(torch.zeros(1, requires_grad=True))), "requires grad", id="grad"),
        pytest.param((X, PerSample(NAMES[:4])), r"a list of 4 entries", id="too few entries"),
        pytest.param((X, PerSample([ROW] * 5)), "requires grad", id="in entry"),
        pytest.param(numpy.zeros((0, 3)), "empty batch", id="empty"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_remedy(value: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        batch_size(value, "inputs")


class _Named(Sequence[str]):  # a sequence of the user's own
    def __len__(self) -> int:
        return len(NAMES)

    def __getitem__(self, place: Any) -> Any:
        return NAMES[place]


class _Counted:  # likewise, and says so to nobody
    __len__, __getitem__ = _Named.__len__, _Named.__getitem__


@pytest.mark.parametrize(
    "value",
    [_Named(), _Counted(), UserList(NAMES), dict.fromkeys(NAMES).keys(), array("b", range(5))],
    ids=lambda value: type(value).__name__,
)
def test_collections_that_may_have_one_entry_per_sample_are_refused(value: Any) -> None:
    message = rf"type {type(value).__name__} with 5 entries.*list\(value\).*Whole\(value\)"
    with pytest.raises(BatchError, match=message):
        batch_size((X, {"names": value}), "inputs")
        assert batch_size((X[:4], {"names": value}), "inputs") == 4  # of another length: one value
    assert batch_size((X, {"names": Whole(value), "cut": list(value)}), "inputs") == 5
    assert batch_size((X[:1], {"names": array("d", [1.0])}), "inputs") == 1  # nothing to cut


@pytest.mark.parametrize("around", [lambda x: x, lambda x: {"a": (x, "b")}, lambda x: [x, x]])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([torch.zeros(3, 2)] * 3, "a list of 3 Tensors"),
        (deque([torch.zeros(3)] * 3), "a deque of 3 Tensors"),
        ([{"boxes": torch.zeros(3, 4), "labels": torch.zeros(3)}] * 3, "a list of 3 dicts"),
        ([numpy.zeros((3, 2))] * 3, "a list of 3 ndarrays"),
    ],
)
def test_a_list_of_as_many_tensors_as_rows_is_refused_with_both_readings(
    around: Callable[[Any], Any], value: Any, named: str
) -> None:
    said = rf"the targets hold {named} with 3 rows each, .* either way\. "
    said += r".*PerSample\(.*stack\(.*tuple\("
    with pytest.raises(BatchError, match=said):
        batch_size(around(value), "targets")


def test_what_says_that_a_list_holds_batches_is_cut_in_each_of_them() -> None:
    rows = [torch.randn(3, 2) for _ in range(3)]
    for value in (tuple(rows), dict(zip("abc", rows, strict=True)), [*rows, rows[0]]):
        assert batch_size(value, "inputs") == 3
        for part, wanted in zip(split(value, [2, 1]), (slice(2), slice(2, 3)), strict=True):
            found = part["a"] if isinstance(part, dict) else part[0]
            assert torch.equal(found, rows[0][wanted])
    assert batch_size([torch.zeros(1, 2)], "inputs") == 1  # one sample is cut nowhere
    assert batch_size([Whole(7), rows[0], rows[1]], "inputs") == 3


def test_an_iterator_is_refused_as_the_first_micro_batch_would_use_it_up() -> None:
    with pytest.raises(BatchError, match=r"iterator of type generator.*Give list\(value\)"):
        batch_size((X, (name for name in NAMES)), "inputs")
    assert batch_size((X[:1], iter(NAMES)), "inputs") == 1


def test_a_tuple_of_collections_holds_them_and_is_cut_where_they_are() -> None:
    assert split((X, (range(5), range(5, 10))), [2, 3])[1][1] == (range(2, 5), range(7, 10))
    with pytest.raises(BatchError, match="type UserList with 5 entries"):
        batch_size((X, (UserList(NAMES), UserList(NAMES))), "inputs")


class _Gives(nn.Module):  # give a tensor, and beside it what a function makes of it
    def __init__(self, beside: Any) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> Any:
        return {"y": x, "beside": self.beside(x)}


def outputs_of(beside: Any, num_samples: int, num_microbatches: int, call: str) -> Any:
    with penstock.Pipeline(
        [nn.Linear(2, 2), _Gives(beside)], 2, num_microbatches=num_microbatches
    ) as pipe:
        return getattr(pipe, call)(X[:num_samples])


def named(x: Tensor) -> dict[str, Tensor]:
    return {"big" if len(x) > 2 else "small": x}


@pytest.mark.parametrize("call", ("eval_step", "forward"))
@pytest.mark.parametrize(
    "beside, message",
    [
        pytest.param(len, r"output\['beside'\] is 3 .*-batch 0 and 2 .*-batch 1", id="a number"),
        pytest.param(named, r"is \{'big': a tensor .* and \{'small'", id="other keys"),
        pytest.param(lambda x: [x] * len(x), r"output\['beside'\] is \[", id="other length"),
        pytest.param(lambda x: x if len(x) > 2 else None, r"is a tensor of .* None", id="or None"),
        pytest.param(lambda x: (1, Pair(x, str(len(x)))), r"\[1\]\[1\] is '3'", id="deep"),
        pytest.param(lambda x: Sample(x, float(len(x))), r"\.names is 3\.0", id="a field"),
        pytest.param(lambda x: numpy.zeros(len(x)), "array", id="an array"),
    ],
)
def test_outputs_that_differ_in_what_is_no_tensor_are_refused(beside, message, call) -> None:
    with pytest.raises(BoundaryError, match=message) as caught:
        outputs_of(beside, 5, 2, call)
    assert "one row per sample" in str(caught.value)


@pytest.mark.parametrize("call", ("eval_step", "forward"))
def test_constants_that_are_equal_in_all_micro_batches_pass(call: str) -> None:
    constants = {"n": 7, "nan": float("nan"), "name": "x", "list": [1, None], "a": numpy.ones(2)}
    found = outputs_of(lambda x: (dict(constants), Pair(x, "x"), Sample(x, x)), 4, 2, call)
    numbers, pair, sample = found["beside"]
    assert numbers.keys() == constants.keys() and torch.equal(pair.x, found["y"])
    assert torch.equal(sample.names, found["y"])


def test_a_number_that_may_count_the_micro_batch_is_told() -> None:
    with pytest.warns(OutputWarning, match=r"holds the number 2.*not that of the whole batch \(4"):
        assert outputs_of(len, 4, 2, "eval_step")["beside"] == 2
    assert outputs_of(len, 4, 1, "eval_step")["beside"] == 4  # one micro-batch is the whole batch


@pytest.mark.parametrize("call", ("eval_step", "forward"))
def test_objects_of_each_micro_batch_cannot_be_used_as_one(call: str) -> None:
    found = outputs_of(lambda x: torch.Generator(), 4, 2, call)["beside"]
    with pytest.raises(BoundaryError, match=r"holds a Generator, and each micro-batch.*own"):
        found.initial_seed()
    only = torch.Generator()
    assert outputs_of(lambda x: only, 4, 2, call)["beside"] is only


class Scored(nn.Module):
    """Give a loss of the model's own, parts of it in nests, and what has no rows of samples."""

    def __init__(self, *, with_loss: bool) -> None:
        super().__init__()
        self.with_loss, self.linear = with_loss, nn.Linear(2, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        parts = {"parts": {"square": (y**2).mean(), "first": y[:, 0].mean()}}
        flat = {"flat": [torch.cat((y, y)), y[:1]], "sum": y.sum(0)}
        loss = {"loss": (y**2).mean() + y[:, 0].mean()} if self.with_loss else {}
        return loss | parts | flat | {"y": y}


@pytest.mark.parametrize("call", ("eval_step", "forward"))
def test_scalars_beside_a_loss_of_the_model_are_means_over_its_micro_batches(call: str) -> None:
    model = Scored(with_loss=True)
    expected = model(X)
    with penstock.Pipeline([nn.Identity(), model], 2, num_microbatches=2) as pipe:
        found = getattr(pipe, call)(X)
    for name in ("square", "first"):
        torch.testing.assert_close(found["parts"][name], expected["parts"][name])
    if call == "forward":
        (found["parts"]["square"] + 2 * found["y"].sum()).backward()
        ours = [p.grad for p in model.parameters()]
        model.zero_grad()
        (expected["parts"]["square"] + 2 * expected["y"].sum()).backward()
        for gradient, parameter in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("call", ("eval_step", "forward"))
def test_outputs_that_cannot_be_put_together_are_named_when_they_are_used(call: str) -> None:
    model = Scored(with_loss=False)
    with penstock.Pipeline([nn.Identity(), model], 2, num_microbatches=2) as pipe:
        found = getattr(pipe, call)(X)
        torch.testing.assert_close(found["y"], model(X)["y"])
        for name, use in (
            (r"\['flat'\]\[0\]", lambda: found["flat"][0].mean()),
            (r"\['flat'\]\[1\]", lambda: 2.0 * found["flat"][1]),
            (r"\['parts'\]\['square'\]", lambda: found["parts"]["square"] + 1),
            (r"\['sum'\]", lambda: torch.relu(found["sum"])),
        ):
            with pytest.raises(BoundaryError, match=rf"output{name}, for micro-batch 0 .*shape"):
                use()
        alone = getattr(pipe, call)(X[:1])  # one micro-batch is the whole batch
        assert torch.equal(alone["flat"][0], model(X[:1])["flat"][0])
        if call == "forward":
            (found["y"].sum() + alone["flat"][0].sum()).backward()
            assert model.linear.weight.grad is not None
