"""Random histories of the core: producers, ranks, workers and the clock, all from one seed."""

from pathlib import Path
from random import Random
from typing import Any

from tests.histories.core import CoreRun

EVENTS = 90


def record(seed: int, folder: Path) -> dict[str, Any]:
    """A history: events, and what came of each."""
    random = Random(seed)
    player = Player(random, folder)
    try:
        while len(player.events) < EVENTS:
            player.act()
    finally:
        player.run.close()
    return {"seed": seed, "settings": player.run.found, "events": player.events}


def _settings(random: Random) -> dict[str, Any]:
    batch = random.choice([2, 4, 4, 6])
    by_groups = random.random() < 0.1
    return {
        "ranks": random.choice([1, 2, 2, 3]),
        "batch": batch,
        "window": batch + random.choice([0, 2, 4]),
        "capacity": batch + random.choice([4, 4, 8]),
        "tokens": random.choice([None, None, 200]),
        "bytes": random.choice([1 << 20, 1 << 20, 1200]),
        "blocked bytes": random.choice([1 << 20, 300]),
        "longest": random.choice([None, None, 30]),
        "wait": random.choice([0.0, 1.0, 2.5]),
        "by groups": by_groups,
        "keeps incomplete groups": random.random() < 0.2,
        "flushes": random.random() < 0.7,
        "retains": random.random() < 0.4,
        "max staleness": random.choice([None, None, 0, 1, 3]),
        "stale": random.choice(["drop", "drop", "prefer-oldest"]),
    }


