"""Under any order of events an object is there as long as a sample may need it, and not for ever.

A state machine plays two producers, a client that pushes over HTTP, the ranks and two workers
against one core, and keeps books of its own of who needs what: nobody releases an object of which a
sample is accepted and not done with, or was pushed and not decided. In the end, when everybody has
left, the store is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_dispatcher.core.admission.blocked_pushes import Push
from rollout_dispatcher.core.buffer.objects import AWAY_S
from rollout_dispatcher.core.effects import Decision, PushAnswered, SamplesDropped, StepCommitted
from rollout_dispatcher.core.references import ANSWER_S, WorkerGone, WorkerThere
from rollout_dispatcher.sample import Outcome, Sample
from tests.support.core.objects import StoreBench, push_of
from tests.support.examples import scaled
from tests.support.samples import make_sample

BATCH, DROP_ABOVE = 4, 8


@dataclass
class Books:
    """Of each sample that may be needed its key.

    undecided: of which no answer has arrived. live: accepted. done: samples that are over, which
    their producer may not have received.
    """

    undecided: dict[str, str] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    @property
    def needed(self) -> set[str]:
        live = {key for name, key in self.live.items() if name not in self.done}
        return {*self.undecided.values(), *live}


class PlayedBench(StoreBench):
    """Tells the books what was answered, dropped and committed."""

    def __init__(self, books: Books, **options: object) -> None:
        self.books = books
        self.pushes: dict[tuple[str, int], Push] = {}
        self.steps: dict[int, set[str]] = {}
        super().__init__(**options)

    def perform(self, decision: Decision) -> None:
        for effect in decision.effects:
            match effect:
                case PushAnswered():
                    self.answered(effect)
                case SamplesDropped(dropped):
                    for entries in dropped.values():
                        self.books.done |= {entry.sample.sample_id for entry in entries}
                case StepCommitted() if not self.core.config.retain:
                    self.done(effect.step)
                case _:
                    pass
        super().perform(decision)
        assert self.books.needed <= self.objects, "released too early"

    def answered(self, effect: PushAnswered) -> None:
        push = self.pushes[effect.producer, effect.first_seq]
        for sample, outcome in zip(push.samples, effect.outcomes, strict=True):
            key = self.books.undecided.pop(sample.sample_id, None)
            if key is not None and outcome is Outcome.FULL:
                self.books.undecided[sample.sample_id] = key
            elif key is not None and outcome is not Outcome.REFUSED:
                self.books.live[sample.sample_id] = key

    def done(self, step: int) -> None:
        self.books.done |= self.steps[step]


class ReferencesMachine(RuleBasedStateMachine):
    """Two producers, one over HTTP, two workers, and whatever order hypothesis finds."""

    @initialize(capacity=st.sampled_from([4, 6]), retain=st.booleans())
    def start(self, capacity: int, retain: bool) -> None:
        self.books = Books()
        self.bench = PlayedBench(
            self.books,
            batch=BATCH,
            capacity=capacity,
            retain=retain,
            drop_above=DROP_ABOVE,
            producer_credits=2,
        )
        self.next_seq = {"p": 0, "q": 0, "w": 0}
        self.words = {"p": 1, "q": 1}
        self.web: list[Sample] = []
        self.trained = -1
        self.sleepy = False
        for producer in "pq":
            self.bench.connect(producer)
        self.bench.join()
        self.bench.worker(WorkerThere("a"))

    # -- producers ----------------------------------------------------------------------------

    @rule(
        who=st.sampled_from("pq"),
        count=st.integers(1, 7),
        tokens=st.sampled_from([4, 4, 4, 9, 1001]),
        times=st.integers(1, 3),
    )
    def push(self, who: str, count: int, tokens: int, times: int) -> None:
        for _ in range(times):
            self.push_once(who, count, tokens)

    def push_once(self, who: str, count: int, tokens: int) -> None:
        first = self.next_seq[who]
        self.next_seq[who] += count
        push = self.bench.put(who, first, count, tokens=tokens, word=str(self.words[who]))
        key = f"{who}.{self.words[who]}/{first}"
        self.bench.pushes[who, first] = push
        self.books.undecided |= {sample.sample_id: key for sample in push.samples}
        push.floor = self.floor(who)
        self.bench.send(push)

    def floor(self, who: str) -> int:
        """The lowest number that it may send again."""
        waits = [int(name[2:]) for name in self.books.undecided if name[0] == who]
        firsts = [first for producer, first in self.bench.pushes if producer == who]
        return max(first for first in firsts if first <= min(waits))

    @rule(who=st.sampled_from("pq"))
    def put_and_push_never(self, who: str) -> None:
        self.bench.put(who, 1000 + len(self.bench.log), 1, word=str(self.words[who]))

    @rule(who=st.sampled_from("pq"), seconds=st.sampled_from([0.0, 100.0]), steps=st.integers(0, 2))
    def lose_and_come_back(self, who: str, seconds: float, steps: int) -> None:
        """Whatever is decided and trained meanwhile, it sends the rest again."""
        self.bench.lose(who)
        self.bench.pass_time(seconds)
        for _ in range(steps):
            self.train()
        self.come_back(who)

    @rule(who=st.sampled_from("pq"), long=st.booleans())
    def die_and_be_followed(self, who: str, long: bool) -> None:
        """Its undecided samples are never sent again."""
        if long:
            self.bench.lose(who)
            self.bench.pass_time(AWAY_S)
        self.give_up(who)
        self.words[who] += 1
        self.bench.lose(who)
        self.bench.connect(who, word=str(self.words[who]))

    @rule(count=st.integers(1, 7), tokens=st.sampled_from([4, 4, 4, 9, 1001]))
    def push_over_http(self, count: int, tokens: int) -> None:
        """With names, as there are no numbers, and each under a key of its own."""
        first = self.next_seq["w"]
        self.next_seq["w"] += count
        for name in (f"w/{first + at}" for at in range(count)):
            (sample,) = push_of("", 0, f"key-{name}", [make_sample(name, tokens)]).samples
            self.bench.objects.add(f"key-{name}")
            self.books.undecided[name] = f"key-{name}"
            self.web.append(sample)
        self.send_over_http(self.web[-count:])

    @rule(count=st.integers(1, 7), answered=st.booleans())
    def push_again_over_http(self, count: int, answered: bool) -> None:
        """Some of what was answered `full`, or all as if no answer had come."""
        full = [sample for sample in self.web if sample.sample_id in self.books.undecided]
        if full:
            self.send_over_http(full[-count:] if answered else self.web[-count:])

    def send_over_http(self, samples: Sequence[Sample]) -> None:
        self.bench.pushes["", 0] = Push("", 0, tuple(samples))
        self.bench.send_over_http(samples)

    @rule()
    def give_up_over_http(self) -> None:
        """What was answered `full` is the client's: it removes that itself."""
        for sample in self.web:
            if (key := self.books.undecided.pop(sample.sample_id, None)) is not None:
                self.bench.objects.discard(key)
        self.web.clear()

    def come_back(self, who: str) -> None:
        self.bench.connect(who, word=str(self.words[who]))
        for (producer, _), push in list(self.bench.pushes.items()):
            if producer == who and any(s.sample_id in self.books.undecided for s in push.samples):
                self.bench.send(push)
        self.push_again_over_http(1000, answered=True)

    def give_up(self, who: str) -> None:
        """It receives no answer any more: its objects in the core are live."""
        for name in [name for name in self.books.undecided if name[0] == who]:
            key = self.books.undecided.pop(name)
            if name in self.held():
                self.books.live[name] = key

    def held(self) -> set[str]:
        """Samples that the core holds."""
        memory = self.bench.memory.remembered()
        steps = (step.micro_batches for step in (*memory.steps, *memory.retained))
        in_steps = (entry for step in steps for rank in step for part in rank for entry in part)
        return {entry.sample.sample_id for entry in (*memory.entries, *in_steps)}

    # -- ranks --------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 3))
    def train_on(self, steps: int) -> None:
        for _ in range(steps):
            self.train()

    def train(self) -> None:
        self.bench.hungry()
        self.bench.pass_time(5.0)
        number = self.trained + 1
        if number in self.bench.core._ledger.steps:
            self.bench.steps[number] = self.bench.trained(number)
            self.bench.train(number)
            self.trained = number
        self.work()

    @precondition(lambda self: self.trained >= 0)
    @rule()
    def save_a_checkpoint(self) -> None:
        self.bench.perform(self.bench.core.checkpoint_saved(0, self.trained))
        for number in range(self.trained + 1):
            self.bench.done(number)

    # -- workers ------------------------------------------------------------------------------

    def work(self) -> None:
        """At once as a rule: what is released early is found out then."""
        if not self.sleepy:
            self.bench.answer_all()

    @rule()
    def fall_asleep_or_wake_up(self) -> None:
        self.sleepy = not self.sleepy
        self.work()

    @rule(worker=st.sampled_from("ab"), there=st.booleans())
    def worker_comes_or_goes(self, worker: str, there: bool) -> None:
        self.bench.worker(WorkerThere(worker) if there else WorkerGone(worker))

    @precondition(lambda self: self.bench.asked)
    @rule(data=st.data(), fails=st.booleans(), late=st.booleans())
    def answer(self, data: st.DataObject, fails: bool, late: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.bench.asked)))
        if late:
            self.bench.pass_time(ANSWER_S)
        self.bench.answer(worker, left=[*self.bench.objects][:1] if fails else [])

    # -- the dispatcher itself ----------------------------------------------------------------

    @rule(steps=st.integers(0, 2))
    def crash(self, steps: int) -> None:
        self.bench.crash()
        self.bench.join()
        self.bench.worker(WorkerThere("a"))
        for _ in range(steps):
            self.train()
        for who in "pq":
            self.come_back(who)

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "bench"):
            known = self.bench.core._parts.references.objects
            assert len(known) <= len(self.bench.objects)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        for who in "pq":
            self.come_back(who)
        while self.books.undecided:
            before = self.trained, len(self.books.undecided)
            self.train()
            for who in "pq":
                self.come_back(who)
            assert (self.trained, len(self.books.undecided)) != before, "nothing moves"
        for who in "pq":
            bench.lose(who, for_good=True)
        bench.perform(bench.core.end_stream(bench.now, force=True))
        while bench.core.statistics().in_flight or bench.core.statistics().buffered:
            self.train()
        if self.trained >= 0:
            self.save_a_checkpoint()
        bench.worker(WorkerThere("a"))
        bench.pass_time(ANSWER_S * 2)
        bench.worker(WorkerThere("a"))
        bench.pass_time(ANSWER_S * 2)
        bench.answer_all()
        assert bench.objects == set(), "left behind"
        assert bench.core.pending_store_work == 0
        assert bench.memory.remembered().unneeded == ()
        assert bench.memory.remembered().incarnations == {}


TestReferences = ReferencesMachine.TestCase
TestReferences.settings = settings(max_examples=scaled(40), stateful_step_count=30, deadline=None)
