"""A step as one CUDA graph has eager's bits, and is never stale."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, ExecutionWarning
from penstock.mesh import Mesh
from penstock.planner.placement import Placement
from penstock.runtime.graph_driver import check_can_capture
from penstock.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from penstock.types import Transport

from .memory import Memory

WIDTH, NUM_STEPS = 6, 6


class Asks(nn.Linear):
    """A layer that asks the GPU for a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.sum().item() < 1e9 else 2.0)


def with_dropout() -> list[nn.Module]:
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
    return [first, nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, 3)]


def with_norms() -> list[nn.Module]:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    middle = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh(), second)
    return [first, middle, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)]


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]


def piped(modules: list[nn.Module], num_stages: int, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, nn.Linear):
            part.reset_parameters()
    how: dict[str, Any] = {"num_microbatches": 4, "loss": F.mse_loss, "seed": 3}
    how |= {"devices": ("cuda:0",) * num_stages}
    share, rest = divmod(len(modules), num_stages)
    how["partition"] = [share + (stage < rest) for stage in range(num_stages)]
    return penstock.Pipeline(modules, num_stages, **how | options)


def batch(step: int, num_samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    y = torch.randn(num_samples, 3, generator=generator)
    return x.to("cuda:0"), y.to("cuda:0")


def train(pipe: penstock.Pipeline, change: Any = None, num_steps: int = NUM_STEPS) -> list[Any]:
    found: list[Any] = []
    for step in range(num_steps):
        if change is not None and step == NUM_STEPS - 1:
            change(pipe)
        x, y = batch(step)
        loss = pipe.train_step(x, y)
        x.zero_()
        found.append((loss * 1).tolist())
        for p in pipe.parameters():
            assert p.grad is not None
            found.append(p.grad.tolist())
            with torch.no_grad():
                p.sub_(0.1 * p.grad)
        pipe.zero_grad()
    return found


@pytest.fixture
def replays(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """The replays so far."""
    counted: list[None] = []
    graph: Any = torch.cuda.CUDAGraph
    replay = graph.replay

    def counting(self: Any) -> None:
        counted.append(None)
        replay(self)

    monkeypatch.setattr(graph, "replay", counting)
    return counted


@pytest.mark.parametrize(
    ("schedule", "num_stages", "modules", "recompute"),
    [
        (gpipe, 1, layers, "never"),
        (gpipe, 2, layers, "stage"),
        (one_f_one_b, 2, with_dropout, "stage"),
        (zb_h1(), 4, with_dropout, "never"),
        (interleaved_1f1b(2), 4, with_dropout, "layers"),
        (gpipe, 1, with_dropout, "layers"),
        (gpipe, 2, with_norms, "stage"),
        (one_f_one_b, 1, with_norms, "never"),
    ],
)
def test_steps_have_eagers_bits(
    memory: Memory,
    replays: list[None],
    schedule: Any,
    num_stages: int,
    modules: Any,
    recompute: str,
) -> None:
    how = {"schedule": schedule, "recompute": recompute}
    with piped(modules(), num_stages, **how) as pipe:
        wanted = train(pipe)
    with piped(modules(), num_stages, cuda_graphs=True, **how) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(pipe) == wanted
    assert len(replays) >= 2
    assert memory.races == []


class Words(nn.Module):
    """A model of texts: the first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Any:
        return self.head(self.middle(self.embed(words)).tanh())


def loss_of_next_words(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


@pytest.mark.parametrize("num_stages", (1, 2))
def test_weights_of_losses_and_their_scale_change_without_a_new_graph(
    memory: Memory, replays: list[None], num_stages: int
) -> None:
    """The texts are inputs and targets; a tied weight is in the first and the last stage."""

    def train_on_words(**how: Any) -> list[Any]:
        torch.manual_seed(0)
        model = penstock.capture(Words(), torch.zeros(2, 4, dtype=torch.int64))
        how |= {"loss": loss_of_next_words, "reduction": lambda words: float(words.sum())}
        how |= {"num_microbatches": 2, "devices": "cuda:0"}
        found: list[Any] = []
        with penstock.Pipeline(model, num_stages, **how) as pipe:
            for step in range(NUM_STEPS):
                words = torch.randint(11, (4, 4), generator=torch.Generator().manual_seed(step))
                words = words.to("cuda:0")
                found.append((pipe.train_step(words, words, loss_scale=2.0**step) * 1).tolist())
                found += [p.grad.tolist() for p in pipe.parameters() if p.grad is not None]
                pipe.zero_grad()
        return found

    wanted = train_on_words()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train_on_words(cuda_graphs=True) == wanted
    assert len(replays) == NUM_STEPS - 3
    assert memory.races == []


def test_a_layer_that_asks_for_a_number_runs_eagerly_after_one_warning(
    memory: Memory, replays: list[None]
) -> None:
    def modules() -> list[nn.Module]:
        return [Asks(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]

    with piped(modules(), 2, schedule=gpipe) as pipe:
        wanted = train(pipe)
    with (
        piped(modules(), 2, schedule=gpipe, cuda_graphs=True) as pipe,
        pytest.warns(ExecutionWarning, match="not permitted when") as warned,
    ):
        assert train(pipe) == wanted
    assert len(warned) == 1 and replays == []


def test_a_closed_pipeline_captures_again(memory: Memory, replays: list[None]) -> None:
    with piped(with_dropout(), 2) as pipe:
        wanted = train(pipe), train(pipe)
    with piped(with_dropout(), 2, cuda_graphs=True) as pipe:
        found = train(pipe)
        num_replays = len(replays)
        pipe.close()
        assert (found, train(pipe)) == wanted
    assert 0 < num_replays < len(replays) < 2 * NUM_STEPS - 2


def raise_p(pipe: Any) -> None:
    for module in pipe.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.6


def replace_data(pipe: Any) -> None:
    for p in pipe.parameters():
        p.data = p.data * 0.5


def freeze_modes(pipe: Any) -> None:
    pipe.eval()


@pytest.mark.parametrize("change", (raise_p, replace_data, freeze_modes))
def test_a_change_is_never_missed(memory: Memory, replays: list[None], change: Any) -> None:
    with piped(with_dropout(), 2, schedule=gpipe) as pipe:
        wanted = train(pipe, change)
    with piped(with_dropout(), 2, schedule=gpipe, cuda_graphs=True) as pipe:
        assert train(pipe, change) == wanted
    assert replays


def test_stages_on_several_devices_are_refused(memory: Memory) -> None:
    with pytest.raises(ConfigError, match="cuda_graphs=True, and"):
        piped(layers(), 2, devices=("cuda:0", "cuda:1"), cuda_graphs=True)


def test_processes_that_no_graphs_can_serve_are_refused(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with piped(layers(), 2) as pipe:
        plan = replace(pipe.plan, transport=Transport.TORCH_DISTRIBUTED)
    device = [torch.device("cuda:0")]
    alone = Placement.of(range(2))
    check_can_capture(plan, device, Mesh(alone))
    with pytest.raises(ConfigError, match="several processes share a stage"):
        check_can_capture(plan, device, Mesh(Placement.of(range(2), num_shards=2)))
    with pytest.raises(ConfigError, match=r"the processes \[2\] have no stage"):
        check_can_capture(plan, device, Mesh(replace(alone, idle=(2,))))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match="expandable_segments:True"):
        check_can_capture(plan, device, Mesh(alone))
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    check_can_capture(plan, device, Mesh(alone))
