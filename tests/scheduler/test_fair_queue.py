"""Laws of the waiting queue: turns of groups, classes, preempted requests, no starvation.

`Traffic` drives random arrivals, admissions, aborts, preemptions and ends, and keeps a plain
list model of what waits. The order of `fcfs` is computed from that model anew for every admission.
"""

import collections
import random

import pytest

from jdllm.options import sampling_params
from jdllm.scheduler import waiting
from jdllm.scheduler.request import Request

MAX_ROWS = 5


def ask(name, group=None, priority_class=0):
    one = Request(
        request_id=name,
        prompt_ids=[1],
        sampling=sampling_params.SamplingParams(),
        max_new_tokens=1,
        priority_class=priority_class,
    )
    if group is not None:
        one.group = group
    return one


class Traffic:
    """A queue with rows; `others[r][g]`: first admissions of group g while r waits to begin."""

    def __init__(self, policy: waiting.Policy = "fcfs", seed=0):
        self.queue, self.policy = waiting.WaitingQueue(), policy
        self.rng = random.Random(seed)
        self.running, self.waits, self.others = [], [], {}
        self.ring = []  # groups in order of turns
        self.admitted, self.names, self.num_admissions = [], 0, 0
        self.prefix = collections.defaultdict(lambda: self.rng.randrange(4))

    def prefix_len(self, one):
        return self.prefix[one.request_id]

    def arrive(self, size, priority_class=0, group=None):
        group = object() if group is None else group
        for _ in range(size):
            one = ask(str(self.names), group, priority_class)
            one.arrival = self.names
            self.names += 1
            self.queue.add(one)
            self.waits.append(one)
            self.others[one] = collections.Counter()
        if (priority_class, group) not in self.ring:
            self.ring.append((priority_class, group))
        return group

    def members(self, place):
        return [
            one
            for one in self.waits
            if (one.priority_class, one.group) == place and not one.num_preemptions
        ]

    def due(self):
        """What `fcfs` admits next, from the definition."""
        best = min(one.priority_class for one in self.waits)
        preempted = [o for o in self.waits if o.num_preemptions and o.priority_class == best]
        if preempted:
            return min(preempted, key=lambda one: one.admission)
        return self.members(next(place for place in self.ring if place[0] == best))[0]

    def admit(self):
        one = next(self.queue.in_turn(self.policy, self.prefix_len))  # pyright: ignore[reportArgumentType]
        self.check(one)
        self.queue.remove(one, is_turn=True)
        place = (one.priority_class, one.group)
        if not one.num_preemptions:
            one.admission, self.num_admissions = self.num_admissions, self.num_admissions + 1
            self.admitted.append(one)
            for other in self.waits:
                if other.group is not one.group:
                    self.others[other][one.group] += 1
            self.ring.remove(place)
        self.waits.remove(one)
        if self.members(place) and place not in self.ring:
            self.ring.append(place)
        self.running.append(one)
        return one

    def check(self, one):
        assert one.priority_class == min(other.priority_class for other in self.waits)
        if self.policy == "fcfs":
            assert one is self.due()

    def abort(self, one):
        self.queue.remove(one)
        self.waits.remove(one)
        self.others.pop(one, None)
        place = (one.priority_class, one.group)
        if place in self.ring and not self.members(place):
            self.ring.remove(place)

    def preempt(self):
        one = max(self.running, key=Request.rank)
        self.running.remove(one)
        one.num_preemptions += 1
        self.queue.add(one)
        self.waits.append(one)

    def random_event(self, classes):
        event = self.rng.random()
        if event < 0.25 and len(self.waits) < 60:
            self.arrive(self.rng.choice([1, 1, 1, 2, 5, 25]), self.rng.choice(classes))
        elif event < 0.6 and self.waits and len(self.running) < MAX_ROWS:
            self.admit()
        elif event < 0.63 and self.waits:
            self.abort(self.rng.choice(self.waits))
        elif event < 0.7 and self.running:
            self.preempt()
        elif self.running:
            self.running.pop(self.rng.randrange(len(self.running)))
        assert len(self.queue) == len(self.waits)


@pytest.mark.parametrize("classes", [(0,), (0, -3, float("inf"))], ids=["one class", "classes"])
@pytest.mark.parametrize("seed", range(5))
def test_fcfs_admits_in_the_order_of_turns_whatever_happens(seed, classes):
    traffic = Traffic(seed=seed)
    for _ in range(1500):
        traffic.random_event(classes)
        assert list(traffic.queue) == sorted(traffic.waits, key=lambda one: one.arrival)
    assert len(traffic.admitted) > 300
    while traffic.waits:
        traffic.admit()
    assert len(traffic.queue) == 0 and not list(traffic.queue.in_turn("fcfs", traffic.prefix_len))


