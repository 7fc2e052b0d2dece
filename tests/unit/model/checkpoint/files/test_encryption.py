"""Encrypted weights: the same tensors and the same revision as plain ones, or a clear error."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from mooncake.base import CheckpointError, ConfigError
from mooncake.crypto.aead import TAG_BYTES
from mooncake.crypto.keys import Key, KeyRing
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles
from mooncake.model.checkpoint.files.encryption import MANIFEST_NAME, read_manifest
from mooncake.model.checkpoint.making import encrypt
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.making.encrypt import (
    decrypt_checkpoint,
    encrypt_checkpoint,
    rekey_checkpoint,
)
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.tensor_cuts import Part, tensor_shapes
from mooncake.model.checkpoint.weights import Checkpoint, view_tensor

CHUNK = 64
NAMES = ("a.safetensors", "b.safetensors")


def ring(*numbers: int) -> KeyRing:
    return KeyRing([Key(bytes([number]) * 32) for number in numbers])


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_checkpoint("k2-nano", 1, tmp_path_factory.mktemp("checkpoints") / "nano")


@pytest.fixture(scope="module")
def sealed_nano(nano: Path) -> Path:
    return encrypt_checkpoint(nano, nano.parent / "sealed", ring(1))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two files of equal length, of several chunks each."""
    path = tmp_path / "small"
    path.mkdir()
    (path / "config.json").write_text("{}")
    for number, name in enumerate(NAMES):
        save_file({f"{name[0]}.weight": torch.arange(40.0) + number}, path / name)
    return path


@pytest.fixture
def sealed(small: Path) -> Path:
    return encrypt_checkpoint(small, small.parent / "sealed", ring(1), chunk_bytes=CHUNK)


def read_all(path: Path, keys: KeyRing | None = None) -> dict[str, torch.Tensor]:
    homes = CheckpointFiles.open(path, keys).homes
    return {name: view_tensor(file, stored).clone() for name, (file, stored) in homes.items()}


def refusal(path: Path) -> str:
    """Return why the weights cannot be read; reading them must fail."""
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        read_all(path, ring(1))
    return str(refused.value)


class TestReading:
    def test_tensors_and_revision_are_those_of_the_plain_weights(
        self, nano: Path, sealed_nano: Path
    ) -> None:
        plain, opened = Checkpoint.open(nano), Checkpoint.open(sealed_nano, ring(1))
        assert opened.revision() == plain.revision()
        assert opened.total_bytes == plain.total_bytes
        shapes = tensor_shapes(plain.spec)
        opened.check_names(shapes)
        with ThreadPoolExecutor(8) as pool:
            read = list(pool.map(lambda name: opened.tensor(name, shapes[name]), shapes))
        for name, tensor in zip(shapes, read, strict=True):
            assert torch.equal(tensor, plain.tensor(name, shapes[name]))

    @pytest.mark.parametrize("to", ["fp8", "int4"])
    def test_quantized_weights_are_read_as_stored(
        self, nano: Path, tmp_path: Path, to: str
    ) -> None:
        source = convert_checkpoint(nano, tmp_path / to, to)
        out = encrypt_checkpoint(source, tmp_path / "sealed", ring(1))
        plain, opened = Checkpoint.open(source), Checkpoint.open(out, ring(1))
        for name, shape in tensor_shapes(plain.spec).items():
            assert torch.equal(opened.tensor(name, shape), plain.tensor(name, shape))
        assert opened.revision() == plain.revision()

    def test_any_range_is_what_the_plain_file_has_there(self, small: Path, sealed: Path) -> None:
        for content in CheckpointFiles.open(sealed, ring(1)).contents:
            plain = (small / content.path.name.removesuffix(".enc")).read_bytes()
            assert content.num_bytes == len(plain)
            for begin in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, len(plain) - 1):
                for end in (begin, begin + 1, begin + CHUNK, 2 * CHUNK, 4 * CHUNK, len(plain)):
                    if begin <= end <= len(plain):
                        assert bytes(content.read(begin, end)) == plain[begin:end]

    @pytest.mark.parametrize("dim", [0, 1])
    def test_a_rank_reads_its_part_and_rows_without_their_neighbours(
        self, tmp_path: Path, dim: int
    ) -> None:
        source = init_checkpoint("k2-nano", 1, tmp_path / "nano")
        sealed = encrypt_checkpoint(source, tmp_path / "sealed", ring(1), chunk_bytes=CHUNK)
        plain, opened = Checkpoint.open(source), Checkpoint.open(sealed, ring(1))
        name = "lm_head.weight"
        shape = tensor_shapes(plain.spec)[name]
        half = shape[dim] // 2
        for part in (Part(dim, 0, half), Part(dim, half, shape[dim]), Part(dim, 3, 3)):
            wanted = plain.tensor(name, shape, part)
            assert torch.equal(opened.tensor(name, shape, part), wanted)
            assert torch.equal(wanted, plain.tensor(name, shape).narrow(dim, part.first, part.size))
        home, stored = CheckpointFiles.open(sealed, ring(1)).homes[name]
        file = home.content.path
        data = bytearray(file.read_bytes())
        last = (home.tensors[stored].end - 1) // CHUNK * (CHUNK + TAG_BYTES)
        data[last] ^= 1
        file.write_bytes(data)
        again = Checkpoint.open(sealed, ring(1))
        if dim == 0:
            again.tensor(name, shape, Part(0, 0, half))
        with pytest.raises(CheckpointError, match="are not those that were encrypted"):
            again.tensor(name, shape, Part(dim, half, shape[dim]))

    def test_writing_to_a_tensor_changes_no_file(self, sealed: Path) -> None:
        homes = CheckpointFiles.open(sealed, ring(1)).homes
        file, name = homes["a.weight"]
        view_tensor(file, name).zero_()
        assert float(view_tensor(file, name).max()) == 39.0

    def test_only_weights_are_encrypted_and_none_of_them_can_be_read(
        self, nano: Path, sealed_nano: Path
    ) -> None:
        assert not list(sealed_nano.glob("*.safetensors"))
        for file in nano.iterdir():
            if file.suffix != ".safetensors":
                assert (sealed_nano / file.name).read_bytes() == file.read_bytes()
                continue
            plain, hidden = file.read_bytes(), (sealed_nano / f"{file.name}.enc").read_bytes()
            windows = {plain[at : at + 8] for at in range(0, len(plain) - 8, 8)}
            windows -= {bytes(8)}
            assert not any(hidden[at : at + 8] in windows for at in range(len(hidden) - 8))


