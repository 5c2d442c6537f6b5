"""A pipeline whose stages are divided among processes trains as the unsplit model does."""

from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock import Mesh, Pipeline, Recompute
from penstock.errors import BatchError
from penstock.mesh.collectives import Collectives
from penstock.planner.placement import Placement
from penstock.runtime.pipeline_module import parts_of
from penstock.sharding.named import READY
from penstock_recipes.zoo import gpt
from tests.distributed.call import call

Layout = tuple[int, int, int]
"""K stages, D replicas, T shards."""
WORDS = torch.randint(0, 32, (5, 8), generator=torch.Generator().manual_seed(0))


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"num_layers": 4, "width": 16, "num_heads": 4, "num_words": 32}
    return gpt(**sizes, max_length=8, dropout=0.1).double()


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def piped(model: Any, **options: Any) -> Pipeline:
    given = {"num_microbatches": 2, "loss": loss, "example_inputs": WORDS[:3], "seed": 3}
    return Pipeline(model, **{**given, **options})


def two_steps(pipe: Pipeline, words: Tensor, folder: Path | None = None) -> dict[str, Any]:
    """Train, and save after the first step; return all that there is to compare."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    found: dict[str, Any] = {"losses": []}
    for step in range(2):
        found["losses"].append(pipe.train_step(words, words))
        if step == 0 and folder is not None:
            penstock.save_checkpoint(folder, pipe, optimizer)
        found["norm"] = penstock.clip_grad_norm_(pipe, 0.5)
        gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        found["gradients"] = parts_of(pipe).shards.whole(gradients)
        optimizer.step()
        optimizer.zero_grad()
    found["output"] = pipe.eval_step(WORDS)
    return found


def in_shards(mesh: Mesh, where: str) -> dict[str, Any]:
    words = WORDS.tensor_split(mesh.num_replicas)[mesh.replica]
    # the others have other weights, and get those of the first shard
    pipe = piped(made(0 if mesh.shard == 0 else 7), mesh=mesh, sharding="megatron")
    found = two_steps(pipe, words, Path(where) / "first")
    shapes = {name: tuple(p.shape) for name, p in pipe.named_parameters()}
    return found | {"shapes": shapes, "table": str(pipe.sharding), "plan": str(pipe.plan)}


def assert_trained(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """See that a process has trained as the unsplit model does."""
    exact: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
    assert torch.allclose(torch.stack(found["losses"]), torch.stack(wanted["losses"]), **exact)
    assert torch.allclose(found["output"], wanted["output"], **exact)
    assert torch.allclose(found["norm"], wanted["norm"], rtol=0, atol=1e-6)
    assert found["gradients"]
    for name, gradient in found["gradients"].items():
        assert torch.allclose(gradient, wanted["gradients"][name], **exact), name


def assert_loads(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    """See that a checkpoint gives the unsplit model these parameters."""
    model = made(9)
    penstock.load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())


def as_one(num_microbatches: int = 2) -> Pipeline:
    return piped(made(0), partition=[7], num_microbatches=num_microbatches)


def in_two_shards(mesh: Mesh, where: str) -> dict[str, Any]:
    """Return what each test of two shards compares: to start processes takes longest."""
    odd = odd_step(mesh, "megatron")
    return {"trained": in_shards(mesh, where), "odd": odd, "refused": refused(mesh)}


Found = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return a folder with a checkpoint, and what each of two shards found."""
    folder = tmp_path_factory.mktemp("shards")
    placement = Placement.of(range(1), num_shards=2)
    return folder, call(in_two_shards, placement, folder, where=str(folder))


def test_shards_train_as_the_unsplit_model_and_their_checkpoint_is_its_own(
    two_shards: Found,
) -> None:
    folder, by_rank = two_shards
    check_run(folder, [found["trained"] for found in by_rank])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 1, 2), (1, 2, 2)], ids=["2 stages", "2 replicas"])
def test_stages_and_replicas_of_shards_train_so_too(layout: Layout, tmp_path: Path) -> None:
    stages, replicas, shards = layout
    placement = Placement.of(range(stages), replicas, num_shards=shards)
    by_rank = call(in_shards, placement, tmp_path, where=str(tmp_path))
    check_run(tmp_path, by_rank, num_microbatches=2 * replicas)


