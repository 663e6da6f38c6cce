"""The state of the service in words: whether it is ready, what it waits for, and its progress.

The core knows which reasons delay the next step, and `Health` for how long: a reason begins when a
refresh first finds it, and again once a step was planned. Invariants: `/readyz`, the metrics and
the log agree on `ready`; each dropped sample is counted in some line of the log, by its reason, and
the first of a reason at once.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Final

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.buffer.dropping import DropCounts
from rollout_dispatcher.core.buffer.entry import STORES_CAP, Entry
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.rank_time import LOST, TimeCause
from rollout_dispatcher.core.statistics import Statistics
from rollout_dispatcher.core.waiting import Cause
from rollout_dispatcher.errors import DispatcherError, RunFinished
from rollout_dispatcher.hints import name_some
from rollout_dispatcher.service.connections.clients import Client

log = logging.getLogger(__name__)

#: Ages are shown in seconds; with hundreds of ranks or producers a refresh takes a while.
REFRESH_SECONDS = 1.0
#: Refreshes that are kept: a minute of them.
KEPT_REFRESHES = 60
#: Smaller shares of the ranks' time are not shown.
SHOWN = 0.001
#: A rank that needs a tenth more than the median is named, as in docs/operate.md; at most so many.
SLOW, NAMED = 1.1, 3


@dataclass(frozen=True, slots=True)
class Delay:
    """One reason that delays the next step, and for how many seconds it has."""

    cause: Cause
    text: str
    seconds: float

    def __str__(self) -> str:
        return self.text + (f" ({_duration(self.seconds)})" if self.seconds >= 1 else "")


@dataclass(frozen=True, slots=True)
class LostTime:
    """Time of DP ranks. spent: rank-seconds by cause, over `seconds` seconds."""

    spent: Mapping[TimeCause, float]
    seconds: float

    @property
    def shares(self) -> dict[TimeCause, float]:
        """The share that each cause but work has taken, the largest first."""
        total = sum(self.spent.values())
        found = {cause: self.spent[cause] / total for cause in LOST if total}
        return dict(sorted(found.items(), key=itemgetter(1), reverse=True))

    def __str__(self) -> str:
        shares = self.shares
        if not shares:
            return "no time of DP ranks is accounted for: no step was begun, or the run is over"
        causes = [f"{_percent(share)} {cause}" for cause, share in shares.items() if share > SHOWN]
        whole = f"{_percent(sum(shares.values()))} of the ranks' time in {_duration(self.seconds)}"
        return f"{whole}: {', '.join(causes)}" if causes else whole

    def as_json(self) -> dict[str, object]:
        """Return the shares, 0 to 1."""
        return {
            "seconds": round(self.seconds, 1),
            "share": round(sum(self.shares.values()), 4),
            "causes": {cause: round(share, 4) for cause, share in self.shares.items()},
        }


def _percent(share: float) -> str:
    return f"{float(f'{100 * share:.2g}'):g} %"  # 100 %, and not 1e+02 %


class Health:
    """The health of one core. failure: returns why nothing becomes durable at present, or None."""

    def __init__(
        self,
        core: DispatcherCore,
        failure: Callable[[], DispatcherError | None],
        clock: Callable[[], float],
    ) -> None:
        self._core, self._failure, self._clock = core, failure, clock
        self._since: dict[Cause, float] = {}
        self._next_step = core.next_step
        self._refresh_at = clock()
        self._spent = deque([(clock(), dict(core.rank_time(clock())))], KEPT_REFRESHES)

    @property
    def failure(self) -> DispatcherError | None:
        """Why nothing becomes durable at present, or None."""
        return self._failure()

    def is_ready(self, at: Statistics) -> bool:
        """Return whether samples are accepted."""
        return at.run_state == "running" and self.failure is None

    def refresh(self, now: float) -> None:
        """Note which reasons have begun and ended; does nothing until `REFRESH_SECONDS` passed."""
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH_SECONDS
            self._spent.append((now, dict(self._core.rank_time(now))))
            self.delays()

    def lost(self) -> LostTime:
        """Return where the DP ranks' time went in the last minute."""
        now, (since, before) = self._clock(), self._spent[0]
        spent = {cause: after - before[cause] for cause, after in self._core.rank_time(now).items()}
        return LostTime(spent, now - since)

    def slow_ranks(self, at: Statistics) -> str:
        """Return the slow DP ranks of the last measured steps, in words; empty if there is none.

        Of another generation's steps nothing is used.
        """
        measured = self._core.measured
        nobody = measured.last is None or not at.ranks_connected
        ratios = enumerate([] if nobody else measured.slowness.tolist())
        slow = sorted(((each, rank) for rank, each in ratios if each >= SLOW), reverse=True)
        named = ", ".join(f"DP rank {rank} takes {ratio:.2f}" for ratio, rank in slow[:NAMED])
        more = f", and {len(slow) - NAMED} more" if len(slow) > NAMED else ""
        return f"{named} times as long as the median one for the same work{more}" if slow else ""

    def delays(self, *, anonymous: bool = False) -> list[Delay]:
        """Return all reasons that delay the next step.

        anonymous: without the names of clients, groups and files.
        """
        now = self._clock()
        found = [
            (reason.cause, (anonymous and reason.anonymous) or reason.text)
            for reason in self._core.reasons(now)
        ]
        if (failure := self.failure) is not None:
            why = "" if anonymous else f": {failure}"
            found.insert(0, (Cause.JOURNAL, f"the journal cannot be written{why}"))
        before = self._since
        if self._next_step != self._core.next_step:
            self._next_step = self._core.next_step
            before = {}
        self._since = {cause: before.get(cause, now) for cause, _ in found}
        return [Delay(cause, text, now - self._since[cause]) for cause, text in found]

    def warnings(self, at: Statistics) -> list[str]:
        """Return what deviates from the settings without stopping the run."""
        cost = self._core.measured.cost.warning
        found = [cost] if cost else []
        if not at.steps_unjudged:
            return found
        steps = "1 step" if at.steps_unjudged == 1 else f"{at.steps_unjudged} steps"
        unenforced = (
            f"--max-staleness is not enforced: the trainer has committed {steps} and reported no "
            "policy version; call stream.set_policy_version(version) on DP rank 0"
        )
        return [*found, unenforced]

    def explain(self, *, anonymous: bool = False) -> str:
        """Return `delays` in one line, or `nobody`."""
        return "; ".join(map(str, self.delays(anonymous=anonymous))) or "nobody"


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


