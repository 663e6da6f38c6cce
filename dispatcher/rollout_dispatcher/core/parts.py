"""The parts of one run, wired together: each is given those that it asks or tells.

Read from top to bottom: what is remembered, what is buffered, who comes in, how it ends, what the
ranks hold, how steps come into being, what producers say.
"""

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.capacity import Capacity
from rollout_dispatcher.core.admission.deciding import Deciding
from rollout_dispatcher.core.admission.eligibility import Eligibility
from rollout_dispatcher.core.admission.held_pushes import HeldPushes
from rollout_dispatcher.core.admission.outcomes import Outcomes
from rollout_dispatcher.core.buffer.buffer import DECLARED, SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.freshness import Freshness
from rollout_dispatcher.core.buffer.open_groups import OpenGroups
from rollout_dispatcher.core.buffer.phases import Phases
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.facts import Note, Remembered
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.measuring.cost_in_use import CostInUse
from rollout_dispatcher.core.measuring.measuring import Measuring
from rollout_dispatcher.core.planning.booking import Booking
from rollout_dispatcher.core.planning.lengths import LengthCounts
from rollout_dispatcher.core.planning.planning import Planning
from rollout_dispatcher.core.planning.relief import Relief
from rollout_dispatcher.core.planning.selection import Selection
from rollout_dispatcher.core.planning.selection_bias import SelectionBias
from rollout_dispatcher.core.planning.timing import Timing
from rollout_dispatcher.core.planning.usual_loss import UsualLoss
from rollout_dispatcher.core.producers.agreement import Agreement
from rollout_dispatcher.core.producers.closing import Closing
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.producers.ends import Ends
from rollout_dispatcher.core.producers.presence import Presence
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.core.producers.standing import Standings
from rollout_dispatcher.core.ranks.departures import Departures
from rollout_dispatcher.core.ranks.finishing import Finishing
from rollout_dispatcher.core.ranks.joining import Joining
from rollout_dispatcher.core.ranks.standstill import Lockstep
from rollout_dispatcher.core.references.references import References
from rollout_dispatcher.core.steps.attempts import Attempts
from rollout_dispatcher.core.steps.checkpoints import Checkpoints
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.core.waiting import Waiting


