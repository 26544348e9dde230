"""A layer of which some experts at a time have weights.

transformers' module of all experts (named `experts`, its implementation "eager") asks `one_hot` which expert each token goes
to, then takes the experts in ascending order and adds what each makes of its tokens to a tensor of zeros. So one call of its
own forward for each group gives the same bits, if `one_hot` names the experts of the group alone and the zeros are what the
groups before have made: same products of the same shapes, same additions in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from assay.errors import QuantizeError
from assay_quantize.calibration.one_layer import Ended
from assay_quantize.decoding.activations import InputRounding, RoundedInputs

Call = dict[str, Tensor]
"""Arguments of a call, by their position or name."""
_OTHERWISE = "transformers computes its experts otherwise than one after the other"


class NotInGroups(QuantizeError):
    """The module of experts computes otherwise; its text says how."""


class LoadedGroup(NamedTuple):
    """experts: their numbers. weights: parameter of the module of experts -> its values for these [G, ...]."""

    experts: range
    weights: dict[str, Tensor]
    roundings: Mapping[int, InputRounding]


def experts_name(layer: nn.Module) -> str | None:
    """Of the module in `layer` whose parameters each hold something for every expert. None: there is none, or several."""
    names = [name for name, _ in layer.named_modules() if name.rpartition(".")[2] == "experts"]
    if len(names) != 1:
        return None
    module = layer.get_submodule(names[0])
    parameters = list(module.named_parameters())
    are_stacks = all("." not in name and tensor.dim() > 1 for name, tensor in parameters) and not list(module.buffers())
    return names[0] if are_stacks and len({len(tensor) for _, tensor in parameters}) == 1 else None


@contextmanager
def caught(experts: nn.Module) -> Iterator[list[Call]]:
    """What `experts` are called with, which ends the model's forward."""
    calls: list[Call] = []

    def catch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {str(number): argument for number, argument in enumerate(args)} | kwargs
        are_tensors = all(isinstance(argument, Tensor) for argument in given.values())
        if not are_tensors or all(argument.is_floating_point() for argument in given.values()):
            raise NotInGroups("transformers hands its experts no index of the experts that tokens go to")
        calls.append(given)
        raise Ended

    handle = experts.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def add_group(experts: nn.Module, group: LoadedGroup, chosen: range, call: Call, summed: Tensor | None) -> Tensor:
    """`summed`, what the experts before `chosen` have made, with what these make added. chosen: of `group`.

    NotInGroups: the module's forward computes otherwise.
    """
    args = [call[name] for name in sorted(call, key=lambda name: (len(name), name)) if name.isdigit()]
    named = {name: argument for name, argument in call.items() if not name.isdigit()}
    with_weights: Any = copy.copy(experts)
    with_weights._parameters = {}
    vars(with_weights).update({name: _Numbered(group.experts.start, weights) for name, weights in group.weights.items()})
    mode = _Summing(chosen, summed)
    try:
        with torch.no_grad(), RoundedInputs(group.roundings), mode:
            with_weights.forward(*args, **named)
    except (AttributeError, TypeError):  # more is asked of `_Numbered` than the weights of an expert
        raise NotInGroups(_OTHERWISE) from None
    return mode.result()


@contextmanager
def made_by_all(experts: nn.Module, summed: Tensor) -> Iterator[None]:
    """`experts`, which have no weights, give what their groups have summed up."""
    forward: Any = experts.forward

    def give(*args: Any, **kwargs: Any) -> Any:
        with _Summing(range(0), summed) as mode:
            made = forward(*args, **kwargs)
        mode.result()
        return made

    experts.__dict__["forward"] = give
    try:
        yield
    finally:
        del experts.__dict__["forward"]


class _Numbered:
    """Stands for a parameter: the weights of the experts from `first` on, by their numbers."""

    def __init__(self, first: int, weights: Tensor) -> None:
        self._first, self._weights = first, weights

    def __getitem__(self, expert: Any) -> Tensor:
        return self._weights[int(expert) - self._first]


class _Summing(TorchFunctionMode):
    """While it is entered, `one_hot` names `experts` alone, and what is made of zeros is `summed` instead; None: zeros."""

    def __init__(self, experts: range, summed: Tensor | None) -> None:
        super().__init__()
        self._experts, self._given = experts, summed
        self._num_masks, self._sums = 0, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is nn.functional.one_hot:
            self._num_masks += 1
            made[..., : self._experts.start] = 0
            made[..., self._experts.stop :] = 0
        elif func is torch.zeros_like:
            if self._given is not None:
                made.copy_(self._given)
            self._sums.append(made)
        return made

    def result(self) -> Tensor:
        """What was summed up. NotInGroups: the forward did not ask as it is expected to."""
        if self._num_masks != 1 or len(self._sums) != 1:
            raise NotInGroups(_OTHERWISE)
        return self._sums[0]
