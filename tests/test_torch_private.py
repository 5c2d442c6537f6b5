"""Each private name of torch does what Penstock takes it for; a new torch is judged by these."""

import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from penstock import torch_private as private
from penstock.errors import NEWEST_TORCH, OLDEST_TORCH, TorchError

ROOT = Path(__file__).parents[1]
WORKS = "Penstock works with torch {}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TORCH)


class Seeing(Tensor):
    """A subclass that counts the operations it is shown."""

    functions = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Seeing.functions += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class SeeingBelow(Tensor):
    """The same, one level below."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance's method
        cls, func, types, args=(), kwargs=None
    ):
        raise AssertionError(f"{func} was dispatched")


class SeeingAll(torch.overrides.TorchFunctionMode):
    """Counts the operations on any tensor."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class SeeingOperators(private.TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[private.OpOverload] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_subclass_sees_no_functions_where_they_are_switched_off_and_modes_do() -> None:
    tensor = torch.ones(2).as_subclass(Seeing)
    before = Seeing.functions
    with SeeingAll() as mode, private.without_torch_function():
        torch.add(tensor, 1)
    assert Seeing.functions == before
    assert mode.count == 1


def test_modes_see_no_functions_where_all_are_switched_off() -> None:
    with SeeingAll() as mode, private.without_any_torch_function():
        torch.add(torch.ones(2), 1)
    assert mode.count == 0


def test_a_subclass_sees_no_operators_where_they_are_switched_off() -> None:
    with private.without_torch_function(), private.without_torch_dispatch():
        torch.ones(2).as_subclass(SeeingBelow).add(1)


def test_a_dispatch_mode_sees_operators_and_their_arguments() -> None:
    tensor = torch.ones(2)
    with SeeingOperators() as mode:
        tensor.mul_(0.5)
        torch.bernoulli(tensor)
    changed, drawn = mode.seen
    assert [(a.name, a.is_write) for a in private.arguments_of(changed)] == [
        ("self", True),
        ("other", False),
    ]
    assert all(isinstance(operator, private.OpOverload) for operator in mode.seen)
    assert [str(a.type) for a in private.arguments_of(drawn)] == ["Tensor", "Optional[Generator]"]


@pytest.mark.parametrize("kind", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
def test_every_batch_norm_has_one_base(kind: type[nn.Module]) -> None:
    assert issubclass(kind, private.AnyBatchNorm)
    assert not issubclass(nn.InstanceNorm1d, private.AnyBatchNorm)


@pytest.mark.parametrize("kind", (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))
def test_every_dropout_has_one_base(kind: type[nn.Module]) -> None:
    assert issubclass(kind, private.AnyDropout)


def test_fake_tensors_have_shapes() -> None:
    with private.fake_tensors():
        tensor = torch.ones(3, 4)
        assert (tensor @ tensor.T).shape == (3, 3)
        assert "FakeTensor" in repr(tensor)


def test_a_change_in_place_is_counted() -> None:
    tensor = torch.ones(2)
    before = private.version_counter(tensor)
    tensor.add_(1)
    assert private.version_counter(tensor) == before + 1
    with torch.inference_mode(), pytest.raises(RuntimeError):
        private.version_counter(torch.ones(2))


def test_hooks_on_what_is_saved_are_seen() -> None:
    assert private.saving_hooks() is None
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert private.saving_hooks() is not None

    def function(tensor: Tensor) -> Tensor:
        seen.append(private.saving_hooks())
        return tensor * 2

    seen: list[object] = []
    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert seen != [None]


def test_nodes_are_numbered_as_they_are_made() -> None:
    tensor = torch.ones(2, requires_grad=True)
    first = private.next_node_number()
    result = (tensor * 2).sum()
    node = result.grad_fn
    assert node is not None
    number = private.node_number(node)
    assert first + 1 == number == private.next_node_number() - 1


def test_nodes_of_each_thread_are_numbered_for_themselves() -> None:
    before = private.next_node_number()
    thread = threading.Thread(target=lambda: torch.ones(2, requires_grad=True) * 2)
    thread.start()
    thread.join()
    assert private.next_node_number() == before


def test_storages_without_memory_are_told_apart() -> None:
    one, other = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    assert private.storage_id(one) == private.storage_id(one.view(1, 2))
    assert private.storage_id(one) != private.storage_id(other)


def test_the_hooks_of_a_gradient_are_seen_and_there_to_be_written() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert private.gradient_hooks(parameter) == (None, None)
    assert not private.has_tensor_hooks(parameter)
    parameter.register_hook(lambda gradient: gradient * 2)
    assert private.has_tensor_hooks(parameter)
    assert not private.has_accumulation_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3))
    assert private.has_accumulation_hooks(parameter)
    for hooks in private.gradient_hooks(parameter):
        assert len(hooks) == 1
        hooks.clear()
    parameter.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1, 1]


