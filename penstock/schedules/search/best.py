"""From a problem to its best answer: many first ones, and the best of them improved."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import TypeVar

from .exact import proved
from .first import First, Rule, built
from .improve import improved
from .problem import INPUT, WHOLE, Answer, Problem, fits, lower_bound, price

_Number = TypeVar("_Number")
TUNED = 300_000
"""About so many operations are put in order while the best rule is tuned."""
IMPROVED = 5_000_000
"""About so many operations are priced while the best answers are improved."""
MOST_MOVES = 10_000
"""So often one answer is changed at most: enough for few operations."""
MOST_IMPROVED = 3
"""So many of the best answers are improved."""


def best(problem: Problem, starts: Iterable[Answer]) -> Answer:
    """Return the shortest answer found: no longer than any of `starts` that fits."""
    goal = lower_bound(problem)
    answers = [start for start in starts if all(fits(problem, *x) for x in enumerate(start))]
    found = [(rule, made) for rule in _rules(problem) if (made := built(problem, rule))]
    answers += [made for _, made in found]
    shortest = min(answers, key=lambda answer: length(problem, answer))
    answer, is_best = proved(problem, shortest, goal)
    if not is_best:
        rule, made = min(found, key=lambda each: length(problem, each[1]))
        answers += [answer, _tuned(problem, rule, made, goal)]
        answer = _improved(problem, answers, goal)
    return _joined(problem, answer)


def _improved(problem: Problem, answers: list[Answer], goal: float) -> Answer:
    """Improve the shortest of some answers; return the shortest."""
    chosen: list[Answer] = []
    for answer in sorted(answers, key=lambda answer: length(problem, answer)):
        if answer not in chosen and len(chosen) < MOST_IMPROVED:
            chosen.append(answer)
    moves = min(MOST_MOVES, IMPROVED // (len(chosen) * sum(map(len, chosen[0]))))
    better = [improved(problem, answer, goal, moves) for answer in chosen]
    return min((*better, *chosen), key=lambda answer: length(problem, answer))


def length(problem: Problem, answer: Answer) -> float:
    """Return the length of the step; infinite if ranks wait for each other for ever."""
    priced = price(problem, answer)
    return float("inf") if priced is None else priced


def _rules(problem: Problem) -> Iterator[Rule]:
    """Yield rules from little to much running ahead."""
    k, m = problem.num_stages, problem.num_microbatches
    depths = [range(k, 0, -1), range(2 * k - 1, 0, -2), [m] * k]
    whole = frozenset(s for s in range(k) if _gain(problem, s) > 0)
    wholes = [whole] if whole else [whole, frozenset(range(k))]
    several = [False, True] if len(problem.stages) < k else [False]
    soon = [False, True] if problem.limits else [False]
    for ahead, first, fill, undivided, late, oldest in product(
        depths, First, (0.0, 0.5, 1.0), wholes, soon, several
    ):
        divides = len(undivided) < k
        if divides or (fill == 0 and not late):
            yield Rule(
                ahead=tuple(ahead),
                fill=(fill,) * len(problem.stages),
                first=first,
                soon=late,
                whole=undivided,
                oldest=oldest,
            )


def _tuned(problem: Problem, rule: Rule, answer: Answer, goal: float) -> Answer:
    """Change one number of the rule at a time, as long as that helps."""
    left = TUNED // sum(map(len, answer))
    shortest = length(problem, answer)
    better = True
    while better:
        better = False
        for changed in _changes(problem, rule):
            if shortest <= goal or not left:
                return answer
            left -= 1
            made = built(problem, changed)
            if made and (now := length(problem, made)) < shortest:
                rule, answer, shortest, better = changed, made, now, True
                break
    return answer


def _changes(problem: Problem, rule: Rule) -> Iterator[Rule]:
    for stage in range(problem.num_stages):
        for change in (1, -1, 3, -3):
            if rule.ahead[stage] + change > 0:
                yield replace(rule, ahead=_with(rule.ahead, stage, rule.ahead[stage] + change))
        yield replace(rule, whole=rule.whole ^ {stage})
    for rank in range(len(problem.stages)):
        for fill in (0.0, 0.5, 1.0):
            if fill != rule.fill[rank]:
                yield replace(rule, fill=_with(rule.fill, rank, fill))


def _with(values: tuple[_Number, ...], place: int, value: _Number) -> tuple[_Number, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _gain(problem: Problem, stage: int) -> float:
    """Return how much faster one backward is than its two parts."""
    _, of_inputs, of_weights, whole = problem.times()
    return of_inputs[stage] + of_weights[stage] - whole[stage]


def _joined(problem: Problem, answer: Answer) -> Answer:
    """Make one backward of two parts that stand together, where that is faster, or as fast and no
    other stage waits for the gradient.
    """
    k, m = problem.num_stages, problem.num_microbatches
    for stage in range(k):
        gain = _gain(problem, stage)
        if gain < 0 or (gain == 0 and stage):
            continue
        rank, first = problem.ranks[stage], problem.op(INPUT, stage, 0)
        program: list[int] = []
        for op in answer[rank]:
            if program and program[-1] == op - problem.size and first <= program[-1] < first + m:
                program[-1] += (WHOLE - INPUT) * problem.size
            else:
                program.append(op)
        joined = [*answer[:rank], program, *answer[rank + 1 :]]
        if length(problem, joined) <= length(problem, answer) and fits(problem, rank, program):
            answer = joined
    return answer
