"""The optimisers of section D's tables: SOAP, which they call Shampoo-Soap, and NAdamW."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import DwindleError

BETAS = (0.9, 0.999)
LARGEST = 8192  # the largest dimension of a weight that SOAP preconditions, in all tables


def nadamw(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Adam with Nesterov's momentum and decoupled weight decay (D.4)."""
    return torch.optim.NAdam(groups, lr=lr, betas=BETAS, decoupled_weight_decay=True)


def soap(groups: list[dict[str, Any]], lr: float, start: int, every: int) -> torch.optim.Optimizer:
    """SOAP, whose eigenbases are made at step `start`, and again at each multiple of `every` (D.1-D.3).

    Until `start` it steps as AdamW does, while its preconditioners gather what they are made of.
    """
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        raise DwindleError(
            "optimizer = soap needs the package pytorch-optimizer; install dwindle[soap], or take adamw."
        ) from error

    class StartedSOAP(SOAP):  # type: ignore[misc, valid-type]
        """SOAP without a basis at first: it projects on an empty basis as on the identity, so that it is AdamW."""

        def update_pre_conditioner(
            self, grad: Any, state: dict[str, Any], step: int, *args: Any, **kwargs: Any
        ) -> None:
            if step < start:
                state["Q"] = [[] for _ in state["GG"]]
            elif step == start:
                state["Q"] = None  # it is made anew of what was gathered
            super().update_pre_conditioner(grad, state, step, *args, **kwargs)

        def get_orthogonal_matrix_qr(self, state: dict[str, Any], *args: Any, **kwargs: Any) -> list[Any]:
            if not any(len(basis) for basis in state["Q"]):  # there is none yet to turn
                return list(state["Q"])
            return list(super().get_orthogonal_matrix_qr(state, *args, **kwargs))

    settings = {"precondition_frequency": every, "max_precondition_dim": LARGEST}
    optimizer: torch.optim.Optimizer = StartedSOAP(groups, lr=lr, betas=BETAS, **settings)
    return optimizer
