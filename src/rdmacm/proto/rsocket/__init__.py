"""The protocol of rsocket(7): a stream of bytes on a reliable connection. Sockets are in :mod:`rdmacm.rsocket`."""
