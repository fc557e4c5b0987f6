"""Ops, kernels and the choice between kernels."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atom_core.errors import KernelError

if TYPE_CHECKING:
    import torch

__all__ = ["Kernel", "KernelTable", "Op", "SelectedKernel", "always_supported", "load_function"]

Supports = Callable[["torch.device", Mapping[str, "torch.dtype"], Mapping[str, Any]], "bool | str"]


def always_supported(device: torch.device, dtypes: Mapping[str, torch.dtype], facts: Mapping[str, Any]) -> bool:
    """Support everything; what a reference kernel in plain torch does."""
    return True


def load_function(path: str) -> Callable[..., Any]:
    """Import `package.module:function`.

    Raises:
        KernelError: there is no such module or function.
    """
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise KernelError(f"cannot import {path!r}: {error}") from error
    if not callable(function):
        raise KernelError(f"{path!r} is not a function")
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Op:
    """Something that kernels compute, defined by its reference.

    Attributes:
        name: `plugin.op`.
        reference: import path of the reference in plain torch; its parameters are the op's signature. It is
            also a kernel, named `reference`, of the lowest priority.
        tolerance: by dtype name, `(absolute, relative)` difference from the reference that a kernel may show.
        sample_inputs: import path of `f(device, dtype, seed) -> list of keyword dictionaries`, for tests.
        summary: one line.
        mutates: parameters that a kernel writes in place.
    """

    name: str
    reference: str
    tolerance: Mapping[str, tuple[float, float]]
    sample_inputs: str
    summary: str = ""
    mutates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op, the plugin's own or another plugin's.

    Attributes:
        op: the op's name.
        name: unique within the op; `--kernel OP=NAME` forces it.
        function: import path, loaded only when chosen.
        supports: `(device, dtypes, shape facts)` to True, or the reason why not.
        priority: the highest that supports a case wins.
        capturable: may be captured in a device graph: what it launches depends on shapes and Python maxima alone,
            it reads no host mirror and never waits for the device.
        joins: import path of `f(graph)`, which changes a graph of compiled code in place, before it is compiled: it may
            join calls of this kernel with what stands beside them. The graph is a `torch.fx.Graph` from torch's tracer.
    """

    op: str
    name: str
    function: str
    supports: Supports = always_supported
    priority: int = 0
    capturable: bool = False
    joins: str | None = None


