"""Which tokens run which block: the base class `Router`, its verdict `Gate`, and the routers that TSA is compared with.

A router decides before a block, from the stream at that depth. (B, N) is B sequences of N tokens.
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
    """A router's verdict on one block: x + scale * (block(x) - x), scale = p for tokens that run, 0 for the others."""

    p: Tensor  # (B, N)
    keep: Tensor  # (B, N) bool: which tokens run
    # 'offered': all tokens are keys; 'withheld': only those that run, each with its scale as weight.
    keys: str = "offered"
    record: dict[str, Tensor] = field(default_factory=dict)  # values for the trace
    exit: Tensor | None = None  # (B, N, V): logits read before the block
    full_weight: bool = False  # with withheld keys: the key of a token that runs has weight 1, not p

    @property
    def scale(self) -> Tensor:
        return torch.where(self.keep, self.p, 0.0)

    @property
    def weight(self) -> Tensor | None:
        """(B, N): the weight of each key in attention; None: all 1."""
        if self.keys == "offered":
            return None
        return self.keep.to(self.p.dtype) if self.full_weight else self.scale


@dataclass(frozen=True)
class RouterInput:
    """What a router is given before a block."""

    depth: int  # of the block, from 0
    x: Tensor  # (B, N, D): the stream
    previous: Gate | None  # the gate of the block before
    readout: Callable[[Tensor], Tensor]  # the model's read-out: a stream to logits
    position: int = 0  # of the first token


