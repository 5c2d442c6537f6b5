"""Faults of schedules that update weights while they run."""

from .fault import Fault

LAW = "tests/laws/test_asynchronous.py"

FAULTS = (
    Fault(
        "asynchronous: a mini-batch sees weights one update too early",
        "penstock/schedules/pipedream.py",
        "max(microbatch // per_update - 1, 0)",
        "microbatch // per_update",
        LAW,
        "in_every_way",
    ),
    Fault(
        "asynchronous: an update comes one micro-batch early",
        "penstock/schedules/pipedream.py",
        "if (i + 1) % microbatches_per_update == 0:",
        "if (i + 2) % microbatches_per_update == 0:",
        "tests/schedules/test_asynchronous.py",
        "every_size",
    ),
    Fault(
        "asynchronous: a backward works with the newest weights, not with those of its forward",
        "penstock/runtime/stage/stage.py",
        "self.weights.show(tape.version)\n        here = ",
        "self.weights.show(self.weights.number)\n        here = ",
        LAW,
        "in_every_way",
    ),
    Fault(
        "asynchronous: a recompute works with the newest weights, not with those of its forward",
        "penstock/runtime/stage/stage.py",
        "self.weights.show(tape.version)\n        try:\n            if tape.dropped_layers",
        "self.weights.show(self.weights.number)\n        try:\n            if tape.dropped_layers",
        LAW,
        "in_every_way",
    ),
    Fault(
        "asynchronous: an update writes over weights that tapes still need",
        "penstock/runtime/stage/weights.py",
        "keeps = self._uses[self.number] > 0",
        "keeps = False",
        LAW,
        "in_every_way",
    ),
    Fault(
        "asynchronous: an update does not wait for the sums over the shards",
        "penstock/runtime/stage/stage.py",
        "            self._replicas.finish()\n",
        "",
        LAW,
        "few",
    ),
    Fault(
        "asynchronous: a weight that other stages use is sent once for all its versions",
        "penstock/runtime/stage/handover.py",
        "tuple(versions), lasting=frozenset()",
        "tuple(versions)",
        LAW,
        "processes",
    ),
    Fault(
        "asynchronous: all updates of a window have the first one's learning rate",
        "penstock/runtime/window.py",
        "self._options[update]",
        "self._options[0]",
        LAW,
        "scheduler",
    ),
    Fault(
        "asynchronous: dropout of a window's mini-batches is that of the first",
        "penstock/runtime/run.py",
        "self.step + later, layer",
        "self.step, layer",
        LAW,
        "in_every_way",
    ),
    Fault(
        "asynchronous: a run goes on with other delays",
        "recipes/penstock_recipes/recipe/read.py",
        'counting = {"pipeline.schedule"}',
        "pass",
        "tests/laws/test_train_resume.py",
        "another_lag",
    ),
    Fault(
        "asynchronous: a weight that layers of two stages have is moved by both",
        "penstock/runtime/window.py",
        "if home[p] == stage}",
        "}",
        LAW,
        "tied",
    ),
)
