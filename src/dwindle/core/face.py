"""The wrapped model's interface: its own code runs as it is written, and where it calls its blocks, the loop runs.

Each call makes a twin of the wrapped model: the modules that hold the blocks are shallow copies, a `StandIn` takes the
place of each block, and everything else is shared. So this file repeats nothing of what a family does before and after
its blocks, nor its options or its classes of answers.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from ..errors import DwindleError
from ..ops.patches import cutting
from .registry import families, family_of
from .tokens import Tokens
from .trace import Trace

if TYPE_CHECKING:
    from .model import AdaptiveViT

Start = Callable[[Tensor, int], Tokens]

# Methods of wrapped models that run blocks. Every other method is called on the wrapped model itself.
RUN_BLOCKS = (
    *("forward_features", "forward_intermediates", "get_intermediate_layers", "get_image_features"),
    *("forward_with_filtered_kwargs", "forward_with_feature_maps"),
)
EVERY_DEPTH = ("forward_intermediates", "get_intermediate_layers")  # those that read the tokens after every block


class FamilyFace:
    """How the models of a family are called and what they return. Part of a `Backbone`."""

    has_own_outputs: ClassVar[bool] = False  # the family has its own classes of answers, and returns those

    def request(self, images: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The name of the wrapped model's method that answers, and the arguments to call it with."""
        raise NotImplementedError

    def wants_every_depth(self, options: dict[str, Any]) -> bool:
        """Whether a call with these options reads the tokens after every block."""
        return False

    def given(self, images: Any, options: dict[str, Any]) -> Any:
        """The images of a call as (B, C, height, width). Options that only described their shape are removed."""
        return images

    @property
    def gives_tuples(self) -> bool:
        """Whether blocks of the wrapped model return a tuple with the tokens first."""
        return False

    def pooled(self, answer: Any) -> Tensor | None:
        """The embedding in an answer of the wrapped model, if it equals what `readout` gives; else None."""
        return None

    @property
    def task_loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The wrapped model's own loss of (logits, labels), one number per image; None: the cross-entropy."""
        return None


class StandIn(nn.Module):
    """Takes a block's place in the twin and returns the tokens that the loop computed up to that block."""

    @staticmethod
    def of(block: nn.Module, call: Call, depth: int) -> nn.Module:
        """A stand-in that is an instance of the block's class, because transformers records what modules of a class
        return. It is made without that class's own `__new__`, which a sharded block overrides."""
        kind: Any = type(block)
        made: StandIn = object.__new__(_stand_in(kind))
        nn.Module.__init__(made)
        # Set past nn.Module's __setattr__: the block must not become a submodule, which others would walk into.
        made.__dict__.update(_block=block, _call=call, _depth=depth)
        return made

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        state = self._call.after(self._depth, x, args, options)
        return (state,) if self._call.model.backbone.gives_tuples else state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


@cache
def _stand_in(kind: Any) -> type[StandIn]:
    return type(f"{kind.__name__}StandIn", (StandIn, kind), {})