#: Seconds between two lines of one reason: where samples expire, each step may drop some.
INTERVAL_SECONDS = 10.0
#: Level and words of each reason; a drop that the settings ask for is no warning.
WORDS: Final = {
    DropReason.STALE: (
        logging.WARNING, "older than --max-staleness allows when their step was planned",
    ),
    DropReason.INCOMPLETE_GROUP: (logging.WARNING, "of groups that cannot become whole any more"),
    DropReason.SUPERSEDED: (
        logging.WARNING, "of producers that are gone and whose groups another one pushes anew",
    ),
    DropReason.SCHEMA: (logging.WARNING, "accepted with other fields than --fields declares now"),
    DropReason.OVERSIZE: (
        logging.INFO, "longer than --micro-batch-tokens, as --on-oversize drop asks for",
    ),
    DropReason.LAST_BATCH: (
        logging.INFO, "of the partial batch at the end, as --set final-batch=drop asks for",
    ),
    DropReason.UNUSED: (logging.INFO, "not used when the DP ranks finished the run"),
}  # fmt: skip


class DropsLog:
    """Logs the dropped samples of one run."""

    def __init__(self) -> None:
        #: Drops of each reason since its last line, and when its next line may be written.
        self._drops: dict[DropReason, DropCounts] = {}
        self._due: dict[DropReason, float] = {}

    def note(self, dropped: Mapping[DropReason, Sequence[Entry]], now: float) -> None:
        """Count dropped samples, and log the reasons that are due."""
        for reason in filter(dropped.__contains__, WORDS):  # in that order
            self._drops.setdefault(reason, DropCounts()).add(reason, dropped[reason])
        self.check(now)

    def check(self, now: float) -> None:
        """Log the reasons that are due; all of them if `now` is infinite."""
        for reason in [it for it in self._drops if now >= self._due.get(it, now)]:
            drops, (level, why) = self._drops.pop(reason), WORDS[reason]
            self._due[reason] = now + INTERVAL_SECONDS
            are = "sample is" if drops.samples == 1 else "samples are"
            log.log(
                level, "%d accepted %s dropped (%s), %s: %s",
                drops.samples, are, reason, why, drops.named, extra={"event": "samples-dropped"},
            )  # fmt: skip


