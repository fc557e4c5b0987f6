"""The ops that this plugin defines; anyone may bring faster kernels for them."""

from __future__ import annotations

from collections.abc import Mapping

from atom_core.plugin import Op

__all__ = ["OPS"]

_EXACT = {"float64": (0.0, 0.0), "float32": (0.0, 0.0), "bfloat16": (0.0, 0.0), "float16": (0.0, 0.0)}
_TOLERANCE = {"float64": (1e-9, 1e-9), "float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}


def _op(name: str, summary: str, tolerance: Mapping[str, tuple[float, float]], mutates: tuple[str, ...] = ()) -> Op:
    return Op(
        name=f"deepseek_v4.{name}",
        reference=f"atom_deepseek_v4.kernels.reference:{name}",
        tolerance=tolerance,
        sample_inputs=f"atom_deepseek_v4.kernels.samples:{name}",
        summary=summary,
        mutates=mutates,
    )


OPS = (
    _op("write_ring", "write the last tokens of each row into its ring", _EXACT, ("ring",)),
    _op("compress", "pool the compression windows that the step closes, one entry each", _TOLERANCE),
    _op("select", "each token's best compressed entries by the indexer's score", _EXACT),
    _op("attend", "attend over the window, compressed entries and the sink", _TOLERANCE, ("out",)),
)
