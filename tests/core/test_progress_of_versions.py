"""Nothing waits for itself where samples have policy versions, either, or are withdrawn.

The same machine as in test_progress.py, with more that may happen.
"""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.phases import StalenessPolicy
from tests.core.test_progress import BATCH, SHORT, TOKENS, Progress
from tests.support.core.silence import SHRINKING, sequences
from tests.support.samples import make_sample

pytestmark = SHRINKING
VERSIONS = 4


class ProgressOfVersions(Progress):
    """Phases end while samples of them wait, and samples become stale, or are too long."""

    def settings(self, drawn: st.DataObject) -> dict[str, object]:
        """Of all that drops samples by what they are."""
        return {
            "max_staleness": drawn.draw(st.sampled_from([None, None, 0, 1]), "staleness"),
            "staleness_policy": drawn.draw(st.sampled_from(StalenessPolicy), "policy"),
            "drop_above": drawn.draw(st.sampled_from([None, None, SHORT]), "too long"),
        }

    @rule(
        by=st.sampled_from("pqr"),
        count=st.integers(1, BATCH),
        grouped=st.booleans(),
        version=st.one_of(st.none(), st.integers(0, VERSIONS)),
        tokens=st.sampled_from([SHORT, TOKENS]),
    )
    def begin_versions(
        self, by: str, count: int, grouped: bool, version: int | None, tokens: int
    ) -> None:
        self.groups += 1
        group = f"{self.groups}" if grouped else None
        for at in range(count if self.producers[by].alive else 0):
            sample = make_sample(
                f"{self.groups}.{at}", tokens,
                group_id=group, group_size=count if grouped else 1, policy_version=version,
                staleness_exempt=version is None and at < count - self.groups % 2,
            )  # fmt: skip
            self.producers[by].todo.append(sample)

    @rule(
        by=st.sampled_from("pqr"),
        version=st.integers(1, VERSIONS),
        force=st.sampled_from([False, False, False, True]),
    )
    def end_a_phase(self, by: str, version: int, force: bool) -> None:
        if self.producers[by].alive:
            self.books.ends_phase(version)
            self.perform(self.core.end_phase(version, self.now, by, force=force))

    @rule(version=st.integers(0, VERSIONS))
    def report_a_version(self, version: int) -> None:
        first_step = self.core._ledger.steps.next_number
        self.books.reports(version, first_step)
        self.perform(self.core.set_policy_version(version, self.now, first_step))

    @rule(by=st.sampled_from("pqr"))
    def withdraw(self, by: str) -> None:
        """A producer gives up a member that it has not pushed."""
        producer = self.producers[by]
        members = [sample for sample in producer.todo if sample.group_id is not None]
        if members:
            gone = members[0]
            producer.todo.remove(gone)
            number, producer.next_seq = producer.next_seq, producer.next_seq + 1
            size = gone.group_size if gone.group_size > 0 else None
            self.perform(self.core.withdraw(str(gone.group_id), size, by, [number], self.now))

    @rule(count=st.integers(1, 3))
    def push_over_http(self, count: int) -> None:
        self.groups += 1
        self.pushed += count
        samples = tuple(
            make_sample(f"{self.groups}.{at}", TOKENS, staleness_exempt=True) for at in range(count)
        )
        self.perform(self.core.push(Push("", 0, samples), self.now, may_wait=False))


TestProgressOfVersions = ProgressOfVersions.TestCase
TestProgressOfVersions.settings = sequences(40, steps=50)
