"""Programs that are written for sockets, with rsockets: the standard library's servers and clients, TLS."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import socketserver
import ssl
import threading
import urllib.request
import xmlrpc.client
import xmlrpc.server
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rdmacm import aio, rsocket

DATA = bytes(range(256)) * 4000


# -- socketserver ----------------------------------------------------------------------------------------------


class OverRdma(socketserver.TCPServer):
    """For servers of the standard library, as the first base class: it listens on an rsocket."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, bind_and_activate=False, **options)  # type: ignore[misc]
        self.socket.close()
        self.socket = rsocket.socket(self.address_family)  # type: ignore[assignment]
        self.socket.setblocking(False)  # its descriptor may be readable without a connection
        self.server_bind()
        self.server_activate()


@contextmanager
def served(server: socketserver.TCPServer) -> Iterator[tuple[str, int]]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            host, port = server.server_address[:2]
            yield str(host), int(port)
        finally:
            server.shutdown()
            thread.join()


class _Upper(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line.upper())


class _EchoServer(OverRdma, socketserver.ThreadingTCPServer):
    pass


def test_a_socketserver() -> None:
    with served(_EchoServer(("127.0.0.1", 0), _Upper)) as address:
        clients = [rsocket.create_connection(address) for _ in range(3)]
        for number, client in enumerate(clients):
            with client, client.makefile("rwb") as file:
                file.write(b"line %d\n" % number)
                file.flush()
                assert file.readline() == b"LINE %d\n" % number


# -- http ------------------------------------------------------------------------------------------------------


class _Pages(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(DATA)

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _HttpServer(OverRdma, http.server.ThreadingHTTPServer):
    pass


class RdmaConnection(http.client.HTTPConnection):
    """An HTTP connection over RDMA."""

    def connect(self) -> None:
        self.sock = rsocket.create_connection((self.host, self.port), self.timeout)


class RdmaHandler(urllib.request.HTTPHandler):
    """For urllib's openers."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(RdmaConnection, req)


def test_http_server_and_urllib() -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), RdmaHandler)
    with served(_HttpServer(("127.0.0.1", 0), _Pages)) as (host, port):
        with opener.open(f"http://{host}:{port}/page") as answer:
            assert answer.read() == DATA
        with opener.open(f"http://{host}:{port}/page", DATA, timeout=30) as answer:
            assert answer.read() == DATA


def test_requests_of_one_http_connection() -> None:
    with served(_HttpServer(("127.0.0.1", 0), _Pages)) as address:
        client = RdmaConnection(*address)
        for body in (b"first", b"second"):
            client.request("POST", "/", body)
            assert client.getresponse().read() == body
        client.close()


class _RpcServer(OverRdma, xmlrpc.server.SimpleXMLRPCServer):
    pass


class _RpcTransport(xmlrpc.client.Transport):
    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        self._connection = host, RdmaConnection(host)
        return self._connection[1]


def test_xmlrpc() -> None:
    server = _RpcServer(("127.0.0.1", 0), logRequests=False)
    server.register_function(lambda base, exponent: base**exponent, "power")
    with served(server) as (host, port):
        with xmlrpc.client.ServerProxy(f"http://{host}:{port}", _RpcTransport()) as proxy:
            assert proxy.power(2, 10) == 1024
            assert proxy.power(3, 3) == 27


# -- TLS -------------------------------------------------------------------------------------------------------


def _context(side: int) -> ssl.SSLContext:
    """A context that needs no certificates."""
    context = ssl.SSLContext(side)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")
    return context


class Tls:
    """TLS on a connected rsocket, by the memory BIOs of :mod:`ssl`: wrap_socket() needs the connection's descriptor."""

    def __init__(self, sock: rsocket.socket, context: ssl.SSLContext, *, is_server: bool = False) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, is_server)
        self._call(self._tls.do_handshake)

    def _call(self, work: Any, *arguments: Any) -> Any:
        while True:
            try:
                result = work(*arguments)
            except ssl.SSLWantReadError:
                self._sock.sendall(self._outgoing.read())
                if data := self._sock.recv(1 << 16):
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            else:
                self._sock.sendall(self._outgoing.read())
                return result

    def sendall(self, data: bytes) -> None:
        for start in range(0, len(data), 1 << 14):
            self._call(self._tls.write, data[start : start + (1 << 14)])

    def recv(self, size: int) -> bytes:
        try:
            return bytes(self._call(self._tls.read, size))
        except ssl.SSLZeroReturnError:
            return b""

    def close(self) -> None:
        try:
            self._call(self._tls.unwrap)
        finally:
            self._sock.close()


def test_tls_by_memory_bios() -> None:
    with rsocket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer = Tls(listener.accept()[0], _context(ssl.PROTOCOL_TLS_SERVER), is_server=True)
            while data := peer.recv(1 << 14):
                peer.sendall(data)
            peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        client = Tls(rsocket.create_connection(listener.getsockname()), _context(ssl.PROTOCOL_TLS_CLIENT))
        client.sendall(b"secret")
        assert client.recv(100) == b"secret"
        client.close()
        thread.join()


def test_tls_in_an_event_loop() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"go ahead\n")  # as STARTTLS: what comes before start_tls() is no TLS
        await writer.start_tls(_context(ssl.PROTOCOL_TLS_SERVER))
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def main() -> None:
        async with await aio.start_rsocket_server(echo, "127.0.0.1") as server:
            reader, writer = await aio.open_rsocket_connection("127.0.0.1", server.port)
            assert await reader.readline() == b"go ahead\n"
            await writer.start_tls(_context(ssl.PROTOCOL_TLS_CLIENT))
            assert writer.get_extra_info("cipher")[0] == "AECDH-AES256-SHA"
            writer.write(DATA)
            assert await reader.readexactly(len(DATA)) == DATA
            writer.close()
            await writer.wait_closed()

    asyncio.run(main())
