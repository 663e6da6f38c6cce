"""prime-rl from its source, which is on no index.

git clone https://github.com/PrimeIntellect-ai/prime-rl build/frameworks/sources/prime-rl
"""

import sys

from tests.support.source import ROOT

SOURCE = ROOT / "build" / "frameworks" / "sources" / "prime-rl"


def make_importable() -> bool:
    """Whether it is there; its packages can be imported then."""
    sys.path[:0] = [str(SOURCE / "src"), str(SOURCE / "packages" / "prime-rl-configs" / "src")]
    return (SOURCE / "src" / "prime_rl").is_dir()
