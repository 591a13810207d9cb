"""InfiniBand ports: what they are and how management datagrams pass them."""
