"""Conversations: what producers and ranks of any generation say, in any order; good peers at last.

A script is a list of words, each a name and three numbers that are taken modulo whatever there is
at that moment, so that any part of a script is a script too: what shows a fault can be shortened.
"""

import random
from collections.abc import Callable, Sequence
from time import monotonic

from rollout_dispatcher.errors import DispatcherError
from rollout_dispatcher.protocol import messages as m
from tests.fuzz.order.line import VirtualLoop, settle
from tests.fuzz.order.people import GoodRank, Pusher, Speaker
from tests.fuzz.order.world import BUDGET, CONFIGS, DP_SIZE, World

Word = tuple[str, int, int, int]
Script = tuple[str, list[Word]]

#: How often each word comes.
WEIGHTS = {
    "turn": 24, "push": 10, "say": 10, "hello": 6, "push again": 3, "group": 8, "close": 1,
    "withdraw": 1, "good ranks": 3, "reconnect": 3, "cut": 2, "producer": 2, "leave": 1,
    "hello again": 1, "end phase": 1, "end stream": 0.15, "stall": 1, "read": 2, "time": 3,
    "lag": 2, "sync": 5, "crash": 1, "cut rank": 1,
}  # fmt: skip
MOST_WORDS = 90
#: Share of the scripts that begin as a run should.
ORDERLY = 0.8
NAMES = ("p", "q", "r")
#: Turns that good peers have in the end; a second passes with each.
PATIENCE = 400


def write(dice: random.Random) -> Script:
    """A script."""
    kind = dice.choice(list(CONFIGS))
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    count = dice.randint(10, MOST_WORDS)
    words = dice.choices(names, weights, k=count)
    if dice.random() < ORDERLY:
        words[:0] = ["good ranks", "push", "push", "turn", "turn"]
    return kind, [
        (word, dice.randrange(1 << 16), dice.randrange(1 << 16), dice.randrange(1 << 16))
        for word in words
    ]


