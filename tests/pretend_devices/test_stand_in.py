"""The pretended GPUs find what a real GPU would let go wrong, and nothing else."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .install import pretended_devices
from .memory import Memory


def on_stream(stream: Any, work: Callable[..., Any], *tensors: Tensor) -> Any:
    with torch.cuda.stream(stream):
        return work(*tensors)


def made_on(stream: Any) -> Tensor:
    return on_stream(stream, lambda: torch.zeros(4, device="cuda:0").add_(1))


def two_streams() -> tuple[Any, Any]:
    return torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:0")


def by_stream(one: Any, other: Any) -> None:
    other.wait_stream(one)


def by_event(one: Any, other: Any) -> None:
    event = torch.cuda.Event()
    event.record(one)
    other.wait_event(event)


def by_third_stream(one: Any, other: Any) -> None:
    third = torch.cuda.Stream("cuda:1")
    third.wait_stream(one)
    other.wait_stream(third)


def by_host(one: Any, other: Any) -> None:
    one.synchronize()


def by_device(one: Any, other: Any) -> None:
    torch.cuda.synchronize("cuda:0")


def by_early_event(one: Any, other: Any) -> None:
    other.wait_event(torch.cuda.Event())


def by_wrong_way(one: Any, other: Any) -> None:
    one.wait_stream(other)


def by_item(one: Any, other: Any) -> None:
    on_stream(one, lambda: torch.ones((), device="cuda:0").item())


WAITS = (by_stream, by_event, by_third_stream, by_host, by_device, by_item)
NO_WAITS = (by_early_event, by_wrong_way)


@pytest.mark.parametrize("wait", WAITS + NO_WAITS)
@pytest.mark.parametrize("work", (torch.neg, Tensor.neg_))
def test_a_use_races_unless_its_stream_waits(memory: Memory, wait: Any, work: Any) -> None:
    one, other = two_streams()
    tensor = made_on(one)
    wait(one, other)
    on_stream(other, work, tensor)
    assert bool(memory.races) == (wait in NO_WAITS)


@pytest.mark.parametrize("wait", WAITS + NO_WAITS)
def test_a_write_races_with_an_earlier_read(memory: Memory, wait: Any) -> None:
    one, other = two_streams()
    tensor = made_on(other)
    by_stream(other, one)
    on_stream(one, torch.neg, tensor)
    assert memory.races == []
    wait(one, other)
    on_stream(other, Tensor.neg_, tensor.view(2, 2))  # a view is the same memory
    assert bool(memory.races) == (wait in NO_WAITS)


def test_two_reads_never_race(memory: Memory) -> None:
    one, other = two_streams()
    tensor = made_on(one)
    by_stream(one, other)
    for stream in (other, one, other):
        on_stream(stream, torch.neg, tensor)
    assert memory.races == []


@pytest.mark.parametrize("wait", (by_stream, None, "record_stream"))
def test_freed_memory_is_used_again_beside_a_read(memory: Memory, wait: Any) -> None:
    one, other = two_streams()
    tensor = made_on(one)
    by_stream(one, other)
    on_stream(other, torch.neg, tensor)
    if wait == "record_stream":
        tensor.record_stream(other)
    del tensor
    assert memory.races == []  # nobody uses the memory yet
    if wait is by_stream:
        by_stream(other, one)
    made_on(other)  # memory of another stream
    assert memory.races == []
    made_on(one)
    assert bool(memory.races) == (wait is None)
    assert memory.num_reuses == (wait != "record_stream")


@pytest.mark.parametrize("target", ("cpu", "cuda:1"))
@pytest.mark.parametrize("is_late", (True, False))
@pytest.mark.parametrize("non_blocking", (True, False))
def test_a_copy_runs_on_the_streams_current_at_its_source(
    memory: Memory, target: str, is_late: bool, non_blocking: bool
) -> None:
    side, _ = two_streams()
    tensor = made_on(side)
    if is_late:
        torch.cuda.current_stream("cuda:0").wait_stream(side)
    copy = tensor.to(target, non_blocking=non_blocking)
    assert str(copy.device) == target
    assert bool(memory.races) != is_late
    del memory.races[:]
    values = (copy + 1).tolist()
    assert values == [2.0] * 4
    # The host may read what it did not wait for; the GPU's own streams have waited.
    assert bool(memory.races) == (target == "cpu" and non_blocking)


def test_a_gradient_goes_back_over_a_copy(memory: Memory) -> None:
    leaf = torch.ones(3, device="cuda:0").requires_grad_()
    (leaf.to("cuda:1").double() * 2).sum().backward()
    assert leaf.grad is not None
    assert str(leaf.grad.device) == "cuda:0" and leaf.grad.tolist() == [2.0] * 3
    assert memory.races == []


def test_pinned_memory_is_not_written_while_a_copy_reads_it(memory: Memory) -> None:
    pinned = torch.ones(3, pin_memory=True)
    pinned.to("cuda:0", non_blocking=True)
    pinned.add_(1)
    assert memory.races


def test_tensors_of_several_devices_do_not_meet(memory: Memory) -> None:
    with pytest.raises(RuntimeError, match="several devices"):
        torch.zeros(2, device="cuda:0") + torch.zeros(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="several devices"):
        torch.zeros(2, device="cuda:0") + torch.zeros(2)
    assert (torch.zeros(2, device="cuda:0") + torch.tensor(1.0)).tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match="cannot become an array"):
        torch.zeros(2, device="cuda:0").numpy()


def test_a_thread_has_its_own_current_stream(memory: Memory) -> None:
    side, _ = two_streams()
    seen: list[Any] = []
    with torch.cuda.stream(side):
        thread = threading.Thread(
            target=lambda: seen.extend((torch.cuda.current_stream(), made_on(side)))
        )
        thread.start()
        thread.join()
    assert seen[0] is torch.cuda.default_stream("cuda:0")
    assert str(seen[1].device) == "cuda:0"


def test_torch_is_as_it_was_afterwards() -> None:
    owners = (torch, torch.cuda, Tensor, torch.UntypedStorage, threading.Thread)
    before = [dict(vars(owner)) for owner in owners]
    with pretended_devices():
        left = torch.ones(2, device="cuda:0")
        assert vars(Tensor) != before[2]
    assert [dict(vars(owner)) for owner in owners] == before
    assert str(left.device) == "cpu" and not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.ones(2, device="cuda:0")
