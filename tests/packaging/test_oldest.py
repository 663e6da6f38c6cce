"""What `make smoke` demands is what pyproject.toml allows."""

import pytest

from tests.packaging.oldest import oldest, oldest_python, requirements
from tests.packaging.smoke import trials


def test_every_requirement_says_from_which_version_on() -> None:
    pinned = [oldest(one) for one in requirements()]
    assert [one.partition("==")[0] for one in pinned] == [
        "numpy",
        "pydantic",
        "aiohttp",
        "prometheus-client",
    ]


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [("numpy>=1.26", "numpy==1.26"), ("aiohttp>=3.10,<4", "aiohttp==3.10")],
)
def test_the_lower_bound_is_what_is_pinned(requirement: str, expected: str) -> None:
    assert oldest(requirement) == expected


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy~=1.26", "numpy<3,>=1.26"])
def test_a_requirement_without_one_is_an_error(requirement: str) -> None:
    with pytest.raises(ValueError, match="lower bound"):
        oldest(requirement)


def test_both_ways_are_tried_with_the_oldest_python_and_never_torch() -> None:
    *newest, pinned = trials(oldest_python())
    assert {trial.pinned for trial in newest} == {()}
    assert len(pinned.pinned) == len(requirements())
    assert not [one for one in pinned.pinned if "torch" in one]


def test_another_python_tries_the_newest_only_and_not_where_all_must_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DISPATCHER_REQUIRE_TOOLS", raising=False)
    assert [trial.name for trial in trials("3.99")] == ["planner", "newest", "client"]
    monkeypatch.setenv("DISPATCHER_REQUIRE_TOOLS", "1")
    with pytest.raises(SystemExit, match=r"3\.99 is not the oldest"):
        trials("3.99")
