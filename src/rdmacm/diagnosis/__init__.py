"""Why: what explains resolutions, and records packets."""