def check_run(folder: Path, by_rank: list[dict[str, Any]], num_microbatches: int = 2) -> None:
    """Check a run of `in_shards` and its checkpoint against the unsplit model."""
    wanted = two_steps(as_one(num_microbatches=num_microbatches), WORDS)
    for found in by_rank:
        assert_trained(found, wanted)
        assert "linear" in found["table"] and "sharding=megatron" in found["plan"]
        cut = [
            n for n, p in made(0).named_parameters() if found["shapes"].get(n, p.shape) != p.shape
        ]
        assert any(name.endswith("widen.weight") for name in cut)
    assert_loads(folder / "first", dict(made(0).named_parameters()))


def saves_and_loads(mesh: Mesh, where: str, sharding: str) -> dict[str, Any]:
    """Go on from what others have saved, if they have; save, and train on."""
    folder, pipe = Path(where), piped(made(mesh.world_size), mesh=mesh, sharding=sharding)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    found: dict[str, Any] = {"losses": []}
    if (folder / "saved").exists():
        started = piped(made(7), mesh=mesh, sharding=sharding, weights=folder / "model")
        penstock.load_pretrained(folder / "model", pipe)
        for name, own in (("started", started), ("loaded", pipe)):
            here = {n: p.detach().clone() for n, p in own.named_parameters()}
            found[name] = parts_of(own).shards.whole(here)
        penstock.load_checkpoint(folder / "saved", pipe, optimizer)
    else:
        pipe.train_step(WORDS, WORDS)
        optimizer.step()
        optimizer.zero_grad()
        penstock.save_checkpoint(folder / "saved", pipe, optimizer)
        penstock.save_pretrained(folder / "model", pipe)
    for _ in range(2):
        found["losses"].append(pipe.train_step(WORDS, WORDS))
        optimizer.step()
        optimizer.zero_grad()
    return found | {"held": sum(p.numel() for p in pipe.parameters())}


@pytest.mark.slow
def test_other_slices_go_on_from_slices_and_so_does_the_unsplit_model(tmp_path: Path) -> None:
    def run(sharding: str, num_replicas: int = 1, num_shards: int = 1) -> list[dict[str, Any]]:
        placement = Placement.of(range(1), num_replicas, num_shards=num_shards)
        where = str(tmp_path)
        return call(saves_and_loads, placement, tmp_path, where=where, sharding=sharding)

    saved = run("zero3", num_shards=3)
    files = sorted((tmp_path / "saved").glob("model/*"))
    assert len(files) == 3 and all(file.stat().st_size > 1000 for file in files)
    penstock.export_model(tmp_path / "saved", tmp_path / "one.safetensors")
    wanted = load_file(tmp_path / "one.safetensors")
    total = sum(tensor.numel() for tensor in wanted.values())
    assert max(found["held"] for found in saved) < total / 2  # a few are too short to be cut
    in_shards, in_replicas = run("megatron", num_shards=2), run("zero1", num_replicas=2)
    for found in (*in_shards, *in_replicas):
        for loaded in (found["started"], found["loaded"]):
            assert loaded and all(torch.equal(loaded[name], wanted[name]) for name in loaded)
    for found in in_shards:  # replicas have other masks, and the same batch twice
        mine, own = torch.stack(found["losses"]), torch.stack(saved[0]["losses"])
        assert torch.allclose(mine, own, rtol=0, atol=1e-12)
    assert_loads(tmp_path / "saved", wanted)


