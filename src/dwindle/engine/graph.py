"""The engine: the whole forward pass, halting decisions included, as one CUDA graph per size of batch.

The loop, the method and the read-out are the model's own; only the layout is `Live`. What cannot be recorded (a method
that asks the host) or does not pay (measured once for each size) runs as the eager packed path, the definition.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..model import Output
from ..ops.rows import ACTIVATIONS, available
from ..tokens import Packed
from .block import Ready
from .keep import GRAPHS, Keeper, Watch, refusals
from .recording import Recording

if TYPE_CHECKING:
    from ..model import AdaptiveViT

Path = Callable[[Tensor, "Tensor | None", "Tensor | None"], Output]
log = logging.getLogger("dwindle")


class Engine(Keeper["AdaptiveViT"]):
    def __init__(self, model: AdaptiveViT) -> None:
        super().__init__(model)
        self._paths: OrderedDict[tuple, Path] = OrderedDict()  # by size and setting
        self._latest: dict[tuple, Path] = {}  # of each size, and the setting it is for
        self._set: dict[tuple, tuple] = {}
        self._ready: dict[nn.Module, Ready] = {}
        self._watch: Watch | None = None
        self.chosen: dict[tuple, str] = {}  # what was measured, for those who ask

    def __call__(self, images: Tensor, depths: Tensor | None = None, dial: Tensor | None = None) -> Output:
        size = self._size(images, depths, dial)
        path = self._latest.get(size)
        out = None if path is None else path(images, depths, dial)
        # While the GPU is at work: were settings changed, weights written to, moved or exchanged since?
        if out is None or self._changed() or self._setting() != self._set[size]:
            self.model.check_images(images)
            path = self._renewed(size, images, depths, dial)
            out = path(images, depths, dial)
        if isinstance(path, Recording) and self.model.checks and not path.finite():
            self.model.check_logits(out.logits, images)
        return out

    @staticmethod
    def _size(images: Tensor, depths: Tensor | None, dial: Tensor | None) -> tuple:
        cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return images.shape, images.dtype, cast, _for_each(depths, images), _for_each(dial, images)

    def inputs(self, images: Tensor, depths: Tensor | None = None, dial: Tensor | None = None) -> list[Tensor | None]:
        """Where the graph for batches like this one reads them, filled with it. A batch that is written there (from the
        host at once, say) and given as these very tensors is not copied again; a call that gives others of this size
        copies them there. Where there is no graph: the tensors given."""
        self(images, depths, dial)
        path = self._latest[self._size(images, depths, dial)]
        if isinstance(path, Recording) and len(images) == path.most:
            return list(path.inputs)
        return [images, depths, dial]

    def _renewed(self, size: tuple, *given: Any) -> Path:
        if self._changed():
            self._paths.clear()
            self._latest.clear()
            self._watch, self._ready = Watch(self.model, folded=self.model.vit), prepared(self.model)
        setting = self._setting()
        home, path = self._room(size, setting)
        self._paths[home] = self._latest[size] = path or self._best(*given)
        self._paths.move_to_end(home)
        self._set[size] = setting
        if len(self._paths) > GRAPHS:
            _, dropped = self._paths.popitem(last=False)
            self._latest = {size: path for size, path in self._latest.items() if path is not dropped}
        return self._latest[size]

    def _room(self, size: tuple, setting: tuple) -> tuple[tuple, Path | None]:
        """Where a batch of this size runs. With as many recordings as are kept, one for up to four times as many images
        will do: those who are not there are not computed."""
        home = (size, setting)
        if home in self._paths or len(self._paths) < GRAPHS or False in size:
            return home, self._paths.get(home)
        (count, *rest), *kind = size[0], *size[1:]
        larger = [
            (shape[0], key)
            for key, path in self._paths.items()
            if (shape := key[0][0])[1:] == tuple(rest) and [*key[0][1:]] == kind and key[1] == setting
            if isinstance(path, Recording) and count <= shape[0] <= 4 * count
        ]
        home = min(larger)[1] if larger else home
        return home, self._paths.get(home)

    def _setting(self) -> tuple:
        """The method's plain settings, constants of a recording; its tensors are read where they lie."""
        return tuple([v for v in vars(self.model.method).values() if isinstance(v, (bool, int, float, str, tuple))])

    def _changed(self) -> bool:
        return self._watch is None or self._watch.changed()

    def _best(self, images: Tensor, depths: Tensor | None, dial: Tensor | None) -> Path:
        """The faster of the recording and the eager packed path, on these images."""
        from ..bench import milliseconds

        def eager(images: Tensor, depths: Tensor | None, dial: Tensor | None) -> Output:
            return self.model.run(images, Packed.start, depths, dial)

        size = tuple(images.shape)
        if not available(images):
            log.info("engine: no Triton here; %s runs eager, packed", size)
            return eager
        try:
            recorded = Recording(self.model, self._ready, images, depths, dial, self.pool, self.turn)
        except refusals() as error:
            method, reason = type(self.model.method).__name__, str(error).splitlines()[0]
            log.warning("engine: %s cannot be recorded (%s); %s runs eager, packed", method, reason, size)
            return eager
        paths: dict[str, Path] = {"graph": recorded, "eager": eager}
        calls = [partial(path, images, depths, dial) for path in paths.values()]
        spent = {name: min(rounds) for name, rounds in zip(paths, milliseconds(calls, 0.0, images.device))}
        name = self.chosen[size] = min(spent, key=lambda name: spent[name])
        log.info("engine: %s runs as %s (graph %.3f ms, eager %.3f ms)", size, name, spent["graph"], spent["eager"])
        return paths[name]


def _for_each(given: Tensor | None, images: Tensor) -> bool | None:
    """Whether there is one for each image: of another shape it must not be spread over a recording that has."""
    return None if given is None else given.shape[:1] == images.shape[:1]


def prepared(model: AdaptiveViT) -> dict[nn.Module, Ready]:
    """The blocks that kernels can run, with their weights folded."""
    ready: dict[nn.Module, Ready] = {}
    foreign = 0
    for block in model.backbone.blocks:
        parts = model.backbone.parts(block)
        if parts is None or parts.act not in ACTIVATIONS or not parts.proj.weight.is_floating_point():
            foreign += 1
            continue
        ready[block] = Ready.of(parts)
    if foreign:
        log.info("engine: %d blocks of %s have no kernels and run whole", foreign, type(model.vit).__name__)
    return ready
