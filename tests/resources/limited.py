"""`dispatcher` with few descriptors: what `ulimit -n` would do.

python -m tests.resources.limited serve ...
"""

import resource
import sys

from rollout_dispatcher.cli.main import main

DESCRIPTORS = 256

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    sys.exit(main(sys.argv[1:]))
