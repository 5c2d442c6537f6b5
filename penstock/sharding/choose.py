"""Choose a state for each node of a problem: the least cost of nodes, pairs and conversions.

    a - b - c       A node with at most two neighbours is eliminated: its best state is known for
     \\     |        all of their states, and its cost is added to the pair of them.
      d - e         So are the users of a shared conversion that meet in at most one other node.

Of the rest, states are dropped that no best choice has (`bounds`).  Others make a linear program.
Its answer is mostly whole; if not, the integer program is solved.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from math import inf, prod
from typing import Any, NamedTuple

import highspy
import numpy

from .bounds import Bounds
from .layouts import Numbers
from .problem import Problem, Shared, States, add

_LARGEST = 2_000_000
"""Entries of the largest table that elimination makes."""
_MOST_USERS = 6
"""Most users of a conversion that is eliminated: there are 203 ways to part 6 into sets."""
_FEW = 8
"""States of each node among which a first answer is found, before bounds drop others."""
_FEWER = 0.9
"""Share of the states that has to be left for bounds to be tightened again."""
_SWEEPS = 3
"""Times that bounds are tightened below one answer."""
_WHOLE = 1e-6
"""Largest distance from a whole number at which a variable counts as whole."""
_SCALE = 1e6
"""Solver's units in a second: it takes costs below 1e-7 for none."""


_Rest = Callable[[Problem, float], States | None]
"""Solves what elimination has left of a problem, up to a gap."""


def solve(problem: Problem, more: Sequence[Numbers], gap: float) -> States | None:
    """Return states at most a share `gap` worse than the best; None if the solver finds none.

    `more` are further costs of nodes, if there are any.
    """
    costs = {k: own + more[k] if more else own for k, own in problem.costs.items()}
    return _best(Problem(costs, problem.pairs, problem.shared), gap, _bounded)


def _best(problem: Problem, gap: float, solve_rest: _Rest) -> States | None:
    # 1. Eliminate nodes, then the users of shared conversions, as long as any can be.
    rest = Problem(dict(problem.costs), dict(problem.pairs), [*problem.shared])
    gone = _eliminate(rest)
    while joined := next(filter(None, (_join(rest, x) for x in rest.shared)), None):
        gone += joined + _eliminate(rest)
    # 2. Solve the rest.
    states = solve_rest(rest, gap) if rest.costs else {}
    if states is None:
        return None
    # 3. Look up the eliminated nodes' best states, the last eliminated first.
    for k, near, best in reversed(gone):
        states[k] = best(*(states[j] for j in near))
    return states


def _bounded(problem: Problem, gap: float) -> States | None:
    """Drop states that no best choice has, if nodes have more than a few; solve for others."""
    if max(map(len, problem.costs.values())) <= _FEW:
        return _by_solver(problem, gap)
    bounds, most, before = Bounds(problem), inf, inf
    bounds.tighten(most)
    while bounds.num_states < _FEWER * before:
        before = bounds.num_states
        # the best answer among a few states is above the best cost, and bounds are below it
        states = _among(problem, bounds.first(_FEW), gap)
        most = most if states is None else min(most, problem.cost(states))
        for _ in range(_SWEEPS):
            bounds.tighten(most)
    return _among(problem, bounds.kept, gap)


def _among(problem: Problem, kept: Mapping[int, Numbers], gap: float) -> States | None:
    """Solve for some states of each node."""
    states = _best(problem.among(kept), gap, _by_solver)
    return states and {k: int(kept[k][state]) for k, state in states.items()}


# -- elimination ----------------------------------------------------------------------------------


class _Gone(NamedTuple):
    """An eliminated node, and what returns its best state for states of its neighbours."""

    node: int
    neighbours: tuple[int, ...]
    best: Callable[..., int]


def _eliminate(problem: Problem) -> list[_Gone]:
    """Take out nodes with at most two neighbours, except those of shared conversions."""
    costs, pairs, kept = problem.costs, problem.pairs, {*_nodes(problem.shared)}
    gone, before = list[_Gone](), -1
    while len(gone) > before:
        before = len(gone)
        for k in [k for k in costs if k not in kept]:
            near = tuple(sorted(_near(pairs, k)))
            sizes = [len(costs[j]) for j in (k, *near)]
            if len(near) > 2 or prod(sizes) > _LARGEST:
                continue
            total = costs.pop(k).reshape(-1, *(1 for _ in near))
            for place, j in enumerate(near):
                table = _pop(pairs, k, j)
                shape = [len(table), 1, 1][: 1 + len(near)]
                shape[1 + place] = sizes[1 + place]
                total = total + table.reshape(shape)
            gone.append(_Gone(k, near, partial(_cheapest, total)))
            if len(near) == 1:
                costs[near[0]] = costs[near[0]] + total.min(axis=0)
            elif near:
                add(pairs, (near[0], near[1]), total.min(axis=0))
    return gone


