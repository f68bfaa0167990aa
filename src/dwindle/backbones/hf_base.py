"""What all Hugging Face encoders have in common: where the tower, its attention and the parts of its blocks are, and
how the model is called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.backbone import Backbone, Shape
from ..core.parts import LINEAR, BlockParts, activation_name, as_written, linear_macs
from ..core.tokens import Tokens
from ..errors import DwindleError
from .hf_config import plain_options, rebuilt

TOWER_NAMES = (  # the attributes in which models keep the tower below their head
    *("vit", "deit", "dinov2", "dinov2_with_registers", "ijepa", "vision_model", "beit", "data2vec_vision"),
    *("videomae", "dinov3_vit"),
)


class HuggingFace(Backbone):
    """A Hugging Face model whose tower has `embeddings`, one list of blocks, and a last norm."""

    kinds: ClassVar[tuple[str, ...]] = ()  # names of the classes
    plain: ClassVar[Any]  # a TypedDict of the options of the config that a checkpoint may hold
    has_own_outputs = True
    any_size = True  # position embeddings are interpolated
    vit: Any

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        self.kind = type(vit).__name__

    @classmethod
    def claims(cls, vit: nn.Module) -> bool:
        # transformers need not be imported here: if the model is one of its classes, it is imported already.
        known = "transformers" in sys.modules and type(vit).__name__ in cls.kinds
        return known and any(base.__module__.startswith("transformers.") for base in type(vit).__mro__)

    @property
    def tower(self) -> Any:
        """The module that holds the embeddings and the blocks: the model itself or a part of it."""
        tower = self.vit
        while not hasattr(tower, "embeddings"):
            tower = getattr(tower, next(name for name in TOWER_NAMES if hasattr(tower, name)))
        return tower

    @property
    def blocks(self) -> list[nn.Module]:
        # `encoder.layer`, `encoder.layers` or `layers`, by version: it is the only list of modules in the tower.
        return list(next(m for m in self.tower.modules() if isinstance(m, nn.ModuleList)))

    def attention(self, block: Any) -> nn.Module:
        found: nn.Module = block.attention if hasattr(block, "attention") else block.self_attn
        return found

    def mlp_in(self, block: Any) -> Any:
        mlp = block.mlp if hasattr(block, "mlp") else block.intermediate
        return next(m for m in mlp.modules() if isinstance(m, nn.Linear))

    def install(self) -> None:
        super().install()
        parts = [part for block in self.blocks for part in self.attention(block).modules()]
        configs: dict[int, Any] = {id(part.config): part.config for part in parts if hasattr(part, "config")}
        self.implementations = [(config, config._attn_implementation) for config in configs.values()]
        for config in configs.values():
            config._attn_implementation = "sdpa"  # the path that calls scaled_dot_product_attention

    def remove(self) -> None:
        super().remove()
        for config, implementation in self.implementations:
            config._attn_implementation = implementation

    @property
    def norm(self) -> Any:
        """The tower's last norm."""
        names = ("layernorm", "norm", "post_layernorm")
        return next(getattr(self.tower, name) for name in names if hasattr(self.tower, name))

    def normed(self, stream_BND: Tensor) -> Tensor:
        states: Tensor = self.norm(stream_BND)
        return states

    def resizing(self, images: Tensor) -> dict[str, Any]:
        """The option that some embeddings need for images of another size than they were built for."""
        has_option = "interpolate_pos_encoding" in inspect.signature(type(self.tower.embeddings).forward).parameters
        return {"interpolate_pos_encoding": tuple(images.shape[-2:]) != self.shape.image} if has_option else {}

    def embed(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.tower.embeddings(images, **self.resizing(images))
        return embedded

    def readout(self, stream_BND: Tensor) -> Tensor:
        """(B, D): the class token after the last norm, for encoders without a head. Others override it."""
        pooled: Tensor = self.norm(stream_BND[:, 0])
        return pooled

    @property
    def read_first(self) -> int | None:
        return 1

    def reset_head(self, classes: int) -> None:
        vit: Any = self.vit
        heads = [name for name, module in vit.named_children() if "classifier" in name and _is_linear(module)]
        if not heads:
            raise DwindleError(
                f"{self.kind} has no head of its own to exchange; take {self.kind.removesuffix('Model')}"
                "ForImageClassification, or train a head on its embeddings."
            )
        vit.config.num_labels = vit.num_labels = classes
        for name in heads:
            old = getattr(vit, name)
            setattr(vit, name, nn.Linear(old.in_features, classes).to(old.weight))

    @property
    def checkpoints(self) -> bool:
        return any(getattr(block, "gradient_checkpointing", False) for block in self.blocks)

    def _checkpoint(self) -> None:
        self.vit.gradient_checkpointing_enable()

    def once(self, block: Any, x: Tensor, tokens: Tokens) -> Any:
        block.gradient_checkpointing = False
        try:
            return self.call(block, x, tokens)
        finally:
            block.gradient_checkpointing = True

    @property
    def heads(self) -> list[nn.Module]:
        """The modules that are computed once per image, after the tower."""
        return [m for name, m in self.vit.named_children() if "classifier" in name]

    @property
    def changeable(self) -> tuple:
        config = self.tower.config
        return getattr(config, "image_size", None), self.vit.config.num_labels, *map(id, self.heads)

    @property
    def prefix(self) -> int:
        """The number of class, distillation and register tokens."""
        return 1

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the images that the model was built for."""
        return _sides(self.tower.config.image_size)

    def measure(self) -> Shape:
        config = self.tower.config
        width = config.hidden_size
        sides = _sides(config.patch_size)
        has_classes = any("classifier" in name and _is_linear(m) for name, m in self.vit.named_children())
        return Shape(
            blocks=len(self.blocks),
            width=width,
            hidden=self.mlp_in(self.blocks[0]).out_features,
            heads=config.num_attention_heads,
            head_size=width // config.num_attention_heads,
            prefix=self.prefix,
            patch=sides,
            image=self.image,
            channels=config.num_channels,
            classes=self.vit.config.num_labels if has_classes else 0,
            block_macs=linear_macs(self.blocks[0]),
            token_macs=config.num_channels * sides[0] * sides[1] * width,
            image_macs=sum(linear_macs(m) for m in self.heads),
            pool_macs=0,
        )

    def parts(self, block: Any) -> BlockParts | None:
        attention, mlp = self.attention(block), getattr(block, "mlp", None)
        before = _first(block, "layernorm_before", "norm1", "layer_norm1")
        after = _first(block, "layernorm_after", "norm2", "layer_norm2")
        linears: list[Any] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        linears.append(_first(attention, "o_proj", "out_proj"))
        core: Any = attention
        if linears[0] is None and hasattr(attention, "attention"):  # transformers before 5.2x
            core = attention.attention
            linears = [getattr(core, name, None) for name in ("query", "key", "value")]
            linears.append(getattr(getattr(attention, "output", None), "dense", None))
        linears += [getattr(mlp, "fc1", None), getattr(mlp, "fc2", None)]
        function = _first(mlp, "activation_fn", "activation")
        if mlp is None and hasattr(block, "intermediate"):  # transformers before 5.2x
            linears[-2:] = [getattr(half, "dense", None) for half in (block.intermediate, block.output)]
            function = getattr(block.intermediate, "intermediate_act_fn", None)
        act = activation_name(function)
        known = all(type(layer) in LINEAR for layer in linears) and act is not None and as_written(block)
        leaves = {module for module in block.modules() if not list(module.children())}
        known = known and all(_is_idle(leaf) for leaf in leaves - {before, after, function, *linears})
        if not known or type(before) is not nn.LayerNorm or type(after) is not nn.LayerNorm:
            return None
        q, k, v, proj, fc1, fc2 = linears
        if len({layer.bias is None for layer in (q, k, v)}) > 1:
            return None
        scales = [getattr(getattr(block, f"layer_scale{i}", None), "lambda1", None) for i in (1, 2)]
        assert act is not None
        return BlockParts(
            norm1=before,
            qkv=(q, k, v),
            heads=self.shape.heads,
            scale=getattr(core, "scaling", getattr(core, "scale", self.shape.head_size**-0.5)),
            q_norm=None,
            k_norm=None,
            proj=proj,
            scale1=scales[0],
            norm2=after,
            fc1=fc1,
            act=act,
            fc2=fc2,
            scale2=scales[1],
        )

    # How the model is called.
    def request(self, images: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if options.get("output_attentions"):
            raise DwindleError(
                "output_attentions=True: attention is computed fused and among live tokens alone, so there are no maps "
                "to give; leave it out, and see out.trace for what became of each token."
            )
        if options.get("attention_mask") is not None:
            raise DwindleError(
                f"attention_mask hides tokens of this {self.kind} from each other, and here the method alone says "
                "which tokens are looked at; leave it out."
            )
        wanted, layers = options.get("output_hidden_states"), self.shape.blocks
        indices = [] if isinstance(wanted, bool | None) else [wanted] if isinstance(wanted, int) else list(wanted)
        if missing := [index for index in indices if not -layers - 1 <= index <= layers]:
            raise DwindleError(
                f"output_hidden_states={wanted!r}: there is no hidden state {missing[0]}; 0 is the embedding, 1 to "
                f"{layers} are those after each block, and negative numbers count from the last."
            )
        return "__call__", {"pixel_values": images, **self.resizing(images), **options}

    def wants_every_depth(self, options: dict[str, Any]) -> bool:
        default = getattr(self.vit.config, "output_hidden_states", False)
        return self.kind.endswith("Backbone") or options.get("output_hidden_states", default) not in (False, None)

    @property
    def gives_tuples(self) -> bool:
        annotation = inspect.signature(type(self.blocks[0]).forward).return_annotation
        return "tuple" in str(annotation)

    @property
    def task_loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        losses = {"multi_label_classification": _by_label, "regression": _by_distance}
        return losses.get(getattr(self.vit.config, "problem_type", None) or "")

    def describe(self) -> dict[str, Any]:
        return {"model": self.kind, "options": plain_options(self.vit.config, self.plain_of(self.kind))}

    @classmethod
    def rebuild(cls, described: dict[str, Any]) -> nn.Module:
        return rebuilt(described, cls.kinds, cls.plain_of(described["model"]))

    @classmethod
    def plain_of(cls, kind: str) -> Any:
        """The TypedDict of options for a class of this name."""
        return cls.plain


def _by_label(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(-1)


def _by_distance(values: Tensor, labels: Tensor) -> Tensor:
    return (values - labels.to(values.dtype).view_as(values)).square().flatten(1).mean(-1)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _sides(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _first(module: Any, *names: str) -> Any:
    """The first of these attributes that exists and is not None."""
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def _is_idle(module: nn.Module) -> bool:
    """Whether a runtime may leave the module out in eval, or reads it by name (LayerScale)."""
    return type(module) in (nn.Dropout, nn.Identity) or type(module).__name__.endswith(("DropPath", "LayerScale"))
