"""Who runs which block: `Router`, what it says of a block, and what TSA is measured against.

A router speaks before a block, from the stream as it is then. (B, N) is B sequences of N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.method import require, settings, wide
from ...settings import Share, Whole0, Whole1, checked
from .model import LMShape

if TYPE_CHECKING:
    from .execute import LMOutput

Keys = Literal["offered", "withheld"]


@dataclass(frozen=True)
class Gate:
    """One block's outcome: x + scale * (block(x) - x), with scale = p for those that run and 0 for those that skip."""

    p: Tensor  # (B, N)
    keep: Tensor  # (B, N) bool: who runs
    keys: str = "offered"  # 'withheld': who skips is nobody's key, and a key counts as much as its token runs
    record: dict[str, Tensor] = field(default_factory=dict)  # values for the trace
    exit: Tensor | None = None  # (B, N, V): logits read before the block
    whole: bool = False  # withheld or not at all: a key of who runs counts fully

    @property
    def scale(self) -> Tensor:
        return torch.where(self.keep, self.p, 0.0)

    @property
    def weight(self) -> Tensor | None:
        """(B, N) what keys count; None: all the same."""
        if self.keys == "offered":
            return None
        return self.keep.to(self.p.dtype) if self.whole else self.scale


@dataclass(frozen=True)
class Moment:
    """What a router may look at, just before a block."""

    depth: int  # of the block, from 0
    x: Tensor  # (B, N, D): the stream
    before: Gate | None  # the verdicts on the block before
    read: Callable[[Tensor], Tensor]  # the logits a stream would give now
    at: int = 0  # position of the first token


