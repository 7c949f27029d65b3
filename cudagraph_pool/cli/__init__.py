"""The command ``cudagraph-pool``."""