def test_what_a_node_saved_is_read_unless_a_hook_would_unpack_it() -> None:
    x, weight = torch.ones(3, 2), torch.ones(2, 4, requires_grad=True)
    node = x.mm(weight).grad_fn
    assert node is not None
    saved = private.saved_tensors(node, "self")
    assert saved is not None
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
    assert private.saved_tensors(node, "self", "mat3") is None
    assert private.saved_numbers(node, "mat2_sym_sizes", "mat2_sym_strides") == [(2, 4), (4, 1)]
    assert private.saved_numbers(node, "mat2_sym_sizes", "mat3_sym_sizes") is None
    with saved_tensors_hooks(lambda t: t, lambda t: pytest.fail("was unpacked")):
        packed = x.mm(weight).grad_fn
    assert packed is not None
    assert private.saved_tensors(packed, "self") is None


def test_a_checkpoint_without_reentry_runs_what_takes_its_place() -> None:
    ran = []

    def replacement(*args: object, **kwargs: object) -> Iterator[None]:
        ran.append("before")
        yield from current(*args, **kwargs)
        ran.append("after")

    current = torch.utils.checkpoint.__dict__[private.checkpoint_generator.__name__]
    tensor = torch.ones(2, requires_grad=True)
    private.replace_checkpoint_generator(replacement)
    try:
        checkpoint(torch.sin, tensor, use_reentrant=False).sum().backward()
    finally:
        private.replace_checkpoint_generator(current)
    assert ran == ["before", "after"]
    assert tensor.grad is not None
    assert torch.equal(tensor.grad, torch.ones(2).cos())


def test_distributions_draw_by_functions_that_are_known() -> None:
    tensor = torch.ones(2)
    states = []
    for function in private.DRAWING_FUNCTIONS:
        states.append(torch.get_rng_state())
        function(tensor)
        assert not torch.equal(torch.get_rng_state(), states[-1])
    assert len(states) == 2