def _cheapest(total: Numbers, *states: int) -> int:
    """Return a node's best state, by its costs [its own state, states of its neighbours ...]."""
    at: Any = (slice(None), *states)
    return int(total[at].argmin())


def _nodes(shared: Sequence[Shared]) -> list[int | None]:
    return [side.node for own in shared for side in (own.before, *own.users)]


def _near(pairs: Collection[tuple[int, int]], node: int) -> set[int]:
    return {j for pair in pairs if node in pair for j in pair} - {node}


def _pop(pairs: dict[tuple[int, int], Numbers], k: int, j: int) -> Numbers:
    return pairs.pop((k, j)) if k < j else pairs.pop((j, k)).T


def _join(problem: Problem, own: Shared) -> list[_Gone]:
    """Eliminate a conversion with its users, if they have one neighbour `end` at most.

    maker ──► conversion ──► user 1 ──► end      The maker and the end stay.  The end may be a
                         └─► user 2 ──┘          user, too.
    """
    # 1. Choose the end, if there is one and the tables stay small.
    costs, pairs, ((maker, which), users, seconds) = problem.costs, problem.pairs, own
    ends = _ends(problem, own)
    rows = seconds[which[:1] if maker is None else which]
    num_ends = max((len(costs[end]) for end in ends if end is not None), default=1)
    if not ends or len(users) > _MOST_USERS or rows.size * num_ends > _LARGEST:
        return []
    end, wants, free = ends[0], [], []
    num_ends = 1 if end is None else len(costs[end])
    # 2. Find the least cost of each user, by layout that it takes and state of the end.
    for place, (node, layouts) in enumerate(users):
        total = numpy.zeros((1, num_ends))
        if node is not None and node == end:
            total = numpy.where(numpy.eye(num_ends) > 0, 0.0, numpy.inf)
        elif node is not None:
            free.append((place, node))
            total = total + costs.pop(node)[:, None]
            if end is not None and _near(pairs, node):
                total = total + _pop(pairs, node, end)
        is_in = layouts[: len(total)] == numpy.arange(rows.shape[1])[:, None]
        by_layout = numpy.where(is_in[:, :, None], total, numpy.inf)
        wants.append((by_layout.min(axis=1), by_layout.argmin(axis=1)))
    # 3. Part the users into sets that share a conversion; its cost remains with maker and end.
    least, best = _parted(rows, wants)
    problem.shared = [other for other in problem.shared if other is not own]
    left = tuple(k for k in (maker, end) if k is not None)
    shape = [len(costs[k]) for k in left]
    if len(left) == 2:
        add(pairs, (left[0], left[1]), least)
    elif left:
        costs[left[0]] = costs[left[0]] + least.reshape(shape)
    return [_Gone(node, left, best[place].reshape(shape).item) for place, node in free]


def _ends(problem: Problem, own: Shared) -> list[int | None]:
    """Return the nodes that may be the `end` of a conversion in `_join`; None for no node."""
    nodes = {user.node for user in own.users if user.node is not None}
    near = {k: _near(problem.pairs, k) for k in nodes}
    uses = Counter(_nodes(problem.shared))
    candidates = [*sorted(nodes.union(*near.values()) - {own.before.node}), None]
    return [
        end
        for end in candidates
        if nodes - {end} and all(uses[k] == 1 and near[k] <= {end} for k in nodes - {end})
    ]


def _parted(
    rows: Numbers, wants: Sequence[tuple[Numbers, Numbers]]
) -> tuple[Numbers, list[Numbers]]:
    """Return the least cost [maker, end] of a conversion and its users, and each user's state.

    Users that want one layout share its conversion: all ways to part them into sets are tried.
    """
    least = numpy.full((len(rows), wants[0][0].shape[1]), numpy.inf)
    best = [numpy.zeros(least.shape, dtype=int) for _ in wants]
    known: dict[tuple[int, ...], tuple[Numbers, Numbers]] = {}
    for parts in _partitions(range(len(wants))):
        for part in parts:
            if part not in known:
                costs = rows[:, :, None] + numpy.sum([wants[n][0] for n in part], axis=0)
                known[part] = costs.min(axis=1), costs.argmin(axis=1)
        total = numpy.sum([known[part][0] for part in parts], axis=0)
        is_less = total < least
        least = numpy.where(is_less, total, least)
        for part in parts:
            for n in part:
                state = wants[n][1][known[part][1], numpy.arange(least.shape[1])]
                best[n] = numpy.where(is_less, state, best[n])
    return least, best


