"""A config file that hangs holds up nothing, and what is read later is what stands there then."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from rollout_dispatcher.service import reloading as on_signal
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.reloading import (
    CHANGED,
    REFUSED,
    Reloads,
    Rereading,
    Settings,
)

CONFIG = ServeConfig(dp_size=2, global_batch_size=4, micro_batch_size=1)


@dataclass
class Found:
    config: ServeConfig
    sources: Mapping[str, str]
    notes: Sequence[str] = ()


class Disk:
    """A file that can be read while `works` is set; `max_wait` is what stands in it."""

    def __init__(self) -> None:
        self.works, self.max_wait, self.begun = threading.Event(), 1.0, 0

    def read(self) -> Found:
        self.begun += 1
        seen = self.max_wait
        assert self.works.wait(20)
        return Found(CONFIG.model_copy(update={"max_wait": seen}), {"max_wait": "file:1"})


def test_a_file_that_hangs_is_given_up_and_read_anew_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_signal, "PATIENCE_SECONDS", 0.05)
    disk = Disk()

    async def run() -> None:
        outcomes: asyncio.Queue[str] = asyncio.Queue()
        reloads = Reloads(Settings(CONFIG), lambda _: None, outcomes.put_nowait)
        rereading = Rereading(disk.read, lambda: reloads, nullcontext, lambda _: [])
        for _ in range(3):
            rereading.ask()
            assert await asyncio.wait_for(outcomes.get(), 10) == REFUSED
        assert disk.begun == 1, "one thread hangs, however often it is asked"
        disk.max_wait = 7.0
        monkeypatch.setattr(on_signal, "PATIENCE_SECONDS", 10.0)
        rereading.ask()
        disk.works.set()
        assert await asyncio.wait_for(outcomes.get(), 10) == CHANGED
        assert reloads.settings.config.max_wait == 7.0, "not what the first read has seen"

    asyncio.run(run())
    assert "SIGHUP: nothing changes: the config file was not read within 0.05 s" in caplog.text
