"""Faults of what messages cost, found in a traced step and priced, and of their groups."""

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
    Fault(
        "messages are never joined, so captured ranks that both send first hang",
        "penstock/schedules/message_groups.py",
        "        queues.join(min(receives, key=queues.distance))",
        "        alone = message_positions(schedule)\n"
        "        return tuple(tuple((n,) for n in queue) for queue in alone)",
        "tests/schedules/test_message_groups.py",
        "joins_the_send",
    ),
    Fault(
        "receives of a group do not follow their sends, so NCCL takes one for another",
        "penstock/schedules/message_groups.py",
        "return place not in self.sends, self.partners[place]",
        "return place not in self.sends, place",
        "tests/schedules/test_message_groups.py",
        "later_value or several_stages",
    ),
    Fault(
        "the law of one queue lets a send run before its value is computed",
        "penstock/schedules/laws/one_queue.py",
        "max(self.sends[self.num_ended], default=-1) < self._computed()",
        "self._computed() >= 0",
        "tests/schedules/test_message_groups.py",
        "every_order_of_events",
    ),
    Fault(
        "the law of one queue lets a group end though a message is not received",
        "penstock/schedules/laws/one_queue.py",
        "all(began[m] == 2 for m in self.messages[self.num_ended])",
        "True",
        "tests/schedules/test_message_groups.py",
        "every_order_of_events or hang",
    ),
)
