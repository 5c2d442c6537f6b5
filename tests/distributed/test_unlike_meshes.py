"""Between stages of unlike meshes each byte crosses once, and arrives as it left."""

import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock import Mesh
from penstock.errors import PlanError
from penstock.mesh.point_to_point import PointToPoint
from penstock.model.pytree import flatten
from penstock.planner.placement import Placement
from penstock.runtime.pipeline_module import parts_of
from penstock.schedules.ir import Forward
from penstock.sharding.layouts import Layout, S, as_on
from penstock.transport import crossing
from penstock.transport.channels import Activation, Gradient
from penstock.transport.crossing import shares
from penstock.transport.headers import Header
from penstock.transport.processes import ProcessChannels
from penstock.transport.torch_distributed import _FIRST
from penstock.transport.wire import TensorKind
from tests.distributed import test_equality_processes as equality
from tests.distributed.call import call
from tests.model.capture.any_models.required import REQUIRED
from tests.sharding.test_pipeline import WORDS, as_one, in_shards, saves_and_loads, two_steps

MESHES = {"1 + 2": (1, 2), "2 + 1": (2, 1), "2 + 3": (2, 3), "2 + 2": (2, 2), "3 + 2": (3, 2)}
OTHERS = ("2 + 1", "2 + 3", "2 + 2")


def placed(senders: int, receivers: int) -> Placement:
    ranks = tuple(range(senders + receivers))
    return Placement(((ranks[:senders],), (ranks[senders:],)), ("cpu", "cpu"))


@pytest.mark.parametrize("size", [1, 100, 1 << 16, 100_003])
def test_shares_divide_a_message_evenly(size: int) -> None:
    for senders, receivers in product((range(n) for n in range(1, 7)), repeat=2):
        theirs = [10 - rank for rank in receivers]  # in any order
        sent, got = Counter[int](), dict[int, list[tuple[int, int]]]()
        for (sender, receiver), share in shares((senders, theirs)).items():
            begin, end = share.of_whole(size)
            sent[sender] += end - begin
            got.setdefault(receiver, []).append((begin, end))
        assert sorted(got) == sorted(theirs)
        if size < crossing.FEW_BYTES:
            assert all([b - a for a, b in spans if b > a] == [size] for spans in got.values())
            continue
        in_order = [span for receiver in theirs for span in got[receiver]]
        assert [0, *(end for _, end in in_order)] == [*(begin for begin, _ in in_order), size]
        assert max(sent.values()) - min(sent[rank] for rank in senders) <= 1
        lengths = [spans[-1][1] - spans[0][0] for spans in got.values()]
        assert max(lengths) - min(lengths) <= 1


class Named(Tensor):
    """A class that only has another name."""


def leaves_of(turn: int, shard: int) -> list[Tensor | None]:
    """Return values of all kinds; the strides of some are not the same on all shards."""
    generator, draw = torch.Generator().manual_seed(turn), random.Random(turn)
    rows = draw.choice([1, 7, 100, 600])
    images = torch.randn(2, 3, rows, 5, generator=generator)
    wide = torch.randn(rows, 2 * 33, generator=generator)
    found: list[Tensor | None] = [
        images.contiguous(memory_format=torch.channels_last) if shard % 2 else images,
        None,
        torch.tensor(turn),
        wide[:, ::2],
        wide.t() > 0,
        torch.empty(0, rows),
        wide[:, :1].expand(rows, 9),
        torch.randn(rows, 3, dtype=torch.complex64, generator=generator).conj(),
        wide.bfloat16(),
        wide.as_subclass(Named),
        wide[0, 0],
    ]
    draw.shuffle(found)
    return found[: draw.randint(1, len(found))]


def payload_of(turn: int, shard: int, count: int, like: int) -> Activation | Gradient:
    """Return a message as one of so many shards has it: in slices, where they can be even; what is
    whole has strides as on the shard `like`.
    """
    leaves, layouts = list[Tensor | None](), list[Layout | None]()
    for leaf in leaves_of(turn, like):
        is_cut = leaf is not None and leaf.dim() > 0 and len(leaf) > 0 and len(leaf) % 6 == 0
        if leaf is not None and is_cut:
            layouts.append(as_on((S(0, (len(leaf),)),), [count], shard))
            leaf = leaf.tensor_split(count)[shard]
        elif leaf is not None or turn % 2:
            layouts.append(None)
        if leaf is not None or turn % 2:
            leaves.append(leaf)
    if turn % 2:
        return Gradient(tuple(leaves), layouts=tuple(layouts))
    given, structure = flatten({"turn": turn, "values": leaves})
    usual = (False,) * len(given), structure, (0,) * len(given)
    return Activation(tuple(given), *usual, layouts=tuple(layouts))


