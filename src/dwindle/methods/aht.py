"""AHT-ViT: Adaptive Halting Transformer with Planned Depth Execution. Equation numbers are the paper's.

What the paper leaves open is an argument here. When it is trained as printed, all tokens end at one depth; the defaults
prevent that, and `AHT.as_printed()` is the paper. docs/methods/aht.md explains and measures each choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..core import processes as ranks
from ..core.backbone import Shape
from ..core.cost import budget_share
from ..core.method import (
    Method,
    Verdict,
    check_stages,
    goal,
    halting_distribution,
    halting_kl,
    log_gaussian,
    ramp_factor,
    require,
    wide,
)
from ..core.tokens import Probe, Tokens
from ..core.trace import Trace
from ..errors import unknown
from ..ops.merging import Merge
from ..ops.planner import Halt, Plan, halt, image_mean
from ..ops.planner import plan as plan_rows
from ..ops.rows import Rows
from ..settings import Above0, Budget, Size, Stages
from .aht_settings import PRESETS, PRINTED, Grounding, Reading, Supervisor
from .attended import moments, standardised_attention

if TYPE_CHECKING:
    from ..core.model import Output


SUPERVISOR, GROUNDING, READING = Supervisor(), Grounding(), Reading()


class Planner(nn.Module):
    """Two-layer ReLU MLP on a token's features and a mean over the tokens of its image: one number per token."""

    def __init__(self, shape: Shape, hidden: int) -> None:
        super().__init__()
        # W [token, mean] + b, split in two: the mean's half is computed once per image.
        self.token = nn.Linear(shape.width, hidden)
        self.context = nn.Linear(shape.width, hidden, bias=False)
        self.out = nn.Linear(hidden, 1)
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("deviation", torch.ones(()))

    def forward(self, tokens: Tokens, x: Tensor, mean_BD: Tensor) -> Tensor:
        context = tokens.per_image(self.context(mean_BD))
        hidden = torch.relu(self.token(x) + context)
        return wide(self.out(hidden)[..., 0])

    def standing(self, tokens: Tokens, x: Tensor, mean_BD: Tensor) -> Tensor:
        """Each token's score, standardised over all tokens of all images to mean 0 and deviation 1; the lowest stop
        first.

        As in batch norm, training uses the batch's moments and evaluation the running ones. So plans cannot collapse
        to one depth whatever the losses push, and the result for an image does not depend on its batch.
        """
        score: Tensor = self(tokens, x, mean_BD)
        if not self.training:
            return (score - self.mean) / self.deviation
        mean, deviation = moments(score, tokens.live_rows & ~tokens.is_prefix)
        with torch.no_grad():
            self.mean.lerp_(mean.to(self.mean.dtype), 0.05)
            self.deviation.lerp_(deviation.to(self.mean.dtype), 0.05)
        return (score - mean) / deviation