class TestDamage:
    def test_every_flipped_byte_is_found(self, sealed: Path) -> None:
        read_all(sealed, ring(1))
        for name in NAMES:
            file = sealed / f"{name}.enc"
            whole = file.read_bytes()
            for place in range(len(whole)):
                altered = bytearray(whole)
                altered[place] ^= 0x20
                file.write_bytes(altered)
                assert str(file) in refusal(sealed)
            file.write_bytes(whole)
        read_all(sealed, ring(1))

    def test_every_flipped_byte_of_the_manifest_is_found(self, small: Path, sealed: Path) -> None:
        file = sealed / MANIFEST_NAME
        whole, plain, original = file.read_bytes(), read_all(small), read_manifest(sealed)
        for place in range(len(whole)):
            for bit in (1, 32):
                altered = bytearray(whole)
                altered[place] ^= bit
                file.write_bytes(altered)
                refused = ""
                try:
                    read = read_all(sealed, ring(1))
                except (CheckpointError, ConfigError) as error:
                    refused = str(error)
                else:  # a blank, the case of an id, or bits that base64 does not use
                    assert all(torch.equal(read[name], plain[name]) for name in plain)
                    found = read_manifest(sealed)
                    assert found is not None
                    key_id = found.key.key_id.lower()
                    key = msgspec.structs.replace(found.key, key_id=key_id)
                    assert msgspec.structs.replace(found, key=key) == original
                assert refused == "" or str(sealed) in refused

    def test_cut_and_grown_files_are_found(self, sealed: Path) -> None:
        file = sealed / f"{NAMES[0]}.enc"
        whole = file.read_bytes()
        for length in (0, 1, len(whole) - 1, len(whole) - CHUNK - TAG_BYTES):
            file.write_bytes(whole[:length])
            assert f"has {length} bytes and was written with {len(whole)}" in refusal(sealed)
        file.write_bytes(whole + b"x")
        assert "copy it again" in refusal(sealed)
        file.unlink()
        assert "No such file" in refusal(sealed)

    def test_a_shorter_length_in_the_manifest_is_found(self, sealed: Path) -> None:
        """A file that ends with a whole chunk is as long as a manifest may be made to say."""
        file = sealed / f"{NAMES[0]}.enc"
        file.write_bytes(file.read_bytes()[: 2 * (CHUNK + TAG_BYTES)])
        manifest = json.loads((sealed / MANIFEST_NAME).read_bytes())
        manifest["files"][NAMES[0]]["num_bytes"] = 2 * CHUNK
        (sealed / MANIFEST_NAME).write_text(json.dumps(manifest))
        assert f"{MANIFEST_NAME}: was altered" in refusal(sealed)

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            (b"mooncake-weights-1", b"\xff\xfe", "does not say how weights are encrypted"),
            (b'"tag": "', '"tag": "é'.encode(), f"{MANIFEST_NAME}: was altered"),
            (b'"tag": "', b'"tag": "\\ud800', "does not say how weights are encrypted"),
            (b'"key_id": "', b'"key_id": "' + b"a" * 10_000, "was encrypted with another key"),
            (b'"files": {', b'"files": {"' + b"a" * 10_000 + b'": 1,', "does not say how weights"),
        ],
    )  # fmt: skip
    def test_nonsense_in_the_manifest_is_a_short_error(
        self, sealed: Path, old: bytes, new: bytes, reason: str
    ) -> None:
        """Found by fuzzing: it was a traceback, or an error as long as the file."""
        file = sealed / MANIFEST_NAME
        whole = file.read_bytes()
        assert old in whole
        file.write_bytes(whole.replace(old, new))
        with pytest.raises((CheckpointError, ConfigError)) as refused:
            read_all(sealed, ring(1))
        assert reason in str(refused.value)
        assert len(str(refused.value)) < 1000

    @pytest.mark.parametrize("move", ["in the file", "between files", "files swapped"])
    def test_moved_chunks_are_found(self, sealed: Path, move: str) -> None:
        first, second = (sealed / f"{name}.enc" for name in NAMES)
        step = CHUNK + TAG_BYTES
        one, two = bytearray(first.read_bytes()), bytearray(second.read_bytes())
        assert len(one) == len(two)
        if move == "in the file":
            one[:step], one[step : 2 * step] = one[step : 2 * step], one[:step]
        elif move == "between files":
            one[step : 2 * step] = two[step : 2 * step]
        else:
            one, two = two, one
        first.write_bytes(one)
        second.write_bytes(two)
        assert "are not those that were encrypted: they were altered" in refusal(sealed)

    def test_a_file_of_another_checkpoint_is_found(self, small: Path, sealed: Path) -> None:
        """Of the same plain bytes, under the same operator's key."""
        other = encrypt_checkpoint(small, small.parent / "other", ring(1), chunk_bytes=CHUNK)
        name = f"{NAMES[0]}.enc"
        assert (other / name).read_bytes() != (sealed / name).read_bytes()
        shutil.copyfile(other / name, sealed / name)
        assert "to another file or checkpoint" in refusal(sealed)
        shutil.copyfile(other / MANIFEST_NAME, sealed / MANIFEST_NAME)
        assert NAMES[1] in refusal(sealed)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"format": "mooncake-weights-2"}, "does not say how weights are encrypted"),
            ({"chunk_bytes": 0}, "does not say how weights are encrypted"),
            ({"files": {}}, "does not say how weights are encrypted"),
            (
                {"files": {"../x.safetensors": {"num_bytes": 1, "digest": 64 * "0"}}},
                "is not a file",
            ),
            ({"files": {"x.safetensors": {"num_bytes": -1, "digest": 64 * "0"}}}, "is not a file"),
            (
                {"files": {f"{'x' * 5000}.safetensors": {"num_bytes": 1, "digest": 64 * "0"}}},
                "is not a file",
            ),
            ({"more": 1}, "unknown field"),
        ],
    )
    def test_a_manifest_that_makes_no_sense_is_refused(
        self, sealed: Path, change: dict[str, object], message: str
    ) -> None:
        file = sealed / MANIFEST_NAME
        file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
        assert message in refusal(sealed)


