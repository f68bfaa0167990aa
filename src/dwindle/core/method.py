"""Method and Verdict: how a paper's idea tells the loop which tokens go on.

A method is one file in `dwindle/methods`. It is found by itself; nothing else needs an edit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..errors import DwindleError
from ..ops.merging import Merge
from ..ops.rows import Rows
from ..settings import checked, parameters
from .backbone import Shape
from .cost import budget_share
from .tokens import Probe, Tokens
from .tokens import wide as wide
from .trace import Trace

if TYPE_CHECKING:
    from .model import Output


@dataclass
class Verdict:
    """What a method says after a block, all on rows."""

    keep: Tensor | None  # bool: which rows go on; None: nothing is decided here
    weight: Tensor | None = None  # share of this block's output in the token's result; None: the last state counts
    gate: Tensor | None = None  # 1 for rows that go on, else 0, with the gradient of all soft decisions so far
    merge: Merge | None = None  # which rows that stop are merged with which that go on; None: they are gone
    rows: Rows | None = None  # the rows that go on as a list, where a kernel has made it beside `keep`
    record: dict[str, Tensor] = field(default_factory=dict)  # values for the trace
    exit: Tensor | None = None  # (B, classes): logits read at this depth, for the trace


class Method(nn.Module):
    """Constructor arguments are the configuration and are kept under their own names. The annotation of each says what
    it may be, and `checked` refuses the rest. Parameters and buffers are the only tensors here: values per token are
    in `tokens.notes`."""

    registry: ClassVar[dict[str, type[Method]]] = {}
    paper: ClassVar[str] = ""
    # The attribute that sets the cost after training, the cheapest and the dearest of its values.
    operating_point: tuple[str, float, float] | None = None
    renamed: ClassVar[dict[str, str]] = {}  # options as older checkpoints call them, and what they are called
    per_image_point: bool = False  # it reads `operating_value`, so each image of a batch may have its own
    keeps_prefix: bool = False  # all prefix tokens go on to the end, unless other depths are forced
    judges_answers: ClassVar[bool] = False  # it decides by the class probabilities so far
    asks_attention: bool = False  # its losses read the teacher's attention
    asks_features: bool = False  # and its features
    needs_training: ClassVar[bool] = True  # its decisions mean nothing before it has been trained
    rival: ClassVar[bool] = False  # it is there to be compared with
    variants: ClassVar[tuple[str, ...]] = ()  # constructors with other settings, which take a budget too
    trained: bool = False  # it has been in training, here or before it was loaded
    held: bool = False  # so has its budget
    told: bool = False  # that one of these is not so
    progress: float = 1.0  # share of the training done; the training loop sets it, ramps read it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.registry[cls.__name__] = cls
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    def bind(self, shape: Shape) -> None:
        """Called once by `adapt`, when the backbone is known: check settings against it, build what depends on it."""
        self.shape = shape

    def seen(self, images: Tensor) -> Tensor:
        """(B, C, height, width): what the model is given in the place of these images, of any size in whole patches.
        Where depths are forced it is given the images themselves."""
        return images

    def seen_size(self, image: tuple[int, int]) -> tuple[int, int]:
        """Height and width of what the model is given in the place of an image of this size."""
        return image

    def start(self, tokens: Tokens) -> Tokens:
        """Before the first block: lay down notes."""
        return tokens

    def probe(self, depth: int) -> Probe:
        """What block `depth` (from 0) shall leave behind in `tokens.probed`."""
        return Probe()

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        """After block `depth` (from 0)."""
        raise NotImplementedError

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        """The method's own loss terms, unweighted. `teacher` is a static model's output for the batch, with its
        attention in the trace if `asks_attention` (in training the mean over blocks, at each of them), and its
        features if `asks_features`."""
        return {}

    def exit_weights(self, trace: Trace) -> Tensor | None:
        """(L, B): how much the answer read at each depth counts in the task loss. None: the last one alone."""
        return None

    @property
    def loss_weights(self) -> dict[str, float]:
        """total = task + sum of weight * term."""
        return {}

    def hold_budget(self, cost: Tensor) -> None:
        """After each training batch, which cost this share of the static model's: move what holds the budget."""

    def operating_value(self, tokens: Tokens, name: str) -> Any:
        """The method's setting `name`; on rows, where it is the operating point and each image was given its own."""
        turned = self.operating_point is not None and self.operating_point[0] == name
        given = tokens.notes.get("operating_point") if turned else None
        return getattr(self, name) if given is None else given

    def check_settings(self) -> None:
        """Refuse a setting turned to NaN, which is in no order: every token would stop at it, or none. Numbers on a GPU
        are not looked at, as each look waits for it."""
        given: dict[str, float] = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        for name, held in (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)):
            if type(held) in (Tensor, nn.Parameter) and held.device.type == "cpu" and held.numel() == 1:
                given[name] = held.item()
        for name, value in given.items():
            require(value == value, f"{name} = nan", f"at it {type(self).__name__} decides nothing; set it to a number")

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        """Multiply-accumulates the method itself adds after block `depth`, for images with that many live tokens."""
        return torch.zeros_like(tokens)

    def tell_unready(self) -> None:
        """Warn once that the method has learnt nothing yet, or does not keep the budget it was given."""
        if self.told or not self.needs_training or torch.compiler.is_compiling():
            return
        name, budget = type(self).__name__, getattr(self, "budget", None)
        if not self.trained:
            kinds = sorted(self.registry.items())
            ready = ", ".join(kind for kind, made in kinds if not made.needs_training and kind != "Static")
            why = (
                f"{name} has not been trained: what it answers, and what that costs, means nothing yet. Train it, or "
                f"take a method that needs no training ({ready})."
            )
        elif budget is not None and not self.held and type(self).hold_budget is not Method.hold_budget:
            why = (
                f"{name} was trained, but its budget of {budget} was never held, so it costs what chance gave. Call "
                "model.hold_budget(out) after every training step, or now dwindle.calibrate(model, images, budget)."
            )
        else:
            return
        self.told = True
        warnings.warn(why, stacklevel=3)

    @property
    def config(self) -> dict[str, Any]:
        return settings(self)

    @classmethod
    def from_config(cls, options: dict[str, Any]) -> Self:
        """The method of a saved `config`, also of a version in which options had other names."""
        return cls(**{cls.renamed.get(name, name): value for name, value in options.items()})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.config.items())


