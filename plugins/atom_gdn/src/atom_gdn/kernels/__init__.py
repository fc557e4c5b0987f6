"""The ops `gdn.*`: references, the CPU kernels in torch, and sample inputs for tests."""
