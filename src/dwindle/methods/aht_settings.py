"""The settings of `AHT` in groups: what the paper leaves open, and its Table 2. docs/methods/aht.md measures them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..settings import Above0, Share, Whole0

PRESETS: dict[str, dict[str, float]] = {  # Table 2 as printed; budget: the share of the cost that Table 3 reports
    "high_accuracy": {"lambda_p": 1e-3, "lambda_t": 1.0, "budget": 0.83},
    "balanced": {"lambda_p": 5e-2, "lambda_t": 0.5, "budget": 0.67},
    "high_efficiency": {"lambda_p": 1e-2, "lambda_t": 0.2, "budget": 0.52},
}
PRINTED: dict[str, Any] = {
    "threshold": 1.0,
    "gamma": 5.0,
    "beta": -10.0,
    "budget": None,
    "halt_class": True,
    "halted_plans": "zero",
    "context": "all",
    "follow": 0.0,
    "straight_through": False,
    "detach": False,
    "plan_leads": False,
    "p_actual": "act",
    "lambda_i": 0.0,
    "ramp": 0.0,
    "merge": "none",
}


@dataclass(frozen=True)
class Supervisor:
    """h = sigmoid(gamma * f + beta); f is neuron number `neuron` after the MLP's first linear layer.

    gamma, beta: their initial values; both are learnt.
    """

    neuron: Whole0 = 0
    gamma: float = 1.0
    beta: float = 2.0


@dataclass(frozen=True)
class Grounding:
    """What ties plans to the task, beside the paper's terms.

    follow: the plan is added to the supervisor's feature, f + follow * (l - plan); 0 is the paper, where plans are only
        a training target. softness: width of the transition of a plan from stop to go around the bar.
    straight_through: the task loss reaches scores and planners through the hard decision.
    detach: the halting terms train the borrowed neuron and the planners, not the backbone under them.
    plan_leads: the KL moves the supervisor towards the plan, not the plan towards the supervisor.
    lambda_i: weight of the importance term, used with a teacher: planners learn to predict its class token's attention.
    ramp: share of the training over which the budget and the loss weights are brought in.
    """

    follow: float = 3.0
    softness: Above0 = 0.1
    straight_through: bool = True
    detach: bool = True
    plan_leads: bool = True
    lambda_i: float = 0.2
    ramp: Share = 0.3


@dataclass(frozen=True)
class Reading:
    """Choices where the paper can be read in several ways.

    p_actual: the halting distribution of the scores, 'act' (scores, then a remainder) or 'hazard'.
    ponder: a form of Eq. 1 with a gradient, 'expected' (mean depth under p_actual) or 'remainder' (N + r).
    halted_plans: tokens halted before a stage are left out of its KL ('skip') or planned at 0 ('zero', Listing 1.1).
    context: a planner sees the mean over the 'live' tokens, or over 'all' tokens (as in Listing 1.1).
    halt_class: whether the class token and other prefix tokens may halt.
    """

    p_actual: Literal["act", "hazard"] = "hazard"
    ponder: Literal["expected", "remainder"] = "expected"
    halted_plans: Literal["skip", "zero"] = "skip"
    context: Literal["live", "all"] = "live"
    halt_class: bool = False
