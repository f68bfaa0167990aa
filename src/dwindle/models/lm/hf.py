"""Hugging Face's causal language models (GPT-2, Llama, Mistral, Qwen 2 and 3), with their blocks split in parts.

Nothing is hooked or replaced: the model stays as it is, and the loop in execute.py calls its layers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from ...backbones.hf_config import plain_options, rebuilt
from ...errors import DwindleError, listed
from ...settings import Above0, AtLeast0, Classes, Depth, Share, Size, Whole0, Whole1, Within, Word
from .model import LMShape, Rotary, check_length, rotate

LIKE_LLAMA = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
KINDS = ("GPT2LMHeadModel", *LIKE_LLAMA)
Context = Annotated[int, Within(1, 1 << 24)]


class RopeOptions(TypedDict, total=False):
    """Options of a Llama's rotary position embedding, under the names of all supported versions of transformers."""

    rope_type: Word
    type: Word
    rope_theta: Above0
    partial_rotary_factor: Share
    factor: Above0
    attention_factor: float | None
    beta_fast: float | None
    beta_slow: float | None
    low_freq_factor: float
    high_freq_factor: float
    short_factor: list[float]
    long_factor: list[float]
    original_max_position_embeddings: Whole1


class Plain(TypedDict, total=False):
    """The options of a model's config that a checkpoint may hold."""

    vocab_size: Classes
    tie_word_embeddings: bool
    initializer_range: AtLeast0
    pad_token_id: Whole0 | None
    # GPT-2
    n_positions: Context
    n_embd: Size
    n_layer: Depth
    n_head: Size
    n_inner: Size | None
    activation_function: Word
    resid_pdrop: Share
    embd_pdrop: Share
    attn_pdrop: Share
    layer_norm_epsilon: Above0
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool
    reorder_and_upcast_attn: bool
    add_cross_attention: bool
    # Llama
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size | None
    head_dim: Size | None
    hidden_act: Word
    max_position_embeddings: Context
    rms_norm_eps: Above0
    rope_theta: Above0
    rope_scaling: RopeOptions | None
    rope_parameters: RopeOptions | None
    pretraining_tp: Whole1
    attention_bias: bool
    attention_dropout: Share
    mlp_bias: bool
    # Mistral and Qwen
    sliding_window: Whole1 | None
    use_sliding_window: bool
    max_window_layers: Whole0
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None


class GPT2Parts:
    """A block of GPT-2 in the parts of `model.Block`."""

    def __init__(self, block: Any) -> None:
        self.block, self.attn = block, block.attn
        self.heads = block.attn.num_heads

    def normed(self, x: Tensor) -> Tensor:
        return self.block.ln_1(x)

    def queries(self, h: Tensor, rotary: Rotary) -> Tensor:
        return self._project(h, 0, 1).unflatten(-1, (self.heads, -1))

    def keys_values(self, h: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        k, v = (t.unflatten(-1, (self.heads, -1)) for t in self._project(h, 1, 3).chunk(2, -1))
        return k, v

    def _project(self, h: Tensor, begin: int, end: int) -> Tensor:
        """The thirds `begin` to `end` of the joint projection, which gives queries, keys and values."""
        width, joint = h.shape[-1], self.attn.c_attn
        columns = slice(begin * width, end * width)
        return h @ joint.weight[:, columns] + joint.bias[columns]

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.attn.resid_dropout(self.attn.c_proj(attended))
        return x + self.block.mlp(self.block.ln_2(x))

    @property
    def attention_dropout(self) -> float:
        return self.attn.attn_dropout.p if self.attn.training else 0.0


class LlamaParts:
    """A block of Llama, Mistral or Qwen in the parts of `model.Block`. Qwen 3 normalises each head's query and key."""

    def __init__(self, block: Any) -> None:
        self.block, self.attn = block, block.self_attn

    def normed(self, x: Tensor) -> Tensor:
        return self.block.input_layernorm(x)

    def queries(self, h: Tensor, rotary: Rotary) -> Tensor:
        return rotate(self._normed(self._heads(self.attn.q_proj(h)), "q_norm"), rotary)

    def keys_values(self, h: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        k = self._normed(self._heads(self.attn.k_proj(h)), "k_norm")
        return rotate(k, rotary), self._heads(self.attn.v_proj(h))

    def _normed(self, heads: Tensor, name: str) -> Tensor:
        norm = getattr(self.attn, name, None)
        return heads if norm is None else norm(heads)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.attn.head_dim))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.attn.o_proj(attended)
        return x + self.block.mlp(self.block.post_attention_layernorm(x))

    @property
    def attention_dropout(self) -> float:
        return self.attn.attention_dropout if self.attn.training else 0.0


