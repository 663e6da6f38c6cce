"""`dispatcher serve` whose journal has small files.

python -m tests.e2e.groups.small_journal serve ...
"""

import sys

from rollout_dispatcher.cli.main import main
from tests.chaos.planted.dispatcher import shrink_journal

if __name__ == "__main__":
    shrink_journal()
    sys.exit(main(sys.argv[1:]))