def ways() -> dict[str, type[Method]]:
    """The kind of method by each name that a user may give: its own, or with a constructor's: 'ToMe.for_features'."""
    kinds = sorted(Method.registry.items())
    return {way: kind for name, kind in kinds for way in (name, *(f"{name}.{variant}" for variant in kind.variants))}


def constructor(way: str) -> Callable[..., Method]:
    """What makes the method of one of these names."""
    kind, variant = ways()[way], way.partition(".")[2]
    made: Callable[..., Method] = getattr(kind, variant) if variant else kind
    return made


def brought_in(progress: float, ramp: float) -> float:
    """0 to 1 over the first `ramp` of the training."""
    return min(1.0, progress / ramp) if ramp else 1.0


def goal(budget: float | str, shape: Shape, share: float) -> float:
    """The share of the static cost that training holds while so much of the budget is brought in."""
    return 1 + (budget_share(budget, shape) - 1) * share


def settings(owner: nn.Module) -> dict[str, Any]:
    """Constructor arguments as they stand now, as JSON."""
    return {name: _plain(getattr(owner, name)) for name in parameters(type(owner))}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return round(value.item(), 7)
    return list(value) if isinstance(value, tuple) else value


def require(condition: bool, given: str, expected: str) -> None:
    """A setting out of range, in one sentence."""
    if not condition:
        raise DwindleError(f"{given}: {expected}.")


def check_stages(stages: tuple[int, ...], shape: Shape) -> None:
    """A decision needs a block before it, and saves something only if a block follows."""
    fits = bool(stages) and stages[0] >= 1 and stages[-1] <= shape.blocks - 1
    require(fits, f"stages = {stages}", f"tokens leave after blocks 1..{shape.blocks - 1} of this backbone")


def log_gaussian(centre: Tensor, blocks: int, sigma: float) -> Tensor:
    """AHT-ViT Eq. 3: log P(l), P proportional to exp(-(l - centre)^2 / (2 sigma^2)) over l = 1..L, on a new first axis.

    In logarithms, as a plan that lies far off has a probability too small for floating point.
    """
    layers = torch.arange(1, blocks + 1, device=centre.device, dtype=centre.dtype)
    layers = layers.view(-1, *[1] * centre.dim())
    return torch.log_softmax(-((layers - centre) ** 2) / (2 * sigma**2), dim=0)


def halting_verdict(tokens: Tokens, before: Tensor, score: Tensor, keep: Tensor) -> Verdict:
    """ACT's and A-ViT's Eq. 6-7: this state's share in a token's result is the token's score if it goes on, and the
    remainder if it stops."""
    remainder = (1 - before).clamp_min(0)  # Eq. 6
    # Eq. 7. A token kept past a sum of 1 (class token, raised threshold, forced depth) has no probability left.
    probability = torch.where(keep, torch.minimum(score, remainder), remainder)
    return Verdict(keep, weight=probability.to(tokens.x.dtype), record={"score": score, "remainder": remainder})


def ponder_cost(trace: Trace) -> Tensor:
    """A-ViT Eq. 8, N + R: N is constant, the remainder at the exit carries the gradient."""
    exits = trace.depth
    at_exit = torch.arange(1, trace.blocks + 1, device=exits.device)[:, None, None] == exits
    return (exits + (trace.stack("remainder") * at_exit).sum(0)).mean()


def surviving(hazard: Tensor) -> Tensor:
    """prod_{j <= l} (1 - h_j) over the first axis.

    By logarithms: the backward pass of cumprod looks for zeros on the GPU, and waits for the answer.
    """
    return (1 - hazard).clamp_min(1e-12).log().cumsum(0).exp()


def halting_distribution(scores: Tensor, live: Tensor, kind: str = "act") -> Tensor:
    """(L, B, N) scores h of live tokens -> (L, B, N) probability that a token halts exactly at l; sums to 1 over l.

    'act' (A-ViT Eq. 6-7): p_l = h_l below the exit N, and the remainder 1 - sum h at N.
    'hazard': h_l is the chance to halt at l of a token that came so far, p_l = h_l prod_{j<l} (1 - h_j), the rest at N.
    """
    live_f = live.to(scores.dtype)
    last = live_f - torch.cat([live_f[1:], torch.zeros_like(live_f[:1])])  # 1 at the exit layer
    if kind == "act":
        before = scores.cumsum(0) - scores
        left = (1 - before).clamp_min(0)
        return torch.where(last > 0, left, torch.minimum(scores, left) * live_f)
    stay = torch.cat([torch.ones_like(scores[:1]), surviving(scores * live_f)[:-1]])
    return torch.where(last > 0, stay, scores * stay * live_f)


def halting_kl(actual: Tensor, log_target: Tensor) -> Tensor:
    """KL(actual || target) over the first axis. Where `actual` is 0, so are its term and that term's gradient."""
    log_actual = torch.where(actual > 0, actual, 1.0).log()
    return (actual * (log_actual - log_target)).sum(0)
