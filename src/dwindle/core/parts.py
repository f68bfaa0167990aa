"""The parts of a block, for the runtimes, and the check that nothing was added to what its library wrote.

A runtime computes a block from its parts only if that check passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..ops.int8 import Int8Linear
from .run import INSTALLED_HOOKS, attention_forward


@dataclass(frozen=True)
class BlockParts:
    """The layers of a plain pre-norm block: x + scale1 * proj(attention(qkv(norm1 x))), then the MLP likewise."""

    norm1: nn.LayerNorm
    qkv: tuple[nn.Linear, ...]  # one layer, or three
    heads: int
    scale: float
    q_norm: nn.LayerNorm | None
    k_norm: nn.LayerNorm | None
    proj: nn.Linear
    scale1: Tensor | None
    norm2: nn.LayerNorm
    fc1: nn.Linear  # width -> hidden
    act: str
    fc2: nn.Linear  # hidden -> width
    scale2: Tensor | None


def activation_name(module: Any) -> str | None:
    """The kernels' name of the activation; None if they do not have it, or if it is a user's class."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if not of_a_library(type(module)):
        return None
    named = {
        "GELUActivation": "gelu",
        "GELU": "gelu",
        "GELUTanh": "gelu_tanh",
        "GELUTanhActivation": "gelu_tanh",
        "QuickGELU": "quick_gelu",
        "QuickGELUActivation": "quick_gelu",
        "SiLU": "silu",
        "SiLUActivation": "silu",
        "ReLU": "relu",
    }
    return named.get(type(module).__name__)


LINEAR = (nn.Linear, Int8Linear)  # the classes of linear layers that a runtime can compute
CAPTURE_MODULE = "transformers.utils.output_capturing"  # its hooks record outputs and change nothing
LIBRARIES = ("torch", "timm", "transformers", "dwindle")


def of_a_library(kind: Any) -> bool:
    """Whether a class or a function comes from one of LIBRARIES and not from a user."""
    return (kind.__module__ or "").partition(".")[0] in LIBRARIES


def replaced(module: nn.Module) -> bool:
    """Whether a user replaced the module's forward. The forward that `install` puts there does not count."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "func", None) is not attention_forward


def as_written(block: nn.Module) -> bool:
    """Whether a block computes what its library wrote: no hooks but ours, no replaced forward, no class of a user, no
    special parameter class, and no active dropout.
    """
    for module in block.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if (
            any(hook not in INSTALLED_HOOKS and hook.__module__ != CAPTURE_MODULE for hook in hooks)
            or replaced(module)
            or not of_a_library(type(module))
        ):
            return False
        weights = [weight for weight in module._parameters.values() if weight is not None]
        if any(type(weight) is not nn.Parameter for weight in weights):
            return False
        if type(module) is nn.Dropout and module.training and module.p:
            return False
    return True


def linear_macs(module: nn.Module) -> int:
    """Multiply-accumulates of all linear layers in a module, per token."""
    return sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))