@dataclass(frozen=True)
class SelectedKernel:
    """A chosen kernel; call it like the op.

    Attributes:
        op: the op's name.
        name: the kernel's name.
        owner: description of the plugin that brought the kernel.
        function: the loaded function.
        capturable: as its `Kernel` says.
        joins: the loaded function, if there is one.
    """

    op: str
    name: str
    owner: str
    function: Callable[..., Any]
    capturable: bool = False
    joins: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel.

        Raises:
            KernelError: a device graph is being captured, and the kernel cannot be captured.
        """
        if not self.capturable:
            self._check_no_capture()
        return self.function(*args, **kwargs)

    def _check_no_capture(self) -> None:
        import torch

        cuda: Any = torch.cuda
        if cuda.is_initialized() and cuda.is_current_stream_capturing():
            raise KernelError(
                f"kernel {self.name!r} of op {self.op!r} ({self.owner}) cannot be captured in a device graph; its "
                "Kernel does not say capturable=True"
            )


@dataclass
class KernelTable:
    """Every op and kernel of the loaded plugins, and which one runs.

    Attributes:
        ops: by name, the op and the description of its plugin.
        kernels: by op name, kernels with the description of their plugin, highest priority first.
        forced: op name to kernel name, from `--kernel`.
        selected: every choice made so far, for `atom kernels` and the log.
    """

    ops: Mapping[str, tuple[Op, str]]
    kernels: Mapping[str, Sequence[tuple[Kernel, str]]]
    forced: Mapping[str, str] = field(default_factory=dict)
    selected: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        ops: Iterable[tuple[Op, str]],
        kernels: Iterable[tuple[Kernel, str]],
        forced: Mapping[str, str] | None = None,
    ) -> KernelTable:
        """Check and sort what the plugins brought.

        Args:
            ops: each with the description of its plugin.
            kernels: each with the description of its plugin.
            forced: op name to kernel name.

        Raises:
            KernelError: two ops or two kernels share a name, a kernel is for an op nobody defined, or a forced
                op or kernel does not exist.
        """
        op_table: dict[str, tuple[Op, str]] = {}
        for op, owner in ops:
            if op.name in op_table:
                raise KernelError(f"op {op.name!r} is defined by {op_table[op.name][1]} and by {owner}")
            op_table[op.name] = (op, owner)
        by_op: dict[str, list[tuple[Kernel, str]]] = {
            name: [(Kernel(name, "reference", op.reference, priority=-1000), owner)]
            for name, (op, owner) in op_table.items()
        }
        for kernel, owner in kernels:
            if kernel.op not in by_op:
                raise KernelError(
                    f"kernel {kernel.name!r} of {owner} is for op {kernel.op!r}, which no loaded plugin defines; "
                    f"ops: {', '.join(sorted(by_op)) or 'none'}"
                )
            for other, other_owner in by_op[kernel.op]:
                if other.name == kernel.name:
                    raise KernelError(
                        f"kernel {kernel.name!r} of op {kernel.op!r} is brought by {other_owner} and by {owner}"
                    )
            by_op[kernel.op].append((kernel, owner))
        for candidates in by_op.values():
            candidates.sort(key=lambda candidate: -candidate[0].priority)
        forced = dict(forced or {})
        for op_name, kernel_name in forced.items():
            if op_name not in by_op:
                raise KernelError(
                    f"--kernel {op_name}={kernel_name}: no such op; ops: {', '.join(sorted(by_op)) or 'none'}"
                )
            names = [candidate.name for candidate, _ in by_op[op_name]]
            if kernel_name not in names:
                raise KernelError(f"--kernel {op_name}={kernel_name}: no such kernel; kernels: {', '.join(names)}")
        return cls(op_table, by_op, forced)

    def select(
        self,
        op: str,
        *,
        device: torch.device,
        dtypes: Mapping[str, torch.dtype],
        facts: Mapping[str, Any],
    ) -> SelectedKernel:
        """Choose the kernel of an op for one case.

        Args:
            op: the op's name.
            device: where it runs.
            dtypes: by the op's words, for example `{"query": bfloat16, "cache": float8_e4m3fn}`.
            facts: shape facts, for example `{"head_dim": 128, "num_kv_heads": 8}`.

        Raises:
            KernelError: no such op, the forced kernel refuses, or none supports the case; lists every
                candidate with its reason.
        """
        if op not in self.kernels:
            raise KernelError(
                f"op {op!r} is not defined by any loaded plugin; install the plugin that defines it "
                f"(the part before the dot names it). Ops: {', '.join(sorted(self.kernels)) or 'none'}"
            )
        forced = self.forced.get(op)
        reasons = []
        for kernel, owner in self.kernels[op]:
            if forced is not None and kernel.name != forced:
                continue
            try:
                verdict = kernel.supports(device, dtypes, facts)
            except Exception as error:
                verdict = f"its supports failed: {type(error).__name__}: {error}"
            if verdict is True:
                self.selected.setdefault(op, set()).add(kernel.name)
                joins = None if kernel.joins is None else load_function(kernel.joins)
                return SelectedKernel(op, kernel.name, owner, load_function(kernel.function), kernel.capturable, joins)
            reasons.append(f"{kernel.name} ({owner}): {verdict or 'refused without a reason'}")
        what = f"forced kernel {forced!r} of op {op!r} refuses" if forced else f"no kernel of op {op!r} supports"
        case = f"device {device}, dtypes {dict(dtypes)}, facts {dict(facts)}"
        raise KernelError(f"{what} {case}: " + "; ".join(reasons))

    def check_signatures(self) -> None:
        """Load every kernel of every op and compare parameters with the op's reference.

        Raises:
            KernelError: a kernel's parameters differ from its op's.
        """
        for name, (op, _) in self.ops.items():
            expected = list(inspect.signature(load_function(op.reference)).parameters)
            for kernel, owner in self.kernels[name]:
                found = list(inspect.signature(load_function(kernel.function)).parameters)
                if found != expected:
                    raise KernelError(
                        f"kernel {kernel.name!r} of op {name!r} ({owner}) has parameters {found}, expected {expected}"
                    )