class Registering(nn.Module):
    """Has one of each thing that a module registers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("saved", torch.ones(2))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.child = nn.Identity()

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor * self.weight


def test_the_dictionaries_of_a_module_are_its_own_and_may_be_written() -> None:
    module = Registering()
    assert list(private.parameters_of(module)) == ["weight"]
    assert list(private.buffers_of(module)) == ["saved", "unsaved"]
    assert list(private.children_of(module)) == ["child"]
    assert private.unsaved_buffers_of(module) == {"unsaved"}
    private.buffers_of(module)["saved"] = new = torch.zeros(2)
    assert module.saved is new


def test_a_module_may_take_over_what_another_one_registers() -> None:
    module, other = Registering(), nn.Module()
    vars(other).update(private.registered_of(module))
    assert dict(other.named_parameters()) == dict(module.named_parameters())
    assert list(other.state_dict()) == ["weight", "saved"]
    names = {private.CHILDREN, private.PARAMETERS, private.BUFFERS}
    assert names < set(private.registered_of(module))


@pytest.mark.parametrize(
    "register",
    (
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    ),
    ids=("forward", "forward_pre", "backward", "backward_pre"),
)
def test_hooks_of_every_kind_are_seen(
    register: Callable[[nn.Module], object], request: pytest.FixtureRequest
) -> None:
    module = nn.Identity()
    assert not private.has_hooks(module)
    register(module)
    assert private.has_hooks(module)
    assert private.has_gradient_hooks(module) == ("backward" in request.node.callspec.id)


def test_a_forward_hook_is_found_by_its_number_and_may_be_replaced() -> None:
    module = nn.Identity()
    plain = module.register_forward_hook(lambda module, args, result: result)
    other = module.register_forward_hook(lambda module, args, kwargs, result: 0, with_kwargs=True)
    assert list(private.forward_hooks_of(module)) == [plain.id, other.id]
    assert not private.wants_kwargs(module, plain.id)
    assert private.wants_kwargs(module, other.id)
    private.forward_hooks_of(module)[other.id] = lambda module, args, kwargs, result: result + 1
    assert module(1) == 2


def test_what_a_compiled_module_was_is_found() -> None:
    module = nn.Linear(2, 2)
    assert private.uncompiled(module) is None
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert private.uncompiled(compiled) is module
    module.compile(backend="eager")
    written = private.uncompiled(module)
    assert written is not None
    inputs = torch.ones(1, 2)
    assert torch.equal(written(inputs), nn.functional.linear(inputs, module.weight, module.bias))


@pytest.mark.parametrize(
    "module", (nn.Linear(2, 2), nn.LayerNorm(2), nn.MultiheadAttention(2, 1)), ids=repr
)
def test_initial_values_of_torchs_modules_can_be_drawn_anew(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.fill_(7.0)
    reset = private.reset_of(module)
    assert reset is not None
    reset()
    assert not any((p == 7.0).any() for p in module.parameters(recurse=False))
    assert private.reset_of(nn.ReLU()) is None


def test_all_tensors_of_a_module_are_moved() -> None:
    module = Registering()
    private.move_tensors(module, lambda tensor: tensor + 1)
    assert all((tensor == 2).all() for tensor in (*module.parameters(), *module.buffers()))


def test_a_module_is_told_after_it_was_moved() -> None:
    class Told(private.AbstractMovable):
        def _after_move(self, function: Callable[[Tensor], Tensor]) -> None:
            told.append(next(self.parameters()).dtype)

    told: list[torch.dtype] = []
    module = Told()
    module.weight = nn.Parameter(torch.ones(2))
    assert module.half() is module
    assert told == [torch.half]


def test_a_scaler_shares_what_it_found_before_it_decides() -> None:
    class Alarmed(private.AbstractSharedScaler):
        def share(self, look, found_inf):
            looked.append(look())
            return {found_inf.device: found_inf.fill_(1.0)}

    looked: list[dict[torch.device, Tensor]] = []
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = Alarmed("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert [float(found) for each in looked for found in each.values()] == [0.0]
    assert torch.equal(parameter.detach(), torch.ones(2))
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.ones(2))


def test_the_store_that_processes_met_at_is_found() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        private.default_store().set("key", "value")
        assert private.default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_the_modes_of_a_thread_are_listed() -> None:
    assert private.dispatch_modes() == private.function_modes() == []
    with SeeingOperators() as dispatch, SeeingAll() as function:
        assert private.dispatch_modes() == [dispatch]
        assert private.function_modes() == [function]


def test_a_default_device_is_told_from_other_function_modes() -> None:
    with torch.device("meta"), SeeingAll():
        found = [private.is_default_device(mode) for mode in private.function_modes()]
    assert found == [True, False]


def test_a_profiler_of_this_thread_is_seen() -> None:
    seen = [private.is_profiled()]
    with torch.profiler.profile(acc_events=True):
        seen.append(private.is_profiled())
        thread = threading.Thread(target=lambda: seen.append(private.is_profiled()))
        thread.start()
        thread.join()
    assert [*seen, private.is_profiled()] == [False, True, False, False]


def test_hooks_that_are_disabled_say_why() -> None:
    assert private.disabled_hooks() is None
    with disable_saved_tensors_hooks("the reason"):
        assert private.disabled_hooks() == "the reason"
        assert private.saving_hooks() is None
    assert private.disabled_hooks() is None


def test_a_call_of_a_compiled_function_runs_code_of_the_module_named() -> None:
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, example: graph)
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(str(frame.f_globals.get("__name__"))))
    try:
        compiled(torch.ones(2))
    finally:
        sys.setprofile(None)
    assert private.COMPILED_CALLS in names


# -- a torch that Penstock does not work with ---------------------------------------------------


def run(*arguments: str, stub: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, with another torch before the installed one."""
    folders = [str(folder) for folder in (stub, ROOT) if folder is not None]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.fixture
