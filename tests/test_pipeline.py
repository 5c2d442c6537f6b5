"""The front door: what a Pipeline is as a module, and what it says of itself."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import penstock
from penstock import Pipeline, Recompute, Trace, Transport
from penstock.errors import ConfigError
from penstock.schedules import gpipe, one_f_one_b
from tests.every_schedule import EVERY_SCHEDULE
from tests.ways import IN_ONE_PROCESS


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, 4), torch.randint(0, 3, (12,))


def pipeline(layers: nn.Sequential, **options: object) -> Pipeline:
    settings = {"num_microbatches": 4, "loss": nn.CrossEntropyLoss(), "threads_per_stage": 1}
    return Pipeline(layers, **{**settings, **options})  # type: ignore[arg-type]


def test_parameters_and_state_have_the_models_own_names() -> None:
    unsplit = model()
    pipe = pipeline(copy.deepcopy(unsplit), num_stages=3)
    assert list(pipe.state_dict()) == list(unsplit.state_dict())
    assert [n for n, _ in pipe.named_parameters()] == [n for n, _ in unsplit.named_parameters()]
    unsplit.load_state_dict(pipe.state_dict())
    pipe.load_state_dict(unsplit.state_dict())


def test_a_loss_with_state_is_no_layer_and_comes_after_the_model() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    pipe = pipeline(model(), num_stages=2, loss=weighted)
    assert list(pipe.state_dict()) == [*model().state_dict(), "loss.weight"]
    assert len(pipe) == len(model())


def test_it_is_indexed_and_counted_like_a_sequential() -> None:
    layers = model()
    pipe = pipeline(layers, num_stages=2)
    assert len(pipe) == 5
    assert pipe[0] is layers[0]
    assert pipe[-1] is layers[4]
    assert list(pipe) == list(layers)
    part = pipe[1:3]
    assert isinstance(part, nn.Sequential)
    assert [*part] == [layers[1], layers[2]]


@pytest.mark.parametrize(
    "args, keywords, given",
    [
        pytest.param((), {}, "0 positional", id="nothing"),
        pytest.param((1, 2), {}, "2 positional", id="two values"),
        pytest.param((), {"ids": 1}, "ids", id="a name"),
        pytest.param((1,), {"mask": 2, "ids": 3}, "1 positional, mask, ids", id="both"),
        pytest.param((1,), {"inputs": 1}, "1 positional, inputs", id="twice"),
    ],
)
def test_layers_are_called_with_one_value(
    args: tuple[int, ...], keywords: dict[str, int], given: str
) -> None:
    x = batch()[0]
    pipe = pipeline(model(), num_stages=2)
    for called in (pipe, pipe.eval_step):
        with pytest.raises(ConfigError, match=rf"with one value.*arguments: {given}\. .*capture"):
            called(*[x for _ in args], **dict.fromkeys(keywords, x))
    assert torch.equal(pipe.eval_step(inputs=x), pipe.eval_step(x))


def test_it_says_how_it_was_cut() -> None:
    pipe = pipeline(model(), num_stages=2)
    assert "balanced by parameter counts, until the first batch is measured" in repr(pipe)
    pipe.train_step(*batch())
    assert "balanced by measured time" in repr(pipe)
    assert sum(pipe.partition) == 5
    assert "stage 1 on cpu" in repr(pipe)
    assert "as given" in repr(pipeline(model(), partition=[2, 3]))
    pipe.close()


def test_example_inputs_balance_it_at_once() -> None:
    pipe = pipeline(model(), num_stages=2, example_inputs=batch()[0])
    assert "balanced by measured time" in repr(pipe)


def test_measuring_leaves_no_trace() -> None:
    layers = model()
    before = copy.deepcopy(layers.state_dict())
    inputs, _ = batch()
    state = torch.get_rng_state()
    pipeline(layers, num_stages=2, example_inputs=inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in layers.state_dict().items())
    assert all(parameter.grad is None for parameter in layers.parameters())


def test_train_and_eval_reach_every_layer_and_eval_step_puts_them_back() -> None:
    with pipeline(model(), num_stages=2) as pipe:
        pipe[3].eval()
        pipe.eval_step(batch()[0])
        assert [layer.training for layer in pipe] == [True, True, True, False, True]
        pipe.eval()
        assert not any(layer.training for layer in pipe)


def test_to_another_dtype_trains_in_it() -> None:
    with pipeline(model(), num_stages=2) as pipe:
        pipe.to(torch.float64)
        x, y = batch()
        assert pipe.train_step(x.double(), y).dtype is torch.float64


@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_a_traced_step_ran_what_the_schedule_says(schedule: object, transport: Transport) -> None:
    with pipeline(
        model(), partition=[2, 3], schedule=schedule, transport=transport, trace=True
    ) as pipe:
        assert pipe.last_timeline is None
        pipe.train_step(*batch())
        assert pipe.last_timeline is not None
        assert pipe.last_timeline.schedule == pipe.schedule_for()
        assert all(span.duration_s >= 0 for span in pipe.last_timeline.spans)
        pipe.trace = False
        pipe.train_step(*batch())
        assert pipe.last_timeline is None


def test_recompute_keeps_less_and_1f1b_keeps_less_than_gpipe() -> None:
    def peak(**options: object) -> int:
        layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4))
        )
        with pipeline(
            layers, partition=[2, 2], loss=nn.MSELoss(), trace=Trace.MEMORY, **options
        ) as pipe:
            pipe.train_step(torch.randn(16, 16), torch.randn(16, 16))
            assert pipe.last_timeline is not None
            return sum(pipe.last_timeline.peak_bytes().values())

    everything = peak(recompute=Recompute.NEVER, schedule=gpipe)
    assert peak(recompute=Recompute.STAGE, schedule=gpipe) < everything / 2
    assert peak(recompute=Recompute.NEVER, schedule=one_f_one_b) < everything


def test_nothing_is_kept_when_the_step_is_over() -> None:
    with pipeline(model(), num_stages=2, trace=Trace.MEMORY) as pipe:
        pipe.train_step(*batch())
        assert pipe.last_timeline is not None
        last = {sample.stage: sample.kept_bytes for sample in pipe.last_timeline.memory}
        assert last == {0: 0, 1: 0}


def test_a_step_leaves_no_tensor_behind() -> None:
    seen: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    class Remember(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            seen.add(y)
            return y

    layers = nn.Sequential(nn.Linear(4, 4), Remember(), nn.Linear(4, 3))
    with pipeline(layers, partition=[2, 1]) as pipe:
        gc.disable()
        try:
            for _ in range(3):
                pipe.train_step(*batch())
            pipe.eval_step(batch()[0])
            assert len(seen) == 0
        finally:
            gc.enable()


def test_public_names_resolve() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'pipelines'"):
        penstock.pipelines  # noqa: B018 - wrong on purpose


def test_dropout_that_begins_later_is_keyed_from_its_first_step() -> None:
    def gradients(num_stages: int) -> list[torch.Tensor]:
        dropout = nn.Dropout(0.0)
        layers = nn.Sequential(model()[0], dropout, model()[2], model()[4])
        with pipeline(layers, num_stages=num_stages) as pipe:
            for probability in (0.0, 0.3, 0.5):
                dropout.p = probability
                torch.manual_seed(1)
                pipe.train_step(*batch())
        return [p.grad for p in layers.parameters() if p.grad is not None]

    for one, three in zip(gradients(1), gradients(3), strict=True):
        assert torch.equal(one, three)
