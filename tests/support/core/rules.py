"""What a core must keep to, in books of its own: caps, order, when to plan, what is dropped.

The rules are those of the documents, worked out anew from what the core was told and what it
answered. `Rules.check` is called after every event, when nothing is left to do.
"""

from collections import Counter
from collections.abc import Iterable

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.buffer.entry import Entry
from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision
from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.sample import Sample

#: A sum of floats may fall short of the wait that it adds up to.
ROUNDING_S = 1e-6


def all_entries(core: DispatcherCore) -> list[Entry]:
    """Every sample that is buffered; those of open groups last."""
    buffer = core._buffer
    return [*buffer.entries(), *(entry for group in buffer.groups for entry in group.entries)]


class Rules:
    """Watches one core. trained: samples that were planned; skips: how often each was passed over.

    reported: the version of DP rank 0 and the first step that trains with it.
    """

    def __init__(self, core: DispatcherCore) -> None:
        self.core, self.config = core, core.config
        self.buffered: dict[int, Entry] = {}
        self.trained: set[str] = set()
        self._names: set[str] = set()  # of what is buffered
        self._departures = self._ready = 0
        self.skips: Counter[int] = Counter()
        self.reported: tuple[int, int] | None = None
        self._hungry_since: float | None = None
        self._tried: int | None = None
        self._asked: e.PlanRequested | e.ReplanRequested | None = None
        self._phases: set[int] = set()
        #: Who has contributed, lives, and has not ended its stream; and whether anybody forced it.
        self.pushing: set[str] = set()
        self.ended: set[str] = set()
        #: The push that has just come: members of open groups pass the soft caps then. Those that a
        #: hard cap held back stand in line, as all others do.
        self.latest = ("", -1)
        self.forced = False

    # -- what the core was told ---------------------------------------------------------------

    def reports(self, version: int, first_step: int) -> None:
        """DP rank 0 trains with a version from that step on."""
        if self.reported is None or version > self.reported[0]:
            self.reported = version, first_step

    def ends_phase(self, version: int) -> None:
        """Somebody says that nothing older comes."""
        self._phases.add(version)

    def ends_stream(self, producer: str, *, force: bool) -> None:
        """A producer pushes nothing more; with `force` nobody does."""
        self.pushing.discard(producer)
        self.ended.add(producer)
        self.forced |= force

    # -- what it decides ----------------------------------------------------------------------

    def check(self, decision: Decision, now: float) -> None:
        """An event is over, with this decision."""
        for effect in decision.effects:
            match effect:
                case e.PushBlocked():
                    self._contributes(effect.producer)
                case e.SamplesAccepted():
                    self._accepted(effect.entries)
                case e.StepPlanned():
                    self._planned(effect)
                case e.SamplesDropped():
                    for reason, entries in effect.dropped.items():
                        self._dropped(reason, entries)
        self._check_soft_caps(decision)
        wanted = [
            one for one in decision.effects if isinstance(one, e.PlanRequested | e.ReplanRequested)
        ]
        self._follow_hunger(now)
        self._check_plan(wanted, now)
        self._check_books()
        self._check_held()
        if self.core._lifecycle.ended:
            assert self.forced or not self.pushing, "ended while somebody may push"
            assert not self.core._admission.blocked, "ended while somebody waits who came before"

    def _accepted(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.ticket not in self.buffered
            name = entry.sample.sample_id
            assert name not in self.trained, "accepted again"
            assert name not in self._names, "accepted twice"
            self._names.add(name)
            self.buffered[entry.ticket] = entry
            self._contributes(entry.producer)

    def _contributes(self, producer: str) -> None:
        if producer and producer not in self.ended:
            self.pushing.add(producer)

    def answered(self, wanted: e.PlanRequested | e.ReplanRequested, decision: Decision) -> None:
        """The planner has answered; to be called before `check`."""
        self._asked = None
        used = any(isinstance(effect, e.StepPlanned) for effect in decision.effects)
        if isinstance(wanted, e.ReplanRequested):
            for entry in wanted.refill:
                if not self.core._buffer.holds(entry):
                    self.buffered.pop(entry.ticket, None)
                    self._names.discard(entry.sample.sample_id)
        elif used:
            planned = next(one for one in decision.effects if isinstance(one, e.StepPlanned))
            chosen = {entry.ticket for entry in planned.entries}
            self.skips.update(one.ticket for one in wanted.entries if one.ticket not in chosen)
        else:
            assert wanted.trial, "only a trial may miss"
            self._tried = self._units(wanted.entries)

    def _planned(self, step: e.StepPlanned) -> None:
        self._tried = self._hungry_since = None
        assert step.entries, "a step has samples"
        assert self._units(step.entries) <= self.config.trigger.batch, "a step is a batch at most"
        for entry in step.entries:
            name = entry.sample.sample_id
            assert self.buffered.pop(entry.ticket, None) is not None, "it was not here"
            assert name not in self.trained, "trained on twice"
            self._names.discard(name)
            self.trained.add(name)

    def _dropped(self, reason: DropReason, entries: Iterable[Entry]) -> None:
        """Nothing is dropped for a reason that it does not have."""
        entries = list(entries)
        groups = {entry.group for entry in entries if entry.group >= 0}
        for entry in entries:
            was_here = self.buffered.pop(entry.ticket, None) is not None
            self._names.discard(entry.sample.sample_id)
            assert was_here is not (reason is DropReason.UNRESOLVED)
        match reason:
            case DropReason.OVERSIZE:
                above = self.config.drop_above
                assert above is not None
                for alike in _together(entries):
                    assert any(entry.sample.tokens > above for entry in alike)
            case DropReason.STALE:
                oldest = self._oldest_allowed()
                assert oldest is not None, "nothing is too stale here"
                for alike in _together(entries):
                    versions = [entry.sample.policy_version for entry in alike]
                    assert min(one for one in versions if one is not None) < oldest
            case DropReason.INCOMPLETE_GROUP | DropReason.NO_ROOM | DropReason.SUPERSEDED:
                assert all(entry.group >= 0 for entry in entries), "it lacked nobody"
                assert not (self.config.keep_incomplete and reason is DropReason.NO_ROOM)
                left = {entry.group for entry in self.buffered.values()} & groups
                assert not left, "a group is dropped whole"
            case DropReason.LAST_BATCH:
                assert not self.config.flush_partial
                assert self.core._lifecycle.ended

    def _check_soft_caps(self, decision: Decision) -> None:
        """Samples without a group fill the buffer to its soft cap, or to a batch, no further.

        Groups may become whole in the same event, after them, and these pass the cap.
        """
        buffer = self.core._buffer
        ready, self._ready = self._ready, buffer.ready_units
        before, self._departures = self._departures, buffer.removals
        came = [
            entry.sample.group_id
            for one in decision.effects
            if isinstance(one, e.SamplesAccepted)
            for entry in one.entries
        ]
        if came and set(came) == {None} and before == self._departures:
            most = max(self.config.limits.samples, self.config.trigger.batch)
            assert ready + len(came) <= most, "beyond the soft cap"

    # -- when to plan, and what -----------------------------------------------------------------

    def _follow_hunger(self, now: float) -> None:
        last = self.core._ledger.steps.last_opened
        ranks = self.core._ledger.ranks.values()
        if not any(rank.connected and rank.hungry and rank.taken == last for rank in ranks):
            self._hungry_since = None
        elif self._hungry_since is None:
            self._hungry_since = now

    def _check_plan(self, wanted: list[e.PlanRequested | e.ReplanRequested], now: float) -> None:
        """The table of planning/trigger.py, and nothing but it, decides when a step is planned."""
        assert len(wanted) <= (self._asked is None), "one plan at a time"
        if wanted:
            self._asked = wanted[0]
            if isinstance(self._asked, e.PlanRequested):
                assert self._is_wanted(), "planned though no rank has room"
                self._check_request(self._asked, now)
        elif self._asked is None and self._is_wanted() and self.core._ledger.unplanned is None:
            due = self._due(now)
            assert due is None, f"nothing is planned, and it should be for {due}"

    def _is_wanted(self) -> bool:
        steps, generation = self.core._ledger.steps, self.core._ledger.generation
        if len(steps) >= self.config.max_open_steps or generation.failed or steps.waiting:
            return False
        ranks = list(generation.ranks.values())
        return len(ranks) == generation.dp_size and all(
            rank.connected
            and generation.agrees(rank)
            and (
                steps.last_opened - rank.taken < rank.prefetch_steps
                or (rank.hungry and rank.taken == steps.last_opened)
            )
            for rank in ranks
        )

    def _due(self, now: float) -> Trigger | None:
        config = self.config.trigger
        ready = self.core._parts.phases.count(config.window)
        flush = self.core._parts.phases.flushing or self.core._lifecycle.ended
        hungry = self._hungry_since
        waited = -1.0 if hungry is None else now - hungry
        growing = self.core._buffer.groups.samples > 0
        if ready >= config.window:
            return Trigger.WINDOW_FULL
        if flush and ready:
            return Trigger.FLUSH
        if ready < config.batch:
            return None
        if self.core._capacity.blocking_cap is not None and (not growing or hungry is not None):
            return Trigger.BUFFER_FULL
        if hungry is not None and waited >= config.max_wait - ROUNDING_S:
            return Trigger.MAX_WAIT
        grown = self._tried is None or ready >= self._tried + max(1, config.batch // 16)
        return Trigger.TARGET_EXCESS if grown else None

    def _check_request(self, wanted: e.PlanRequested, now: float) -> None:
        units, config = self._units(wanted.entries), self.config.trigger
        due = self._due(now)
        if due is None:  # a smaller step, as nothing else can be done
            assert wanted.trigger is Trigger.BUFFER_FULL
            assert self.core._capacity.at_hard_cap
            assert units < config.batch
            assert self._hungry_since is not None
            assert now - self._hungry_since >= config.max_wait - ROUNDING_S
        else:
            assert wanted.trigger is due
            assert wanted.trial is (due is Trigger.TARGET_EXCESS)
        assert 0 < units <= config.window
        assert wanted.take == min(units, config.batch)
        assert wanted.window.skips.tolist() == [self.skips[one.ticket] for one in wanted.entries]
        ready = list(self.core._buffer.entries())
        within = {entry.ticket for entry in wanted.entries}
        self._check_oldest_first(ready, within)
        self._check_whole(wanted.entries, ready)
        self._check_fresh(wanted)
        for version in self._phases - set(self.core._parts.ends.pending(1 << 20)):
            if any((one.version or 0) >= version for one in wanted.entries):
                older = [one for one in ready if one.version is not None and one.version < version]
                assert not older, f"samples of before {version} go first"

    def _check_oldest_first(self, ready: list[Entry], within: set[int]) -> None:
        if self.core._parts.phases.flushing:
            return
        left_out = [at for at, entry in enumerate(ready) if entry.ticket not in within]
        assert min(left_out, default=len(ready)) >= len(within), "the window is of the oldest"

    def _check_whole(self, entries: Iterable[Entry], ready: list[Entry]) -> None:
        here, there = (Counter(one.group for one in some) for some in (entries, ready))
        for group, count in here.items():
            assert group < 0 or count == there[group], "groups go whole"

    def _check_fresh(self, wanted: e.PlanRequested) -> None:
        """Nothing too stale or too long is chosen from; what would be next time must go."""
        above = self.config.drop_above
        assert above is None or all(one.sample.tokens <= above for one in wanted.entries)
        oldest = self._oldest_allowed()
        if oldest is None:
            return
        versions = [one.version for one in wanted.entries]
        assert all(version is None or version >= oldest for version in versions), "too stale"
        following = self._oldest_allowed(ahead=1)
        assert following is not None
        due = {at for at, known in enumerate(versions) if known is not None and known < following}
        goes = set(wanted.window.must_go.nonzero()[0].tolist())
        assert goes <= due
        assert len(goes) == min(len(due), self.config.trigger.batch)

    def _oldest_allowed(self, ahead: int = 0) -> int | None:
        most = self.config.max_staleness
        if self.config.staleness_policy is not StalenessPolicy.DROP:
            return None
        if most is None or self.reported is None:
            return None
        (version, first), steps = self.reported, self.core._ledger.steps
        number = steps.next_number + ahead
        open_ = max(0, number - max(first, steps.committed + 1))
        return version + min(max(0, number - first), open_) - most

    # -- what is here ---------------------------------------------------------------------------

    def _check_books(self) -> None:
        held = {entry.ticket for entry in all_entries(self.core)}
        assert held == set(self.buffered), "accepted, and not planned or dropped"

    def _check_held(self) -> None:
        """Whoever waits is at a cap, and nobody waits beyond the bounds on who may."""
        held, capacity = self.core._admission.blocked, self.core._capacity
        short = capacity.units_short() > 0
        each: Counter[str] = Counter()
        for at, push in enumerate(held):
            each[push.producer] += 1
            if push.payload_evicted:
                continue
            just_came = self.latest == (push.producer, push.first_seq)
            for sample in push.waiting:
                is_member = just_came and self.core._buffer.belongs_to_open_group(sample)
                if is_member or short or at == 0:
                    full = self._hard_cap(sample) or (not is_member and not short and self._soft())
                    assert full, f"{sample.sample_id} waits, and nothing holds it back"
        self.latest = ("", -1)
        assert max(each.values(), default=0) <= self.config.producer_credits
        seen: dict[str, int] = {}
        for push in held:
            assert seen.get(push.producer, -1) < push.first_seq, "first come, first served"
            seen[push.producer] = push.first_seq

    def _hard_cap(self, sample: Sample) -> bool:
        limits, buffer = self.config.limits, self.core._buffer
        memory, referenced = sample.footprint
        return buffer.held.nbytes + memory > limits.nbytes or (
            referenced > 0 and buffer.held.referenced + referenced > limits.referenced_bytes
        )

    def _soft(self) -> bool:
        limits = self.config.limits
        ready = list(self.core._buffer.entries())
        tokens = sum(entry.sample.tokens for entry in ready)
        return self._units(ready) >= limits.samples or (
            limits.tokens is not None and tokens >= limits.tokens
        )

    def _units(self, entries: Iterable[Entry]) -> int:
        if not self.config.by_groups:
            return sum(1 for _ in entries)
        return len({(one.group, -1 if one.group >= 0 else one.ticket) for one in entries})


def _together(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Members of a group, or one sample without."""
    found: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        key = entry.group, -1 if entry.group >= 0 else entry.ticket
        found.setdefault(key, []).append(entry)
    return list(found.values())
