"""A model of transformers of which one decoder layer has weights: what stands for the others, and a call of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from assay_quantize.calibration.quiet import loading

State = tuple[Tensor, ...]
"""What goes from one layer to the next: hidden states [B, T, H], and for some models more (indexes of the tokens looked at)."""


class Passing(nn.Module):
    """Stands for every layer before the one that runs: hands on `state`, as a layer returns it, or what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def forward(self, hidden: Any, *_args: Any, **_kwargs: Any) -> Any:
        return hidden if self.state is None else self.state

    def hand_on(self, state: State | None, device: str) -> None:
        """Until it is None again."""
        parts = None if state is None else tuple(part.to(device) for part in state)
        self.state = parts[0] if parts is not None and len(parts) == 1 else parts


class Ended(Exception):
    """Nothing behind the layer needs to run."""


class End(nn.Module):
    """Stands for every layer behind the one that runs."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise Ended


def pass_through(base: Any, passing: Passing, tokens: Tensor, state: State | None, device: str) -> None:
    """Call the forward of `base` with `state` in front of its layers, or the embedded `tokens` [B, T] where it is None, until
    something in it raises `Ended`. Both may be on any device."""
    passing.hand_on(state, device)
    try:
        with suppress(Ended):
            base(input_ids=tokens.to(device), use_cache=False)
    finally:
        passing.state = None


def run_layer(base: Any, layer: nn.Module, passing: Passing, tokens: Tensor, state: State | None, device: str) -> State:
    """What `layer` makes of `state`, as of `pass_through`; on `device`."""
    outputs: list[Any] = []
    handle = layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    try:
        pass_through(base, passing, tokens, state, device)
    finally:
        handle.remove()
    output = outputs[0]
    return (output,) if isinstance(output, Tensor) else tuple(output)


def again_with_buffers(base: Any, device: str, where: str, *, but: nn.Module | None = None) -> None:
    """Make anew what is computed when `base` is built and not stored, outside of its layers: rotary frequencies.

    where: the checkpoint, for errors. but: a module that is left as it is. QuantizeError: transformers refuses.
    """
    for name, module in list(base.named_children()):
        if name != "layers" and module is not but and any(True for _ in module.buffers(recurse=False)):
            made: Any = type(module)
            with loading(f"{where}: transformers cannot build {name}"):
                setattr(base, name, made(config=base.config).to(device))


def parent(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """What holds the parameter or buffer `name`, and its last name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