class Play:
    """One script in a world of its own."""

    def __init__(self, loop: VirtualLoop, kind: str) -> None:
        self.world = World(loop, kind)
        self.pushers = [Pusher(self.world, name) for name in NAMES]
        self.strangers: list[Speaker] = []
        self.good: list[GoodRank] = []
        self.births = 0
        self._ways: dict[str, Callable[[int, int, int], None]] = {
            name: getattr(self, "_" + name.replace(" ", "_")) for name in WEIGHTS
        }

    async def run(self, words: Sequence[Word]) -> None:
        """Say it all, then let good peers finish."""
        for name, *numbers in words:
            self._ways[name](*numbers)
            await self._settle()
            await self._train(numbers[2] % 8 if name == "turn" else 0)
        await self._finish()

    async def _settle(self) -> None:
        await settle()
        if self.world.prompt:
            self.world.sync()
            await settle()
        self.world.check()

    # -- producers

    def _producer(self, who: int, *_: int) -> None:
        self.pushers[who % len(self.pushers)].connect()

    def _pusher(self, who: int) -> Pusher:
        found = self.pushers[who % len(self.pushers)]
        if found.line is None or not found.line.open:
            found.connect()
        return found

    def _push(self, who: int, tokens: int, how: int) -> None:
        columns: dict[str, object] = {}
        count = 1 + tokens % 5
        lengths = [(tokens >> at) % BUDGET + 1 for at in range(count)]
        pusher = self._pusher(who)
        if how % 4 == 0:
            columns["policy_versions"] = [how // 4 % 4] * count
        elif how % 8 == 1:
            columns["floor"] = max(0, pusher.next_seq - how // 8 % 6)
        elif how % 8 == 2:
            columns |= {"named": True, "sample_ids": [f"id-{how // 8 % 9}.{at}" for at in lengths]}
        elif how % 16 == 3:
            lengths[-1] = BUDGET + 1  # refused
        if "policy_versions" not in columns:  # of one kind of world some are refused for it
            columns["staleness_exempt"] = [how % 32 != 6] * count
        first = pusher.next_seq + (how // 64 % 4 if how % 16 == 5 else 0)
        if len(set(map(str, columns.get("sample_ids", range(count))))) == count:  # type: ignore[call-overload]
            pusher.push(lengths, first, **columns)

    def _group(self, who: int, which: int, how: int) -> None:
        pusher, size = self._pusher(who), 2 + which % 3
        count = 1 + how % size
        sizes = [0 if how % 3 == 0 else size] * count
        name = f"g{which % 6}@{pusher.next_seq // 16}"
        pusher.push(
            [4] * count, group_ids=[name] * count, group_sizes=sizes,
            staleness_exempt=[how % 7 != 6] * count,
        )  # fmt: skip

    def _push_again(self, who: int, which: int, _: int) -> None:
        pusher = self._pusher(who)
        if pusher.pushed:
            first = sorted(pusher.pushed)[which % len(pusher.pushed)]
            pusher.push([0] * len(pusher.pushed[first][0].tokens), first)

    def _tell(self, who: int, message: m.Message) -> None:
        pusher = self._pusher(who)
        if pusher.line is not None and pusher.line.open and pusher.welcomed:
            pusher.line.say(message)

    def _close(self, who: int, which: int, how: int) -> None:
        size, keep = (None, 1, 2, 3, 9)[how % 5], (None, True, False)[how // 5 % 3]
        number = None if how & 64 else how % 9
        name = f"g{which % 6}"
        self._tell(who, m.CloseGroup(group_id=name, size=size, keep=keep, number=number))

    def _withdraw(self, who: int, which: int, how: int) -> None:
        numbers = [how % 40 + at for at in range(how % 3)]
        size = (None, 3)[how % 2]
        self._tell(who, m.CloseGroup(group_id=f"g{which % 6}", size=size, withdrawn=numbers))

    def _end_phase(self, who: int, version: int, how: int) -> None:
        self._tell(who, m.EndPhase(policy_version=version % 4 + 1, force=how % 3 == 0))

    def _end_stream(self, who: int, _: int, how: int) -> None:
        self._tell(who, m.EndStream(force=how % 3 == 0))

    def _leave(self, who: int, which: int, _: int) -> None:
        if which % 2:
            self._tell(who, m.Bye())
        elif self.strangers:
            self.strangers[who % len(self.strangers)].say(m.Bye())

    def _cut(self, who: int, *_: int) -> None:
        if self.world.lines:
            self.world.lines[who % len(self.world.lines)].cut()

    # -- ranks

    def _good_ranks(self, size: int, load: int, _: int) -> None:
        """A new process group, which may have loaded a checkpoint."""
        size = (DP_SIZE, DP_SIZE, 1, 3)[size % 4] if self.world.core.generation else DP_SIZE
        self.births += 1
        resume = None
        decided = self.world.books.decided
        if load % 3 == 0 and decided.last_committed >= 0:
            step = decided.saved + load // 3 % max(1, decided.last_committed - decided.saved + 1)
            resume = m.CheckpointPosition(run_id=self.world.core.run_id, step=max(step, -1))
        name = f"good{self.births}"
        self.good = [GoodRank(self.world, 0, size, None, name=name, resume=resume)]
        self._size, self._name, self._load = size, name, resume

    def _turn(self, who: int, how: int, _: int) -> None:
        """A good rank or all of them go on; the others join once the first knows its number."""
        if not self.good:
            return
        first = self.good[0]
        if len(self.good) < self._size and first.core.generation is not None:
            at = len(self.good)
            number = first.core.generation
            self.good.append(
                GoodRank(self.world, at, self._size, number, name=self._name, resume=self._load)
            )
        for rank in self.good if how % 3 else [self.good[who % len(self.good)]]:
            if not rank.lost:
                rank.act()

    async def _train(self, rounds: int) -> None:
        """All good ranks go on for a while."""
        for _ in range(rounds):
            for rank in self.good:
                if not rank.lost:
                    rank.act()
            self.world.after(0.3)
            await self._settle()

    def _reconnect(self, who: int, how: int, _: int) -> None:
        if self.good:
            rank = self.good[who % len(self.good)]
            if how % 2:
                rank.line.cut()
            if rank.line.failed is None:
                rank.reconnect()

    def _hello(self, place: int, claim: int, how: int) -> None:
        self.strangers.append(Speaker(self.world, self._any_hello(place, claim, how)))

    def _any_hello(self, place: int, claim: int, how: int) -> m.HelloRank:
        """What a rank may say that is, was or will be there; most of it is nearly right."""
        decided, core = self.world.books.decided, self.world.core
        step = max(decided.plans, default=-1) - claim % 3 + (claim % 31 == 0)
        size = (1, 3, 4)[how % 3] if how % 11 == 0 else max(decided.dp_size, 1)
        generation: int | None = max(0, core.generation + (-1, 1)[how % 2] * (how % 13 == 0))
        if how % 7 == 0 or not generation:
            generation = None
        dp_rank = place % (size + (how % 17 == 0)) if generation else (how % 19 == 0) * 1
        run = "another" if how % 23 == 0 else (None, core.run_id)[how % 2]
        resume = None
        if how // 96 % 5 == 0 and (generation or how % 29 == 0):
            position = max(decided.last_committed + claim // 4 % 5 - 3, -1)
            resume = m.CheckpointPosition(run_id=run or core.run_id, step=position)
        taken = max(step, -1) if claim & 256 else -1
        return m.HelloRank(
            client_id=(f"r{claim % 5}", f"good{self.births}-{dp_rank}")[how // 480 % 6 == 0],
            dp_rank=dp_rank,
            dp_size=size,
            generation=generation,
            run_id=run,
            prefetch_steps=claim // 20 % 3,
            taken=taken,
            committed=min(taken, max(step - claim // 64 % 3, -1)) + (claim % 41 == 0)
            if claim & 1024
            else -1,
            hungry=bool(claim & 512),
            received=[(at, claim // 32 % 2) for at in range(max(0, step - 1), max(0, step + 1))]
            if claim & 2048
            else [],
            resume=resume,
            saved=max(decided.last_committed - claim // 128 % 4, -1) if claim % 47 < 8 else -1,
        )

    def _hello_again(self, who: int, claim: int, how: int) -> None:
        if self.strangers:
            speaker = self.strangers[who % len(self.strangers)]
            again = self._any_hello(speaker.hello.dp_rank, claim, how)
            speaker.say(again.model_copy(update={"client_id": speaker.hello.client_id}))

    def _say(self, who: int, what: int, which: int) -> None:
        """Any word of a rank, about a step that may be open."""
        speakers = [*self.strangers, *self.good]
        if not speakers:
            return
        speaker, decided = speakers[who % len(speakers)], self.world.books.decided
        step = max(0, max(decided.plans, default=-1) + which % 5 - 3)
        plan = decided.plans.get(step)
        digest = "other" if plan is None or (which & 1024 and which & 2048) else plan.digest
        words: list[m.Message] = [
            m.Prepared(step=step, digest=digest), m.Prepared(step=step, digest=digest),
            m.Commit(step=step), m.Commit(step=step), m.Demand(taken=step, hungry=True),
            m.Demand(taken=step - 1, hungry=bool(which & 512)), m.Demand(taken=-1, hungry=True),
            m.PolicyVersion(policy_version=which // 8 % 5, first_step=step),
            m.CheckpointSaved(step=step - 1), m.Ping(),
        ]  # fmt: skip
        speaker.say(words[what % len(words)])

    def _cut_rank(self, who: int, *_: int) -> None:
        speakers = [*self.strangers, *self.good]
        if speakers:
            speakers[who % len(speakers)].line.cut()

    # -- the machine

    def _stall(self, who: int, *_: int) -> None:
        if self.world.lines:
            self.world.lines[who % len(self.world.lines)].stop_reading()

    def _read(self, *_: int) -> None:
        for line in self.world.lines:
            line.read_on()

    def _time(self, seconds: int, *_: int) -> None:
        self.world.after((0.1, 0.5, 1.1, 3.0, 6.0, 12.0, 70.0)[seconds % 7])

    def _lag(self, *_: int) -> None:
        self.world.prompt = not self.world.prompt

    def _sync(self, batches: int, *_: int) -> None:
        self.world.sync(1 + batches % 4)

    def _crash(self, kept: int, how: int, _: int) -> None:
        if how % 2 == 0 and self.world.durable:
            self.world.crash(kept % 5)
            for rank in self.good:
                if rank.line.failed is None:
                    rank.reconnect()

    # -- good peers at last

    async def _finish(self) -> None:
        """Whatever was said: what is here is trained, once, and everybody hears of the end."""
        world, decided = self.world, self.world.books.decided
        world.prompt = True
        self._read()
        await self._settle()
        size = DP_SIZE if not world.core.generation else (DP_SIZE, 3)[self.births % 2]
        last = Pusher(world, "last")
        last.connect()
        await self._settle()
        first = last.push([5, 6, 7, 8, 9])
        self.births += 1
        name = f"good{self.births}"
        ranks = [GoodRank(world, 0, size, None, name=name)]
        await self._settle()
        number = ranks[0].core.generation
        assert number == world.core.generation, "a new group is not welcome"
        ranks += [GoodRank(world, at, size, number, name=name) for at in range(1, size)]
        ending = False
        for _ in range(PATIENCE):
            await self._settle()
            assert not any(rank.lost for rank in ranks), [rank.line.failed for rank in ranks]
            for rank in ranks:
                rank.act()
            if first in last.answered and not ending:
                ending = True
                assert last.line is not None
                last.line.say(m.EndStream(force=True))
            if all(rank.done for rank in ranks):
                break
            world.after(1.0)
        else:
            raise AssertionError(f"it does not end: {world.core.waits_for(world.clock())}")
        await self._settle()
        assert len({tuple(rank.trained) for rank in ranks}) == 1, "ranks trained different steps"
        at, decided = world.core.statistics(), world.books.decided
        assert (at.buffered, at.in_flight, at.pushes_held) == (0, 0, 0), at
        assert all(where in ("done", "dropped") for where in decided.where.values())
        for rank in ranks:
            rank.say(m.Bye())
        await self._settle()
        for line in list(world.lines):
            line.cut()
        world.after(100.0)
        await self._settle()
        assert world.router._completion._over.is_set(), "it does not stop by itself"


def play(loop: VirtualLoop, script: Script) -> None:
    """Play a script; raises what it shows."""
    kind, words = script

    async def run() -> None:
        found = Play(loop, kind)
        try:
            await found.run(words)
        finally:
            found.world.end()
            await settle()

    loop.run_until_complete(run())


def shows(script: Script) -> BaseException | None:
    """What a script shows, in a loop of its own."""
    loop = VirtualLoop()
    try:
        play(loop, script)
    except (AssertionError, DispatcherError, LookupError, TypeError, ValueError) as error:
        return error
    finally:
        loop.close()
    return None


def shortened(script: Script, seconds: float = 60.0) -> Script:
    """A part of a script that shows a fault too, with as few words as are found in that time."""
    kind, words = script
    until, size = monotonic() + seconds, max(1, len(words) // 2)
    while monotonic() < until:
        for at in range(0, len(words), size):
            fewer = words[:at] + words[at + size :]
            if shows((kind, fewer)) is not None:
                words = fewer
                break
        else:
            if size == 1:
                break
            size //= 2
    return kind, words
