"""Connections that break anywhere, against a real dispatcher: nothing is lost and nothing twice."""

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_workers import RankClient, RolloutProducer, RolloutSample
from tests.support.server import serve

SAMPLES, RANKS = 64, 2


class BreakingProxy:
    """Passes bytes between a client and the dispatcher, and cuts every connection after a while.

    It grows kinder, so that the traffic gets through in the end.
    """

    def __init__(self, path: Path, upstream: str, seed: int) -> None:
        self.endpoint = f"unix:{path}"
        self.cuts = 0
        self._upstream = Endpoint.parse(upstream)
        self._random = random.Random(seed)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection((self._upstream.host, self._upstream.port), 10)
                server.settimeout(None)
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    budget = self._random.randrange(100, 400 * 2 ** min(self.cuts // 4, 20))
                    threading.Thread(
                        target=self._pass, args=(source, sink, budget), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, sink: socket.socket, budget: int) -> None:
        with suppress(OSError):
            while budget > 0 and (data := source.recv(min(budget, 4096))):
                sink.sendall(data)
                budget -= len(data)
        self.cuts += budget <= 0
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def breaking(path: Path, upstream: str, seed: int) -> Iterator[BreakingProxy]:
    proxy = BreakingProxy(path, upstream, seed)
    yield proxy
    proxy.close()


def push(endpoint: str, *, named: bool) -> None:
    with RolloutProducer(endpoint) as producer:
        for index in range(SAMPLES):
            fields = {"input_ids": list(range(1 + index % 30)), "number": index}
            producer.push_many([RolloutSample(fields, f"id{index}" if named else None)])
        producer.end_stream()


def train(client: RankClient) -> list[tuple[int, str, list[str]]]:
    """Every step's number and digest, and the samples that this rank got of it."""
    found = []
    with client:
        while (step := client.next_step(20)) is not None:
            passes = [
                [name for one in step if not one.header.is_filler for name in one.header.sample_ids]
                for _ in range(2)
            ]
            assert passes[0] == passes[1]
            found.append((step.header.step, step.header.digest, passes[0]))
            step.commit()
    return found


@pytest.mark.e2e
@pytest.mark.parametrize(("seed", "named"), [(1, False), (2, True)])
def test_broken_connections_lose_and_repeat_nothing(tmp_path: Path, seed: int, named: bool) -> None:
    options = {"dp_size": RANKS, "global_batch_size": 8, "micro_batch_tokens": 40}
    with (
        serve(tmp_path / "server", **options) as upstream,
        breaking(tmp_path / "proxy.sock", upstream, seed) as proxy,
        ThreadPoolExecutor() as threads,
    ):
        pushing = threads.submit(push, proxy.endpoint, named=named)
        first = RankClient(proxy.endpoint, dp_rank=0, dp_size=RANKS)
        second = RankClient(proxy.endpoint, dp_rank=1, dp_size=RANKS, generation=first.generation)
        ranks = [threads.submit(train, client) for client in (first, second)]
        pushing.result(60)
        found = [rank.result(60) for rank in ranks]
    assert [step[:2] for step in found[0]] == [step[:2] for step in found[1]]
    names = [name for rank in found for step in rank for name in step[2]]
    assert len(names) == len(set(names)) == SAMPLES
    assert proxy.cuts > 10
