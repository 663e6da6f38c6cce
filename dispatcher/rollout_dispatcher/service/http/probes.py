"""`/livez`, `/readyz`, `/statusz`, `/metrics` and the page at `/`.

Metrics are read on the event loop, all at one moment; a thread turns them into text.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rollout_dispatcher import __version__
from rollout_dispatcher.core.statistics import ObjectStatistics, Statistics
from rollout_dispatcher.service.config.values import RUN_HEADER, VERSION_HEADER
from rollout_dispatcher.service.http.guard import dumps, indented, problem
from rollout_dispatcher.service.http.status_page import POLICY, page
from rollout_dispatcher.service.router import Router


def preferred(request: web.Request, offered: Sequence[str]) -> str:
    """Return the first media type in `Accept` that is offered; else the first offered."""
    accept = ",".join(request.headers.getall("Accept", ()))
    named = (part.partition(";")[0].strip().lower() for part in accept.split(","))
    return next((each for each in named if each in offered), offered[0])


TEXT, JSON = "text/plain", "application/json"
#: The text format, which every scraper reads.
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Snapshot(Collector):
    """Metric families of one moment, without the times at which their series were created.

    The text format would have those as a family more for each.
    """

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)
        for family in self._families:
            family.samples = [it for it in family.samples if not it.name.endswith("_created")]

    def collect(self) -> list[Metric]:
        """Return the families."""
        return self._families


class Probes:
    """Handlers over one router; text is for people, JSON for machines that ask for it.

    may_control: whether a request shows the token that opens everything.
    """

    def __init__(self, router: Router, may_control: Callable[[web.Request], bool]) -> None:
        self._router, self._may_control = router, may_control

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer a scrape, compressed if it accepts gzip."""
        snapshot = Snapshot(self._router.metrics.registry.collect())
        body = await asyncio.to_thread(generate_latest, snapshot)
        headers = {"Content-Type": METRICS, "Vary": "Accept-Encoding"}
        answer = web.Response(body=body, headers=headers)
        if "gzip" in request.headers.get("Accept-Encoding", "").lower():
            answer.enable_compression(web.ContentCoding.gzip)
        return answer

    async def livez(self, _: web.Request) -> web.Response:
        """Answer that the process serves."""
        return web.Response(text="ok\n", headers=self._identity())

    async def readyz(self, request: web.Request) -> web.Response:
        """Answer whether samples are accepted. An absent rank is named, and is no reason for 503.

        Clients and groups are named only to requests with the token, or where none is required.
        """
        health, at = self._router.health, self._router.core.statistics()
        ready, anonymous = health.is_ready(at), not self._may_control(request)
        failing = "the journal cannot be written" if anonymous else health.failure
        nobody = "" if at.ranks_connected else "; no DP rank is connected"
        lines = [
            f"ok: {at.run_state}{nobody}"
            if ready
            else f"not ready: {failing if health.failure else at.run_state}",
            f"the next step waits for: {health.explain(anonymous=anonymous)}",
            f"lost: {health.lost()}",
        ]
        if slow := health.slow_ranks(at):
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
        """Answer a snapshot of everything in JSON, or a summary in text."""
        at = self._router.core.statistics()
        if preferred(request, [JSON, TEXT]) == TEXT:
            return web.Response(text=self._summary(at))
        return indented(self._status(at))

    async def page(self, _: web.Request) -> web.Response:
        """Answer the same for a browser."""
        at = self._router.core.statistics()
        status = json.loads(dumps(self._status(at)))
        html = page(status, self._router.clients(), self._summary(at), status["now"])
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
        return web.Response(
            text=html, content_type="text/html", charset="utf-8", headers=self._identity() | headers
        )

    def _status(self, at: Statistics) -> dict[str, Any]:
        """Return everything; times of day are ISO 8601, in UTC."""
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
        """Return the headers that name this run and release."""
        return {RUN_HEADER: self._router.core.run_id, VERSION_HEADER: __version__}

    def _state(self, at: Statistics, *, anonymous: bool = False) -> dict[str, object]:
        """Return the run's state and everything that the next step waits for."""
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
            "slow_ranks": self._router.health.slow_ranks(at),
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
        slow = f"slow: {slow}\n" if (slow := health.slow_ranks(at)) else ""
        units = " groups" if self._router.config.by_groups else ""
        waiting = "1 push waits" if at.pushes_held == 1 else f"{at.pushes_held} pushes wait"
        return (
            f"run {at.run_id} is {at.run_state}, {ready}\n"
            f"ranks: {at.ranks_connected} of {at.dp_size} connected, generation {at.generation}\n"
            f"producers: {at.producers_connected} connected, {waiting}\n"
            f"buffer: {at.buffered} samples, {at.ready_units} ready of a window of "
            f"{window}{units}, {at.open_groups} open groups\n"
            f"steps: {at.steps_committed} committed"
            f"{f', {at.steps_rewound} of them rewound' if at.steps_rewound else ''}, "
            f"{at.open_steps} open with {at.in_flight} samples\n"
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
    """Return the summary's line on payload stores; empty where none is used."""
    if not any((at.needed, at.unneeded, at.sweeps, at.freed)):
        return ""
    waits = f", {at.unneeded} to be released" if at.unneeded else ""
    waits += f", {at.sweeps} producers' to be looked for" if at.sweeps else ""
    nobody = "; nobody is there who can" if waits and not at.workers else ""
    return f"payload stores: {at.needed} objects needed, {at.freed} released{waits}{nobody}\n"
