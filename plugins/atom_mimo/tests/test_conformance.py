"""The conformance kit on this plugin's tiny models; `atom conformance mimo --thorough` runs more."""

from atom_mimo.conformance import TestMimo

__all__ = ["TestMimo"]
