"""Phases and the stream end: when producers agree (agreement.py), and what follows then.

Facts are noted when something is decided, so that a restart stands by it.
"""

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.admission.eligibility import Eligibility
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.buffer.phases import Phases
from rollout_dispatcher.core.effects import Effect
from rollout_dispatcher.core.facts import Note, PhaseEnded, ProducerSaid, Remembered, StreamEnded
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.producers.agreement import Agreement, End
from rollout_dispatcher.core.ranks.departures import Departures
from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import RunFinished, SampleRefused

TRAINER_LEFT = (
    "the stream has ended, and every DP rank has left: what waited for room is trained on no more"
)
STREAM_ENDED = "the stream has ended: its producers, or a controller, have ended it"


class Ends:
    """Hears that producers are done; changes the buffer only through `dropping`."""

    def __init__(
        self,
        agreement: Agreement,
        eligibility: Eligibility,
        dropping: Dropping,
        *,
        admission: Admission,
        departures: Departures,
        phases: Phases,
        lifecycle: Lifecycle,
        note: Note,
    ) -> None:
        self._admission, self._departures = admission, departures
        self._agreement, self._eligibility = agreement, eligibility
        self._dropping, self._phases = dropping, phases
        self._lifecycle, self._note = lifecycle, note

    def restore(self, memory: Remembered) -> None:
        """What was decided before stands, and what was asked for is asked for still."""
        for version in memory.phases:
            self._bar(version)
            self._end_phase(version, untracked=False)
        if memory.ended:
            self._eligibility.closed = STREAM_ENDED
            self.stream_over()
        for phase, ended in memory.words.values():  # what was asked for and not agreed to yet
            if phase > self._eligibility.oldest_version:
                self._agreement.ask(phase)
            if ended and self._agreement.begun and not memory.ended:
                self._agreement.ask(None)  # before that, others who are there are heard first

    def end_phase(self, version: int, producer: str, *, force: bool) -> None:
        """A producer pushes nothing older than `version`; with `force` nobody does."""
        if version > self._eligibility.oldest_version:
            self._agreement.check(version)
            self._note_word(producer, self._agreement.ends_phase(producer, version))
            self._agreement.ask(version, force=force)

    def end_stream(self, producer: str, *, force: bool) -> None:
        """A producer pushes nothing more; with `force` nobody does."""
        if not self._lifecycle.ended:
            self._note_word(producer, self._agreement.ends_stream(producer))
            self._agreement.ask(None, force=force)

    def settle(self) -> list[Effect]:
        """End what producers agree on, once what it waits for has come in.

        What the end of the stream waits for never does where the trainer has left: it is refused.
        """
        self._agreement.settle(self._decided, self._ended)
        held = self._admission.held
        if not (held and self._agreement.is_decided(None) and self._departures.deserted):
            return []
        answers = self._admission.refuse_held(SampleRefused(RunFinished.code, TRAINER_LEFT))
        self._agreement.settle(self._decided, self._ended)
        return answers

    def stream_over(self, reason: EndReason = EndReason.ENDED) -> None:
        """Nothing comes any more: groups that lack members never will have them."""
        self._lifecycle.end(reason)
        self._dropping.give_up_groups()

    def _note_word(self, producer: str, word: tuple[int, bool]) -> None:
        phase, ended = word
        self._note(ProducerSaid(producer, phase, ended))

    def _decided(self, end: End) -> None:
        """From now on nothing comes that belongs before this end."""
        if end is None:
            self._note(StreamEnded())
            self._eligibility.closed = STREAM_ENDED
        else:
            self._note(PhaseEnded(end))
            self._bar(end)

    def _bar(self, version: int) -> None:
        self._eligibility.oldest_version = max(self._eligibility.oldest_version, version)

    def _ended(self, end: End) -> None:
        """What belongs before this end is here, as far as it will ever be."""
        if end is None:
            self.stream_over()
        else:
            self._end_phase(end, untracked=True)

    def _end_phase(self, version: int, *, untracked: bool) -> None:
        """Groups that it leaves behind are given up; untracked: those without a version, too."""
        self._dropping.give_up_before(version, untracked=untracked)
        self._phases.end(version)
