"""I12: every kernel computes what its op's reference computes; offsets past 2^31 elements are right."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atom_core.plugin import Kernel, KernelTable, Op
from atom_core.plugin.ops import load_function
from atom_core.testing.batch import Row
from atom_core.testing.driver import StepDriver
from atom_core.testing.report import Trace, Violation, difference
from atom_core.testing.subject import Subject

if TYPE_CHECKING:
    from atom_core.plugin.registry import PluginRegistry

__all__ = ["kernels_equal_references", "large_offsets"]

Cases = Mapping[str, Sequence[tuple[Mapping[str, torch.dtype], Mapping[str, Any]]]]

_FIRST_WRONG = 2**31


def kernels_equal_references(registry: PluginRegistry, plugin: str, seeds: int, cases: Cases) -> list[str]:
    """I12: every kernel of an op = its reference within the op's tolerance.

    Checks all kernels of the plugin's ops, and the plugin's kernels of any op.

    Args:
        registry: the plugins.
        plugin: the one under test.
        seeds: of the sample inputs.
        cases: by op, the dtypes and facts for which the layers of a model asked for a kernel; each kernel is asked
            about the facts in every dtype of the op's tolerance.

    Returns:
        What was not tried, with the reason.
    """
    table = registry.kernel_table()
    table.check_signatures()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    skipped = []
    for op, kernel in _kernels_of(registry, table, plugin):
        refused: dict[str, list[str]] = {}
        for name, tolerance in op.tolerance.items():
            dtype = getattr(torch, name)
            asked = [(dict.fromkeys(dtypes, dtype), facts) for dtypes, facts in cases.get(op.name, [])]
            reason = _refusal(kernel, device, asked)
            if reason is not None:
                refused.setdefault(reason, []).append(name)
                continue
            for seed in range(seeds):
                for case, sample in enumerate(load_function(op.sample_inputs)(device, dtype, seed)):
                    _compare(op, kernel, sample, tolerance, f"{name}, sample {case} of seed {seed}")
        for reason, names in refused.items():
            where = "" if len(names) == len(op.tolerance) else f" in {', '.join(names)}"
            skipped.append(f"{op.name} {kernel.name}{where}: {reason}")
    return skipped


def large_offsets(subject: Subject) -> str | None:
    """I12: indices past 2^31 elements are right: a request in the last blocks and slots of a huge cache.

    The memory is never touched but where the request writes, so that it is not really there.

    Returns:
        Why it was not tried, or `None`.
    """
    model = copy.deepcopy(subject.model).to(torch.bfloat16)
    small = StepDriver(model, subject.registry, block_size=subject.block_size)
    views = [layer.kv_cache for layer in small.layers]
    paged = [tensor for view in views for tensor in view.paged.values()]
    state = [tensor for view in views for tensor in view.state.values()]
    # Of each kind, the largest tensor of a layer passes the limit.
    num_blocks = _units(paged) or small.num_blocks
    num_groups = -(-_units(state) // max([shape.slots_per_req for shape in small.states.values()], default=1)) or 4
    try:
        huge = StepDriver(
            model,
            subject.registry,
            block_size=subject.block_size,
            num_blocks=num_blocks,
            num_groups=num_groups,
            poison=None,
        )
    except RuntimeError as error:
        return (
            f"no memory can be reserved for {num_blocks} blocks and {num_groups} groups ({str(error).splitlines()[0]})"
        )
    tokens = subject.text(min(subject.max_tokens, 4 * subject.block_size + 3))
    expected, found = (_prefill_and_decode(driver, tokens) for driver in (small, huge))
    wrong = difference(expected, found, subject.tolerance)
    if wrong:
        raise Violation(
            f"I12 offsets: in the last of {num_blocks} blocks and {num_groups} groups, past 2^31 elements, a "
            f"{len(tokens)}-token prompt {wrong}"
        )
    return None


def _units(tensors: list[Tensor]) -> int:
    """Blocks or slots so that the largest tensor has more than 2^31 elements; 0 without tensors."""
    largest = max((math.prod(tensor.shape[1:]) for tensor in tensors), default=0)
    return _FIRST_WRONG // largest + 300 if largest else 0


def _prefill_and_decode(driver: StepDriver, tokens: list[int]) -> Trace:
    request = driver.request(tokens)
    first = driver.run(Row(request, len(tokens) - 3)).rows[0]
    return Trace.join([first, driver.run(Row(request, 2)).rows[0], driver.run(Row(request, decode=True)).rows[0]])


def _kernels_of(registry: PluginRegistry, table: KernelTable, plugin: str) -> Iterator[tuple[Op, Kernel]]:
    owner = registry.describe(plugin)
    for name, (op, op_owner) in table.ops.items():
        for kernel, kernel_owner in table.kernels[name]:
            if kernel.function != op.reference and owner in (op_owner, kernel_owner):
                yield op, kernel


def _refusal(kernel: Kernel, device: torch.device, cases: Sequence[tuple[Any, Any]]) -> str | None:
    """Why a kernel does not run on this device in any case that a layer asked about; `None` if it does."""
    reason = None
    for dtypes, facts in cases or [({}, {})]:
        try:
            verdict = kernel.supports(device, dtypes, facts)
        except Exception:
            return None  # it asks for facts that no layer gave, so the device suits it
        if verdict is True:
            return None
        reason = str(verdict or "refused without a reason")
    return reason


def _compare(op: Op, kernel: Kernel, sample: Mapping[str, Any], tolerance: tuple[float, float], case: str) -> None:
    expected, found = copy.deepcopy(dict(sample)), copy.deepcopy(dict(sample))
    expected_result = load_function(op.reference)(**expected)
    function = load_function(kernel.function)
    found_result = function(**found)
    story = f"I12 kernels: {kernel.name} of {op.name}, {case}"
    pairs = [("the result", a, b) for a, b in zip(_flat(expected_result), _flat(found_result), strict=True)]
    pairs += [(name, expected[name], found[name]) for name in op.mutates if expected[name] is not None]
    untouched = [name for name, value in sample.items() if isinstance(value, Tensor) and name not in op.mutates]
    for name in untouched:
        if not torch.equal(_bits(sample[name]), _bits(found[name])):
            raise Violation(f"{story}: it writes {name}, which the op does not mutate")
    for name, right, value in pairs:
        wrong = ~torch.isclose(value.float(), right.float(), atol=tolerance[0], rtol=tolerance[1], equal_nan=True)
        if bool(wrong.any()):
            place = tuple(int(index) for index in wrong.nonzero()[0])
            error = float((value.float() - right.float()).abs().nan_to_num(math.inf).max())
            raise Violation(f"{story}: {name} differs from the reference at {place}, max error {error:.2g}")


def _flat(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else [item for item in result if isinstance(item, Tensor)]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
