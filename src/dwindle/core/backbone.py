"""What the loop asks of a family of vision transformers, and how the family's attention is redirected to the tokens.

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
from .run import INSTALLED_HOOKS, Run, attention_forward, catch_probe, compiled_now, drop_per_image, is_drop_path
from .tokens import Probe, Tokens


@dataclass(frozen=True)
class Shape:
    """The numbers of a backbone that the cost and the methods need."""

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
    # The two matrix products of attention in one block, per pair of tokens; None: 2 * heads * head_size.
    pair_macs: int | None = None

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
    """One wrapped model. A subclass says where its family keeps the parts; no other code knows the family."""

    families: ClassVar[list[type[Backbone]]] = []
    family: ClassVar[str]
    takes: ClassVar[str]  # which models the family accepts, for the error message that refuses another one
    any_size: bool = False  # accepts images of other sizes than the one it was built for
    described: dict[str, Any] | None = None  # the result of `describe` before layers were replaced (int8)
    head: PatchHead | None = None  # a head that answers in the place of the family's own

    def __init_subclass__(cls) -> None:
        if "takes" in vars(cls):  # a class without it is a base class of several families
            cls.families.append(cls)

    def __init__(self, vit: nn.Module) -> None:
        self.vit = vit
        self._shape: tuple[tuple[Any, ...], Shape] | None = None

    # What a family provides.
    @classmethod
    def claims(cls, vit: nn.Module) -> bool:
        """Whether this family wraps `vit`."""
        raise NotImplementedError

    @classmethod
    def refuses(cls, vit: nn.Module) -> str | None:
        """Why a model that is related to the family, but not claimed by it, cannot be adapted; None: no relation."""
        return None

    @property
    def blocks(self) -> list[nn.Module]:
        raise NotImplementedError

    def attention(self, block: nn.Module) -> nn.Module:
        """The module of a block that calls scaled_dot_product_attention."""
        raise NotImplementedError

    def attentions(self, block: nn.Module) -> list[Any]:
        """All attention modules of a block, which may have several side by side. Methods read the first one."""
        return [self.attention(block)]

    def reads_weight(self, owner: nn.Module, name: str) -> bool:
        """Whether the module `owner` of a block reads the weight of its linear layer `name` without calling it."""
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
        """(B, N, D): the states after the family's last norm, which is what the family calls features."""
        raise NotImplementedError

    @property
    def read_first(self) -> int | None:
        """How many of the first tokens `readout` reads; None: all of them."""
        return None

    def distilled_logits(self, stream_BND: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of the class token's head and those of the distillation token's head."""
        raise DwindleError(
            f"{type(self.vit).__name__} has no distillation token; take a distilled model "
            "(deit_tiny_distilled_patch16_224, ...), or distil into its logits with distill='soft'."
        )

    @property
    def checkpoints(self) -> bool:
        """Whether the wrapped model runs its blocks again in the backward pass, to save memory at the cost of time."""
        return False

    def checkpoint(self, options: dict[str, Any]) -> None:
        """Turn this on. options: Hugging Face's names, each of which may only have the value in CHECKPOINT."""
        for name, value in options.items():
            if CHECKPOINT.get(name, value) != value:
                raise DwindleError(f"Checkpointing with {name} = {value}: here it is {CHECKPOINT[name]}; leave it out.")
        self._checkpoint()

    def _checkpoint(self) -> None:
        raise DwindleError(f"{type(self.vit).__name__} cannot run its blocks again; train it without checkpointing.")

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of the patches of these images."""
        return self.shape.grid((images.shape[-2], images.shape[-1]))

    def expected_shape(self, images: Tensor) -> str | None:
        """The shape that images must have, if the model cannot take these; None if it can."""
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
        """Whether this forward pass is checkpointed."""
        return self.checkpoints and self.vit.training and torch.is_grad_enabled()

    @property
    def shape(self) -> Shape:
        """The `Shape` of the model as it is at this moment: users may replace heads or change the image size."""
        key = (*self.changeable, id(self.head))
        if self._shape is None or self._shape[0] != key:
            shape, head = self.measure(), self.head
            if head is not None:
                shape = replace(shape, classes=head.outputs, image_macs=0, pool_macs=head.macs)
            self._shape = (key, shape)
        return self._shape[1]

    @property
    def changeable(self) -> tuple[Any, ...]:
        """The values that `shape` depends on and that may change after wrapping. It is read often, so it is cheap."""
        raise NotImplementedError

    def measure(self) -> Shape:
        """The `Shape` of the wrapped model, with the family's own head."""
        raise NotImplementedError

    def parts(self, block: nn.Module) -> BlockParts | None:
        """The layers of a block, for the kernels; None if the block computes anything that the kernels do not."""
        return None

    def describe(self) -> dict[str, Any] | None:
        """The JSON from which `rebuild` makes the same architecture again; None if no JSON can describe it."""
        raise NotImplementedError

    @staticmethod
    def rebuild(described: dict[str, Any]) -> nn.Module:
        """A model of the architecture that `describe` returned, with random weights."""
        raise NotImplementedError

    @property
    def preprocess(self) -> dict[str, Any]:
        """How the model's images were prepared: settings of `io.images.Preprocess` that differ from its defaults."""
        return {"size": self.shape.image[-1]}

    def reset_head(self, classes: int) -> None:
        """Replace the family's own head by a new one for this many classes."""
        raise NotImplementedError

    # What all families share.
    def logits(self, stream_BND: Tensor) -> Tensor:
        """The model's answer: (B, classes) from the family's head, or (B, P, outputs) from a head for patches."""
        if self.head is None:
            return self.readout(stream_BND)
        patches: Tensor = self.head(self.normed(stream_BND)[:, self.shape.prefix :])
        return patches

    @property
    def front(self) -> int | None:
        """How many of the first tokens `logits` reads; None: all of them."""
        return self.read_first if self.head is None else None

    def install(self) -> None:
        """Put our hooks and forwards on the wrapped model's blocks. Outside a `Run` the blocks behave as before."""
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
                # A partial can be pickled, and so can the model; a bound method could not.
                attention.forward = partial(attention_forward, attention)
            self.mlp_in(block).register_forward_hook(catch_probe)
            for module in block.modules():
                if is_drop_path(module):
                    module.register_forward_hook(drop_per_image)

    def check_bypassed_hooks(self) -> None:
        """Refuse hooks and forwards that a user put on a module around the blocks: the loop calls the blocks one by
        one and not that module, so they would be ignored without a word."""
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
        """The modules that contain the blocks, with their names: the wrapped model and its parts down to the list."""
        first = next(name for name, module in self.vit.named_modules() if module is self.blocks[0])
        names = ["", *accumulate(first.split(".")[:-1], "{}.{}".format)]
        return [(name, self.vit.get_submodule(name)) for name in names]

    def remove(self) -> None:
        """Undo `install`."""
        for block in self.blocks:
            for attention in self.attentions(block):
                if not replaced(attention):  # a forward that a user put over ours stays
                    vars(attention).pop("forward", None)
            for module in block.modules():
                for key in [k for k, hook in module._forward_hooks.items() if hook in INSTALLED_HOOKS]:
                    del module._forward_hooks[key]

    def run(self, block: nn.Module, tokens: Tokens, probe: Probe = Probe()) -> Tokens:
        """The tokens after one block on the live rows. `probed` holds what the probe asks for."""
        if compiled_now():
            return _compiled_run()(self, block, tokens, probe)
        return self._run(block, tokens, probe)

    def _run(self, block: nn.Module, tokens: Tokens, probe: Probe) -> Tokens:
        run = Run(tokens, probe, partial(self.rotated, block))
        forward = partial(self.call, block, tokens=tokens)
        call = self._checkpointed(block, run) if self.recomputes else run.wrapped(forward)
        after = tokens.update(call, block, probe)
        if not run.called:
            return after  # the layout computed the block from its parts
        if not run.attended:
            raise DwindleError(
                f"{type(self.attention(block)).__name__} did not call scaled_dot_product_attention, so halted tokens "
                "cannot be kept out of it; use the model's fused (sdpa) attention."
            )
        return after.changed(probed=run.probed)

    def positions(self, images: Tensor) -> Tensor | None:
        """(..., N, C): what blocks are given for each token's place, the same for all images; None: nothing. The loop
        keeps it as `tokens.positions`, and `tokens.gather_positions` gives the part that belongs to the live rows."""
        return None

    def call(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        """The block's forward on rows, with the arguments that the family passes to its blocks."""
        return block(x)

    def rotated(self, block: nn.Module, q: Tensor, k: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Queries and keys (b, H, rows, E) after rotary positions. A family overrides this if its own code takes the
        first rows for the prefix and so would rotate the wrong ones; its `call` then gives the block no positions."""
        return q, k

    def once(self, block: nn.Module, x: Tensor, tokens: Tokens) -> Any:
        """`call` without the family's own checkpointing, which would run the block again outside of a `Run`."""
        return self.call(block, x, tokens)

    def _checkpointed(self, block: nn.Module, run: Run) -> Callable[[Tensor], Tensor]:
        """The block's forward, which the backward pass runs a second time instead of storing activations. The second
        run gets a copy of the notes as they are here, because the method goes on writing to them."""
        second = Run(run.tokens.changed(notes=dict(run.tokens.notes)), run.probe, run.rotated)
        runs = iter((run, second))
        forward = partial(self.once, block, tokens=run.tokens)
        return lambda x: checkpoint(lambda x: next(runs, second).wrapped(forward)(x), x, use_reentrant=False)


@cache
def _compiled_run() -> Callable[[Backbone, nn.Module, Tokens, Probe], Tokens]:
    return torch.compile(Backbone._run, dynamic=False, options={"guard_filter_fn": _guarded})


def _guarded(entries: Sequence[Any]) -> list[bool]:
    """Which guards may recompile a block. Guards on our attention forwards may not: all of them are the same code."""
    return [getattr(entry.value, "func", None) is not attention_forward for entry in entries]


def backbone_of(vit: nn.Module) -> Backbone:
    """The backbone of the family that claims `vit`. If none does, the error says why."""
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
