"""Stacks for the log: each once, and never more than somebody reads."""

import asyncio
import threading

import pytest

from rollout_dispatcher.service.signals import MAX_STACKS, Stacks, bounded


def test_what_is_too_much_is_counted() -> None:
    assert list(bounded("ab")) == ["a", "b"]
    assert list(bounded(map(str, range(MAX_STACKS + 7))))[-1] == "(7 more)"


async def test_where_no_thread_is_to_be_had_who_hears_signals_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    Stacks(asyncio.get_running_loop()).tell()


async def test_tasks_that_wait_for_the_same_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def waits() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(waits()) for _ in range(500)]
    await asyncio.sleep(0)
    stacks = Stacks(asyncio.get_running_loop())
    await asyncio.to_thread(stacks._tell)
    for task in tasks:
        task.cancel()
    (told,) = [text for text in caplog.messages if "500 times" in text]
    assert told.startswith("500 times task test_tasks_that_wait_for_the_same_are_counted.<locals>.")
    assert "waits (test_stacks.py:" in told