#: Without a change of these no line on progress is written.
_SHOWN = attrgetter(
    "steps_committed", "open_steps", "accepted", "buffered", "pushes_held", "ranks_connected",
    "producers_connected", "run_state",
)  # fmt: skip


#: Seconds that ranks have waited before the first line on it, and between that and the next.
FIRST_AFTER_SECONDS, AGAIN_AFTER_SECONDS = 10.0, 60.0


class RunLog:
    """Logs progress, stalls and the journal's state of one run, whenever `check` is called.

    interval: seconds between two lines on progress; None: none.
    """

    def __init__(
        self, core: DispatcherCore, health: Health, interval: float | None, now: float
    ) -> None:
        self._core, self._health, self._interval = core, health, interval
        self._progress_due = now + (interval or 0.0)
        self._before = now, core.statistics()
        self._stall_due = -math.inf
        self._gone_due = now + FIRST_AFTER_SECONDS
        #: Ranks that were reported to hang; None where ranks waited for a step.
        self._hung: tuple[int, ...] | None = None
        self._failure: DispatcherError | None = None

    def check(self, now: float) -> None:
        """Log what is due and has changed."""
        self._check_stall(now)
        if now >= self._gone_due:
            self._check_gone(now)
        if self._interval is not None and now >= self._progress_due:
            self._progress_due = now + self._interval
            self._check_progress(now)
        self._check_journal()

    def _check_progress(self, now: float) -> None:
        (since, old), at = self._before, self._core.statistics()
        self._before = now, at
        if _SHOWN(old) == _SHOWN(at):
            return
        log.info(
            "%d steps (%+d), samples/s: %.3g accepted, %.3g trained on; %d ready of a window of "
            "%d, DP ranks %d of %d, producers %d; lost: %s; the next step waits for: %s",
            at.last_committed + 1, at.last_committed - old.last_committed,
            (at.accepted - old.accepted) / (now - since),
            (at.samples_committed - old.samples_committed) / (now - since),
            at.ready_units, self._core.config.trigger.window, at.ranks_connected, at.dp_size,
            at.producers_connected, self._health.lost(), self._health.explain(),
            extra={"event": "progress", "step": at.last_committed},
        )  # fmt: skip

    def _check_stall(self, now: float) -> None:
        since, stall = self._core.hungry_since, self._core.stall(now)
        if stall is None and (since is None or now < since + FIRST_AFTER_SECONDS):
            return
        hung = None if stall is None else stall.hung
        if hung == self._hung and now < self._stall_due:
            return
        self._hung, self._stall_due = hung, now + AGAIN_AFTER_SECONDS
        whom = f"{self._core.waits_for(now)}; lost: {self._health.lost()}"
        if stall is not None:
            level = logging.WARNING if hung else logging.INFO
            fields = {"event": "ranks-hang", "dp_rank": list(hung or ())}
            log.log(level, "training stands still: %s", whom, extra=fields)
        elif since is not None:
            text = "ranks have waited %.0f s for a step, which waits for: %s"
            log.warning(text, now - since, whom, extra={"event": "ranks-wait"})

    def _check_gone(self, now: float) -> None:
        """Log that every DP rank is gone without a goodbye; nobody waits for a step then."""
        at = self._core.statistics()
        are_gone = bool(at.absent_ranks) and not at.ranks_connected
        self._gone_due = now + (AGAIN_AFTER_SECONDS if are_gone else FIRST_AFTER_SECONDS)
        if are_gone:
            text = (
                "training stands still: no DP rank is connected, and %s of %d left without a "
                "goodbye (the line `disconnected` that came first names the rank to look at); the "
                "next step waits for: %s"
            )
            gone = name_some(at.absent_ranks, "DP rank")
            log.warning(
                text, gone, at.dp_size, self._core.waits_for(now),
                extra={"event": "ranks-gone", "dp_rank": list(at.absent_ranks)},
            )  # fmt: skip

    def _check_journal(self) -> None:
        """Log that the journal fails or works again; the same error in other words is no news."""
        failure = self._health.failure
        if type(failure) is type(self._failure):
            return
        self._failure = failure
        if failure is None:
            text = "the journal can be written again; what waited for it is answered"
            log.warning(text, extra={"event": "journal-recovered"})
        else:
            text = "the journal cannot be written, and nothing is acknowledged: %s"
            log.error(text, failure, extra={"event": "journal-failing"})


