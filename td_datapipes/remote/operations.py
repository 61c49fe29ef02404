"""Which of a TensorDict's operations are done on a copy in memory, and which a server cannot do.

`RedisTensorDict` does what reads and writes entries by itself. Of all else, what makes something new is done on
``to_local()``; what would change tensors in place, or give views of them, raises and names ``to_local()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from td_datapipes.errors import RemoteOperationError

__all__ = ["IN_PLACE", "LOCAL", "STRUCTURAL", "VIEWS", "LocalOperations", "refuse"]

_POINTWISE = (
    *("abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "cos", "cosh"),
    *("div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p", "log2"),
    *("maximum", "minimum", "mul", "neg", "pow", "reciprocal", "round", "sigmoid", "sign", "sin", "sinh", "sqrt"),
    *("sub", "tan", "tanh", "trunc"),
)

LOCAL = (
    *_POINTWISE,
    *("clamp", "logical_and", "bitwise_and", "rsub", "mod", "softmax", "norm", "isfinite", "isnan", "isneginf"),
    *("isposinf", "isreal", "all", "any", "amax", "amin", "max", "min", "cummax", "cummin", "mean", "nanmean"),
    *("nansum", "prod", "quantile", "std", "sum", "var", "logsumexp", "reduce", "apply", "named_apply", "map"),
    *("map_iter", "as_tensor", "atleast_1d", "atleast_2d", "atleast_3d", "bfloat16", "bool", "complex32"),
    *("complex64", "complex128", "double", "float", "float16", "float32", "float64", "half", "int", "int8", "int16"),
    *("int32", "int64", "uint8", "uint16", "uint32", "uint64", "qint8", "qint32", "quint4x2", "quint8", "type"),
    *("cpu", "cuda", "to", "to_lazystack", "to_dict", "to_h5", "to_module", "to_namedtuple", "to_padded_tensor"),
    *("to_pandas", "to_parquet", "to_pytree", "to_struct_array", "to_csv", "to_json", "to_mds", "to_zarr", "tolist"),
    *("numpy", "chunk", "split", "tensor_split", "unbind", "split_keys", "expand", "expand_as", "broadcast_to"),
    *("reshape", "repeat", "repeat_interleave", "tile", "roll", "rot90", "flip", "fliplr", "flipud", "gather"),
    *("masked_fill", "masked_select", "where", "scatter", "densify", "consolidate", "contiguous", "flatten_keys"),
    *("unflatten_keys", "filter_non_tensor_data", "replace", "new_empty", "new_full", "new_ones", "new_tensor"),
    *("new_zeros", "non_tensor_items", "separates", "memmap", "memmap_like", "save", "dumps"),
    *("state_dict", "pad", "detach", "gather_and_stack", "send", "isend"),
    *("asend", "rename", "rename_keys", "pin_memory", "to_store"),
    *("__eq__", "__ne__", "__xor__", "__or__", "__ge__", "__gt__", "__le__", "__lt__", "__and__", "__invert__"),
    *("_apply_nest", "_fast_apply", "_multithread_apply_flat", "_multithread_rebuild", "_cast_reduction", "_to_module"),
    *("_unbind", "_repeat", "_select", "_exclude", "_convert_to_tensordict"),
)
"""Done on a copy in memory. With ``inplace=True``, or ``out=`` this TensorDict, they raise as `IN_PLACE` ones do."""

IN_PLACE = (
    *(f"{name}_" for name in _POINTWISE),
    *("apply_", "copy_", "copy_at_", "masked_fill_", "zero_grad", "requires_grad_", "backward", "to_tensordict_"),
    *("share_memory_", "memmap_", "memmap_refresh_", "load_memmap_", "pin_memory_", "make_memmap"),
    *("make_memmap_from_storage", "make_memmap_from_tensor", "load_", "load_state_dict", "clear_device_"),
    *("auto_device_", "filter_empty_", "record_stream", "recv", "irecv", "arecv", "all_gather", "all_reduce"),
    *("broadcast", "init_remote", "_memmap_", "_stack_onto_", "_stack_onto_at_", "_load_memmap"),
)
"""Would change tensors in place, or where they are kept."""

VIEWS = (
    *("view", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze"),
    *("flatten", "unflatten", "narrow", "_view", "_permute", "_transpose", "_squeeze", "_unsqueeze"),
    *("_add_batch_dim", "_remove_batch_dim", "_maybe_remove_batch_dim", "_get_sub_tensordict"),
)
"""Would give views of tensors."""


STRUCTURAL = (
    "bytes",
    "depth",
    "get_item_shape",
    "is_empty",
    "is_floating_point",
    "numel",
    "param_count",
    "sorted_keys",
)
"""Answered from what is known of the entries, without reading them."""


def refuse(what: str, name: str) -> RemoteOperationError:
    """The error for something a server cannot do."""
    return RemoteOperationError(
        f"{what} of a RedisTensorDict ({name!r}) is not possible: its entries are on a server. Call it on to_local(), "
        f"which reads everything into a TensorDict in memory, and write back with update() what should be kept"
    )


def _refused(name: str) -> Callable[..., Any]:
    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise refuse(f"{name}()", str(self.url))

    operation.__name__ = name
    operation.__doc__ = "Raises `RemoteOperationError`: call it on ``to_local()``."
    return operation


def _local(name: str) -> Callable[..., Any]:
    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs.get("inplace")
            or kwargs.get("out") is self
            or (name.endswith("flatten_keys") and args[1:2] == (True,))
        ):
            raise refuse(f"{name}(inplace=True)", str(self.url))
        mine: Any = self.to_local()
        others = [_in_memory(other) for other in args]
        return getattr(mine, name)(*others, **kwargs)

    operation.__name__ = name
    operation.__doc__ = f"``to_local().{name}``: what it gives is in memory."
    return operation


def _in_memory(value: Any) -> Any:
    return value.to_local() if isinstance(value, LocalOperations) else value  # type: ignore[attr-defined]


def _structural(name: str) -> Callable[..., Any]:
    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.structure, name)(*args, **kwargs)

    operation.__name__ = name
    operation.__doc__ = f"As ``TensorDict.{name}``, from what is known of the entries: nothing is read."
    return operation


class LocalOperations:
    """Gives a class the operations above; it has ``to_local``, ``structure`` and ``url``."""

    __hash__ = object.__hash__

    @property
    def data(self) -> Any:
        """``to_local().data``."""
        mine: Any = self
        return mine.to_local().data


for _name in LOCAL:
    setattr(LocalOperations, _name, _local(_name))
for _name in (*IN_PLACE, *VIEWS):
    setattr(LocalOperations, _name, _refused(_name))
for _name in STRUCTURAL:
    setattr(LocalOperations, _name, _structural(_name))
