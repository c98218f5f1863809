"""Tests the turns of contenders, without any network."""

import dataclasses
import itertools
import json

import links
import pytest
import turns

PLAN = turns.Plan("job", ("a", "b"), ("one", "two"), links.Network(2), 3, 0.01, 5)


class Steps:
    """A contender that notes when it is its turn."""

    def __init__(self, name, log, seconds=0.001):
        self.name, self.log, self.seconds = name, log, seconds
        self.sent = 0

    def step(self):
        self.log.append(self.name)
        self.sent += 1000
        Clock.now += self.seconds


class Clock:
    """Time passes in steps alone."""

    now = 0.0

    @classmethod
    def perf_counter(cls):
        return cls.now


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(turns, "time", Clock)
    return []


def measure(log, plan=PLAN, **settings):
    a, b = Steps("a", log), Steps("b", log, seconds=0.02)
    contenders = {
        "a": turns.Contender(a.step, lambda: log.append("prepare"), lambda: a.sent, **settings),
        "b": turns.Contender(b.step, step_bytes=70.0),
    }
    records = turns.alternate(plan, contenders, lambda number: number, rank=1)
    return {(record["link"], record["contender"]): record for record in records}


def test_a_record_for_each_contender_on_each_link(log):
    records = measure(log)
    assert list(records) == [("one", "a"), ("one", "b"), ("two", "a"), ("two", "b")]
    quick, slow = records["one", "a"], records["one", "b"]
    assert quick["seconds"] == pytest.approx([0.001] * 3 * 10)  # ten steps make a turn
    assert slow["seconds"] == pytest.approx([0.02] * 3)  # one step is longer than that
    assert (quick["counted_bytes"], slow["counted_bytes"]) == (1000, 70)
    assert (quick["job"], quick["workers"]) == ("job", 2)


def test_contenders_take_turns(log):
    measure(log)
    order = [name for name in log if name != "prepare"]
    switches = sum(first != second for first, second in itertools.pairwise(order))
    # Warm-up; then on each link all are tried, and have three turns.
    assert switches == 1 + 2 * (2 + 3 * 2)


def test_contenders_with_a_residual_are_warmed_up(log):
    one_turn = dataclasses.replace(PLAN, links=())
    measure(log, one_turn)
    assert log.count("a") == 2
    log.clear()
    measure(log, one_turn, keeps_residual=True)
    assert log.count("a") == PLAN.warm_up
    assert log.count("prepare") == PLAN.warm_up


def test_a_plan_travels_on_the_command_line(monkeypatch):
    monkeypatch.setattr(turns.sys, "argv", ["tensorflow_backend.py", PLAN.to_text()])
    assert json.dumps(dataclasses.asdict(turns.Plan.from_command_line())) == PLAN.to_text()
    assert turns.Plan.from_command_line().network == PLAN.network


def test_contenders_that_depend_on_the_link_are_recreated_on_each(log):
    a, b = Steps("a", log), Steps("b", log)
    created = []

    def renew():
        created.append("new")
        return turns.Contender(b.step, keeps_residual=True)

    contenders = {"a": turns.Contender(a.step, renew=renew)}
    records = turns.alternate(
        PLAN, contenders, lambda number: number, rank=1, predict=lambda: {"a": 0.5}
    )
    assert created == ["new"] * len(PLAN.links)
    assert log[:2] == ["a", "a"]  # only before all
    assert set(log[2:]) == {"b"}
    assert [record["predicted"] for record in records] == [0.5, 0.5]
