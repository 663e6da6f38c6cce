"""What is given up is in the log, by reason: the first at once, the others a line now and then."""

import re

import pytest

from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.service.reporter import INTERVAL_SECONDS, DropsLog
from tests.service.conftest import Serve
from tests.support.client import Producer, Trainer
from tests.support.samples import make_sample


def entries(*names: str) -> list[Entry]:
    return [Entry(make_sample(name, 4), ticket, 0.0) for ticket, name in enumerate(names)]


def test_a_reason_is_told_at_once_and_then_what_has_gathered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = DropsLog()
    log.note({DropReason.STALE: entries("a")}, 0.0)
    log.note({DropReason.STALE: entries("b", "c")}, 1.0)
    log.note({DropReason.STALE: entries(*"defghijkl")}, 2.0)
    why = "older than --max-staleness allows when their step was planned"
    first = f"1 accepted sample is dropped (stale), {why}: a"
    assert caplog.messages == [first]
    log.check(INTERVAL_SECONDS - 1)
    assert caplog.messages == [first]
    log.check(INTERVAL_SECONDS)
    log.check(3 * INTERVAL_SECONDS)
    rest = f"11 accepted samples are dropped (stale), {why}: b, c, d, e, f, g, h, i and 3 more"
    assert caplog.messages == [first, rest]


def test_each_reason_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log = DropsLog()
    log.note({reason: entries("a") for reason in DropReason}, 0.0)
    told = [re.findall(r"\((.*?)\)", line)[0] for line in caplog.messages]
    assert sorted(told) == [
        "incomplete-group", "last-batch", "oversize", "schema", "stale", "superseded", "unused",
    ]  # fmt: skip


def test_the_end_tells_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    log = DropsLog()
    log.note({DropReason.STALE: entries("a")}, 0.0)
    log.note({DropReason.STALE: entries("b")}, 0.0)
    log.close()
    assert [line[-1] for line in caplog.messages] == ["a", "b"]


def test_the_service_says_it_and_the_end_sums_up(serve: Serve) -> None:
    server = serve(
        on_oversize="drop", micro_batch_tokens=16, global_batch_size=2, buffer_capacity=8
    )
    producer = Producer(server.endpoint, "p")
    assert producer.push([4, 17, 4]).outcomes == ["accepted"] * 3
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        producer.end_stream()
        assert trainer.train() == []
        trainer.bye()
    producer.close()
    assert server.wait() == 0
    assert "1 accepted sample is dropped (oversize), longer than --micro-batch-tokens" in (
        server.log()
    )
    assert "every step is committed; of 3 accepted samples some were dropped: oversize 1" in (
        server.log()
    )


def test_the_log_names_the_fields_of_the_first_step(serve: Serve) -> None:
    server = serve(global_batch_size=2)
    Producer(server.endpoint, "p").push([4, 4])
    with Trainer(server.endpoint, 2) as trainer:
        trainer.train()
        assert re.search(r"samples have the fields \w+ \w+\[tokens\]", server.log())
