"""A core, played by events: each is a list of plain values, and so is all that comes of it.

The runner is everything around the core: a planner that takes the oldest, a journal on disk, a
clock. Plans are no part of a history: what is told of a step is which samples it has, sorted. That
a step is legal is checked here, whatever the history says: every sample once, at most one plan a
step, groups whole, the same number of micro-batches on all ranks, all ranks the same step.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from tests.histories.names import call, error, held, make, plain, read, told, value

#: A step is planned at most so often by one event: else the core asks for ever.
MOST_PLANS = 50
WALL = 2.0**30
STORE = "file:///store"
MICRO_BATCH = 2


def settings(found: dict[str, Any]) -> Any:
    """The core's settings, from a history's."""
    limits = make(
        "limits",
        samples=found["capacity"], group=found["batch"], tokens=found["tokens"],
        bytes=found["bytes"], longest_sample=100, blocked_bytes=found["blocked bytes"],
        stores=frozenset({STORE}), bytes_in_stores=1 << 20,
    )  # fmt: skip
    trigger = make("trigger", batch=found["batch"], window=found["window"], wait=found["wait"])
    return make(
        "config",
        ranks=found["ranks"], limits=limits, trigger=trigger, target=0.01,
        by_groups=found["by groups"], keeps_incomplete_groups=found["keeps incomplete groups"],
        last_step_may_be_smaller=found["flushes"], longest=found["longest"], durable=True,
        retains=found["retains"], any_size=_any_size, group_timeout=20.0, producer_timeout=30.0,
        max_staleness=found["max staleness"], stale=make("stale policy", value(found["stale"])),
        ids_remembered=200,
    )  # fmt: skip


def _any_size(ranks: int) -> None:
    """The number of ranks may change."""


class CoreRun:
    """One run; `happens` performs an event, and returns what came of it.

    clients, holds, released, taken, committed: by rank of the newest generation, where it stands;
    there: those that may speak. asked: what workers were asked for, unanswered.
    """

    def __init__(self, found: dict[str, Any], folder: Path) -> None:
        self.found, self._folder, self._config = found, folder, settings(found)
        self.now = 0.0
        self.ranks = found["ranks"]
        self.pushes: dict[tuple[str, int], tuple[list[list[Any]], bool]] = {}
        self.clients: dict[int, str] = {}
        self.there: set[int] = set()
        self._joining = 0, 0, "", False, False
        self.holds: dict[int, dict[int, int]] = {}
        self.released: dict[int, set[int]] = {}
        self.taken: dict[int, int] = {}
        self.committed: dict[int, int] = {}
        self.wanted: tuple[str, Any] | None = None
        self.asked: list[dict[str, Any]] = []
        self.last_committed = -1
        self._digests: dict[tuple[int, int], str] = {}
        self._samples: dict[int, list[str]] = {}
        self._stored: set[str] = set()
        self._said: list[Any] = []
        self._books: dict[str, Any] = {}
        self._spilling: list[Any] = []
        shutil.rmtree(folder, ignore_errors=True)
        self.core, recovered = self._open()
        self._perform(call("restore", self.core, recovered=recovered, now=self.now))

    def close(self) -> None:
        call("close", self.journal)
        shutil.rmtree(self._folder)

    def stored_in(self, step: int) -> list[str]:
        """Samples of a step whose payloads are in a payload store."""
        return [name for name in self._samples.get(step, []) if name in self._stored]

    def happens(self, event: list[Any]) -> dict[str, Any]:
        """What the core says, and what has changed in its books."""
        self._said = []
        kind, *values = event
        try:
            getattr(self, f"_{kind.replace(' ', '_')}")(*values)
        except error() as refused:
            self._said.append(["raises", plain(refused)])
        found: dict[str, Any] = {"says": self._said} if self._said else {}
        statistics = call("statistics", self.core)
        assert held("balanced", statistics), "the books do not balance"
        books = read("books", statistics)
        changed = {name: at for name, at in books.items() if self._books.get(name) != at}
        changed |= {name: 0 for name in self._books if name not in books}
        self._books = books
        return found | ({"books": changed} if changed else {})

    # -- events ---------------------------------------------------------------------------------

    def _push(
        self, producer: str, first: int, samples: list[list[Any]], named: bool, floor: int
    ) -> None:
        self.pushes[producer, first] = samples, named
        self._tell("push", push=self._made(producer, first, samples, named, floor), now=self.now)

    def _push_over_http(self, samples: list[list[Any]]) -> None:
        push = self._made("", 0, samples, True, 0)
        self._tell("push", push=push, now=self.now, may_wait=False)

    def _made(
        self, producer: str, first: int, samples: list[list[Any]], named: bool, floor: int
    ) -> Any:
        made: list[Any] = []
        for name, tokens, group, size, version, dtype, key in samples:
            schema = make("schema", (make("field", "input_ids", make("dtype", value(dtype))),))
            nbytes = tokens * (8 if dtype == "int64" else 4)
            payload: Any = memoryview(bytes(nbytes))
            if key is not None:
                self._stored.add(name)
                stored = make("object", STORE, key, 1000)
                payload = make("reference", stored, 8 * (len(made) % 8), nbytes)
            made.append(
                make(
                    "sample",
                    id=name, tokens=tokens, loss_tokens=tokens - 1, schema=schema, payload=payload,
                    group=group, size=size, version=version,
                )
            )  # fmt: skip
        stored = any(sample[-1] is not None for sample in samples)
        return make(
            "push",
            producer=producer, first=first, samples=tuple(made), floor=floor,
            given_ids=named, stored=stored,
        )  # fmt: skip

    def _producer_there(self, producer: str) -> None:
        self._tell("producer there", producer=producer)

    def _producer_lost(self, producer: str, for_good: bool) -> None:
        self._tell("producer lost", producer=producer, now=self.now, for_good=for_good)

    def _producer_leaves(self, producer: str) -> None:
        self._tell("producer leaves", producer=producer, now=self.now)

    def _close_group(self, group: str, size: int | None, keep: bool | None) -> None:
        self._tell("close group", group=group, size=size, keep=keep, now=self.now)

    def _withdraw(self, group: str, size: int | None, producer: str, numbers: list[int]) -> None:
        self._tell(
            "withdraw", group=group, size=size, producer=producer, numbers=numbers, now=self.now
        )

    def _end_phase(self, version: int, producer: str, force: bool) -> None:
        self._tell("end phase", version=version, producer=producer, force=force, now=self.now)

    def _end_stream(self, producer: str, force: bool) -> None:
        self._tell("end stream", producer=producer, force=force, now=self.now)

    def _drain(self) -> None:
        self._tell("drain", now=self.now)

    def _worker(self, word: str, worker: str) -> None:
        self._tell("worker", what=make(f"worker {word}", worker=worker), now=self.now)

    def _freed(self, worker: str, number: int, left: list[str]) -> None:
        what = make("freed", worker=worker, number=number, left=tuple(left))
        self._tell("worker", what=what, now=self.now)

    def _join(self, rank: int, ranks: int, client: str, how: dict[str, Any]) -> None:
        """how: `generation`, of the current one (0) or older, none for a new one; what it has."""
        older = how.get("generation")
        current = held("current generation", self.core)
        checkpoint = how.get("checkpoint")
        again = older is not None and self.clients.get(rank) == client
        steps = self.holds.get(rank, {}) if again else {}
        hello = make(
            "rank",
            client=client, rank=rank, ranks=ranks,
            generation=None if older is None else current - older,
            ahead=how.get("ahead", 1), idle=how.get("idle", False),
            taken=how.get("taken", -1), committed=how.get("committed", -1),
            received=dict.fromkeys(steps, 1) if how.get("holds") else {},
            attempts=dict(steps) if how.get("holds") else {},
            checkpoint=None if checkpoint is None
            else make("checkpoint", run="run", step=checkpoint),
        )  # fmt: skip
        self._joining = rank, ranks, client, older is None, again and checkpoint is None
        self._tell("join", hello=hello, now=self.now)

    def _welcomed(self, committed: int) -> None:
        rank, ranks, client, new, again = self._joining
        if new:
            self.ranks, self.clients = ranks, {}
        self.clients[rank] = client
        self.there.add(rank)
        if not again:
            self.holds[rank], self.released[rank] = {}, set()
            self.taken[rank] = self.committed[rank] = committed

    def _leave(self, rank: int, client: str, for_good: bool) -> None:
        self.there.discard(rank)
        self._tell("leave", rank=rank, client=client, now=self.now, for_good=for_good)

    def _demand(self, rank: int, taken: int, idle: bool) -> None:
        self.taken[rank] = taken
        self._tell("demand", rank=rank, taken=taken, idle=idle, now=self.now)

    def _prepared(self, rank: int, step: int, attempt: int) -> None:
        digest = self._digests.get((step, attempt), "of nothing")
        self._tell("prepared", rank=rank, step=step, digest=digest, attempt=attempt, now=self.now)

    def _missing(self, rank: int, step: int, attempt: int, ids: list[str]) -> None:
        missing = make("missing", step=step, attempt=attempt, ids=tuple(ids))
        self._tell("missing", rank=rank, missing=missing, now=self.now)

    def _commit(self, rank: int, step: int) -> None:
        self.committed[rank] = step
        self._tell("commit", rank=rank, step=step, now=self.now)

    def _version(self, version: int, from_step: int) -> None:
        self._tell("version", version=version, from_step=from_step, now=self.now)

    def _checkpoint_saved(self, step: int) -> None:
        self._tell("checkpoint saved", rank=0, step=step)

    def _configure(self, window: int, capacity: int, wait: float) -> None:
        tuning = make("tuning", window=window, capacity=capacity, wait=wait, target=0.01)
        self._tell("configure", tuning=tuning, now=self.now)

    def _time(self, seconds: float) -> None:
        """It passes, and what is due is done when it is due."""
        end = self.now + seconds
        for _ in range(1000):
            due = call("due", self.core)
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            began = len(self._said)
            self._tell("tick", now=self.now)
            if len(self._said) > began:
                self._said.insert(began, ["at", round(self.now, 3)])
        else:
            raise AssertionError("a tick does not do what is due")
        self.now = end

    def _plan(self, good: bool) -> None:
        """The planner answers; `good`: a plan that needs no company."""
        for _ in range(MOST_PLANS):
            if self.wanted is None:
                return
            (word, wanted), self.wanted = self.wanted, None
            answer = self._planned(wanted, good=good)
            words = {"plan": "planned", "plan again": "planned again"}
            self._tell(words[word], wanted=wanted, plan=answer, now=self.now)
        raise AssertionError("the core asks for plans without end")

    def _crash(self) -> None:
        """The process dies; another goes on from the journal, and nobody has reconnected."""
        assert call("close", self.journal)
        self.wanted, self.asked, self.there = None, [], set()
        self.core, recovered = self._open()
        self._said.append(["recovers", read("recovered", recovered)])
        self._perform(call("restore", self.core, recovered=recovered, now=self.now))
        self._tell("tick", now=self.now)

    # -- everything around the core -------------------------------------------------------------

    def _open(self) -> tuple[Any, Any]:
        self.journal, recovered = make(
            "journal",
            directory=self._folder, sync=make("journal policy", "off"),
            to_wall=lambda at: at + WALL, from_wall=lambda at: at - WALL,
            index_bytes=1 << 20, segment_bytes=16 << 10, ids_remembered=200,
        )  # fmt: skip
        return make("core", config=self._config, run="run"), recovered

    def _tell(self, word: str, **parts: Any) -> None:
        self._perform(call(word, self.core, **parts))

    def _perform(self, decision: Any) -> None:
        if facts := held("facts", decision):
            call("append", self.journal, facts=facts, totals=held("totals", decision))
        for effect in held("effects", decision):
            if (found := told(effect)) is None:
                continue
            word, said = found
            if word == "deliver":
                self._deliver(effect)
                step = call("step", self.core, number=held("delivery step", effect))
                said |= {"samples": len(plain(step)["samples"])}
            self._said.append([word, said] if said else [word])
            self._do(word, effect, said)
        spilling, self._spilling = self._spilling, []
        for entries in spilling:
            self._tell("spilled", entries=entries, now=self.now)

    def _do(self, word: str, effect: Any, said: dict[str, Any]) -> None:
        match word:
            case "plan" | "plan again":
                assert self.wanted is None, "two plans at a time"
                self.wanted = word, effect
            case "spill":
                self._spilling.append(held("spilled", effect))
            case "free":
                self.asked.append(said)
            case "release":
                for rank in held("release ranks", effect):
                    self.released.setdefault(rank, set()).add(held("delivery step", effect))
            case "withdrawn":
                for steps in self.holds.values():
                    steps.pop(held("delivery step", effect), None)
                self._samples.pop(held("delivery step", effect), None)
            case "committed":
                self.last_committed = max(self.last_committed, said.get("step", 0))
            case "rewound":
                self.last_committed = said.get("after", 0)
            case "welcome":
                self._welcomed(held("welcome committed", effect))
            case "failed":
                self.there -= {at for at in self.there if self.clients[at] in said["clients"]}

    def _deliver(self, effect: Any) -> None:
        """A rank is given a step: it is legal, and the same for all."""
        rank, number = held("delivery rank", effect), held("delivery step", effect)
        step = call("step", self.core, number=number)
        found, micro_batches = plain(step), held("micro-batches", step)
        assert found["attempt"] == held("delivery attempt", effect)
        assert found["planned"], "a step without a plan is delivered"
        assert len(micro_batches) == self.ranks, "a step for other ranks is delivered"
        assert len(set(map(len, micro_batches))) == 1, "ranks have unequal micro-batches"
        ids = found["samples"]
        assert len(ids) == len(set(ids)), "a sample is twice in a step"
        digest = held("step digest", step)
        known = self._digests.setdefault((number, found["attempt"]), digest)
        if known != digest:  # planned again for another number of ranks: the same samples
            assert self._samples[number] == ids, "a step that comes again has other samples"
            self._digests[number, found["attempt"]] = digest
        self._samples[number] = ids
        counts = Counter(name for one in self._samples.values() for name in one)
        assert max(counts.values()) == 1, f"trained twice: {counts.most_common(1)}"
        self.holds.setdefault(rank, {})[number] = found["attempt"]

    def _planned(self, wanted: Any, *, good: bool) -> Any:
        """Of the oldest, groups whole, what has to go first; dealt to the ranks in turn."""
        entries, take, ranks = held("window", wanted), held("take", wanted), held("ranks", wanted)
        due = [*held("must go", wanted)]
        units = [[*members] for _, members in groupby(range(len(entries)), self._unit(entries))]
        units.sort(key=lambda unit: not any(due[at] for at in unit))
        by_groups = self.found["by groups"]
        chosen: list[list[int]] = []
        for unit in units:
            if (
                sum(1 if by_groups else len(one) for one in chosen)
                + (1 if by_groups else len(unit))
                <= take
            ):
                chosen.append(unit)
        assert chosen, "nothing to choose from"
        of_ranks: list[list[int]] = [[] for _ in range(ranks)]
        for at in sorted(at for unit in chosen for at in unit):
            min(of_ranks, key=len).append(at)
        each = max(1, ceil(max(map(len, of_ranks)) / MICRO_BATCH))
        counts = [
            [max(0, min(MICRO_BATCH, len(rank) - MICRO_BATCH * at)) for at in range(each)]
            for rank in of_ranks
        ]
        cost = np.ones((ranks, each))
        cost[0, 0] += 0.0 if good or ranks == 1 else 1.0
        order = np.array([at for rank in of_ranks for at in rank], np.int64)
        return make(
            "plan",
            chosen=order, counts=np.array(counts, np.int64), cost=cost,
            sync=make("sync", value("micro-step")),
            plain_imbalance=0.0, plain_excess=0.0, bound=1.0,
        )  # fmt: skip

    @staticmethod
    def _unit(entries: Any) -> Any:
        def unit(at: int) -> tuple[int, int]:
            group = held("entry group", entries[at])
            return group, at if group < 0 else -1

        return unit


def replay(history: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """What comes of a history's events today, one after the other."""
    run = CoreRun(history["settings"], folder)
    try:
        for event, _ in history["events"]:
            yield run.happens(event)
    finally:
        run.close()