class Call:
    """One call of the wrapped model's own code."""

    def __init__(
        self, model: AdaptiveViT, images: Tensor, start: Start, every_depth: bool = False, **forced: Tensor | None
    ) -> None:
        """every_depth: the wrapped model's code reads the tokens after every block, not only after the last.
        forced: `depths` and `operating_point` of `AdaptiveViT.forward`."""
        self.model, self.images, self.start = model, images, start
        self.every_depth, self.forced = every_depth, forced
        self.states: list[Tensor] = []
        self.features: Tensor | None = None
        self.read: Tensor | None = None  # the loop's own features: fewer tokens if the method made the images smaller
        self.trace: Trace | None = None

    def __call__(self, name: str, *args: Any, **options: Any) -> Any:
        """The result of the wrapped model's method of this name."""
        with cutting(self.images):
            answer = getattr(self.twin(), name)(*args, **options)
        if self.trace is not None:
            _report(self.model, self.trace)
        return answer

    def twin(self) -> Any:
        """The wrapped model with a stand-in in the place of each block. Only modules that hold blocks are copied."""
        vit = self.model.vit
        copies: dict[str, nn.Module] = {}

        def copied(name: str) -> nn.Module:
            if name not in copies:
                copies[name] = _shallow_copy(vit.get_submodule(name))
                if name:
                    put(name, copies[name])
            return copies[name]

        def put(name: str, module: nn.Module) -> None:
            above, _, own = name.rpartition(".")
            copied(above)._modules[own] = module

        names = {module: name for name, module in vit.named_modules()}
        for depth, block in enumerate(self.model.backbone.blocks):
            put(names[block], StandIn.of(block, self, depth))
        return copies[""]

    def after(self, depth: int, x: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """The tokens after block `depth`. The call for the first block runs the whole loop."""
        if depth == 0:
            if any(options.get(name) is not None for name in ("attn_mask", "mask")) or options.get("is_causal"):
                raise DwindleError(
                    "A mask hides tokens from each other, and here the method alone says which tokens are looked at; "
                    "leave it out."
                )
            # transformers records the outputs of the twin's blocks by a context variable. In a new context it does not
            # also record the real blocks, which compute other rows.
            if self.every_depth:
                contextvars.Context().run(self.loop, x)
            else:
                self.loop(x)
        assert self.features is not None
        if self.every_depth:
            return self.states[depth]
        return self.features if depth == len(self.model.backbone.blocks) - 1 else x

    def loop(self, x: Tensor) -> None:
        """Run the model's loop on embedded images and keep the features, the trace and the states."""
        model, states = self.model, list[Tensor]()
        resized = self.images if self.forced.get("depths") is not None else model.method.resize(self.images)
        if resized is not self.images:
            x = model.backbone.embed(resized)
        collected = states if self.every_depth else None
        self.read, self.trace = model.loop(x, resized, self.images, self.start, states=collected, **self.forced)
        states += [self.read] * (len(model.backbone.blocks) - len(states))
        states[-1] = self.read
        self.states = [model.whole(state, resized, self.images) for state in states] if self.every_depth else []
        self.features = model.whole(self.read, resized, self.images)


def _shallow_copy(module: nn.Module) -> nn.Module:
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    # transformers' mark that its recording hooks are installed: they are not on the stand-ins.
    twin.__dict__.pop("_output_capturing_hooks_installed", None)
    for name in ("grad_checkpointing", "gradient_checkpointing"):  # the loop checkpoints block by block
        if getattr(module, name, False):
            twin.__dict__[name] = False
    return twin


class _Listening(threading.local):
    """The lists to which `Face.traced` appends in this thread, each with its model."""

    listeners: tuple[tuple[nn.Module, list[Trace]], ...] = ()


_listening = _Listening()


def _report(model: nn.Module, trace: Trace) -> None:
    for listener, traces in _listening.listeners:
        if listener is model:
            traces.append(trace)


class Face(nn.Module):
    """The interface that an adaptive model takes over from the model it wraps."""

    accepts_loss_kwargs = False  # tells transformers' Trainer that the loss is a mean over the images of the call

    def __getattr__(self, name: str) -> Any:
        """The wrapped model's attribute of this name. Its methods that run blocks run the loop instead."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            vit = self.__dict__.get("_modules", {}).get("vit")
            if vit is None or name.startswith("_") or not hasattr(vit, name):
                raise
        return partial(_call_wrapped, self, name) if name in RUN_BLOCKS else getattr(vit, name)

    @contextmanager
    def traced(self) -> Iterator[list[Trace]]:
        """A context in which every call from this thread appends its trace to the list that it gives. Use it for a
        model inside a larger one, whose answer has no trace:
        `with dwindle.adaptive_part(model).traced() as traces: model(...)`"""
        before, traces = _listening.listeners, list[Trace]()
        _listening.listeners = (*before, (self, traces))
        try:
            yield traces
        finally:
            _listening.listeners = before

    def push_to_hub(self, repo: str, **options: Any) -> str:
        """Upload as a checkpoint with a model card; `dwindle.load(repo)` reads it back. options: those of `io.hub`."""
        return family_of(self).push_to_hub(self, repo, **options)

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> Path:
        """Write a Hugging Face model in transformers' format, with what Dwindle added in files beside it."""
        return family_of(self).save_pretrained(self, folder, **options)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], **options: Any) -> Any:
        """Load what `save_pretrained` wrote, from a folder or a Hub id. options: of transformers' from_pretrained."""
        return next(family for family in families() if issubclass(cls, family.model)).from_pretrained(source, **options)


