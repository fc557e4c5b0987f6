"""Tests of the conformance kit's parts; what it catches is in tests/mutants."""
