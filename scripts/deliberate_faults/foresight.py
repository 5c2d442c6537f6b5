"""Faults of what is predicted: links and cores that ranks share, memory, plans."""

from .fault import Fault

FAULTS = (
    Fault(
        "a message does not wait for the one before it on its link",
        "penstock/simulator/engine.py",
        "            free_s[lane] = since_s",
        "            pass",
        "tests/simulator/test_sharing.py",
        "follow_one_another",
    ),
    Fault(
        "a lane goes to the lower rank instead of the first to send",
        "penstock/simulator/engine.py",
        "if self._is_early(rank, now_s):\n"
        "                    heappush(self._ready, (now_s, rank, 0))\n"
        "                    return None",
        "if False:\n                    return None",
        "tests/simulator/test_sharing.py",
        "whatever_its_rank",
    ),
    Fault(
        "ranks on the same cores do not slow each other down",
        "penstock/simulator/engine.py",
        "return self.speeds[num_busy - 1]",
        "return self.speeds[0]",
        "tests/simulator/test_sharing.py",
        "slow_each_other_down",
    ),
    Fault(
        "processes are predicted to wait for Python's lock",
        "penstock/planner/shared_cores.py",
        "_scaled(known[:at_once], max(busy, at_least))",
        "_scaled(known[:at_once], busy)",
        "tests/planner/test_predict.py",
        "say_themselves",
    ),
    Fault(
        "sums over replicas hold up what comes after them",
        "penstock/simulator/simulate.py",
        "done_s = max(done_s, end_s) + reduce_s[instruction.stage]",
        "done_s = max(done_s, end_s)",
        "tests/simulator/test_sharing.py",
        "sums_over_replicas",
    ),
    Fault(
        "gradients are predicted to be there from the start",
        "penstock/simulator/memory.py",
        "yield MemorySample(stage, span.start_s, size, MemoryKind.GRADIENTS)",
        "yield MemorySample(stage, start_s, size, MemoryKind.GRADIENTS)",
        "tests/simulator/test_memory.py",
        "come_and_go",
    ),
    Fault(
        "replicas are predicted as if each had the host for itself",
        "penstock/planner/shared_cores.py",
        "round(n * share)",
        "n",
        "tests/planner/test_predict.py",
        "replicas_slow_each_other",
    ),
    Fault(
        "sums over replicas are predicted to take nothing",
        "penstock/planner/predict.py",
        "if len(group) > 1 and num_bytes\n",
        "if len(group) > 1 and num_bytes < 0\n",
        "tests/planner/test_predict.py",
        "replicas_add_their_gradients",
    ),
    Fault(
        "the search drops candidates that could still win",
        "penstock/planner/rank.py",
        "_MARGIN = 1.1",
        "_MARGIN = 0.3",
        "tests/planner/test_choose.py",
        "whole_space",
    ),
    Fault(
        "a plan may use more memory than there is",
        "penstock/planner/search.py",
        "share = self.constraints.memory_share * self.threads",
        "share = 9 * self.constraints.memory_share * self.threads",
        "tests/planner/test_choose.py",
        "does_not_fit_is_recomputed",
    ),
    Fault(
        "messages on their way are not counted where a plan is to fit",
        "penstock/planner/rank.py",
        "if not evaluator.fits(size, predicted):",
        "if False:",
        "tests/planner/test_choose.py",
        "above_its_limit",
    ),
    Fault(
        "the unsplit model is not compared",
        "penstock/planner/rank.py",
        "is_first_unsplit = size.num_stages == 1 and n not in has_unsplit",
        "is_first_unsplit = False",
        "tests/planner/test_choose.py",
        "always_compared",
    ),
)
