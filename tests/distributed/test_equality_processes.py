"""Processes instead of threads change no bit; replicas change rounding only."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from penstock.schedules import ALL_SCHEDULES
from penstock.types import Recompute
from tests.distributed import odd_types
from tests.distributed.call import call
from tests.distributed.equality_job import BY_NAME, Case, results
from tests.distributed.launch import run
from tests.reference import Unsplit
from tests.side_by_side import same_bits

FEW = (
    *("transformer", "structures", "fan_out", "batch_norms", "changing_buffers", "channels_last"),
    *("odd_addresses", "randomness", "frozen_middle", "large_messages"),
)
WAYS = list(product([s.name for s in ALL_SCHEDULES], [r.value for r in Recompute]))


def cases(num_stages: int, num_replicas: int, names: tuple[str, ...]) -> Iterator[Case]:
    for name, (schedule, recompute) in product(names, WAYS):
        yield Case(name, schedule, recompute, 7, 3, num_stages, num_replicas)


def interleaved_cases(
    num_ranks: int, stages_per_rank: int, num_replicas: int, names: tuple[str, ...]
) -> Iterator[Case]:
    """Yield cases of several stages in each process; three micro-batches are no whole groups."""
    for name, recompute in product(names, Recompute):
        case = Case(name, "interleaved_1f1b", recompute.value, 7, 3, num_ranks, num_replicas)
        yield replace(case, stages_per_rank=stages_per_rank)


def trained(world: list[Case], tmp_path: Path) -> list[list[dict[str, Any]]]:
    """Run the cases in processes; give the results by rank and case."""
    (tmp_path / "cases.json").write_text(json.dumps([case.write() for case in world]))
    size = world[0].num_stages * world[0].num_replicas
    run(
        size, ["-m", "tests.distributed.equality_job", str(tmp_path / "cases.json"), str(tmp_path)]
    )
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]


def unsplit(case: Case) -> dict[str, Any]:
    """Train the same with plain torch, all replicas' micro-batches one after the other."""
    model = BY_NAME[case.model]
    built = model.build()
    reference = Unsplit(built.modules, built.forward, case.num_microbatches * case.num_replicas)
    whole = model.batches(case.num_samples * case.num_replicas, case.steps)
    losses = [reference.train_step(x, y, model.loss) for x, y in whole]
    gradients = [p.grad for m in built.modules for p in m.parameters() if p.grad is not None]
    norm = torch.stack([g.norm(dtype=torch.float64) for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
    found = results(built, losses) | {"norm": norm.float()}
    if model.quiet_in_eval:
        found["outputs"] = reference.evaluate(whole[0][0])
    return found


@pytest.mark.parametrize("num_stages", (1, 2, 3, pytest.param(4, marks=pytest.mark.slow)))
def test_processes_give_the_unsplit_models_bits(num_stages: int, tmp_path: Path) -> None:
    check_bits(list(cases(num_stages, 1, FEW)), tmp_path)


def test_replicas_start_equal_in_every_type_of_number(tmp_path: Path) -> None:
    first, second = call(odd_types.work, (1, 2), tmp_path)
    assert first.pop("error") == second.pop("error")
    assert first.keys() == second.keys() == {*odd_types.TYPES, "frozen", "weight"}
    assert all(
        same_bits(tensor.to(torch.complex64), second[name].to(torch.complex64))
        for name, tensor in first.items()
    )


def test_processes_give_the_unsplit_models_bits_under_autocast(tmp_path: Path) -> None:
    names = ("mlp", "convolutions", "transformer", "fan_out", "changing_buffers")
    pairs = product(("bfloat16", "float16"), cases(2, 1, names))
    check_bits([replace(case, autocast=kind) for kind, case in pairs], tmp_path)


@pytest.mark.parametrize(
    "num_ranks, stages_per_rank",
    ((2, 2), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((1, 3), (2, 3), (3, 2)))),
)
def test_several_stages_in_each_process_give_the_unsplit_models_bits(
    num_ranks: int, stages_per_rank: int, tmp_path: Path
) -> None:
    names = [n for n in FEW if len(BY_NAME[n].layers()) >= num_ranks * stages_per_rank]
    check_bits(list(interleaved_cases(num_ranks, stages_per_rank, 1, tuple(names))), tmp_path)


@pytest.mark.parametrize(
    "ranks", ((0, 1, 0, 1, 0), pytest.param((0, 1, 1, 0), marks=pytest.mark.slow))
)
def test_any_stages_may_run_on_any_rank(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Also the first and the last one on the same rank, and neighbours."""
    names = ("transformer", "structures", "fan_out", "batch_norms", "large_messages")
    chosen = [
        Case(name, "dealt", recompute.value, 7, 3, num_stages=2, ranks=ranks)
        for name, recompute in product(names, Recompute)
    ]
    check_bits(chosen, tmp_path)


def check_bits(chosen: list[Case], tmp_path: Path) -> None:
    for case, *by_rank in zip(chosen, *trained(chosen, tmp_path), strict=True):
        with case.precision:
            expected = unsplit(case)
        assert set().union(*by_rank) == expected.keys()
        for name, value in (item for found in by_rank for item in found.items()):
            ours, theirs = tree_leaves(value), tree_leaves(expected[name])
            assert len(ours) == len(theirs), f"{case}: {name}"
            assert all(map(same_bits, ours, theirs)), f"{case}: {name}"


OWN = "buffer 5."  # of an InstanceNorm: each replica's are of its own samples, as outputs are
REPLICATED = ("transformer", "batch_norms", "randomness", "frozen_middle")


@pytest.mark.parametrize(
    "num_stages", (1, 2, *(pytest.param(k, marks=pytest.mark.slow) for k in (3, 4)))
)
def test_two_replicas_give_one_pipelines_gradients_but_for_rounding(
    num_stages: int, tmp_path: Path
) -> None:
    check_replicas(list(cases(num_stages, 2, REPLICATED)), tmp_path)


@pytest.mark.slow
def test_two_replicas_of_several_stages_in_each_process(tmp_path: Path) -> None:
    check_replicas(list(interleaved_cases(2, 2, 2, REPLICATED)), tmp_path)


def check_replicas(chosen: list[Case], tmp_path: Path) -> None:
    num_stages = chosen[0].num_stages
    for case, *by_rank in zip(chosen, *trained(chosen, tmp_path), strict=True):
        expected = unsplit(case)
        for rank, found in enumerate(by_rank):
            assert_close(found, expected, str(case))
            twin = by_rank[(rank + num_stages) % len(by_rank)]
            for name in compared(found):
                ours, theirs = tree_leaves(found[name]), tree_leaves(twin[name])
                assert all(map(same_bits, ours, theirs)), f"{case}: {name} of the replicas"


def compared(found: dict[str, Any]) -> list[str]:
    return [name for name in found if name != "outputs" and not name.startswith(OWN)]


def assert_close(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    for name in compared(found):
        for a, b in zip(tree_leaves(found[name]), tree_leaves(expected[name]), strict=True):
            assert (a is None) == (b is None), f"{case}: {name}"
            assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"{case}: {name}"