class HFLanguage:
    """A view of a Hugging Face model as `AdaptiveLM` asks for it; the weights stay in the model."""

    family = "hf_lm"

    def __init__(self, lm: nn.Module) -> None:
        self.lm: Any = lm
        tower: Any = getattr(lm, "transformer", None) or getattr(lm, "model", None)
        self.kind = next((kind for kind in KINDS if any(c.__name__ == kind for c in type(lm).__mro__)), None)
        if self.kind is None:
            raise DwindleError(
                f"{type(lm).__name__} cannot be adapted; give a CharLM, or of Hugging Face's models {listed(KINDS)}."
            )
        config: Any = self.lm.config
        if self.kind == "GPT2LMHeadModel":
            odd = config.add_cross_attention or config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights
            self.blocks: list[Any] = [GPT2Parts(block) for block in tower.h]
        else:
            odd = getattr(tower.rotary_emb, "rope_type", "default") in ("dynamic", "longrope")
            self.blocks = [LlamaParts(block) for block in tower.layers]
        if odd:
            raise DwindleError(
                f"This {self.kind} scales attention by layer or turns positions by length, which is not supported; "
                "give one with the family's usual attention."
            )

    @property
    def gpt2(self) -> bool:
        return self.kind == "GPT2LMHeadModel"

    def embed(self, ids_BN: Tensor, begin: int = 0) -> Tensor:
        check_length(begin + ids_BN.shape[1], self._context)
        if not self.gpt2:
            return self.lm.model.embed_tokens(ids_BN)
        tower = self.lm.transformer
        places = torch.arange(begin, begin + ids_BN.shape[1], device=ids_BN.device)
        return tower.drop(tower.wte(ids_BN) + tower.wpe(places))

    def rotary(self, count: int, begin: int = 0) -> Rotary:
        if self.gpt2:
            return ()
        weight = self.lm.model.embed_tokens.weight
        places = torch.arange(begin, begin + count, device=weight.device)[None]
        half = self.blocks[0].attn.head_dim // 2  # Llama's tables hold every angle twice
        return tuple(t[0, :, :half] for t in self.lm.model.rotary_emb(weight, places))

    def readout(self, x: Tensor) -> Tensor:
        return self.lm.lm_head((self.lm.transformer.ln_f if self.gpt2 else self.lm.model.norm)(x))

    @property
    def _context(self) -> int:
        """The longest context in which every token sees all tokens before it: a sliding window hides older ones."""
        window = getattr(self.lm.config, "sliding_window", None)  # of Qwen None where the model does not use it
        return min(self.lm.config.max_position_embeddings, window or self.lm.config.max_position_embeddings)

    @property
    def shape(self) -> LMShape:
        config, block = self.lm.config, self.blocks[0]
        width, heads = config.hidden_size, config.num_attention_heads
        head = width // heads if self.gpt2 else block.attn.head_dim
        key_heads = heads if self.gpt2 else config.num_key_value_heads
        matrices = sum(p.numel() for p in block.block.parameters() if p.dim() == 2)
        return LMShape(
            blocks=len(self.blocks),
            width=width,
            heads=heads,
            head_size=head,
            context=self._context,
            vocabulary=config.vocab_size,
            row_macs=matrices,
            key_macs=2 * width * key_heads * head,
            read_macs=width * config.vocab_size,
        )

    def describe(self) -> dict[str, Any]:
        return {"model": self.kind, "options": plain_options(self.lm.config, Plain)}


def rebuild(described: dict[str, Any]) -> nn.Module:
    """The model that `describe` described, without its weights."""
    return rebuilt(described, KINDS, Plain)
