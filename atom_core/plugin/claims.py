"""Claims: asking every plugin who owns a module, and deciding between the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from atom_core.errors import AtomError, ClaimError, LayerError, PluginError
from atom_core.plugin.layer import AttentionLayer
from atom_core.plugin.types import Claim

if TYPE_CHECKING:
    import pluggy
    from torch import nn
    from transformers import PreTrainedConfig

__all__ = ["Claims"]


class Claims:
    """Asks each plugin separately, so that a claim is attributable; cheap enough for every module of a model.

    Args:
        callers: by plugin, a caller of `atom_claim_layer` that reaches this plugin alone.
        descriptions: by plugin, how messages name it.
    """

    def __init__(self, callers: Mapping[str, pluggy.HookCaller], descriptions: Mapping[str, str]) -> None:
        self._callers = callers
        self._descriptions = descriptions

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of the plugins that are asked."""
        return tuple(self._callers)

    def owner(
        self, module: nn.Module, module_name: str, model_config: PreTrainedConfig, tp_size: int
    ) -> tuple[str, Claim] | None:
        """Decide who owns a module: an exact claim beats generic ones.

        A plugin that recognizes a module but refuses it (`LayerError`) stops the model, unless another plugin
        claims the module exactly.

        Returns:
            The owner's name and its claim, or `None` when the module is foreign to every plugin.

        Raises:
            ClaimError: two plugins claim the module with equal rank.
            LayerError: a plugin refuses the module and none claims it exactly.
            PluginError: a plugin failed, or returned something else than a claim.
        """
        claims: list[tuple[str, Claim]] = []
        refusal: LayerError | None = None
        for name, caller in self._callers.items():
            try:
                answers = caller(module=module, module_name=module_name, model_config=model_config, tp_size=tp_size)
            except LayerError as error:
                refusal = refusal or error
                continue
            except AtomError:
                raise
            except Exception as error:
                raise PluginError(
                    f"{self._descriptions[name]}: atom_claim_layer failed on {_describe(module, module_name)}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            claims.extend((name, self._checked(name, answer, module, module_name)) for answer in answers)
        exact = [(name, claim) for name, claim in claims if claim.exact]
        if refusal is not None and not exact:
            raise refusal
        best = exact or claims
        if len(best) > 1:
            raise self._tie(best, module, module_name)
        return best[0] if best else None

    def _checked(self, name: str, answer: object, module: nn.Module, module_name: str) -> Claim:
        if isinstance(answer, Claim) and isinstance(answer.layer, AttentionLayer):
            return answer
        expected = "a Claim" if not isinstance(answer, Claim) else "a Claim whose layer is an AttentionLayer"
        raise PluginError(
            f"{self._descriptions[name]}: atom_claim_layer returned {answer!r} for "
            f"{_describe(module, module_name)}, expected {expected} or None"
        )

    def _tie(self, best: Sequence[tuple[str, Claim]], module: nn.Module, module_name: str) -> ClaimError:
        rank = "exactly" if best[0][1].exact else "generically"
        claimants = " and ".join(self._descriptions[name] for name, _ in best)
        return ClaimError(
            f"{_describe(module, module_name)} is claimed {rank} by {claimants}; a layer has one owner, leave "
            f"one plugin out with --no-plugin NAME"
        )


def _describe(module: nn.Module, module_name: str) -> str:
    return f"module {module_name!r} of class {type(module).__name__}"
