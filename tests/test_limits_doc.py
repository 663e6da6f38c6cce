"""docs/limits.md tells the truth as far as names go: its flags, files and constants exist."""

import re

import pytest

from tests.support.options import FLAGS, named
from tests.support.source import ROOT
from tests.test_architecture import MENTION, candidates, names_in

TEXT = (ROOT / "docs" / "limits.md").read_text()


@pytest.mark.parametrize(("path", "name"), sorted(set(MENTION.findall(TEXT))))
def test_what_is_mentioned_exists(path: str, name: str) -> None:
    found = candidates(path)
    assert found, f"there is no {path}"
    assert not name or any(name in names_in(file) for file in found), f"{path} has no {name}"


def test_its_flags_are_those_of_serve() -> None:
    assert named(TEXT) <= FLAGS


def test_every_flag_that_limits_what_is_held_is_in_it() -> None:
    limits = {flag for flag in FLAGS if re.search(r"-(bytes|connections|credits|horizon)$", flag)}
    assert limits <= named(TEXT)


def test_every_constant_that_bounds_what_peers_make_us_remember_is_in_it() -> None:
    package = ROOT / "dispatcher" / "rollout_dispatcher"
    for path in sorted([*package.glob("core/**/*.py"), *package.glob("service/**/*.py")]):
        for name in names_in(path):
            if name.startswith("MAX_") and name not in ELSEWHERE:
                assert f"{path.relative_to(package)}:{name}" in TEXT, f"{path} has {name}"


#: Bounds of what is no state: lines of the log, and calls in one.
ELSEWHERE = {"MAX_STACKS", "MAX_FRAMES"}
