"""`python -m gds_optimizer.cli`, for where the command is not on the PATH."""

from __future__ import annotations

import sys

from gds_optimizer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
