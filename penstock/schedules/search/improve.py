"""A better answer: move what the step's length hangs on, again and again."""

from random import Random

from penstock.schedules.problem import INPUT, WEIGHT, WHOLE, Answer, Problem, fits, run

_MEMORY = 50
"""A move is taken if the answer is then no worse than so many moves ago: late acceptance."""


def improved(problem: Problem, answer: Answer, goal: float, moves: int) -> Answer:
    """Return an answer that is no longer, after trying so many moves.

    Stops at a step as long as `goal`.  The same arguments give the same answer.
    """
    search = _Search(problem, answer)
    for _ in range(moves):
        if search.best_length[0] <= goal:
            break
        search.step()
    return search.best


class _Search:
    """Where the search stands: an answer, its length, its critical operations; and the best one.

    A length is that of the step, and for equal ones the sum of the ranks' ends.
    """

    def __init__(self, problem: Problem, answer: Answer) -> None:
        self.p, self.random, self.moves = problem, Random(0), 0
        self.accept(answer, self.length(answer) or (0, 0))
        self.best, self.best_length = self.answer, self.now
        self.past = [self.now] * _MEMORY

    def length(self, answer: Answer) -> tuple[float, float] | None:
        self.ran = run(self.p, answer)
        return None if self.ran is None else (max(self.ran[0]), sum(self.ran[0]))

    def accept(self, answer: Answer, length: tuple[float, float]) -> None:
        self.answer, self.now = answer, length
        self.critical = self.path()

    def step(self) -> None:
        """Try one move."""
        self.moves += 1
        moved = self.moved()
        length = moved and self.length(moved)
        slot = self.moves % _MEMORY
        if moved and length and (length <= self.now or length <= self.past[slot]):
            self.accept(moved, length)
            if length < self.best_length:
                self.best, self.best_length = moved, length
        self.past[slot] = min(self.past[slot], self.now)

    def below(self, number: int) -> int:
        return int(self.random.random() * number)

    def moved(self) -> Answer | None:
        """Return the answer with one critical operation elsewhere; None if it may not be there."""
        rank, index = self.critical[self.below(len(self.critical))]
        letters = [op // self.p.num_microbatches for op in self.answer[rank]]
        if self.below(8) == 0:
            word = self.joined(letters, index)
        else:
            far = 1 + int(self.random.random() ** 3 * len(letters) / 2)
            place = index + (far if self.below(2) else -far)
            if not 0 <= place < len(letters) or letters[place] == letters[index]:
                return None
            word = letters[:]
            word.insert(place, word.pop(index))
        program = word and spelled(self.p, word)
        if not program or program == self.answer[rank] or not fits(self.p, rank, program):
            return None
        return [*self.answer[:rank], program, *self.answer[rank + 1 :]]

    def joined(self, letters: list[int], index: int) -> list[int] | None:
        """Make one backward of two parts that stand together, or two parts of one."""
        k = self.p.num_stages
        kind, stage = divmod(letters[index], k)
        if kind == WHOLE:
            return [*letters[:index], INPUT * k + stage, WEIGHT * k + stage, *letters[index + 1 :]]
        first = index - (kind == WEIGHT)
        if letters[first : first + 2] == [INPUT * k + stage, WEIGHT * k + stage]:
            return [*letters[:first], WHOLE * k + stage, *letters[first + 2 :]]
        return None

    def path(self) -> list[tuple[int, int]]:
        """List (rank, index) of operations on one longest path, from the last to the first."""
        assert self.ran is not None
        p, (free, ends) = self.p, self.ran
        size = p.size
        place = {
            p.result[op]: (rank, index)
            for rank, program in enumerate(self.answer)
            for index, op in enumerate(program)
        }
        rank = free.index(max(free))
        here = (rank, len(self.answer[rank]) - 1)
        found = []
        while True:
            found.append(here)
            rank, index = here
            op, before = self.answer[rank][index], self.answer[rank][index - 1]
            free_s = ends[p.result[before]] if index else 0
            again = p.redo[op] if before != op % size else 0
            need = p.operand[op]
            if need >= 0 and ends[need] + p.lag[op] > free_s + again:
                here = place[need]
            elif index:
                here = (rank, index - 1)
            else:
                return found


def spelled(problem: Problem, letters: list[int]) -> list[int] | None:
    """Number what a rank does, each kind on each stage from 0; None if something then comes before
    what it needs.
    """
    k, m = problem.num_stages, problem.num_microbatches
    forwards, gives, adds = done = [0] * k, [0] * k, [0] * k
    program = []
    for letter in letters:
        kind, stage = divmod(letter, k)
        counted = done[INPUT] if kind == WHOLE else done[kind]
        number = counted[stage]
        program.append(letter * m + number)
        if kind == WHOLE and adds[stage] != number:
            return None
        counted[stage] += 1
        if kind == WHOLE:
            adds[stage] += 1
        if not forwards[stage] >= gives[stage] >= adds[stage]:
            return None
    return program
