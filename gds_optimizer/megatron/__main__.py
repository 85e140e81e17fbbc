"""`python -m gds_optimizer.megatron PROGRAM.py ...`: see `training`."""

import sys

from gds_optimizer.errors import GdsOptimizerError
from gds_optimizer.megatron.training import main

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except GdsOptimizerError as error:
        sys.exit(f"gds_optimizer: error: {error}")
