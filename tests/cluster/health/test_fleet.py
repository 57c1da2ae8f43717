"""Work on many nodes at once."""

import threading

import pytest

from cluster.transport import fleet
from cluster.transport.fleet import on_each
from cluster.transport.runner import Unreachable
from tests.patience import AMPLE


@pytest.fixture
def little_grace(monkeypatch):
    monkeypatch.setattr(fleet, "GRACE_SECONDS", 0.1)


def test_every_node_answers_side_by_side():
    together = threading.Barrier(5, timeout=AMPLE)  # passes only when all five run at once

    def work(node):
        together.wait()
        return node * 2

    assert dict(on_each(range(5), work, AMPLE)) == {node: node * 2 for node in range(5)}


def test_a_node_that_cannot_be_asked_is_an_answer_and_a_mistake_of_ours_is_raised():
    def work(node):
        raise Unreachable("down") if node == "a" else KeyError(node)

    assert [str(answer) for _, answer in on_each(["a"], work, AMPLE)] == ["down"]
    with pytest.raises(KeyError):
        list(on_each(["b"], work, AMPLE))


def test_a_silent_node_is_reported_after_its_time(little_grace):
    never = threading.Event()
    answers = dict(on_each(["quick", "silent"], lambda node: never.wait() if node == "silent" else "here", 0.2))
    never.set()
    assert answers["quick"] == "here"
    assert isinstance(answers["silent"], Unreachable)


def test_five_hundred_slow_nodes_are_asked_side_by_side_but_not_more_at_once_than_said():
    lock, now, most = threading.Lock(), 0, 0

    def work(node):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        threading.Event().wait(0.05)
        with lock:
            now -= 1
        return node

    answers = dict(on_each(range(500), work, AMPLE, at_once=100))
    assert answers == {node: node for node in range(500)}
    assert 1 < most <= 100


def test_a_nodes_time_begins_when_its_turn_comes(little_grace):
    # Ten turns of 0.2 s each: with 1 s (and 0.1 s of grace) from the first start, some would be lost.
    wait = threading.Event().wait
    answers = dict(on_each(range(10), lambda node: wait(0.2) or "here", 1.0, at_once=1))
    assert set(answers.values()) == {"here"}


def test_a_node_that_hangs_gives_its_turn_to_the_next(little_grace):
    never = threading.Event()
    answers = dict(
        on_each(["silent", "next"], lambda node: never.wait() if node == "silent" else "here", 0.2, at_once=1)
    )
    never.set()
    assert isinstance(answers["silent"], Unreachable)
    assert answers["next"] == "here"
