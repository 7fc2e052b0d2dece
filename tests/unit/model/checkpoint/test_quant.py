"""Quantized weight formats: layout by hand-made numbers, round trips, and configs refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.quant import (
    dequantize_fp8_block,
    dequantize_int4_packed,
    quantize_fp8_block,
    quantize_int4_packed,
)
from mooncake.model.checkpoint.quant_format import (
    Fp8Block,
    Int4Group,
    fp8_scale_shape,
    parse_quantization,
)

FP8_CONFIG: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
INT4_CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Rows of very different size: a scale of the wrong place shows at once.
    sizes = torch.logspace(-3, 1, rows).unsqueeze(1)
    return torch.randn(rows, columns, generator=generator) * sizes


class TestFp8:
    def test_each_block_has_its_own_scale(self) -> None:
        weight = torch.ones(3, 5).to(torch.float8_e4m3fn)
        scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        wanted = torch.tensor(
            [[1.0, 1, 2, 2, 3], [1, 1, 2, 2, 3], [4, 4, 5, 5, 6]], dtype=torch.bfloat16
        )
        assert torch.equal(dequantize_fp8_block(weight, scale, (2, 2)), wanted)

    @pytest.mark.parametrize("shape", [(128, 128), (576, 256), (100, 300), (1, 129), (2600, 130)])
    def test_round_trip_with_partial_last_blocks(self, shape: tuple[int, int]) -> None:
        weight = random_weight(*shape)
        values, scale = quantize_fp8_block(weight)
        assert values.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32
        assert tuple(scale.shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
        restored = dequantize_fp8_block(values, scale, dtype=torch.float32)
        # e4m3 keeps 3 bits of mantissa; under 2^-6 of the scale its steps are 2^-9 wide.
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        bound = torch.maximum(weight.abs() * 2**-4, wide[: shape[0], : shape[1]] * 2**-10)
        assert bool(((restored - weight).abs() <= bound * 1.001).all())

    def test_matches_a_loop_over_blocks(self) -> None:
        values, scale = quantize_fp8_block(random_weight(300, 200))
        restored = dequantize_fp8_block(values, scale)
        for row in range(3):
            for column in range(2):
                block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
                wanted = (values[block].float() * scale[row, column]).to(torch.bfloat16)
                assert torch.equal(restored[block], wanted)

    def test_the_largest_value_of_a_block_is_exact_and_zeros_stay(self) -> None:
        weight = torch.zeros(128, 256)
        weight[3, 7] = -5.5
        values, scale = quantize_fp8_block(weight)
        restored = dequantize_fp8_block(values, scale, dtype=torch.float32)
        assert float(restored[3, 7]) == pytest.approx(-5.5, rel=1e-6)
        assert int((restored != 0).sum()) == 1

    def test_a_scale_of_another_grid_is_refused(self) -> None:
        with pytest.raises(ValueError, match="scale of shape"):
            dequantize_fp8_block(torch.zeros(130, 5).to(torch.float8_e4m3fn), torch.ones(1, 1))

    def test_scale_shapes_of_kimi_k2(self) -> None:
        assert fp8_scale_shape((576, 7168), (128, 128)) == (5, 56)
        assert fp8_scale_shape((2048, 7168), (128, 128)) == (16, 56)


class TestInt4:
    def test_words_hold_eight_values_low_nibble_first(self) -> None:
        codes = [-8, -7, -1, 0, 1, 2, 6, 7]
        word = sum((code + 8) << (4 * place) for place, code in enumerate(codes))
        packed = torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)
        scale = torch.tensor([[0.5]], dtype=torch.bfloat16)
        restored = dequantize_int4_packed(packed, scale, (1, 8), 32, torch.float32)
        assert restored.tolist() == [[code / 2 for code in codes]]

    def test_each_group_of_columns_has_its_own_scale(self) -> None:
        packed = torch.full((2, 8), 0x99999999 - 2**32, dtype=torch.int32)  # every code is 1
        scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
        restored = dequantize_int4_packed(packed, scale, (2, 64))
        assert restored[:, [0, 31, 32, 63]].tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]

    @pytest.mark.parametrize("shape", [(64, 64), (3, 7168), (2050, 32), (5, 40), (4, 100)])
    def test_round_trip(self, shape: tuple[int, int]) -> None:
        weight = random_weight(*shape)
        packed, scale, stored_shape = quantize_int4_packed(weight)
        groups = -(-shape[1] // 32)
        assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (shape[0], -(-shape[1] // 8)))
        assert (scale.dtype, tuple(scale.shape)) == (torch.bfloat16, (shape[0], groups))
        assert (stored_shape.dtype, stored_shape.tolist()) == (torch.int64, list(shape))
        restored = dequantize_int4_packed(packed, scale, shape, dtype=torch.float32)
        steps = scale.float().repeat_interleave(32, dim=1)[:, : shape[1]]
        # Half a step, and a little where rounding the scale to bf16 pushed the ends out.
        assert bool(((restored - weight).abs() <= steps * (0.5 + 7 * 2**-8)).all())

    def test_what_was_dequantized_quantizes_to_the_same_words(self) -> None:
        packed, scale, shape = quantize_int4_packed(random_weight(16, 64))
        rows, columns = shape.tolist()
        again = quantize_int4_packed(
            dequantize_int4_packed(packed, scale, (rows, columns), dtype=torch.float32)
        )
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1], scale)

    def test_parts_that_do_not_fit_are_refused(self) -> None:
        packed, scale, _ = quantize_int4_packed(random_weight(4, 64))
        for shape in ((4, 72), (5, 64), (4, 32)):
            with pytest.raises(ValueError, match="packed"):
                dequantize_int4_packed(packed, scale, shape)


class TestConfig:
    def test_none_is_not_quantized(self) -> None:
        assert parse_quantization(None) is None
        assert parse_quantization({}) is None

    def test_fp8(self) -> None:
        parsed = parse_quantization(FP8_CONFIG | {"modules_to_not_convert": ["lm_head", "gate."]})
        assert parsed == Fp8Block((128, 128), ("lm_head", "gate."))
        assert parsed.quantizes("model.layers.3.self_attn.q_a_proj")
        assert not parsed.quantizes("lm_head")

    def test_int4_leaves_all_but_the_routed_experts(self) -> None:
        parsed = parse_quantization(INT4_CONFIG)
        assert isinstance(parsed, Int4Group)
        assert parsed.group_size == 32
        layer = "model.layers.1."
        assert parsed.quantizes(layer + "mlp.experts.17.gate_proj")
        assert parsed.quantizes(layer + "mlp.experts.17.down_proj")
        for module in ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.gate_proj"):
            assert not parsed.quantizes(layer + module)
        assert not parsed.quantizes("lm_head")

    def test_older_libraries_say_that_nothing_is_sparse(self) -> None:
        dense = {"sparsity_config": {"format": "dense", "targets": ["Linear"]}}
        assert parse_quantization(INT4_CONFIG | dense) == parse_quantization(INT4_CONFIG)

    def test_what_is_no_object_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="quantization_config='fp8' is not an object"):
            parse_quantization("fp8")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"quant_method": "awq"}, "quant_method='awq'"),
            ({"quant_method": None}, "quant_method=None"),
            ({"fmt": "e5m2"}, "fmt='e5m2'"),
            ({"weight_block_size": None}, "weight_block_size=None"),
            ({"weight_block_size": [128]}, "weight_block_size"),
            ({"weight_block_size": [128, 0]}, "weight_block_size"),
            ({"activation_scheme": "static"}, "activation_scheme='static'"),
            ({"modules_to_not_convert": 5}, "modules_to_not_convert=5"),
            ({"ignored_layers": [5]}, "ignored_layers=[5]"),
        ],
    )
    def test_other_fp8_formats_are_named(self, change: dict[str, Any], named: str) -> None:
        with pytest.raises(CheckpointError, match="quantization_config") as caught:
            parse_quantization(FP8_CONFIG | change)
        assert named in str(caught.value)

    @pytest.mark.parametrize(
        ("where", "value", "named"),
        [
            (["format"], "float-quantized", "format='float-quantized'"),
            (["kv_cache_scheme"], {"num_bits": 8}, "kv_cache_scheme"),
            (["transform_config"], {"config_groups": {"u": {}}}, "transform_config"),
            (["sparsity_config"], {"format": "sparse-24-bitmask"}, "sparsity_config"),
            (["ignore"], 5, "ignore=5"),
            (["ignore"], ["lm_head", "re:["], "ignore='re:['"),
            (["config_groups"], {}, "config_groups"),
            (["config_groups"], {"a": {}, "b": {}}, "config_groups"),
            (["config_groups", "group_0", "input_activations"], {"num_bits": 8}, "activations"),
            (["config_groups", "group_0", "output_activations"], {"num_bits": 8}, "activations"),
            (["config_groups", "group_0", "format"], "int-quantized", "format='int-quantized'"),
            (["config_groups", "group_0", "weights"], 5, "weights=5"),
            (["config_groups", "group_0", "weights", "num_bits"], 8, "num_bits=8"),
            (["config_groups", "group_0", "weights", "type"], "float", "type='float'"),
            (["config_groups", "group_0", "weights", "symmetric"], False, "symmetric=False"),
            (["config_groups", "group_0", "weights", "strategy"], "channel", "strategy"),
            (["config_groups", "group_0", "weights", "actorder"], "group", "actorder"),
            (["config_groups", "group_0", "weights", "group_size"], None, "group_size=None"),
        ],
    )
    def test_other_compressed_formats_are_named(
        self, where: list[str], value: object, named: str
    ) -> None:
        config = copy.deepcopy(INT4_CONFIG)
        inner: Any = config
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = value
        with pytest.raises(CheckpointError, match="quantization_config") as caught:
            parse_quantization(config)
        assert named in str(caught.value)
