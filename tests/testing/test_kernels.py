"""I12 asks a kernel about every dtype of its op, and tries it in those that it takes."""

import pytest
import torch

from atom_core.plugin import Kernel, Op, PluginInfo, PluginRegistry, hookimpl
from atom_core.testing.properties.kernels import kernels_equal_references
from atom_core.testing.report import Violation

HERE = "tests.testing.test_kernels"
CASES = {"tiny.double": [({"x": torch.float64}, {"width": 3})]}


def double(x):
    return x * 2


def only_narrow(x):
    assert x.dtype == torch.float32, "called in a dtype that it refuses"
    return x + x


def wrong(x):
    return x + x + 1


def samples(device, dtype, seed):
    return [{"x": torch.ones(3, device=device, dtype=dtype)}]


def takes_float32(device, dtypes, facts):
    return dtypes["x"] == torch.float32 or f"cannot read {dtypes['x']}"


class Tiny:
    def __init__(self, function):
        self.function = function

    @hookimpl
    def atom_plugin_info(self):
        return PluginInfo(name="tiny", summary="A plugin for a test.", contract_version=1)

    @hookimpl
    def atom_ops(self):
        tolerance = {"float64": (0.0, 1e-12), "float32": (0.0, 1e-6)}
        return [Op("tiny.double", f"{HERE}:double", tolerance, f"{HERE}:samples")]

    @hookimpl
    def atom_kernels(self):
        return [Kernel("tiny.double", "narrow", f"{HERE}:{self.function}", takes_float32)]


def test_a_refused_dtype_is_told_and_the_others_are_tried():
    registry = PluginRegistry.of({"tiny": Tiny("only_narrow")})
    assert kernels_equal_references(registry, "tiny", 1, CASES) == [
        "tiny.double narrow in float64: cannot read torch.float64"
    ]


def test_a_kernel_is_tried_in_dtypes_that_no_model_asked_for():
    """The model is of float64, which the kernel refuses; in float32 it is wrong."""
    registry = PluginRegistry.of({"tiny": Tiny("wrong")})
    with pytest.raises(Violation, match=r"narrow of tiny\.double, float32"):
        kernels_equal_references(registry, "tiny", 1, CASES)
