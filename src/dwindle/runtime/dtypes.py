"""The number formats a model runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import DwindleError, unknown
from ..ops.half import no_bf16
from ..ops.int8 import is_int8

if TYPE_CHECKING:
    from collections.abc import Collection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_runs(dtype: str, device: str | torch.device, known: Collection[str] = DTYPES) -> None:
    """Refuse a format that is not in `known`, or in which the device cannot multiply."""
    if dtype not in known:
        raise unknown("dtype", dtype, known)
    if dtype == "bf16" and torch.device(device).type == "cpu" and (why := no_bf16()):
        raise DwindleError(f"--dtype bf16: this CPU {why}; or take --dtype fp32.")


def converted(model: Any, dtype: str, device: str | torch.device) -> Any:
    """The model in this number format, to run on this device."""
    check_runs(dtype, device)
    if dtype == "fp32":
        return model
    if is_int8(model):
        raise DwindleError(f"--dtype {dtype}: this model is in int8, and the rest of it in fp32; leave --dtype out.")
    return model.to(DTYPES[dtype])


def dtype_of(model: nn.Module) -> torch.dtype:
    """The number format of the model's weights, in which it takes images."""
    return next(model.parameters()).dtype
