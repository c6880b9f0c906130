"""The command line, ``python -m precision_scope``."""

import sys

from precision_scope._cli import main

if __name__ == "__main__":
    sys.exit(main())
