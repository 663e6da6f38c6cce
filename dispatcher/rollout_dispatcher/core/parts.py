"""The parts of one run, constructed in the order of their dependencies: memory of producers and
ids, the buffer, admission, the step ledger, the lifecycle, planning, ends, reports.
"""

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.blocked_pushes import BlockedPushes
from rollout_dispatcher.core.admission.eligibility import Capacity, Eligibility, Outcomes
from rollout_dispatcher.core.admission.ends import Ends, Presence
from rollout_dispatcher.core.admission.producers import DuplicateMemory, Producers
from rollout_dispatcher.core.buffer.buffer import DECLARED, SampleBuffer
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.open_groups import ClosedGroups, OpenGroups
from rollout_dispatcher.core.buffer.phases import Freshness, Phases
from rollout_dispatcher.core.config import DispatchConfig
from rollout_dispatcher.core.facts import AppendFact, RecoveredState
from rollout_dispatcher.core.lifecycle import Finishing, Joining, Lifecycle, RankDepartures
from rollout_dispatcher.core.measuring.cost_in_use import CostInUse
from rollout_dispatcher.core.measuring.measuring import Measuring
from rollout_dispatcher.core.planning.planning import Planning
from rollout_dispatcher.core.rank_time import RankTime
from rollout_dispatcher.core.references import References
from rollout_dispatcher.core.steps.checkpoints import Checkpoints
from rollout_dispatcher.core.steps.ledger import Attempts, StepLedger
from rollout_dispatcher.core.totals import LengthCounts, SelectionBias, Totals
from rollout_dispatcher.core.waiting import ProgressReport, StallDetector, Waiting


class Parts:
    """The parts by name; `DispatcherCore` passes each event to those concerned."""

    def __init__(self, config: DispatchConfig, append_fact: AppendFact) -> None:
        batch, self.append_fact = config.trigger.batch, append_fact
        self.totals = Totals()
        self.producers = Producers(config.producer_timeout)
        self.memory = DuplicateMemory(config.id_horizon)
        self.references = References(config.limits.stores, self.totals, append_fact)
        self.closed_groups = ClosedGroups(config.id_horizon, append_fact)

        groups = OpenGroups(self.producers.__contains__, config.group_timeout, self.closed_groups)
        self.buffer = SampleBuffer(
            config.limits, groups,
            keep_groups_whole=config.groups_matter, by_groups=config.by_groups,
            too_long=config.drop_above,
        )  # fmt: skip
        if config.schema is not None:
            self.buffer.schema, self.buffer.schema_source = config.schema, DECLARED
        self.phases = Phases(self.buffer, batch)
        self.freshness = Freshness(
            config.max_staleness, config.staleness_policy, config.steps_per_version
        )
        self.dropping = Dropping(self, keep=config.keep_incomplete)

        self.capacity = Capacity(self.buffer, self.phases.units_short)
        self.eligibility = Eligibility(self, config)
        self.outcomes = Outcomes(self, config)
        self.blocked = BlockedPushes(
            config.limits.held_bytes, keep_groups_whole=config.groups_matter
        )
        groups.on_change = self.closed_groups.on_change = self.blocked.mark_group_changed
        self.admission = Admission(self, config)

        self.ledger = StepLedger(config.dp_size, config.max_open_steps, config.check_size)
        self.attempts = Attempts(self.ledger, self.dropping, append_fact)
        self.stall_detector = StallDetector(self.ledger)
        self.cost = CostInUse(config.cost)
        self.measuring = Measuring(
            self.ledger, config.sync, config.max_open_steps, self.cost, append_fact
        )
        self.lifecycle = Lifecycle(self, config)
        self.rank_time = RankTime(self)
        self.rank_departures = RankDepartures(self, config.rank_timeout)
        self.finishing = Finishing(self, keeps=config.durable)
        self.checkpoints = Checkpoints(self, retain=config.retain)
        self.joining = Joining(self)

        self.selection_bias = SelectionBias(self.totals)
        self.planning = Planning(self, config)

        self.presence = Presence(self)
        self.ends = Ends(self)
        self.progress = ProgressReport(self, batch=batch)
        self.waiting = Waiting(self)

    def configure(self, config: DispatchConfig) -> None:
        """Change the settings that may change."""
        self.buffer.limits = config.limits
        self.planning.configure(config)

    def restore(self, memory: RecoveredState, now: float) -> None:
        """Continue the run of an earlier process; all its contributors may come back."""
        self.totals.restore(memory.totals)
        self.references.restore(memory, now)  # before anything of it is dropped
        if memory.policy_version is not None:
            self.freshness.report(memory.policy_version, memory.policy_step or 0)
        accepted = {name for name, (floor, seqs) in memory.producers.items() if floor or seqs}
        may_return = (accepted | memory.ends.keys()) - memory.left
        ended = {
            name: memory.ends.get(name, (0, False))
            for name in memory.producers
            if name in may_return
        }
        self.producers.restore(ended, now, contributed=accepted)
        given_ids = zip(memory.given_ids, memory.checksums, strict=True)
        self.memory.restore(memory.producers, given_ids, memory.keys)
        self.closed_groups.restore(memory.ended_groups)
        self.buffer.restore(memory.entries, memory.next_ticket, now)
        for name in memory.left:
            self.buffer.groups.producer_gone(name, left=True)
        buffered = LengthCounts()
        buffered.add([entry.sample.tokens for entry in memory.entries])
        self.selection_bias.restore(buffered)
        self._restore_schema(memory)
        self.cost.restore(memory.cost, memory.speeds)
        self.ends.restore(memory)
        self.checkpoints.restore(memory)
        self.rank_departures.restore(now)
        self.finishing.restore(memory)

    def _restore_schema(self, memory: RecoveredState) -> None:
        """A configured schema wins: samples that do not fit it are dropped."""
        buffer = self.buffer
        if buffer.schema is None and memory.schema is not None:
            buffer.schema, buffer.schema_source = memory.schema, memory.set_by
        elif buffer.schema is not None and buffer.schema != memory.schema:
            self.outcomes.fix_schema(buffer.schema, buffer.schema_source)
            self.dropping.schema_mismatches()
