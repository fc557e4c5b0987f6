"""The conformance kit on this plugin's tiny models; `atom conformance mha --thorough` runs more."""

from atom_mha.conformance import TestMha

__all__ = ["TestMha"]
