"""Reading checkpoints: every layout in use, and every way a directory can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.files import revision
from mooncake.model.checkpoint.files.checkpoint_files import INDEX_NAME, WHOLE_NAME, CheckpointFiles
from mooncake.model.checkpoint.files.file_bytes import PlainBytes
from mooncake.model.checkpoint.files.revision import file_digests
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.quant import (
    dequantize_fp8_block,
    dequantize_int4_packed,
    quantize_fp8_block,
    quantize_int4_packed,
)
from mooncake.model.checkpoint.quant_format import parse_quantization
from mooncake.model.checkpoint.tensor_cuts import tensor_shapes
from mooncake.model.checkpoint.weights import Checkpoint
from tests.support.waiting import LONG_S

NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True,
                "strategy": "group", "group_size": 32,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
               r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_checkpoint("k2-nano", 1, tmp_path_factory.mktemp("checkpoints") / "nano")


@pytest.fixture
def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def write_single(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Replace the weights in `directory` by one file and change keys of its config."""
    for old in [*directory.glob("*.safetensors"), directory / INDEX_NAME]:
        old.unlink(missing_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_json(directory / "config.json", lambda parsed: parsed.update(config))
    return directory


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    parsed = json.loads(path.read_text())
    change(parsed)
    path.write_text(json.dumps(parsed))


def quantized_like_k2(directory: Path, config: dict[str, Any]) -> Path:
    """Store the linear weights of `directory` in the format `config` describes."""
    scheme = parse_quantization(config)
    assert scheme is not None
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored_tensors(directory).items():
        module = name.removesuffix(".weight")
        linear = module.endswith(("_proj", "_proj_with_mqa"))
        if not linear or not scheme.quantizes(module):
            tensors[name] = tensor
        elif config is FP8_CONFIG:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8_block(tensor)
        else:
            parts = quantize_int4_packed(tensor)
            tensors |= {
                f"{name}_{part}": value
                for part, value in zip(("packed", "scale", "shape"), parts, strict=True)
            }
    return write_single(directory, tensors, quantization_config=config)


class TestReading:
    def test_shards_give_every_tensor_as_it_was_stored(self, source: Path) -> None:
        checkpoint = Checkpoint.open(source)
        shapes = tensor_shapes(checkpoint.spec)
        checkpoint.check_names(shapes)
        stored = stored_tensors(source)
        assert checkpoint.names() == sorted(stored) == sorted(shapes)
        for name, shape in shapes.items():
            tensor = checkpoint.tensor(name, shape)
            assert tensor.dtype == stored[name].dtype
            assert torch.equal(tensor, stored[name])
        assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in stored.values())
        assert checkpoint.stored_bytes(EXPERT) == stored[EXPERT].nbytes
        assert len(list(source.glob("*.safetensors"))) > 1

    def test_one_file_without_an_index(self, copied: Path) -> None:
        before = Checkpoint.open(copied)
        single = Checkpoint.open(write_single(copied, stored_tensors(copied)))
        assert single.names() == before.names()
        assert torch.equal(single.tensor(EXPERT, (64, 32)), before.tensor(EXPERT, (64, 32)))

    def test_several_files_without_an_index(self, copied: Path) -> None:
        names = Checkpoint.open(copied).names()
        (copied / INDEX_NAME).unlink()
        assert Checkpoint.open(copied).names() == names

    def test_the_index_decides_which_copy_counts(self, copied: Path) -> None:
        spare = copied / "spare.safetensors"
        save_file({NORM: torch.full((64,), 7.0)}, spare)
        assert float(Checkpoint.open(copied).tensor(NORM, (64,)).max()) < 2.0
        edit_json(copied / INDEX_NAME, lambda index: index["weight_map"].update({NORM: spare.name}))
        assert bool((Checkpoint.open(copied).tensor(NORM, (64,)) == 7.0).all())

    def test_float32_and_float16_keep_their_dtype(self, copied: Path) -> None:
        tensors = stored_tensors(copied)
        tensors[NORM] = tensors[NORM].half()
        tensors[KV_A] = tensors[KV_A].float()
        checkpoint = Checkpoint.open(write_single(copied, tensors))
        assert checkpoint.tensor(NORM, (64,)).dtype == torch.float16
        assert checkpoint.tensor(KV_A, (40, 64)).dtype == torch.float32

    def test_multimodal_checkpoints_show_their_language_model(self, copied: Path) -> None:
        plain = Checkpoint.open(copied)
        tensors = {f"language_model.{name}": t for name, t in stored_tensors(copied).items()}
        tensors["vision_tower.patch_embed.weight"] = torch.zeros(3, 3)
        write_single(copied, tensors)
        edit_json(copied / "config.json", wrap_as_text_config)
        wrapped = Checkpoint.open(copied)
        assert wrapped.names() == plain.names()
        assert wrapped.spec == plain.spec
        assert torch.equal(wrapped.tensor(EXPERT, (64, 32)), plain.tensor(EXPERT, (64, 32)))

    def test_prediction_layers_and_rope_tables_are_passed_over(self, copied: Path) -> None:
        before = Checkpoint.open(copied)
        tensors = stored_tensors(copied)
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
        tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(4, 4)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        checkpoint = Checkpoint.open(write_single(copied, tensors))
        checkpoint.check_names(tensor_shapes(checkpoint.spec))
        assert checkpoint.total_bytes == before.total_bytes

    def test_unaligned_data_is_read_right(self, tmp_path: Path, copied: Path) -> None:
        """A header of odd length is legal, and then no tensor starts at a multiple of its size."""
        values = torch.arange(6, dtype=torch.float32)
        entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
        header = json.dumps({"odd": entry, "nil": entry | {"shape": [0], "data_offsets": [24, 24]}})
        header += " " * (1 - len(header) % 2)
        data = len(header).to_bytes(8, "little") + header.encode() + values.numpy().tobytes()
        (copied / "extra.safetensors").write_bytes(data)
        (copied / INDEX_NAME).unlink()
        checkpoint = Checkpoint.open(copied)
        assert torch.equal(checkpoint.tensor("odd", (2, 3)), values.view(2, 3))
        assert checkpoint.tensor("odd", (2, 3)).data_ptr() % 4 == 0
        assert checkpoint.tensor("nil", (0,)).numel() == 0

    def test_writing_to_a_tensor_changes_no_file(self, copied: Path) -> None:
        Checkpoint.open(copied).tensor(NORM, (64,)).zero_()
        assert float(Checkpoint.open(copied).tensor(NORM, (64,)).min()) > 0.0

    def test_many_threads_read_at_once(self, source: Path) -> None:
        checkpoint = Checkpoint.open(source)
        shapes = tensor_shapes(checkpoint.spec)
        stored = stored_tensors(source)
        with ThreadPoolExecutor(8) as pool:
            read = pool.map(lambda name: checkpoint.tensor(name, shapes[name]), shapes)
            assert all(torch.equal(t, stored[name]) for name, t in zip(shapes, read, strict=True))


