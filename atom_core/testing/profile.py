"""Profile: how much a run of the kit tries."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from atom_core.errors import ConfigError

__all__ = ["PROFILES", "PROFILE_VARIABLE", "Profile", "try_examples"]

PROFILE_VARIABLE = "ATOM_CONFORMANCE"


@dataclass(frozen=True)
class Profile:
    """How much a run tries.

    Attributes:
        name: of the profile.
        steps: examples of a property that runs single steps.
        servings: examples of a property that runs an engine.
        operations: examples of a property of the core's pools, which run no model.
        all_configs: every config of the plugin, not the first few alone.
        seeds: of the sample inputs of ops.
        shrink: look for the smallest example once one has failed.
    """

    name: str
    steps: int
    servings: int
    operations: int
    all_configs: bool
    seeds: int = 1
    shrink: bool = True

    @classmethod
    def current(cls) -> Profile:
        """The profile that the environment variable ATOM_CONFORMANCE names; `quick` without it.

        Raises:
            ConfigError: there is no such profile.
        """
        name = os.environ.get(PROFILE_VARIABLE) or "quick"
        if name not in PROFILES:
            raise ConfigError(f"{PROFILE_VARIABLE}={name}: no such profile; profiles: {', '.join(PROFILES)}")
        return PROFILES[name]


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", steps=6, servings=1, operations=10, all_configs=False),
        Profile("thorough", steps=25, servings=4, operations=100, all_configs=True, seeds=3),
        Profile("mutants", steps=3, servings=0, operations=5, all_configs=True, shrink=False),
    )
}


def try_examples(
    body: Callable[[Any], object],
    strategy: st.SearchStrategy[Any],
    count: int,
    shrink: bool,
    always: Sequence[Any] = (),
) -> None:
    """Run a property on examples, the same ones in every process.

    Args:
        body: raises when an example violates the property; what it raises for the smallest example leaves here.
        strategy: of examples.
        count: how many to draw.
        shrink: look for the smallest failing example.
        always: examples that are tried however many are drawn; last, so that a failure is shown by its smallest
            example, or first where nothing is shrunk.
    """
    if shrink and count:
        _try_drawn(body, strategy, count, shrink)
    for example in always:
        body(example)
    if not shrink and count:
        _try_drawn(body, strategy, count, shrink)


def _try_drawn(body: Callable[[Any], object], strategy: st.SearchStrategy[Any], count: int, shrink: bool) -> None:
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    options = settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )

    @options
    @given(strategy)
    def run(example: Any) -> None:
        body(example)

    run()
