"""A counter of FLOPs."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def flop_counter() -> FlopCounterMode:
    """torch's, which before its 2.14 does not know a CPU's attention."""

    def flops(query, key, value, *_, **__) -> int:
        return sdpa_flop_count(query, key, value)

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={attention: flops})
