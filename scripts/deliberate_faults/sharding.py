"""Faults of operators that are divided among processes."""

from .fault import Fault

_FUZZ = "tests/sharding/test_fuzz.py::test_random_plans_give_what_the_module_gives[short-{}]"

FAULTS = (
    Fault(
        "attention drops weights by a mask of each device's own heads",
        "penstock/sharding/kernels_language.py",
        "if not given.dropout_p or not any(",
        "if given or not any(",
        _FUZZ.format("(2,)"),
    ),
    Fault(
        "a slice along two axes begins where that of the last axis does",
        "penstock/sharding/kernels.py",
        "            for axis, state in zip(self.axes, layout, strict=True)\n"
        "            if isinstance(state, S) and state.dim == dim\n",
        "            for axis, state in zip(self.axes[-1:], layout[-1:], strict=True)\n"
        "            if isinstance(state, S) and state.dim == dim\n",
        _FUZZ.format("(2, 2)"),
    ),
    Fault(
        "BatchNorm's buffers are changed in a copy that is lost",
        "penstock/sharding/kernels_vision.py",
        "whole.copy_(convert(part, own, (I,) * len(own), local.axes))",
        "convert(part, own, (I,) * len(own), local.axes)",
        _FUZZ.format("(2,)"),
    ),
    Fault(
        "a conversion of partial sums is planned and not made",
        "penstock/sharding/run.py",
        "        if layout == tensor.held:\n",
        '        if layout == tensor.held or "P" in map(repr, tensor.held):\n',
        "tests/sharding/test_memory.py",
        "sends",
    ),
    Fault(
        "a conversion that several calls share is made for each",
        "penstock/sharding/run.py",
        "        if layout not in known:\n",
        "        if known is not None:\n",
        "tests/sharding/test_memory.py",
        "sends",
    ),
    Fault(
        "each process sums gradients in an order of its own",
        "penstock/sharding/divided.py",
        "[weight for weight, layout in held.items() if layout[n] is R] for n",
        "list({weight for weight, layout in held.items() if layout[n] is R}) for n",
        "tests/sharding/test_pipeline.py",
        "by_keywords and pins",
    ),
    Fault(
        "a norm is summed over an axis once for each weight",
        "penstock/sharding/at_rest.py",
        "axes = dict.fromkeys(axis for cut in",
        "axes = list(axis for cut in",
        "tests/sharding/test_pipeline.py",
        "test_shards_train and not stages and not replicas",
    ),
    Fault(
        "weights that are gathered lie in memory otherwise than before",
        "penstock/sharding/at_rest.py",
        "for weight, strides in self._strides.items():",
        "for weight, strides in ():",
        "tests/distributed/test_zero_processes.py",
        "plain_optimizer",
    ),
    Fault(
        "shards with other batches wait for each other",
        "penstock/runtime/microbatches.py",
        "        if any(said.shapes for said in everyone):\n",
        "        if False:\n",
        "tests/sharding/test_pipeline.py",
        "do_not_share",
    ),
    Fault(
        "an all-to-all is priced as if each device had the whole",
        "penstock/sharding/costs.py",
        "own = num_bytes / len(group) if move is Move.ALL_TO_ALL else num_bytes",
        "own = num_bytes",
        "tests/sharding/test_recovered.py",
        "exchanged",
    ),
    Fault(
        "a call with more results than planned ends its layer's loop",
        "penstock/sharding/run.py",
        "        if len(leaves) != len(sized.gives):\n",
        "        if not leaves:\n",
        "tests/sharding/test_program.py",
        "another_number",
    ),
    Fault(
        "shards of another number put what they gather at the beginning of each message",
        "penstock/transport/crossing.py",
        "self._of_shards = [Share(n, n + 1, count) for n in range(count)]",
        "self._of_shards = [Share(0, 1, count) for n in range(count)]",
        "tests/distributed/test_unlike_meshes.py",
        "not slow",
    ),
    Fault(
        "a slice is read from the beginning of what a file has",
        "penstock/checkpoint/pieces.py",
        "found: Tensor = part[_from(both, piece.offsets)]",
        "found: Tensor = part[_from([(0, b - a) for a, b in both], (0,) * len(both))]",
        "tests/checkpoint/test_pieces.py",
    ),
    Fault(
        "a stage may keep a micro-batch more than its memory holds",
        "penstock/planner/stage_table.py",
        "self.deepest = np.where(room < 0, 0, np.floor(many))",
        "self.deepest = np.where(room < 0, 0, np.floor(many) + 1)",
        "tests/planner/test_submeshes.py",
    ),
    Fault(
        "code before the first block of a model counts as its first layer's",
        "penstock/costs/count.py",
        "recorder.begin(0, is_between=True)",
        "recorder.begin(0)",
        "tests/sharding/test_zoo.py::test_the_zoo_on_unlike_meshes_is_the_unsplit_model[2 + 2]",
    ),
    Fault(
        "what was gathered for a layer outlives its call",
        "penstock/sharding/divided.py",
        "self._lent_as[parameter].become(parameter, layout)",
        "pass",
        "tests/sharding/test_memory.py::"
        "test_no_weight_stays_whole_after_a_layer_and_only_gathered_ones_come_again",
    ),
    Fault(
        "weights that are kept for a step count as gathered for each micro-batch",
        "penstock/sharding/costs.py",
        "1 / self.num_microbatches if self.keeps else 1 + is_saved",
        "1 + is_saved",
        "tests/sharding/test_program.py::test_what_is_done_once_a_step_is_shared_by_its_microbatches",
    ),
    Fault(
        "operators of a layer that was measured take what is estimated",
        "penstock/sharding/costs.py",
        "return own * self.factor(call.layer)",
        "return own",
        "tests/automatic/test_measured.py",
    ),
)