def producer_gone(client: Client, reason: str) -> None:
    """Log that a producer's connection ended without a goodbye."""
    log.log(
        logging.INFO if reason == RunFinished.code else logging.WARNING,
        "producer %s%s is gone without a goodbye (%s), after %d accepted samples",
        client.client_id, f" at {client.host}" if client.host else "", reason, client.accepted,
        extra={"event": "producer-gone", "producer": client.client_id, "peer": client.host},
    )  # fmt: skip


def rank_gone(dp_rank: int, client_id: str, host: str, reason: str) -> None:
    """Log that a DP rank's connection ended."""
    log.log(
        logging.INFO if reason == "bye" else logging.WARNING,
        "DP rank %d (%s%s) disconnected (%s)",
        dp_rank, client_id, f" at {host}" if host else "", reason,
        extra={"event": "rank-gone", "dp_rank": dp_rank, "peer": host},
    )  # fmt: skip


def accepted_unknown(effect: e.AcceptedUnknown) -> None:
    """Log that a producer has an acknowledgement that the journal lacks."""
    log.error(
        "producer %s has an acknowledgement of its sample %d that the journal lacks (it has %s): "
        "the journal is an older copy, or its disk lost the last writes; samples between are lost. "
        "Start the dispatcher with the journal that has them, or go on without",
        effect.producer, effect.accepted,
        f"none after sample {effect.newest}" if effect.newest >= 0 else "none of this producer",
        extra={"event": "acknowledgement-unknown", "producer": effect.producer},
    )  # fmt: skip


