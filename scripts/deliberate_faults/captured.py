"""Faults of captured models, and of what their users may do."""

from .fault import Fault

FAULTS = (
    Fault(
        "a stage uses its own copy of a tied weight, not what it was sent",
        "penstock/model/ghost/tied.py",
        "lambda tensor: self.sent.get(id(tensor), tensor)",
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
        "autocast casts once what several uses of a received value cast",
        "penstock/runtime/stage.py",
        "value = no_leaf(value)",
        "pass",
        "tests/laws/test_capture.py",
        "value and used and twice",
    ),
    Fault(
        "a weight that was sent is taken for the one of the next step",
        "penstock/runtime/transport/link.py",
        "self._lasting.clear()",
        "pass",
        "tests/distributed/test_capture_processes.py",
        "tied_weight",
    ),
    Fault(
        "what happened is told as it was for another batch",
        "penstock/model/ghost/seen.py",
        "tuple(map(id, header.values()))",
        "()",
        "tests/laws/test_capture.py",
        "t5 and not autocast",
    ),
    Fault(
        "an event is told as it gave before, whatever it gives now",
        "penstock/model/ghost/replay.py",
        "if info.fits(result) and ",
        "if ",
        "tests/laws/test_capture.py",
        "gpt2",
    ),
    Fault(
        "a loss of the model's own counts every micro-batch alike",
        "penstock/runtime/microbatches.py",
        "_weighted(row, weights())",
        "_weighted(row, [1 / len(row)] * len(row))",
        "tests/laws/test_any_module.py",
        "from_labels and gpt2",
    ),
    Fault(
        "a checkpoint draws again while another stage draws",
        "penstock/runtime/drawing.py",
        "        call.run.has_seeded = True\n",
        "",
        "tests/laws/test_users_checkpoint.py",
    ),
)
