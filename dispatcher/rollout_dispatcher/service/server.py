"""`dispatcher serve`: sockets, signals and an orderly end around one router.

The first SIGTERM or SIGINT drains: nothing more is accepted, what is buffered is dispatched, ranks
are told that the stream has ended, and the service stops when the last step is committed and the
ranks have left, or after `drain_timeout`. The second signal quits at once. With a journal the first
signal stops at once too, since the next process goes on with what is here. Invariant: whatever was
accepted and is given up by that is named in the log, and the exit code is not 0.
"""

import asyncio
import gc
import json
import logging
import signal
from uuid import uuid4

from rollout_dispatcher.core.buffer.limits import BufferLimits
from rollout_dispatcher.core.clock import SteadyClock
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.planning.trigger import TriggerConfig
from rollout_dispatcher.plan import Grouping, Oversize, Strategy
from rollout_dispatcher.protocol.endpoint import Endpoint
from rollout_dispatcher.service import logs
from rollout_dispatcher.service.allocator import keep_freed_memory
from rollout_dispatcher.service.config.options import ServeConfig
from rollout_dispatcher.service.config.types import IncompleteGroups, LastBatch, Retain
from rollout_dispatcher.service.durability.journaling import open_journal
from rollout_dispatcher.service.fair_selector import new_event_loop
from rollout_dispatcher.service.metrics.registry import Metrics
from rollout_dispatcher.service.planes import http_plane, sample_plane
from rollout_dispatcher.service.router import Router
from rollout_dispatcher.service.stall_log import StallLog

log = logging.getLogger(__name__)

#: Samples are freed by their reference counts and are in no cycles: to look for cycles among them
#: at Python's own pace takes a twentieth of the dispatcher's time.
GC_THRESHOLDS = (10_000, 20, 20)
#: How often the event loop's lateness is measured, and silent peers are looked for.
LAG_PROBE_SECONDS = 0.25
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: ServeConfig) -> int:
    """Serve until the stream is done or a signal ends it; returns the exit code."""
    logs.set_up(config.log_level, config.log_format)
    keep_freed_memory()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(config))


def core_config(config: ServeConfig) -> DispatchConfig:
    """The part of the settings that the core needs."""
    batch = config.batch
    # Only `window` chooses; for the others a larger window would be waiting for nothing.
    window = config.window_samples if config.strategy is Strategy.WINDOW else batch
    budget = config.micro_batch_tokens
    longest = config.max_sample_tokens
    if budget is not None and config.oversize is Oversize.ERROR:
        longest = min(longest, budget)
    return DispatchConfig(
        dp_size=config.dp_size,
        limits=BufferLimits(
            samples=config.buffer_samples,
            group=None if config.by_groups else batch,
            tokens=config.buffer_tokens,
            nbytes=config.buffer_memory,
            max_sample_tokens=longest,
            held_bytes=config.held_memory,
        ),
        trigger=TriggerConfig(batch=batch, window=window, max_wait=config.max_wait),
        target_excess=config.target_excess,
        groups_matter=config.groups is not Grouping.IGNORE,
        by_groups=config.by_groups,
        keep_incomplete=config.incomplete_groups is IncompleteGroups.KEEP,
        flush_partial=config.last_batch is LastBatch.FLUSH,
        check_size=config.check_size() if config.elastic else None,
        drop_above=budget if config.oversize is Oversize.DROP else None,
        group_timeout=config.group_timeout,
        producer_timeout=config.producer_timeout,
        max_staleness=config.max_staleness,
        steps_per_version=config.steps_per_version,
        staleness_policy=config.staleness_policy,
        max_open_steps=config.max_open_steps,
        producer_credits=config.producer_credits,
        id_horizon=config.sample_id_horizon,
        durable=config.journal_dir is not None,
        retain=config.retain is Retain.CHECKPOINT,
    )


