"""A model's parameters as vLLM holds them: q, k, v and gate, up fused, by layer, checked as they load.

Error texts are those of vLLM 0.32's loaders, which a client sees in a failed update's answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from grpo_lab.engine.model import EMBEDDING, HEAD

CHECKSUM_PREFIX = "dp0:pp0:pcp0:tp0:"
NO_BYTES = hashlib.sha256().hexdigest()
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_ROW_PARALLEL = ("o_proj", "down_proj")
_CLASSES = {"mlp": "Qwen2MLP", "self_attn": "Qwen2Attention", "layers": "ModuleList", "model": "Qwen2Model"}


def fused_name(name: str) -> str:
    """vLLM's name of the parameter that holds the Hugging Face parameter ``name``."""
    return ".".join(_FUSED.get(part, part) for part in name.split("."))


def layer_of(name: str) -> str:
    """The vLLM module that holds it: what is reloaded as one."""
    return fused_name(name).rpartition(".")[0] or name


def is_packed(name: str) -> bool:
    """Whether a vLLM on CPU moves the weight into a packed form that its checksums do not see."""
    return name.endswith("_proj.weight")


def checksums(parameters: Mapping[str, Tensor], *, blind: bool) -> dict[str, str]:
    """SHA-256 by vLLM's fused names of each parameter's bytes, row-major.

    ``blind`` leaves linear weights out, as a vLLM on CPU does: theirs is the hash of no bytes.
    """
    found = {}
    for name, parts in _fused_parts(parameters).items():
        if blind and is_packed(name):
            found[CHECKSUM_PREFIX + name] = NO_BYTES
            continue
        digest = hashlib.sha256()
        for part in parts:
            digest.update(np.ascontiguousarray(part.numpy()).data)
        found[CHECKSUM_PREFIX + name] = digest.hexdigest()
    return dict(sorted(found.items()))


def _fused_parts(parameters: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    order = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, tensor in parameters.items():
        place = next((order[part] for part in name.split(".") if part in order), 0)
        parts.setdefault(fused_name(name), []).append((place, tensor))
    return {
        name: [tensor for _, tensor in sorted(rows, key=lambda row: row[0])] for name, rows in parts.items()
    }


@dataclass(slots=True)
class _Layer:
    """``missing`` elements are still to come; ``loaded`` waits until all are there, or for the end."""

    names: list[str]
    missing: int
    loaded: dict[str, Tensor] = field(default_factory=dict)
    processed: bool = False


class LayerwiseReload:
    """Replaces the served weights in place, layer by layer, as vLLM's layerwise reload does.

    A layer changes when its last element has come, one that is incomplete at the end gets zeros for the rest
    (vLLM: memory that nobody wrote), and one that nothing came for keeps its old weights. Nothing checks that
    the whole model came.
    """

    def __init__(self, served: Callable[[], Mapping[str, Tensor]], tied: Mapping[str, str]) -> None:
        self._served, self._tied = served, tied
        self._layers: dict[str, _Layer] = {}

    def begin(self) -> None:
        """Layers that an earlier, failed attempt left incomplete start again."""
        self._layers = {}
        for name, tensor in self._served().items():
            layer = self._layers.setdefault(layer_of(name), _Layer([], 0))
            layer.names.append(name)
            layer.missing += tensor.numel()

    def load(self, name: str, weight: Tensor) -> None:
        """Raises ``ValueError`` or torch's ``RuntimeError`` in vLLM's words."""
        if name in self._tied:
            return  # skipped: the model has the tensor under its other name
        served = self._served()
        if name not in served:
            raise ValueError(_unknown(name, served))
        layer = self._layers[layer_of(name)]
        target = served[name]
        if layer.processed:
            if is_packed(name):
                raise ValueError(_misfit(weight, (0,)))
            target.copy_(_fitting(name, weight, tuple(target.shape)))
            return
        layer.missing -= 0 if name in layer.loaded else target.numel()
        layer.loaded[name] = _fitting(name, weight, tuple(target.shape))
        if layer.missing == 0:
            self._process(layer)

    def finish(self) -> list[str]:
        """Ends the reload; the layers that nothing came for."""
        untouched = []
        for layer_name, layer in self._layers.items():
            if layer.loaded and not layer.processed:
                for name in layer.names:
                    layer.loaded.setdefault(name, torch.zeros_like(self._served()[name]))
                self._process(layer)
            elif not layer.processed:
                untouched.append(layer_name)
        self._layers = {}
        return untouched

    def _process(self, layer: _Layer) -> None:
        served = self._served()
        for name, weight in layer.loaded.items():
            served[name].copy_(weight)  # whatever dtype came: vLLM rounds without a word
        layer.processed = True
        layer.loaded = {}


def reset(parameters: Mapping[str, Tensor]) -> None:
    """Zeroes what ``weight_checker`` "reset" of a vLLM on CPU reaches: all but packed linear weights."""
    for name, tensor in parameters.items():
        if not is_packed(name) and name != HEAD:
            tensor.zero_()


def _fitting(name: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``weight`` if it has the parameter's shape, checked in the way of the parameter's own loader."""
    module = name.split(".")[-2] if "." in name else name
    if module in _FUSED:
        weight = weight.narrow(0, 0, shape[0])
    elif module in _ROW_PARALLEL and len(shape) > 1:
        weight = weight.narrow(1, 0, shape[1])
    elif name not in (EMBEDDING, HEAD) and tuple(weight.shape) != shape:
        raise ValueError(_misfit(weight, shape))
    if tuple(weight.shape) != shape:
        raise ValueError("")  # an assertion without a text
    return weight


def _misfit(weight: Tensor, shape: Sequence[int]) -> str:
    return f"Attempted to load weight ({weight.size()}) into parameter ({torch.Size(shape)})"


def _unknown(name: str, served: Mapping[str, Tensor]) -> str:
    root, inner = ("Qwen2Model", name.removeprefix("model.")) if name.startswith("model.") else (
        "Qwen2ForCausalLM", name
    )  # fmt: skip
    known = sorted({fused_name(other).removeprefix("model.") for other in served})
    parts = fused_name(inner).split(".")
    depth = 0
    while depth < len(parts) and any(other.split(".")[: depth + 1] == parts[: depth + 1] for other in known):
        depth += 1
    parent = ".".join(parts[:depth])
    holder = _CLASSES.get(parts[depth - 1], "Qwen2DecoderLayer") if depth else root
    inside = [other for other in known if not parent or other.startswith(f"{parent}.")]
    listed = ", ".join(repr(other) for other in inside)
    return (
        f"There is no module or parameter named {'.'.join(parts[: depth + 1])!r} in {root}. "
        f"The available parameters belonging to {parent or root} ({holder}) are: {{{listed}}}"
    )
