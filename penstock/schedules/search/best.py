"""From a problem to its best answer: many first ones, and the best of them improved."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from penstock.schedules.list_scheduling import Policy, Priority, built
from penstock.schedules.problem import (
    Answer,
    Problem,
    fits,
    joined,
    length,
    lower_bound,
)

from .exact import proved
from .improve import improved

TUNED = 300_000
"""About so many operations are put in order while the best policy is tuned."""
IMPROVED = 5_000_000
"""About so many operations are priced while the best answers are improved."""
MOST_MOVES = 10_000
"""So often one answer is changed at most: enough for few operations."""
MOST_IMPROVED = 3
"""So many of the best answers are improved."""


def best(problem: Problem, starts: Iterable[Answer]) -> Answer:
    """Return the shortest answer found: no longer than any of `starts` that fits."""
    goal, long = lower_bound(problem), partial(_seconds, problem)
    answers = [start for start in starts if all(fits(problem, *x) for x in enumerate(start))]
    found = [(policy, made) for policy in _policies(problem) if (made := built(problem, policy))]
    answers += [made for _, made in found]
    answer, is_best = proved(problem, min(answers, key=long), goal)
    if not is_best:
        policy, made = min(found, key=lambda each: long(each[1]))
        answers += [answer, _tuned(problem, policy, made, goal)]
        answer = _improved(problem, answers, goal)
    return joined(problem, answer)


def _improved(problem: Problem, answers: list[Answer], goal: float) -> Answer:
    """Improve the shortest of some answers; return the shortest."""
    long = partial(_seconds, problem)
    chosen: list[Answer] = []
    for answer in sorted(answers, key=long):
        if answer not in chosen and len(chosen) < MOST_IMPROVED:
            chosen.append(answer)
    moves = min(MOST_MOVES, IMPROVED // (len(chosen) * sum(map(len, chosen[0]))))
    better = [improved(problem, answer, goal, moves) for answer in chosen]
    return min((*better, *chosen), key=long)


def _seconds(problem: Problem, answer: Answer) -> float:
    return length(problem, answer)[0]


def _policies(problem: Problem) -> Iterator[Policy]:
    """Yield policies from little to much running ahead."""
    k, m = problem.num_stages, problem.num_microbatches
    depths = [range(k, 0, -1), range(2 * k - 1, 0, -2), [m] * k]
    _, of_inputs, of_weights, one = problem.times()
    whole = frozenset(s for s in range(k) if of_inputs[s] + of_weights[s] > one[s])
    wholes = [whole] if whole else [whole, frozenset(range(k))]
    several = [False, True] if len(problem.stages) < k else [False]
    for ahead, forwards_first, patience, undivided, oldest in product(
        depths, (False, True), (0, 0.5, 1), wholes, several
    ):
        divides = len(undivided) < k
        if divides or patience == 0:
            yield Policy(
                ahead=tuple(ahead),
                patience=patience,
                priority=_priority(forwards_first, oldest),
                whole=undivided,
            )


def _priority(forwards_first: bool, oldest: bool) -> Priority:
    """Return what prefers of a rank's stages the oldest micro-batch, or else the deepest stage."""

    def priority(is_backward: bool, stage: int, microbatch: int) -> tuple[int, ...]:
        later = is_backward == forwards_first
        return later, microbatch if oldest else 0, stage if is_backward else -stage

    return priority


def _tuned(problem: Problem, policy: Policy, answer: Answer, goal: float) -> Answer:
    """Change one number of the policy at a time, as long as that helps."""
    left = TUNED // sum(map(len, answer))
    shortest = _seconds(problem, answer)
    better = True
    while better:
        better = False
        for changed in _changes(problem, policy):
            if shortest <= goal or not left:
                return answer
            left -= 1
            made = built(problem, changed)
            if made and (now := _seconds(problem, made)) < shortest:
                policy, answer, shortest, better = changed, made, now, True
                break
    return answer


def _changes(problem: Problem, policy: Policy) -> Iterator[Policy]:
    for stage in range(problem.num_stages):
        for change in (1, -1, 3, -3):
            ahead = list(policy.ahead)
            ahead[stage] += change
            if ahead[stage] > 0:
                yield replace(policy, ahead=tuple(ahead))
        yield replace(policy, whole=policy.whole ^ {stage})
    for patience in (0, 0.5, 1):
        if patience != policy.patience:
            yield replace(policy, patience=patience)