def exchange(mesh: Mesh, num_runs: int) -> None:
    """Send on stage 0, all of a run ahead; receive on stage 1, some of it posted before."""
    channels, count = ProcessChannels(mesh, [0, 1]), mesh.shards.size
    for run in range(num_runs):
        for turn in range(10 * run, 10 * (run + 1)):
            message = (False, 0, 1, turn)
            if mesh.stage == 0:
                channels.send(message, payload_of(turn, mesh.shard, count, mesh.shard))
                continue
            if turn % 3:
                channels.post(message)
            wanted = payload_of(turn, mesh.shard, count, 0)
            check(channels.receive(message, Forward(1, turn)), wanted)
        channels.finish()


def check(found: Activation | Gradient, expected: Activation | Gradient) -> None:
    assert type(found) is type(expected) and found.layouts == expected.layouts
    if isinstance(found, Activation) and isinstance(expected, Activation):
        assert found.structure == expected.structure
    layouts = expected.layouts or (None,) * len(expected.leaves)
    for a, b, layout in zip(found.leaves, expected.leaves, layouts, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (type(a), a.dtype, a.shape) == (type(b), b.dtype, b.shape)
            may_be_other = layout or a.is_contiguous(memory_format=torch.channels_last)
            assert may_be_other or a.stride() == b.stride()
            assert torch.equal(a.resolve_conj(), b.resolve_conj())


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1 + 2", *OTHERS])
def test_values_of_all_kinds_arrive_as_they_left(name: str, tmp_path: Path) -> None:
    call(exchange, placed(*MESHES[name]), tmp_path, num_runs=12)


def test_slices_that_are_not_even_are_refused_where_meshes_are_unlike() -> None:
    link: Any = object.__new__(crossing._OutgoingShare)
    link._share, link._place, link._is_like = crossing.Share(0, 1, 2), (0, 2), False
    for sizes in ((3, 1), (1, 3)):
        own = torch.zeros(sizes[0], 2)
        header = Header((TensorKind.of(own),), None, ((S(0, sizes),),))
        with pytest.raises(PlanError, match=r"shard 0 of 2 sends a slice of shape \(\d, 2\)"):
            link._own([own], header)


WIDTH, ROWS = 256, (84, 120, 72, 72)
"""Samples of each step; those of the last one are counted."""


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)) for _ in range(2)]
    return [nn.Sequential(a, nn.Tanh(), b).double() for a, b in pairs]


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, WIDTH, dtype=torch.float64, generator=generator) for n in ROWS]


def count(mesh: Mesh, plan: str) -> dict[str, Any]:
    """Train; return the losses, and what was handed over to be sent in the last step, and how
    often shards gathered what had come.
    """
    sent, send = list[int](), PointToPoint.send
    gathered, gather = list[int](), crossing.IncomingShares._gathered

    def counted(self: PointToPoint, content: Tensor, rank: int, tag: int) -> Any:
        sent.append(content.nbytes)
        return send(self, content, rank, tag)

    def noted(self: crossing.IncomingShares, part: Tensor, size: int) -> list[Tensor]:
        gathered.append(size)
        return gather(self, part, size)

    PointToPoint.send = counted  # type: ignore[method-assign]
    crossing.IncomingShares._gathered = noted  # type: ignore[method-assign]
    options: dict[str, Any] = {"mesh": mesh, "num_microbatches": 2, "sharding": plan}
    pipe = penstock.Pipeline(layers(), loss=nn.MSELoss(), example_inputs=batches()[0], **options)
    losses = []
    for batch in batches():
        sent.clear()
        losses.append(pipe.train_step(batch, -batch))
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    gradients = parts_of(pipe).shards.whole(gradients)
    return {"losses": losses, "gradients": gradients, "sent": sent, "gathered": len(gathered)}


