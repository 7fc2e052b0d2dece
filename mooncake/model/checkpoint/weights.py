"""A checkpoint on disk, read lazily: names, shapes and weights, which are dequantized when needed.

Owns the open files of one directory in Hugging Face's layout (`config.json`, one safetensors file
or shards with an index). It reads safetensors only, downloads nothing and runs no code from the
directory.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from mooncake.base import CheckpointError, ModelSpec
from mooncake.crypto.keys import KeyRing
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles, Homes, LentFiles
from mooncake.model.checkpoint.files.safetensors_file import SafetensorsFile, StoredTensor
from mooncake.model.checkpoint.files.signature import Signature
from mooncake.model.checkpoint.quant import (
    QuantizedWeight,
    dequantize_fp8_block,
    dequantize_int4_packed,
)
from mooncake.model.checkpoint.quant_format import (
    FP8_BLOCK,
    INT4_GROUP,
    Fp8Block,
    Int4Group,
    QuantFormat,
    fp8_scale_shape,
    parse_quantization,
)
from mooncake.model.checkpoint.tensor_cuts import INT4_WORD, Part

SPEC_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8, "U8": torch.uint8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
_FLOATS = ("BF16", "F16", "F32")
_LANGUAGE_PREFIX = "language_model."
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_PART_SUFFIXES = ("_scale_inv", "_packed", "_scale", "_shape")

_NAMES_SHOWN = 5
_ROWS_COMPARED = 8192


class Checkpoint:
    """Reads the tensors of one checkpoint by their canonical name (`model.…`, `lm_head.weight`).

    A quantized weight has one name, `….weight`, however it is stored. Multimodal checkpoints (K2.5)
    keep the text model under `language_model.`: that prefix is dropped, and their other tensors are
    not shown. Several threads may read at once.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        """Use `open`."""
        self.path = files.path
        self.spec = ModelSpec.from_config(files.config)
        quantization = self.spec.quantization or files.config.get("quantization_config")
        self.quantization: QuantFormat | None = parse_quantization(quantization)
        self._homes = _canonical(files.homes)
        self._names = _logical_names(self._homes, self.spec)
        self._files = files
        self.total_bytes = sum(
            self._entry(name).num_bytes for name in self._homes if not _ignored(name, self.spec)
        )
        """The bytes of all tensors as stored, without ignored ones: the whole of a progress bar."""
        self.bytes_read = 0
        """The bytes that `tensor` and `quantized` have returned so far. A part counts only its own
        bytes.
        """
        self._counting = threading.Lock()

    def revision(self, cache_dir: Path | None = None) -> str:
        """Return the name of the weights; see `CheckpointFiles.revision`."""
        return self._files.revision(cache_dir)

    @classmethod
    def open(
        cls, path: Path, keys: KeyRing | None = None, lent: LentFiles | None = None
    ) -> Checkpoint:
        """Open the directory `path`, whose weights are encrypted if there are `keys`, or `lent`
        ones in their place. Reads headers only.

        Raises:
            CheckpointError: there is no readable checkpoint. The message names the file and, if
                there is one, the tensor or the configuration key.
            ConfigError: these are not its keys.
        """
        return cls(CheckpointFiles.open(path, keys, lent=lent))

    @property
    def signature(self) -> Signature:
        """What another checkpoint must have in common to take the place of this one."""
        tensors = {name: self._entry(name) for name in self._homes}
        stored = {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}
        return Signature(self.spec, stored)

    def names(self) -> list[str]:
        """Return the canonical names, sorted."""
        return sorted(self._names)

    def check_names(self, expected: Iterable[str]) -> None:
        """Compare with the names that a model needs.

        Tensors of MTP layers (`model.layers.N` past the last layer) and saved `inv_freq` tables are
        ignored, and so is a stored head that is tied to the embedding and equals it.

        Raises:
            CheckpointError: tensors are missing, or there are some that the model does not know, or
                a tied head has other numbers than the embedding.
        """
        wanted = set(expected)
        problems = []
        for kind, names in (("missing", wanted - self._names), ("unknown", self._names - wanted)):
            if names:
                first = sorted(names)
                more = f" and {len(first) - _NAMES_SHOWN} more" if len(first) > _NAMES_SHOWN else ""
                shown = ", ".join(first[:_NAMES_SHOWN])
                problems.append(f"{len(first)} {kind} tensors: {shown}{more}")
        if problems:
            raise CheckpointError(f"{self.path}: {'; '.join(problems)}")
        if self.spec.tie_word_embeddings and _HEAD in self._homes and not self._head_is_table():
            raise self._error(
                _HEAD,
                f"differs from {_TABLE}, though config.json says that they are one; set "
                "tie_word_embeddings to false to serve both, or take the head out",
            )

    def _head_is_table(self) -> bool:
        head, table = self._entry(_HEAD), self._entry(_TABLE)
        if (head.shape, head.dtype) != (table.shape, table.dtype):
            return False
        num_rows = head.shape[0] if head.shape else 0
        for first in range(0, num_rows, _ROWS_COMPARED):  # so that few are in memory at once
            rows = first, min(first + _ROWS_COMPARED, num_rows)
            ours, theirs = (view_tensor(*self._homes[name], rows) for name in (_HEAD, _TABLE))
            if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
                return False
        return True

    def holds(self, name: str) -> bool:
        """Whether the checkpoint has tensor `name`, in any format."""
        return name in self._homes or f"{name}_packed" in self._homes

    def stored_bytes(self, name: str) -> int:
        """Return the bytes on disk of `name`, all its parts together."""
        parts = [name + suffix for suffix in ("", *_PART_SUFFIXES) if name + suffix in self._homes]
        return sum(self._entry(part).num_bytes for part in parts)

    def tensor(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
        """Return tensor `name` of `shape`, or `part` of it, on the CPU.

        An unquantized tensor keeps its stored dtype (bfloat16, float16 or float32) and may be a
        view of the mapped file. A quantized weight is returned as a new tensor of the spec's dtype.

        Raises:
            CheckpointError: the tensor is missing, has another shape, or a dtype that does not
                belong to the checkpoint's quantization. The message names the tensor and the file.
        """
        if name not in self._homes and f"{name}_packed" in self._homes:
            return self._int4(name, shape, part)
        entry = self._find(name, shape)
        if entry.dtype == "F8_E4M3":
            return self._fp8(name, shape, part)
        if f"{name}_scale_inv" in self._homes:
            raise self._error(name, f"it has a scale but is stored as {entry.dtype}, not F8_E4M3")
        self._check_dtype(name, _FLOATS)
        return self._read(name, part)

    def quantized(
        self, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> QuantizedWeight | None:
        """Return the weight `name` of `shape`, or `part` of it, as it is stored, checked; see
        `view_tensor`. Returns None when it is not quantized, or has blocks, groups or widths that
        the kernels do not support.

        Raises:
            CheckpointError: a part is missing or does not match the format.
        """
        scheme = self.quantization
        if f"{name}_packed" in self._homes:
            self._check_int4(name, shape)
            whole = shape[1] % INT4_GROUP == 0
            if not (whole and isinstance(scheme, Int4Group) and scheme.group_size == INT4_GROUP):
                return None
            return QuantizedWeight("int4", *self._int4_parts(name, part, scheme.group_size))
        if self._find(name, shape).dtype != "F8_E4M3":
            return None
        blocks = self._check_fp8(name, shape)
        if blocks.block != (FP8_BLOCK, FP8_BLOCK):
            return None
        return QuantizedWeight("fp8", *self._fp8_parts(name, part, blocks))

    def raw(self, name: str) -> torch.Tensor:
        """Return the tensor stored under canonical `name` without conversion, e.g.
        `….weight_packed`.
        """
        self._entry(name)
        file, stored_name = self._homes[name]
        return view_tensor(file, stored_name)

    def _read(self, name: str, part: Part | None) -> torch.Tensor:
        """Return a stored tensor or a part of it, and count its bytes."""
        if part is not None and part.dim == 0:  # rows lie together, so no other byte is read
            self._entry(name)
            view = view_tensor(*self._homes[name], rows=(part.first, part.stop))
        else:
            whole = self.raw(name)
            view = whole if part is None else whole.narrow(part.dim, part.first, part.size)
        with self._counting:
            self.bytes_read += view.numel() * view.element_size()
        return view

    def _fp8(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        scheme = self._check_fp8(name, shape)
        return dequantize_fp8_block(*self._fp8_parts(name, part, scheme), scheme.block, self._dtype)

    def _fp8_parts(
        self, name: str, part: Part | None, scheme: Fp8Block
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (values, factors) of whole blocks."""
        factors = part and self._scaled(name, part, scheme.block[part.dim])
        return self._read(name, part), self._read(f"{name}_scale_inv", factors)

    def _check_fp8(self, name: str, shape: tuple[int, ...]) -> Fp8Block:
        if not isinstance(self.quantization, Fp8Block) or len(shape) != 2:
            raise self._error(name, "F8_E4M3 without quantization_config quant_method 'fp8'")
        self._find(f"{name}_scale_inv", fp8_scale_shape(shape, self.quantization.block))
        self._check_dtype(f"{name}_scale_inv", _FLOATS)
        return self.quantization

    def _int4(self, name: str, shape: tuple[int, ...], part: Part | None) -> torch.Tensor:
        group = self._check_int4(name, shape).group_size
        rows, columns = (
            size if part is None or part.dim != dim else part.size for dim, size in enumerate(shape)
        )
        packed, scale = self._int4_parts(name, part, group)
        return dequantize_int4_packed(packed, scale, (rows, columns), group, self._dtype)

    def _int4_parts(
        self, name: str, part: Part | None, group: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (words, factors) of whole words and groups."""
        words = factors = part
        if part is not None and part.dim == 1:
            words = self._scaled(name, part, INT4_WORD)
            factors = self._scaled(name, part, group)
        return self._read(f"{name}_packed", words), self._read(f"{name}_scale", factors)

    def _scaled(self, name: str, part: Part, block: int) -> Part:
        """Return the part of a scale tensor that belongs to `part`; it has one number for each
        `block`.
        """
        if part.first % block or part.stop % block:
            raise CheckpointError(
                f"{name}: a part from {part.first} to {part.stop} would cut quantized blocks of "
                f"{block}"
            )
        return Part(part.dim, part.first // block, part.stop // block)

    def _check_int4(self, name: str, shape: tuple[int, ...]) -> Int4Group:
        if not isinstance(self.quantization, Int4Group) or len(shape) != 2:
            raise self._error(f"{name}_packed", "packed without compressed-tensors in config.json")
        rows, columns = shape
        group = self.quantization.group_size
        self._find(f"{name}_packed", (rows, -(-columns // 8)))
        self._find(f"{name}_scale", (rows, -(-columns // group)))
        self._find(f"{name}_shape", (2,))
        self._check_dtype(f"{name}_packed", ("I32",))
        self._check_dtype(f"{name}_scale", _FLOATS)
        self._check_dtype(f"{name}_shape", ("I64", "I32"))
        recorded = tuple(self.raw(f"{name}_shape").tolist())
        if recorded != shape:
            raise self._error(f"{name}_shape", f"records {recorded}, the model needs {shape}")
        return self.quantization

    @property
    def _dtype(self) -> torch.dtype:
        dtype = SPEC_DTYPES.get(self.spec.dtype)
        if dtype is None:
            raise CheckpointError(f"config.json: dtype {self.spec.dtype!r} is not supported")
        return dtype

    def _entry(self, name: str) -> StoredTensor:
        home = self._homes.get(name)
        if home is None:
            raise CheckpointError(
                f"{self.path}: tensor {name} is missing; copy the checkpoint whole"
            )
        file, stored_name = home
        return file.tensors[stored_name]

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        entry = self._entry(name)
        if entry.shape != shape:
            raise self._error(name, f"has shape {list(entry.shape)}, the model needs {list(shape)}")
        return entry

    def _check_dtype(self, name: str, allowed: tuple[str, ...]) -> None:
        dtype = self._entry(name).dtype
        if dtype not in allowed:
            raise self._error(name, f"dtype {dtype} is not supported, only {', '.join(allowed)}")

    def _error(self, name: str, problem: str) -> CheckpointError:
        file, _ = self._homes[name]
        return CheckpointError(f"{name} in {file.path}: {problem}")


def view_tensor(
    file: SafetensorsFile, name: str, rows: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return tensor `name` as stored, or its rows [first, stop). This is a view of a plain file
    when its alignment allows, else a copy.
    """
    entry = file.tensors[name]
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointError(f"{name} in {file.path}: dtype {entry.dtype} is not supported")
    shape, begin, end = entry.shape, entry.begin, entry.end
    if rows is not None:
        first, stop = rows
        assert 0 <= first <= stop <= shape[0], "rows that the tensor does not have"
        row_bytes = entry.num_bytes // max(1, shape[0])
        begin, end = begin + first * row_bytes, begin + stop * row_bytes
        shape = (stop - first, *shape[1:])
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(file.content.read(begin, end), dtype=dtype)
    if flat.data_ptr() % dtype.itemsize:  # legal in the format, slow or wrong in kernels
        flat = flat.clone()
    return flat.view(shape)


def _canonical(homes: Homes) -> Homes:
    if not any(name.startswith(_LANGUAGE_PREFIX) for name in homes):
        return homes
    return {
        name.removeprefix(_LANGUAGE_PREFIX): home
        for name, home in homes.items()
        if name.startswith(_LANGUAGE_PREFIX)
    }


def _ignored(name: str, spec: ModelSpec) -> bool:
    if name.endswith("rotary_emb.inv_freq") or (name == _HEAD and spec.tie_word_embeddings):
        return True
    layer = _LAYER.match(name)
    return layer is not None and int(layer.group(1)) >= spec.num_hidden_layers


def _logical_names(homes: Homes, spec: ModelSpec) -> set[str]:
    """Return the names that a model must know. It need not know an empty tensor, such as
    transformers writes for no shared experts.
    """
    names = set()
    for name, (file, stored_name) in homes.items():
        if file.tensors[stored_name].num_bytes and not _ignored(name, spec):
            base, weight, suffix = name.rpartition(".weight")
            names.add(base + weight if suffix in _PART_SUFFIXES else name)
    return names
