"""Method and Verdict: how a paper's idea tells the loop which tokens go on.

A method is one file in `dwindle/methods`. It registers itself, so no other file needs an edit.
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
    """A method's decision after a block. Values are on rows."""

    keep: Tensor | None  # bool: which rows go on; None: all, as nothing is decided after this block
    weight: Tensor | None = None  # weight of this block's output in the token's result; None: the last state counts
    gate: Tensor | None = None  # 1 for rows that go on, else 0, with the gradient of all soft decisions so far
    merge: Merge | None = None  # how rows that stop are merged into rows that go on; None: they are not merged
    rows: Rows | None = None  # the rows that go on as a list, where a kernel made it together with `keep`
    record: dict[str, Tensor] = field(default_factory=dict)  # values for the trace
    exit: Tensor | None = None  # (B, classes): logits of an exit at this depth, for the trace


class Method(nn.Module):
    """A paper's rule for which tokens go on.

    Constructor arguments are the configuration and are kept as attributes of the same names. Each argument's annotation
    says which values are allowed, and `checked` refuses others. The only tensors here are parameters and buffers;
    values per token are in `tokens.notes`.
    """

    registry: ClassVar[dict[str, type[Method]]] = {}
    paper: ClassVar[str] = ""
    # The name of the attribute that sets the cost after training, its cheapest value and its most expensive value.
    operating_point: tuple[str, float, float] | None = None
    renamed: ClassVar[dict[str, str]] = {}  # option names of older checkpoints -> the names of these options
    per_image_point: bool = False  # the method reads `operating_value`, so each image of a batch may have its own
    keeps_prefix: bool = False  # all prefix tokens go on to the end, unless other depths are forced
    exits_by_confidence: ClassVar[bool] = False  # the method decides by the class probabilities so far
    needs_teacher_attention: bool = False  # the method's losses read the teacher's attention
    needs_teacher_features: bool = False  # the method's losses read the teacher's features
    needs_training: ClassVar[bool] = True  # the method's decisions mean nothing before training
    baseline: ClassVar[bool] = False  # the method is a baseline to compare others with
    variants: ClassVar[tuple[str, ...]] = ()  # names of other constructors, which take a budget too
    trained: bool = False  # the method was trained, here or before it was loaded
    budget_held: bool = False  # training or calibration held the method's budget
    warned: bool = False  # `warn_untrained` has warned already
    progress: float = 1.0  # the share of training that is done; the training loop sets it, ramps read it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.registry[cls.__name__] = cls
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    def bind(self, shape: Shape) -> None:
        """Check the settings against the backbone and build what depends on its shape. `adapt` calls this once."""
        self.shape = shape

    def resize(self, images: Tensor) -> Tensor:
        """(B, C, height, width): the images that the model computes, which may be smaller than `images`; both sides are
        multiples of the patch. Where depths are forced the model computes the images themselves."""
        return images

    def resized_size(self, image: tuple[int, int]) -> tuple[int, int]:
        """Height and width that `resize` gives an image of this height and width."""
        return image

    def start(self, tokens: Tokens) -> Tokens:
        """The tokens before the first block, with the method's first notes."""
        return tokens

    def probe(self, depth: int) -> Probe:
        """What block `depth` (from 0) records in `tokens.probed`."""
        return Probe()

    def step(self, depth: int, tokens: Tokens) -> Verdict:
        """The verdict after block `depth` (from 0)."""
        raise NotImplementedError

    def losses(self, out: Output, teacher: Output | None = None) -> dict[str, Tensor]:
        """The method's own loss terms, unweighted.

        teacher: a static model's output for the batch. Its trace holds the attention if `needs_teacher_attention`
        (in training every block holds the mean over blocks), and it has features if `needs_teacher_features`.
        """
        return {}

    def exit_weights(self, trace: Trace) -> Tensor | None:
        """(L, B): the weight of each depth's answer in the task loss. None: only the last answer counts."""
        return None

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weight of each loss term: total = task + sum of weight * term."""
        return {}

    def hold_budget(self, cost: Tensor) -> None:
        """Adjust what holds the budget, after each training batch. cost: the batch's share of the static cost."""

    def operating_value(self, tokens: Tokens, name: str) -> Any:
        """The setting `name`. If it is the operating point and each image was given its own: its values on rows."""
        is_operating_point = self.operating_point is not None and self.operating_point[0] == name
        on_rows = tokens.notes.get("operating_point") if is_operating_point else None
        return getattr(self, name) if on_rows is None else on_rows

    def check_settings(self) -> None:
        """Refuse a setting that became NaN: every comparison with it is false, so all tokens would stop, or none.
        Numbers on a GPU are not checked, because reading them would wait for the GPU."""
        numbers: dict[str, float] = {name: value for name, value in vars(self).items() if isinstance(value, float)}
        for name, tensor in (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)):
            if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.numel() == 1:
                numbers[name] = tensor.item()
        for name, value in numbers.items():
            require(value == value, f"{name} = nan", f"at it {type(self).__name__} decides nothing; set it to a number")

    def macs(self, tokens: Tensor, depth: int) -> Tensor:
        """Multiply-accumulates that the method adds after block `depth`, for images with this many live tokens."""
        return torch.zeros_like(tokens)

    def warn_untrained(self) -> None:
        """Warn once if the method was never trained, or if its budget was never held."""
        if self.warned or not self.needs_training or torch.compiler.is_compiling():
            return
        name, budget = type(self).__name__, getattr(self, "budget", None)
        if not self.trained:
            kinds = sorted(self.registry.items())
            ready = ", ".join(name for name, kind in kinds if not kind.needs_training and name != "Static")
            message = (
                f"{name} has not been trained: what it answers, and what that costs, means nothing yet. Train it, or "
                f"take a method that needs no training ({ready})."
            )
        elif budget is not None and not self.budget_held and type(self).hold_budget is not Method.hold_budget:
            message = (
                f"{name} was trained, but its budget of {budget} was never held, so it costs what chance gave. Call "
                "model.hold_budget(out) after every training step, or now dwindle.calibrate(model, images, budget)."
            )
        else:
            return
        self.warned = True
        warnings.warn(message, stacklevel=3)

    @property
    def config(self) -> dict[str, Any]:
        return settings(self)

    @classmethod
    def from_config(cls, options: dict[str, Any]) -> Self:
        """The method with the options of a saved `config`, which may come from a version with other option names."""
        return cls(**{cls.renamed.get(name, name): value for name, value in options.items()})

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.config.items())


