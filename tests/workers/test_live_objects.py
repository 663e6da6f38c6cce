"""Objects of a class are found, and finding them harms no other thread."""

import threading

from rollout_workers.process_group import instances


class Kind:
    """What is looked for."""


class Below(Kind):
    """And what is one of them."""


class Proxy:
    """Says that it is one, and does not like to be asked."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Never to be read."""
        raise AssertionError("asked")


def test_objects_of_a_class_and_of_those_below_are_found() -> None:
    mine = [Kind(), Below(), Proxy()]
    found = instances([Kind])
    assert sorted(map(id, found)) == sorted(map(id, mine[:2]))


def test_another_thread_may_fill_tuples_meanwhile() -> None:
    many = [[number] for number in range(100_000)]  # so that it takes longer than a thread's turn
    done, filled = threading.Event(), list[BaseException | int]()

    def fill() -> None:
        while not done.is_set():
            try:
                filled.append(len(tuple(number for number in range(50))))
            except SystemError as error:
                filled.append(error)

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        for _ in range(50):
            instances([Kind])
    finally:
        done.set()
        filler.join()
    assert set(filled) == {50}
    assert len(many) == 100_000