@pytest.mark.parametrize(
    ("counts", "plan"),
    [
        slow((1, 2), "megatron"),
        *(slow(MESHES[name], "megatron") for name in OTHERS),
        *(slow(MESHES[name], "data") for name in ("1 + 2", *OTHERS)),
    ],
    ids=str,
)
def test_each_byte_of_activations_and_gradients_crosses_once(counts, plan, tmp_path) -> None:
    """Of t shards each sends 1 / t, as Narayanan et al. 2021, section 4.1, and the others gather.

    In slices nobody gathers anything, and shards of meshes of one size send their slices.
    """
    found = call(count, placed(*counts), tmp_path, plan=plan)
    gather = [plan == "megatron" and n > 1 for n in counts for _ in range(n)]
    assert [each["gathered"] > 0 for each in found] == gather
    whole = nn.Sequential(*layers())
    for batch in batches():
        (nn.functional.mse_loss(whole(batch), -batch)).backward()
    expected: dict[str, Any] = {name: p.grad for name, p in whole.named_parameters()}
    for each in found:
        for key, gradient in each["gradients"].items():
            assert torch.allclose(gradient, expected[key], rtol=0, atol=1e-12), key
    num_bytes = ROWS[-1] * WIDTH * 8
    sides = found[: counts[0]], found[counts[0] :]
    for side in sides:
        for each in side:
            headers = _FIRST.size * len(each["sent"])
            assert sum(each["sent"]) - headers == num_bytes / len(side)


def in_small_parts(mesh: Mesh, where: str) -> dict[str, Any]:
    """Train with tied weights, and divide all messages but the smallest ones."""
    crossing.FEW_BYTES = 32
    return in_shards(mesh, where)


@pytest.mark.slow
def test_tied_weights_cross_in_parts(tmp_path: Path) -> None:
    wanted = two_steps(as_one(), WORDS)
    for found in call(in_small_parts, placed(2, 3), tmp_path, where=str(tmp_path)):
        assert torch.allclose(torch.stack(found["losses"]), torch.stack(wanted["losses"]))
        for name, gradient in found["gradients"].items():
            assert torch.allclose(gradient, wanted["gradients"][name], rtol=0, atol=1e-12), name


def work_in_small_parts(mesh: Mesh, which: str) -> list[dict[str, Any]]:
    crossing.FEW_BYTES = 64
    return equality.work(mesh, which)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1 + 2", "3 + 2"])
def test_every_schedule_trains_on_what_crosses_in_parts(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(equality, "work", work_in_small_parts)
    equality.test_shards_give_the_unsplit_models_gradients_but_for_rounding(
        "unlike", placed(*MESHES[name]), tmp_path
    )


LAYOUTS: dict[str, tuple[Placement, str | None]] = {
    "1 + 2": (placed(1, 2), "megatron"),
    "2 + 1": (placed(2, 1), "data"),
    "2 replicas": (Placement.of(range(1), 2), "zero1"),
    "one process": (Placement.of(range(1)), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("saver", LAYOUTS)
def test_every_other_layout_goes_on_from_a_checkpoint(saver: str, tmp_path: Path) -> None:
    """Weights are the saver's to the bit; what is trained from them and from its optimizer's state
    is the same but for rounding, wherever batches and masks are.
    """

    def run(name: str) -> list[dict[str, Any]]:
        placement, sharding = LAYOUTS[name]
        return call(saves_and_loads, placement, tmp_path, where=str(tmp_path), sharding=sharding)

    losses = {saver: [found["losses"] for found in run(saver)]}
    penstock.export_model(tmp_path / "saved", tmp_path / "one.safetensors")
    wanted = load_file(tmp_path / "one.safetensors")
    for loader in LAYOUTS.keys() - {saver}:
        every = run(loader)
        losses[loader] = [found["losses"] for found in every]
        for found in every:
            assert found["loaded"], loader
            assert all(torch.equal(t, wanted[name]) for name, t in found["loaded"].items()), loader
    del losses["2 replicas"]  # whose masks are others
    each = torch.tensor([own for of_layout in losses.values() for own in of_layout])
    assert len(each) >= 4 and (each - each[0]).abs().max() < 1e-12, each


def t5_checked(mesh: Mesh, plan: str) -> list[float]:
    """Compare T5, with masks and tied embeddings, with dropout off and on."""
    found = []
    for trains in (False, True):
        model, inputs_of = next(m for m in REQUIRED if m.name == "t5").make()
        inputs = inputs_of(8)
        report = penstock.check(
            penstock.capture(model.double().train(trains), inputs, check=False),
            inputs,
            torch.zeros(8),
            loss=lambda output, _: (output["logits"] * output["logits"].cos()).mean(),
            num_microbatches=2,
            mesh=mesh,
            sharding=plan,
        )
        found.append(report.most)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data", "megatron"])
def test_t5_on_unlike_meshes_is_the_unsplit_model(plan: str, tmp_path: Path) -> None:
    """What the encoder gives crosses to every block of the decoder."""
    for found in call(t5_checked, placed(1, 2), tmp_path, plan=plan):
        assert all(0 < off < 1e-12 for off in found), found
