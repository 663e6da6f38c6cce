"""What is asked again and again: whether we live and are ready, how we are, and the metrics."""

import dataclasses
import time
from collections.abc import Callable

from aiohttp import web

from rollout_dispatcher import __version__
from rollout_dispatcher.core.parts import ObjectStatistics, Statistics
from rollout_dispatcher.service.config.types import RUN_HEADER, VERSION_HEADER
from rollout_dispatcher.service.http.guard import dumps, indented, problem
from rollout_dispatcher.service.http.probes.negotiation import preferred, takes_gzip
from rollout_dispatcher.service.http.probes.scrapes import Scrapes
from rollout_dispatcher.service.http.probes.steps import describe_steps
from rollout_dispatcher.service.metrics.exposition import Format
from rollout_dispatcher.service.router import Router

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
        form = Format.of(preferred(_accept(request), _FORMATS))
        gzipped = takes_gzip(request.headers.get("Accept-Encoding"))
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
        ]
        if advice := self._router.core.advice:
            lines.append(f"to the trainer: {advice}")
        if at.absent_ranks:
            lines.append(f"absent DP ranks: {', '.join(map(str, at.absent_ranks))}")
        lines += (f"warning: {warning}" for warning in health.warnings(at))
        if preferred(_accept(request), [TEXT, JSON]) == JSON:
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
        if preferred(_accept(request), [JSON, TEXT]) == TEXT:
            return web.Response(text=self._summary(at))
        status = dataclasses.asdict(at)
        del status["lengths"]  # a histogram, for /metrics
        status |= self._state(at) | {
            "version": __version__,
            "accepted": at.accepted,
            "balanced": at.balanced,
            "measured": self._router.core.measured.as_json(),
            "waits_for": self._router.health.explain(),
            "config_generation": self._router.reloads.generation,
            "config": self._router.config.model_dump(mode="json"),
        }
        return indented(status)

    async def steps(self, _: web.Request) -> web.Response:
        """The last steps, as they went."""
        router = self._router
        offset = time.time() - router.clock()
        found = await describe_steps(router.chronicle.recent, router.config, offset)
        return web.json_response(text=found)

    def _identity(self) -> dict[str, str]:
        """Who answers, for those who would take another server for this one."""
        return {RUN_HEADER: self._router.core.run_id, VERSION_HEADER: __version__}

    def _state(self, at: Statistics, *, anonymous: bool = False) -> dict[str, object]:
        """Where the run stands, and all that the next step waits for."""
        standstill = self._router.core.standstill(self._router.clock())
        return {
            "is_ready": self._router.health.is_ready(at),
            "run_state": at.run_state,
            "advice": self._router.core.advice,
            "missing_ranks": at.missing_ranks,
            "absent_ranks": at.absent_ranks,
            "hung_ranks": () if standstill is None else standstill.hung,
            "warnings": self._router.health.warnings(at),
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
            f"the next step waits for:\n{delays}\n"
        )


def _objects_in_words(at: ObjectStatistics) -> str:
    """A line where there is anything to say."""
    if not any((at.needed, at.unneeded, at.sweeps, at.freed)):
        return ""
    waits = f", {at.unneeded} to be released" if at.unneeded else ""
    waits += f", {at.sweeps} producers' to be looked for" if at.sweeps else ""
    nobody = "; nobody is there who can" if waits and not at.workers else ""
    return f"payload stores: {at.needed} objects needed, {at.freed} released{waits}{nobody}\n"


def _accept(request: web.Request) -> str:
    return ", ".join(request.headers.getall("Accept", []))
