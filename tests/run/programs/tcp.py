"""A program of TCP sockets, two threads. Prints what the server has got, and whether it was by TCP."""

import select
import socket
import threading

from support.run_command import has_tcp_socket

DATA = bytes(range(256)) * 4000


def serve(listener: socket.socket, received: bytearray) -> None:
    connection, _ = listener.accept()
    with connection:
        while part := connection.recv(50_000):
            received += part
        connection.sendall(b"%d bytes" % len(received))


def main() -> None:
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_tcp = has_tcp_socket()
        server = threading.Thread(target=serve, args=(listener, received))
        server.start()
        with socket.create_connection(listener.getsockname(), timeout=30) as client:
            client.sendall(DATA)
            client.shutdown(socket.SHUT_WR)
            assert select.select([client], [], [], 30)[0] == [client]
            with client.makefile("rb") as file:
                print(file.read().decode(), bytes(received) == DATA, "TCP" if is_tcp else "RDMA")
        server.join()


main()
