"""Nested plain values and numpy arrays to bytes and back, without pickle.

The bytes are an ``.npz`` archive: entry ``tree`` is JSON text (as bytes), the others are the arrays it refers to.
Loading runs no code from the file. JSON objects are tags: ``{"d": [[key, value], …]}`` is a dict, ``{"t": […]}`` a
tuple, ``{"b": n}`` bytes, ``{"a": n}`` an array and ``{"s": n}`` a numpy scalar; the latter two have ``"dtype"`` if it
is one that ``.npy`` cannot name (bfloat16, float8).
"""

from __future__ import annotations

import importlib
import io
import json
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.errors import CheckpointError

_Array = npt.NDArray[Any]


def pack(state: Any) -> bytes:
    """``state`` as bytes.

    Accepts None, bool, int, float, str, bytes, list, tuple and dict (with plain keys), numpy arrays and scalars of
    every dtype but object, nested at will. Dict subclasses come back as dict.

    Raises:
        CheckpointError: something else is in it; the message says where and of which type.
    """
    arrays: dict[str, _Array] = {}
    tree = _encode(state, "state", arrays)
    text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, tree=text, **arrays)
    return stream.getvalue()


def unpack(payload: bytes) -> Any:
    """What :func:`pack` was given: equal values, types and dtypes.

    Raises:
        CheckpointError: the bytes are not from :func:`pack`, or name a dtype that is not installed here.
    """
    try:
        with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
            return _decode(json.loads(archive["tree"].tobytes()), archive)
    except (ValueError, KeyError, TypeError, IndexError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"these {len(payload)} bytes are not a state written by hvdkit: {error}.") from error


def _encode(value: Any, where: str, arrays: dict[str, _Array]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encode(item, f"{where}[{place}]", arrays) for place, item in enumerate(value)]
    if type(value) is tuple:
        return {"t": [_encode(item, f"{where}[{place}]", arrays) for place, item in enumerate(value)]}
    if isinstance(value, dict):
        return {"d": [[_key(key, where), _encode(item, f"{where}[{key!r}]", arrays)] for key, item in value.items()]}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return _encode_array(np.asarray(value), "a" if isinstance(value, np.ndarray) else "s", arrays)
    if isinstance(value, bytes | bytearray):
        return {"b": _store(np.frombuffer(value, np.uint8), arrays)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which has no plain form. Expected None, "
        "bool, int, float, str, bytes, list, tuple, dict, or a numpy array without objects: convert it first."
    )


def _key(key: Any, where: str) -> Any:
    if key is None or type(key) in (bool, int, float, str):
        return key
    raise CheckpointError(
        f"{where} has the key {key!r} of type {type(key).__qualname__}; expected str, int, float or bool."
    )


def _encode_array(array: _Array, tag: str, arrays: dict[str, _Array]) -> dict[str, Any]:
    # kind V without fields is either raw void or a type that another package registered, such as bfloat16
    if array.dtype.kind == "V" and array.dtype.fields is None and array.dtype.type is not np.void:
        raw = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")
        return {tag: _store(raw, arrays), "dtype": array.dtype.name}
    return {tag: _store(array, arrays)}


def _store(array: _Array, arrays: dict[str, _Array]) -> int:
    number = len(arrays)
    arrays[f"a{number}"] = array
    return number


def _decode(tree: Any, archive: Any) -> Any:
    if isinstance(tree, list):
        return [_decode(item, archive) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "d" in tree:
        return {key: _decode(item, archive) for key, item in tree["d"]}
    if "t" in tree:
        return tuple(_decode(item, archive) for item in tree["t"])
    if "b" in tree:
        return archive[f"a{tree['b']}"].tobytes()
    array = archive[f"a{tree['a' if 'a' in tree else 's']}"]
    if "dtype" in tree:
        array = array.view(_extension_dtype(tree["dtype"]))
    return array if "a" in tree else array[()]


def _extension_dtype(name: str) -> np.dtype[Any]:
    try:
        found = getattr(importlib.import_module("ml_dtypes"), name, None)
    except ImportError:
        found = None
    if isinstance(found, type) and issubclass(found, np.generic):
        return np.dtype(found)
    raise CheckpointError(f"the state holds an array of {name}, which needs the package ml_dtypes: install it.")