def old_torch(tmp_path: Path) -> Path:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.9.0"\n')
    return tmp_path


def test_an_old_torch_is_refused_when_it_is_first_needed(old_torch: Path) -> None:
    done = run("-c", "import penstock; penstock.schedules; penstock.Pipeline", stub=old_torch)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"penstock.errors.TorchError: {WORKS}, and torch 2.9.0 is installed")
    assert issubclass(TorchError, ImportError)


@pytest.mark.slow
@pytest.mark.parametrize("module", ("model.capture.capture", "runtime.executor"))
def test_an_old_torch_is_refused_by_a_module_that_is_imported_directly(module: str) -> None:
    program = f"import torch; torch.__version__ = '2.9.0'; import penstock.{module}"
    last = run("-c", program).stderr.splitlines()[-1]
    assert last.startswith(f"penstock.errors.TorchError: {WORKS}, and torch 2.9.0 is installed")


@pytest.mark.parametrize(
    "words",
    (
        ("train", "digits"),
        ("train", "digits", "--num-processes", "2"),
        ("check", "digits"),
        ("doctor",),
    ),
    ids=" ".join,
)
def test_a_command_refuses_an_old_torch_in_one_line(old_torch: Path, words: tuple) -> None:
    done = run("-m", "penstock", *words, stub=old_torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"penstock: {WORKS}, and torch 2.9.0 is installed; pip .*\n", done.stderr)


def test_what_needs_no_torch_works_beside_an_old_one(old_torch: Path) -> None:
    words = ("simulate", "--num-stages", "2", "--num-microbatches", "2")
    assert run("-m", "penstock", *words, stub=old_torch).returncode == 0


@pytest.mark.parametrize(
    "name",
    (
        "torch._C.DisableTorchFunctionSubclass",
        pytest.param("torch.nn.modules.batchnorm._BatchNorm", marks=pytest.mark.slow),
    ),
)
def test_a_torch_without_a_needed_name_is_refused_by_that_name(name: str) -> None:
    program = f"import torch; del {name}; import penstock; penstock.Pipeline"
    last = run("-c", program).stderr.splitlines()[-1]
    assert last.startswith(f"penstock.errors.TorchError: {WORKS}, and torch {torch.__version__} ")
    assert name.rpartition(".")[2] in last


def test_the_bound_that_pip_reads_is_the_oldest_torch_that_was_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>={}.{}".format(*OLDEST_TORCH) in project["dependencies"]


def test_cached_weights_are_those_of_a_thread() -> None:
    private.cache_weights_per_thread()
    layer = parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Tanh())

    def reads_alike() -> bool:
        return layer.weight is layer.weight

    def elsewhere() -> list[bool]:
        found = [bool(private.cached_weights.depth), reads_alike()]
        with parametrize.cached(), parametrize.cached():
            return [
                *found,
                bool(private.cached_weights.depth),
                reads_alike(),
                layer.weight is here,
            ]

    with parametrize.cached():
        here = layer.weight
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(elsewhere).result() == [False, False, True, True, False]
        assert bool(private.cached_weights.depth) and layer.weight is here
        with private.without_cached_weights():
            assert not bool(private.cached_weights.depth) and not reads_alike()
            with parametrize.cached():
                assert reads_alike() and layer.weight is not here
        assert layer.weight is here
    assert not bool(private.cached_weights.depth) and not reads_alike()
    with parametrize.cached():
        assert layer.weight is not here


def test_a_change_that_is_not_counted_leaves_the_version_as_it_was() -> None:
    tensor = torch.zeros(2)
    before = private.version_counter(tensor)
    with private.uncounted_changes((tensor,)):
        tensor.add_(1)
    assert private.version_counter(tensor) == before
    assert tensor.tolist() == [1, 1]


def test_a_scheduler_knows_of_steps_that_it_has_not_seen_and_hooks_are_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert not private.note_steps(optimizer)
    scheduler.step()  # a warning would fail the test
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.register_step_pre_hook(print)
    assert private.note_steps(optimizer)
