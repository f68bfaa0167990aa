"""The description of a Hugging Face model in a checkpoint: the name of its class, and plain options of its config. No
option can make transformers fetch files or code."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypedDict, get_type_hints, is_typeddict

from torch import nn

from ..errors import DwindleError, unknown
from ..settings import Above0, AtLeast0, Classes, Count, Depth, ImageSize, Share, Size, Within, Word, options

# Options that configs of some version hold, and that are ignored unless a family's TypedDict names them.
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
Names = Annotated[dict[str, Any], Count(0, 1 << 20)] | None
Features = Annotated[list[Word], Count(0, 256)] | None
Indices = Annotated[list[int], Count(0, 256)] | None


class Tower(TypedDict, total=False):
    """Options of every encoder."""

    hidden_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    intermediate_size: Size
    hidden_act: Word
    hidden_dropout_prob: Share
    attention_probs_dropout_prob: Share
    initializer_range: AtLeast0
    layer_norm_eps: Above0
    image_size: Sides
    patch_size: Sides
    num_channels: Size
    num_labels: Classes
    id2label: Names
    label2id: Names
    qkv_bias: bool
    pooler_output_size: Size | None
    pooler_act: Word


class Plain(Tower, total=False):
    """Options of ViT, DeiT, DINOv2 and similar models."""

    mlp_ratio: Annotated[float, Within(0, 256, over=True)]
    drop_path_rate: Share
    layerscale_value: float
    num_register_tokens: Size | Literal[0]
    use_swiglu_ffn: bool
    use_mask_token: bool
    encoder_stride: Size
    out_features: Features
    out_indices: Indices
    apply_layernorm: bool
    reshape_hidden_states: bool


def plain_options(config: Any, plain: Any) -> dict[str, Any] | None:
    """The options of a model's config that differ from the defaults and change what it computes. None: some of them are
    not in `plain`, so `rebuilt` could not read them.

    plain: a TypedDict of the options; one of them may itself be a TypedDict, for the config of a part.
    """
    kinds = get_type_hints(plain)
    own = inspect.signature(type(config)).parameters.keys() - IDLE
    changed = {name: value for name, value in config.to_diff_dict().items() if name in kinds.keys() | own}
    parts = {name for name, kind in kinds.items() if is_typeddict(kind)}
    for name in parts:
        changed[name] = plain_options(getattr(config, name), kinds[name])
    complete = changed.keys() <= kinds.keys() and all(changed[name] is not None for name in parts)
    return changed if complete else None


def rebuilt(described: dict[str, Any], kinds: Iterable[str], plain: Any) -> nn.Module:
    """The Hugging Face model that a checkpoint describes, with random weights. kinds: the names of classes that it may
    have. plain: a TypedDict of the options it may have, as some of transformers' options fetch code or files."""
    try:
        import transformers
    except ImportError as error:
        raise DwindleError(
            f'This checkpoint holds a Hugging Face {described["model"]}; install it with: pip install "dwindle[hf]"'
        ) from error
    if described["model"] not in kinds:
        raise unknown("Hugging Face model", described["model"], kinds, hint="the checkpoint was saved with it")
    kind = getattr(transformers, described["model"], None)
    if kind is None:
        raise DwindleError(
            f"The transformers {transformers.__version__} installed here has no {described['model']}, which this "
            "checkpoint was saved with; upgrade transformers."
        )
    idle = IDLE - plain.__annotations__.keys()
    kept = {name: value for name, value in described["options"].items() if name not in idle}
    return kind(kind.config_class(**options(kept, plain, described["model"])))
