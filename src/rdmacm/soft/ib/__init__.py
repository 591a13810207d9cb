"""InfiniBand ports, beside the software devices."""
