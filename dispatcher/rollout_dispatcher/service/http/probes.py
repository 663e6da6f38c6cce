"""What is asked again and again: whether we live and are ready, how we are, and the metrics.

Scrapes: values are read on the event loop, all of them at one moment, and become text and gzip in a
thread, one answer at a time.
"""

import asyncio
import dataclasses
import gzip
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from prometheus_client.core import Metric

from rollout_dispatcher import __version__
from rollout_dispatcher.core.statistics import ObjectStatistics, Statistics
from rollout_dispatcher.service.config.values import RUN_HEADER, VERSION_HEADER
from rollout_dispatcher.service.http.guard import dumps, indented, problem
from rollout_dispatcher.service.http.status_page import POLICY, page
from rollout_dispatcher.service.metrics.exposition import CONTENT_TYPE, render
from rollout_dispatcher.service.router import Router


def preferred(request: web.Request, offered: Sequence[str]) -> str:
    """The first of these media types that `Accept` names, which lists them by preference; or ours,
    the first that is offered.
    """
    accept = ",".join(request.headers.getall("Accept", ()))
    named = (part.partition(";")[0].strip().lower() for part in accept.split(","))
    return next((each for each in named if each in offered), offered[0])


#: In a thread: 5 % less than with 6, where ranks are hundreds.
GZIP_LEVEL = 9


def _written(families: list[Metric], gzipped: bool) -> bytes:
    text = render(families)
    return gzip.compress(text, GZIP_LEVEL, mtime=0) if gzipped else text


TEXT, JSON = "text/plain", "application/json"


class Probes:
    """Handlers over one router; text is for people, JSON for machines that ask for it.

    knows: whether a request has shown what is asked for.
    """

    def __init__(self, router: Router, knows: Callable[[web.Request], bool]) -> None:
        self._router, self._knows = router, knows
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrape")

    def close(self) -> None:
        """Let go of the thread that writes metrics."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def metrics(self, request: web.Request) -> web.Response:
        """What Prometheus scrapes, compressed if it asks for that."""
        gzipped = "gzip" in request.headers.get("Accept-Encoding", "").lower()
        headers = {"Content-Type": CONTENT_TYPE, "Vary": "Accept-Encoding"}
        if gzipped:
            headers["Content-Encoding"] = "gzip"
        families = list(self._router.metrics.registry.collect())
        make = asyncio.get_running_loop().run_in_executor
        body = await make(self._thread, _written, families, gzipped)
        return web.Response(body=body, headers=headers)

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
