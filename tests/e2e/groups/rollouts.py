"""Rollout workers as GRPO has them: prompts of several samples, which finish in any order.

    books = Books()                              # what the workers were told of each sample
    await together(books, endpoint, shares)      # an async producer a share, four prompts at a time

Tokens follow from a sample's id, so that whoever receives them can tell whether they are right.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from random import Random
from typing import Any, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rollout_dispatcher.errors import SampleRefused
from rollout_workers import AsyncRolloutProducer

#: Samples of a prompt unless said otherwise.
GROUP = 8
#: The longest that a rollout takes unless said otherwise, in seconds.
SLOWEST_S = 0.15


@dataclass(frozen=True, slots=True)
class Prompt:
    """A group to be: its samples are `<name>/0` to `<name>/<size - 1>`."""

    name: str
    size: int = GROUP
    version: int | None = None

    @property
    def samples(self) -> list[str]:
        """The ids of its members."""
        return [f"{self.name}/{member}" for member in range(self.size)]


def group_of(sample_id: str) -> str:
    """The name of the prompt that a sample answers."""
    return sample_id.rpartition("/")[0]


@lru_cache(4096)
def tokens_of(sample_id: str) -> NDArray[np.int64]:
    """The tokens of a sample: 4 to 500, heavy-tailed, and no two samples' alike."""
    rng = np.random.default_rng(crc32(sample_id.encode()))
    return rng.integers(0, 50_000, int(np.clip(rng.lognormal(3.5, 0.8), 4, 500)))


def _eight(_: int) -> int:
    return GROUP


def prompts(worker: str, number: int, size: Callable[[int], int] = _eight) -> list[Prompt]:
    """What one worker has to answer; size: samples of its n-th prompt."""
    return [Prompt(f"{worker}.{at}", size(at)) for at in range(number)]


def shares(workers: int, number: int, size: Callable[[int], int] = _eight) -> list[list[Prompt]]:
    """So many prompts for each of so many workers."""
    return [prompts(f"w{at}", number, size) for at in range(workers)]


def until(over: asyncio.Event, worker: str) -> Iterator[Prompt]:
    """Prompts for one worker until it is over."""
    for number in count():
        if over.is_set():
            return
        yield Prompt(f"{worker}.{number}")


class Pushes(Protocol):
    """What pushes a sample: a producer of this project, or an HTTP client."""

    @property
    def push(self) -> Callable[..., Awaitable[object]]:
        """Returns `accepted` or `duplicate`; raises SampleRefused."""


class Books:
    """What producers were told of each sample; ballast: bytes to push with each.

    to_begin: the last member of a group waits until more samples than this were begun at a time.
    """

    def __init__(self, ballast: int = 0) -> None:
        self.ballast = ballast
        self.to_begin = 0
        self.enough_begun = asyncio.Event()
        self.accepted: set[str] = set()
        #: Why a sample was refused.
        self.refused: dict[str, str] = {}
        #: The most samples at a time of groups that lacked members.
        self.most_begun = 0
        self._begun: dict[str, int] = {}

    def note(self, prompt: Prompt, sample_id: str, outcome: object) -> None:
        """The dispatcher said so."""
        assert str(outcome) in ("accepted", "duplicate"), outcome
        assert sample_id not in self.accepted, f"{sample_id} was answered twice"
        self.accepted.add(sample_id)
        self._begun[prompt.name] = self._begun.get(prompt.name, 0) + 1
        if self._begun[prompt.name] == prompt.size:
            del self._begun[prompt.name]
        self.most_begun = max(self.most_begun, sum(self._begun.values()))
        if self.most_begun > self.to_begin:
            self.enough_begun.set()

    async def push(self, producer: Pushes, prompt: Prompt, member: int, **about: Any) -> bool:
        """Push one member and note the answer; whether it was accepted."""
        name = prompt.samples[member]
        sent = fields(name, self.ballast)
        try:
            said = named(prompt, name) | about
            exempt = said["policy_version"] is None
            outcome = await producer.push(sent, staleness_exempt=exempt, **said)
        except SampleRefused as error:
            self.refused[name] = str(error)
            return False
        self.note(prompt, name, outcome)
        return True


def fields(sample_id: str, ballast: int = 0) -> dict[str, Any]:
    """What is pushed of a sample."""
    weight = {"ballast": np.zeros(ballast, np.uint8)} if ballast else {}
    return {"input_ids": tokens_of(sample_id)} | weight


def named(prompt: Prompt, sample_id: str) -> dict[str, Any]:
    """Whose sample it is, as `push` takes it."""
    return {
        "sample_id": sample_id,
        "group_id": prompt.name,
        "group_size": prompt.size,
        "policy_version": prompt.version,
    }


def joined(endpoint: str) -> AsyncRolloutProducer:
    """A producer as all of these are."""
    return AsyncRolloutProducer(endpoint, per_sample=("ballast",))


async def side_by_side(*work: Coroutine[Any, Any, object]) -> None:
    """Do all of it at the same time; the first failure ends the rest, and none goes unheard."""
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


async def roll_out(books: Books, producer: Pushes, prompt: Prompt, slowest_s: float) -> None:
    """Answer one prompt: its samples are generated side by side and finish in random order."""
    rng = Random(prompt.name)
    delays = [rng.uniform(0, slowest_s) for _ in range(prompt.size)]
    last = delays.index(max(delays))

    async def one(member: int) -> None:
        await asyncio.sleep(delays[member])
        if member == last and books.to_begin:
            await books.enough_begun.wait()
        await books.push(producer, prompt, member)

    await side_by_side(*(one(member) for member in range(prompt.size)))


async def work(
    books: Books,
    producer: Pushes,
    share: Iterable[Prompt],
    *,
    at_a_time: int = 4,
    slowest_s: float = SLOWEST_S,
) -> None:
    """Answer so many prompts at a time, and begin another when one is done."""
    left = iter(share)

    async def lane() -> None:
        for prompt in left:
            await roll_out(books, producer, prompt, slowest_s)

    await side_by_side(*(lane() for _ in range(at_a_time)))


async def together(
    books: Books, endpoint: str, all_shares: Sequence[Iterable[Prompt]], **how: Any
) -> None:
    """A producer for each share; each says that it has ended once all are done."""
    async with AsyncExitStack() as stack:
        producers = [await stack.enter_async_context(joined(endpoint)) for _ in all_shares]
        await side_by_side(
            *(
                work(books, producer, share, **how)
                for producer, share in zip(producers, all_shares, strict=True)
            )
        )
        for producer in producers:
            await producer.end_stream()
