"""What a forward keeps may be moved away and back: the same bits, with less in memory."""

import resource
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, OffloadError
from penstock.schedules.names import family_of
from penstock.types import Recompute, Trace, Transport
from tests.distributed.launch import run_python
from tests.every_schedule import divided
from tests.kept import most_kept_bytes, open_file_links, open_files
from tests.reference import plain_step


class Square(nn.Module):
    """Keep its input, and twice a view of its output: one storage, three saved tensors."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * x
        return y * y.flatten().view_as(y)


def kept_bytes(offload: bool, recompute: Recompute, *, num_microbatches: int = 8) -> int:
    layers = [nn.Linear(32, 32), Square(), nn.Linear(32, 32), Square(), nn.Linear(32, 32)]
    options: dict[str, Any] = {"partition": [1, 3, 1], "num_microbatches": num_microbatches}
    options |= {"recompute": recompute, "offload": offload, "schedule": "gpipe"}
    return most_kept_bytes(layers, 64 * num_microbatches, 32, **options)


@pytest.mark.parametrize("recompute", (Recompute.STAGE, Recompute.NEVER))
def test_two_microbatches_are_counted_instead_of_all(recompute: Recompute) -> None:
    one = kept_bytes(offload=False, recompute=Recompute.NEVER, num_microbatches=1)
    assert kept_bytes(offload=False, recompute=Recompute.NEVER) > 6 * one
    kept = kept_bytes(offload=True, recompute=recompute)
    inputs, of_moved = 64 * 32 * 4, 8 * 4  # what is moved leaves 4 bytes behind
    assert kept <= one + (one if recompute is Recompute.NEVER else inputs) + of_moved


def offloading(layers: list[Any], **options: Any) -> penstock.Pipeline:
    """Make a pipeline with a stage for each layer that moves away what they keep."""
    told: dict[str, Any] = {"num_stages": len(layers), "loss": nn.functional.mse_loss}
    told |= {"recompute": Recompute.NEVER}
    usual: dict[str, Any] = {"num_microbatches": 6, "offload": True, "schedule": "gpipe"}
    return penstock.Pipeline(layers, **usual | options, **told)


class Counted(torch.autograd.Function):
    """Save an array whose end is noticed: the memory itself, not what refers to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, live: list[int]) -> Tensor:
        array = numpy.full(x.shape, 2.0, dtype=numpy.float32)
        live[0] += 1
        live.append(live[0])
        weakref.finalize(array, lambda: live.__setitem__(0, live[0] - 1))
        ctx.save_for_backward(torch.from_numpy(array))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class Counting(nn.Module):  # note how many of its saved arrays are in memory
    def __init__(self) -> None:
        super().__init__()
        self.live = [0]

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, Counted.apply(x, self.live))


@pytest.mark.parametrize("offload", [True, False])
def test_the_memory_itself_is_given_back(offload: bool) -> None:
    counting = Counting()
    layers = [nn.Linear(4, 4), counting, nn.Linear(4, 1)]
    pipe = offloading(layers, num_microbatches=8, offload=offload)
    pipe.train_step(torch.ones(8, 4), torch.ones(8, 1))
    now, *seen = counting.live
    assert now == 0 and max(seen) == (1 if offload else 8)


class Failing(nn.Module):  # raise at the fourth call
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4:
            raise ValueError("injected")
        return x.tanh()


def test_a_failed_step_leaves_no_file_behind_and_the_next_one_is_right(tmp_path: Path) -> None:
    failing = Failing()
    layers = [nn.Linear(4, 4), failing, nn.Linear(4, 1)]
    pipe = offloading(layers, offload_folder=tmp_path)
    x, y, before = torch.randn(6, 4), torch.randn(6, 1), open_files()
    with pytest.raises(ValueError, match="injected"):
        pipe.train_step(x, y)
    assert open_files() == before and list(tmp_path.iterdir()) == []
    pipe.zero_grad()
    failing.calls = 10
    pipe.train_step(x, y)
    ours = [p.grad for p in pipe.parameters()]
    pipe.zero_grad()
    plain_step(nn.Sequential(*layers), (x, y), nn.functional.mse_loss, 6)
    for a, b in zip(ours, pipe.parameters(), strict=True):
        assert a is not None and b.grad is not None and torch.allclose(a, b.grad)


