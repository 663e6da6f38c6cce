"""However many ask for the metrics: each gets values from after it asked, made once for all."""

import asyncio
import gzip
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from rollout_dispatcher.service.http.probes import Scrapes
from rollout_dispatcher.service.metrics.exposition import Format, RankFamily
from tests.support.client import PATIENCE_S


class Counting:
    """A collector whose one value rises with every look; `go` lets it be written."""

    def __init__(self) -> None:
        self.looks = 0
        self.looked = asyncio.Event()
        self.go = threading.Event()
        self.fails = False
        self.threads: set[int] = set()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if self.fails:
            raise RuntimeError("no values")
        self.looks += 1
        self.looked.set()
        self.threads.add(threading.get_ident())
        yield _Slow(self.looks, self.go)


class _Slow(RankFamily):
    def __init__(self, looks: int, go: threading.Event) -> None:
        super().__init__("looks", "Looks so far.", "gauge", {0: looks})
        self._go = go

    @property
    def series(self) -> str:
        assert self._go.wait(PATIENCE_S)
        return "looks"


def made() -> tuple[Counting, Scrapes]:
    counting, registry = Counting(), CollectorRegistry()
    registry.register(counting)
    return counting, Scrapes(registry)


def looks(body: bytes) -> float:
    return float(body.decode().split()[-1])


async def test_those_who_wait_share_what_is_read_after_all_of_them_have_asked() -> None:
    counting, scrapes = made()
    asked = [asyncio.ensure_future(scrapes.body(Format.TEXT, gzipped=False)) for _ in range(5)]
    await counting.looked.wait()
    late = asyncio.ensure_future(scrapes.body(Format.TEXT, gzipped=True))
    await asyncio.sleep(0)
    assert counting.looks == 1  # the others wait, and the event loop does not
    counting.go.set()
    found = [looks(body) for body in await asyncio.gather(*asked)]
    assert found == [1, 2, 2, 2, 2]
    assert looks(gzip.decompress(await late)) == 2
    assert looks(await scrapes.body(Format.TEXT, gzipped=False)) == 3
    assert counting.threads == {threading.get_ident()}  # values are read on the event loop alone
    scrapes.close()


async def test_one_who_gives_up_and_a_look_that_fails_harm_nobody_else() -> None:
    counting, scrapes = made()
    gone = asyncio.ensure_future(scrapes.body(Format.TEXT, gzipped=False))
    await counting.looked.wait()
    waits = asyncio.ensure_future(scrapes.body(Format.TEXT, gzipped=False))
    gone.cancel()
    counting.go.set()
    assert looks(await waits) == 2
    counting.fails = True
    with pytest.raises(RuntimeError, match="no values"):
        await scrapes.body(Format.TEXT, gzipped=False)
    counting.fails = False
    assert looks(await scrapes.body(Format.TEXT, gzipped=False)) == 3
    scrapes.close()
