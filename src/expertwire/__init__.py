"""expertwire: expert-parallel dispatch and combine for Mixture-of-Experts models."""

__version__ = "0.1.0.dev0"
