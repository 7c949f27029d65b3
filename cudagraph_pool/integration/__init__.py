"""Programs that know nothing of this package: enabled by the environment or by entry points."""
