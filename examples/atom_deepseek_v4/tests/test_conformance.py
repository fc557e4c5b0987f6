"""The conformance kit on this plugin's tiny models; `atom conformance deepseek_v4 --thorough` runs more."""

from atom_deepseek_v4.conformance import TestDeepseekV4

__all__ = ["TestDeepseekV4"]