class Parts:
    """Parts that decide, by name; `Dispatch` tells each what is its."""

    def __init__(self, config: DispatchConfig, note: Note) -> None:
        batch = config.trigger.batch
        kept = note if config.durable else None  # what is as large as a push or a window
        self.totals = Totals()
        self.producers = Producers(config.producer_timeout)
        self.memory = DuplicateMemory(config.id_horizon)
        self.references = References(config.limits.stores, self.totals, note)
        objects = self.references.objects
        self.closed_groups = closed_groups = ClosedGroups(config.id_horizon, note)

        groups = OpenGroups(self.producers.__contains__, config.group_timeout, closed_groups)
        self.buffer = SampleBuffer(
            config.limits, groups,
            groups_matter=config.groups_matter, by_groups=config.by_groups,
            too_long=config.drop_above,
        )  # fmt: skip
        if config.schema is not None:
            self.buffer.schema, self.buffer.set_by = config.schema, DECLARED
        self.phases = Phases(self.buffer, batch)
        self.freshness = Freshness(
            config.max_staleness, config.staleness_policy, config.steps_per_version
        )
        self.dropping = Dropping(
            self.buffer, self.totals, closed_groups, self.memory, note,
            objects=objects, keep=config.keep_incomplete,
        )  # fmt: skip

        self.capacity = Capacity(self.buffer, self.phases.shortfall)
        eligibility = Eligibility(
            self.buffer, self.producers, closed_groups, self.memory,
            needs_version=config.max_staleness is not None,
        )  # fmt: skip
        self.outcomes = Outcomes(
            self.buffer, self.totals, self.producers, self.memory, kept,
            objects=objects, tells_accepted=config.tells_accepted,
        )  # fmt: skip
        self.held = HeldPushes(config.limits.held_bytes, groups_matter=config.groups_matter)
        groups.on_change = closed_groups.on_change = self.held.regroup
        deciding = Deciding(
            self.buffer, eligibility, self.capacity, self.outcomes, dropping=self.dropping
        )
        self.admission = Admission(
            deciding, eligibility, self.capacity, self.held, kept,
            producers=self.producers, credits_=config.producer_credits,
        )  # fmt: skip

        self.ledger = StepLedger(config.dp_size, config.max_open_steps, config.check_size)
        self.attempts = Attempts(self.ledger, self.dropping, note)
        self.lockstep = Lockstep(self.ledger)
        self.cost = CostInUse(config.cost)
        self.measuring = Measuring(self.ledger, config.sync, config.max_open_steps, self.cost, note)
        self.lifecycle = Lifecycle(
            self.buffer, self.ledger, self.dropping,
            batch=batch, flush_partial=config.flush_partial,
        )  # fmt: skip
        self.departures = Departures(self.ledger, self.lifecycle, config.rank_timeout)
        self.finishing = Finishing(
            self.ledger, self.lifecycle, self.admission, self.dropping, note, keeps=config.durable
        )
        self.checkpoints = Checkpoints(
            self.ledger, self.totals, objects, note, retain=config.retain
        )
        self.joining = Joining(self.ledger, self.checkpoints, self.freshness, self.lifecycle, note)

        self.timing = Timing(config.trigger, groups, self.phases, self.admission, self.lifecycle)
        usual = UsualLoss()
        selection = Selection(
            config, self.buffer, self.phases, self.freshness, self.ledger,
            usual=usual, cost=self.cost,
        )  # fmt: skip
        self.relief = Relief(config, self.buffer, self.admission, self.dropping, selection)
        self.selection_bias = SelectionBias(self.totals)
        booking = Booking(
            self.buffer, self.ledger, self.freshness, self.totals, kept,
            bias=self.selection_bias, usual=usual, batch=batch,
        )  # fmt: skip
        self.planning = Planning(
            self.ledger, self.timing, selection, self.relief, booking, target=config.target_excess
        )

        self.presence = Presence(self.producers, groups, self.admission, self.dropping)
        self.closing = Closing(self.buffer, self.held, closed_groups, self.dropping, self.memory)
        self.agreement = Agreement(self.producers, self.admission)
        self.ends = Ends(
            self.agreement, eligibility, self.dropping,
            admission=self.admission, departures=self.departures,
            phases=self.phases, lifecycle=self.lifecycle, note=note,
        )  # fmt: skip
        self.standings = Standings(self.buffer, self.held, self.freshness, self.ledger, batch=batch)
        self.waiting = Waiting(
            ledger=self.ledger, buffer=self.buffer, admission=self.admission, phases=self.phases,
            timing=self.timing, producers=self.producers, agreement=self.agreement,
            lockstep=self.lockstep, lifecycle=self.lifecycle,
        )  # fmt: skip

    def configure(self, config: DispatchConfig) -> None:
        """Heed what of the settings may change."""
        self.buffer.limits = config.limits
        self.planning.configure(config)

    def restore(self, memory: Remembered, now: float) -> None:
        """Go on where an earlier process stopped: all who had contributed may still come back."""
        self.totals.restore(memory.totals)
        self.references.restore(memory, now)  # before anything of it is dropped
        if memory.policy_version is not None:
            self.freshness.report(memory.policy_version, memory.policy_step or 0)
        accepted = {name for name, (floor, seqs) in memory.producers.items() if floor or seqs}
        awaited = (accepted | memory.words.keys()) - memory.left
        said = {
            name: memory.words.get(name, (0, False)) for name in memory.producers if name in awaited
        }
        self.producers.restore(said, now, contributed=accepted)
        given_ids = zip(memory.given_ids, memory.checksums, strict=True)
        self.memory.restore(memory.producers, given_ids, memory.keys)
        self.closed_groups.restore(memory.ended_groups)
        self.buffer.restore(memory.entries, memory.next_ticket, now)
        for name in memory.left:
            self.buffer.groups.producer_gone(name, left=True)
        held = LengthCounts()
        held.add([entry.sample.tokens for entry in memory.entries])
        self.selection_bias.restore(held)
        self._restore_schema(memory)
        self.cost.restore(memory.cost, memory.speeds)
        self.ends.restore(memory)
        self.checkpoints.restore(memory)
        self.departures.restore(now)
        self.finishing.restore(memory)

    def _restore_schema(self, memory: Remembered) -> None:
        """The settings come first: what was accepted with other fields gives way to them."""
        buffer = self.buffer
        if buffer.schema is None and memory.schema is not None:
            buffer.schema, buffer.set_by = memory.schema, memory.set_by
        elif buffer.schema is not None and buffer.schema != memory.schema:
            self.outcomes.fix_schema(buffer.schema, buffer.set_by)
            self.dropping.other_fields()
