"""A dispatcher that comes back as another run has lost what it accepted: its producers are told."""

import asyncio
import logging
from pathlib import Path

import pytest

from rollout_dispatcher.errors import ConfigError, RunChanged
from rollout_workers import AsyncRolloutProducer, Outcome, RolloutProducer
from tests.support.addresses import free_port
from tests.support.server import ServeProcess

FIELDS = {"input_ids": [1, 2, 3]}


class Restarted:
    """A dispatcher that is killed and started again at one address."""

    def __init__(self, folder: Path, *, journal: bool) -> None:
        self._folder = folder
        self._options: dict[str, object] = {
            "dp_size": 1, "global_batch_size": 4, "micro_batch_tokens": 16,
            "listen": f"127.0.0.1:{free_port()}",
        }  # fmt: skip
        if journal:
            self._options["journal_dir"] = folder / "journal"

    def start(self) -> ServeProcess:
        return ServeProcess(self._folder, warm=True, **self._options)  # type: ignore[arg-type]


def test_a_producer_warns_and_goes_on_with_the_new_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Restarted(tmp_path, journal=False)
    with place.start() as server:
        producer = RolloutProducer(server.endpoint)
        before = producer.run_id
        assert before == server.status()["run_id"]
        assert producer.push_many([FIELDS] * 3) == [Outcome.ACCEPTED] * 3
    with caplog.at_level(logging.WARNING), place.start() as server:
        assert producer.push(FIELDS) is Outcome.ACCEPTED
        after = server.status()["run_id"]
        assert producer.run_id == after != before
        producer.close()
    (told,) = [text for text in caplog.messages if "serves run" in text]
    assert told.startswith(
        f"the dispatcher serves run {after} now, and no longer run {before}, which accepted 3 "
        "samples of this producer: it was restarted without a journal"
    )


def test_whoever_asks_for_it_gets_an_error_in_every_call(tmp_path: Path) -> None:
    place = Restarted(tmp_path, journal=False)

    async def run() -> RunChanged:
        with place.start() as server:
            producer = AsyncRolloutProducer(server.endpoint, on_run_change="raise")
            await producer.start()
            for _ in range(2):
                await producer.push(FIELDS)
        with place.start() as server:
            with pytest.raises(RunChanged) as told:
                await producer.push(FIELDS)
            with pytest.raises(RunChanged):
                await producer.end_stream()
            await producer.close()
            assert server.status()["accepted"] == 0, "nothing of it went to the new run"
        return told.value

    error = asyncio.run(run())
    assert (error.accepted, error.retriable) == (2, False)
    assert error.before != error.now


def test_a_run_that_goes_on_from_its_journal_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Restarted(tmp_path, journal=True)
    with place.start() as server:
        producer = RolloutProducer(server.endpoint, on_run_change="raise")
        producer.push(FIELDS)
        before = producer.run_id
    with place.start() as server:
        assert producer.push(FIELDS) is Outcome.ACCEPTED
        assert (producer.run_id, server.status()["accepted"]) == (before, 2)
        producer.close()
    assert "serves run" not in caplog.text


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_run_change is 'ignore'; choose from warn, raise"):
        AsyncRolloutProducer("127.0.0.1:7077", on_run_change="ignore")
