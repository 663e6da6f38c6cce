"""Where the sources are, for processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Both source roots, and the tests themselves.
PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "dispatcher", ROOT / "workers")))
