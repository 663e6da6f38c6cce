"""`dispatcher serve`: one dispatcher in a process of its own, with signals and an orderly end.

The first SIGTERM or SIGINT drains: nothing more is accepted, what is buffered is dispatched, ranks
are told that the stream has ended, and the service stops when the last step is committed and the
ranks have left, or after `drain_timeout`. The second signal quits at once, whatever hangs. With a
journal the first signal stops at once too, since the next process goes on with what is here, and
while it is still being read any signal does. Invariant: the exit code is not 0 if anything that was
accepted is given up.

SIGHUP reads the options again (reloading/), tokens and certificates too; SIGUSR1 has the log say
where the run stands; SIGUSR2 is logged and changes nothing.
"""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

from prometheus_client import disable_created_metrics

from rollout_dispatcher.service.connections.descriptors import raise_soft_limit
from rollout_dispatcher.service.dispatcher import Dispatcher
from rollout_dispatcher.service.process import keep_freed_memory, name_run, set_up
from rollout_dispatcher.service.reloading import Read, Rereading
from rollout_dispatcher.service.signals import Signals
from rollout_dispatcher.transport.turns import FairEventLoop

log = logging.getLogger(__name__)

#: Samples are freed by their reference counts and are in no cycles: to look for cycles among them
#: at Python's own pace takes a twentieth of the dispatcher's time.
GC_THRESHOLDS = (10_000, 20, 20)


def run(found: Read, read: Callable[[], Read]) -> int:
    """Serve until the stream is done or a signal ends it; returns the exit code.

    found: the options as they were read; read: reads them again. Raises ConfigError then.
    """
    config = found.config
    set_up(config.log_level, config.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    keep_freed_memory()
    raise_soft_limit(config.connection_limits)
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=FairEventLoop) as runner:
            return 0 if runner.run(_serve(found, read)) else 1
    finally:
        Signals.heed_no_more()


async def _serve(found: Read, read: Callable[[], Read]) -> bool:
    """Returns whether nothing that was accepted was given up."""
    dispatcher = Dispatcher(found.config)
    rereading = Rereading(read, lambda: dispatcher.reloads, dispatcher.renew)
    signals = Signals(
        {
            signal.SIGHUP: rereading.ask,
            signal.SIGUSR1: lambda: _say_state(dispatcher),
            signal.SIGUSR2: lambda: log.info(
                "SIGUSR2: nothing changes; SIGUSR1 logs the state",
                extra={"event": "signal-ignored"},
            ),
        }
    )
    asked = await signals.unless_asked(dispatcher.start())
    if asked is not None:
        text = "%s: stopped before anything was accepted"
        log.info(text, asked.name, extra={"event": "stopping"})
        return True
    async with AsyncExitStack() as stack:
        stack.push_async_exit(dispatcher)
        name_run(dispatcher.run_id)
        return await _end(dispatcher, signals)


async def _end(dispatcher: Dispatcher, signals: Signals) -> bool:
    ended = await signals.unless_asked(dispatcher.drained())
    if isinstance(ended, bool):
        return ended
    if dispatcher.config.journal_dir is not None:
        at = dispatcher.statistics()
        log.info(
            "%s: %d samples buffered and %d in open steps stay in the journal for the next "
            "start; a second signal quits at once", ended.name, at.buffered, at.in_flight,
            extra={"event": "stopping", "step": at.last_committed},
        )  # fmt: skip
        return await signals.unless_asked(dispatcher.stop()) is True
    log.info(
        "%s: draining for %g s at most (--set drain-timeout), until what is here is trained on and "
        "DP ranks have said goodbye; a second signal quits at once",
        ended.name, dispatcher.config.drain_timeout, extra={"event": "draining"},
    )  # fmt: skip
    return await signals.unless_asked(dispatcher.drain()) is True


def _say_state(dispatcher: Dispatcher) -> None:
    if not dispatcher.endpoints:
        log.info("SIGUSR1: the journal is still being read", extra={"event": "state"})
        return
    at = dispatcher.statistics()
    log.info(
        "SIGUSR1: run %s is %s: %d samples buffered, %d open steps with %d samples, %d steps "
        "committed, %d of %d DP ranks connected",
        at.run_id, at.run_state, at.buffered, at.open_steps, at.in_flight, at.steps_committed,
        at.ranks_connected, at.dp_size, extra={"event": "state", "step": at.last_committed},
    )  # fmt: skip
