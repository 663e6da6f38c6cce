"""python -m tests.histories record | check: what the dispatcher promises, kept as histories."""

import argparse
import sys

from tests.histories.golden import check, record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument("what", choices=["record", "check"])
    if parser.parse_args().what == "record":
        for line in record():
            print(line)
        return 0
    differences = [*check()]
    print("\n".join(differences[:20]) or "all histories are as they were recorded")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
