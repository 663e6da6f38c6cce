"""Stores are found by the scheme of their address; third parties name theirs in an entry point."""

from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout_dispatcher.errors import StoreFailed
from rollout_dispatcher.service.config.checks import OUR_SCHEMES
from rollout_workers.stores import registry
from rollout_workers.stores.file import FileStore
from rollout_workers.stores.interface import PayloadStore


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


def test_ours(tmp_path: Path) -> None:
    assert type(registry.open_store(f"file://{tmp_path}")) is FileStore


def test_every_store_of_ours_whose_engine_is_here_has_its_scheme() -> None:
    engines = {"mooncake": "mooncake", "ray": "ray", "transferqueue": "transfer_queue"}
    for scheme in registry.BUILT_IN:
        if scheme not in engines or find_spec(engines[scheme]):
            assert registry.store_class(f"{scheme}:").scheme == scheme


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


def test_a_dispatcher_knows_the_schemes_that_need_no_plug_in() -> None:
    assert set(registry.BUILT_IN) == set(OUR_SCHEMES)


def test_a_store_that_can_get_nothing_is_refused_where_it_is_defined() -> None:
    with pytest.raises(TypeError, match="Nothing must define get or get_into"):
        type("Nothing", (PayloadStore,), {"scheme": "nothing"})
