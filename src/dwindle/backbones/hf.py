"""Hugging Face image classifiers: ViT, DeiT (also with a distillation head) and DINOv2 (extra `hf`)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from ..core.backbone import LINEAR, Backbone, BlockParts, Shape, activation_name, as_written, linear_macs
from ..core.tokens import Tokens
from ..errors import DwindleError, listed, unknown
from ..settings import Above0, AtLeast0, Classes, Count, Depth, ImageSize, Share, Size, Within, Word, options

# class name -> attribute of the tower below the classifier
_TOWERS = {
    "ViTForImageClassification": "vit",
    "DeiTForImageClassification": "deit",
    "DeiTForImageClassificationWithTeacher": "deit",
    "Dinov2ForImageClassification": "dinov2",
    "Dinov2WithRegistersForImageClassification": "dinov2_with_registers",
}

# What configs of any version hold besides, and no model here computes by.
IDLE = frozenset(
    (
        *("_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels", "architectures"),
        *("chunk_size_feed_forward", "dtype", "is_encoder_decoder", "model_type", "output_attentions"),
        *("output_hidden_states", "problem_type", "return_dict", "task_specific_params", "torch_dtype"),
        *("transformers_version", "use_cache", "bos_token_id", "eos_token_id", "encoder_stride", "pooler_act"),
        *("pooler_output_size", "out_features", "out_indices", "stage_names", "apply_layernorm"),
        *("reshape_hidden_states", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj"),
    )
)
Sides = tuple[ImageSize, ImageSize] | ImageSize


class Plain(TypedDict, total=False):
    hidden_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    intermediate_size: Size
    mlp_ratio: Annotated[float, Within(0, 256, over=True)]
    hidden_act: Word
    hidden_dropout_prob: Share
    attention_probs_dropout_prob: Share
    drop_path_rate: Share
    initializer_range: AtLeast0
    layer_norm_eps: Above0
    layerscale_value: float
    image_size: Sides
    patch_size: Sides
    num_channels: Size
    num_register_tokens: Size | Literal[0]
    num_labels: Classes
    id2label: Annotated[dict[str, Any], Count(0, 1 << 20)] | None
    label2id: Annotated[dict[str, Any], Count(0, 1 << 20)] | None
    qkv_bias: bool
    use_swiglu_ffn: bool
    use_mask_token: bool


class HuggingFaceViT(Backbone):
    family = "hf"
    takes = f"Hugging Face's {listed(_TOWERS, 'and')}"
    vit: Any
    any_size = True  # position embeddings are interpolated

    def __init__(self, vit: Any) -> None:
        super().__init__(vit)
        self.kind = type(vit).__name__
        self.is_dino = self.kind.startswith("Dinov2")

    @classmethod
    def claims(cls, vit: nn.Module) -> bool:
        # Nothing of transformers is imported: a model of it can only exist where it was.
        base = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
        return isinstance(vit, base) and type(vit).__name__ in _TOWERS

    @property
    def tower(self) -> Any:
        return getattr(self.vit, _TOWERS[self.kind])

    @property
    def blocks(self) -> list[nn.Module]:
        # `encoder.layer` or `layers`, by version: it is the only list of modules in the tower.
        return list(next(m for m in self.tower.modules() if isinstance(m, nn.ModuleList)))

    def attention(self, block: Any) -> nn.Module:
        return block.attention

    def mlp_in(self, block: Any) -> Any:
        mlp = block.mlp if hasattr(block, "mlp") else block.intermediate
        return next(m for m in mlp.modules() if isinstance(m, nn.Linear))

    def install(self) -> None:
        super().install()
        config: Any = self.vit.config
        self.implementation = config._attn_implementation
        config._attn_implementation = "sdpa"  # the path that calls scaled_dot_product_attention

    def remove(self) -> None:
        super().remove()
        self.vit.config._attn_implementation = self.implementation

    def embed(self, images: Tensor) -> Tensor:
        # DINOv2 always interpolates its positions; the others only when asked.
        built_for = tuple(images.shape[-2:]) == self.shape.image
        options = {} if self.is_dino else {"interpolate_pos_encoding": not built_for}
        return self.tower.embeddings(images, **options)

    def readout(self, stream_BND: Tensor) -> Tensor:
        vit: Any = self.vit
        if self.is_dino:
            x = self.tower.layernorm(stream_BND)
            return vit.classifier(torch.cat([x[:, 0], x[:, self.shape.prefix :].mean(1)], -1))
        if self.kind == "DeiTForImageClassificationWithTeacher":
            by_class, by_teacher = self.answers(stream_BND)
            return (by_class + by_teacher) / 2
        return vit.classifier(self.tower.layernorm(stream_BND[:, 0]))

    def normed(self, stream_BND: Tensor) -> Tensor:
        return self.tower.layernorm(stream_BND)

    def reset_head(self, classes: int) -> None:
        vit: Any = self.vit
        vit.config.num_labels = vit.num_labels = classes
        for name, module in list(vit.named_children()):
            if isinstance(module, nn.Linear):
                setattr(vit, name, nn.Linear(module.in_features, classes))

    @property
    def read_first(self) -> int | None:
        return None if self.is_dino else self.shape.prefix

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

    def answers(self, stream_BND: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind != "DeiTForImageClassificationWithTeacher":
            return super().answers(stream_BND)
        vit: Any = self.vit
        x = self.tower.layernorm(stream_BND[:, :2])
        return vit.cls_classifier(x[:, 0]), vit.distillation_classifier(x[:, 1])

    @property
    def changeable(self) -> tuple:
        config: Any = self.vit.config
        heads = (id(getattr(self.vit, name, None)) for name in ("classifier", "cls_classifier"))
        return config.image_size, config.num_labels, *heads

    def measure(self) -> Shape:
        config: Any = self.vit.config
        size, patch, width = config.image_size, config.patch_size, config.hidden_size
        sides = (patch, patch) if isinstance(patch, int) else tuple(patch)
        registers = getattr(config, "num_register_tokens", 0) if "Registers" in self.kind else 0
        return Shape(
            blocks=config.num_hidden_layers,
            width=width,
            hidden=self.mlp_in(self.blocks[0]).out_features,
            heads=config.num_attention_heads,
            head_size=width // config.num_attention_heads,
            prefix=(2 if self.kind.startswith("DeiT") else 1) + registers,
            patch=sides,
            image=(size, size) if isinstance(size, int) else tuple(size),
            channels=config.num_channels,
            classes=config.num_labels,
            block_macs=linear_macs(self.blocks[0]),
            token_macs=config.num_channels * sides[0] * sides[1] * width,
            image_macs=sum(linear_macs(m) for name, m in self.vit.named_children() if "classifier" in name),
            pool_macs=0,
        )

    def parts(self, block: Any) -> BlockParts | None:
        attention, mlp = block.attention, getattr(block, "mlp", None)
        before = getattr(block, "layernorm_before", None) or getattr(block, "norm1", None)
        after = getattr(block, "layernorm_after", None) or getattr(block, "norm2", None)
        linears: list[Any] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        if linears[0] is None and hasattr(attention, "attention"):  # transformers before its 5.2x
            linears = [getattr(attention.attention, name, None) for name in ("query", "key", "value")]
            linears.append(getattr(getattr(attention, "output", None), "dense", None))
        linears += [getattr(mlp, "fc1", None), getattr(mlp, "fc2", None)]
        function = getattr(mlp, "activation_fn", None) or getattr(mlp, "activation", None)
        if mlp is None and hasattr(block, "intermediate"):  # likewise
            linears[-2:] = [getattr(half, "dense", None) for half in (block.intermediate, block.output)]
            function = getattr(block.intermediate, "intermediate_act_fn", None)
        act = activation_name(function)
        core = getattr(attention, "attention", attention)
        known = all(type(layer) in LINEAR for layer in linears) and act is not None and as_written(block)
        leaves = {module for module in block.modules() if not list(module.children())}
        known = known and all(_is_idle(leaf) for leaf in leaves - {before, after, function, *linears})
        if not known or type(before) is not nn.LayerNorm or type(after) is not nn.LayerNorm:
            return None
        q, k, v, proj, fc1, fc2 = linears
        scales = [getattr(getattr(block, f"layer_scale{i}", None), "lambda1", None) for i in (1, 2)]
        assert act is not None
        return BlockParts(
            norm1=before,
            qkv=(q, k, v),
            heads=self.shape.heads,
            scale=getattr(core, "scaling", self.shape.head_size**-0.5),
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

    def describe(self) -> dict[str, Any]:
        return {"model": self.kind, "options": plain_options(self.vit.config, Plain)}

    @staticmethod
    def rebuild(described: dict[str, Any]) -> nn.Module:
        return rebuilt(described, _TOWERS, Plain)


def _is_idle(module: nn.Module) -> bool:
    """What a runtime leaves out of a block in eval, or finds by its name."""
    return type(module) in (nn.Dropout, nn.Identity) or type(module).__name__.endswith(("DropPath", "LayerScale"))


def plain_options(config: Any, plain: Any) -> dict[str, Any] | None:
    """What of a model's config says how it computes. None: more than can be read again."""
    known = plain.__annotations__.keys()
    own = inspect.signature(type(config)).parameters.keys() - IDLE
    given = {name: value for name, value in config.to_diff_dict().items() if name in known | own}
    return given if given.keys() <= known else None


def rebuilt(described: dict[str, Any], kinds: Iterable[str], plain: Any) -> nn.Module:
    """The Hugging Face model that a checkpoint describes, one of these kinds, with random weights. plain: a TypedDict
    of the options that it may ask for; others of transformers' fetch code or files."""
    try:
        import transformers
    except ImportError as error:
        raise DwindleError(
            f'This checkpoint holds a Hugging Face {described["model"]}; install it with: pip install "dwindle[hf]"'
        ) from error
    if described["model"] not in kinds:
        raise unknown("Hugging Face model", described["model"], kinds, hint="the checkpoint was saved with it")
    kind = getattr(transformers, described["model"])
    given = {name: value for name, value in described["options"].items() if name not in IDLE}
    return kind(kind.config_class(**options(given, plain, described["model"])))
