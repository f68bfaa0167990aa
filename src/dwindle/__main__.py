"""`python -m dwindle`, and `torchrun --nproc-per-node 2 -m dwindle train ...`."""

from .cli.main import main

main()
