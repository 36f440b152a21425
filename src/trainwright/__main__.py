"""`python -m trainwright`, the same as the command `trainwright`."""

import sys

from trainwright.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