def wrap_as_text_config(config: dict[str, Any]) -> None:
    text = dict(config)
    config.clear()
    config.update({"model_type": "kimi_k25", "text_config": text})


class TestRevision:
    def test_is_the_same_wherever_the_files_lie(self, source: Path, copied: Path) -> None:
        revision = Checkpoint.open(source).revision()
        assert Checkpoint.open(copied).revision() == revision
        assert len(revision) == 16

    def test_changes_with_config_and_weights(self, source: Path, copied: Path) -> None:
        revisions = {Checkpoint.open(source).revision()}
        edit_json(copied / "config.json", lambda config: config.update(rope_theta=10000.0))
        revisions.add(Checkpoint.open(copied).revision())
        init_checkpoint("k2-nano", 2, copied.parent / "other")
        revisions.add(Checkpoint.open(copied.parent / "other").revision())
        tensors = stored_tensors(copied)
        revisions.add(Checkpoint.open(write_single(copied, tensors)).revision())
        tensors["lm_head.weight"][-1, -1] += 1
        revisions.add(Checkpoint.open(write_single(copied, tensors)).revision())
        assert len(revisions) == 5

    def test_one_changed_number_anywhere_in_a_large_file_changes_it(self, copied: Path) -> None:
        tensors = {"large": torch.zeros(5 * 2**20)}
        revisions = {Checkpoint.open(write_single(copied, tensors)).revision()}
        for place in (0, 2**20 + 12_345, 3 * 2**20 + 777, -1):
            tensors["large"][place] = 1.0
            revisions.add(Checkpoint.open(write_single(copied, tensors)).revision())
        assert len(revisions) == 5

    def test_a_file_is_hashed_once_until_it_changes(self, copied: Path, tmp_path: Path) -> None:
        hashed: list[tuple[int, int]] = []

        def revision() -> str:
            files = CheckpointFiles.open(copied)
            return files.revision(
                tmp_path / "cache", lambda done, whole: hashed.append((done, whole))
            )

        first = revision()
        assert hashed
        assert hashed[-1][0] == hashed[-1][1]
        assert first == Checkpoint.open(copied).revision()
        hashed.clear()
        assert revision() == first
        assert hashed == []
        file = next(copied.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        stat = file.stat()
        file.write_bytes(bytes(data))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # times are put back, ctime is not
        assert revision() != first
        assert hashed

    def test_a_file_that_was_replaced_while_it_was_open_keeps_its_digest_to_itself(
        self, tmp_path: Path
    ) -> None:
        """The cache must not know the new file by what the old one held."""
        path, cache = tmp_path / "a.safetensors", tmp_path / "cache"
        path.write_bytes(b"old")
        old = PlainBytes(path)
        own = file_digests([old])
        (tmp_path / "new").write_bytes(b"new")
        (tmp_path / "new").replace(path)
        assert file_digests([old], cache) == own
        new = PlainBytes(path)
        assert file_digests([new], cache) == file_digests([new]) != own

    def test_of_those_that_start_together_one_hashes(
        self, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, go_on, waiting = threading.Event(), threading.Event(), threading.Semaphore(0)
        hashed: list[int] = []
        monkeypatch.setattr(revision.logger, "info", lambda *_: waiting.release())

        def named() -> str:
            def progress(done: int, whole: int) -> None:
                hashed.append(threading.get_ident())
                begun.set()
                assert go_on.wait(LONG_S)

            return CheckpointFiles.open(copied).revision(tmp_path / "cache", progress)

        with ThreadPoolExecutor(3) as threads:
            found = [threads.submit(named)]
            assert begun.wait(LONG_S)
            found += [threads.submit(named) for _ in range(2)]
            assert all(waiting.acquire(timeout=LONG_S) for _ in range(2)), "they hash, too"
            go_on.set()
            assert len({each.result(LONG_S) for each in found}) == 1
        assert len(set(hashed)) == 1

    @pytest.mark.parametrize("content", [b"", b"[1]", b"not json", b'{"\xff": "x"}', b"[" * 10**6])
    def test_a_broken_or_unusable_cache_costs_only_time(
        self, copied: Path, tmp_path: Path, content: bytes
    ) -> None:
        plain = Checkpoint.open(copied).revision()
        (tmp_path / "file-digests.json").write_bytes(content)
        assert Checkpoint.open(copied).revision(tmp_path) == plain
        in_the_way = tmp_path / "file"
        in_the_way.touch()
        assert Checkpoint.open(copied).revision(in_the_way) == plain


class TestQuantized:
    def test_fp8_blocks(self, copied: Path) -> None:
        original = stored_tensors(copied)
        checkpoint = Checkpoint.open(quantized_like_k2(copied, FP8_CONFIG))
        shapes = tensor_shapes(checkpoint.spec)
        checkpoint.check_names(shapes)
        changed = 0
        for name, shape in shapes.items():
            tensor = checkpoint.tensor(name, shape)
            if "_proj" in name:
                wanted = dequantize_fp8_block(*quantize_fp8_block(original[name]))
                assert checkpoint.raw(name).dtype == torch.float8_e4m3fn
                changed += 1
            else:
                wanted = original[name]
            assert tensor.dtype == wanted.dtype
            assert torch.equal(tensor, wanted), name
        assert changed == 3 * 5 + 3 + 2 * 9 * 3
        assert checkpoint.stored_bytes(KV_A) == 40 * 64 + 4

    def test_int4_experts(self, copied: Path) -> None:
        original = stored_tensors(copied)
        checkpoint = Checkpoint.open(quantized_like_k2(copied, INT4_CONFIG))
        shapes = tensor_shapes(checkpoint.spec)
        checkpoint.check_names(shapes)
        for name, shape in shapes.items():
            wanted = original[name]
            if ".experts." in name:
                packed, scale, _ = quantize_int4_packed(wanted)
                wanted = dequantize_int4_packed(packed, scale, (shape[0], shape[1]))
                assert not torch.equal(wanted, original[name])
            assert torch.equal(checkpoint.tensor(name, shape), wanted), name
        assert checkpoint.stored_bytes(EXPERT) == 64 * 32 // 2 + 64 * 2 + 2 * 8

    def test_weights_come_in_the_dtype_of_the_config(self, copied: Path) -> None:
        quantized_like_k2(copied, FP8_CONFIG)
        edit_json(copied / "config.json", lambda config: config.update(torch_dtype="float32"))
        assert Checkpoint.open(copied).tensor(EXPERT, (64, 32)).dtype == torch.float32

    def test_a_quantization_in_the_outer_config_counts(self, copied: Path) -> None:
        quantized_like_k2(copied, FP8_CONFIG)

        def split(config: dict[str, Any]) -> None:
            quantization = config.pop("quantization_config")
            wrap_as_text_config(config)
            config["quantization_config"] = quantization

        edit_json(copied / "config.json", split)
        assert Checkpoint.open(copied).tensor(EXPERT, (64, 32)).dtype == torch.bfloat16

    def test_an_unknown_format_is_named_at_once(self, copied: Path) -> None:
        edit_json(
            copied / "config.json", lambda c: c.update(quantization_config={"quant_method": "gptq"})
        )
        with pytest.raises(CheckpointError, match="quant_method='gptq'"):
            Checkpoint.open(copied)

    @pytest.mark.parametrize(
        ("drop", "change", "message"),
        [
            ("_scale_inv", None, f"{KV_A}_scale_inv is missing"),
            ("_scale_inv", torch.ones(2, 1), "has shape [2, 1], the model needs [1, 1]"),
            ("_scale_inv", torch.ones(1, 1, dtype=torch.int32), "dtype I32 is not supported"),
            ("", torch.ones(40, 64), "it has a scale but is stored as F32"),
        ],
    )
    def test_broken_fp8_parts(
        self, copied: Path, drop: str, change: torch.Tensor | None, message: str
    ) -> None:
        tensors = stored_tensors(quantized_like_k2(copied, FP8_CONFIG))
        del tensors[KV_A + drop]
        if change is not None:
            tensors[KV_A + drop] = change
        checkpoint = Checkpoint.open(write_single(copied, tensors))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.tensor(KV_A, (40, 64))
        assert message in str(caught.value)
        assert KV_A in str(caught.value)

    @pytest.mark.parametrize(
        ("part", "change", "message"),
        [
            ("_scale", None, f"{EXPERT}_scale is missing"),
            ("_shape", None, f"{EXPERT}_shape is missing"),
            ("_shape", torch.tensor([32, 64]), "records (32, 64), the model needs (64, 32)"),
            ("_scale", torch.ones(64, 2), "has shape [64, 2], the model needs [64, 1]"),
            ("_packed", torch.zeros(64, 4, dtype=torch.int64), "dtype I64 is not supported"),
            ("_packed", torch.zeros(64, 8, dtype=torch.int32), "the model needs [64, 4]"),
        ],
    )
    def test_broken_int4_parts(
        self, copied: Path, part: str, change: torch.Tensor | None, message: str
    ) -> None:
        tensors = stored_tensors(quantized_like_k2(copied, INT4_CONFIG))
        del tensors[EXPERT + part]
        if change is not None:
            tensors[EXPERT + part] = change
        checkpoint = Checkpoint.open(write_single(copied, tensors))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.tensor(EXPERT, (64, 32))
        assert message in str(caught.value)
        assert EXPERT in str(caught.value)

    @pytest.mark.parametrize("config", [FP8_CONFIG, INT4_CONFIG], ids=["fp8", "int4"])
    def test_quantized_tensors_without_a_config_are_refused(
        self, copied: Path, config: dict[str, Any]
    ) -> None:
        quantized_like_k2(copied, config)
        edit_json(copied / "config.json", lambda c: c.pop("quantization_config"))
        with pytest.raises(CheckpointError, match=r"experts\.3.*model\.safetensors.*without"):
            Checkpoint.open(copied).tensor(EXPERT, (64, 32))


class TestWrongTensors:
    def test_missing_and_misshaped_name_tensor_and_file(self, source: Path) -> None:
        checkpoint = Checkpoint.open(source)
        with pytest.raises(CheckpointError, match=r"tensor model\.nothing\.weight is missing"):
            checkpoint.tensor("model.nothing.weight", (1,))
        with pytest.raises(CheckpointError, match="is missing"):
            checkpoint.raw("model.nothing.weight")
        with pytest.raises(CheckpointError) as caught:
            checkpoint.tensor(NORM, (65,))
        assert "has shape [64], the model needs [65]" in str(caught.value)
        assert NORM in str(caught.value)
        assert "model-0000" in str(caught.value)

    def test_a_dtype_that_is_no_weight(self, copied: Path) -> None:
        tensors = stored_tensors(copied) | {NORM: torch.ones(64, dtype=torch.int8)}
        checkpoint = Checkpoint.open(write_single(copied, tensors))
        with pytest.raises(CheckpointError, match=r"norm.*dtype I8 is not supported"):
            checkpoint.tensor(NORM, (64,))

    def test_check_names_counts_and_shows_the_first(self, source: Path) -> None:
        checkpoint = Checkpoint.open(source)
        expected = [f"model.new.{i}" for i in range(8)] + checkpoint.names()[1:]
        with pytest.raises(CheckpointError) as caught:
            checkpoint.check_names(expected)
        message = str(caught.value)
        assert "8 missing tensors: model.new.0, model.new.1, model.new.2" in message
        assert "and 3 more" in message
        assert "model.new.5" not in message
        assert "1 unknown tensors: lm_head.weight" in message
        assert str(source) in message


def break_file(directory: Path, change: Callable[[bytes], bytes]) -> Path:
    file = sorted(directory.glob("*.safetensors"))[0]
    file.write_bytes(change(file.read_bytes()))
    return file


def header_of(**entry: Any) -> Callable[[bytes], bytes]:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry})
    return lambda _: len(header).to_bytes(8, "little") + header.encode() + bytes(64)


