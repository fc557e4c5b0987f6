"""The conformance kit; `atom conformance sdpa --thorough` tries more samples."""

from atom_sdpa.conformance import TestSdpa

__all__ = ["TestSdpa"]