class Router(nn.Module):
    """Constructor arguments are the configuration, kept under their own names and held to their annotations."""

    registry: ClassVar[dict[str, type[Router]]] = {}
    paper: ClassVar[str] = ""
    # What sets the cost after training, its cheapest and its dearest value.
    operating_point: ClassVar[tuple[str, float, float] | None] = None
    keys: str = "offered"
    looks_ahead: ClassVar[bool] = False  # whether training decides from a whole sequence at once

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.registry[cls.__name__] = cls
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    @property
    def config(self) -> dict[str, Any]:
        return settings(self)

    def bind(self, shape: LMShape) -> None:
        """Called once, when the model is known."""
        self.shape = shape

    def gate(self, now: Moment) -> Gate | None:
        """Before a block; None: all run it as they are."""
        return None

    def compile_parts(self, training: bool) -> None:
        """Compile what decisions are made with, while training or otherwise: other sizes and modes are other code."""

    def losses(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        return {}

    @property
    def loss_weights(self) -> dict[str, float]:
        return {}

    def macs(self, depth: int) -> int:
        """Multiply-accumulates of the decision before block `depth`, per token that it is made for."""
        return 0


class Static(Router):
    """Every token runs every block: the model alone."""

    def __init__(self) -> None:
        super().__init__()


class EarlyExit(Router):
    """A token stops for good once its prediction is sure: highest probability >= threshold, read after every block.

    While training all run, and the task loss is the mean over the answers at all depths. A token that stopped goes on
    offering keys and values, from the state it stopped with.
    """

    paper = "Elbayad et al., Depth-Adaptive Transformer, ICLR 2020; the copied states are theirs"
    operating_point = ("threshold", 0.0, 1.0)

    def __init__(self, threshold: Share = 0.9) -> None:
        super().__init__()
        self.threshold = threshold

    def gate(self, now: Moment) -> Gate | None:
        if now.depth == 0:
            return None
        logits = now.read(now.x)
        sure = wide(logits).softmax(-1).amax(-1).detach()  # (B, N)
        keep = torch.ones_like(sure, dtype=torch.bool)
        if not self.training:
            keep = (sure < self.threshold) | (self.threshold >= 1)
            keep = keep if now.before is None else keep & now.before.keep
        return Gate(torch.ones_like(sure), keep, record={"p": sure}, exit=logits)

    def losses(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        each = [F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) for logits in out.exits]
        return {"exits": torch.stack(each).mean()}

    @property
    def loss_weights(self) -> dict[str, float]:
        exits = self.shape.blocks - 1
        return {"task": 1 / (exits + 1), "exits": exits / (exits + 1)}

    def macs(self, depth: int) -> int:
        # Who has stopped is not asked again, but cost.py counts a decision for all tokens: the dearer reading.
        return self.shape.read_macs if depth else 0


class MoD(Router):
    """Mixture-of-Depths: in every second block the `capacity` share of a sequence's tokens with the highest scores.

    Choosing the best of a whole sequence looks at later tokens, which generation does not have. As in the paper (3.5),
    training chooses so and teaches the score to say by itself whether it will be chosen (a cross-entropy of
    sigmoid(score), its gradient kept from the stream); evaluation and generation run a token where
    sigmoid(score) >= tau, which looks at this token alone. What skips is nobody's key.
    """

    paper = "Raposo et al., Mixture-of-Depths, arXiv 2404.02258"
    operating_point = ("tau", 1.0, 0.0)
    keys = "withheld"
    looks_ahead = True

    def __init__(self, capacity: Share = 0.5, every: Whole1 = 2, tau: Share = 0.5) -> None:
        super().__init__()
        self.capacity, self.every, self.tau = capacity, every, tau

    def bind(self, shape: LMShape) -> None:
        super().bind(shape)
        self.scores = nn.ModuleList(nn.Linear(shape.width, 2) for _ in range(self.every - 1, shape.blocks, self.every))
        for parameter in self.scores.parameters():
            nn.init.normal_(parameter, std=0.02 * (parameter.dim() > 1))

    def gate(self, now: Moment) -> Gate | None:
        if now.depth % self.every != self.every - 1:
            return None
        layer, x = self.scores[now.depth // self.every], now.x
        score = wide(layer(F.layer_norm(x, x.shape[-1:])))[..., 0]
        guess = wide(layer(F.layer_norm(x.detach(), x.shape[-1:])))[..., 1]
        if self.training:
            best = score.topk(math.ceil(self.capacity * x.shape[1]), dim=1).indices
            keep = torch.zeros_like(score, dtype=torch.bool).scatter(1, best, True)
        else:
            keep = guess.sigmoid() >= self.tau
        return Gate(score.sigmoid(), keep, "withheld", {"p": guess.sigmoid(), "guess": guess}, whole=True)

    def losses(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        asked = [i for i, values in enumerate(out.trace.values) if "guess" in values]
        each = [
            F.binary_cross_entropy_with_logits(out.trace.values[i]["guess"], out.trace.live[i].float()) for i in asked
        ]
        return {"guess": torch.stack(each).mean()}

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"guess": 1.0}

    def macs(self, depth: int) -> int:
        return 2 * self.shape.width if depth % self.every == self.every - 1 else 0


class Random(Router):
    """Tokens skip by chance, as often in each block as `rates` say: what routing must be better than.

    Drawn anew at every training step; in evaluation a fixed draw for each block and position, so that a sequence's
    result depends on nothing but itself and generation meets the same decisions.
    """

    drawn: Tensor

    def __init__(self, rates: tuple[Share, ...] = (0.2,), keys: Keys = "offered", seed: Whole0 = 0) -> None:
        super().__init__()
        self.rates, self.keys, self.seed = tuple(rates), keys, seed

    def bind(self, shape: LMShape) -> None:
        super().bind(shape)
        fits = len(self.rates) in (1, shape.blocks)
        require(fits, f"rates = {self.rates}", f"one for all blocks but the first, or one for each of {shape.blocks}")
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(shape.blocks, shape.context, generator=generator)
        self.register_buffer("drawn", drawn, persistent=False)

    def gate(self, now: Moment) -> Gate | None:
        depth, x = now.depth, now.x
        rate = self.rates[depth] if len(self.rates) > 1 else self.rates[0] * (depth > 0)
        if rate == 0:
            return None
        drawn = (
            torch.rand(x.shape[:2], device=x.device)
            if self.training
            else self.drawn[depth, now.at : now.at + x.shape[1]]
        )
        keep = (drawn >= rate).expand(x.shape[:2])
        return Gate(torch.ones(x.shape[:2], device=x.device), keep, self.keys)


class Control(Router):
    """A trained router robbed of its choice, to see what the choice is worth.

    kind: 'mean', every token's update is scaled by the block's mean p, and none skips; 'layer', as many tokens skip in
    each block as the router lets skip there (`rates`), drawn by chance; 'overall', the same number spread over all
    gated blocks alike.
    """

    def __init__(
        self,
        router: Router,
        kind: Literal["mean", "layer", "overall"],
        rates: tuple[float, ...],
        means: tuple[float, ...] = (),
    ) -> None:
        super().__init__()
        self.router, self.kind, self.rates, self.means = router, kind, rates, means
        self.keys, self.shape = router.keys, router.shape

    def gate(self, now: Moment) -> Gate | None:
        gate, depth = self.router.gate(now), now.depth
        if gate is None:
            return None
        if self.kind == "mean":
            return replace(gate, p=torch.full_like(gate.p, self.means[depth]), keep=torch.ones_like(gate.keep))
        gated = self.rates[1:]
        rate = self.rates[depth] if self.kind == "layer" else sum(gated) / len(gated)
        return replace(gate, keep=torch.rand(gate.p.shape, device=gate.p.device) >= rate)

    def macs(self, depth: int) -> int:
        return self.router.macs(depth)