class Router(nn.Module):
    """Base class of routers. Constructor arguments are the configuration: each is an attribute of the same name, and
    is checked against its annotation."""

    registry: ClassVar[dict[str, type[Router]]] = {}
    paper: ClassVar[str] = ""
    # The setting that moves the cost after training: (name, cheapest value, costliest value).
    operating_point: ClassVar[tuple[str, float, float] | None] = None
    keys: Keys = "offered"
    looks_ahead: ClassVar[bool] = False  # whether decisions in training depend on later tokens

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.registry[cls.__name__] = cls
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    @property
    def config(self) -> dict[str, Any]:
        return settings(self)

    def bind(self, shape: LMShape) -> None:
        """Build what depends on the model's shape; called once."""
        self.shape = shape

    def gate(self, inputs: RouterInput) -> Gate | None:
        """The verdict on the next block; None: all tokens run it, with scale 1."""
        return None

    def compile_parts(self, training: bool) -> None:
        """Compile the modules that decide, for training or for evaluation: each mode has code of its own."""

    def losses(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        """The router's own loss terms, unweighted."""
        return {}

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weight of each loss term; "task", if left out, has weight 1."""
        return {}

    def macs(self, depth: int) -> int:
        """Multiply-accumulates of the decision before block `depth`, for one token."""
        return 0


class Static(Router):
    """Every token runs every block: the model without a router."""

    def __init__(self) -> None:
        super().__init__()


class EarlyExit(Router):
    """A token stops for good once its prediction is sure: highest probability >= threshold, read after every block.

    In training all tokens run, and the task loss is the mean over the answers at all depths. A token that stopped is
    still a key to later tokens, with the state it stopped with.
    """

    paper = "Elbayad et al., Depth-Adaptive Transformer, ICLR 2020; the copied states are theirs"
    operating_point = ("threshold", 0.0, 1.0)

    def __init__(self, threshold: Share = 0.9) -> None:
        super().__init__()
        self.threshold = threshold

    def gate(self, inputs: RouterInput) -> Gate | None:
        if inputs.depth == 0:
            return None
        logits = inputs.readout(inputs.x)
        sure = wide(logits).softmax(-1).amax(-1).detach()  # (B, N)
        keep = torch.ones_like(sure, dtype=torch.bool)
        if not self.training:
            keep = (sure < self.threshold) | (self.threshold >= 1)
            keep = keep if inputs.previous is None else keep & inputs.previous.keep
        return Gate(torch.ones_like(sure), keep, record={"p": sure}, exit=logits)

    def losses(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        losses = [F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) for logits in out.exits]
        return {"exits": torch.stack(losses).mean()}

    @property
    def loss_weights(self) -> dict[str, float]:
        exits = self.shape.blocks - 1
        return {"task": 1 / (exits + 1), "exits": exits / (exits + 1)}

    def macs(self, depth: int) -> int:
        # A token that stopped needs no decision, but cost.py counts one for every token: an upper bound.
        return self.shape.read_macs if depth else 0


class MoD(Router):
    """Mixture-of-Depths: every second block is run by the `capacity` share of a sequence's tokens with the best scores.

    The best of a whole sequence depend on later tokens, which generation does not have. As in the paper (3.5), training
    chooses them, and a second output learns to predict the choice from the token alone (`guess`, by binary
    cross-entropy, without a gradient to the stream). In evaluation and generation a token runs where
    sigmoid(guess) >= tau. A token that skips is no key.
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

    def gate(self, inputs: RouterInput) -> Gate | None:
        if inputs.depth % self.every != self.every - 1:
            return None
        layer, x = self.scores[inputs.depth // self.every], inputs.x
        score = wide(layer(F.layer_norm(x, x.shape[-1:])))[..., 0]
        guess = wide(layer(F.layer_norm(x.detach(), x.shape[-1:])))[..., 1]
        if self.training:
            best = score.topk(math.ceil(self.capacity * x.shape[1]), dim=1).indices
            keep = torch.zeros_like(score, dtype=torch.bool).scatter(1, best, True)
        else:
            keep = guess.sigmoid() >= self.tau
        return Gate(score.sigmoid(), keep, "withheld", {"p": guess.sigmoid(), "guess": guess}, full_weight=True)

    def losses(self, out: LMOutput, targets: Tensor) -> dict[str, Tensor]:
        losses = [
            F.binary_cross_entropy_with_logits(values["guess"], live.float())
            for values, live in zip(out.trace.values, out.trace.live)
            if "guess" in values
        ]
        return {"guess": torch.stack(losses).mean()}

    @property
    def loss_weights(self) -> dict[str, float]:
        return {"guess": 1.0}

    def macs(self, depth: int) -> int:
        return 2 * self.shape.width if depth % self.every == self.every - 1 else 0


class Random(Router):
    """Tokens skip by chance, each block with its own rate: the baseline that a router must beat.

    rates: the share that skips, one for all blocks but the first or one for each. Every training step draws anew; in
    evaluation the draw of a block and position is fixed, so that a sequence's result does not depend on its batch, and
    generation makes the same decisions.
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

    def gate(self, inputs: RouterInput) -> Gate | None:
        depth, x = inputs.depth, inputs.x
        rate = self.rates[depth] if len(self.rates) > 1 else self.rates[0] * (depth > 0)
        if rate == 0:
            return None
        drawn = (
            torch.rand(x.shape[:2], device=x.device)
            if self.training
            else self.drawn[depth, inputs.position : inputs.position + x.shape[1]]
        )
        keep = (drawn >= rate).expand(x.shape[:2])
        return Gate(torch.ones(x.shape[:2], device=x.device), keep, self.keys)


class Control(Router):
    """A trained router without its choice of tokens, which shows what the choice is worth.

    kind: 'mean': every token's update is scaled by the block's mean p, and none skips; 'layer': each block skips at the
    router's own rate (`rates`), but for tokens drawn by chance; 'overall': all gated blocks skip at the mean rate.
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

    def gate(self, inputs: RouterInput) -> Gate | None:
        gate, depth = self.router.gate(inputs), inputs.depth
        if gate is None:
            return None
        if self.kind == "mean":
            return replace(gate, p=torch.full_like(gate.p, self.means[depth]), keep=torch.ones_like(gate.keep))
        gated = self.rates[1:]
        rate = self.rates[depth] if self.kind == "layer" else sum(gated) / len(gated)
        return replace(gate, keep=torch.rand(gate.p.shape, device=gate.p.device) >= rate)

    def macs(self, depth: int) -> int:
        return self.router.macs(depth)
