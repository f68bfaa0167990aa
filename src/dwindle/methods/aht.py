"""AHT-ViT: Adaptive Halting Transformer with Planned Depth Execution. Equation numbers are the paper's.

What the paper leaves open is an argument here. Trained as printed, all tokens end at one depth; the defaults prevent
that, and `AHT.as_printed()` is the paper. docs/methods/aht.md says what each choice is for, and measures it.
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
    brought_in,
    check_stages,
    goal,
    halting_distribution,
    halting_kl,
    log_gaussian,
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
        """A token's score among all tokens of all images, with mean 0 and deviation 1; the lowest stop first.

        Standardised as in batch norm, by the batch in training and by running moments after it. So plans cannot
        collapse to one depth whatever the losses push, and what becomes of an image does not depend on its batch.
        """
        score: Tensor = self(tokens, x, mean_BD)
        if not self.training:
            return (score - self.mean) / self.deviation
        mean, deviation = _moments(score, tokens.counted & ~tokens.is_prefix)
        with torch.no_grad():
            self.mean.lerp_(mean.to(self.mean.dtype), 0.05)
            self.deviation.lerp_(deviation.to(self.mean.dtype), 0.05)
        return (score - mean) / deviation


def _moments(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation over the counted tokens of all processes."""
    weight = counted.to(values.dtype)
    count = ranks.total(weight.sum()).clamp_min(1)
    mean = ranks.total((weight * values).sum()) / count
    return mean, (ranks.total((weight * (values - mean) ** 2).sum()) / count + 1e-6).sqrt()


