"""Eligibility: which samples may come in at all, now or later, whatever the capacity.

Most pushes are of new and valid samples without a group: these are told from others as a whole, by
what decides on each of them too.
"""

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.open_groups import OpenGroup
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory
from rollout_dispatcher.core.producers.producers import Producers
from rollout_dispatcher.core.producers.push import Push
from rollout_dispatcher.errors import SampleRefused, ShuttingDown
from rollout_dispatcher.sample import Sample, SamplesByField


class Eligibility:
    """What refuses samples. memory: of what was accepted before.

    needs_version: samples without a policy version are refused, unless they are exempt.
    """

    def __init__(
        self,
        buffer: SampleBuffer,
        producers: Producers,
        closed_groups: ClosedGroups,
        memory: DuplicateMemory,
        *,
        needs_version: bool = False,
    ) -> None:
        self._needs_version = needs_version
        self._buffer, self._producers = buffer, producers
        self._closed_groups, self.memory = closed_groups, memory
        #: Set once nothing more is accepted; says why.
        self.closed: str | None = None
        self.closed_code = "closed"
        #: Whether a successor of this dispatcher may accept it.
        self.shuts_down = False
        #: Samples of weights older than this come too late: their phase has ended.
        self.oldest_version = 0

    @property
    def situation(self) -> tuple[object, ...]:
        """Another one whenever any sample that is held back may be eligible no more."""
        return self.oldest_version, self._buffer.set_by

    def plain(self, push: Push) -> SamplesByField | None:
        """The samples of a push that wait, if they come last and capacity is all that they need."""
        first = next(iter(push.samples), None)
        if first is None or self._buffer.is_grouped(first):
            return None  # the usual exceptions, found before anything is computed
        decided = len(push.outcomes) - push.outcomes.count(None)
        if None in push.outcomes[:decided] or decided == len(push.outcomes):
            return None
        samples = SamplesByField.of(push.samples[decided:])
        plain = (
            self.closed is None
            and self._buffer.are_plain(samples)
            and not self._producers.has_ended(push.producer)
            and self._is_young(push, samples)
            and not (self._needs_version and None in samples.policy_versions)
            and self.memory.are_new(push.producer, push.numbers[decided:], push.given_ids[decided:])
        )
        return samples if plain else None

    def is_begun_anew(self, group: OpenGroup, coming: int) -> bool:
        """Whether so many new members can only replace what producers that are gone have pushed."""
        if not group.entries:
            return False
        if self._buffer.groups.has_died(group):
            return True
        missing = group.missing
        too_many = missing is not None and coming > missing
        return too_many and all(map(self._producers.is_away, group.contributors))

    def is_late(self, sample: Sample) -> bool:
        """Whether its group has ended."""
        return self._buffer.is_grouped(sample) and sample.group_id in self._closed_groups

    def check(self, push: Push, sample: Sample) -> None:
        """Raise SampleRefused if this sample may not come in, now or later."""
        if self.closed is not None and not push.excused:
            if self.shuts_down:
                raise ShuttingDown(self.closed)
            raise SampleRefused(self.closed_code, self.closed)
        if self._producers.has_ended(push.producer) and not push.excused:
            raise SampleRefused("closed", "this producer has ended its stream")
        version = sample.judged_version
        if self._needs_version and version is None and not sample.staleness_exempt:
            raise SampleRefused(
                "policy-version-missing",
                f"sample {sample.sample_id} has no policy_version, and --max-staleness is set: "
                "nobody could tell whether it is too old; push it with the version of the weights "
                "that generated it, or, if none did (a demonstration, replay), with "
                "staleness_exempt=True",
            )
        if version is not None and version < (oldest := self._oldest_for(push)):
            raise SampleRefused(
                "phase-ended",
                f"sample {sample.sample_id} is of policy version {version}, whose phase has ended; "
                f"push samples of version {oldest} or newer",
            )
        self._buffer.check(sample)
        if self._buffer.is_grouped(sample):
            assert sample.group_id is not None
            if (why := self._closed_groups.why_refused(sample.group_id)) is not None:
                raise SampleRefused(
                    "group-closed",
                    f"{why}; a group_id names one group: what is generated for its prompt again, "
                    "or in another epoch, is a group of another id, such as f'{prompt}@{epoch}'",
                )
            self._buffer.check_group(sample)

    def _is_young(self, push: Push, samples: SamplesByField) -> bool:
        versions = [version for version in set(samples.policy_versions) if version is not None]
        return not versions or min(versions) >= self._oldest_for(push)

    def _oldest_for(self, push: Push) -> int:
        if push.excused:
            return 0
        return max(self.oldest_version, self._producers.phase(push.producer))
