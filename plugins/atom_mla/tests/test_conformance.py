"""The conformance kit on this plugin's tiny models; `atom conformance mla --thorough` runs more."""

from atom_mla.conformance import TestMla

__all__ = ["TestMla"]
