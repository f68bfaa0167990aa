"""The engine: the whole forward pass, with its halting decisions, as one CUDA graph per batch size.

The loop, the method and the heads are the model's own; only the layout is another, `Listed`. A method that cannot be
recorded, as it needs values on the host, runs eagerly in the packed layout, the definition.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...core.model import Output
from ...core.packed import Packed
from ...ops.launch import available
from ...ops.rows import ACTIVATIONS
from .block import FoldedBlock
from .keep import GRAPHS, Keeper, capture_errors
from .recording import Recording

if TYPE_CHECKING:
    from ...core.model import AdaptiveViT

Path = Callable[[Tensor, "Tensor | None", "Tensor | None"], Output]
log = logging.getLogger("dwindle")


class Engine(Keeper["AdaptiveViT"]):
    """The CUDA graphs of a model whose weights are fixed; only the method's settings may change."""

    def __init__(self, model: AdaptiveViT) -> None:
        super().__init__(model)
        self._paths: OrderedDict[tuple, tuple[tuple, Path]] = OrderedDict()  # (settings, path) by size
        self._folded = folded_blocks(model)

    def __call__(self, images: Tensor, depths: Tensor | None = None, operating_point: Tensor | None = None) -> Output:
        size = self._size(images, depths, operating_point)
        known = self._paths.get(size)
        out = None if known is None else known[1](images, depths, operating_point)
        # The checks run while the GPU computes. If the method's settings have changed, the output is thrown away.
        setting = self._setting()
        if out is None or known is None or known[0] != setting:
            self.model.check_images(images)
            known = self._paths[size] = setting, self._made(images, depths, operating_point)
            if len(self._paths) > GRAPHS:
                self._paths.popitem(last=False)
            out = known[1](images, depths, operating_point)
        self._paths.move_to_end(size)
        path = known[1]
        if isinstance(path, Recording) and self.model.checks and not path.finite():
            self.model.check_logits(out.logits, images)
        return out

    @staticmethod
    def _size(images: Tensor, depths: Tensor | None, operating_point: Tensor | None) -> tuple:
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        shape = (room(len(images)), *images.shape[1:])
        return shape, images.dtype, cast, _for_each(depths, images), _for_each(operating_point, images)

    def inputs(
        self, images: Tensor, depths: Tensor | None = None, operating_point: Tensor | None = None
    ) -> list[Tensor | None]:
        """The tensors from which the graph for this batch size reads, filled with this batch.

        A batch that is written to these tensors, and passed as these tensors, is not copied again. Other tensors of
        this size are copied to them. Without a graph: the given tensors.
        """
        self(images, depths, operating_point)
        _, path = self._paths[self._size(images, depths, operating_point)]
        places = path.inputs if isinstance(path, Recording) else [images, depths, operating_point]
        return [None if place is None else place[: len(images)] for place in places]

    def path(self, images: Tensor) -> str:
        """How a batch of this size is run: 'graph' or 'packed'."""
        self(images)
        return "graph" if isinstance(self._paths[self._size(images, None, None)][1], Recording) else "packed"

    def _setting(self) -> tuple:
        """The method's plain settings, which are constants of a recording. A graph reads its tensors from their memory.

        `warned` (a warning was given) does not change the output; with it, the second call would record again.
        """
        settings = vars(self.model.method).items()
        return tuple([v for k, v in settings if k != "warned" and isinstance(v, (bool, int, float, str, tuple))])

    def _made(self, images: Tensor, depths: Tensor | None, operating_point: Tensor | None) -> Path:
        """A recording if one can be made, else the eager path. This depends on machine, method and size only."""

        def eager(images: Tensor, depths: Tensor | None, operating_point: Tensor | None) -> Output:
            return self.model.run(images, Packed.start, depths, operating_point)

        size = tuple(images.shape)
        if not available(images):
            log.info("engine: no Triton here; %s runs eager, packed", size)
            return eager
        if False in self._size(
            images, depths, operating_point
        ):  # their number is not that of the images: the loop raises the error
            return eager
        try:
            most = room(len(images))
            depths, operating_point = (None if x is None else _padded(x, most) for x in (depths, operating_point))
            images = _padded(images, most)
            return Recording(self.model, self._folded, images, depths, operating_point, self.pool, self.lock)
        except torch.OutOfMemoryError:
            raise
        except capture_errors() as error:
            method, reason = type(self.model.method).__name__, str(error).splitlines()[0]
            log.warning("engine: %s cannot be recorded (%s); %s runs eager, packed", method, reason, size)
            return eager


def room(images: int) -> int:
    """The batch size of the recording for so many images: the next power of two, or 1.5 times one.

    Images that are missing are not computed.
    """
    least = 1 << max(images - 1, 0).bit_length()
    return least * 3 // 4 if least >= 4 and images <= least * 3 // 4 else least


def _padded(x: Tensor, count: int) -> Tensor:
    """x with its first row repeated at the end, so that it has `count` rows."""
    return x if len(x) == count else torch.cat([x, x[:1].expand(count - len(x), *x.shape[1:])])


def _for_each(values: Tensor | None, images: Tensor) -> bool | None:
    """Whether there is a value for each image; None: there are none. Values of another number must not be broadcast by
    a recording."""
    return None if values is None else values.shape[:1] == images.shape[:1]


def folded_blocks(model: AdaptiveViT) -> dict[nn.Module, FoldedBlock]:
    """The blocks that kernels can run, with their weights folded."""
    folded: dict[nn.Module, FoldedBlock] = {}
    foreign = 0
    for block in model.backbone.blocks:
        parts = model.backbone.parts(block)
        if parts is None or parts.act not in ACTIVATIONS or not parts.proj.weight.is_floating_point():
            foreign += 1
            continue
        folded[block] = FoldedBlock.of(parts)
    if foreign:
        log.info("engine: %d blocks of %s have no kernels and run whole", foreign, type(model.vit).__name__)
    return folded