class TestKeys:
    def test_the_wrong_key_is_told_from_damage(self, sealed: Path) -> None:
        with pytest.raises(ConfigError, match=r"weights-key: .* was encrypted with another key"):
            CheckpointFiles.open(sealed, ring(2))
        with pytest.raises(CheckpointError, match=r"are encrypted; give the key \(`weights-key-f"):
            CheckpointFiles.open(sealed)

    def test_a_key_for_plain_weights_is_an_error(self, small: Path) -> None:
        """Else plain weights put in the place of encrypted ones would be served."""
        with pytest.raises(CheckpointError, match="are not encrypted, but a key is given"):
            CheckpointFiles.open(small, ring(1))

    def test_without_a_key_the_revision_can_still_be_known(
        self, nano: Path, sealed_nano: Path
    ) -> None:
        closed = CheckpointFiles.open(sealed_nano, reads_weights=False)
        assert closed.homes == {}
        assert closed.revision() == CheckpointFiles.open(nano).revision()
        with pytest.raises(ConfigError):
            CheckpointFiles.open(sealed_nano, ring(2), reads_weights=False)

    def test_a_changed_key_opens_the_same_files(self, sealed: Path) -> None:
        plain = read_all(sealed, ring(1))
        before = {file.name: file.read_bytes() for file in sealed.glob("*.enc")}
        rekey_checkpoint(sealed, ring(2, 1))
        assert {file.name: file.read_bytes() for file in sealed.glob("*.enc")} == before
        with pytest.raises(ConfigError, match="with another key"):
            CheckpointFiles.open(sealed, ring(1))
        for keys in (ring(2), ring(3, 2)):
            again = read_all(sealed, keys)
            assert all(torch.equal(again[name], plain[name]) for name in plain)
        with pytest.raises(ConfigError, match="with another key"):
            rekey_checkpoint(sealed, ring(3))

    def test_what_is_not_encrypted_has_no_key_to_change(self, small: Path) -> None:
        with pytest.raises(CheckpointError, match="are not encrypted"):
            rekey_checkpoint(small, ring(1))


