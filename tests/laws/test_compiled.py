"""Compiled layers stay compiled in a pipeline, also where they draw random numbers."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import ConfigError
from penstock.runtime.random.streams import runs_and_draws
from tests.models import Model, vectors
from tests.side_by_side import assert_trains_like_unsplit, pipeline
from tests.ways import WAYS, one_each

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Guards may run slower"),  # on Python 3.13.0
]
"""Torch's own, while it compiles."""


class Block(nn.Module):  # a layer that draws
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).tanh()


class Calls(nn.Module):  # calls a function in its forward, inside torch's checkpoint or not
    def __init__(self, function: Callable[[Tensor], Tensor], *, checkpointed: bool) -> None:
        super().__init__()
        self.function, self.checkpointed = function, checkpointed

    def forward(self, x: Tensor) -> Any:
        if not self.checkpointed:
            return self.function(x)
        return checkpoint(self.function, x, use_reentrant=False)


class Counting:  # a backend that runs graphs as they are, and counts graphs and runs
    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: Any, example: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*values: Any) -> Any:
            self.runs += 1
            return graph(*values)

        return run


def compiled_in_place(backend: Any) -> nn.Module:
    block = nn.Sequential(Block())
    block.compile(backend=backend)
    return block


def compiled_inside(backend: Any) -> nn.Module:
    return nn.Sequential(nn.Tanh(), torch.compile(Block(), backend=backend))  # type: ignore[call-overload]  # torch types it as a function


def function_compiled(backend: Any, *, checkpointed: bool = False) -> nn.Module:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.3).cos()

    return Calls(torch.compile(function, backend=backend), checkpointed=checkpointed)


COMPILED = {
    "module.compile()": compiled_in_place,
    "a block in a layer": compiled_inside,
    "a function in a forward": function_compiled,
    "a function in a checkpoint": lambda backend: function_compiled(backend, checkpointed=True),
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


def layers(compiled: Callable[[Any], nn.Module], backend: Any) -> list[Any]:
    return [nn.Linear(6, 6), compiled(backend), Block(), compiled(backend), nn.Linear(6, 3)]


@pytest.mark.parametrize("compiled, way", one_each(COMPILED, WAYS))
def test_compiled_layers_that_draw_stay_compiled_and_equal_the_unsplit_model(
    compiled: str, way: dict[str, Any]
) -> None:
    backend = Counting()
    model = Model("compiled", lambda: layers(COMPILED[compiled], backend), vectors, F.mse_loss)
    assert_trains_like_unsplit(model, 6, partition=(2, 3), num_microbatches=3, **way)
    with pipeline(model, model.build(), partition=(2, 3), num_microbatches=3, **way) as pipe:
        for number, batch in enumerate(model.batches(6, 4)):
            backend.runs = 0
            pipe.train_step(*batch)
            assert backend.runs >= 6, f"step {number} ran uncompiled"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_that_draw_equal_the_compiled_unsplit_model(way: dict[str, Any]) -> None:
    model = Model("inductor", lambda: layers(compiled_inside, "inductor"), vectors, F.mse_loss)
    for num_stages in (1, 2):
        assert_trains_like_unsplit(model, 6, num_stages=num_stages, num_microbatches=3, **way)


@pytest.mark.parametrize("kind", [nn.Linear, Block])
def test_a_captured_block_is_compiled_where_it_is_without_a_pipeline(kind: Any) -> None:
    """Torch leaves some of its own modules as they are, by where they are written."""

    def runs(*, is_captured: bool) -> int:
        torch.compiler.reset()
        counting, block = Counting(), kind(6, 6) if kind is nn.Linear else kind()
        block.compile(backend=counting)
        model = nn.Sequential(nn.Linear(6, 6), block)
        if is_captured:
            penstock.capture(model, torch.ones(2, 6), check=False)
        counting.runs = 0
        block(torch.ones(2, 6))
        return counting.runs

    assert runs(is_captured=True) == runs(is_captured=False)


def test_torch_compiles_in_another_thread_only_when_no_layer_draws() -> None:
    """torch puts the generators back to their state before it compiled, whoever drew since."""
    compiles, drawn = threading.Event(), threading.Event()

    def backend(graph: Any, example: Any) -> Any:
        compiles.set()
        drawn.wait(10)
        return graph

    function = torch.compile(lambda x: x + 1, backend=backend)
    thread = threading.Thread(target=function, args=(torch.ones(2),))

    def draw_twice() -> tuple[Tensor, Tensor]:
        thread.start()
        compiles.wait(0.5)  # in vain, if it waits
        first = torch.rand(3)
        drawn.set()
        thread.join(0.5)
        return first, torch.rand(3)

    (first, second), *_ = runs_and_draws(5, draw_twice, torch.device("cpu"))
    thread.join(10)
    assert compiles.is_set()
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))
    assert torch.equal(second, torch.rand(3))


class Outer(nn.Module):  # draws, and runs a pipeline of its own, which compiles in its threads
    def __init__(self, inner: penstock.Pipeline) -> None:
        super().__init__()
        self.inner = [inner]

    def forward(self, x: Tensor) -> Any:
        return self.inner[0](F.dropout(x, 0.5))


