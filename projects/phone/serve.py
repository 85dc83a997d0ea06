"""Measure exported files in a phone's browser, and show their predictions for its photos.

Open the address with a phone in the same network, and accept the certificate. Results are printed,
and written to --out-dir as recordings of benchmarks/latency.py. Ctrl+C ends the server.
"""

import argparse
import asyncio
import hashlib
import ipaddress
import json
import logging
import re
import secrets
import socket
import ssl
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from mimetypes import MimeTypes
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

import pandas as pd
import segno
from contents import Contents, gather
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream, StreamClosedError
from tornado.netutil import bind_sockets
from tornado.web import Application, HTTPError, RequestHandler, stream_request_body

from mmcare.export import load_model, open_exported
from mmcare.files import check_writable, moved_into_place
from mmcare_runtime.text import escape

HEADERS = {
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Embedder-Policy': 'require-corp',  # without these, a page has no threads
    # The runtimes write functions; nothing comes from another host.
    'Content-Security-Policy': "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:",
    'Cache-Control': 'no-store',
}
# Limits: connections of one address and of all, seconds for a request and for its answer, bytes and
# values of a recording, files and bytes of all recordings.
CONNECTIONS_OF_ONE, CONNECTIONS = 64, 512
REQUEST_SECONDS, ANSWER_SECONDS = 20, 300
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 2**22, 2**18, 8
MAX_FILES, MAX_BYTES_OF_ALL = 1000, 100 * 10**6


def write_static(contents: Contents, folder: Path) -> None:
    """Write the page and all that it needs to a folder, for any host."""
    for name in contents.keys() - {''}:
        with moved_into_place(folder / name) as temporary:
            temporary.write_bytes(contents[name]())