class AHT(Method):
    """Planners predict a depth per token, a supervisor of two scalars executes it, a KL term ties them together."""

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
        """The fields of the last three are given by their own names: AHT(follow=2.0, gamma=5.0).

        stages: planners sit after these blocks. hidden: width of their hidden layer; None: a quarter of the model's.
        threshold: T; a token halts when its scores add up to T. Set it after training to trade cost for accuracy. One
            score is always below 1, so at the paper's T = 1 a token runs one more block than it was planned to.
        budget: the share of the static cost (0.67), or GMACs ('3.1G'), that training holds. Plans then are relative: a
            token that stands below the bar stops at the stage, one above it goes to the end, and the bar moves.
            None: plans are free depths, as printed, and lambda_p alone decides what they cost.
        lambda_p, lambda_t: weights of the ponder cost (Eq. 1) and of the target-depth term (Eq. 2).
        sigma: width of the planned distribution (Eq. 3).
        merge: what a halted token leaves behind. 'none': nothing, as in the paper; 'nearest': it joins the most alike
            token that goes on, which becomes their mean and counts in attention as that many tokens (as in ToMe; from
            the first stage on); 'rest': all that halt join one token of the image.
        """
        super().__init__()
        self.stages = tuple(sorted(set(stages)))
        self.threshold, self.budget, self.sigma = float(threshold), budget, sigma
        self.lambda_p, self.lambda_t, self.hidden, self.merge = lambda_p, lambda_t, hidden, merge
        self.relative = budget is not None  # apart from its value, on which a compiled step would be fixed
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
        """Table 2's configurations: high_accuracy, balanced, high_efficiency."""
        if name not in PRESETS:
            raise unknown("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **options})

    @classmethod
    def as_printed(cls, preset: str = "balanced", **options: Any) -> AHT:
        """Equations 1-3 and nothing else: plans are a training target only, and every gradient flows everywhere."""
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
        zero = tokens.numbers(0.0)
        # Sums that begin at -inf never reach the threshold.
        tokens.notes["cumulative"] = zero if self.halt_class else zero.masked_fill(tokens.is_prefix, -torch.inf)
        # Until the first planner has planned, all tokens go to the end.
        tokens.notes["plan"] = tokens.numbers(self.shape.blocks)
        if self.straight_through and self.training:
            tokens.notes["survival"] = tokens.numbers(1.0)
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
            rows = None  # they are of the keep before
        if self.merge == "nearest" and self._may_halt(layer):
            merge = Merge()
        return Verdict(keep, gate=self._gate(tokens, score, keep), record=record, merge=merge, rows=rows)

    def _supervise(self, layer: int, tokens: Tokens) -> tuple[Tensor, Tensor | None, Rows | None]:
        """Section 3.3: scores, and which rows go on by their sums; None: no plan can have stopped a token yet. The rows
        that go on as a list, where a kernel decides."""
        neuron, plan, before = tokens.probed.neuron, tokens.notes["plan"], tokens.notes["cumulative"]
        assert neuron is not None
        early = self.relative and layer < self.stages[0] and "forced" not in tokens.notes
        keep, rows = None, None
        if tokens.rows is not None:
            prefix = 0 if self.halt_class else tokens.prefix
            limit = self._of_images(tokens, "threshold")
            rule = Halt(self.gamma, self.beta, self.follow, layer, limit, prefix)
            score, total, keep, rows = halt(neuron, plan, before, tokens.counted, rule, tokens.notes.get("forced"))
        else:
            feature = torch.sub(wide(neuron), plan - layer, alpha=self.follow)
            score = torch.sigmoid(torch.addcmul(self.beta, self.gamma, feature))
            total = before + score
            if not early:
                keep = tokens.decide(layer - 1, total < self.operating_value(tokens, "threshold"))
        tokens.notes["cumulative"] = total
        return score, None if early else keep, rows

    def _plan(self, layer: int, tokens: Tokens) -> dict[str, Tensor]:
        """Planned depths in [1, L], written to the tokens' notes; what the trace records of them."""
        planner: Any = self.planners[str(layer)]
        blocks = self.shape.blocks
        if tokens.rows is not None and self.relative and self.context == "live":
            made_with = Plan(
                planner.token.weight,
                planner.context.weight,
                planner.token.bias,
                planner.out.weight[0],
                planner.out.bias,
                planner.mean,
                planner.deviation,
                self._of_images(tokens, "bar"),
                self.softness,
                layer,
                blocks,
            )
            mean = image_mean(tokens.x, tokens.rows)
            standing, tokens.notes["plan"] = plan_rows(tokens.x, tokens.rows, mean, made_with)
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

    def _of_images(self, tokens: Tokens, name: str) -> Any:
        """`operating_value`, for kernels: one value, or one for each image."""
        value = self.operating_value(tokens, name)
        return value if value is getattr(self, name) else value[:, 0]

    def _may_halt(self, layer: int) -> bool:
        """Whether tokens may halt after this block: hardly any does before the first plan, none needs to at the end."""
        return self.stages[0] <= layer < self.shape.blocks

    def _rest(self, tokens: Tokens, keep: Tensor) -> tuple[Tensor, Merge]:
        """All tokens of an image that halt join one of them, its rest token: the first of those that halt first."""
        old = tokens.notes["rest"]
        leaving = tokens.counted & ~keep & ~tokens.is_prefix & ~old
        score = wide(leaving.to(tokens.x.dtype))
        none_yet = tokens.per_image(tokens.image_sum(old.to(score.dtype)) == 0)
        rest = tokens.notes["rest"] = old | (leaving & none_yet & (tokens.rank(score) == 0))
        place = tokens.per_image(tokens.image_sum(tokens.place * rest))
        return keep | rest, Merge(torch.where(leaving, place, tokens.place))

    def _gate(self, tokens: Tokens, score: Tensor, keep: Tensor) -> Tensor | None:
        """Hard in value, with the gradient of the token's chance to come this far, prod (1 - h)."""
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
            silent = plan.isnan()
            planned = log_gaussian(plan.nan_to_num(0.0), trace.blocks, self.sigma)
            divergence = halting_kl(actual, planned)  # Eq. 2-3
            if self.halted_plans == "skip":
                divergence = ranks.share(divergence.masked_fill(silent, 0.0).sum(), (~silent).sum())
            divergences.append(divergence.mean())
        terms = {"ponder": ponder, "target_depth": torch.stack(divergences).mean()}
        if self.asks_attention and teacher is not None and any("attention" in v for v in teacher.trace.values):
            terms["importance"] = self._importance(trace, teacher.trace)
        return terms

    def _importance(self, trace: Trace, teacher: Trace) -> Tensor:
        """Squared distance of the standings to the attention the teacher's class token pays a token over all blocks.

        Attention that a token gets later says more about its use for the task than what it gets at the stage itself.
        """
        paid = teacher.stack("attention").mean(0)[:, trace.prefix :].clamp_min(1e-6).log()
        mean, deviation = _moments(paid, torch.ones_like(paid, dtype=torch.bool))
        wanted = (paid - mean) / deviation
        distances = []
        for where, values in zip(trace.lives, trace.values):
            if "standing" in values:
                live = where.dense_rows()[:, trace.prefix :]
                distance = (where.dense_rows(values["standing"])[:, trace.prefix :] - wanted) ** 2
                distances.append(ranks.share((distance * live).sum(), live.sum()))
        return torch.stack(distances).mean()

    @property
    def asks_attention(self) -> bool:  # type: ignore[override]
        return bool(self.lambda_i) and self.relative

    @property
    def brought_in(self) -> float:
        return brought_in(self.progress, self.ramp)

    @property
    def loss_weights(self) -> dict[str, float]:
        ramped = {"ponder": self.lambda_p * self.brought_in, "target_depth": self.lambda_t * self.brought_in}
        return ramped | {"importance": self.lambda_i}

    def hold_budget(self, cost: Tensor) -> None:
        """Integral control: the bar rises while the batch costs more than the budget, and falls when it costs less."""
        if self.budget is None:
            return
        self.held = True
        wanted = goal(self.budget, self.shape, self.brought_in)
        # In place: a recorded step reads it where it lies. Nothing keeps the old value for a backward pass.
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
