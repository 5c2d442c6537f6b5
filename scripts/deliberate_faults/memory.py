"""Faults of what keeps less in memory: offload, and layers that run twice."""

from .fault import Fault

FAULTS = (
    Fault(
        "out of memory: the failing micro-batch counts as one that the stage keeps",
        "penstock/runtime/memory/kept_bytes.py",
        "    kept, storages = len(others), dict[int, int]()\n",
        "    kept, storages = len(others) + 1, dict[int, int]()\n",
        "tests/runtime/test_out_of_memory.py",
    ),
    Fault(
        "out of memory: the calling thread's driver adds no note",
        "penstock/runtime/drivers.py",
        "note_out_of_memory(error, instruction, work.run)",
        "pass",
        "tests/runtime/test_out_of_memory.py",
    ),
    Fault(
        "what layers keep in Python while they are measured stays",
        "penstock/model/kept.py",
        "        after.callback(put_back, kept_by(owners))\n",
        "",
        "tests/runtime/test_unnoticed.py",
        "not_noticed and 4",
    ),
    Fault(
        "hooks run while layers are measured",
        "penstock/model/kept.py",
        "        if not hooks:\n",
        "        if False:\n",
        "tests/runtime/test_unnoticed.py",
        "not_noticed and 4",
    ),
    Fault(
        "layers are counted on views of leaves",
        "penstock/costs/measuring/measure.py",
        "copy = no_leaf(copy.requires_grad_())",
        "copy = copy.requires_grad_().view_as(copy)",
        "tests/laws/test_drawn_limits.py",
        "a_few",
    ),
    Fault(
        "offload: every storage is brought back with the bytes of the first",
        "penstock/runtime/memory/offload.py",
        "storage, lead = away.store.get(place)",
        "storage, lead = away.store.get(away.moved[0][0])",
        "tests/laws/test_memory_policies.py",
        "in_every_schedule and offload",
    ),
    Fault(
        "offload: a view of a storage is brought back from its start",
        "penstock/runtime/memory/slots.py",
        "offset = self.offset + lead",
        "offset = lead",
        "tests/laws/test_memory_policies.py",
        "in_every_schedule and offload",
    ),
    Fault(
        "some layers run twice: their slots are filled in another order than they were emptied",
        "penstock/runtime/memory/slots.py",
        "slot, was = emptied[count]",
        "slot, was = emptied[-1 - count]",
        "tests/laws/test_memory_policies.py",
        "in_every_schedule and layers_again",
    ),
    Fault(
        "a limit of memory does not count the versions of weights",
        "penstock/planner/fit.py",
        "peaks_tried.append(weights + _peak_bytes(",
        "peaks_tried.append(_peak_bytes(",
        "tests/laws/test_memory_limit.py",
        "versions",
    ),
)