def _partitions(items: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for count in range(len(items)):
        for others in combinations(rest, count):
            left = [n for n in rest if n not in others]
            yield from ([(first, *others), *more] for more in _partitions(left))


# -- the linear program ---------------------------------------------------------------------------


class _Table:
    """A linear program of variables between 0 and 1, put together from arrays."""

    def __init__(self) -> None:
        self._costs: list[Numbers] = []
        self._is_whole: list[Numbers] = []
        self._entries: list[tuple[Numbers, Numbers, Numbers]] = []
        self._ends: list[tuple[Numbers, Numbers]] = []
        self._num_variables = self._num_rows = 0

    def variables(self, costs: Numbers, *, whole: bool = False) -> Numbers:
        self._costs.append(costs.ravel())
        self._is_whole.append(numpy.full(costs.size, whole))
        first = self._num_variables
        self._num_variables += costs.size
        return numpy.arange(first, self._num_variables).reshape(costs.shape)

    def rows(self, low: Numbers, high: Numbers) -> Numbers:
        self._ends.append((low.ravel(), high.ravel()))
        first = self._num_rows
        self._num_rows += low.size
        return numpy.arange(first, self._num_rows).reshape(low.shape)

    def add(self, rows: Numbers, variables: Numbers, factor: float) -> None:
        rows = numpy.broadcast_to(rows, variables.shape).ravel()
        self._entries.append((rows, variables.ravel(), numpy.full(variables.size, factor)))

    def one_of(self, costs: Numbers) -> Numbers:
        variables = self.variables(costs, whole=True)
        self.add(self.rows(numpy.ones(1), numpy.ones(1)), variables, 1.0)
        return variables

    def cells(self, costs: Numbers, sides: Sequence[tuple[Numbers, Numbers]]) -> Numbers:
        """Add a table of variables whose rows and columns have the sums of a side's variables.

        A side without variables has the sum 1.
        """
        cells = self.variables(costs)
        for lines, (variables, which) in zip((cells, cells.T), sides, strict=True):
            fixed = numpy.full(len(lines), 0.0 if variables.size else 1.0)
            rows = self.rows(fixed, fixed)
            self.add(rows[:, None], lines, 1.0)
            self.add(rows[which[: variables.size]], variables, -1.0)
        return cells

    def solve(self, gap: float) -> Numbers | None:
        """Return the values of all variables; None if the solver finds none."""
        is_whole = numpy.concatenate(self._is_whole)
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.silent()
        solver.setOptionValue("threads", 1)  # several programs are solved at a time
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("presolve", "off")  # takes as long as solving a linear program
        solver.passModel(self._model())
        for is_again in (False, True):
            if is_again:
                solver.setOptionValue("presolve", "choose")
                columns = numpy.arange(len(is_whole), dtype=numpy.int32)
                solver.changeColsIntegrality(len(columns), columns, is_whole.astype(numpy.uint8))
            solver.run()  # other threads go on
            if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                return None
            values: Numbers = numpy.array(solver.getSolution().col_value)
            wholes = values[is_whole]
            if numpy.abs(wholes - wholes.round()).max() < _WHOLE:
                break
        return values

    def _model(self) -> highspy.HighsLp:
        rows, columns, factors = map(numpy.concatenate, zip(*self._entries, strict=True))
        order, model = numpy.argsort(rows, kind="stable"), highspy.HighsLp()
        model.num_col_, model.num_row_ = self._num_variables, self._num_rows
        model.col_cost_ = numpy.concatenate(self._costs) * _SCALE
        model.col_lower_ = numpy.zeros(self._num_variables)
        model.col_upper_ = numpy.ones(self._num_variables)
        model.row_lower_, model.row_upper_ = map(numpy.concatenate, zip(*self._ends, strict=True))
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        ends = numpy.bincount(rows, minlength=self._num_rows).cumsum()
        matrix.start_ = numpy.concatenate(([0], ends))
        matrix.index_, matrix.value_ = columns[order], factors[order]
        return model


def _by_solver(problem: Problem, gap: float) -> States | None:
    table, none = _Table(), numpy.zeros(0, dtype=int)
    # 1. Add a variable for each state of a node, and for each pair of states that has a cost.
    nodes = {k: table.one_of(own) for k, own in problem.costs.items()}
    for (i, j), pair_costs in problem.pairs.items():
        table.cells(pair_costs, [(nodes[k], numpy.arange(len(nodes[k]))) for k in (i, j)])
    # 2. Add the conversions: one is done if any user needs it.
    for before, users, all_seconds in problem.shared:
        layouts, begin = numpy.unique(before.which, return_inverse=True)
        seconds = all_seconds[layouts]
        done = table.variables(seconds)
        start = none if before.node is None else nodes[before.node]
        for node, which in users:
            columns, which = numpy.unique(which, return_inverse=True)
            end = none if node is None else nodes[node]
            sides = [(start, begin), (end, which)]
            cells = table.cells(numpy.zeros((len(seconds), len(columns))), sides)
            # an upper bound of 1 would be right as well, but makes the solver tens of times slower
            rows = table.rows(numpy.zeros(cells.shape), numpy.full(cells.shape, numpy.inf))
            table.add(rows, done[:, columns], 1.0)
            table.add(rows, cells, -1.0)
    # 3. The state of a node is the one with the variable 1.
    values = table.solve(gap)
    return None if values is None else {k: int(values[x].argmax()) for k, x in nodes.items()}
