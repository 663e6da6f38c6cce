"""The whole service, played by events: real processes and sockets, a journal, and kill -9.

Every event is done, and known to be, before the next one, and a window is one batch: then what
comes of it does not depend on time. A step is legal if all ranks have the same header, each sample
was accepted and is in no other committed step, and a step that comes again is the same.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.histories.names import NAMES, make, thing
from tests.support.client import HeldStep, Producer, Trainer
from tests.support.server import ServeProcess

EVENTS = 22
FIELDS: dict[str, Any] = {"reward": 1.0}
_OPTIONS, _BOOKS, _ASKED = NAMES["serve"], NAMES["status"], NAMES["asked of status"]


class ServiceRun:
    """One run; `happens` performs an event, and returns what came of it."""

    def __init__(self, found: dict[str, Any], folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.found, self._folder = found, folder
        self.producers: dict[str, Producer] = {}
        self.next = {"p": 0, "q": 0}
        self.trainer: Trainer | None = None
        self.last = self.saved = -1
        self.version = 0
        self.sent: list[list[Any]] = []
        self.taken = self._loaded = False
        self._accepted: set[str] = set()
        self._trained: dict[int, list[str]] = {}
        self._seen: dict[int, list[str]] = {}
        self._books: dict[str, Any] = {}
        self._server = self._start()

    def eligible(self) -> int:
        """Samples that a step could be made of."""
        return int(self._server.status()[_ASKED["eligible"]])

    def close(self) -> None:
        self._hang_up()
        self._server.__exit__(None, None, None)
        shutil.rmtree(self._folder)

    def happens(self, event: list[Any]) -> dict[str, Any]:
        """What peers hear, and what has changed in the books."""
        kind, *values = event
        found = getattr(self, f"_{kind.replace(' ', '_')}")(*values)
        result = {"says": found} if found not in (None, []) else {}
        if kind == "end":
            return result
        status = self._server.status()
        assert status[_ASKED["balanced"]], status
        books = {name: self._plain(status[at]) or 0 for name, at in _BOOKS.items()}
        changed = {name: at for name, at in books.items() if self._books.get(name, 0) != at}
        self._books = books
        return result | ({"books": changed} if changed else {})

    # -- events ---------------------------------------------------------------------------------

    def _push(self, name: str, tokens: list[int], columns: dict[str, Any]) -> Any:
        producer = self._producer(name)
        first, self.next[name] = self.next[name], self.next[name] + len(tokens)
        return self._sent(producer, first, tokens, columns)

    def _push_again(self, name: str, first: int, tokens: list[int], columns: dict[str, Any]) -> Any:
        if name in self.producers:
            self.producers.pop(name).close()
        return self._sent(self._producer(name), first, tokens, columns)

    def _sent(self, producer: Producer, first: int, tokens: list[int], columns: Any) -> Any:
        names_of = NAMES["columns"]
        told = {names_of[name]: at for name, at in columns.items()}
        answer = producer.push(tokens, seq=first, **told)
        outcomes = [self._plain(outcome) for outcome in answer.outcomes]
        names = [f"{producer.client_id}/{first + at}" for at in range(len(tokens))]
        said = zip(names, outcomes, strict=True)
        self._accepted |= {sample for sample, outcome in said if outcome == "accepted"}
        return [outcomes, answer.reasons] if answer.reasons else outcomes

    def _over_http(self, names: list[str]) -> Any:
        """Samples as JSON lines, of the schema of the others."""
        lines = [
            {"sample_id": name, "fields": FIELDS | {"input_ids": [7] * 5, "loss_mask": [True] * 5}}
            for name in names
        ]
        answer = self._server.post("/v1/samples", "\n".join(map(json.dumps, lines)).encode())
        said = answer.json
        outcomes = [self._plain(each) for each in said.get("outcomes", [])]
        self._accepted |= {
            at for at, done in zip(names, outcomes, strict=False) if done == "accepted"
        }
        return [answer.status, outcomes]

    def _close_group(self, group: str) -> Any:
        return self._server.post(f"/v1/groups/{group}/close").status

    def _join(self) -> None:
        """A new process group, of which no rank has anything."""
        if self.trainer is not None:
            for rank in self.trainer.ranks:
                rank.close()
        self.trainer, self.taken = Trainer(self._server.endpoint, self.found["ranks"]), False
        self.trainer.committed, self._loaded = self.last, False

    def _load(self, step: int) -> None:
        """A new process group, that has loaded a checkpoint."""
        self._join()
        trainer, run = self.trainer, self._server.status()[_ASKED["run"]]
        assert trainer is not None
        for rank in trainer.ranks:
            position = make("loaded checkpoint", run=run, step=step)
            rank.send(
                make(
                    "loads",
                    client=rank.client_id, rank=rank.dp_rank, ranks=len(trainer.ranks),
                    generation=trainer.generation, checkpoint=position,
                )
            )  # fmt: skip
            welcomes = thing("welcome")
            while not isinstance(rank.receive()[0], welcomes):
                pass
            rank.steps.clear()
        trainer.committed, self._loaded = step, True
        self.last = step
        self._trained = {at: names for at, names in self._trained.items() if at <= step}

    def _train(self) -> Any:
        """The next step, or the one that is taken already."""
        found = None if self.taken else self._take()
        assert self.trainer is not None
        number = self.last + 1
        self.trainer.commit(number)
        for rank in self.trainer.ranks:
            rank.settle()
        self._trained[number] = self._seen[number]
        self.last, self.taken = number, False
        return found

    def _take(self) -> Any:
        """The next step is released to all ranks, and not committed."""
        assert self.trainer is not None
        parts = self.trainer.take()
        self.taken = True
        return self._legal(parts)

    def _reported(self, version: int) -> None:
        assert self.trainer is not None
        report = make("version report", version=version, from_step=self.last + 1)
        self.trainer.ranks[0].send(report)
        self.trainer.ranks[0].settle()

    def _saved(self, step: int) -> None:
        assert self.trainer is not None
        self.trainer.ranks[0].send(make("checkpoint report", step=step))
        self.trainer.ranks[0].settle()

    def _kill(self, ranks_live: bool) -> None:
        """The process is killed; another goes on from the journal. Ranks that live come back."""
        with Producer(self._server.endpoint, "listener") as listener:
            listener.ping()  # what was committed is durable
        self._server.__exit__(None, None, None)
        trainer, taken = self.trainer, self.taken
        for producer in self.producers.values():
            producer.close()
        self.producers, self.trainer = {}, None
        self._books = {}
        self._server = self._start()
        if trainer is None:
            return
        for rank in trainer.ranks:
            rank._endpoint = self._server.endpoint
        if ranks_live and not self._loaded:
            trainer.ranks = [rank.reconnect() for rank in trainer.ranks]
            self.trainer, self.taken = trainer, taken
        else:
            for rank in trainer.ranks:
                rank.close()

    def _end(self) -> Any:
        """Producers end the stream, and ranks train to its end; the process leaves by itself."""
        if self.trainer is None:
            self._join()
        if self.taken:
            self._train()
        for name in self.next:
            self._producer(name).end_stream()
        trainer, steps = self.trainer, []
        assert trainer is not None
        while parts := trainer.take():
            steps.append(self._legal(parts))
            self.last = number = parts[0].header.step
            self._trained[number] = self._seen[number]
            trainer.commit(number)
        for producer in self.producers.values():
            producer.bye()
        trainer.bye()
        self.producers, self.trainer = {}, None
        return [steps, self._server.wait()]

    # -- around it ------------------------------------------------------------------------------

    def _start(self) -> ServeProcess:
        options = {_OPTIONS[name]: at for name, at in self.found.items() if at is not None}
        server = ServeProcess(
            self._folder, warm=True, journal_dir=self._folder / "journal", **options
        )
        return server.__enter__()

    def _producer(self, name: str) -> Producer:
        if name not in self.producers:
            self.producers[name] = Producer(self._server.endpoint, name, first_seq=self.next[name])
        return self.producers[name]

    def _hang_up(self) -> None:
        for producer in self.producers.values():
            producer.close()
        for rank in self.trainer.ranks if self.trainer else ():
            rank.close()

    def _legal(self, parts: list[HeldStep]) -> dict[str, Any]:
        """Of a step what does not depend on the plan; that it is legal is checked."""
        header = parts[0].header
        names = [name for part in parts for name in part.sample_ids]
        assert header.step == self.last + 1
        assert len(names) == len(set(names)) == header.num_samples, "a sample is twice in a step"
        assert {len(part.micro_batches) for part in parts} == {header.num_micro_batches}
        before = {name for at, one in self._trained.items() if at < header.step for name in one}
        assert not before & set(names), "a sample is trained twice"
        assert set(names) <= self._accepted, "a sample was not accepted"
        known = self._seen.get(header.step)
        if known is not None and header.attempt == 0:
            assert known == sorted(names), "a step that comes again has other samples"
        self._seen[header.step] = sorted(names)
        return {"step": header.step, "samples": header.num_samples, "tokens": header.tokens}

    @staticmethod
    def _plain(found: Any) -> Any:
        if isinstance(found, dict):
            return {str(key): at for key, at in found.items() if at}
        return str(found) if isinstance(found, str) else found


def replay(history: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """What comes of a history's events today, one after the other."""
    run = ServiceRun(history["settings"], folder)
    try:
        for event, _ in history["events"]:
            yield run.happens(event)
    finally:
        run.close()


