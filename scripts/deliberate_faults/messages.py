"""Faults of what messages cost, found in a traced step and priced."""

from .fault import Fault

FAULTS = (
    Fault(
        "the simulator lets a rank compute while it takes a message in",
        "penstock/simulator/engine.py",
        "return now_s if way is None else now_s + way.receive_s",
        "return now_s",
        "tests/simulator/test_simulator.py",
        "takes_in",
    ),
    Fault(
        "the simulator prices messages that stay on their rank",
        "penstock/simulator/simulate.py",
        "None if ranks[edge[1]] == ranks[edge[2]] else way_of(edge)",
        "None if edge[1] == edge[2] else way_of(edge)",
        "tests/simulator/test_simulator.py",
        "stays_on_its_rank",
    ),
    Fault(
        "a search sends to the side that it receives from",
        "penstock/schedules/problem.py",
        "above, below = (False, *apart), (*apart, False)",
        "below, above = (False, *apart), (*apart, False)",
        "tests/schedules/test_list_scheduling.py",
        "that_it_predicted",
    ),
    Fault(
        "a message on its way is counted among those that lay there",
        "penstock/simulator/measured.py",
        "crossing.send.end_s + took_s",
        "crossing.send.end_s",
        "tests/simulator/test_measured.py",
        "whoever_waits",
    ),
    Fault(
        "taking a message in is counted as its transfer, too",
        "penstock/simulator/measured.py",
        "c.took_s - receive_s.get(c.way[1], others_s)",
        "c.took_s",
        "tests/simulator/test_measured.py",
        "gives_back_the_costs",
    ),
)