def by_every_plan(mesh: Mesh) -> dict[str, dict[str, Any]]:
    found = {}
    names = [*READY, "megatron+zero1"]
    every = [Recompute.NEVER, Recompute.STAGE, Recompute.layers("blocks.1")]
    for name in names:
        for recompute in every[: 1 if len(mesh.shard_axes) > 1 else None]:
            model = made(0)
            pipe = piped(model, mesh=mesh, sharding=name, recompute=recompute)
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
            losses = []
            for _ in range(2):
                losses.append(pipe.train_step(WORDS, WORDS))
                pipe.train_step(WORDS, WORDS)  # gradients of two steps add up
                gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
                whole = parts_of(pipe).shards.whole(gradients)
                gradients = {n: g.clone() for n, g in whole.items()}
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            assert pipe.sharding is not None
            moved = [layer for layer in pipe.sharding.layers if layer.num_entering]
            found[f"{name}, {recompute}"] = {
                "losses": losses,
                "gradients": gradients,
                "moved": len(moved),
                "divided": sum(layer.is_divided for layer in pipe.sharding.layers),
            }
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        Placement.of(range(1), num_shards=2),
        Placement.of(range(2), num_shards=2),
        Placement.of(range(1), num_shards=(2, 2)),
    ],
    ids=["2 shards", "2 stages of 2 shards", "2 x 2 shards"],
)
def test_every_ready_plan_trains_as_the_unsplit_model(placement, tmp_path) -> None:
    pipe = as_one()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        losses.append(pipe.train_step(WORDS, WORDS))
        pipe.train_step(WORDS, WORDS)
        gradients = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    for of_rank in call(by_every_plan, placement, tmp_path, timeout_s=300.0):
        for plan, found in of_rank.items():
            for mine, own in zip(found["losses"], losses, strict=True):
                assert torch.allclose(mine, own, rtol=0, atol=1e-12), plan
            for name, gradient in found["gradients"].items():
                assert torch.allclose(gradient, gradients[name], rtol=0, atol=1e-12), (plan, name)
            if placement.shard_shapes is not None:
                continue  # three samples are not enough for four
            # a model as small as this one is better not divided: "auto" may say so
            assert found["divided"] or plan.startswith("auto"), plan
            if plan.startswith(("data", "zero")):
                assert found["moved"], plan


def gathers(mesh: Mesh) -> dict[str, list[int]]:
    """Count what is gathered in a step of one micro-batch, and of two."""
    found: dict[str, list[int]] = {}
    gather, count = Collectives.all_gather, Counter[str]()

    def counted(axis: Collectives, *args: Any) -> list[Tensor]:
        count["gathered"] += axis.size > 1
        return gather(axis, *args)

    Collectives.all_gather = counted  # type: ignore[method-assign,assignment]  # here alone
    for name, num_microbatches in product(("zero1", "zero2", "zero3"), (1, 2)):
        how: dict[str, Any] = {"sharding": name, "recompute": Recompute.NEVER}
        pipe = piped(made(0), mesh=mesh, num_microbatches=num_microbatches, **how)
        pipe.train_step(WORDS, WORDS)
        count.clear()
        pipe.train_step(WORDS, WORDS)
        found.setdefault(name, []).append(count["gathered"])
    return found


@pytest.mark.slow
def test_zero1_and_zero2_gather_weights_once_a_step_and_zero3_for_each_use(tmp_path: Path) -> None:
    for found in call(gathers, Placement.of(range(1), num_shards=2), tmp_path):
        more = {name: two - one for name, (one, two) in found.items()}
        assert found["zero2"][0] < found["zero3"][0], found  # which gathers for backwards, too
        num_weights = 4 * 2 + 1  # at least: linear layers, twice as many are in a block
        assert more["zero3"] - more["zero2"] > num_weights, found
        assert more["zero1"] < found["zero1"][0] < found["zero2"][0], found  # in few buckets


