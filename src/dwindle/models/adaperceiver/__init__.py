"""AdaPerceiver: a network of its own, beside the loop; it shares Trace, cost rules, checkpoints, data and training."""

from .family import AdaPerceivers
from .model import AdaPerceiver

__all__ = ["AdaPerceiver", "AdaPerceivers"]