def _call_wrapped(model: Any, name: str, *args: Any, **options: Any) -> Any:
    """The result of a method of the wrapped model that runs blocks."""
    tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
    images = model.check_images(next((value for value in tensors if value.is_floating_point()), None))
    every_depth = name in EVERY_DEPTH or model.backbone.wants_every_depth(options)
    call = Call(model, images, model.beginning(), every_depth)
    try:
        return call(name, *args, **options)
    except (AssertionError, IndexError) as error:
        if "out of range" not in str(error):
            raise
        layers = len(model.backbone.blocks)
        raise DwindleError(
            f"{name} was asked for a layer that is not there ({error}); layers are 0 to {layers - 1}, or -{layers} to "
            f"-1 from the last, and a single number n means the last n, 1 to {layers}."
        ) from error


def answered(model: AdaptiveViT, images: Tensor, start: Start, options: dict[str, Any], **forced: Any) -> Any:
    """The wrapped model's own answer, with the attributes `trace`, `features` and `logits` added."""
    backbone = model.backbone
    call = Call(model, images, start, backbone.wants_every_depth(options), **forced)
    name, options = backbone.request(images, options)
    answer = call(name, **options)
    assert call.features is not None and call.read is not None
    vars(answer).update(trace=call.trace, features=call.features)
    if "logits" not in answer:
        pooled = backbone.pooled(answer) if call.read is call.features else None
        vars(answer)["logits"] = backbone.logits(call.read) if pooled is None else pooled
    elif call.read is not call.features and model.classes:
        answer["logits"] = backbone.logits(call.read)
    return answer


def with_loss(answer: Any, loss: Tensor) -> Any:
    """The answer with this loss. A Hugging Face answer whose class has a `loss` field is built again."""
    if not isinstance(answer, dict):
        answer.loss = loss
        return answer
    kept = vars(answer).keys() & {"trace", "features", "logits"}
    if not hasattr(type(answer), "loss"):
        answer["loss"] = loss
        return answer
    made = type(answer)(**{**answer, "loss": loss})  # a new one, because the order of fields must have the loss first
    vars(made).update({name: vars(answer)[name] for name in kept})
    return made


def _without_vit_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """State-dict hook of a part inside a larger model: its weights keep the keys they had before `adapt`."""
    for name in [name for name in state if name.startswith(f"{prefix}vit.")]:
        state[prefix + name.removeprefix(f"{prefix}vit.")] = state.pop(name)


def _with_vit_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The inverse of `_without_vit_prefix`, before a state dict is loaded."""
    added = tuple(f"{prefix}{name}" for name in ("vit.", "method.", "dense_head.", "give_back."))
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(added)]:
        state[f"{prefix}vit.{name.removeprefix(prefix)}"] = state.pop(name)


def place(outer: nn.Module, name: str, make: Callable[[nn.Module], AdaptiveViT]) -> nn.Module:
    """The outer model after its part of this name was replaced by an adaptive one."""
    try:
        part = outer.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(own for own, _ in outer.named_children())
        raise DwindleError(f"{type(outer).__name__} has no part '{name}'; its parts are {known}.") from error
    if part is outer:
        raise DwindleError("inside='' names no part; leave it out to adapt the model itself.")
    made = make(part)
    made.inside = True
    made.train(part.training)
    made.register_state_dict_post_hook(_without_vit_prefix)
    made.register_load_state_dict_pre_hook(_with_vit_prefix)
    outer.set_submodule(name, made)
    return outer


def adaptive_part(model: nn.Module) -> AdaptiveViT:
    """The adaptive model inside a larger one, or the model itself."""
    found = [part for part in model.modules() if isinstance(part, Face)]
    if len(found) != 1:
        what = f"holds {len(found)} adaptive parts" if found else "holds no adaptive part"
        hint = "give one of them" if found else "adapt it first: dwindle.adapt(model, method, inside=...)"
        raise DwindleError(f"{type(model).__name__} {what}; {hint}.")
    part: AdaptiveViT = found[0]  # type: ignore[assignment]
    return part


def unwrap(model: nn.Module) -> nn.Module:
    """The model as it was before `adapt`, itself or in its part (its weights as trained since)."""
    part = adaptive_part(model)
    name = next(name for name, module in model.named_modules() if module is part)
    inner: nn.Module = part.unwrap()
    if not name:
        return inner
    outer, _, own = name.rpartition(".")
    setattr(model.get_submodule(outer), own, inner)
    return model
