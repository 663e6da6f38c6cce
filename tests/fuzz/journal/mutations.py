"""What may have become of a journal's files: bits, runs, ends, and files in wrong places."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

#: Damage is done where there is something: behind that a segment is zeros.
Mutation = Callable[[Path, Random], None]


def mutate(directory: Path, random: Random) -> str:
    """Do one thing to the files of a closed journal, sometimes two; says what."""
    ways = [random.choice(MUTATIONS) for _ in range(random.choice((1, 1, 1, 2)))]
    for way in ways:
        way(directory, random)
    return " and ".join(way.__name__ for way in ways)


def _segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


def _some_file(directory: Path, random: Random) -> Path:
    """A segment as a rule."""
    others = [directory / "index", directory / "newest"]
    return random.choice([*_segments(directory) * 3, *(path for path in others if path.exists())])


def _used(data: bytes) -> int:
    """Where the content of a preallocated file ends."""
    return max(1, len(data.rstrip(b"\0")))


def _change(path: Path, change: Callable[[bytearray, int], None]) -> None:
    data = bytearray(path.read_bytes())
    if data:
        change(data, _used(bytes(data)))
        path.write_bytes(data)


def flip_bits(directory: Path, random: Random) -> None:
    """A few bits of one file, also in what says how it is made."""

    def flip(data: bytearray, used: int) -> None:
        for _ in range(random.choice((1, 1, 2, 8))):
            at = random.randrange(min(used, random.choice((64, 2048, used))))
            data[at] ^= 1 << random.randrange(8)

    _change(_some_file(directory, random), flip)


def overwrite(directory: Path, random: Random) -> None:
    """A run of bytes becomes zeros, noise, or what stands elsewhere in the same file."""

    def write(data: bytearray, used: int) -> None:
        size = random.choice((1, 8, 100, 512, 4096))
        at, other = random.randrange(used), random.randrange(used)
        new = (bytes(size), random.randbytes(size), bytes(data[other : other + size]))
        chosen = random.choice(new)[: len(data) - at]
        data[at : at + len(chosen)] = chosen

    _change(_some_file(directory, random), write)


def tear_the_end(directory: Path, random: Random) -> None:
    """The last bytes of a segment's content were never written."""

    def tear(data: bytearray, used: int) -> None:
        gone = random.randrange(1, used)
        data[used - gone : used] = bytes(gone)

    _change(random.choice(_segments(directory)), tear)


def resize(directory: Path, random: Random) -> None:
    """A file is cut, or has something behind its end."""

    def cut(data: bytearray, used: int) -> None:
        if random.random() < 0.3:
            data += random.randbytes(random.choice((1, 512, 5000)))
        else:
            del data[random.randrange(len(data)) :]

    _change(_some_file(directory, random), cut)


def remove(directory: Path, random: Random) -> None:
    """A file is gone."""
    _some_file(directory, random).unlink()


def swap(directory: Path, random: Random) -> None:
    """Two segments are in each other's place."""
    first, second = random.choice(_segments(directory)), random.choice(_segments(directory))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def double(directory: Path, random: Random) -> None:
    """A segment is there twice: over another one, or under a number that nobody has."""
    path = random.choice(_segments(directory))
    number = random.choice([int(path.stem) + at for at in (-1, 1, 2, 7)])
    shutil.copyfile(path, directory / f"{max(0, number):012d}.segment")


def rename(directory: Path, random: Random) -> None:
    """A segment has another number."""
    path = random.choice(_segments(directory))
    path.rename(directory / f"{int(path.stem) + random.choice((1, 3, 1000)):012d}.segment")


def older_index(directory: Path, random: Random) -> None:
    """The index is a copy that was made some time before; the log is not."""
    shutil.copyfile(directory / "older" / "index", directory / "index")


def older_name(directory: Path, random: Random) -> None:
    """The same with the name of the newest segment."""
    shutil.copyfile(directory / "older" / "newest", directory / "newest")


MUTATIONS: list[Mutation] = [
    flip_bits, flip_bits, flip_bits, overwrite, overwrite, tear_the_end, resize, remove, swap,
    double, rename, older_index, older_name,
]  # fmt: skip
