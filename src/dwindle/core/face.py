"""The wrapped model's face: its own code runs as it is written, and where it calls its blocks, the loop runs.

For one call a twin of the wrapped model is made: the modules that hold the blocks are shallow copies, each block has a
`Turn` in its place, and everything else is shared. So what a family does before and after its blocks, its options and
its classes of answers are never written down here.
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

# Methods of wrapped models that run blocks. Every other one is called on the wrapped model itself.
RUN_BLOCKS = (
    *("forward_features", "forward_intermediates", "get_intermediate_layers", "get_image_features"),
    *("forward_with_filtered_kwargs", "forward_with_feature_maps"),
)
EVERY_DEPTH = ("forward_intermediates", "get_intermediate_layers")  # of these, those that ask for it


class FamilyFace:
    """What a family says of its own face: how its models are called, and what comes back. Part of a `Backbone`."""

    speaks: ClassVar[bool] = False  # has classes of answers of its own, which come back

    def request(self, images: Tensor, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The method of the wrapped model that answers, and what it is called with."""
        raise NotImplementedError

    def wants_every(self, options: dict[str, Any]) -> bool:
        """Whether a call with these options looks at the tokens after every block."""
        return False

    def given(self, images: Any, options: dict[str, Any]) -> Any:
        """The images of a call; options that only told of their shape are taken out."""
        return images

    @property
    def gives_tuples(self) -> bool:
        """Whether the wrapped model takes what a block gives from a tuple."""
        return False

    def pooled(self, answer: Any) -> Tensor | None:
        """The embedding that an answer of the wrapped model holds, where it is the one that `readout` would give."""
        return None

    @property
    def task_loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Of logits and labels, a number per image, where the wrapped model says so; None: the cross-entropy."""
        return None


class Turn(nn.Module):
    """Stands in a block's place, and says what the loop made of the tokens by then."""

    @staticmethod
    def of(block: nn.Module, call: Call, depth: int) -> nn.Module:
        """It passes for a block of its class: transformers records what modules of a class return. Made by no class's
        own way, which for a sharded block would be another's."""
        kind: Any = type(block)
        turn: Turn = object.__new__(_turn(kind))
        nn.Module.__init__(turn)
        turn.__dict__.update(_block=block, _call=call, _depth=depth)  # no part of it: nobody shall walk into the block
        return turn

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        state = self._call.after(self._depth, x, args, options)
        return (state,) if self._call.model.backbone.gives_tuples else state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


@cache
def _turn(kind: Any) -> type[Turn]:
    return type(f"{kind.__name__}Turn", (Turn, kind), {})


