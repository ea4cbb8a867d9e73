"""`ShapesOnly`: runs packing on shapes alone, to find out which tensors it requests and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ELEMENTWISE = frozenset((
    "mul", "add", "sub", "truediv", "div", "neg", "and", "or", "xor", "rshift", "lshift", "ldexp", "pow", "exp",
    "clamp", "abs", "sqrt",
))  # fmt: skip
_JOINED = frozenset(("cat", "stack"))
_REDUCING = frozenset(("mean", "sum"))
_PRODUCTS = frozenset(("matmul", "mm", "mv"))


class ShapesOnly(TorchFunctionMode):
    """Inside `with`, computes shapes and dtypes of packing operations on meta tensors.

    torch can do so too, but imports its compiler for it: one second and 100 MiB that a server does not otherwise need.
    Unknown operations go to torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = _shaped(getattr(func, "__name__", "").strip("_"), args, kwargs)
        return func(*args, **kwargs) if made is None else made


def _shaped(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return None for an unknown operation or tensors that are not meta."""
    if not args:
        return None
    if name in _JOINED:
        parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return _joined(name, parts, dim) if all(part.is_meta for part in parts) else None
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not tensors or not tensors[0].is_meta:
        return None
    first = tensors[0]
    if name in _ELEMENTWISE or name.removeprefix("r") in _ELEMENTWISE:
        return _empty(_broadcast(tensors), first.dtype if len(args) == 1 else torch.result_type(args[0], args[1]))
    if name in _REDUCING and len(args) == 2 and isinstance(args[1], int):
        kept = first.narrow(args[1], 0, 1)
        return kept if kwargs.get("keepdim") else kept.squeeze(args[1])
    if name in _PRODUCTS and len(args) == 2:
        return _empty((*first.shape[:-1], *args[1].shape[1:]), first.dtype)
    if name == "getitem" and len(tensors) == 2:
        return _empty((*args[1].shape, *first.shape[1:]), first.dtype)
    return None


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _joined(name: str, parts: Sequence[Tensor], dim: int) -> Tensor:
    shape = list(parts[0].shape)
    if name == "stack":
        shape.insert(dim % (len(shape) + 1), len(parts))
    else:
        shape[dim] = sum(part.shape[dim] for part in parts)
    return _empty(shape, parts[0].dtype)


def _broadcast(tensors: Sequence[Tensor]) -> list[int]:
    rank = max(t.ndim for t in tensors)
    padded = [(1,) * (rank - t.ndim) + tuple(t.shape) for t in tensors]
    return [next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True)]
