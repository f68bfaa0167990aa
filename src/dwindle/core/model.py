"""AdaptiveViT with the one loop over blocks, and adapt(), which makes one. The whole forward path is in this file."""

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
    """A model's output for a batch. It can be read as `out["logits"]`, and as the tuple (loss, logits) or (logits,)."""

    logits: Tensor  # (B, classes), or (B, P, outputs) from a head for patches
    trace: Trace
    features: Tensor  # (B, N, D): the final state of every token; see `GiveBack` for tokens that stopped early
    loss: Tensor | None = None  # None: no labels were given

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
        """dense_head: answers for each patch, in the place of the model's own head. give_back: how tokens that stopped
        early get a state at the end; None: the state of the token they were merged into, or else their own."""
        super().__init__()
        self.backbone: Backbone = backbone_of(vit)
        self.dense_head = self.backbone.head = dense_head
        if dense_head is not None and method.exits_by_confidence:
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
        self.inside = False  # part of a larger model: the answer is exactly what the wrapped model returns
        self.checks = True  # check answers for NaN; on a GPU each check waits for it
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
        """The output for a batch of images.

        depths: (B, N) the block after which each token stops. Scores are still computed, only the outcome is replaced.

        operating_point: (B,) the method's setting for each image, so that images with different budgets share a batch.

        layout: 'masked' or 'packed'. None: masked while training, packed in eval. For weights that no longer change,
        `prepare` makes a faster copy.

        pixel_values, labels, options: images, labels and whatever else a Hugging Face model takes, by its names. The
        model's own class of answers is returned, with `trace` and `features` added. With labels the answer has `loss`,
        and while training the call also adjusts the budget, as a whole training step does.
        """
        images = self.check_images(self.backbone.given(pixel_values if images is None else images, options))
        start = self.beginning(layout, depths is not None)
        if self.has_own_outputs and not torch.compiler.is_compiling():
            return_dict = options.pop("return_dict", True)
            out = answered(self, images, start, options, depths=depths, operating_point=operating_point)
        elif self.inside and not torch.compiler.is_compiling():
            answer: Output = Call(self, images, start)("__call__", images, **options)
            return answer  # not an Output: whatever the wrapped model returns, which the model around it expects
        else:
            check_options(self.vit, options)
            out, return_dict = self.run(images, start, depths, operating_point), True
        self.check_logits(out.logits, images)
        if labels is not None:
            loss = self.loss(out, labels, task_loss=self.backbone.task_loss)["total"]
            out = with_loss(out, loss)
            if self.training:
                self.hold_budget(out)
        result: Output = out if return_dict else out.to_tuple()
        return result

    @property
    def has_own_outputs(self) -> bool:
        """Whether calls return the wrapped model's own classes of answers."""
        return self.backbone.has_own_outputs and self.dense_head is None

    def beginning(self, layout: str | None = None, forced: bool = False) -> Start:
        """The function that makes the tokens of a call's layout. forced: the caller gave the depths of tokens."""
        layout = layout or self.layout or ("masked" if self.training else "packed")
        if layout not in LAYOUTS:
            raise unknown("layout", layout, LAYOUTS)
        if self.training:
            self.method.trained = True
        elif not forced:
            self.method.warn_untrained()
        return LAYOUTS[layout].start

    def run(
        self,
        images: Tensor,
        start: Start,
        depths: Tensor | None = None,
        operating_point: Tensor | None = None,
    ) -> Output:
        """Embed the images, run the loop, read the answer out. start: makes the tokens of a layout (`beginning`)."""
        resized = self.method.resize(images) if depths is None else images
        with cutting(resized):
            embedded = self.backbone.embed(resized)
        features, trace = self.loop(embedded, resized, images, start, depths=depths, operating_point=operating_point)
        whole = self.whole(features, resized, images)
        return Output(self.backbone.logits(features if self.dense_head is None else whole), trace, whole)

    def whole(self, features_BND: Tensor, resized: Tensor, images: Tensor) -> Tensor:
        """The features on the grid of `images`. They are interpolated if `resized`, which was computed, is smaller."""
        grid, own = self.backbone.grid(resized), self.backbone.grid(images)
        return features_BND if grid == own else regridded(features_BND, self.backbone.shape.prefix, grid, own)

    def loop(
        self,
        embedded_BND: Tensor,
        resized: Tensor,
        images: Tensor,
        start: Start,
        *,
        depths: Tensor | None = None,
        operating_point: Tensor | None = None,
        states: list[Tensor] | None = None,
    ) -> tuple[Tensor, Trace]:
        """The loop over blocks. Returns the final state of every token (B, N, D) and the trace.

        resized: the images that were embedded (`Method.resize`). states: a list to which every block appends the states
        of all tokens.
        """
        shape = self.backbone.shape
        tokens = start(embedded_BND, shape.prefix).changed(
            reader=self.backbone.logits,
            norm=self.backbone.normed,
            positions=self.backbone.positions(resized),
            compiling=compiled_now(),
            images=resized,
        )
        if depths is not None:
            if tuple(depths.shape) != tuple(tokens.shape):
                wanted = " x ".join(map(str, tokens.shape))
                raise DwindleError(f"depths of shape {tuple(depths.shape)}: give one per image and token, {wanted}.")
            tokens.notes["forced"] = depths.to(embedded_BND.device).reshape(tokens.x.shape[:-1])
        if operating_point is not None:
            self.check_operating_point(operating_point, tokens.shape[0])
            tokens.notes["operating_point"] = tokens.per_image(operating_point.to(embedded_BND.device))
        grid, whole = self.backbone.grid(resized), self.backbone.grid(images)
        trace = Trace(tokens.shape, shape.prefix, grid, shape.blocks, image_grid=None if whole == grid else whole)

        nearest = self.give_back is not None and self.give_back.halted == "nearest"
        tokens = self.method.start(tokens)
        for depth, block in enumerate(self.backbone.blocks):
            probe = self.method.probe(depth)
            probe = probe._replace(keys=True) if nearest else probe
            tokens = self.backbone.run(block, tokens, probe)
            verdict = self.method.step(depth, tokens)
            tokens.add_final(verdict.weight)
            trace.record(tokens, verdict.record, verdict.exit)
            # A token merged with weight 0 leaves the nearest token as it is, and gets that token's state at the end.
            merge = Merge(weight=tokens.full(0.0)) if nearest and verdict.merge is None else verdict.merge
            # Masked: gates close. Packed: the list of live rows gets shorter.
            tokens = tokens.advance(verdict.keep, verdict.gate, merge, verdict.rows)
            if states is not None:
                states.append(tokens.follow_leaders(tokens.stream()))
            if tokens.empty:
                break
        stream = tokens.stream()
        features = tokens.follow_leaders(stream)
        if self.give_back is not None:
            features = self.give_back(stream, features, ~trace.live_at_end)
        return features, trace

    @property
    def classes(self) -> int:
        """The number of classes of the model's head; 0: it has no head."""
        return self.backbone.shape.classes

    def prepare(self, images: int | None = None, details: bool = False) -> PreparedViT:
        """A copy for inference, in the fastest form for this machine: `fast = model.prepare()`.

        Later changes of this model do not reach the copy: prepare again after training. images: about how many images
        the copy will answer in all; for few of them a CPU records no graph. details: answers also have features and the
        values that the method wrote into the trace.
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
        """The loss terms by name: the task's loss, the method's terms, and their weighted sum as "total". Nothing else
        changes: call `hold_budget` once a step to hold a budget.

        labels: (B,) classes, or (B, classes) probabilities. teacher: a static model's output for the batch; it adds the
        term "distill", and some methods' terms read it. options: those of `core.terms.loss_terms`. weights: one per
        term, in their order, as a tensor that a recorded training step reads; None: `label_weight`, `teacher_weight`
        and the method's `loss_weights`.
        """
        terms = loss_terms(self, out, labels, teacher, **options)
        if weights is None:
            named = self.weights(label_weight, teacher_weight)
            total = torch.stack([named[name] * term for name, term in terms.items()]).sum()
        else:
            total = (torch.stack([term.float() for term in terms.values()]) * weights[: len(terms)]).sum()
        return terms | {"total": total}

    def hold_budget(self, out: Output) -> None:
        """Adjust what holds the method's budget, after a training step on this batch."""
        self.method.hold_budget(self.cost(out.trace))

    def weights(self, label_weight: float = 1.0, teacher_weight: float = 1.0) -> dict[str, float]:
        """The weights of the loss terms, by their names."""
        return {"task": label_weight, "distill": teacher_weight} | self.method.loss_weights

    def states(self, out: Output) -> Tensor:
        """(B, N, D): the output's features after the wrapped model's last norm, which is how that model gives them."""
        return self.backbone.normed(out.features)

    @torch.no_grad()
    def macs(self, trace: Trace) -> Tensor:
        """(B,) multiply-accumulates of each image."""
        macs = trace_macs(self.backbone.shape, trace, self.method)
        return macs if self.give_back is None else macs + self.give_back.macs(trace)

    def cost(self, trace: Trace) -> Tensor:
        """The mean cost of the images of the trace, as a share of the static model's cost."""
        return (self.macs(trace).mean() / self.static_macs(trace)).float()

    def static_macs(self, trace: Trace | None = None) -> float:
        """Multiply-accumulates of one image with nothing halted. trace: gives the image size; None: the model's own."""
        shape = self.backbone.shape
        grid = None if trace is None else trace.image_grid or trace.grid
        image = None if grid is None else (grid[0] * shape.patch[0], grid[1] * shape.patch[1])
        return static_macs(shape, image)

    def with_method(self, method: Method) -> AdaptiveViT:
        """An adaptive model with another method, which shares this model's weights. The wrapped model stays adapted."""
        other = AdaptiveViT.__new__(type(self))
        nn.Module.__init__(other)
        state = {name: value for name, value in vars(self).items() if name not in vars(other)}
        other.__dict__.update(state)
        method.bind(self.backbone.shape)
        other.vit, other.dense_head, other.method = self.vit, self.dense_head, method
        other.give_back = self.give_back
        return other.train(self.training)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """Run blocks again in the backward pass, which saves memory and costs time. Hugging Face's Trainer calls it."""
        self.backbone.checkpoint(options | (gradient_checkpointing_kwargs or {}))

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """`gradient_checkpointing_enable` under the name that later versions of the Trainer call."""
        self.gradient_checkpointing_enable(activation_checkpointing_kwargs, **options)

    def unwrap(self) -> nn.Module:
        """Undo `adapt` and return the wrapped model, with its weights as trained since."""
        self.backbone.remove()
        return self.vit

    def check_images(self, images: Any) -> Tensor:
        """The images, if the model takes them."""
        tensor: Tensor = check_tensor(images)
        expected = self.backbone.expected_shape(tensor)
        if expected is not None or not tensor.is_floating_point():
            raise DwindleError(
                f"Images of shape {tuple(tensor.shape)} and type {tensor.dtype} do not fit this model; it takes floats"
                f"{'' if expected is None else ' ' + expected}; resize the images or build the model with img_size=..."
            )
        check_dtype(tensor, next(self.vit.parameters()).dtype)
        self.backbone.check_bypassed_hooks()
        if self.checks and not (self.training or torch.compiler.is_compiling()):
            self.method.check_settings()
        return tensor

    def check_operating_point(self, values: Tensor, images: int) -> None:
        """Refuse an operating point that is not one number per image, and NaN in it."""
        method = type(self.method).__name__
        if not self.method.per_image_point or values.shape != (images,):
            takes = "does" if self.method.per_image_point else "has one setting for the whole batch"
            raise DwindleError(
                f"operating_point of shape {tuple(values.shape)} for {images} images: give one number per image, and "
                f"to a method that takes them ({method} {takes})."
            )
        can_read = self.checks and not torch.compiler.is_compiling()
        if can_read and not (values.is_cuda and torch.cuda.is_current_stream_capturing()) and values.isnan().any():
            raise DwindleError(f"operating_point holds NaN, at which no token of {method} would go on; give numbers.")

    def check_logits(self, logits: Tensor, images: Tensor) -> None:
        """Refuse NaN in logits, with its cause."""
        if not self.checks or torch.compiler.is_compiling() or (self.training and logits.is_cuda):
            return  # in training on a GPU this check would cost a synchronisation; there the loss shows NaN
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

    dense_head: answers for each patch, in the place of the model's own head. give_back: how tokens that stopped early
    get a state at the end; None: the state of the token they were merged into, or else their own.
    inside: the name of the vision transformer in a larger model. That part becomes adaptive, and the larger model is
    returned and called as before: `adapt(clip, ToMe(r=8), inside="vision_model")`.
    """
    if isinstance(vit, AdaptiveViT):
        raise DwindleError("This model is adaptive already; unwrap() it first to adapt it with another method.")
    if not isinstance(method, Method):
        raise DwindleError(f"{method!r} is no method; pass an instance such as AHT() (see `dwindle methods`).")
    if inside is not None:
        return place(vit, inside, lambda part: adapt(part, method, dense_head, give_back))
    return AdaptiveViT(vit, method, dense_head, give_back)
