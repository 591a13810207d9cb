"""From an address to a device, a port, a GID and a route, on any list of devices."""