@pytest.mark.parametrize("policy,turns", [("fcfs", 1), ("lpm", 2)])
@pytest.mark.parametrize("seed", range(3))
def test_no_group_gets_more_than_its_turns_while_a_request_waits(seed, policy, turns):
    traffic = Traffic(policy, seed)
    before = {}  # how many of its group may be admitted before a request
    for _ in range(2000):
        traffic.random_event((0,))
        for one in traffic.waits:
            mine = [o for o in traffic.waits if o.group is one.group and not o.num_preemptions]
            place = mine.index(one) if one in mine else 0
            before.setdefault(one, place if policy == "fcfs" else len(mine) - 1)
    for one, others in traffic.others.items():
        assert max(others.values(), default=0) <= turns * (before.get(one, 0) + 1)
    assert max(max(others.values(), default=0) for others in traffic.others.values()) > 3


@pytest.mark.parametrize("policy,turns", [("fcfs", 1), ("lpm", 2)])
def test_nobody_starves_while_others_keep_coming(policy, turns):
    """A new question with a better prefix follows each admission: the worst case for the list."""
    traffic = Traffic(policy)
    groups = 20
    group = traffic.arrive(30)
    mine = [one for one in traffic.waits if one.group is group]
    for one in mine:
        traffic.prefix[one.request_id] = 0
    rounds = 0
    while any(one.admission is None for one in mine):
        while len(traffic.ring) <= groups:
            traffic.arrive(1)
            traffic.prefix[traffic.waits[-1].request_id] = 100
        traffic.admit()
        rounds += 1
        assert rounds <= turns * 30 * (groups + 1)
    assert rounds > 29 * groups, "the questions had their turns"


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_question_waits_for_one_member_of_a_long_list(policy):
    traffic = Traffic(policy)
    traffic.arrive(400)
    for _ in range(10):
        traffic.admit()
    traffic.arrive(1)
    question = traffic.waits[-1]
    for _ in range(2):
        traffic.admit()
    assert question in traffic.admitted


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_single_list_and_single_requests_keep_the_order_of_arrival(policy):
    for sizes in ([50], [1] * 50):
        traffic = Traffic(policy)
        traffic.prefix = collections.defaultdict(int)
        for size in sizes:
            traffic.arrive(size)
        while traffic.waits:
            traffic.admit()
        assert [one.arrival for one in traffic.admitted] == list(range(50))


def test_lpm_takes_the_longest_prefix_of_a_group_and_orders_the_groups_of_a_sweep():
    traffic = Traffic("lpm")
    names = {}
    for name, lengths in {"a": [1, 3], "b": [9], "c": [5, 6]}.items():
        group = traffic.arrive(len(lengths))
        mine = [one for one in traffic.waits if one.group is group]
        for one, length in zip(mine, lengths, strict=True):
            traffic.prefix[one.request_id], names[one] = length, f"{name}{length}"
    traffic.admit()
    traffic.arrive(1)  # comes late: its turn is in the next sweep
    traffic.prefix[traffic.waits[-1].request_id], names[traffic.waits[-1]] = 50, "late"
    while traffic.waits:
        traffic.admit()
    assert [names[one] for one in traffic.admitted] == ["b9", "c6", "a3", "late", "c5", "a1"]


def test_lpm_matches_a_bounded_number_of_prefixes_per_round():
    for sizes in ([5000], [1] * 5000, [50] * 100):
        traffic = Traffic("lpm")
        for i, size in enumerate(sizes):
            for j in range(size):
                traffic.queue.add(ask(f"{i} {j}", group=i))
        seen = set()
        next(traffic.queue.in_turn("lpm", lambda one, seen=seen: seen.add(one) or 0))
        assert 64 < len(seen) <= waiting.MAX_MATCHED_REQUESTS


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_those_that_are_passed_over_leave_their_turn_to_each_other_once(policy):
    traffic = Traffic(policy, seed=11)
    for _ in range(300):
        traffic.random_event((0, -3))
        order = list(traffic.queue.in_turn(policy, traffic.prefix_len))
        assert len(order) == len(set(order)) and set(order) == set(traffic.waits)
        classes = [one.priority_class for one in order]
        assert classes == sorted(classes)
        if policy == "fcfs" and order:
            assert order[0] is traffic.due()


def test_preempted_requests_come_first_in_their_class_the_senior_one_before():
    traffic = Traffic()
    traffic.arrive(3)
    traffic.arrive(3, priority_class=1)
    while traffic.waits:
        traffic.admit()
    for _ in range(5):
        traffic.preempt()  # the three of class 1, then two of class 0
    traffic.arrive(1)
    traffic.arrive(1, priority_class=1)
    order = []
    while traffic.waits:
        order.append(traffic.admit().arrival)
    assert order == [1, 2, 6, 3, 4, 5, 7]
