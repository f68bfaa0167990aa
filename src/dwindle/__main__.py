"""Run the command line: `python -m dwindle`, or `torchrun --nproc-per-node 2 -m dwindle train ...`."""

import sys

from .errors import missing

try:
    from .cli.main import main
except ModuleNotFoundError as error:
    print(f"dwindle: {missing(error)}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    main()
