"""Multi-head latent attention: one packed latent per token and layer, dense or with a sparse indexer."""

__all__: list[str] = []
