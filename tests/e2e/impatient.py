"""`dispatcher serve` that takes ranks for hung after seconds, where it would after a minute.

python -m tests.e2e.impatient serve ...
"""

import sys

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.core import waiting as standstill

if __name__ == "__main__":
    standstill.LEAST_SECONDS = standstill.FIRST_SECONDS = 4.0
    sys.exit(main(sys.argv[1:]))
