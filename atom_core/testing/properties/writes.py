"""I2: no two layers and no two requests write to one place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import strategies as st
from torch import Tensor

from atom_core.engine.sampling import SamplingParams
from atom_core.plugin import AttentionLayer
from atom_core.testing import strategies
from atom_core.testing.batch import Row
from atom_core.testing.driver import StepDriver
from atom_core.testing.profile import try_examples
from atom_core.testing.report import Violation
from atom_core.testing.subject import Subject

__all__ = ["disjoint_writes"]


def disjoint_writes(subject: Subject) -> None:
    """I2: two layers' writes never overlap; two requests' writes never overlap."""
    _check_memory(subject.driver(None, 2))

    def body(chunks: tuple[int, ...]) -> None:
        driver = subject.driver(None, 2)
        length = sum(chunks)
        bystander = driver.request(subject.text(4, 1))
        driver.run(Row(bystander, 3))
        own, second = driver.request(subject.text(length + 6)), driver.request(subject.text(6, 2))
        audit = _Audit(driver, f"chunks {chunks}, then decodes and drafts")
        for count in chunks:
            audit.run(Row(own, count))
        audit.run(Row(second, 2), Row(own, 1, drafts=(3, 4), decode=True))
        audit.run(Row(second, 1, drafts=(5,), decode=True), Row(own, 2, drafts=(6,), decode=True))
        audit.run(Row(own, decode=True), Row(second, decode=True))

    examples = st.integers(1, subject.max_tokens // 2).flatmap(lambda length: strategies.chunkings(length, most=3))
    always = [(3, 2, subject.max_tokens // 3)]
    try_examples(body, examples, subject.profile.steps // 3, subject.profile.shrink, always)
    _check_samples(subject)


def _alone(driver: StepDriver, prompt: list[int], tokens: list[int]) -> Tensor:
    """Logits before each of the tokens, which are decoded one by one behind the prompt."""
    request = driver.request([*prompt, *tokens])
    traces = [driver.run(Row(request, len(prompt))).rows[0]]
    traces += [driver.run(Row(request, decode=True)).rows[0] for _ in tokens[1:]]
    return torch.stack([trace.logits[-1] for trace in traces])


class _Audit:
    """Runs steps and looks, after each layer, at which blocks and slots of which layer changed."""

    def __init__(self, driver: StepDriver, story: str) -> None:
        self._driver = driver
        self._story = story
        self._before: dict[tuple[str, str, str], Tensor] = {}

    def run(self, *rows: Row) -> None:
        """Run a step."""
        self._driver.run(*rows, around_layer=self._look)

    def _look(self, layer: AttentionLayer, done: bool) -> None:
        if not done:
            self._before = {key: _bits(tensor) for key, tensor in _views(self._driver)}
            return
        for (name, kind, field), tensor in _views(self._driver):
            after = _bits(tensor)
            changed = (after != self._before[name, kind, field]).flatten(1).any(1).nonzero().flatten().tolist()
            unit = "blocks" if kind == "paged" else "slots"
            if changed and name != layer.module_name:
                raise Violation(
                    f"I2 writes: {layer.module_name} changes {unit} {changed[:4]} of {field} of {name}; {self._story}"
                )
            allowed = self._allowed(name, kind)
            strays = [place for place in changed if place not in allowed]
            if strays:
                raise Violation(
                    f"I2 writes: {name} writes {field} in {unit} {strays[:4]}, which are not the step's "
                    f"({sorted(allowed)[:6]}); {self._story}"
                )

    def _allowed(self, name: str, kind: str) -> set[int]:
        """The blocks that hold the step's tokens, or the slots that `state_write` names."""
        batch = self._driver.batch
        if kind == "paged":
            slots = batch.slot_mapping_host
            return set((slots[slots >= 0] // batch.block_size).tolist())
        owner = self._driver.owner(name)
        writes = batch.state_write_host.get(owner)
        return set() if writes is None else set(writes[writes >= 0].tolist())


def _views(driver: StepDriver) -> Iterator[tuple[tuple[str, str, str], Tensor]]:
    for layer in driver.layers:
        for kind, tensors in (("paged", layer.kv_cache.paged), ("state", layer.kv_cache.state)):
            for field, tensor in tensors.items():
                yield (layer.module_name, kind, field), tensor


def _bits(tensor: Tensor) -> Tensor:
    """A copy of the bytes, [blocks or slots, bytes]: NaN equals NaN."""
    return tensor.reshape(tensor.shape[0], -1).clone().view(torch.uint8)


def _check_memory(driver: StepDriver) -> None:
    """Compare the memory of all layers' views, element by element."""
    owners: dict[int, tuple[Tensor, list[tuple[str, str]]]] = {}
    for (name, _, field), tensor in _views(driver):
        storage = tensor.untyped_storage()
        counts, names = owners.setdefault(storage.data_ptr(), (torch.zeros(storage.nbytes(), dtype=torch.uint8), []))
        size = tensor.element_size()
        stride = tuple(step * size for step in tensor.stride())
        for byte in range(size):
            own = torch.zeros_like(counts)
            places = torch.arange(len(counts)).as_strided(tensor.shape, stride, tensor.storage_offset() * size + byte)
            own.index_add_(0, places.flatten(), torch.ones(places.numel(), dtype=torch.uint8))
            if int(own.max()) > 1:
                raise Violation(f"I2 writes: two blocks or slots of {field} of {name} share memory")
            if bool((counts & own).any()):
                others = ", ".join(f"{other_field} of {other}" for other, other_field in names)
                raise Violation(f"I2 writes: {field} of {name} shares memory with one of {others}")
            counts += own
        names.append((name, field))


def _check_samples(subject: Subject) -> None:
    """Samples of one prompt go on independently: each as if it were alone."""
    prompt = subject.text(subject.block_size + 2, 7)
    engine = subject.engine(enable_prefix_caching=True, num_spec_tokens=0, seed=1)
    params = SamplingParams(n=2, max_tokens=8, temperature=2.0, logprobs=0, ignore_eos=True)
    engine.add_request(prompt, params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    for sample in outputs[0].outputs:
        tokens = list(sample.token_ids)
        expected = _alone(subject.driver(), prompt, tokens).log_softmax(-1)[range(len(tokens)), tokens]
        assert sample.logprobs is not None, "logprobs were asked for"
        found = torch.tensor([report[token].logprob for report, token in zip(sample.logprobs, tokens, strict=True)])
        errors = (found - expected).abs()
        errors = torch.where(torch.isfinite(errors), errors, torch.inf)
        wrong = (errors > 10 * subject.tolerance).nonzero()
        if len(wrong):
            raise Violation(
                f"I2 writes: of 2 samples of a {len(prompt)}-token prompt, sample {sample.index} is not what it is "
                f"alone from output token {int(wrong[0])} on, log probability off by {float(errors.max()):.2g}"
            )