class TestWrongDirectories:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda data: data[:-1], "the file is truncated"),
            (lambda data: data[: len(data) // 2], "the file is truncated"),
            (lambda data: data[:20], "truncated within its header"),
            (lambda _: b"", "shorter than its length field"),
            (lambda _: b"PK\x03\x04" + bytes(100), "not a safetensors file|truncated"),
            (lambda data: data[:8] + b"[" + data[9:], "header is malformed"),
            (lambda data: b"\xff" * 8 + data[8:], "header would have 18446744073709551615 bytes"),
            (header_of(shape=[3]), r"x in .*does not fit the bytes"),
            (header_of(data_offsets=[8, 0]), "does not fit the bytes"),
            (header_of(shape=[-2], data_offsets=[0, -8]), "header is malformed"),
            (header_of(data_offsets=[80, 88]), "the file is truncated"),
            (header_of(data_offsets=[0]), "header is malformed"),
            (header_of(shape=None), "header is malformed"),
        ],
    )
    def test_broken_files_are_named(
        self, copied: Path, change: Callable[[bytes], bytes], message: str
    ) -> None:
        file = break_file(copied, change)
        with pytest.raises(CheckpointError, match=message) as caught:
            Checkpoint.open(copied)
        assert str(file) in str(caught.value)

    def test_a_shard_that_is_not_there(self, copied: Path) -> None:
        file = sorted(copied.glob("*.safetensors"))[1]
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file.name}.*No such file"):
            Checkpoint.open(copied)

    def test_an_index_that_disagrees_with_its_shards(self, copied: Path) -> None:
        def swap(index: dict[str, Any]) -> None:
            index["weight_map"]["lm_head.weight"] = "model-00001-of-00003.safetensors"

        edit_json(copied / INDEX_NAME, swap)
        with pytest.raises(CheckpointError, match=r"00001-of-00003.*lacks lm_head\.weight"):
            Checkpoint.open(copied)

    def test_an_index_beside_weights_that_it_does_not_name(self, copied: Path) -> None:
        """transformers would read the one file, and others the index."""
        save_file(stored_tensors(copied), copied / WHOLE_NAME)
        with pytest.raises(CheckpointError, match=rf"both {WHOLE_NAME} and {INDEX_NAME}"):
            Checkpoint.open(copied)

    @pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", 3])
    def test_an_index_cannot_point_elsewhere(self, copied: Path, name: object) -> None:
        edit_json(copied / INDEX_NAME, lambda index: index["weight_map"].update({NORM: name}))
        with pytest.raises(CheckpointError, match=r"not a plain file name|cannot be read"):
            Checkpoint.open(copied)

    def test_an_index_without_a_map(self, copied: Path) -> None:
        edit_json(copied / INDEX_NAME, lambda index: index.pop("weight_map"))
        with pytest.raises(CheckpointError, match="no weight_map"):
            Checkpoint.open(copied)

    def test_a_tensor_in_two_files(self, copied: Path) -> None:
        (copied / INDEX_NAME).unlink()
        save_file({NORM: torch.ones(64)}, copied / "spare.safetensors")
        with pytest.raises(CheckpointError, match=r"norm\.weight is both in .* and in .*spare"):
            Checkpoint.open(copied)

    def test_pickled_weights_are_refused(self, copied: Path) -> None:
        for file in [*copied.glob("*.safetensors"), copied / INDEX_NAME]:
            file.unlink()
        with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
            Checkpoint.open(copied)
        (copied / "pytorch_model.bin").write_bytes(b"anything")
        with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model\.bin\)"):
            Checkpoint.open(copied)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, r"config\.json: the file is missing"),
            ("{", r"config\.json: cannot be read as JSON"),
            ("[]", "must hold a JSON object"),
            ('{"model_type": "llama"}', "model_type 'llama' is not supported"),
        ],
    )
    def test_a_broken_config(self, copied: Path, content: str | None, message: str) -> None:
        if content is None:
            (copied / "config.json").unlink()
        else:
            (copied / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(copied)

    def test_no_directory_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="give a local checkpoint directory"):
            Checkpoint.open(tmp_path / "moonshotai" / "Kimi-K2-Instruct")
