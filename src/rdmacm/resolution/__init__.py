"""Resolution: from a destination address to a port, a GID and a path, on the devices of any provider."""
