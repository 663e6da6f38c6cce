"""docs/operate.md, Limits: flags of serve, and none that limits what is held lacks."""

import re

from tests.support.options import FLAGS, named
from tests.support.source import ROOT

TEXT = (ROOT / "docs" / "operate.md").read_text().partition("\n## Limits\n")[2]


def test_its_flags_are_those_of_serve() -> None:
    assert named(TEXT) <= FLAGS


def test_every_flag_that_limits_what_is_held_is_in_it() -> None:
    limits = {flag for flag in FLAGS if re.search(r"-(bytes|connections|credits|horizon)$", flag)}
    assert limits <= named(TEXT)
