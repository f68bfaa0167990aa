"""`model.prepare()`: a model with fixed weights, in the form that this machine computes fastest.

The fast form is a recording: a graph in onnxruntime on a CPU, CUDA graphs over folded weights on a GPU. A recording
cannot detect for certain that weights were changed after it was made. Therefore a `Prepared` holds a copy of the model
that nothing else refers to, as an exported file does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.parts import replaced
from ..errors import DwindleError
from .cpu import CpuGraphs, has_global_hooks
from .cuda.graph import Engine

if TYPE_CHECKING:
    from ..core.model import AdaptiveViT, Output
    from ..methods import Method

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Prepared:
    """A copy of a model for inference. Later changes to the original model do not change the copy."""

    training = False

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = frozen(model)
        self._place = next(self._model.parameters()).device

    def eval(self) -> Prepared:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"A prepared model has no '{name}': its weights are fixed, and it only answers; ask the model it was made "
            "of, and prepare that again when its weights have changed."
        )

    def __reduce__(self) -> tuple:
        return type(self), (self._model,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self._model).__name__} on {self._place})"

    def _check_place(self, images: Tensor) -> None:
        if images.device != self._place:
            raise DwindleError(
                f"The images are on {images.device}, this model was prepared on {self._place}; move the images there, "
                "or the model before it is prepared."
            )


class PreparedViT(Prepared):
    """A prepared `AdaptiveViT`: a graph in onnxruntime on a CPU, CUDA graphs on a GPU, packed where neither works."""

    def __init__(self, model: AdaptiveViT, images: int | None = None, details: bool = False) -> None:
        """images: about how many it will be called with in all; for few images a CPU records no graph. None: many.
        details: outputs have features and all values of the trace; this makes a CPU's graph a little slower.
        """
        super().__init__(model)
        self._options = (images, details)
        on_cpu, on_gpu = self._place.type == "cpu", self._place.type == "cuda"
        self._graphs = CpuGraphs(self._model, images, details) if on_cpu else None
        self._engine = Engine(self._model) if on_gpu else None

    def __reduce__(self) -> tuple:
        return type(self), (self._model, *self._options)

    @property
    def method(self) -> Method:
        """The copy's method. Its operating point and threshold may be set."""
        return self._model.method

    @torch.no_grad()
    def __call__(self, images: Tensor, depths: Tensor | None = None, operating_point: Tensor | None = None) -> Output:
        """The output of the model's own forward in eval mode."""
        model: AdaptiveViT = self._model
        recorded = self._engine is not None and not has_global_hooks()
        if not recorded or not isinstance(images, Tensor):
            model.check_images(images)  # the engine checks images itself, when it records a new size
        self._check_place(images)
        if depths is None:
            model.method.warn_untrained()
        if self._engine is not None and recorded:
            return self._engine(images, depths, operating_point)
        out = None if self._graphs is None else self._graphs(images, depths, operating_point)
        if out is None:
            return model(images, "packed", depths, operating_point)
        model.check_logits(out.logits, images)
        return out

    def inputs(
        self, images: Tensor, depths: Tensor | None = None, operating_point: Tensor | None = None
    ) -> list[Tensor | None]:
        """The tensors from which a batch of this size is read, see `Engine.inputs`; on a CPU the given ones."""
        if self._engine is None:
            return [images, depths, operating_point]
        return self._engine.inputs(images, depths, operating_point)

    def path(self, images: Tensor) -> str:
        """How a batch of this size is run: 'graph' or 'packed'."""
        if self._engine is not None:
            return self._engine.path(images)
        return "packed" if self._graphs is None or self._graphs.graph(images) is None else "graph"


def prepared_or_self(model: Any, images: int | None = None, details: bool = False) -> Callable[..., Output]:
    """The model prepared; the model itself where it cannot be copied."""
    try:
        return model.prepare(images, details)
    except DwindleError:
        return model


def frozen(model: nn.Module) -> nn.Module:
    """A copy in eval mode, without gradients. It calls the same hooks; a part left in training mode stays in it."""
    shared: dict[int, Any] = {}
    for name, module in model.named_modules():
        if replaced(module):
            raise DwindleError(
                f"{name or type(model).__name__} has a forward of its own, which in a copy would go on running the "
                "original; call the model itself instead of preparing it."
            )
        for hooks in HOOKS:
            if registered := getattr(module, hooks, None):
                shared[id(registered)] = registered.copy()  # the objects that the hooks call are not copied
    try:
        with torch.inference_mode(False), torch.no_grad():
            made = copy.deepcopy(model, shared)
    except Exception as error:  # such as sharded weights, a computed weight or a lock, each with an error of its own
        raise DwindleError(
            f"{type(model).__name__} holds something of which no copy can be made ({error}); call the model itself "
            "instead of preparing it."
        ) from error
    made = made.eval() if made.training else made
    return made.requires_grad_(False)
