"""What tests share: tiny models of every kind, the command line in this process, checkpoints, kernels' places."""
