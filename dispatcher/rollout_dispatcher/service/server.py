"""`dispatcher serve`: one dispatcher in a process of its own, with signals and an orderly end.

The first SIGTERM or SIGINT drains: nothing more is accepted, what is buffered is dispatched, ranks
are told that the stream has ended, and the service stops when the last step is committed and the
ranks have left, or after `drain_timeout`. The second signal quits at once. With a journal the first
signal stops at once too, since the next process goes on with what is here. Invariant: the exit code
is not 0 if anything that was accepted is given up.
"""

import asyncio
import gc
import logging
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from prometheus_client import disable_created_metrics

from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.dispatcher import Dispatcher
from rollout_dispatcher.service.process import logs
from rollout_dispatcher.service.process.allocator import keep_freed_memory
from rollout_dispatcher.transport.fair_selector import new_event_loop

log = logging.getLogger(__name__)

#: Samples are freed by their reference counts and are in no cycles: to look for cycles among them
#: at Python's own pace takes a twentieth of the dispatcher's time.
GC_THRESHOLDS = (10_000, 20, 20)
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Signals = asyncio.Queue[signal.Signals]


def run(config: ServeConfig) -> int:
    """Serve until the stream is done or a signal ends it; returns the exit code."""
    logs.set_up(config.log_level, config.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    keep_freed_memory()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return 0 if runner.run(_serve(config)) else 1


async def _serve(config: ServeConfig) -> bool:
    """Returns whether nothing that was accepted was given up."""
    with _heeded() as signals:
        async with Dispatcher(config) as dispatcher:
            ended = await _unless_asked(signals, dispatcher.drained())
            if isinstance(ended, bool):
                return ended
            if config.journal_dir is not None:
                at = dispatcher.statistics()
                log.info(
                    "%s: %d samples buffered and %d in open steps stay in the journal for the next "
                    "start", ended.name, at.buffered, at.in_flight,
                )  # fmt: skip
                return await dispatcher.stop()
            log.info("%s: draining; a second signal quits at once", ended.name)
            return await _unless_asked(signals, dispatcher.drain()) is True


@contextmanager
def _heeded() -> Iterator[Signals]:
    """Signals go into a queue instead of ending the process."""
    loop, signals = asyncio.get_running_loop(), Signals()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield signals
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _unless_asked(
    signals: Signals, work: Coroutine[None, None, bool]
) -> bool | signal.Signals:
    """What comes of the work; or the signal that came before it, which ends the work."""
    working, asked = asyncio.create_task(work), asyncio.create_task(signals.get())
    try:
        await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else asked.result()
    finally:
        working.cancel()
        asked.cancel()
        await asyncio.wait({working, asked})
