"""Whose turn it is in the engine's queue."""

import random
from collections import Counter

import pytest

from engine.fair_queue import FairQueue, Peer


def test_peers_of_one_host_are_served_as_they_come() -> None:
    queue: FairQueue[int] = FairQueue(room=10)
    peers = [Peer() for _ in range(5)]
    for number, peer in enumerate(peers):
        assert queue.add(peer, number) is None
    assert [queue.pop() for _ in peers] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="empty"):
        queue.pop()


def test_hosts_take_turns_whoever_has_more_connections() -> None:
    queue: FairQueue[str] = FairQueue(room=200)
    for number in range(100):
        queue.add(Peer("greedy"), f"greedy {number}")
    robot = Peer("robot")
    order = []
    for _ in range(10):
        queue.add(robot, "robot")
        order += [queue.pop(), queue.pop()]
        queue.add(Peer("greedy"), "one more")
    assert order.count("robot") >= 9


def test_a_full_queue_makes_the_host_with_the_most_give_way() -> None:
    queue: FairQueue[str] = FairQueue(room=4)
    for number in range(4):
        assert queue.add(Peer("greedy"), f"greedy {number}") is None
    assert queue.add(Peer("greedy"), "late") == "late"
    assert queue.add(Peer("robot"), "robot") == "greedy 3"
    assert queue.add(Peer("another"), "another") == "greedy 2"
    assert queue.add(Peer("third"), "third") == "greedy 1"
    assert queue.add(Peer("fourth"), "fourth") == "fourth"
    assert [queue.pop() for _ in range(4)] == ["greedy 0", "robot", "another", "third"]


def test_within_a_host_whoever_was_served_last_gives_way() -> None:
    """So a robot behind the proxy, or on the machine, of a hundred greedy connections has its share among them."""
    queue: FairQueue[Peer] = FairQueue(room=20)
    greedy, robot = [Peer() for _ in range(100)], Peer()
    served: Counter[Peer] = Counter()
    waiting: set[Peer] = set()
    rng = random.Random(0)
    for turn in range(2000):
        asking = [peer for peer in greedy if peer not in waiting]
        rng.shuffle(asking)
        if turn % 5 == 0 and robot not in waiting:
            asking.append(robot)  # it asks less often, and after them
        for peer in asking:
            waiting.add(peer)
            if (refused := queue.add(peer, peer)) is not None:
                waiting.discard(refused)
        peer = queue.pop()
        waiting.discard(peer)
        served[peer] += 1
    assert served[robot] >= 15
    assert max(served[peer] for peer in greedy) <= 25


def test_what_is_discarded_waits_no_more() -> None:
    queue: FairQueue[int] = FairQueue(room=3)
    for number in range(3):
        queue.add(Peer(), number)
    assert queue.discard(lambda number: number == 1) == [1]
    assert len(queue) == 2
    assert queue.add(Peer(), 3) is None
    assert [queue.pop() for _ in range(3)] == [0, 2, 3]
