"""What is asked again and again: whether we live and are ready, how we are, and the metrics.

Scrapes: values are read on the event loop, and become text and gzip in a thread. Who asks while an
answer is being made waits for it and then shares the next one with all who wait too, so however
many ask, one is made at a time. Invariant: an answer shows values that were read after it was asked
for, all of them at one moment.

`/debug/steps` tells the last steps, as JSON, the oldest first. Times of day are seconds since 1970;
durations seconds; excesses ratios (0.01 is 1 % of the time that the work itself takes). What has
not happened, or was not seen, is null. Of hundreds of ranks a step takes tens of milliseconds to
tell, and all of them seconds: others have their turn after each.
"""

import asyncio
import dataclasses
import gzip
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from rollout_dispatcher import __version__
from rollout_dispatcher.core.measuring.times import Pass
from rollout_dispatcher.core.statistics import ObjectStatistics, Statistics
from rollout_dispatcher.service.config.serve import ServeConfig
from rollout_dispatcher.service.config.values import RUN_HEADER, VERSION_HEADER
from rollout_dispatcher.service.http.guard import dumps, indented, problem
from rollout_dispatcher.service.http.status_page import POLICY, page
from rollout_dispatcher.service.metrics.exposition import Format, render
from rollout_dispatcher.service.router import Router
from rollout_dispatcher.service.step_trace import MAX_STEPS, SeenStep
from rollout_planner.types import Sync, even_time, straggler_excess


def preferred(request: web.Request, offered: Sequence[str]) -> str:
    """The first of these media types that `Accept` names, which lists them by preference; or ours,
    the first that is offered.
    """
    accept = ",".join(request.headers.getall("Accept", ()))
    named = (part.partition(";")[0].strip().lower() for part in accept.split(","))
    return next((each for each in named if each in offered), offered[0])


#: In a thread: 5 % less than with 6, where ranks are hundreds.
GZIP_LEVEL = 9


class Scrapes:
    """Answers of one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrape")
        self._one_at_a_time = asyncio.Lock()
        self._taken = 0
        self._families: list[Metric] = []
        self._bodies: dict[tuple[Format, bool], bytes] = {}

    async def body(self, form: Format, *, gzipped: bool) -> bytes:
        """Everything, as it is now."""
        before = self._taken
        async with self._one_at_a_time:
            if self._taken == before:  # nobody has read them since we came
                self._families, self._bodies = list(self._registry.collect()), {}
                self._taken += 1
            key = form, gzipped
            if key not in self._bodies:
                make = asyncio.get_running_loop().run_in_executor
                self._bodies[key] = await make(self._thread, _make, self._families, *key)
            return self._bodies[key]

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _make(families: list[Metric], form: Format, gzipped: bool) -> bytes:
    text = render(families, form)
    return gzip.compress(text, GZIP_LEVEL, mtime=0) if gzipped else text


async def describe_steps(recent: Iterable[SeenStep], config: ServeConfig, offset: float) -> str:
    """The answer, as JSON. offset: from the core's clock to the time of day."""
    told: list[str] = []
    for seen in recent:
        told.append(dumps(_describe(seen, config, offset)))
        await asyncio.sleep(0)
    about = dumps({"remembered": MAX_STEPS, "sync": str(config.sync)}).removesuffix("\n}")
    return about + ',\n  "steps": [' + ",\n".join(told) + "]\n}\n"


def _describe(seen: SeenStep, config: ServeConfig, offset: float) -> dict[str, Any]:
    sync, stages = config.sync, config.pipeline_stages
    even = even_time(seen.cost, stages)
    bound = max(0.0, seen.lower_bound / even - 1) if even else 0.0

    def at(moment: float | None) -> float | None:
        return None if moment is None else round(moment + offset, 3)

    return {
        "step": seen.number,
        "generation": seen.generation,
        "attempt": seen.attempt,
        "trigger": seen.trigger,
        "eligible": seen.eligible,
        "samples": seen.samples,
        "tokens": seen.tokens,
        "micro_batches": int(seen.cost.shape[1]),
        "planned_at": at(seen.planned),
        "released_at": at(seen.released),
        "committed_at": at(seen.committed),
        "excess": {
            "fifo": round(seen.fifo_excess, 6),
            "planned": round(straggler_excess(seen.cost, sync, stages), 6),
            "lower_bound": round(bound, 6),
        },
        "ranks": [
            {
                "dp_rank": rank,
                "planned_cost": float(f"{cost:.9g}"),
                "delivered_at": at(seen.delivered.get(rank)),
                "taken_at": at(seen.taken.get(rank)),
                "committed_at": at(seen.done.get(rank)),
            }
            for rank, cost in enumerate(seen.cost.sum(axis=1).tolist())
        ],
        "measured": {
            cost_key: _measured(times, seen.dp_size, sync)
            for cost_key, times in seen.measured.items()
        },
    }