class Odd(nn.Module):
    """Drops by keywords between columns and rows; what comes after them is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        dropped = nn.functional.dropout(self.up(x).relu(), p=0.3, training=self.training)
        y = self.down(dropped)
        return x + y * y + 1 / (y + 7)


def odd_step(mesh: Mesh | None, sharding: Any = None) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [Odd().double() for _ in range(2)]
    inputs = torch.randn(5, 8, dtype=torch.float64)
    how: dict[str, Any] = {"partition": [2]} if mesh is None else {"sharding": sharding}
    given = {"loss": nn.functional.mse_loss, "example_inputs": inputs}
    pipe = piped(layers, mesh=mesh, **given, **how)
    loss = pipe.train_step(inputs, inputs.cos())
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    first = next(iter(gradients.values()))
    whole = parts_of(pipe).shards.whole(gradients)
    return {"loss": loss, **whole, "shape": torch.tensor(first.shape)}


def test_dropout_by_keywords_is_cut_and_what_is_not_linear_is_summed_first(
    two_shards: Found,
) -> None:
    check_odd([found["odd"] for found in two_shards[1]], [6, 8])


@pytest.mark.slow
def test_dropout_by_keywords_is_cut_by_pins(tmp_path: Path) -> None:
    sharding = {"plan": "data", "*.up.weight": "S(1)", "1.*": "R"}
    placement = Placement.of(range(1), num_shards=2)
    check_odd(call(odd_step, placement, tmp_path, sharding=sharding), [12, 4])


def check_odd(by_rank: list[dict[str, Any]], shape: list[int]) -> None:
    """Check a step of `odd_step`, whose first gradient, of (12, 8), is cut to a shape."""
    wanted = odd_step(None)
    for found in by_rank:
        assert found["shape"].tolist() == shape
        assert found.keys() == wanted.keys()
        del found["shape"]
        for name, value in found.items():
            assert torch.allclose(value, wanted[name], rtol=0, atol=1e-12), name


def of_other_batches(mesh: Mesh) -> list[str]:
    """Give one shard another batch than the other; then to both the same."""
    pipe = piped(made(0), mesh=mesh, sharding="megatron")
    said = []
    for inputs, targets in (
        (WORDS[:4], WORDS[:4]),
        (WORDS[:, :6], WORDS[:, :6]),
        (WORDS.int(), WORDS),
    ):
        given = (inputs, targets) if mesh.shard == 1 else (WORDS, WORDS)
        try:
            pipe.train_step(*given)
        except BatchError as error:
            said.append(str(error))
    pipe.train_step(WORDS, WORDS)
    return said


@pytest.mark.slow
def test_all_shards_refuse_a_batch_that_they_do_not_share(tmp_path: Path) -> None:
    found = call(of_other_batches, Placement.of(range(1), num_shards=2), tmp_path)
    assert found[0] == found[1]  # none of them is left waiting
    wanted = (
        "rank 0 was given 5 inputs, rank 1 4 inputs",
        "different inputs: rank 0: (5, 8) torch.int64, digest ",
        "different inputs: rank 0: (5, 8) torch.int64, digest ",
    )
    assert all(text in own for text, own in zip(wanted, found[0], strict=True)), found[0]


def refused(mesh: Mesh) -> list[str]:
    said = []
    every: list[dict[str, Any]] = [
        {},
        {"sharding": "alpa"},
        {"sharding": "megatron", "example_inputs": None},
        {"sharding": "zero2", "schedule": penstock.schedules.pipedream_2bw},
        {"sharding": "megatron+zero1", "schedule": penstock.schedules.pipedream_2bw},
        {"sharding": "megatron+zero2"},
    ]
    for options in every:
        try:
            piped(penstock.capture(made(0), WORDS[:3]), mesh=mesh, **options)
        except penstock.PenstockError as error:
            said.append(str(error))
    return said


def test_what_cannot_work_is_refused_by_all(two_shards: Found) -> None:
    for said in (found["refused"] for found in two_shards[1]):
        wanted = (
            "sharding=None, and a stage has 2 ranks",
            "sharding='alpa': ready plans are 'auto', 'megatron'",
            "needs example_inputs=",
            "sharding='zero2' gathers weights once for a step, within which the schedule",
            "sharding='megatron+zero1' gathers weights once for a step",
            "ready plans are 'auto', 'megatron'",
        )
        assert len(said) == len(wanted)
        assert all(text in own for text, own in zip(wanted, said, strict=True)), said
    with pytest.raises(penstock.PenstockError, match="give a name of a ready plan with init_mesh"):
        piped(made(0), partition=[7], sharding="megatron")


def checked(mesh: Mesh) -> dict[str, Any]:
    given: dict[str, Any] = {"loss": loss, "num_microbatches": 2, "mesh": mesh}
    plain = penstock.check(made(0), WORDS, WORDS, sharding="megatron", **given)
    other = penstock.check(made(0), WORDS, WORDS, sharding="data", **given)
    return {"most": plain.most, "rows": len(plain.rows), "text": str(plain), "data": other.most}


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [Placement.of(range(1), num_shards=2), Placement((((0,),), ((1, 2),)), ("cpu", "cpu"))],
    ids=["2", "1 + 2"],
)
def test_check_spans_shards_and_stages(placement: Placement, tmp_path: Path) -> None:
    alone = penstock.check(made(0), WORDS, WORDS, loss=loss, num_microbatches=2, num_stages=1)
    for found in call(checked, placement, tmp_path):
        assert found["most"] < 1e-12 and found["data"] < 1e-12
        assert found["rows"] == len(alone.rows)
        assert "sharding=megatron" in found["text"]
