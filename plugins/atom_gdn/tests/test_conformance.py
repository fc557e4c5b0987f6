"""The conformance kit on this plugin's tiny models; `atom conformance gdn --thorough` runs more."""

from atom_gdn.conformance import TestGdn

__all__ = ["TestGdn"]