class Player:
    """Does what peers may do, and now and then what they should not."""

    def __init__(self, random: Random, folder: Path) -> None:
        self.random = random
        self.run = CoreRun(_settings(random), folder)
        self.events: list[Any] = []
        self.next: dict[str, int] = {"p": 0, "q": 0}
        self.groups: list[list[Any]] = []  # producer, id, size, members to come
        self.version = self.births = self.named = 0
        self.lost: set[str] = set()
        self.saved = -1
        for producer in "pq":
            self.do("producer there", producer)
        if random.random() < 0.8:
            self.begin()

    def do(self, *event: Any) -> None:
        self.events.append([[*event], self.run.happens([*event])])

    def act(self) -> None:
        acts = {
            self.push: 22, self.push_group: 12, self.grow_group: 8, self.train: 24, self.idle: 6,
            self.plan: 6, self.time: 6, self.crash: 2, self.begin: 2, self.reconnect: 3,
            self.push_again: 3, self.lose_producer: 3, self.close_group: 2, self.version_up: 4,
            self.end_phase: 1, self.end_stream: 1, self.missing: 2, self.save: 2, self.rewind: 1,
            self.rarely: 3,
        }  # fmt: skip
        (act,) = self.random.choices([*acts], [*acts.values()])
        act()

    # -- producers ------------------------------------------------------------------------------

    def _sample(self, name: str, group: str | None = None, size: int = 1) -> list[Any]:
        random = self.random
        tokens = random.choice([1, 3, 8, 8, 20, 40, 99, 101] if random.random() < 0.5 else [4])
        version: int | None = max(0, self.version - random.choice([0, 0, 0, 1, 2, 5]))
        if random.random() < (0.6 if self.run.found["max staleness"] is None else 0.1):
            version = None
        dtype = "int32" if random.random() < 0.02 else "int64"
        return [name, tokens, group, size, version, dtype, None]

    def _send(self, producer: str, samples: list[list[Any]], *, named: bool = False) -> None:
        if producer in self.lost:
            self.do("producer there", producer)
            self.lost.discard(producer)
        first = self.next[producer]
        self.next[producer] += len(samples)
        if self.random.random() < 0.2:
            for sample in samples:
                sample[-1] = f"{producer}.1/{first}"
        waiting = [at for who, at in self.run.pushes if who == producer]
        floor = max(0, min(waiting[-3:], default=0))
        self.do("push", producer, first, samples, named, floor)

    def push(self) -> None:
        producer, count = self.random.choice("pq"), self.random.choice([1, 2, 2, 3, 5])
        first = self.next[producer]
        if self.random.random() < 0.2:
            names = [f"named {self.random.randrange(30)}" for _ in range(count)]
            if self.random.random() < 0.3:
                self.do("push over http", [self._sample(name) for name in names])
            else:
                self._send(producer, [self._sample(name) for name in names], named=True)
            return
        self._send(producer, [self._sample(f"{producer}/{first + at}") for at in range(count)])

    def push_group(self) -> None:
        random, producer = self.random, self.random.choice("pq")
        size = random.randint(2, self.run.found["batch"] + (random.random() < 0.1))
        now = size if random.random() < 0.5 else random.randrange(1, size)
        told = random.choice([size, size, size, 0, -1])
        first = self.next[producer]
        group = f"g{len(self.groups)}"
        self.groups.append([producer, group, told, size - now])
        self._send(
            producer, [self._sample(f"{producer}/{first + at}", group, told) for at in range(now)]
        )

    def grow_group(self) -> None:
        """Mostly a member that is still to come; now and then one too many."""
        begun = [group for group in self.groups if group[3] > 0 or self.random.random() < 0.05]
        if not begun:
            return self.push_group()
        group = self.random.choice(begun)
        producer = group[0] if self.random.random() < 0.8 else self.random.choice("pq")
        group[3] -= 1
        first = self.next[producer]
        self._send(producer, [self._sample(f"{producer}/{first}", group[1], group[2])])
        return None

    def push_again(self) -> None:
        """What a producer does once it is connected again."""
        if not self.run.pushes:
            return
        producer, first = self.random.choice(sorted(self.run.pushes))
        self.do("producer lost", producer, False)
        self.do("producer there", producer)
        self.do("push", producer, first, *self.run.pushes[producer, first], 0)

    def lose_producer(self) -> None:
        producer, random = self.random.choice("pq"), self.random
        if random.random() < 0.3:
            self.do("producer leaves", producer)
        self.do("producer lost", producer, random.random() < 0.3)
        self.lost.add(producer)

    def close_group(self) -> None:
        if not self.groups:
            return
        producer, group, size, _ = self.random.choice(self.groups)
        if self.random.random() < 0.3:
            numbers = [self.next[producer]]
            self.next[producer] += 1
            self.do("withdraw", group, size if size > 0 else None, producer, numbers)
            return
        size = self.random.choice([None, None, 1, 2, 3])
        self.do("close group", group, size, self.random.choice([None, None, True, False]))

    def end_phase(self) -> None:
        producer = self.random.choice("pq")
        self.do("end phase", self.version + 1, producer, self.random.random() < 0.3)

    def end_stream(self) -> None:
        if len(self.events) < EVENTS / 2:
            return
        self.do("end stream", self.random.choice("pq"), self.random.random() < 0.4)

    # -- ranks ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """All ranks of a new process group join, mostly."""
        begun = any(self.run.clients) or self.random.random() < 0.05
        other = begun and self.random.random() < 0.3
        self._join_all(self.random.randint(1, 4) if other else self.run.found["ranks"], {})

    def _join_all(self, ranks: int, how: dict[str, Any]) -> None:
        self.births += 1
        ahead = self.random.choice([0, 1, 1, 2])
        for rank in range(ranks if self.random.random() < 0.9 else ranks - 1):
            generation = {"generation": 0} if rank else {}
            client = f"r{rank}.{self.births}"
            self.do("join", rank, ranks, client, {"ahead": ahead} | generation | how)
            if 0 not in self.run.there:
                return  # refused

    def reconnect(self) -> None:
        if not self.run.clients:
            return self.begin()
        random, run = self.random, self.run
        rank = random.choice(sorted(run.clients))
        client = run.clients[rank]
        if random.random() < 0.7:
            self.do("leave", rank, client, random.random() < 0.1)
        how = {"generation": 0 if random.random() < 0.95 else 1}
        if random.random() < 0.3:
            self.births += 1
            client = f"r{rank}.{self.births}"
        else:
            how |= {"taken": run.taken[rank], "committed": run.committed[rank], "holds": 1}
        self.do("join", rank, run.ranks, client, how)
        return None

    def idle(self) -> None:
        for rank in sorted(self.run.there):
            self.do("demand", rank, self.run.taken[rank], True)

    def plan(self) -> None:
        if self.run.wanted is not None:
            self.do("plan", self.random.random() < 0.7)

    def train(self) -> None:
        """All ranks go through the next step, or some of them halfway."""
        run, random = self.run, self.random
        ranks, halfway = sorted(run.there), random.random() < 0.2
        if any(run.taken[rank] not in run.released[rank] for rank in ranks):
            self.idle()
        self.plan()
        for rank in ranks:
            for step, attempt in sorted(run.holds[rank].items()):
                if step > run.committed[rank] and not (halfway and random.random() < 0.3):
                    self.do("prepared", rank, step, attempt)
        for rank in ranks:
            following = run.taken[rank] + 1
            if following in run.released[rank]:
                self.do("demand", rank, following, False)
                if not (halfway and random.random() < 0.3):
                    self.do("commit", rank, following)

    def missing(self) -> None:
        """A rank cannot get samples of a step that it holds."""
        having = [rank for rank in sorted(self.run.there) if self.run.holds[rank]]
        if not having:
            return
        rank = self.random.choice(having)
        step, attempt = self.random.choice(sorted(self.run.holds[rank].items()))
        ids = self.run.stored_in(step)
        if ids:
            self.do("missing", rank, step, attempt, ids[: self.random.choice([1, 1, 9])])

    def version_up(self) -> None:
        self.version += self.random.choice([0, 1, 1, 2])
        self.do("version", self.version, self.run.last_committed + 1)

    def save(self) -> None:
        if 0 in self.run.there and self.run.last_committed >= 0:
            self.saved = self.random.randint(max(0, self.saved), self.run.last_committed + 0)
            self.do("checkpoint saved", self.saved)

    def rewind(self) -> None:
        """A new process group has loaded a checkpoint; now and then one that is too old."""
        if self.run.last_committed < 0:
            return
        step = self.random.randint(max(-1, self.saved - 1), self.run.last_committed)
        self._join_all(self.run.found["ranks"], {"checkpoint": step})

    # -- the rest -------------------------------------------------------------------------------

    def time(self) -> None:
        self.do("time", self.random.choice([0.5, 1.0, 3.0, 10.0, 25.0, 70.0]))

    def crash(self) -> None:
        """Live ranks and producers come back, mostly."""
        self.do("crash")
        run, random = self.run, self.random
        for producer in "pq":
            if random.random() < 0.8:
                self.do("producer there", producer)
        for rank, client in sorted(run.clients.items()):
            if random.random() < 0.9:
                how = {"taken": run.taken[rank], "committed": run.committed[rank]}
                self.do("join", rank, run.ranks, client, how | {"generation": 0, "holds": 1})

    def rarely(self) -> None:
        random, found = self.random, self.run.found
        match random.randrange(5):
            case 0:
                self.do("worker", "there", f"w{random.randrange(2)}")
            case 1:
                self.do("worker", "gone", f"w{random.randrange(2)}")
            case 2 | 3 if self.run.asked:
                asked = self.run.asked.pop(0)
                left = asked["keys"][:1] if random.random() < 0.2 else []
                self.do("freed", asked["worker"], asked.get("number", 0), left)
            case 4 if random.random() < 0.3:
                window = found["batch"] + random.choice([0, 2, 6])
                self.do("configure", window, window + 4, random.choice([0.0, 1.0]))
            case _ if random.random() < 0.05:
                self.do("drain")
