"""Stores are found by the scheme of their address; third parties name theirs in an entry point."""

from importlib.metadata import EntryPoint

import pytest

from rollout_dispatcher.errors import StoreFailed
from rollout_workers.stores import registry
from rollout_workers.stores.file import FileStore


class TheirStore(FileStore):
    """A third party's."""

    scheme = "theirs"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions that name stores."""
    named = {
        "theirs": f"{__name__}:TheirStore",
        "broken": "no_such_package.stores:Store",
        "wrong": "pathlib:Path",
    }

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [
            EntryPoint(scheme, value, group)
            for scheme, value in named.items()
            if name in (None, scheme)
        ]

    assert registry.ENTRY_POINTS == "rollout_dispatcher.payload_stores"
    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_a_third_partys(installed: None) -> None:
    assert registry.store_class("theirs://host") is TheirStore


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("/data/rollouts", "begins with a scheme"),
        ("flie:///data", "known are broken, file"),
        ("broken://host", "install it where"),
        ("wrong://host", "is no PayloadStore"),
    ],
)
def test_what_cannot_be_opened_is_told_in_words(installed: None, address: str, why: str) -> None:
    with pytest.raises(StoreFailed, match=why):
        registry.open_store(address)
