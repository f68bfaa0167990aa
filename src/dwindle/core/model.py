"""AdaptiveViT, the one loop; adapt(), the one verb. The whole forward path is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ..errors import DwindleError, unknown
from ..ops.merging import Merge
from ..ops.patches import cutting, regridded
from .backbone import Backbone, backbone_of
from .checks import check_dtype, check_finite, check_options, check_tensor
from .cost import static_macs, trace_macs
from .face import Call, Face, Start, answered, place, with_loss
from .give_back import GiveBack
from .heads import PatchHead
from .masked import Masked
from .method import Method
from .packed import Packed
from .registry import family_of
from .run import compiled_now
from .terms import loss_terms
from .trace import Trace

if TYPE_CHECKING:
    from ..runtime.prepared import PreparedViT

Outer = TypeVar("Outer", bound=nn.Module)
LAYOUTS: dict[str, type[Masked] | type[Packed]] = {"masked": Masked, "packed": Packed}


@dataclass(repr=False)
class Output:
    """What a model says of a batch. Also read as `out["logits"]`, and as the tuple (loss, logits), or (logits,)."""

    logits: Tensor  # (B, classes); of a head for patches (B, P, outputs)
    trace: Trace
    features: Tensor  # (B, N, D): every token; one that stopped early has what it was given back
    loss: Tensor | None = None  # where labels were given

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return getattr(self, key)
        return tuple(value for value in (self.loss, self.logits) if value is not None)[key]

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f"loss={self.loss.item():.4f}, "
        shapes = f"logits={tuple(self.logits.shape)}, features={tuple(self.features.shape)}"
        return f"{type(self).__name__}({loss}{shapes}, trace={self.trace})"


class AdaptiveViT(Face):
    """A vision transformer (`vit`, its weights and keys untouched) and the method that says which tokens go on."""

    def __init__(
        self,
        vit: nn.Module,
        method: Method,
        dense_head: PatchHead | None = None,
        give_back: GiveBack | None = None,
    ) -> None:
        """dense_head: answers for each patch, in the place of the model's own head. give_back: what tokens that stopped
        early get at the end; None: the state of the token they joined, or their own."""
        super().__init__()
        self.backbone: Backbone = backbone_of(vit)
        self.dense_head = self.backbone.head = dense_head
        if dense_head is not None and method.judges_answers:
            raise DwindleError(
                f"{type(method).__name__} stops an image when its class is clear, and a head for patches tells no "
                "class; take a method that stops tokens, such as AHT or ToMe."
            )
        method.bind(self.backbone.shape)
        if give_back is not None:
            give_back.bind(self.backbone.shape)
        self.give_back = give_back
        self.vit = vit
        self.method = method
        self.layout: str | None = None  # None: masked while training, packed in eval
        self.inside = False  # whether it stands in a larger model, and answers exactly as the wrapped model does
        self.checks = True  # whether answers are looked at for NaN; on a GPU each look waits for it
        self.backbone.install()

    def forward(
        self,
        images: Tensor | None = None,
        layout: str | None = None,
        depths: Tensor | None = None,
        operating_point: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Output:
        """`depths` (B, N) forces when each token stops: scores are still computed, only the outcome is replaced.

        operating_point: (B,) the method's setting for each image, so that images with other budgets share a batch.

        layout: 'masked' or 'packed'. None: masked while training, packed in eval. What computes faster than these is
        for weights that stay: `prepare`.

        pixel_values, labels, options: images, what they show, and whatever else a Hugging Face model is called with, by
        its names; its own class of answers comes back, which has `trace` and `features` too. With labels `out.loss` is
        there, and while training the call is a whole step's: it holds the budget too.
        """
        images = self.check_images(self.backbone.given(pixel_values if images is None else images, options))
        start = self.beginning(layout, depths is not None)
        if self.speaks and not torch.compiler.is_compiling():
            return_dict = options.pop("return_dict", True)
            out = answered(self, images, start, options, depths=depths, operating_point=operating_point)
        elif self.inside and not torch.compiler.is_compiling():
            answer: Output = Call(self, images, start)("__call__", images, **options)
            return answer  # in truth whatever the wrapped model returns, as the model around it wants
        else:
            check_options(self.vit, options)
            out, return_dict = self.run(images, start, depths, operating_point), True
        self.check_logits(out.logits, images)
        if labels is not None:
            loss = self.loss(out, labels, task_loss=self.backbone.task_loss)["total"]
            out = with_loss(out, loss)
            if self.training:
                self.hold_budget(out)
        told: Output = out if return_dict else out.to_tuple()
        return told

    @property
    def speaks(self) -> bool:
        """Whether the wrapped model's own classes of answers come back."""
        return self.backbone.speaks and self.dense_head is None

    def beginning(self, layout: str | None = None, forced: bool = False) -> Start:
        """What begins the layout of a call. forced: the depths of tokens are given."""
        layout = layout or self.layout or ("masked" if self.training else "packed")
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
        if self.training:
            self.method.trained = True
        elif not forced:
            self.method.tell_unready()
        return LAYOUTS[layout].start

    def run(
        self,
        images: Tensor,
        start: Start,
        depths: Tensor | None = None,
        operating_point: Tensor | None = None,
    ) -> Output:
        """Embed, the loop, read out. `start` begins the layout."""
        seen = self.method.seen(images) if depths is None else images
        with cutting(seen):
            embedded = self.backbone.embed(seen)
        features, trace = self.loop(embedded, seen, images, start, depths=depths, operating_point=operating_point)
        whole = self.whole(features, seen, images)
        return Output(self.backbone.logits(features if self.dense_head is None else whole), trace, whole)

    def whole(self, features_BND: Tensor, seen: Tensor, images: Tensor) -> Tensor:
        """Of a smaller image too every token of the image itself comes back."""
        grid, own = self.backbone.grid(seen), self.backbone.grid(images)
        return features_BND if grid == own else regridded(features_BND, self.backbone.shape.prefix, grid, own)

    def loop(
        self,
        embedded_BND: Tensor,
        seen: Tensor,
        images: Tensor,
        start: Start,
        *,
        depths: Tensor | None = None,
        operating_point: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> tuple[Tensor, Trace]:
        """The loop over blocks: every token's state in the end, and what happened.

        seen: what was embedded of the images. states: a list which is given every token's state after each block, too.
        """
        shape = self.backbone.shape
        tokens = start(embedded_BND, shape.prefix).changed(
            reader=self.backbone.logits,
            norm=self.backbone.normed,
            positions=self.backbone.positions(seen),
            compiling=compiled_now(),
            images=seen,
        )
        if depths is not None:
            if tuple(depths.shape) != tuple(tokens.shape):
                wanted = " x ".join(map(str, tokens.shape))
                raise DwindleError(f"depths of shape {tuple(depths.shape)}: give one per image and token, {wanted}.")
            tokens.notes["forced"] = depths.to(embedded_BND.device).reshape(tokens.x.shape[:-1])
        if operating_point is not None:
            self.check_operating_point(operating_point, tokens.shape[0])
            tokens.notes["operating_point"] = tokens.per_image(operating_point.to(embedded_BND.device))
        grid, whole = self.backbone.grid(seen), self.backbone.grid(images)
        trace = Trace(tokens.shape, shape.prefix, grid, shape.blocks, whole=None if whole == grid else whole)

        nearest = self.give_back is not None and self.give_back.halted == "nearest"
        tokens = self.method.start(tokens)
        for depth, block in enumerate(self.backbone.blocks):
            probe = self.method.probe(depth)
            probe = probe._replace(keys=True) if nearest else probe
            tokens = self.backbone.run(block, tokens, probe)  # only attention looks at neighbours
            verdict = self.method.step(depth, tokens)
            tokens.add_final(verdict.weight)
            trace.record(tokens, verdict.record, verdict.exit)
            # It joins the nearest with no weight: that one stays as it is, and its state is what comes back.
            merge = Merge(weight=tokens.numbers(0.0)) if nearest and verdict.merge is None else verdict.merge
            # Masked: a gate closes. Packed: the list gets shorter.
            tokens = tokens.advance(verdict.keep, verdict.gate, merge, verdict.rows)
            if states is not None:
                states.append(tokens.given_back(tokens.stream()))
            if tokens.empty:
                break
        stream = tokens.stream()
        features = tokens.given_back(stream)
        if self.give_back is not None:
            features = self.give_back(stream, features, ~trace.to_the_end)
        return features, trace

    @property
    def classes(self) -> int:
        """Of its head; 0: it has none."""
        return self.backbone.shape.classes

    def prepare(self, images: int | None = None, details: bool = False) -> PreparedViT:
        """A copy for weights that stay, which answers as this machine computes fastest: `fast = model.prepare()`.

        What happens to this model afterwards does not reach it: prepare again after training. images: how many it will
        answer in all, about; for few of them a CPU records no graph. details: answers shall have features and what the
        method wrote into the trace, too.
        """
        prepared: PreparedViT = family_of(self).prepare(self, images=images, details=details)
        return prepared

    def loss(
        self,
        out: Output,
        labels: Tensor,
        teacher: Output | None = None,
        *,
        label_weight: float = 1.0,
        teacher_weight: float = 1.0,
        weights: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        """The task's cross-entropy, the method's terms, and their weighted sum under "total". Changes nothing: a budget
        is held by `hold_budget`, once a step.

        labels: (B,) classes, or (B, classes) shares. teacher: what a static model said of the batch; adds "distill" and
        grounds methods that ask for it. options: those of `core.terms.loss_terms`. weights: of the terms, in their
        order, where a recorded step reads them; None: as the method says, and of task and teacher as given here.
        """
        terms = loss_terms(self, out, labels, teacher, **options)
        if weights is None:
            named = self.weights(label_weight, teacher_weight)
            total = torch.stack([named[name] * term for name, term in terms.items()]).sum()
        else:
            total = (torch.stack([term.float() for term in terms.values()]) * weights[: len(terms)]).sum()
        return terms | {"total": total}

    def hold_budget(self, out: Output) -> None:
        """After a training step on this batch: what it cost moves the bar that holds the budget."""
        self.method.hold_budget(self.cost(out.trace))

    def weights(self, label_weight: float = 1.0, teacher_weight: float = 1.0) -> dict[str, float]:
        """Of the loss terms, by their names."""
        return {"task": label_weight, "distill": teacher_weight} | self.method.loss_weights

    def states(self, out: Output) -> Tensor:
        """(B, N, D): the features as the wrapped model gives them, after its last norm."""
        return self.backbone.normed(out.features)

    @torch.no_grad()
    def macs(self, trace: Trace) -> Tensor:
        """(B,) multiply-accumulates of each image."""
        macs = trace_macs(self.backbone.shape, trace, self.method)
        return macs if self.give_back is None else macs + self.give_back.macs(trace)

    def cost(self, trace: Trace) -> Tensor:
        """What the images of the trace cost, as a share of the static model's."""
        return (self.macs(trace).mean() / self.static_macs(trace)).float()

    def static_macs(self, trace: Trace | None = None) -> float:
        """The same image with nothing halted."""
        shape = self.backbone.shape
        grid = None if trace is None else trace.whole or trace.grid
        image = None if grid is None else (grid[0] * shape.patch[0], grid[1] * shape.patch[1])
        return static_macs(shape, image)

    def with_method(self, method: Method) -> AdaptiveViT:
        """These weights under another method. Both hold the same wrapped model, which stays adapted."""
        other = AdaptiveViT.__new__(type(self))
        nn.Module.__init__(other)
        state = {name: value for name, value in vars(self).items() if name not in vars(other)}
        other.__dict__.update(state)
        method.bind(self.backbone.shape)
        other.vit, other.dense_head, other.method = self.vit, self.dense_head, method
        other.give_back = self.give_back
        return other.train(self.training)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **given: Any) -> None:
        """Blocks run again in the backward pass, which takes time for memory. As Hugging Face's Trainer asks for it."""
        self.backbone.checkpoint(given | (gradient_checkpointing_kwargs or {}))

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **given: Any) -> None:
        """The same, as later versions of it call it."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **given)

    def unwrap(self) -> nn.Module:
        """The wrapped model, as it was before `adapt` (its weights as trained since)."""
        self.backbone.remove()
        return self.vit

    def check_images(self, images: Any) -> Tensor:
        """The images, if the model takes them."""
        given: Tensor = check_tensor(images)
        wanted = self.backbone.misfit(given)
        if wanted is not None or not given.is_floating_point():
            raise DwindleError(
                f"Images of shape {tuple(given.shape)} and type {given.dtype} do not fit this model; it takes floats"
                f"{'' if wanted is None else ' ' + wanted}; resize the images or build the model with img_size=..."
            )
        check_dtype(given, next(self.vit.parameters()).dtype)
        self.backbone.check_heard()
        if self.checks and not (self.training or torch.compiler.is_compiling()):
            self.method.check_settings()
        return given

    def check_operating_point(self, given: Tensor, images: int) -> None:
        method = type(self.method).__name__
        if not self.method.per_image_point or given.shape != (images,):
            takes = "does" if self.method.per_image_point else "has one setting for the whole batch"
            raise DwindleError(
                f"operating_point of shape {tuple(given.shape)} for {images} images: give one number per image, and to "
                f"a method that takes them ({method} {takes})."
            )
        looks = self.checks and not torch.compiler.is_compiling()
        if looks and not (given.is_cuda and torch.cuda.is_current_stream_capturing()) and given.isnan().any():
            raise DwindleError(f"operating_point holds NaN, at which no token of {method} would go on; give numbers.")

    def check_logits(self, logits: Tensor, images: Tensor) -> None:
        if not self.checks or torch.compiler.is_compiling() or (self.training and logits.is_cuda):
            return  # on a GPU in training this look would cost a synchronisation; there the loss says it
        check_finite(logits, images, self, self.training)


@overload
def adapt(
    vit: nn.Module, method: Method, dense_head: PatchHead | None = None, give_back: GiveBack | None = None
) -> AdaptiveViT: ...
@overload
def adapt(
    vit: Outer,
    method: Method,
    dense_head: PatchHead | None = None,
    give_back: GiveBack | None = None,
    *,
    inside: str,
) -> Outer: ...
def adapt(
    vit: Any,
    method: Method,
    dense_head: PatchHead | None = None,
    give_back: GiveBack | None = None,
    *,
    inside: str | None = None,
) -> Any:
    """Make a vision transformer adaptive: `adapt(timm.create_model("deit_small_patch16_224"), AHT())`.

    dense_head: answers for each patch, in the place of the model's own head. give_back: what tokens that stopped early
    get at the end; None: the state of the token they joined, or their own.
    inside: the name of the vision transformer in a larger model, which comes back with that part adaptive and is called
    as before: `adapt(clip, ToMe(r=8), inside="vision_model")`.
    """
    if isinstance(vit, AdaptiveViT):
        raise DwindleError("This model is adaptive already; unwrap() it first to adapt it with another method.")
    if not isinstance(method, Method):
        raise DwindleError(f"{method!r} is no method; pass an instance such as AHT() (see `dwindle methods`).")
    if inside is not None:
        return place(vit, inside, lambda part: adapt(part, method, dense_head, give_back))
    return AdaptiveViT(vit, method, dense_head, give_back)
