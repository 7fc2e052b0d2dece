"""How many kernels a captured decode step launches: counted, and as README and predictions say."""

from __future__ import annotations

import pytest

from benchmarks.gpu import predict
from tests.support.kernels import hopper_table
from tests.support.kernels.step_launches import of_a_layer, of_a_step


@pytest.mark.parametrize(("kind", "most"), [("int4", 20), ("fp8", 22)])
def test_launches_of_a_layer_of_experts(kind: str, most: int) -> None:
    names, step = of_a_layer(kind), of_a_step(kind)
    assert len(names) <= most
    assert not {"cat", "clone", "copy_", "mul_"} & set(names), "nothing is copied or scaled apart"
    readme = hopper_table.README.read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if line.startswith(f"| {kind.upper()} |"))
    assert f"-> {len(names)} |" in row
    assert f"-> {step:,} |" in row
    assert "`" + "` `".join(names) + "`" in row
    assert kind == "fp8" or step == predict.STEP_LAUNCHES[False]
