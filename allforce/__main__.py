"""python -m allforce is the command dp."""

import sys

from allforce.cli import main

if __name__ == "__main__":
    sys.exit(main())