def escape_all(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Make all texts of a JSON value printable; raise a ValueError where it is nested deeper."""
    if not depth:
        raise ValueError('too many levels')
    if isinstance(value, dict):
        return {escape(key): escape_all(entry, depth - 1) for key, entry in value.items()}
    if isinstance(value, list):
        return [escape_all(entry, depth - 1) for entry in value]
    return escape(value) if isinstance(value, str) else value


def read_results(body: bytes) -> tuple[str, str, pd.DataFrame] | None:
    """Read a posted recording: a name for it, its JSON and its rows; None if it is malformed."""
    if body.count(b',') > MAX_VALUES:
        return None
    try:
        posted = escape_all(json.loads(body))
        recording, time = posted['recording'], datetime.strptime(posted['time'], '%Y%m%d-%H%M%S')
        engines, rows = recording['milliseconds'], recording['rows']
        times = [ms for files in engines.values() for ms in files.values()]
        good = (
            all(re.fullmatch('[a-z]+-[a-z]+(-float16)?(-int8)?', engine) for engine in engines)
            and all(len(ms) == recording['settings']['runs'] and min(ms) > 0 for ms in times)
            and all({'file', 'engine', 'ms'} <= row.keys() for row in rows)
            # Checked before it becomes a table, which has a cell for each row and key.
            and 0 < len(times) <= len(rows) <= 1000
            and len({key for row in rows for key in row}) <= 20
            and all(len(f'{key}{cell}') <= 1000 for row in rows for key, cell in row.items())
        )
        device = re.sub('[^A-Za-z0-9]+', '-', posted['device'])[:60]
        text = json.dumps(recording, indent=1, allow_nan=False) + '\n'
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    # Results that are sent again after a lost answer get the same name; other results do not.
    name = f'{time:%Y%m%d-%H%M%S}_{device}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.json'
    return (name, text, pd.DataFrame(rows)) if good else None


@stream_request_body  # so that the path is looked at before the body is read
class Handler(RequestHandler):
    """Answer requests whose path begins with the server's token."""

    def initialize(self, server: 'PhoneServer') -> None:
        self.server, self.body = server, bytearray()
        self.token, _, self.name = self.request.path.removeprefix('/').partition('/')

    def set_default_headers(self) -> None:
        for name, value in (HEADERS | {'Server': 'mmcare'}).items():
            self.set_header(name, value)

    def has_token(self) -> bool:
        return secrets.compare_digest(self.token.encode(), self.server.token.encode())

    def prepare(self) -> None:
        """Refuse requests without the token or with an unknown name."""
        if not self.has_token():
            raise HTTPError(404)
        client = self.server.clients.get(self.request.connection.stream)
        if client is not None:  # or it has been closed meanwhile
            client.has_token = True
        if self.request.method == 'POST' and self.name != 'results':
            raise HTTPError(404)

    def data_received(self, chunk: bytes) -> None:
        self.body += chunk

    async def get(self) -> None:
        """Send the content with the requested name."""
        content = self.server.contents.get(unquote(self.name))
        if content is None:
            raise HTTPError(404)
        kind = MimeTypes().guess_type(self.name or 'index.html')[0] or 'application/octet-stream'
        self.set_header('Content-Type', kind)
        connection = self.request.connection
        try:
            await asyncio.wait_for(self.finish(content()), ANSWER_SECONDS)
        except TimeoutError:
            connection.close()
        except StreamClosedError:  # the browser has left
            pass

    def post(self) -> None:
        """Write the results of a measurement, and print them."""
        # If a module cannot be imported, the browser's error names the address, with the token.
        body = bytes(self.body).replace(self.server.token.encode(), b'TOKEN')
        results = read_results(body)
        if results is None:
            return self.answer(400, error='The computer cannot read these results.')
        name, recording, rows = results
        file = self.server.out_dir / name
        try:
            sizes = {path: path.stat().st_size for path in file.parent.glob('*.json')}
            size = sum(sizes.values()) + len(recording)
            if file not in sizes and (len(sizes) >= MAX_FILES or size > MAX_BYTES_OF_ALL):
                raise OSError('there are too many results: move them elsewhere')
            with moved_into_place(file) as temporary:
                temporary.write_text(recording)
        except OSError as error:
            print(f'error: {file} cannot be written: {error}', file=sys.stderr, flush=True)
            return self.answer(507, error='The computer cannot write the results.')
        print(f'{rows.to_string(index=False, na_rep="")}\nWritten to {file}', flush=True)
        self.answer(200, written=name)

    def answer(self, status: int, **content: str) -> None:
        """Send JSON."""
        self.set_status(status)
        self.finish(content)

    def write_error(self, status_code: int, **_: Any) -> None:
        """Send a status alone; 404 without the token, also for unknown methods."""
        self.set_status(status_code if self.has_token() else 404)
        self.finish()

    def compute_etag(self) -> None:
        """Compute no ETag: browsers store nothing."""


class Client:
    """An open connection."""

    def __init__(self, address: str) -> None:
        self.address, self.has_token = address, False


class PhoneServer(HTTPServer):
    """Serve what :func:`contents.gather` collects, at ``url``, which has a random token."""

    def initialize(
        self, contents: Contents, out_dir: Path, host: str, port: int = 0, secure: bool = True
    ) -> None:
        address = socket.gethostbyname(host)
        if address == '0.0.0.0':  # find this computer's address in its network
            with socket.socket(type=socket.SOCK_DGRAM) as probe:
                probe.connect(('192.0.2.1', 9))  # reserved for documentation; nothing is sent
                address = probe.getsockname()[0]
        super().initialize(
            Application([('.*', Handler, dict(server=self))], log_function=lambda _: None),
            ssl_options=certify(address) if secure else None,
            max_header_size=2**14,
            max_body_size=MAX_BYTES,
            idle_connection_timeout=REQUEST_SECONDS,
            body_timeout=REQUEST_SECONDS,
        )
        # The terminal shows results and errors of this program only.
        logging.getLogger('tornado.general').setLevel(logging.CRITICAL)
        self.contents = contents | {'results': lambda: b'{"taken": true}'}  # so the page knows
        self.out_dir, self.token = out_dir, secrets.token_urlsafe(16)
        self.clients: dict[IOStream, Client] = {}
        self.bound = bind_sockets(port, host or address, socket.AF_INET)
        self.server_address = self.bound[0].getsockname()
        scheme = 'https' if secure else 'http'
        self.url = f'{scheme}://{address}:{self.server_address[1]}/{self.token}/'

    def handle_stream(self, stream: IOStream, address: tuple) -> None:
        """Serve a connection; if its address or all clients have too many, close an older one."""
        self.clients = {known: of for known, of in self.clients.items() if not known.closed()}
        self.clients[stream] = Client(address[0])
        siblings = [known for known, of in self.clients.items() if of.address == address[0]]
        for streams, most in ((siblings, CONNECTIONS_OF_ONE), ([*self.clients], CONNECTIONS)):
            if len(streams) > most:  # the oldest of those that have never sent the token
                min(streams, key=lambda known: self.clients[known].has_token).close()
        super().handle_stream(stream, address)

    async def serve_forever(self) -> None:
        """Serve until the task is cancelled."""
        self.add_sockets(self.bound)
        try:
            await asyncio.Event().wait()
        finally:
            self.stop()
            await self.close_all_connections()


def certify(host: str) -> ssl.SSLContext:
    """Make a certificate for an IP address, as Apple's browsers require it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, 'mmcare')])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    about = name, name, key.public_key(), x509.random_serial_number()
    builder = x509.CertificateBuilder(*about, now - timedelta(1), now + timedelta(30))
    purpose = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
    for extension in (address, purpose):
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    hidden = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with TemporaryDirectory() as folder:  # the ssl module reads files only
        file = Path(folder, 'pem')
        file.write_bytes(key.private_bytes(pem, *hidden) + certificate.public_bytes(pem))
        context.load_cert_chain(file)
    return context


def main() -> None:
    """Serve or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add('files', type=Path, nargs='+', metavar='FILE', help='.tflite or .onnx, all of one --shape')
    add('--source', nargs=2, default=(), help='config and checkpoint: compare with PyTorch')
    add('--host', help="address to listen on; default: this computer's in its network")
    add('--port', type=int, default=8443, help='default: %(default)s')
    add('--http', action='store_true', help='serve on localhost without TLS, for a tunnel')
    add('--out-dir', type=Path, default=Path('work_dirs/phone'), metavar='DIR', help='for results')
    add('--static', type=Path, metavar='DIR', help='only write it, for any HTTPS host')
    arguments = parser.parse_args()
    try:
        check_writable(arguments.static or arguments.out_dir)
        part = open_exported(arguments.files[0]).description.get('part', 'backbone')
        model = load_model(*arguments.source, part=part) if arguments.source else None
        contents = gather(arguments.files, model=model)
        if arguments.static:
            write_static(contents, arguments.static)
            return print(f'Written to {arguments.static}. For threads, see README.md.')
        host = arguments.host or ('127.0.0.1' if arguments.http else '')
        server = PhoneServer(contents, arguments.out_dir, host, arguments.port, not arguments.http)
        sys.stdout.reconfigure(errors='replace')  # not all encodings have the code's blocks
        segno.make(server.url).terminal(compact=True)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f'error: {escape(" ".join(str(error).split()))}', file=sys.stderr)
        sys.exit(2)
    print(server.url, flush=True)
    asyncio.run(server.serve_forever())


if __name__ == '__main__':
    with suppress(KeyboardInterrupt):
        main()
