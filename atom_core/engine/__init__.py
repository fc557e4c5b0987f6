"""The engine: requests, sampling, scheduling and the step."""
