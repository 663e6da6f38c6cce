"""The processes of a chaos run: one dispatcher, its producers and its ranks, and what is theirs.

Every process ends with the cluster, whatever happens. Clients reach the dispatcher through a proxy
each. Progress is read from what the ranks write down.
"""

import http.client
import json
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self

from tests.chaos.actors.clock import JUMP
from tests.chaos.cluster.processes import (
    Group,
    Killable,
    NotInTime,
    Process,
    Stalled,
    mount,
    start_group,
)
from tests.chaos.cluster.proxy import Proxy
from tests.chaos.cluster.stores import open_engine
from tests.chaos.cluster.stores.store import Store
from tests.chaos.cluster.torchrun import start_torchrun, torch_group
from tests.chaos.settings import Settings
from tests.chaos.verdict.history import History, read_producer, read_rank
from tests.support.addresses import free_port
from tests.support.server import series

POLL_S = 0.01
#: Within these seconds a process starts, on a machine that has other things to do, too: that takes
#: as long with a planted bug, so there is no hurry.
START_S = 60.0


class Cluster:
    """Everything that runs, and the hands to disturb it with."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        #: Where the journal is; a small file system of its own if `settings.small_disk`.
        self.disk = folder / "disk"
        port = free_port()
        self.listen, self.http = ("127.0.0.1", port), ("127.0.0.1", free_port(port))
        self.proxies: dict[str, Proxy] = {}
        self.producers: list[Process] = []
        self.groups: list[Group] = []
        self.returned: set[tuple[int, int]] = set()
        self.final: dict[str, Any] | None = None
        #: The newest step that may have been under way at the last disturbance.
        self.disturbed_at = -1
        self._strays: list[Killable] = []
        self._torchrun: Process | None = None
        self._jumps = folder / "jump"
        #: How often the disk was full, and the dispatcher said so.
        self.times_full = 0
        self.looks: list[dict[str, Any]] = []
        self.stuck: dict[str, Any] | None = None
        #: Objects that were left in the payload store when everything had come to its end.
        self.left: Mapping[str, Sequence[str]] = {}
        #: Whether the stream was ended already, by a fault.
        self._stream_ended = False
        (folder / "groups").mkdir(parents=True)
        self.disk.mkdir()
        self._store: Store | None = None

    def __enter__(self) -> Self:
        try:
            if self.settings.small_disk:
                mount(self.disk)
            if self.settings.references:
                self._store = open_engine(self.settings.engine, self.folder / "volume")
            self.dispatcher = self.start_dispatcher()
            names = [f"rank-{at}" for at in range(self.settings.dp_sizes[-1])]
            names += [f"producer-{at}" for at in range(self.settings.producers)]
            self.proxies = {name: Proxy(self.listen) for name in names}
            self.await_ready()
            self.producers = [self._producer(at) for at in range(self.settings.producers)]
            self.restart_group()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def group(self) -> Group:
        """The newest process group."""
        return self.groups[-1]

    @property
    def size(self) -> int:
        """How many DP ranks it has."""
        return len(self.group.seen)

    @property
    def clients(self) -> list[str]:
        """Names of the proxies of what runs now."""
        ranks = [f"rank-{at}" for at in range(self.size)]
        return ranks + [f"producer-{at}" for at in range(self.settings.producers)]

    @property
    def store(self) -> Store:
        """Where samples lie that go by reference, with `settings.references`."""
        assert self._store is not None, "this run has no payload store"
        return self._store

    # -- hands ------------------------------------------------------------------------------

    def disturb(self) -> None:
        """Note that what is under way now says nothing about recovery."""
        self.disturbed_at = max(self.disturbed_at, *(one.newest for one in self.groups[-2:]))

    def restart_dispatcher(self) -> None:
        """Kill -9, and start again on the same journal; returns when it is ready."""
        self.disturb()
        self.dispatcher.kill()
        self.dispatcher = self.start_dispatcher()
        self.await_ready()

    def restart_producer(self, number: int) -> None:
        """Kill -9, and start again where its history ends."""
        self.disturb()
        self.producers[number].kill()
        self.producers[number] = self._producer(number)

    def restart_group(
        self,
        spared: int | None = None,
        size: int | None = None,
        resume: Callable[[int, int], int] | None = None,
    ) -> None:
        """Kill -9 every rank but one, and start a new process group, as torchrun does.

        size: of the new one, if it is another. resume: chooses the step of the checkpoint that it
        loads, from the last that was saved to the last that all ranks had committed.
        """
        before = self.size if self.groups else self.settings.dp_size
        if self.groups:
            self.disturb()
            if self._torchrun is not None and size not in (None, before):
                self._torchrun.kill()  # first, or it would start its ranks again
                self._torchrun = None
            for rank, process in enumerate(self.group.ranks):
                if rank == spared:
                    self._strays.append(process)
                else:
                    process.kill()
        step = None if resume is None else resume(*self._checkpoints())
        self.groups.append(self._start_group(size or before, step))

    def _checkpoints(self) -> tuple[int, int]:
        self.group.look()
        saved = max(one.saved for group in self.groups for one in group.seen)
        trained = min(max(one.committed, default=-1) for one in self.group.seen)
        return saved, max(saved, trained)

    def _start_group(self, size: int, resume: int | None) -> Group:
        launch = len(self.groups)
        endpoints = [self.proxies[f"rank-{at}"].endpoint for at in range(size)]
        folder = self.folder / "groups" / str(launch)
        if self.settings.torchrun:
            if self._torchrun is None:
                self._torchrun = start_torchrun(
                    folder.parent, launch, self.settings.max_split, endpoints
                )
            return torch_group(launch, folder, self._torchrun, size)
        options = ["--max-split", str(self.settings.max_split)]
        options += [] if resume is None else ["--resume", str(resume)]
        if self.settings.retain:
            options += ["--behind", str(self.settings.max_open_steps)]
        return start_group(launch, folder, endpoints, options, self._env())

    def jump_clock(self, seconds: float) -> None:
        """The dispatcher's clock says so much more, or less, from now on."""
        self.disturb()
        self._jumps.write_text(str(seconds))
        self.dispatcher.signal(JUMP)
        self.wait_for(lambda: not self._jumps.exists(), "the clock jumps")

    # -- waiting ----------------------------------------------------------------------------

    def wait_for(self, true: Callable[[], object], what: str, patience: float = 0) -> None:
        """Return once `true()` is. Raises Stalled when it is not in time."""
        deadline = monotonic() + (patience or self.settings.patience_s)
        while not true():
            self._check_alive()
            if monotonic() > deadline:
                raise NotInTime(f"{what}: not in time")
            sleep(POLL_S)

    def await_ready(self) -> None:
        """Wait until the dispatcher answers on both planes."""
        ready = "the dispatcher is ready"
        self.wait_for(lambda: self.ask("GET", "/readyz") is not None, ready, START_S)

    def await_group(self) -> None:
        """Wait until every rank of the newest process group belongs to its generation."""

        def has_begun() -> bool:
            self.group.look()
            return all(one.began is not None for one in self.group.seen)

        self.wait_for(has_begun, f"group {self.group.launch} has begun", START_S)

    def await_recovery(self) -> float:
        """Wait until all ranks commit a step that was planned after the disturbance; when."""
        self.await_group()
        # A rank holds at most the step that it trains and one ahead of it.
        beyond = self.disturbed_at + 1
        self.wait_for(
            lambda: self.group.committed_beyond(beyond) is not None,
            f"all ranks of group {self.group.launch} commit a step beyond {beyond}",
        )
        at = self.group.committed_beyond(beyond)
        assert at is not None
        return at

    def await_steps(self, more: int) -> None:
        """Wait until all ranks have committed so many steps more, each of which may take long."""
        self.await_group()
        newest = self.group.newest
        for step in range(newest, newest + more):
            self._await_step_after(step)

    def _await_step_after(self, step: int) -> None:
        self.wait_for(
            lambda: self.group.committed_beyond(step) is not None, f"step {step + 1} goes by"
        )

    def settle(self, process: Killable, patience: float) -> None:
        """Give a process time to end; the checker judges what it wrote before."""
        with suppress(Stalled):
            self.wait_for(lambda: process.code is not None, "it ends", patience)
        process.kill()

    def ask(self, method: str, path: str) -> bytes | None:
        """The answer of the HTTP plane; None if there is none, or an unhappy one."""
        host, port = self.http
        connection = http.client.HTTPConnection(host, port, timeout=5)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
            return body if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def scrape(self) -> dict[str, float]:
        """What /metrics says; nothing while there is no answer."""
        body = self.ask("GET", "/metrics")
        return {} if body is None else series(body.decode())

    def look(self) -> dict[str, Any]:
        """What /statusz says, for the checker too; nothing while there is no answer."""
        body = self.ask("GET", "/statusz")
        if body is None:
            return {}
        status: dict[str, Any] = json.loads(body)
        self.looks.append(status)
        return status

    # -- the end ----------------------------------------------------------------------------

    def finish(self) -> None:
        """End the stream, wait until all is committed, note the last status, let all leave."""
        patience = self.settings.patience_s
        self._end_stream()
        self.wait_for(self._drained, "everything is committed")
        for rank in self.group.ranks:
            rank.release()
        for process in [*self.group.ranks, self.dispatcher]:
            if process.wait(patience) != 0:
                raise Stalled("a process ended with an error")

    def _end_stream(self) -> None:
        """Let producers finish, then say for all of them that nothing comes any more."""
        for producer in self.producers:
            producer.signal(signal.SIGTERM)
        for producer in self.producers:
            # A process that was only just started dies of it, and has pushed nothing.
            code = producer.wait(self.settings.patience_s)
            if code not in (0, -signal.SIGTERM):
                raise Stalled(f"a producer ended with {code}")
        self.wait_for(lambda: self.ask("POST", "/v1/stream/end") is not None, "the stream is ended")
        self._stream_ended = True

    def _drained(self) -> bool:
        self.group.look()
        body = self.ask("GET", "/statusz")
        if body is None or not all(one.ended for one in self.group.seen):
            return False
        status = json.loads(body)
        if status["run_state"] == "drained":
            self.final = status
        return self.final is not None

    def history(self) -> History:
        """What was written down, to be asked for when nothing runs any more."""
        return History(
            max_open_steps=self.settings.max_open_steps,
            longest_wait=self.settings.longest_wait,
            batch=self.settings.batch,
            most_buffered=self.settings.most_buffered,
            ranks=[
                read_rank(group.folder / f"rank-{rank}.jsonl", group.launch, rank)
                for group in self.groups
                for rank in range(len(group.seen))
            ],
            producers=[
                read_producer(self.folder / f"producer-{at}.jsonl")
                for at in range(self.settings.producers)
            ],
            returned=self.returned,
            looks=self.looks,
            final=self.final,
            stuck=self.stuck,
            ended=self._stream_ended,
            deleted=self._store.deleted if self._store else frozenset(),
            left=self.left,
        )

    def complaints(self) -> list[str]:
        """Logs that hold a traceback."""
        logs = [self.folder / "dispatcher.log", *self.folder.glob("producer-*.log")]
        return [path.name for path in logs if "Traceback" in path.read_text(errors="replace")]

    # -- inside -----------------------------------------------------------------------------

    def start_dispatcher(self) -> Process:
        """A new dispatcher process on the same addresses and journal."""
        flags = self.settings.flags(self.listen, self.http, self.disk / "journal")
        flags += self._store.flags() if self._store else []
        bug = self.settings.bug or "none"
        command = ["tests.chaos.planted.dispatcher", bug, str(self._jumps), "serve", *flags]
        return Process(command, self.folder / "dispatcher.log")

    def _producer(self, at: int) -> Process:
        endpoint = self.proxies[f"producer-{at}"].endpoint
        path = self.folder / f"producer-{at}.jsonl"
        grouped = ["grouped"] if self.settings.references else []
        return Process(
            ["tests.chaos.actors.producer", endpoint, str(at), str(path), *grouped],
            self.folder / f"producer-{at}.log",
            self._env(),
        )

    def _env(self) -> Mapping[str, str]:
        return self._store.env if self._store else {}

    def _check_alive(self) -> None:
        if self.dispatcher.code not in (None, 0):
            raise Stalled(f"the dispatcher ended by itself with {self.dispatcher.code}")
        for rank, process in enumerate(self.group.ranks if self.groups else ()):
            if process.code not in (None, 0):
                raise Stalled(f"rank {rank} ended by itself with {process.code}")
        for at, producer in enumerate(self.producers):
            if producer.code not in (None, 0, -signal.SIGTERM):
                raise Stalled(f"producer {at} ended by itself with {producer.code}")

    def _end(self) -> None:
        processes: list[Killable] = [*self._strays, *self.producers]
        if self._torchrun is not None:
            processes.append(self._torchrun)  # first, or it would start its ranks again
        processes += [rank for group in self.groups for rank in group.ranks]
        if hasattr(self, "dispatcher"):
            processes.append(self.dispatcher)
        for process in processes:
            process.kill()
        for proxy in self.proxies.values():
            proxy.close()
        if self._store:
            self.left = self._store.left() if self.final else {}
            self._store.close()
        if self.disk.is_mount():
            subprocess.run(["umount", self.disk], check=True)
