"""A list whose entries hold tensors of sizes of their own has one entry per sample."""

import copy
import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import PerSample
from penstock.errors import BatchError
from penstock.model.batch import batch_size, flat_batch, undeclared

X = torch.arange(10.0).reshape(5, 2)
BOXES = [{"classes": torch.arange(n), "boxes": torch.randn(n, 4)} for n in (2, 0, 3)]
EVEN = [torch.randn(3, 2) for _ in range(3)]


@pytest.mark.parametrize(
    ("around", "place", "rows"),
    [
        pytest.param(lambda v: {"v": v, "n": X[:3]}, "v", BOXES, id="beside a tensor"),
        pytest.param(lambda v: [X[:3], v], 1, BOXES, id="in a list beside a tensor"),
        pytest.param(lambda v: (["a"] * 3, v), 1, BOXES, id="beside a list of strings"),
        pytest.param(lambda v: (X[:3], v), 1, [t[:2] for t in EVEN], id="of as many other rows"),
        pytest.param(lambda v: (X[:3], v), 1, [[t[:1], t] for t in EVEN], id="lists"),
        pytest.param(lambda v: {"v": PerSample(v)}, "v", EVEN, id="said so, of as many rows"),
        pytest.param(lambda v: (PerSample(v), 7), 0, BOXES, id="said so, alone"),
    ],
)
@pytest.mark.parametrize("kind", (list, deque))
def test_a_list_whose_entries_have_other_sizes_has_one_entry_per_sample(
    around: Callable[[Any], Any], place: Any, rows: Any, kind: Any
) -> None:
    batch = around(kind(rows))
    flat = flat_batch(batch, "inputs")
    assert flat.num_samples == 3
    for part, wanted in zip(flat.split([2, 1]), (rows[:2], rows[2:]), strict=True):
        assert type(part[place]) is kind and len(part[place]) == len(wanted)
        assert all(map(operator.is_, part[place], wanted))
    assert undeclared(batch)[place] == kind(rows)


def test_targets_of_other_sizes_are_read_by_the_number_of_inputs() -> None:
    assert batch_size(BOXES, "targets", 3) == 3
    with pytest.raises(BatchError, match=r"\[0, 2, 3\].*PerSample"):  # nothing tells how many
        batch_size(BOXES, "targets")
    with pytest.raises(BatchError, match=r"\[0, 2, 3\]"):
        batch_size(BOXES, "targets", 4)
    lists = [EVEN[0], [t[:2] for t in EVEN], EVEN[1]]  # a batch in each, or a sample
    with pytest.raises(BatchError, match=r"either way.*PerSample\(list\).*tuple\(list\)"):
        batch_size(lists, "targets", 3)
    assert batch_size(tuple(lists), "targets", 3) == 3


class _Detects(nn.Module):  # find as many boxes as each sample has; with labels, the loss as well
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 4)])

    def forward(self, hints: Any, x: Tensor, labels: Any = None) -> Any:
        hidden = torch.tanh(self.body[0](x)) + torch.stack([hint.sum() for hint in hints])[:, None]
        found = self.body[1](hidden)
        return found if labels is None else {"loss": _misses(found, labels), "found": found}


def _misses(found: Tensor, labels: Any) -> Tensor:
    """Give the mean over the samples, each of which has boxes of its own."""
    assert len(found) == len(labels)
    each = [((f - row["boxes"]) ** 2).sum() for f, row in zip(found, labels, strict=True)]
    return torch.stack(each).mean()


@pytest.mark.parametrize("num_microbatches", (1, 2, 3))
@pytest.mark.parametrize("labels_are_inputs", (False, True))
@pytest.mark.parametrize("call", ("train_step", "forward"))
def test_boxes_of_each_sample_train_as_in_a_plain_loop(
    num_microbatches: int, labels_are_inputs: bool, call: str
) -> None:
    torch.manual_seed(0)
    model, hints = _Detects(), [torch.ones(n + 1) / 8 for n in range(3)]
    x, own = X[:3].clone().requires_grad_(), X[:3].clone().requires_grad_()
    sizes = {1: [3], 2: [2, 1], 3: [1, 1, 1]}[num_microbatches]
    expected, whole = torch.zeros(()), copy.deepcopy(model)
    for start, size in zip((0, sizes[0], 2), sizes, strict=False):
        part = slice(start, start + size)
        term = _misses(whole(hints[part], own[part]), BOXES[part]) * (size / 3)
        term.backward()
        expected = expected + term.detach()
    given = {"hints": hints, "x": x, **({"labels": BOXES} if labels_are_inputs else {})}
    options: dict[str, Any] = {"num_stages": 2, "example_inputs": given}
    options |= {"num_microbatches": num_microbatches}
    options |= {"loss": None if labels_are_inputs else _misses, "threads_per_stage": 1}
    with penstock.Pipeline(model, **options) as pipe:
        if call == "train_step":
            loss = pipe.train_step(given, *([] if labels_are_inputs else [BOXES]))
        else:
            output = pipe(**given)
            loss = output["loss"] if labels_are_inputs else _misses(output, BOXES)
            loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(x.grad, own.grad)
    for found, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
