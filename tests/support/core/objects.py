"""Samples that lie in objects of a payload store, and a core whose workers are played."""

from collections.abc import Iterable

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.effects import Decision, FreeRequested, PushAnswered, SweepRequested
from rollout_dispatcher.core.references import Freed, Swept, WorkerEvent, WorkerGone, WorkerThere
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.cores import Bench
from tests.support.samples import make_sample

STORE = "file:///store"
STORES = frozenset({STORE})
#: Of one sample.
NBYTES = 32


def stored(key: str, samples: int = 1) -> StoredObject:
    return StoredObject(STORE, key, NBYTES * samples)


def push_of(
    producer: str, first_seq: int, key: str, samples: Iterable[Sample], floor: int = 0
) -> Push:
    """All of them lie in this object."""
    samples = tuple(samples)
    whole = stored(key, len(samples))
    placed = (
        sample._replace(payload=Reference(whole, NBYTES * at, NBYTES))
        for at, sample in enumerate(samples)
    )
    return Push(producer, first_seq, tuple(placed), floor, has_references=True)


class StoreBench(Bench):
    """A core, and one store with what was put there. Workers do what they are asked when told to.

    asked: what each worker was asked and has not answered.
    """

    stores = STORES

    def __init__(self, **options: object) -> None:
        super().__init__(durable=True, **options)  # type: ignore[arg-type]
        self.objects: set[str] = set()
        self.asked: dict[str, FreeRequested | SweepRequested] = {}

    def perform(self, decision: Decision) -> None:
        super().perform(decision)
        for effect in decision.effects:
            if isinstance(effect, FreeRequested | SweepRequested):
                self.asked[effect.worker] = effect

    def crash(self) -> None:
        """The process dies, and another goes on from what was noted."""
        self.asked = {}
        self.restart()
        self.pass_time(0.0)

    # -- producers ----------------------------------------------------------------------------

    def put(
        self,
        producer: str,
        first_seq: int,
        count: int,
        *,
        tokens: int = 4,
        word: str = "1",
        floor: int = 0,
    ) -> Push:
        """An object, and the push of the samples in it, which is not sent yet."""
        key = f"{producer}.{word}/{first_seq}"
        self.objects.add(key)
        names = (f"{producer}/{first_seq + at}" for at in range(count))
        samples = (make_sample(name, tokens) for name in names)
        return push_of(producer, first_seq, key, samples, floor)

    def send(self, push: Push, *, may_hold: bool = True) -> tuple[Outcome, ...] | None:
        """Outcomes, or None while it is held; it is the caller's to send again."""
        again = Push(push.producer, push.first_seq, push.samples, push.floor, has_references=True)
        start = len(self.log)
        self.perform(self.core.push(again, self.now, may_wait=may_hold))
        answers = [e for e in self.log[start:] if isinstance(e, PushAnswered)]
        return next((e.outcomes for e in answers if e.first_seq == push.first_seq), None)

    def send_over_http(self, samples: Iterable[Sample]) -> tuple[Outcome, ...]:
        """Outcomes; what has no room is answered `full`, and is the caller's to send again."""
        push = Push("", 0, tuple(samples), named=True, has_references=True)
        start = len(self.log)
        self.perform(self.core.push(push, self.now, may_wait=False))
        return next(e for e in self.log[start:] if isinstance(e, PushAnswered)).outcomes

    def connect(self, producer: str, word: str = "1") -> None:
        self.perform(self.core.producer_connected(producer, "", f"{producer}.{word}"))
        self.pass_time(0.0)

    def leave(self, producer: str) -> None:
        """It says goodbye, and is there still."""
        self.perform(self.core.producer_leaves(producer, self.now))
        self.pass_time(0.0)

    def lose(self, producer: str, *, for_good: bool = False) -> None:
        if for_good:
            self.leave(producer)
        self.perform(self.core.producer_disconnected(producer, self.now, for_good=for_good))
        self.pass_time(0.0)

    # -- workers ------------------------------------------------------------------------------

    def worker(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerThere | WorkerGone):
            self.asked.pop(event.worker, None)
        self.perform(self.core.on_worker_event(event, self.now))
        self.pass_time(0.0)

    def answer(self, worker: str, *, left: Iterable[str] = ()) -> None:
        """A worker does what it was asked, but for these keys."""
        wanted = self.asked.pop(worker)
        if isinstance(wanted, FreeRequested):
            kept = tuple(key for key in wanted.keys if key in left)
            self.objects -= {*wanted.keys} - {*kept}
            self.worker(Freed(worker, wanted.number, kept))
        else:
            keys = tuple(sorted(key for key in self.objects if key.startswith(wanted.prefix)))
            self.worker(Swept(worker, wanted.number, keys[:2], more=len(keys) > 2))

    def answer_all(self) -> None:
        """Until nobody is asked anything."""
        while self.asked:
            self.answer(next(iter(self.asked)))