class AHT(Method):
    """Planners predict a depth for each token, a supervisor of two scalars executes it, and a KL term ties them."""

    paper = "AHT-ViT: Adaptive Halting Transformer with Planned Depth Execution"
    per_image_point = True
    renamed = {"heirs": "merge"}

    def __init__(
        self,
        stages: Stages = (3, 6, 9),
        threshold: Above0 = 0.5,
        budget: Budget = 0.67,
        lambda_p: float = 5e-2,
        lambda_t: float = 0.05,
        sigma: Above0 = 1.0,
        hidden: Size | None = None,
        merge: Literal["none", "nearest", "rest"] = "none",
        supervisor: Supervisor = SUPERVISOR,
        grounding: Grounding = GROUNDING,
        reading: Reading = READING,
    ) -> None:
        """The fields of the last three arguments are passed by their own names: AHT(follow=2.0, gamma=5.0).

        stages: planners sit after these blocks. hidden: width of their hidden layer; None: a quarter of the model's.
        threshold: T; a token halts when its scores add up to T. Set it after training to trade cost for accuracy. One
            score is always below 1, so at the paper's T = 1 a token runs one more block than it was planned to.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'), that training holds. Plans are then relative: a
            token whose standing is below the bar stops at the stage, one above it goes to the end, and training moves
            the bar. None: plans are free depths, as printed, and lambda_p alone decides what they cost.
        lambda_p, lambda_t: weights of the ponder cost (Eq. 1) and of the target-depth term (Eq. 2).
        sigma: width of the planned distribution (Eq. 3).
        merge: where a halted token's state goes. 'none': it is dropped, as in the paper; 'nearest': it is merged with
            the most similar token that goes on, which becomes their mean and counts in attention as that many tokens
            (as in ToMe; from the first stage on); 'rest': all tokens that halt are merged into one token of the image.
        """
        super().__init__()
        self.stages = tuple(sorted(set(stages)))
        self.threshold, self.budget, self.sigma = float(threshold), budget, sigma
        self.lambda_p, self.lambda_t, self.hidden, self.merge = lambda_p, lambda_t, hidden, merge
        self.relative = budget is not None  # a step that read `budget` would be compiled for its value alone
        self.neuron = supervisor.neuron
        self.gamma = nn.Parameter(torch.tensor(float(supervisor.gamma)))
        self.beta = nn.Parameter(torch.tensor(float(supervisor.beta)))
        self.follow, self.softness, self.ramp = grounding.follow, grounding.softness, grounding.ramp
        self.straight_through, self.detach = grounding.straight_through, grounding.detach
        self.plan_leads, self.lambda_i = grounding.plan_leads, grounding.lambda_i
        self.p_actual, self.ponder, self.context = reading.p_actual, reading.ponder, reading.context
        self.halted_plans, self.halt_class = reading.halted_plans, reading.halt_class
        self.planners = nn.ModuleDict()
        self.bar: Tensor
        self.register_buffer("bar", torch.tensor(-2.0))  # nearly all scores are above it

    @classmethod
    def preset(cls, name: str, **options: Any) -> AHT:
        """One of Table 2's configurations: high_accuracy, balanced, high_efficiency."""
        if name not in PRESETS:
            raise unknown("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **options})

    @classmethod
    def as_printed(cls, preset: str = "balanced", **options: Any) -> AHT:
        """Equations 1-3 alone: plans are a training target only, and no gradient is stopped."""
        return cls.preset(preset, **{**PRINTED, **options})

    def bind(self, shape: Shape) -> None:
        super().bind(shape)
        check_stages(self.stages, shape)
        require(
            0 <= self.neuron < shape.hidden,
            f"neuron = {self.neuron}",
            f"the MLPs of this backbone have 0..{shape.hidden - 1}",
        )
        if self.budget is None:
            self.operating_point = ("threshold", 1e-6, float(shape.blocks))
        else:
            budget_share(self.budget, shape)
            self.operating_point = ("bar", 4.0, -4.0)
        self.hidden = self.hidden or max(shape.width // 4, 1)
        for stage in self.stages:
            self.planners[str(stage)] = Planner(shape, self.hidden)

    @property
    def keeps_prefix(self) -> bool:  # type: ignore[override]
        return not self.halt_class

    def start(self, tokens: Tokens) -> Tokens:
        zero = tokens.full(0.0)
        # Sums that begin at -inf never reach the threshold.
        tokens.notes["cumulative"] = zero if self.halt_class else zero.masked_fill(tokens.is_prefix, -torch.inf)
        # Until the first planner has planned, all tokens go to the end.
        tokens.notes["plan"] = tokens.full(self.shape.blocks)
        if self.straight_through and self.training:
            tokens.notes["survival"] = tokens.full(1.0)
        if self.merge == "rest":
            tokens.notes["rest"] = zero.bool()  # whether it is the image's rest token
        return tokens

    def probe(self, depth: int) -> Probe:
        return Probe(self.neuron, self.detach, merging=self.merge == "nearest" and self._may_halt(depth + 1))

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        layer = depth + 1
        record = self._plan(layer, tokens) if layer in self.stages else {}
        score, keep, rows = self._supervise(layer, tokens)
        record["score"] = score
        if keep is None:
            return Verdict(None, record=record)
        merge = None
        if self.merge == "rest" and "forced" not in tokens.notes and layer < self.shape.blocks:
            keep, merge = self._rest(tokens, keep)
            rows = None  # they list the rows of the `keep` before this one
        if self.merge == "nearest" and self._may_halt(layer):
            merge = Merge()
        return Verdict(keep, gate=self._gate(tokens, score, keep), record=record, merge=merge, rows=rows)

    def _supervise(self, layer: int, tokens: Tokens) -> tuple[Tensor, Tensor | None, Rows | None]:
        """Section 3.3: the scores; which rows go on by the sums of scores, or None where no plan can have stopped a
        token yet; and, where a kernel decides, the list of the rows that go on."""
        neuron, plan, before = tokens.probed.neuron, tokens.notes["plan"], tokens.notes["cumulative"]
        assert neuron is not None
        early = self.relative and layer < self.stages[0] and "forced" not in tokens.notes
        keep, rows = None, None
        if tokens.rows is not None:
            prefix = 0 if self.halt_class else tokens.prefix
            limit = self._kernel_value(tokens, "threshold")
            rule = Halt(self.gamma, self.beta, self.follow, layer, limit, prefix)
            score, total, keep, rows = halt(neuron, plan, before, tokens.live_rows, rule, tokens.notes.get("forced"))
        else:
            feature = torch.sub(wide(neuron), plan - layer, alpha=self.follow)
            score = torch.sigmoid(torch.addcmul(self.beta, self.gamma, feature))
            total = before + score
            if not early:
                keep = tokens.decide(layer - 1, total < self.operating_value(tokens, "threshold"))
        tokens.notes["cumulative"] = total
        return score, None if early else keep, rows

    def _plan(self, layer: int, tokens: Tokens) -> dict[str, Tensor]:
        """Write the planned depths, in [1, L], to the tokens' notes. Returns what the trace records of them."""
        planner: Any = self.planners[str(layer)]
        blocks = self.shape.blocks
        if tokens.rows is not None and self.relative and self.context == "live":
            settings = Plan(
                planner.token.weight,
                planner.context.weight,
                planner.token.bias,
                planner.out.weight[0],
                planner.out.bias,
                planner.mean,
                planner.deviation,
                self._kernel_value(tokens, "bar"),
                self.softness,
                layer,
                blocks,
            )
            mean = image_mean(tokens.x, tokens.rows)
            standing, tokens.notes["plan"] = plan_rows(tokens.x, tokens.rows, mean, settings)
            return {"plan": tokens.notes["plan"], "standing": standing}
        x = tokens.x.detach() if self.detach else tokens.x
        mean = tokens.image_mean(x) if self.context == "live" else tokens.stream().to(x.dtype).mean(1)
        if not self.relative:
            plan = 1 + (blocks - 1) * torch.sigmoid(planner(tokens, x, mean))
            record = {"plan": plan}
        else:
            standing = planner.standing(tokens, x, mean)
            plan = layer + (blocks - layer) * torch.sigmoid(
                (standing - self.operating_value(tokens, "bar")) / self.softness
            )
            record = {"plan": plan, "standing": standing}
        tokens.notes["plan"] = plan
        return record

    def _kernel_value(self, tokens: Tokens, name: str) -> Any:
        """`operating_value` as kernels take it: one value, or one for each image."""
        value = self.operating_value(tokens, name)
        return value if value is getattr(self, name) else value[:, 0]

    def _may_halt(self, layer: int) -> bool:
        """Whether tokens may halt after this block: hardly any does before the first plan, and all end at the last."""
        return self.stages[0] <= layer < self.shape.blocks

    def _rest(self, tokens: Tokens, keep: Tensor) -> tuple[Tensor, Merge]:
        """Merge all tokens of an image that halt into one of them, its rest token: the first that halts."""
        before = tokens.notes["rest"]
        leaving = tokens.live_rows & ~keep & ~tokens.is_prefix & ~before
        score = wide(leaving.to(tokens.x.dtype))
        none_yet = tokens.per_image(tokens.image_sum(before.to(score.dtype)) == 0)
        rest = tokens.notes["rest"] = before | (leaving & none_yet & (tokens.rank(score) == 0))
        place = tokens.per_image(tokens.image_sum(tokens.place * rest))
        return keep | rest, Merge(torch.where(leaving, place, tokens.place))

    def _gate(self, tokens: Tokens, score: Tensor, keep: Tensor) -> Tensor | None:
        """The hard decision in value, with the gradient of the probability prod (1 - h) that the token still runs."""
        if "survival" not in tokens.notes:
            return None
        survival = tokens.notes["survival"] = tokens.notes["survival"] * (1 - score)
        always = tokens.is_prefix & (not self.halt_class)
        if self.merge == "rest":
            always = always | tokens.notes["rest"]
        return torch.where(always, 1.0, keep + (survival - survival.detach()))

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        trace = out.trace
        first = 0 if self.halt_class else trace.prefix  # the tokens that may halt
        actual = halting_distribution(trace.scores[..., first:], trace.live[..., first:], self.p_actual)
        layers = torch.arange(1, trace.blocks + 1, device=actual.device, dtype=actual.dtype)[:, None, None]
        if self.ponder == "expected":
            ponder = (layers * actual).sum(0).mean()
        else:  # A-ViT's Eq. 8: the remainder carries the gradient
            exits = trace.depth[:, first:]
            ponder = (exits + (actual * (layers == exits)).sum(0)).mean()
        divergences = []
        none = torch.full(trace.shape, torch.nan, device=actual.device, dtype=actual.dtype)
        for stage in self.stages:
            plan = trace.plans.get(stage, none)  # a pack that is empty by then does not reach the stage
            plan = plan[:, first:].detach() if self.plan_leads else plan[:, first:]
            unplanned = plan.isnan()
            planned = log_gaussian(plan.nan_to_num(0.0), trace.blocks, self.sigma)
            divergence = halting_kl(actual, planned)  # Eq. 2-3
            if self.halted_plans == "skip":
                divergence = ranks.ratio_over_ranks(divergence.masked_fill(unplanned, 0.0).sum(), (~unplanned).sum())
            divergences.append(divergence.mean())
        terms = {"ponder": ponder, "target_depth": torch.stack(divergences).mean()}
        if self.needs_teacher_attention and teacher is not None and any("attention" in v for v in teacher.trace.values):
            terms["importance"] = self._importance(trace, teacher.trace)
        return terms

    def _importance(self, trace: Trace, teacher: Trace) -> Tensor:
        """Squared distance of the standings to the attention the teacher's class token pays a token over all blocks.

        The attention a token gets in later blocks says more about its use for the task than at the stage itself.
        """
        wanted = standardised_attention(teacher, trace.prefix)
        distances = []
        for where, values in zip(trace.lives, trace.values):
            if "standing" in values:
                live = where.dense_rows()[:, trace.prefix :]
                distance = (where.dense_rows(values["standing"])[:, trace.prefix :] - wanted) ** 2
                distances.append(ranks.ratio_over_ranks((distance * live).sum(), live.sum()))
        return torch.stack(distances).mean()

    @property
    def needs_teacher_attention(self) -> bool:  # type: ignore[override]
        return bool(self.lambda_i) and self.relative

    @property
    def ramp_factor(self) -> float:
        return ramp_factor(self.progress, self.ramp)

    @property
    def loss_weights(self) -> dict[str, float]:
        ramped = {"ponder": self.lambda_p * self.ramp_factor, "target_depth": self.lambda_t * self.ramp_factor}
        return ramped | {"importance": self.lambda_i}

    def hold_budget(self, cost: Tensor) -> None:
        """Integral control: the bar rises while the batch costs more than the budget, and falls when it costs less."""
        if self.budget is None:
            return
        self.budget_held = True
        wanted = goal(self.budget, self.shape, self.ramp_factor)
        # In place, because a recorded step reads this memory. No backward pass needs the old value.
        with torch.no_grad():
            self.bar.add_(0.5 * (cost.to(self.bar.device) - wanted)).clamp_(-4.0, 4.0)

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        assert self.hidden is not None
        width, hidden = self.shape.width, self.hidden
        total = tokens  # gamma * f
        if self.merge == "nearest" and self._may_halt(depth + 1):
            total = total + tokens**2 * self.shape.head_size
        if depth + 1 in self.stages:
            total = total + tokens * (width * hidden + hidden) + (tokens > 0) * width * hidden
        return total
