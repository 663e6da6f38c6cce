"""The books balance in every scrape, whatever producers and ranks do meanwhile.

accepted = buffered + in flight + committed + dropped
"""

import random
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess

SCRAPES = 40
STEPS_OF_A_GENERATION = 25


def total(found: dict[str, float], name: str) -> float:
    return sum(value for series, value in found.items() if series.partition("{")[0] == name)


def check_books(found: dict[str, float]) -> None:
    accepted = found["samples_received_total{outcome=accepted}"]
    held = found["buffer_samples"] + found["samples_in_flight"]
    gone = found["samples_committed_total"] + total(found, "samples_dropped_total")
    assert accepted == held + gone, found


def produce(endpoint: str, name: str, stop: threading.Event) -> list[str]:
    """Push all sorts of samples until told to stop; returns the ids of the accepted ones."""
    chance = random.Random(name)
    producer = Producer(endpoint, name)
    accepted: list[str] = []

    def push(tokens: list[int], seq: int | None = None, group: str | None = None) -> None:
        first = producer.next_seq if seq is None else seq
        ids = None if group is None else [group] * len(tokens)
        sizes = None if group is None else [len(tokens) + 1] * len(tokens)
        answer = producer.push(tokens, seq=seq, group_ids=ids, group_sizes=sizes)
        outcomes = enumerate(answer.outcomes, first)
        accepted.extend(f"{name}/{at}" for at, outcome in outcomes if outcome == "accepted")

    for turn in count():
        if stop.is_set():
            break
        push([chance.randint(1, 60) for _ in range(chance.randint(1, 8))])
        if turn % 5 == 1:
            push([65, 0])  # refused
        if turn % 5 == 2:
            push([4], seq=0)  # a duplicate
        if turn % 5 == 3:
            push([5, 5], group=f"{name}-{turn}")  # its third member never comes
            producer.send(m.CloseGroup(group_id=f"{name}-{turn}"))
        if turn % 5 == 4:
            producer.close()
            producer = Producer(endpoint, name, first_seq=producer.next_seq)
    return accepted


def train(endpoint: str) -> Counter[str]:
    """Train to the end of the stream, with new process groups now and then."""
    committed: Counter[str] = Counter()
    trainer = Trainer(endpoint, 2)
    for taken in count(1):
        parts = trainer.take()
        if not parts:
            break
        if taken % STEPS_OF_A_GENERATION == 0:
            trainer = Trainer(endpoint, 2)  # the step just taken comes again
            continue
        trainer.commit(parts[0].header.step)
        committed.update(name for part in parts for name in part.sample_ids)
    trainer.bye()
    return committed


def test_the_books_balance_in_every_scrape_under_load(serve: Serve) -> None:
    server = serve(global_batch_size=16, window=1.5, buffer_capacity=48, max_wait="5ms")
    stop = threading.Event()
    with ThreadPoolExecutor(8) as pool:
        producers = [pool.submit(produce, server.endpoint, f"p{at}", stop) for at in range(4)]
        trainer = pool.submit(train, server.endpoint)
        try:
            scrapes = [scrape_and_check(server, [*producers, trainer]) for _ in range(SCRAPES)]
        finally:
            stop.set()
        accepted = Counter(name for producer in producers for name in producer.result())
        last = server.scrape()
        check_books(last)
        ender = Producer(server.endpoint, "end")
        ender.end_stream(force=True)
        ender.bye()
        committed = trainer.result()
    assert server.wait() == 0

    assert set(accepted.values()) == {1}
    assert set(committed.values()) == {1}
    dropped = accepted - committed
    assert total(last, "samples_dropped_total") == len(dropped)
    assert committed <= accepted
    for name in ("buffer_samples", "samples_in_flight", "samples_committed_total"):
        assert len({found[name] for found in scrapes}) > 1, f"{name} stood still: no load"
    for outcome in ("refused", "duplicate"):
        assert last[f"samples_received_total{{outcome={outcome}}}"] > 0


def scrape_and_check(
    server: ServeProcess, workers: list[Future[list[str]] | Future[Counter[str]]]
) -> dict[str, float]:
    for worker in workers:
        if worker.done():
            worker.result()  # raises what ended it too early
    found = server.scrape()
    check_books(found)
    return found