class TestWriting:
    def test_decrypting_gives_the_files_back(
        self, nano: Path, sealed_nano: Path, tmp_path: Path
    ) -> None:
        out = decrypt_checkpoint(sealed_nano, tmp_path / "out", ring(1))
        assert {file.name: file.read_bytes() for file in out.iterdir()} == {
            file.name: file.read_bytes() for file in nano.iterdir()
        }

    def test_pieces_make_one_file_whatever_their_size(
        self, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(encrypt, "PIECE_BYTES", 4096)
        monkeypatch.setattr(encrypt, "WRITTEN_BYTES", 1000)
        monkeypatch.setattr("mooncake.model.checkpoint.files.revision.PIECE_BYTES", 4096)
        seen: list[tuple[int, int]] = []
        out = encrypt_checkpoint(
            nano, tmp_path / "sealed", ring(1), lambda *counts: seen.append(counts), 1024
        )
        whole = sum(content.num_bytes for content in CheckpointFiles.open(nano).contents)
        assert seen == sorted(seen)
        assert seen[-1] == (whole, whole)
        assert len(seen) > whole // 4096
        back = decrypt_checkpoint(out, tmp_path / "out", ring(1))
        for file in nano.glob("*.safetensors"):
            assert (back / file.name).read_bytes() == file.read_bytes()

    def test_nothing_is_left_of_a_failed_run(
        self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", refuse)
        with pytest.raises(ConfigError, match=r"out: cannot be written .No space left"):
            encrypt_checkpoint(small, tmp_path / "out", ring(1))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]

    def test_weights_in_other_formats_are_never_copied_beside(
        self, small: Path, tmp_path: Path
    ) -> None:
        for name in ("pytorch_model.bin", "x.gguf", "old.pt", "spare.weights", ".hidden.json"):
            (small / name).write_bytes(b"plain")
        (small / "tokenizer.json").write_text("{}")
        (small / "original").mkdir()
        out = encrypt_checkpoint(small, tmp_path / "out", ring(1))
        assert {file.name for file in out.iterdir()} == {
            "config.json", "tokenizer.json", MANIFEST_NAME, *(f"{name}.enc" for name in NAMES)
        }  # fmt: skip

    def test_what_is_encrypted_is_not_encrypted_again(self, sealed: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is encrypted already; `mooncake model rekey`"):
            encrypt_checkpoint(sealed, tmp_path / "out", ring(1))
        with pytest.raises(CheckpointError, match="are encrypted; give the key"):
            convert_checkpoint(sealed, tmp_path / "out", "fp8")

    def test_each_run_has_a_data_key_of_its_own(self, small: Path, sealed: Path) -> None:
        other = encrypt_checkpoint(small, small.parent / "other", ring(1), chunk_bytes=CHUNK)
        manifests = read_manifest(sealed), read_manifest(other)
        assert manifests[0] is not None
        assert manifests[1] is not None
        assert manifests[0].digests == manifests[1].digests
        assert manifests[0].tag != manifests[1].tag