class LooksAtFiles(nn.Module):
    """Note the sizes in bytes of the files without a name that are open in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.seen = str(folder), [[0]]

    def forward(self, x: Tensor) -> Tensor:
        ours = (link for link in open_file_links() if str(link.readlink()).startswith(self.folder))
        self.seen.append([link.stat().st_size for link in ours])
        return x.tanh()


@pytest.mark.parametrize("num_microbatches", [6, 24])
def test_each_stage_has_one_file_and_places_in_it_are_used_again(
    num_microbatches: int, tmp_path: Path
) -> None:
    looks, before, rows = LooksAtFiles(tmp_path), open_files(), 16 * num_microbatches
    pipe = offloading(
        [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), looks), *(nn.Linear(8, 8) for _ in range(3))],
        num_microbatches=num_microbatches,
        schedule=penstock.schedules.one_f_one_b,
        offload_folder=tmp_path,
        transport=penstock.Transport.LOOPBACK,
    )
    pipe.train_step(torch.ones(rows, 8), torch.ones(rows, 8))
    assert 1 <= max(map(len, looks.seen)) <= 4
    each = 16 * 8 * 4
    assert 2 * each <= max(map(sum, looks.seen)) <= 4 * 4 * 3 * each  # of four on each stage
    assert open_files() == before


def test_many_microbatches_need_few_open_files(tmp_path: Path) -> None:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    pipe = offloading(layers, num_microbatches=300, offload_folder=tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_file_links()) + 64, hard))
    try:
        pipe.train_step(torch.ones(300, 8), torch.ones(300, 8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_full_store_is_named(tmp_path: Path) -> None:
    program = """
import resource, sys, torch, penstock
from torch import nn
pipe = penstock.Pipeline([nn.Linear(99, 99), nn.Tanh(), nn.Linear(99, 1)], num_stages=2,
    num_microbatches=6, loss=nn.functional.mse_loss, recompute=penstock.Recompute.NEVER,
    schedule="gpipe", offload=True, offload_folder=sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    pipe.train_step(torch.ones(60, 99), torch.ones(60, 1))
except penstock.errors.OffloadError as error:
    print(error)
"""
    done = run_python("-c", program, str(tmp_path))
    said = "cannot move away what it keeps of micro-batch 0: File too large. Give offload_folder="
    assert said in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused_when_the_pipeline_is_made(tmp_path: Path) -> None:
    for offload in (True, False):
        with pytest.raises(ConfigError, match=r"offload_folder=.*No such file or directory"):
            small(offload=offload, offload_folder=tmp_path / "none")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"offload": "yes"}, "offload='yes'; give True or False"),
        ({"offload": [True]}, "offload= has 1 entry, and the pipeline 2 stages"),
        ({"recompute": [Recompute.STAGE]}, "recompute= has 1 entry, and the pipeline 2 stages"),
        ({"recompute": [Recompute.STAGE, "ever"]}, "recompute='ever'; give one of"),
    ],
)
def test_what_is_no_policy_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(**wrong)


def small(**options: Any) -> penstock.Pipeline:
    layers, loss = [nn.Linear(4, 4), nn.Linear(4, 1)], nn.functional.mse_loss
    return penstock.Pipeline(layers, num_stages=2, num_microbatches=4, loss=loss, **options)


class Spoils(nn.Module):  # change in place what its exponential has saved
    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        return y


def test_a_saved_value_that_changes_in_place_is_an_error_as_in_plain_torch() -> None:
    layers = [nn.Linear(4, 4), Spoils(), nn.Linear(4, 1)]
    x, y, words = torch.ones(6, 4), torch.ones(6, 1), "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=words):
        nn.functional.mse_loss(nn.Sequential(*layers)(x), y).backward()
    pipe = offloading(layers)
    with pytest.raises(RuntimeError, match=words):
        pipe.train_step(x, y)


class Remembers(nn.Module):  # keep what it is given and what it gives, as hooks of users do
    def forward(self, x: Tensor) -> Tensor:
        self.seen = [*getattr(self, "seen", []), x.detach().clone()]
        self.kept = [*getattr(self, "kept", []), x]
        self.given = [*getattr(self, "given", []), x.tanh()]
        return self.given[-1]


def test_what_a_layer_has_kept_for_itself_stays_as_it_was() -> None:
    layers = [nn.Linear(4, 4), Remembers(), nn.Linear(4, 1)]
    pipe = offloading(layers)
    pipe.train_step(torch.randn(6, 4), torch.randn(6, 1))
    module: Any = layers[1]
    for seen, kept, given in zip(module.seen, module.kept, module.given, strict=True):
        assert torch.equal(seen, kept) and torch.equal(seen.tanh(), given)


def test_weights_of_a_divided_backward_are_still_left_to_later() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)]
    way = {"schedule": family_of(divided, 6), "transport": Transport.LOOPBACK}
    pipe = offloading(layers, trace=Trace.MEMORY, **way)
    pipe.train_step(torch.ones(6, 8), torch.ones(6, 1))
    words = [str(x) for x in pipe.schedule_for().programs[0]]
    assert {"0H0", "0D0", "0I0", "0W0"} <= {*words}
    order = [words.index(word) for word in ("0F0", "0F0>1", "0H0", "0D0", "0I0", "0W0")]
    assert all(a < b for a, b in pairwise(order))


def test_the_error_is_an_os_error() -> None:
    assert issubclass(OffloadError, OSError)
