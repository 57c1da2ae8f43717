"""Work on many nodes at once."""

import threading

import pytest

from cluster.fleet import on_each
from cluster.runner import Unreachable


def test_every_node_answers_side_by_side():
    together = threading.Barrier(5, timeout=30)  # passes only when all five run at once

    def work(node):
        together.wait()
        return node * 2

    assert dict(on_each(range(5), work, 30)) == {node: node * 2 for node in range(5)}


def test_a_node_that_cannot_be_asked_is_an_answer_and_a_mistake_of_ours_is_raised():
    def work(node):
        raise Unreachable("down") if node == "a" else KeyError(node)

    assert [str(answer) for _, answer in on_each(["a"], work, 30)] == ["down"]
    with pytest.raises(KeyError):
        list(on_each(["b"], work, 30))


def test_a_silent_node_is_reported_after_its_time():
    never = threading.Event()
    answers = dict(on_each(["quick", "silent"], lambda node: never.wait() if node == "silent" else "here", 0.2))
    never.set()
    assert answers["quick"] == "here"
    assert isinstance(answers["silent"], Unreachable)
