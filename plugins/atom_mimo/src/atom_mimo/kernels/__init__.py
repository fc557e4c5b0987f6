"""Kernels of the ops `mimo.*`: the references, those for the CPU, and random inputs for tests."""