@pytest.mark.timeout(60, method="thread")  # else its workers keep the process alive
def test_a_pipeline_inside_a_layer_compiles_in_its_own_threads() -> None:
    counting = Counting()
    inner = [compiled_in_place(counting), compiled_in_place(counting)]
    with penstock.Pipeline(inner, 2, num_microbatches=1) as pipe:
        outer = [nn.Linear(6, 6), Outer(pipe)]
        with penstock.Pipeline(outer, 2, num_microbatches=2, loss=F.mse_loss) as outer_pipe:
            for _ in range(3):
                outer_pipe.train_step(torch.ones(4, 6), torch.ones(4, 6))
    assert counting.graphs


# -- Pipeline(compile=...) ------------------------------------------------------------------------


def blocks() -> list[Any]:
    """Layers of the user's own and of torch, one of them twice, one of them in parts."""
    ends = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)
    return [ends[0], Block(), nn.LayerNorm(6), Block(), ends[0], ends[1]]


@pytest.mark.parametrize("backend, way", one_each(("counting", "aot_eager"), WAYS))
def test_a_pipeline_compiles_each_layer_and_equals_the_unsplit_model(
    backend: str, way: dict[str, Any]
) -> None:
    counting = Counting()
    compile = {"backend": counting if backend == "counting" else backend}
    model = Model("compile=", blocks, vectors, F.mse_loss)
    options = {"num_microbatches": 3, "compile": compile, **way}
    assert_trains_like_unsplit(model, 7, partition=(5, 1), **options)
    if backend == "counting":
        assert counting.graphs
        assert counting.runs


def test_layers_are_compiled_in_the_thread_that_calls_the_pipeline() -> None:
    """Torch seeds Python's generator while it compiles: two threads would mix their seeds."""
    threads = set()

    def backend(graph: Any, example: Any) -> Any:
        threads.add(threading.current_thread())
        return graph

    options: Any = {"partition": (5, 1), "num_microbatches": 3, "loss": F.mse_loss}
    x, target = torch.ones(6, 6), torch.ones(6, 3)
    with penstock.Pipeline(blocks(), compile={"backend": backend}, **options) as pipe:
        for _ in range(2):
            pipe.train_step(x, target)
    assert threads == {threading.current_thread()}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_compiled_by_inductor_equals_the_compiled_unsplit_model(
    way: dict[str, Any],
) -> None:
    def compiled() -> list[Any]:
        layers = blocks()
        penstock.Pipeline(layers, 1, compile=True)
        return layers

    model = Model("compile=True", compiled, vectors, F.mse_loss)
    for partition in ((6,), (5, 1)):
        options = {"num_microbatches": 3, "compile": True, **way}
        assert_trains_like_unsplit(model, 7, partition=partition, **options)


class Deep(nn.Module):  # more equal blocks than torch keeps versions of one function
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(12))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("recompute", ["never", "stage", "layers"])
def test_equal_blocks_are_compiled_once_for_all_steps_and_recomputes(recompute: str) -> None:
    """In one thread: where two look for a graph at once, torch may compile it twice."""
    model, counting = Deep(), Counting()
    names, x = [*model.state_dict()], torch.ones(6, 6)
    options: Any = {"recompute": recompute, "compile": {"backend": counting}}
    options |= {"partition": (6, 7), "num_microbatches": 3, "loss": F.mse_loss}
    options["transport"] = penstock.Transport.LOOPBACK
    layers = penstock.capture(model, x[:2])
    with penstock.Pipeline(layers, **options) as pipe:
        pipe.train_step(x, x)
        graphs = counting.graphs
        assert graphs == 3, "blocks with an input that needs a gradient, and without; the head"
        for _ in range(3):
            counting.runs = 0
            pipe.train_step(x, x)
            assert counting.graphs == graphs
            assert counting.runs >= 13 * 3
        assert [*model.state_dict()] == names == [*pipe.state_dict()]
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.allclose(copied(x), model(x))


def test_nine_kinds_of_layers_stay_compiled() -> None:
    counting = Counting()
    layers = [nn.Linear(6, 6), *(nn.Softplus(beta=1 + n) for n in range(9)), nn.Linear(6, 6)]
    with penstock.Pipeline(layers, 1, loss=F.mse_loss, compile={"backend": counting}) as pipe:
        pipe.train_step(torch.ones(4, 6), torch.ones(4, 6))
    assert counting.graphs >= 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("inductor", "give True, or options of torch.compile in a dictionary"),
        ({"backend": "inducter"}, "torch.compile says: .*inducter"),
        ({"fast": True}, "torch.compile says: .*fast"),
        ({"dynamic": None}, "order of calls"),
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead' runs CUDA graphs"),
        ({"backend": "cudagraphs"}, "backend='cudagraphs' runs CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "triton.cudagraphs runs CUDA graphs"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        penstock.Pipeline(blocks(), 1, compile=options)