def record(seed: int, folder: Path) -> dict[str, Any]:
    """A history: events, and what came of each."""
    random = Random(seed)
    found = {
        "ranks": (ranks := random.choice([1, 2, 2, 3])), "batch": 2 * ranks, "window": 1,
        "micro-batch": random.choice([1, 2]), "wait": "10ms", "capacity": 1000,
        "retain": random.choice(["commit", "checkpoint"]),
        "groups stay in": random.choice(["step", "step", "ignore"]),
        "max staleness": random.choice([None, None, 1]),
    }  # fmt: skip
    run = ServiceRun(found, folder)
    events: list[Any] = []

    def do(*event: Any) -> None:
        events.append([[*event], run.happens([*event])])

    try:
        for _ in range(EVENTS):
            _act(random, run, do)
        do("end")
    finally:
        run.close()
    return {"seed": seed, "settings": found, "events": events}


def _act(random: Random, run: ServiceRun, do: Any) -> None:
    kinds = {
        "push": 7,
        "train": 7,
        "kill": 2,
        "join": 2,
        "http": 1,
        "version": 1,
        "again": 1,
        "load": 1,
    }
    (kind,) = random.choices([*kinds], [*kinds.values()])
    eligible = run.eligible()
    match kind:
        case "train" if run.trainer is not None and (run.taken or eligible >= run.found["batch"]):
            do("take" if not run.taken and random.random() < 0.3 else "train")
        case "kill":
            do("kill", random.random() < 0.5)
        case "join":
            do("join")
        case "http":
            do("over http", [f"web {random.randrange(20)}" for _ in range(random.randint(1, 3))])
        case "version" if run.trainer is not None:
            run.version += 1
            do("reported", run.version)
        case "again" if run.sent:
            do("push again", *random.choice(run.sent))
        case "load" if run.last >= 0 and run.found["retain"] == "checkpoint":
            do("load", random.randint(run.saved, run.last))
        case "load" if run.last >= 0 and run.trainer is not None:
            run.saved = run.last
            do("saved", run.last)
        case _:
            _push(random, run, do)


def _push(random: Random, run: ServiceRun, do: Any) -> None:
    name, count = random.choice("pq"), random.randint(1, 6)
    columns: dict[str, Any] = {}
    if random.random() < 0.3:
        size = random.randint(1, 2)
        columns = {"groups": [f"g{run.next[name]}{name}"] * size, "sizes": [2] * size}
        count = size
    if run.found["max staleness"] is not None:
        columns["versions"] = [max(0, run.version - random.choice([0, 0, 1]))] * count
    tokens = [random.randint(1, 30) for _ in range(count)]
    run.sent.append([name, run.next[name], tokens, columns])
    do("push", name, tokens, columns)
