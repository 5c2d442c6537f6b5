"""While a pipeline in shards is made, a device holds its slices and one layer's whole weights."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Mesh, Pipeline
from penstock.model.capture.capture import resolve_layers
from penstock.model.materialize import tied_groups
from penstock.planner.placement import Placement
from penstock.runtime.construction import keep_freed_memory
from penstock.runtime.pipeline_module import parts_of
from penstock.torch_private import TorchDispatchMode
from penstock_recipes.zoo import gpt
from tests.distributed.call import call

WORDS = torch.zeros(4, 8, dtype=torch.long)
LINES = torch.zeros(4, 48)


class Peak(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {s._cdata for s in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage.device.type != "meta":
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return result

    def _change(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


def _storages(values: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]


def captured(seed: int, *, tied: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"num_layers": 4, "width": 48, "num_heads": 6, "num_words": 72}
    return gpt(**sizes, max_length=8, tied=tied), WORDS


def listed(seed: int, *, tied: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48)) for _ in range(5)]
    if tied:
        layers[2][2].weight = layers[0][2].weight
    return nn.Sequential(*layers), LINES


MODELS = {
    f"{make.__name__}, tied={tied}": (make, tied)
    for make in (captured, listed)
    for tied in (False, True)
}


def piped(
    name: str,
    *,
    seed: int = 0,
    device: str = "cpu",
    num_stages: int = 1,
    peak: Any = None,
    **options: Any,
) -> Pipeline:
    make, tied = MODELS[name]
    with torch.device(device):
        model, inputs = make(seed, tied=tied)
    layers = resolve_layers(model, inputs)  # which runs the model, if it has values
    last = len(layers) // 2 if num_stages == 2 else 0
    partition = [len(layers) - last, last][:num_stages]
    options |= {"partition": partition, "loss": nn.MSELoss(), "example_inputs": inputs}
    with peak or nullcontext():
        return Pipeline(layers, seed=3, **options)


def starts(mesh: Mesh, where: str, sharding: str) -> dict[str, dict[str, Any]]:
    # what goes to a device with a number is copied, though it is the host
    mesh = replace(mesh, device=torch.device("cpu", 0))
    keep_freed_memory()  # which takes memory once, and gives it back
    cases: dict[str, dict[str, Any]] = {
        "values": {"seed": mesh.shard + mesh.replica},  # those of the first ones
        "drawn": {"device": "meta"},
        "read": {"device": "meta", "weights": Path(where)},
    }
    found = {}
    for name in MODELS:
        for case, options in cases.items():
            if case == "read":
                options = options | {"weights": Path(where) / name}
            peak = Peak()
            options |= {"num_stages": mesh.num_stages, "mesh": mesh, "sharding": sharding}
            pipe = piped(name, peak=peak, **options)
            weights = {n: p.detach() for n, p in pipe.named_parameters()}
            own = [tensor.nbytes for tensor in (*weights.values(), *pipe.buffers())]
            found[f"{name}, {case}"] = {
                "most": peak.most,
                "own": sum(own),
                "largest slice": max(own),
                "values": parts_of(pipe).shards.whole(weights),
            }
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "sharding"),
    [
        (Placement.of(range(1), num_shards=2), "megatron"),
        (Placement.of(range(2), num_shards=2), "megatron"),
        (Placement.of(range(1), num_shards=3), "zero3"),
        (Placement.of(range(1), num_replicas=2), "zero1"),
        (Placement.of(range(1), num_replicas=2, num_shards=2), "megatron+zero1"),
    ],
    ids=["2 shards", "2 stages of 2 shards", "3 shards", "2 replicas", "2 replicas of 2 shards"],
)
def test_a_device_holds_its_slices_and_one_layer(placement, sharding, tmp_path) -> None:
    wanted, more, whole = {}, {}, {}
    for name in MODELS:
        for case, device in (("values", "cpu"), ("drawn", "meta"), ("read", "cpu")):
            pipe = piped(name, device=device)
            wanted[f"{name}, {case}"] = {n: p.detach() for n, p in pipe.named_parameters()}
        penstock.save_pretrained(tmp_path / name, pipe)
        groups = [nn.ModuleList(s.module for s in own) for own in tied_groups(pipe._layers)]
        whole[name] = sum(p.nbytes for p in pipe.parameters())
        more[name] = max(sum(p.nbytes for p in own.parameters()) for own in groups)
        more[name] += max(p.nbytes for p in pipe.parameters())  # is let go after it was sent
    told = call(starts, placement, tmp_path, where=str(tmp_path), sharding=sharding)
    names = {case: {n for found in told for n in found[case]["values"]} for case in wanted}
    assert names == {case: values.keys() for case, values in wanted.items()}
    for found in told:
        for case, own in found.items():
            name, _, kind = case.rpartition(", ")
            # of what a file has, nothing is ever whole; a slice is read before it is copied
            at_most = own["own"] + (own["largest slice"] if kind == "read" else more[name])
            assert own["most"] <= at_most < whole[name], (case, at_most, whole[name])
            assert own["values"]
            for n, value in own["values"].items():
                assert torch.equal(value, wanted[case][n]), (case, n)


def half_on_meta(mesh: Mesh, where: str) -> str:
    """Make a pipeline of a model that has values on the first shard only."""
    folder = Path(where) / "model"
    how: dict[str, Any] = {"mesh": mesh, "num_microbatches": 2, "sharding": "zero3"}
    model, inputs = captured(0, tied=False)
    penstock.save_pretrained(folder, Pipeline(model, example_inputs=inputs, **how))
    with torch.device("meta" if mesh.shard else "cpu"):
        model, _ = captured(0, tied=False)
    layers = penstock.capture(model, inputs)
    with pytest.raises(penstock.PenstockError) as refused:
        Pipeline(layers, example_inputs=inputs, weights=folder, **how)
    return str(refused.value)


@pytest.mark.slow
def test_a_layer_with_values_on_some_shards_only_is_refused_by_all(tmp_path: Path) -> None:
    placement = Placement.of(range(1), num_shards=2)
    for said in call(half_on_meta, placement, tmp_path, where=str(tmp_path)):
        assert "has values in some of the processes that share it" in said
