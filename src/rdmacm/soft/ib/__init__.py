"""InfiniBand ports beside the soft devices."""
