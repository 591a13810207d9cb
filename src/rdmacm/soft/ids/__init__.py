"""The ids of the soft provider: how each finds its peer (the link) and connects (the connector)."""
