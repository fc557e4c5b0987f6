"""Tests of the conformance kit: small right plugins (twins), and variations of them with one planted bug (mutants)."""
