"""References of the ops `deepseek_v4.*` in plain torch, and sample inputs."""
