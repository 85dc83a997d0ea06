"""Measure exported files in a phone's browser, and show their predictions for its photos.

Open the address with a phone in the same network, and accept the certificate. Results are printed,
and written to --out-dir as recordings of benchmarks/latency.py. Ctrl+C ends the server.
"""

import argparse
import ipaddress
import json
import re
import secrets
import socket
import ssl
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from mimetypes import MimeTypes
from pathlib import Path
from socketserver import ThreadingTCPServer
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote

import pandas as pd
import segno
from contents import Contents, gather
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mmcare.export import load_source
from mmcare.export.backends import open_exported
from mmcare.files import check_writable, moved_into_place

HEADERS = {
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Embedder-Policy': 'require-corp',  # without these, a page has no threads
    # The runtimes write functions; nothing comes from another host.
    'Content-Security-Policy': "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:",
    'Cache-Control': 'no-store',
}
UNPRINTABLE = re.compile(r'\\u00[0189]|\\[bfnrt]|\x7f')  # as JSON has it; terminals obey it


def write_static(contents: Contents, folder: Path) -> None:
    """Write the page and all that it needs to a folder, for any host."""
    for name in contents.keys() - {''}:
        with moved_into_place(folder / name) as temporary:
            temporary.write_bytes(contents[name]())


def read_results(body: bytes) -> tuple[str, str, pd.DataFrame] | None:
    """Read a posted recording: a name for it, its JSON and its rows; None if it is malformed."""
    try:
        posted = json.loads(body)
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
            and not UNPRINTABLE.search(json.dumps(posted, allow_nan=False))
        )
        name = f'{time:%Y%m%d-%H%M%S}_{re.sub("[^A-Za-z0-9]+", "-", posted["device"])[:60]}'
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    return (name, json.dumps(recording, indent=1), pd.DataFrame(rows)) if good else None


class Handler(BaseHTTPRequestHandler):
    """Answer requests whose path begins with the server's token."""

    server: 'PhoneServer'
    timeout, server_version, sys_version = 60, 'mmcare', ''

    def parse_request(self) -> bool:
        """Refuse every request without the token, whatever its method."""
        if not super().parse_request():
            return False
        token, _, self.name = self.path.split('?')[0].removeprefix('/').partition('/')
        if secrets.compare_digest(token.encode(), self.server.token.encode()):
            return True
        self.answer(404)
        return False

    def answer(self, status: int, data: bytes = b'', kind: str = 'application/json') -> None:
        """Send bytes."""
        self.send_response(status)
        described = {'Content-Type': kind, 'Content-Length': str(len(data))}
        for name, value in (HEADERS | described).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Send the content of a name."""
        content = self.server.contents.get(unquote(self.name))
        kind = MimeTypes().guess_type(self.name or 'index.html')[0] or 'application/octet-stream'
        self.answer(404) if content is None else self.answer(200, content(), kind)

    def do_POST(self) -> None:
        """Write the results of a measurement, and print them."""
        size = self.headers.get('Content-Length', '')
        body = self.rfile.read(int(size) if re.fullmatch('[0-9]{1,8}', size) else 0)
        if self.name != 'results':
            return self.answer(404)
        if len(body) > 2**22 or not (results := read_results(body)):
            return self.answer(400, b'{"error": "The computer cannot read these results."}')
        name, recording, rows = results
        file = self.server.out_dir / f'{name}.json'
        try:
            with moved_into_place(file) as temporary:
                temporary.write_text(recording + '\n')
        except OSError as error:
            print(f'error: {file} cannot be written: {error}', file=sys.stderr, flush=True)
            return self.answer(507, b'{"error": "The computer cannot write the results."}')
        print(f'{rows.to_string(index=False, na_rep="")}\nWritten to {file}', flush=True)
        self.answer(200, json.dumps({'written': file.name}).encode())

    def log_message(self, *_: Any) -> None:
        """Stay silent: the terminal shows results only."""


class PhoneServer(ThreadingTCPServer):
    """Serve what :func:`contents.gather` collects, at ``url``, which has a random token."""

    daemon_threads = allow_reuse_address = True

    def __init__(
        self, contents: Contents, out_dir: Path, host: str, port: int = 0, secure: bool = True
    ) -> None:
        address = socket.gethostbyname(host)
        if address == '0.0.0.0':  # find this computer's address in its network
            with socket.socket(type=socket.SOCK_DGRAM) as probe:
                probe.connect(('192.0.2.1', 9))  # reserved for documentation; nothing is sent
                address = probe.getsockname()[0]
        super().__init__((host or address, port), Handler)
        self.contents = contents | {'results': lambda: b'{"taken": true}'}  # so the page knows
        self.out_dir, self.token = out_dir, secrets.token_urlsafe(16)
        if secure:  # handshakes in the threads, so that no client holds up the others
            context = certify(address)
            self.socket = context.wrap_socket(self.socket, True, do_handshake_on_connect=False)
        scheme = 'https' if secure else 'http'
        self.url = f'{scheme}://{address}:{self.server_address[1]}/{self.token}/'

    def handle_error(self, *client: Any) -> None:
        """Stay silent if a browser leaves or refuses the certificate."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*client)


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
    add('files', type=Path, nargs='+', metavar='FILE', help='.tflite or .onnx, of one --shape')
    add('--source', nargs=2, default=(), help='config and checkpoint: compare with PyTorch')
    add('--host', help="address to listen on; default: this computer's in its network")
    add('--port', type=int, default=8443, help='default: %(default)s')
    add('--http', action='store_true', help='no TLS, and localhost: for a tunnel')
    add('--out-dir', type=Path, default=Path('work_dirs/phone'), metavar='DIR', help='for results')
    add('--static', type=Path, metavar='DIR', help='serve nothing; write it for any HTTPS host')
    arguments = parser.parse_args()
    try:
        check_writable(arguments.static or arguments.out_dir)
        part = open_exported(arguments.files[0]).description.get('part', 'backbone')
        source = load_source(*arguments.source, part=part) if arguments.source else None
        contents = gather(arguments.files, source=source)
        if arguments.static:
            write_static(contents, arguments.static)
            return print(f'Written to {arguments.static}. For threads, see README.md.')
        host = arguments.host or ('127.0.0.1' if arguments.http else '')
        server = PhoneServer(contents, arguments.out_dir, host, arguments.port, not arguments.http)
        sys.stdout.reconfigure(errors='replace')  # not all encodings have the code's blocks
        segno.make(server.url).terminal(compact=True)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        sys.exit(2)
    print(server.url, flush=True)
    server.serve_forever()


if __name__ == '__main__':
    with suppress(KeyboardInterrupt):
        main()