def step_measured(effect: e.StepMeasured) -> None:
    """Log a pass that every rank has timed."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    log.debug(
        "step %d, %s: ranks waited for slower ones %s of their time; %.3g rank-seconds of %.3g "
        "would remain on equally fast ranks",
        effect.step, effect.cost_key, _percent(effect.lost), *reversed(effect.waits),
    )  # fmt: skip


def group_evicted(effect: e.GroupEvicted) -> None:
    """Log that a group was evicted for lack of room."""
    in_stores = effect.cap.cap == STORES_CAP
    log.warning(
        "group %s was evicted with its %d samples: incomplete groups fill the buffer at its %s cap "
        "(%d of %d) and none could become complete; raise %s, or have fewer groups under way",
        effect.group_id, effect.num_samples, effect.cap.cap, effect.cap.held, effect.cap.capacity,
        "--set referenced-bytes" if in_stores else "--buffer-bytes, or use --journal-dir",
        extra={"event": "group-evicted"},
    )  # fmt: skip


def unresolved(effect: e.SamplesUnresolved) -> None:
    """Log that samples were dropped from their step."""
    where = "payload store" if effect.reason is DropReason.UNRESOLVED else "journal, damaged there"
    log.warning(
        "DP rank %d cannot get samples of step %d from their %s: %d are dropped (%s), groups "
        "whole, sample %s first, and the step is planned again%s",
        effect.dp_rank, effect.step, where, effect.samples, effect.reason, effect.first,
        f" ({effect.why})" if effect.why else "",
        extra={"event": "samples-unresolved", "dp_rank": effect.dp_rank, "step": effect.step},
    )  # fmt: skip


def rewound(effect: e.Rewound) -> None:
    """Log that an older checkpoint was loaded."""
    fields = {"event": "rewound", "step": effect.after}
    if effect.missing:
        log.warning(
            "a checkpoint taken after step %d was loaded: the %d steps trained after it cannot "
            "be delivered again (with --journal-dir, and --set retain-bytes large enough, they "
            "could); training goes on with the next one",
            effect.after, effect.missing, extra=fields,
        )  # fmt: skip
    else:
        log.info(
            "a checkpoint taken after step %d was loaded: %d steps of %d samples are rolled back",
            effect.after, effect.steps, effect.samples, extra=fields,
        )  # fmt: skip


def evicted(effect: e.StepsEvicted) -> None:
    """Log that retained steps were deleted."""
    log.warning(
        "there is no room for more than %.1f MiB of committed steps that no saved checkpoint "
        "covers: the steps up to %d were deleted (%d in all), and a checkpoint before that cannot "
        "be resumed from; call stream.checkpoint_saved, or raise --set retain-bytes",
        effect.limit / 2**20, effect.through, effect.steps,
        extra={"event": "steps-evicted", "step": effect.through},
    )  # fmt: skip


def ids_repeated(effect: e.IdsRepeated) -> None:
    """Log that samples have ids of accepted samples, and are not trained on."""
    who = f"producer {effect.producer}" if effect.producer else "an HTTP client"
    fields = {"event": "ids-repeated", "producer": effect.producer}
    if effect.conflicts:
        log.warning(
            "sample %s of %s has other content than the accepted sample of this id, which is kept; "
            "the new one is not trained on (counted in samples_received_total{outcome=conflict}): "
            "give each rollout an id of its own, with its epoch or step in it, or none",
            effect.sample_id, who, extra=fields,
        )  # fmt: skip
        return
    log.warning(
        "%d samples in a row of %s, up to %s, have ids of samples that were accepted before, and "
        "are not trained on: either it replays what it has pushed before a crash, which is right, "
        "or ids are used again (for each epoch, say): then put the epoch into them",
        effect.in_a_row, who, effect.sample_id, extra=fields,
    )  # fmt: skip


def schema_decided(effect: e.SchemaDecided) -> None:
    """Log the fields of the run's samples."""
    fields = ", ".join(f"{field.name} {field}" for field in effect.schema.fields)
    text = "samples have the fields %s (%s)"
    log.info(text, fields, effect.set_by, extra={"event": "schema-decided"})


def cost_changed(effect: e.CostChanged) -> None:
    """Log that plans use a fitted cost."""
    fitted = effect.fitted
    log.info(
        "from step %d on plans are made with the cost %s, fitted to what micro-batches took (they "
        "deviate from it by %.1f %%); the one before has lost %.1f %% of the ranks' time",
        fitted.first_step, fitted.cost, 100 * fitted.error, 100 * effect.loss,
        extra={"event": "cost-changed", "step": fitted.first_step},
    )  # fmt: skip


def speeds_changed(effect: e.SpeedsChanged) -> None:
    """Log that plans use other rank speeds."""
    measured = effect.measured
    slow = [f"{rank} takes {slow:.2f}" for rank, slow in enumerate(measured.slowness) if slow != 1]
    log.info(
        "from step %d on plans give each DP rank work in proportion to its speed: %s",
        measured.first_step,
        f"rank {', '.join(slow[:8])}{', ...' * (len(slow) > 8)} times as long as the median one"
        if slow else "no rank is slower than the median one",
        extra={"event": "speeds-changed", "step": measured.first_step},
    )  # fmt: skip


def drained(effect: e.Drained, at: Statistics) -> None:
    """Log that nothing is left to train."""
    fields = {"event": "drained", "step": at.last_committed}
    if effect.reason == "finished":
        log.info(
            "the DP ranks have finished the run after %d steps: %d samples that were not used are "
            "dropped, %d stay in the journal for the next start",
            at.last_committed + 1, at.dropped[DropReason.UNUSED], at.buffered + at.in_flight,
            extra=fields,
        )  # fmt: skip
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in at.dropped.items() if count)
    dropped = f"; of {at.accepted} accepted samples some were dropped: {reasons}"
    log.info(
        "%s: every step is committed%s", effect.reason, dropped if reasons else "", extra=fields
    )