class Call:
    """One call of the wrapped model's own code."""

    def __init__(
        self, model: AdaptiveViT, images: Tensor, start: Start, every: bool = False, **forced: Tensor | None
    ) -> None:
        """every: what is left of the tokens after every block will be looked at, not only after the last."""
        self.model, self.images, self.start, self.every, self.forced = model, images, start, every, forced
        self.states: list[Tensor] = []
        self.features: Tensor | None = None
        self.read: Tensor | None = None  # the features as the loop left them, which a smaller image may have fewer of
        self.trace: Trace | None = None

    def __call__(self, name: str, *args: Any, **options: Any) -> Any:
        """What the wrapped model's method of this name gives."""
        with cutting(self.images):
            answer = getattr(self.twin(), name)(*args, **options)
        if self.trace is not None:
            tell(self.model, self.trace)
        return answer

    def twin(self) -> Any:
        vit = self.model.vit
        copies: dict[str, nn.Module] = {}

        def copied(name: str) -> nn.Module:
            if name not in copies:
                copies[name] = _shallow(vit.get_submodule(name))
                if name:
                    put(name, copies[name])
            return copies[name]

        def put(name: str, module: nn.Module) -> None:
            above, _, own = name.rpartition(".")
            copied(above)._modules[own] = module

        names = {module: name for name, module in vit.named_modules()}
        for depth, block in enumerate(self.model.backbone.blocks):
            put(names[block], Turn.of(block, self, depth))
        return copies[""]

    def after(self, depth: int, x: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        """The tokens after this block. At the first one the whole loop runs."""
        if depth == 0:
            if any(options.get(name) is not None for name in ("attn_mask", "mask")) or options.get("is_causal"):
                raise DwindleError(
                    "A mask hides tokens from each other, and here the method alone says which tokens are looked at; "
                    "leave it out."
                )
            # In a context of its own: what records the twin's blocks shall not record ours, which see other rows.
            if self.every:
                contextvars.Context().run(self.loop, x)
            else:
                self.loop(x)
        assert self.features is not None
        if self.every:
            return self.states[depth]
        return self.features if depth == len(self.model.backbone.blocks) - 1 else x

    def loop(self, x: Tensor) -> None:
        model, states = self.model, list[Tensor]()
        seen = self.images if self.forced.get("depths") is not None else model.method.seen(self.images)
        if seen is not self.images:
            x = model.backbone.embed(seen)
        given = states if self.every else None
        self.read, self.trace = model.loop(x, seen, self.images, self.start, states=given, **self.forced)
        states += [self.read] * (len(model.backbone.blocks) - len(states))
        states[-1] = self.read
        self.states = [model.whole(state, seen, self.images) for state in states] if self.every else []
        self.features = model.whole(self.read, seen, self.images)


def _shallow(module: nn.Module) -> nn.Module:
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    twin.__dict__.pop("_output_capturing_hooks_installed", None)  # transformers' own mark: not on these turns yet
    for name in ("grad_checkpointing", "gradient_checkpointing"):  # the loop sees to it, block by block
        if getattr(module, name, False):
            twin.__dict__[name] = False
    return twin


class _Heard(threading.local):
    """Who listens in this thread."""

    lists: tuple[tuple[nn.Module, list[Trace]], ...] = ()


_heard = _Heard()


def tell(model: nn.Module, trace: Trace) -> None:
    for listening, traces in _heard.lists:
        if listening is model:
            traces.append(trace)


class Face(nn.Module):
    """What an adaptive model has of the model it wraps."""

    accepts_loss_kwargs = False  # to transformers' Trainer: the loss is a mean over the images of the call

    def __getattr__(self, name: str) -> Any:
        """What the wrapped model has by this name; of its methods those that run blocks run the loop."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            vit = self.__dict__.get("_modules", {}).get("vit")
            if vit is None or name.startswith("_") or not hasattr(vit, name):
                raise
        return partial(_hosted, self, name) if name in RUN_BLOCKS else getattr(vit, name)

    @contextmanager
    def traced(self) -> Iterator[list[Trace]]:
        """Within, the trace of every call of this thread is appended to the list: for models inside larger ones, whose
        answer has no trace. `with dwindle.adaptive_part(model).traced() as traces: model(...)`"""
        before, traces = _heard.lists, list[Trace]()
        _heard.lists = (*before, (self, traces))
        try:
            yield traces
        finally:
            _heard.lists = before

    def push_to_hub(self, repo: str, **options: Any) -> str:
        """Upload as a checkpoint with a model card; `dwindle.load(repo)` reads it back. options: those of `io.hub`."""
        return family_of(self).push_to_hub(self, repo, **options)

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> Path:
        """Write a Hugging Face model as transformers keeps models, and what was added beside it."""
        return family_of(self).save_pretrained(self, folder, **options)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], **options: Any) -> Any:
        """What `save_pretrained` wrote, from a folder or a Hub id. options: of transformers' from_pretrained."""
        return next(family for family in families() if issubclass(cls, family.model)).from_pretrained(source, **options)


def _hosted(model: Any, name: str, *args: Any, **options: Any) -> Any:
    given = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
    images = model.check_images(next((value for value in given if value.is_floating_point()), None))
    every = name in EVERY_DEPTH or model.backbone.wants_every(options)
    call = Call(model, images, model.beginning(), every)
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
    """What the wrapped model itself answers, which also has `trace`, `features` and `logits`."""
    backbone = model.backbone
    call = Call(model, images, start, backbone.wants_every(options), **forced)
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
    """The answer with this loss, where its class has a place for one."""
    if not isinstance(answer, dict):
        answer.loss = loss
        return answer
    kept = vars(answer).keys() & {"trace", "features", "logits"}
    if not hasattr(type(answer), "loss"):
        answer["loss"] = loss
        return answer
    made = type(answer)(**{**answer, "loss": loss})  # anew: the loss comes first
    vars(made).update({name: vars(answer)[name] for name in kept})
    return made


def _own_names(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}vit.")]:
        state[prefix + name.removeprefix(f"{prefix}vit.")] = state.pop(name)


def _given_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    added = tuple(f"{prefix}{name}" for name in ("vit.", "method.", "dense_head.", "give_back."))
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(added)]:
        state[f"{prefix}vit.{name.removeprefix(prefix)}"] = state.pop(name)


def place(outer: nn.Module, name: str, make: Callable[[nn.Module], AdaptiveViT]) -> nn.Module:
    """The outer model, its part of this name made adaptive where it stands."""
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
    made.register_state_dict_post_hook(_own_names)
    made.register_load_state_dict_pre_hook(_given_names)
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