def _measured(times: Pass, ranks: int, sync: Sync) -> dict[str, Any]:
    """Of one pass: seconds of each micro-batch by rank, and the excess where it can be told."""
    compute = times.compute(ranks)
    return {
        "busy_s": {str(rank): times.busy[rank] for rank in sorted(times.busy)},
        "collective_s": {str(rank): times.collective[rank] for rank in sorted(times.collective)},
        "excess": None if compute is None else round(straggler_excess(compute, sync), 6),
        "why": times.why,
    }


TEXT, JSON = "text/plain", "application/json"
_FORMATS = [form.media_type for form in Format]


class Probes:
    """Handlers over one router; text is for people, JSON for machines that ask for it.

    knows: whether a request has shown what is asked for.
    """

    def __init__(self, router: Router, knows: Callable[[web.Request], bool]) -> None:
        self._router, self._knows = router, knows
        self._scrapes = Scrapes(router.metrics.registry)

    def close(self) -> None:
        """Let go of what scrapes need."""
        self._scrapes.close()

    async def metrics(self, request: web.Request) -> web.Response:
        """What Prometheus scrapes, in the format and encoding that it asks for."""
        form = Format.of(preferred(request, _FORMATS))
        gzipped = "gzip" in request.headers.get("Accept-Encoding", "").lower()
        headers = {"Content-Type": form.content_type, "Vary": "Accept, Accept-Encoding"}
        if gzipped:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=await self._scrapes.body(form, gzipped=gzipped), headers=headers)

    async def livez(self, _: web.Request) -> web.Response:
        """The process serves."""
        return web.Response(text="ok\n", headers=self._identity())

    async def readyz(self, request: web.Request) -> web.Response:
        """Samples are accepted. Ranks that are absent are named, and do not make it unready.

        Clients and groups are named to who shows the token, or where none is asked for.
        """
        health, at = self._router.health, self._router.core.statistics()
        ready, anonymous = health.is_ready(at), not self._knows(request)
        failing = "the journal cannot be written" if anonymous else health.failure
        lines = [
            f"{'ok' if ready else 'not ready'}: {failing if health.failure else at.run_state}",
            f"the next step waits for: {health.explain(anonymous=anonymous)}",
            f"lost: {health.lost()}",
        ]
        if slow := health.slow_ranks():
            lines.append(f"slow: {slow}")
        if advice := self._router.core.advice:
            lines.append(f"to the trainer: {advice}")
        if at.absent_ranks:
            lines.append(f"absent DP ranks: {', '.join(map(str, at.absent_ranks))}")
        lines += (f"warning: {warning}" for warning in health.warnings(at))
        if preferred(request, [TEXT, JSON]) == JSON:
            body = self._state(at, anonymous=anonymous)
            if not ready:  # as every error has them
                body |= {"code": "not-ready", "message": "\n".join(lines)}
            status = 200 if ready else 503
            return web.json_response(body, status=status, headers=self._identity(), dumps=dumps)
        if not ready:
            return problem(503, "not-ready", "\n".join(lines), **self._identity())
        return web.Response(text="\n".join(lines) + "\n", headers=self._identity())

    async def statusz(self, request: web.Request) -> web.Response:
        """A snapshot: everything in JSON, or in text what a person looks for first."""
        at = self._router.core.statistics()
        if preferred(request, [JSON, TEXT]) == TEXT:
            return web.Response(text=self._summary(at))
        return indented(self._status(at))

    async def page(self, _: web.Request) -> web.Response:
        """The same for a browser."""
        at = self._router.core.statistics()
        status = json.loads(dumps(self._status(at)))
        html = page(status, self._router.clients(), self._summary(at), status["now"])
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
        return web.Response(
            text=html, content_type="text/html", charset="utf-8", headers=self._identity() | headers
        )

    def _status(self, at: Statistics) -> dict[str, Any]:
        """All of it. Times of day are ISO 8601, in UTC."""
        status, offset = dataclasses.asdict(at), time.time() - self._router.clock()
        del status["lengths"]  # a histogram, for /metrics
        oldest = at.oldest_arrival
        status["oldest_arrival"] = None if oldest is None else _time_of_day(oldest + offset)
        for rank in status["ranks"].values():
            rank["last_seen"] = _time_of_day(rank["last_seen"] + offset)
        for step in status["steps"]:
            step["planned_at"] = _time_of_day(step["planned_at"] + offset)
        return (
            status
            | self._state(at)
            | {
                "now": _time_of_day(time.time()),
                "version": __version__,
                "accepted": at.accepted,
                "balanced": at.balanced,
                "measured": self._router.core.measured.as_json(),
                "waits_for": self._router.health.explain(),
                "config_generation": self._router.reloads.generation,
                "config": self._router.config.model_dump(mode="json"),
            }
        )

    async def steps(self, _: web.Request) -> web.Response:
        """The last steps, as they went."""
        router = self._router
        offset = time.time() - router.clock()
        found = await describe_steps(router.step_trace.recent, router.config, offset)
        return web.json_response(text=found)

    def _identity(self) -> dict[str, str]:
        """Who answers, for those who would take another server for this one."""
        return {RUN_HEADER: self._router.core.run_id, VERSION_HEADER: __version__}

    def _state(self, at: Statistics, *, anonymous: bool = False) -> dict[str, object]:
        """Where the run stands, and all that the next step waits for."""
        stall = self._router.core.stall(self._router.clock())
        return {
            "is_ready": self._router.health.is_ready(at),
            "run_state": at.run_state,
            "advice": self._router.core.advice,
            "missing_ranks": at.missing_ranks,
            "absent_ranks": at.absent_ranks,
            "hung_ranks": () if stall is None else stall.hung,
            "warnings": self._router.health.warnings(at),
            "lost": self._router.health.lost().as_json(),
            "slow_ranks": self._router.health.slow_ranks(),
            "delays": [
                {"cause": each.cause, "text": each.text, "seconds": round(each.seconds, 1)}
                for each in self._router.health.delays(anonymous=anonymous)
            ],
        }

    def _summary(self, at: Statistics) -> str:
        health, window = self._router.health, self._router.core.config.trigger.window
        ready = "ready" if health.is_ready(at) else "not ready"
        warnings = "".join(f"warning: {warning}\n" for warning in health.warnings(at))
        delays = "\n".join(f"  {delay}" for delay in health.delays()) or "  nobody"
        slow = f"slow: {slow}\n" if (slow := health.slow_ranks()) else ""
        units = " groups" if self._router.config.by_groups else ""
        waiting = "1 push waits" if at.pushes_held == 1 else f"{at.pushes_held} pushes wait"
        return (
            f"run {at.run_id} is {at.run_state}, {ready}\n"
            f"ranks: {at.ranks_connected} of {at.dp_size} connected, generation {at.generation}\n"
            f"producers: {at.producers_connected} connected, {waiting}\n"
            f"buffer: {at.buffered} samples, {at.ready_units} ready of a window of "
            f"{window}{units}, {at.open_groups} open groups\n"
            f"steps: {at.steps_committed} committed, {at.open_steps} open with "
            f"{at.in_flight} samples\n"
            f"dropped: {sum(at.dropped.values())} of {at.accepted} accepted samples\n"
            f"{_objects_in_words(at.objects)}"
            f"{warnings}"
            f"lost: {health.lost()}\n"
            f"{slow}"
            f"the next step waits for:\n{delays}\n"
        )


def _time_of_day(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds")


def _objects_in_words(at: ObjectStatistics) -> str:
    """A line where there is anything to say."""
    if not any((at.needed, at.unneeded, at.sweeps, at.freed)):
        return ""
    waits = f", {at.unneeded} to be released" if at.unneeded else ""
    waits += f", {at.sweeps} producers' to be looked for" if at.sweeps else ""
    nobody = "; nobody is there who can" if waits and not at.workers else ""
    return f"payload stores: {at.needed} objects needed, {at.freed} released{waits}{nobody}\n"
