"""What the loop asks of a family of vision transformers, and how its attention is made ours.

A family's own `Block.forward` and attention module keep running: LayerScale, qk-norm, rotary or gated attention stay
right without being known here. `run.py` says what is caught while a block runs on tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import DwindleError, listed
from .face import FamilyFace
from .heads import PatchHead
from .parts import BlockParts, replaced
from .registry import discover
from .run import OURS, Run, attention_forward, catch_probe, compiled_now, drop_per_image, is_drop_path
from .tokens import Probe, Tokens


@dataclass(frozen=True)
class Shape:
    """A backbone in numbers: what cost and methods need to know of it."""

    blocks: int  # L
    width: int  # D
    hidden: int  # neurons after the first linear layer of an MLP
    heads: int
    head_size: int
    prefix: int  # class, distillation and register tokens
    patch: tuple[int, int]
    image: tuple[int, int]
    channels: int
    classes: int
    block_macs: int  # linear layers of one block, per token
    token_macs: int  # embedding, per patch
    image_macs: int  # head, per image
    pool_macs: int  # attention pooling in the readout, per patch, halted or not
    pair_macs: int | None = (
        None  # the products of attention in one block, per pair of tokens; None: 2 heads * head_size
    )

    @property
    def attention_macs(self) -> int:
        return 2 * self.heads * self.head_size if self.pair_macs is None else self.pair_macs

    def grid(self, image: tuple[int, int] | None = None) -> tuple[int, int]:
        height, width = image or self.image
        return height // self.patch[0], width // self.patch[1]

    def tokens(self, image: tuple[int, int] | None = None) -> int:
        rows, columns = self.grid(image)
        return self.prefix + rows * columns


CHECKPOINT = {"every_n_layers": 1, "offload": False, "use_reentrant": False}


class Backbone(FamilyFace):
    """One wrapped model. Subclasses say where a family keeps its parts; nothing else knows the family."""

    families: ClassVar[list[type[Backbone]]] = []
    family: ClassVar[str]
    takes: ClassVar[str]  # which models, in the sentence that refuses another
    any_size: bool = False  # accepts images of other sizes than the one it was built for
    described: dict[str, Any] | None = None  # what `describe` said before layers were exchanged
    head: PatchHead | None = None  # answers in the place of the family's own head

    def __init_subclass__(cls) -> None:
        if "takes" in vars(cls):  # else it is what several families share
            cls.families.append(cls)

    def __init__(self, vit: nn.Module) -> None:
        self.vit = vit
        self._shape: tuple[tuple[Any, ...], Shape] | None = None

    # What a family provides.
    @classmethod
    def claims(cls, vit: nn.Module) -> bool:
        """Whether this family is the one to wrap `vit`."""
        raise NotImplementedError

    @classmethod
    def refuses(cls, vit: nn.Module) -> str | None:
        """What is in the way of adapting a relative of the family that it does not claim; None: it is no relative."""
        return None

    @property
    def blocks(self) -> list[nn.Module]:
        raise NotImplementedError

    def attention(self, block: nn.Module) -> nn.Module:
        """The module of a block that calls scaled_dot_product_attention."""
        raise NotImplementedError

    def attentions(self, block: nn.Module) -> list[Any]:
        """All of them, of a block that has several side by side. The first is what methods ask of attention."""
        return [self.attention(block)]

    def reads(self, owner: nn.Module, name: str) -> bool:
        """Whether a module of a block reads the weight of its linear layer `name` instead of calling the layer."""
        return False

    def mlp_in(self, block: nn.Module) -> nn.Module:
        """The first linear layer of a block's MLP."""
        raise NotImplementedError

    def embed(self, images: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, N, D)."""
        raise NotImplementedError

    def readout(self, stream_BND: Tensor) -> Tensor:
        """(B, N, D) -> logits."""
        raise NotImplementedError

    def normed(self, stream_BND: Tensor) -> Tensor:
        """(B, N, D): the states after the family's last norm, as its features are."""
        raise NotImplementedError

    @property
    def read_first(self) -> int | None:
        """`readout` looks at the first so many tokens; None: at all."""
        return None

    def answers(self, stream_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the class token's head and of the distillation token's."""
        raise DwindleError(
            f"{type(self.vit).__name__} has no distillation token; take a distilled model "
            "(deit_tiny_distilled_patch16_224, ...), or distil into its logits with distill='soft'."
        )

    @property
    def checkpoints(self) -> bool:
        """Whether the wrapped model was told to run blocks again in the backward pass, which takes time for memory."""
        return False

    def checkpoint(self, options: dict[str, Any]) -> None:
        """Tell the wrapped model so. options: as Hugging Face names them, at the one value that they have here."""
        for name, value in options.items():
            if CHECKPOINT.get(name, value) != value:
                raise DwindleError(f"Checkpointing with {name} = {value}: here it is {CHECKPOINT[name]}; leave it out.")
        self._checkpoint()

    def _checkpoint(self) -> None:
        raise DwindleError(f"{type(self.vit).__name__} cannot run its blocks again; train it without checkpointing.")

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of the patches of these images."""
        return self.shape.grid((images.shape[-2], images.shape[-1]))

    def misfit(self, images: Tensor) -> str | None:
        """What images must be like, if these are not of a shape that the model takes."""
        shape = self.shape
        sized = images.dim() == 4 and len(images) > 0 and images.shape[1] == shape.channels
        if self.any_size:
            sized = sized and all(side and side % patch == 0 for side, patch in zip(images.shape[-2:], shape.patch))
        else:
            sized = sized and tuple(images.shape[-2:]) == shape.image
        size = f"multiples of {shape.patch}" if self.any_size else f"{shape.image[0]} x {shape.image[1]}"
        return None if sized else f"(batch, {shape.channels}, {size})"

    @property
    def recomputes(self) -> bool:
        return self.checkpoints and self.vit.training and torch.is_grad_enabled()

    @property
    def shape(self) -> Shape:
        """In numbers, as the model is now: heads and image sizes may be changed under us."""
        key = (*self.changeable, id(self.head))
        if self._shape is None or self._shape[0] != key:
            found, head = self.measure(), self.head
            if head is not None:
                found = replace(found, classes=head.outputs, image_macs=0, pool_macs=head.macs)
            self._shape = (key, found)
        return self._shape[1]

    @property
    def changeable(self) -> tuple[Any, ...]:
        """What of the shape may change after wrapping; cheap to ask."""
        raise NotImplementedError

    def measure(self) -> Shape:
        raise NotImplementedError

    def parts(self, block: nn.Module) -> BlockParts | None:
        """A block taken apart for the kernels; None if it is of another make."""
        return None

    def describe(self) -> dict[str, Any] | None:
        """What `rebuild` needs to make the same architecture again, as JSON; None if it cannot be told."""
        raise NotImplementedError

    @staticmethod
    def rebuild(described: dict[str, Any]) -> nn.Module:
        raise NotImplementedError

    @property
    def preprocess(self) -> dict[str, Any]:
        """How images were prepared for it, as settings of `io.images.Preprocess`; what is not named is as usual."""
        return {"size": self.shape.image[-1]}

    def reset_head(self, classes: int) -> None:
        """A new head of the family's own, for so many classes."""
        raise NotImplementedError

    # What all families share.
    def logits(self, stream_BND: Tensor) -> Tensor:
        """The answer: the family's (B, classes), or of a head for patches (B, P, outputs)."""
        if self.head is None:
            return self.readout(stream_BND)
        patches: Tensor = self.head(self.normed(stream_BND)[:, self.shape.prefix :])
        return patches

    @property
    def front(self) -> int | None:
        """The answer looks at the first so many tokens; None: at all."""
        return self.read_first if self.head is None else None

    def install(self) -> None:
        """Make the wrapped model's blocks listen for tokens. Without a run in progress they behave as before."""
        attentions = [attention for block in self.blocks for attention in self.attentions(block)]
        if any("forward" in vars(attention) and not replaced(attention) for attention in attentions):
            raise DwindleError("This model is part of an adaptive one already; unwrap() that first.")
        for module in (self.vit, *attentions):
            if replaced(module):
                raise DwindleError(
                    f"{type(module).__name__} has a forward of its own, which an adapted model would not run; write it "
                    "as a class, or put it on a block or a layer."
                )
        for block in self.blocks:
            for attention in self.attentions(block):
                # A partial and no bound method: it can be pickled, and so can the model.
                attention.forward = partial(attention_forward, attention)
            self.mlp_in(block).register_forward_hook(catch_probe)
            for module in block.modules():
                if is_drop_path(module):
                    module.register_forward_hook(drop_per_image)

    def check_heard(self) -> None:
        """Refuses what somebody put on a module that is not called, as its blocks are run one by one: it would be
        ignored without a word."""
        if torch.compiler.is_compiling():
            return
        for name, module in self.around:
            own = [part for part in ("forward", "forward_features") if part in vars(module)]
            if module._forward_hooks or module._forward_pre_hooks or own:
                what = f"{own[0]} of its own" if own else "forward hook"
                raise DwindleError(
                    f"{name or 'The wrapped model'} ({type(module).__name__}) has a {what}, which an adaptive model "
                    "would not call, as it runs the blocks alone; put it on the adaptive model, a block or a layer."
                )

    @cached_property
    def around(self) -> list[tuple[str, nn.Module]]:
        """The wrapped model and its parts that hold the blocks."""
        first = next(name for name, module in self.vit.named_modules() if module is self.blocks[0])
        names = ["", *accumulate(first.split(".")[:-1], "{}.{}".format)]
        return [(name, self.vit.get_submodule(name)) for name in names]

    def remove(self) -> None:
        """Undo `install`."""
        for block in self.blocks:
            for attention in self.attentions(block):
                if not replaced(attention):  # else what somebody put over ours stays
                    vars(attention).pop("forward", None)
            for module in block.modules():
                for key in [k for k, hook in module._forward_hooks.items() if hook in OURS]:
                    del module._forward_hooks[key]

    def run(self, block: nn.Module, tokens: Tokens, probe: Probe = Probe()) -> Tokens:
        """One block on the live rows, which leaves behind what it is asked for."""
        if compiled_now():
            return _compiled_run()(self, block, tokens, probe)
        return self._run(block, tokens, probe)

    def _run(self, block: nn.Module, tokens: Tokens, probe: Probe) -> Tokens:
        run = Run(tokens, probe, partial(self.turned, block))
        call = self._again(block, run) if self.recomputes else run.calling(partial(self.call, block, tokens=tokens))
        after = tokens.update(call, block, probe)
        if not run.called:
            return after  # the layout ran the block by its parts
        if not run.attended:
            raise DwindleError(
                f"{type(self.attention(block)).__name__} did not call scaled_dot_product_attention, so halted tokens "
                "cannot be kept out of it; use the model's fused (sdpa) attention."
            )
        return after.changed(probed=run.probed)

    def positions(self, images: Tensor) -> Tensor | None:
        """(..., N, C): what blocks are told of each token's place, the same for all images; the loop keeps it as
        `tokens.positions`, of which `tokens.placed` gives the live rows'. None: nothing."""
        return None

    def call(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        """The block's forward on rows, by the arguments that the family gives it."""
        return block(x)

    def turned(self, block: nn.Module, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Queries and keys (b, H, rows, E) as attention compares them, where the family's own code, which takes the
        first rows for the prefix, would turn the wrong ones: `call` then tells the block of no positions."""
        return q, k

    def once(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        """`call` without a checkpoint of the family's own: that would run it again outside of any run."""
        return self.call(block, x, tokens)

    def _again(self, block: nn.Module, run: Run) -> Callable[[Tensor], Tensor]:
        """The block's forward, which the backward pass runs once more instead of keeping what is in between. That run
        sees the notes as they are now: the method goes on writing to them."""
        then = Run(run.tokens.changed(notes=dict(run.tokens.notes)), run.probe, run.turned)
        turns = iter((run, then))
        forward = partial(self.once, block, tokens=run.tokens)
        return lambda x: checkpoint(lambda x: next(turns, then).calling(forward)(x), x, use_reentrant=False)


@cache
def _compiled_run() -> Callable[[Backbone, nn.Module, Tokens, Probe], Tokens]:
    return torch.compile(Backbone._run, dynamic=False, options={"guard_filter_fn": _guarded})


def _guarded(entries: Sequence[Any]) -> list[bool]:
    """What makes a compiled block be compiled anew. Not which of our forwards it is: they are all the same one."""
    return [getattr(entry.value, "func", None) is not attention_forward for entry in entries]


def backbone_of(vit: nn.Module) -> Backbone:
    """The backbone that fits `vit`, or the reason why there is none."""
    discover("dwindle.backbones")
    if hasattr(vit, "_orig_mod"):
        raise DwindleError("This model went through torch.compile; adapt the model itself, and compile after that.")
    for family in Backbone.families:
        if family.claims(vit):
            return family(vit)
    for family in Backbone.families:
        if reason := family.refuses(vit):
            raise DwindleError(f"{type(vit).__name__} cannot be adapted: {reason}.")
    inside = [
        name for name, part in vit.named_modules() if name and any(family.claims(part) for family in Backbone.families)
    ]
    if inside:
        raise DwindleError(
            f"{type(vit).__name__} is no vision transformer itself, but holds one; adapt that where it stands: "
            f"adapt(model, method, inside={inside[0]!r})."
        )
    known = listed([family.takes for family in Backbone.families], "and")
    raise DwindleError(
        f"{type(vit).__name__} cannot be adapted: it is no plain vision transformer, with one sequence of tokens from "
        f"first block to last, of a family known here: {known}."
    )
