"""Apply each deliberate fault to a copy of the repository and see that its test fails.

    python scripts/deliberate_faults.py            every fault, and the table for CONTRIBUTING.md

A fault that no test catches, or that no longer fits the code, ends the script with an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Fault:
    """Replace `right` by `wrong` in `file`; `test` (cases that match `only`) must then fail."""

    name: str
    file: str
    right: str
    wrong: str
    test: str
    only: str = ""


FAULTS = (
    Fault(
        "gradients accumulate in reversed micro-batch order",
        "penstock/schedules/gpipe.py",
        "for i in range(num_microbatches):\n            yield Backward(stage, i)",
        "for i in reversed(range(num_microbatches)):\n            yield Backward(stage, i)",
        "tests/unit/test_schedules.py::test_gpipe_runs_all_forwards_then_all_backwards_in_order",
    ),
    Fault(
        "the verifier lets any backward order pass",
        "penstock/schedules/verify.py",
        "if i != self._backwards[s]:",
        "if i < 0:",
        "tests/unit/test_verify.py::test_what_is_wrong_is_named",
    ),
    Fault(
        "a recompute sees today's buffers instead of the forward's",
        "penstock/runtime/recompute.py",
        "        put_state(seen.state)\n",
        "",
        "tests/laws/test_equality.py",
        "changing_buffers",
    ),
    Fault(
        "a recompute moves BatchNorm's statistics a second time",
        "penstock/runtime/stage.py",
        "    context.enter_context(separate_statistics(self.batch_norms, into=None))\n"
        "            self._run_layers",
        "    pass\n            self._run_layers",
        "tests/laws/test_equality.py",
        "batch_norms",
    ),
    Fault(
        "BatchNorm pools moments without their counts",
        "penstock/runtime/batch_norm.py",
        "n * m.double() for n, m, _ in rows",
        "count / len(rows) * m.double() for n, m, _ in rows",
        "tests/laws/test_batch_norm.py",
    ),
    Fault(
        "every micro-batch weighs 1 / M, whatever its size",
        "penstock/runtime/microbatches.py",
        "return [weight / total for weight in raw]",
        "return [1 / len(raw) for weight in raw]",
        "tests/laws/test_weights.py",
    ),
    Fault(
        "a micro-batch without real tokens still runs its backward",
        "penstock/runtime/stage.py",
        "if weight == 0:",
        "if weight < 0:",
        "tests/laws/test_weights.py::test_a_micro_batch_without_a_single_token_adds_nothing",
    ),
    Fault(
        "the gradient of a skip is lost",
        "penstock/runtime/stage.py",
        "for peer, leaves in kept.exported.items():",
        "for peer, leaves in list(kept.exported.items())[-1:]:",
        "tests/laws/test_equality.py",
        "unet",
    ),
    Fault(
        "a skip's gradients all come straight to the producer, and add up in another order",
        "penstock/model/stages.py",
        "for source, target in pairwise(holders):",
        "for source, target in ((holders[0], holder) for holder in holders[1:]):",
        "tests/laws/test_equality.py",
        "fan_out",
    ),
    Fault(
        "random streams are keyed by stage instead of layer",
        "penstock/runtime/stage.py",
        "LayerCall(run, microbatch, step.index, step.module.training, kept)",
        "LayerCall(run, microbatch, self.index, step.module.training, kept)",
        "tests/laws/test_random_streams.py",
    ),
    Fault(
        "a layer may change what it received in place",
        "penstock/runtime/stage.py",
        "self._changes_input.get((peer, place), True)",
        "self._changes_input.get((peer, place), False)",
        "tests/laws/test_equality.py",
        "in_place",
    ),
    Fault(
        "a copy for in-place layers starts at another address",
        "penstock/model/entries.py",
        "distance // tensor.element_size(), tensor.shape",
        "0, tensor.shape",
        "tests/laws/test_equality.py",
        "odd_addresses or in_place",
    ),
    Fault(
        "workers forget the caller's autocast",
        "penstock/runtime/caller.py",
        "if mode.enabled or torch.is_autocast_enabled(mode.device_type):",
        "if False:",
        "tests/laws/test_equality.py",
        "bf16 and threads",
    ),
    Fault(
        "weights may change between a forward and its recompute",
        "penstock/runtime/recompute.py",
        "if seen.weights != self._weights():",
        "if False:",
        "tests/laws/test_one_owner.py",
        "weights_replaced",
    ),
    Fault(
        "a recompute may give something else than its forward",
        "penstock/runtime/recompute.py",
        "if not same_shape or not _close(self.tensor, again, rounding):",
        "if False:",
        "tests/laws/test_one_owner.py",
        "recompute_cannot_see",
    ),
    Fault(
        "two stages add to the gradient of one weight",
        "penstock/runtime/leaves.py",
        "if other != stage:",
        "if False:",
        "tests/laws/test_one_owner.py",
        "over_all_weights or tied_after",
    ),
    Fault(
        "BatchNorm inside a checkpoint of the user's own counts twice",
        "penstock/runtime/stage.py",
        "kept.reruns_in_backward |= bool(in_checkpoint)",
        "pass",
        "tests/laws/test_users_checkpoint.py",
        "batch_norm",
    ),
    Fault(
        "dropout inside a checkpoint of the user's own draws another mask",
        "penstock/runtime/drawing.py",
        "call.kept.draws_again |= drew and self._known[key] is not Draws.ONCE",
        "pass",
        "tests/laws/test_users_checkpoint.py",
        "drawn_again",
    ),
    Fault(
        "a change in place is not seen in another value of the same memory",
        "penstock/runtime/stage.py",
        "if changed and is_alias:",
        "if False:",
        "tests/laws/test_one_owner.py",
        "another_value_would_show",
    ),
    Fault(
        "a tensor arrives in another process without its strides",
        "penstock/runtime/transport/wire.py",
        "torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=device)",
        "torch.empty(kind.shape, dtype=kind.dtype, device=device)",
        "tests/distributed/test_equality_processes.py",
        "unsplit_models_bits and 2",
    ),
    Fault(
        "a replica weighs its losses by its own samples only",
        "penstock/runtime/crew.py",
        "total = float(sum(counts)) if known",
        "total = float(counts[self._mesh.replica]) if known",
        "tests/distributed/test_equality_processes.py",
        "two_replicas and 1",
    ),
    Fault(
        "the loss that comes back is scaled as the gradients are",
        "penstock/runtime/stage.py",
        "run.losses[microbatch] = loss.detach() * weight",
        "run.losses[microbatch] = loss.detach() * run.loss_gradient(microbatch)",
        "tests/laws/test_loss_scale.py",
        "power_of_two",
    ),
    Fault(
        "each rank decides for itself whether its gradients overflowed",
        "penstock/scaler.py",
        "lambda: dist.all_reduce(anywhere, op=dist.ReduceOp.MAX),",
        "lambda: None,",
        "tests/distributed/test_amp_processes.py",
        "inf_on_one_rank",
    ),
    Fault(
        "parameters that another replica stepped stay as they were",
        "penstock/zero.py",
        "parameter.copy_(part.view(parameter.shape))",
        "pass",
        "tests/distributed/test_zero_processes.py",
        "plain_optimizer",
    ),
    Fault(
        "a scheduler's learning rate does not reach the replica's share",
        "penstock/zero.py",
        "_copy_options(self.param_groups, self._share.param_groups)",
        "pass",
        "tests/distributed/test_zero_processes.py",
        "plain_optimizer",
    ),
    Fault(
        "times by another host's clock are taken for this one's",
        "penstock/runtime/shared_trace.py",
        "if self.clock is not None and self.clock == other.clock:",
        "if True:",
        "tests/unit/test_shared_trace.py",
    ),
    Fault(
        "a save beside the training keeps no copy of the tensors",
        "penstock/checkpoint/save.py",
        "elif copy or storage in seen:",
        "elif storage in seen:",
        "tests/unit/test_checkpoint.py",
        "beside_the_training",
    ),
    Fault(
        "a checkpoint lacks the optimizer state of all replicas but the first",
        "penstock/checkpoint/save.py",
        "own = content if is_first_replica or is_shared else {}",
        "own = content if is_first_replica else {}",
        "tests/distributed/test_checkpoint_processes.py",
        "share_out",
    ),
    Fault(
        "a resumed run forgets its loss scale",
        "penstock/train/loop.py",
        "if self.scaler.is_enabled():",
        "if False:",
        "tests/laws/test_train_resume.py",
        "remembers_its_loss_scale",
    ),
    Fault(
        "replicas cut a batch by samples instead of micro-batches",
        "penstock/train/layout.py",
        "    sizes = microbatch_sizes(num_samples, num_microbatches)\n    share",
        "    sizes = microbatch_sizes(num_samples, num_replicas)\n    share",
        "tests/unit/test_layout.py",
        "whole_micro_batches",
    ),
    Fault(
        "a process ends for a signal that the others did not hear of",
        "penstock/train/loop.py",
        "interrupt.number = interrupt.number or number",
        "pass",
        "tests/distributed/test_train_processes.py",
        "sigterm_to_one",
    ),
    Fault(
        "processes that are started again take an earlier attempt's name",
        "penstock/mesh/meet.py",
        'while not (answer := _read(store, f"echo/{rank}")).startswith(word):',
        'while not (answer := _read(store, f"echo/{rank}")):',
        "tests/unit/test_meet.py",
        "one_name",
    ),
    Fault(
        "edges between the same two processes share a connection",
        "penstock/runtime/transport/processes.py",
        "return (source << 16) + target",
        "return int(source > target)",
        "tests/distributed/test_equality_processes.py",
        "any_rank and ranks0",
    ),
    Fault(
        "the warm-up of interleaved 1F1B is 1F1B's",
        "penstock/schedules/interleaved_1f1b.py",
        "warmup = 2 * (num_ranks - rank - 1) + (self.stages_per_rank - 1) * num_ranks",
        "warmup = num_ranks - rank - 1",
        "tests/unit/test_interleaved.py",
        "free_of_deadlock",
    ),
    Fault(
        "a process that fails tells nobody",
        "penstock/mesh/watch.py",
        'self._store.compare_set("failed", "", told)',
        "pass",
        "tests/distributed/test_faults_processes.py",
        "a_fault and raise",
    ),
    Fault(
        "a message overtakes the rest of the one before it",
        "penstock/mesh/flows.py",
        "return parts if self._waiting else self._push(parts)",
        "return self._push(parts)",
        "tests/unit/test_streams.py",
        "before_what_waits",
    ),
    Fault(
        "a reader in another process is not woken when a process fails",
        "penstock/mesh/flows.py",
        "        self._selector.register(alarm.socket, EVENT_READ)\n",
        "",
        "tests/unit/test_streams.py",
        "learns_of_a_failure",
    ),
    Fault(
        "a stage uses its own copy of a tied weight, not what it was sent",
        "penstock/model/ghost/tied.py",
        "lambda tensor: self._sent.get(id(tensor), tensor)",
        "lambda tensor: tensor",
        "tests/laws/test_capture.py",
        "gpt2",
    ),
    Fault(
        "later stages do not hear of a change in place between blocks",
        "penstock/model/ghost/replay.py",
        "        for number, info in told.changed:\n",
        "        for number, info in ():\n",
        "tests/laws/test_capture.py",
        "writes",
    ),
    Fault(
        "parameters between blocks are not clipped",
        "penstock/clip.py",
        "(*in_layers, *((len(pipe), p) for p in list(here)))",
        "in_layers",
        "tests/laws/test_capture.py",
        "clipped",
    ),
    Fault(
        "a failed rank leaves the others waiting",
        "penstock/runtime/transport/threads.py",
        "            self._work.run.fail(error)\n            self._channels.abort()\n",
        "            self._work.run.fail(error)\n",
        "tests/laws/test_faults.py",
        "forward",
    ),
)


def catches(fault: Fault, repository: Path) -> bool:
    """Apply a fault in `repository`, run its test, undo it; tell whether the test failed."""
    path = repository / fault.file
    text = path.read_text()
    if fault.right not in text:
        sys.exit(f"{fault.name}: {fault.file} no longer holds {fault.right!r}; update the fault")
    path.write_text(text.replace(fault.right, fault.wrong, 1))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fault.test]
    command += ["--timeout", "60", *(["-k", fault.only] if fault.only else [])]
    try:
        finished = subprocess.run(
            command,
            cwd=repository,
            env={**os.environ, "PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(text)
    return finished.returncode == 1 or "Timeout" in finished.stdout


def main() -> None:
    """Try every fault; print the table; fail if one went unnoticed."""
    unnoticed = []
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "penstock"
        shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
        for fault in FAULTS:
            caught = catches(fault, repository)
            test = fault.test + (f" ({fault.only})" if fault.only else "")
            print(f"| {fault.name} | `{fault.file}` | `{test}` |{'' if caught else '  UNNOTICED'}")  # noqa: T201 - a script
            if not caught:
                unnoticed.append(fault.name)
    if unnoticed:
        sys.exit("no test noticed: " + "; ".join(unnoticed))


if __name__ == "__main__":
    main()
