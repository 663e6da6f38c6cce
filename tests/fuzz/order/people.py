"""Who speaks to the dispatcher: producers and DP ranks, good ones and such as say anything.

A good rank is the clients' own core, so what it cannot make sense of is a fault as well.
"""

from dataclasses import dataclass, field
from zlib import crc32

from rollout_dispatcher.protocol import messages as m
from rollout_workers.rank.core import RankCore
from tests.fuzz.order.books import Books
from tests.fuzz.order.line import Line
from tests.fuzz.order.world import World
from tests.support.client import make_push, make_span


@dataclass(slots=True)
class Pusher:
    """A producer's client: what it pushed, over all its connections."""

    world: World
    name: str
    next_seq: int = 0
    line: Line | None = None
    pushed: dict[int, tuple[m.Push, bytes]] = field(default_factory=dict)
    answered: dict[int, m.Pushed] = field(default_factory=dict)
    welcomed: bool = False
    pongs: int = 0

    def connect(self) -> Line:
        """On a new connection."""
        self.welcomed = False
        self.line = line = self.world.connect(self.heard)
        line.say(m.HelloProducer(client_id=self.name))
        return line

    def push(self, tokens: list[int], first: int | None = None, **columns: object) -> int:
        """Push samples, new ones unless `first` says otherwise; returns the first number."""
        first = self.next_seq if first is None else first
        if first not in self.pushed or len(self.pushed[first][0].tokens) != len(tokens):
            self._make(first, tokens, columns)
        self.next_seq = max(self.next_seq, first + len(tokens))
        if self.line is not None and self.line.open and self.welcomed:
            self.line.say(*self.pushed[first])
        return first

    def _make(self, first: int, tokens: list[int], columns: dict[str, object]) -> None:
        push = make_push(self.name, first, tokens, **columns)[0]
        named = zip(push.sample_ids, tokens, strict=True)  # one name, one payload
        spans = [make_span(crc32(name.encode()) % 10_000, size) for name, size in named]
        self.pushed[first] = push, b"".join(spans)
        for name, size, span in zip(push.sample_ids, tokens, spans, strict=True):
            self.world.books.spans.setdefault(name, (size, span))

    def heard(self, line: Line, message: m.Message, _: memoryview) -> None:
        """An answer."""
        match message:
            case m.WelcomeProducer():
                self.welcomed |= line is self.line
            case m.Pushed():
                push = self.pushed[message.first_seq][0]
                outcomes = [str(outcome) for outcome in message.of_each(len(push.tokens))]
                self.world.books.answered(push.sample_ids, outcomes)
                self.answered[message.first_seq] = message
            case m.Resend() if line.open:
                line.say(*self.pushed[message.first_seq])
            case m.Pong():
                self.pongs += 1


def claims(books: Books, generation: int | None, hello: m.HelloRank) -> None:
    """What a rank says that it holds and has applied."""
    if generation is not None:
        place = generation, hello.dp_rank
        held = max([hello.taken, hello.committed, *[step for step, _ in hello.received]])
        books.holds[place] = max(books.holds[place], held)
        books.applied[place] = max(books.applied[place], hello.committed)


class Speaker:
    """A DP rank's connection, seen from its far end; every word of it is entered in the books."""

    def __init__(self, world: World, hello: m.HelloRank) -> None:
        self.world, self.hello = world, hello
        self.generation = hello.generation
        self.welcomes = 0
        self.ended = False
        self.headers: dict[int, m.StepHeader] = {}
        self.released: set[int] = set()
        self.line = world.connect(self.heard)
        self.say(hello)

    def say(self, message: m.Message) -> None:
        """Say it, if anybody listens."""
        if not self.line.open:
            return
        books, place = self.world.books, (self.generation or 0, self.hello.dp_rank)
        match message:
            case m.HelloRank():
                self.hello = message
                claims(books, message.generation, message)
                books.resuming = -1 if message.resume is None else message.resume.step
            case m.Prepared():
                plan = books.decided.plans.get(message.step)
                if plan is not None and plan.digest == message.digest:
                    books.holds[place] = max(books.holds[place], message.step)
            case m.Commit():
                books.applied[place] = max(books.applied[place], message.step)
        try:
            self.line.say(message)
        finally:
            books.resuming = -1

    def heard(self, line: Line, message: m.Message, payload: memoryview) -> None:  # noqa: ARG002
        """Check what the dispatcher says."""
        books = self.world.books
        match message:
            case m.WelcomeRank():
                self.welcomes += 1
                self.generation = message.generation
                self.headers.clear()
                self.released.clear()
            case m.StepHeader():
                books.hears_header(self.generation or 0, message)
                self.headers[message.step] = message
            case m.MicroBatch():
                books.hears_micro_batch(self.hello.dp_rank, message, payload)
            case m.Release():
                books.hears_release(self.generation or 0, message.step)
                self.released.add(message.step)
            case m.End():
                self.ended = True


class GoodRank(Speaker):
    """A DP rank as it should be: the clients' own core, and a training loop that commits."""

    def __init__(
        self,
        world: World,
        dp_rank: int,
        dp_size: int,
        generation: int | None,
        *,
        name: str = "good",
        resume: m.CheckpointPosition | None = None,
    ) -> None:
        self.core = RankCore(f"{name}-{dp_rank}", dp_rank, dp_size, generation, 1)
        self.trained: list[int] = []
        self._resume = resume
        super().__init__(world, self.core.hello())

    @property
    def lost(self) -> bool:
        """Whether its connection is over."""
        return not self.line.open

    @property
    def done(self) -> bool:
        """Whether it has everything there is."""
        return self.core.finished

    def heard(self, line: Line, message: m.Message, payload: memoryview) -> None:
        """Check it, and take it."""
        super().heard(line, message, payload)
        if line is self.line and not isinstance(message, m.Error | m.Bye):
            self.core.receive(message, memoryview(bytes(payload)), 0.0)

    def reconnect(self) -> None:
        """On a new connection, with what it holds; the old one may be there still."""
        self.core.lost()
        self.hello = hello = self.core.hello()
        self.line = self.world.connect(self.heard)
        self.say(hello)

    def act(self) -> None:
        """Do the next thing that a training loop does."""
        if self.core.welcome is not None and self._resume is not None:
            self.core.resume(self._resume)
            self._resume = None
        self.speak()
        if not self.core._connected or self.core.finished:
            return
        if (taken := self.core._steps.taken) and self.core.hungry is False:
            self.core.begin(taken[0])
            self.core.commit(taken[0])
        elif (held := self.core.ready()) is not None:
            assert held.header.step not in self.trained, "a step comes again"
            self.trained.append(held.header.step)
            self.core.take(held)
        else:
            self.core.demand(hungry=True)
        self.speak()

    def speak(self) -> None:
        """Say what there is to say."""
        for message, _ in list(self.core.take_messages(0.0)):
            self.say(message)