async def _serve(config: ServeConfig) -> int:
    loop = asyncio.get_running_loop()
    clock = SteadyClock(loop.time)
    core = Dispatch(core_config(config), uuid4().hex)
    metrics = Metrics(config, core, clock)
    journal = open_journal(config, core, metrics, clock)
    router = Router(config, core, metrics, clock, journal, access=config.access())
    router.perform(core.tick(clock()))  # what an earlier process left may be due
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in SIGNALS:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        async with sample_plane(config, router) as listening, http_plane(config, router) as http:
            _announce(config, listening, http)
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch(router))
                code = await _until_done(config, router, signals)
                watch.cancel()
            return code
    finally:
        router.close()
        if journal is not None:
            journal.close()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _until_done(
    config: ServeConfig, router: Router, signals: asyncio.Queue[signal.Signals]
) -> int:
    finished = asyncio.ensure_future(router.finished())
    asked = asyncio.ensure_future(signals.get())
    try:
        await asyncio.wait({finished, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done() and config.journal_dir is not None:
            return await _pause(config, router, asked.result())
        if not finished.done():
            log.info("%s: draining; a second signal quits at once", asked.result().name)
            router.perform(router.core.drain(router.clock()))
            asked = asyncio.ensure_future(signals.get())
            await asyncio.wait(
                {finished, asked},
                timeout=config.drain_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
        nothing_lost = _tell_losses(router.core)
        if not finished.done():
            _tell_undone(router.core)
            return 1
        finished.result()
        return 0 if nothing_lost else 1
    finally:
        asked.cancel()
        finished.cancel()


def _tell_losses(core: Dispatch) -> bool:
    """Name what the drain has dropped; returns whether there is nothing."""
    if core.losses.samples:
        log.error("%s; with --journal-dir they would wait for the next start", core.losses)
    return not core.losses.samples


def _tell_undone(core: Dispatch) -> None:
    """Name what a drain that was cut short gives up."""
    at = core.statistics()
    named = core.name_undone()
    log.error(
        "stopped with %d samples buffered and %d in open steps%s",
        at.buffered, at.in_flight, f", which are given up: {named}" if named else "",
    )  # fmt: skip


async def _pause(config: ServeConfig, router: Router, number: signal.Signals) -> int:
    """With a journal there is nothing to drain: the next process goes on with what is here."""
    at = router.core.statistics()
    log.info(
        "%s: %d samples buffered and %d in open steps stay in the journal for the next start",
        number.name, at.buffered, at.in_flight,
    )  # fmt: skip
    router.stop("the dispatcher is stopping; it goes on from its journal when it is started again")
    try:
        async with asyncio.timeout(config.drain_timeout):
            await router.barrier.settled()
    except TimeoutError:
        log.error("the journal could not be written: %s", router.barrier.failure)
        return 1
    return 0


async def _watch(router: Router) -> None:
    """Measure the event loop's lateness; end what is silent, or in others' way, for too long.

    And say whom the next step waits for.
    """
    loop, stalls = asyncio.get_running_loop(), StallLog(router.core)
    while True:
        due, due_by_clock = loop.time() + LAG_PROBE_SECONDS, router.clock() + LAG_PROBE_SECONDS
        await asyncio.sleep(LAG_PROBE_SECONDS)
        router.metrics.event_loop_lag.observe(max(0.0, loop.time() - due))
        away = max(0.0, router.clock() - due_by_clock)
        router.close_silent(away)
        router.keep_pace(away)
        stalls.check(router.clock())


def _announce(config: ServeConfig, listening: list[Endpoint], http: Endpoint) -> None:
    addresses = {"listen": [str(endpoint) for endpoint in listening], "http": str(http)}
    log.info("serving samples on %s, HTTP on %s", ", ".join(addresses["listen"]), http)
    if config.ready_file is not None:
        # Written beside and renamed, so that whoever waits for it never reads half of it.
        beside = config.ready_file.with_name(config.ready_file.name + ".part")
        beside.write_text(json.dumps(addresses) + "\n")
        beside.replace(config.ready_file)