def methods_by_name() -> dict[str, type[Method]]:
    """The method class of every name a user may give: the class's own, or with a variant: 'ToMe.for_features'."""
    kinds = sorted(Method.registry.items())
    return {full: kind for name, kind in kinds for full in (name, *(f"{name}.{variant}" for variant in kind.variants))}


def constructor(name: str) -> Callable[..., Method]:
    """The class or class method that makes the method of this name, which is one of `methods_by_name`."""
    kind, variant = methods_by_name()[name], name.partition(".")[2]
    made: Callable[..., Method] = getattr(kind, variant) if variant else kind
    return made


def ramp_factor(progress: float, ramp: float) -> float:
    """A number that rises from 0 to 1 over the first share `ramp` of the training. progress: the share that is done."""
    return min(1.0, progress / ramp) if ramp else 1.0


def goal(budget: float | str, shape: Shape, share: float) -> float:
    """The share of the static cost to hold in training: it goes from 1 to the budget as `share` goes from 0 to 1."""
    return 1 + (budget_share(budget, shape) - 1) * share


def settings(owner: nn.Module) -> dict[str, Any]:
    """The present values of the constructor arguments, as JSON."""
    return {name: _plain(getattr(owner, name)) for name in parameters(type(owner))}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return round(value.item(), 7)
    return list(value) if isinstance(value, tuple) else value


def require(condition: bool, given: str, expected: str) -> None:
    """Refuse a setting that is out of range, with a sentence of what was given and what is expected."""
    if not condition:
        raise DwindleError(f"{given}: {expected}.")


def check_stages(stages: tuple[int, ...], shape: Shape) -> None:
    """Refuse stages outside 1..L-1: a decision needs a block before it, and saves something only if a block follows."""
    fits = bool(stages) and stages[0] >= 1 and stages[-1] <= shape.blocks - 1
    require(fits, f"stages = {stages}", f"tokens leave after blocks 1..{shape.blocks - 1} of this backbone")


def log_gaussian(centre: Tensor, blocks: int, sigma: float) -> Tensor:
    """AHT-ViT Eq. 3: log P(l), P proportional to exp(-(l - centre)^2 / (2 sigma^2)) over l = 1..L, on a new first axis.

    It is a logarithm because far from the centre the probability itself is too small for floating point.
    """
    layers = torch.arange(1, blocks + 1, device=centre.device, dtype=centre.dtype)
    layers = layers.view(-1, *[1] * centre.dim())
    return torch.log_softmax(-((layers - centre) ** 2) / (2 * sigma**2), dim=0)


def halting_verdict(tokens: Tokens, before: Tensor, score: Tensor, keep: Tensor) -> Verdict:
    """The verdict of ACT and A-ViT (Eq. 6-7): the weight of this state in a token's result is the token's score if it
    goes on, and the remainder if it stops. before: the sum of the token's earlier scores."""
    remainder = (1 - before).clamp_min(0)  # Eq. 6
    # Eq. 7. A token kept past a sum of 1 (class token, raised threshold, forced depth) has no probability left.
    probability = torch.where(keep, torch.minimum(score, remainder), remainder)
    return Verdict(keep, weight=probability.to(tokens.x.dtype), record={"score": score, "remainder": remainder})


def ponder_cost(trace: Trace) -> Tensor:
    """A-ViT Eq. 8, N + R, averaged over tokens. N is constant; the remainder R at the exit carries the gradient."""
    exits = trace.depth
    at_exit = torch.arange(1, trace.blocks + 1, device=exits.device)[:, None, None] == exits
    return (exits + (trace.stack("remainder") * at_exit).sum(0)).mean()


def surviving(hazard: Tensor) -> Tensor:
    """prod_{j <= l} (1 - h_j) over the first axis.

    It adds logarithms, because the backward pass of cumprod looks for zeros and so waits for the GPU.
    """
    return (1 - hazard).clamp_min(1e-12).log().cumsum(0).exp()


def halting_distribution(scores: Tensor, live: Tensor, kind: str = "act") -> Tensor:
    """(L, B, N) scores h of live tokens -> (L, B, N) probability that a token halts exactly at l; sums to 1 over l.

    'act' (A-ViT Eq. 6-7): p_l = h_l below the exit N, and the remainder 1 - sum h at N.
    'hazard': h_l is the probability to halt at l given that the token got there: p_l = h_l prod_{j<l} (1 - h_j) below
    the exit N, and the rest at N.
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
    """KL(actual || target) over the first axis. Where `actual` is 0, the term and its gradient are 0 too."""
    log_actual = torch.where(actual > 0, actual, 1.0).log()
    return (actual * (log_actual - log_target)).sum(0)
