"""Serve exported files with one page, in the local network or as files for any host."""

import datetime
import ipaddress
import json
import re
import secrets
import ssl
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from mmcare.compatibility import require
from mmcare.export.load import Source
from mmcare.export.report import describe_exported
from mmcare.files import moved_into_place

HERE = Path(__file__).parent
RUNTIMES = HERE / 'node_modules'  # where `make phone` puts them
# By ending: the engine's name, its package, and what the page may load of it.
ENGINES = {
    '.tflite': ('litert', '@litertjs', ('*/dist/index.js', 'core/wasm/*')),
    '.onnx': ('onnxruntime', 'onnxruntime-web', ('dist/ort.*.min.mjs', 'dist/ort-wasm*')),
}
TYPES = dict(css='text/css', html='text/html', js='text/javascript', json='application/json',
             mjs='text/javascript', wasm='application/wasm')  # fmt: skip
ISOLATION = {  # without these a page has no threads
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Embedder-Policy': 'require-corp',
}
HEADERS = {
    **ISOLATION,
    # The runtimes write functions; nothing comes from another host.
    'Content-Security-Policy': "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:",
    'Referrer-Policy': 'no-referrer',
    'Cache-Control': 'no-store',
}
SHOWN = ('part', 'decode', 'classes', 'palette')  # of a report, to the page
LARGEST_POST = 2**20  # bytes
UNPRINTABLE = r'\\u00[0189]|\\[bfnrt]|\x7f'  # in JSON: terminals obey some of these
Contents = dict[str, Path | bytes]


def gather(
    paths: Sequence[Path], runtimes: Path = RUNTIMES, source: Source | None = None
) -> Contents:
    """Collect all that the page needs for exported files, by the names that it asks for.

    Raises:
        FileNotFoundError: If a file is missing, or its runtime in the folder ``node_modules``.
        ValueError: If a file cannot be served, or not together with the others.
    """
    contents: Contents = {page.name: page for page in (HERE / 'page').iterdir()}
    contents[''] = contents['index.html']
    files = []
    for path in paths:
        if path.suffix not in ENGINES:
            raise ValueError(f'{path} is neither .tflite nor .onnx, which browsers can run')
        if f'files/{path.name}' in contents:
            raise ValueError(f'two files are called {path.name}: rename one')
        _, package, patterns = ENGINES[path.suffix]
        found = [file for pattern in patterns for file in (runtimes / package).glob(pattern)]
        if not found:
            raise FileNotFoundError(
                f'{runtimes} has no {package}: run `make phone` in a clone, or `npm ci` in a copy '
                f'of {HERE / "package-lock.json"}, and name its node_modules with --runtime'
            )
        contents |= {f'runtime/{file.relative_to(runtimes).as_posix()}': file for file in found}
        file, values = describe(path, source)
        files.append(file)
        contents |= {file['url']: path, file['reference']: values}
    shape, *others = {tuple(file['shape']) for file in files}
    if others:
        raise ValueError(f'images of {[shape, *others]}: export files for one --shape')
    versions = json.loads((HERE / 'package.json').read_text())['dependencies']
    index = dict(shape=shape, versions=versions, static=False, files=files)
    return contents | {'files.json': json.dumps(index).encode()}


def describe(path: Path, source: Source | None) -> tuple[dict[str, Any], bytes]:
    """Describe a file for the page, and give the image and the outputs to compare it on."""
    about = describe_exported(path, source)
    description = dict(
        name=path.name,
        key=about.report.get('key', path.stem),  # of benchmarks/peers.csv
        runtime=ENGINES[path.suffix][0],
        int8=about.int8,
        bytes=path.stat().st_size,
        url=f'files/{path.name}',
        reference=f'references/{path.name}',
        shape=about.shape,
        input=about.input,
        outputs=about.outputs,
        compared=about.expected_from,
        why=about.remark,
        parameters=about.report.get('parameters'),
        report={key: about.report.get(key) for key in SHOWN} if about.report else None,
    )
    return description, b''.join(values.astype('<f4').tobytes() for values in about.values)


def write_static(contents: Contents, folder: Path) -> None:
    """Write the page and all that it needs to a folder, for any host."""
    index = json.loads(bytes(contents['files.json'])) | dict(static=True)
    for name, content in {**contents, 'files.json': json.dumps(index).encode()}.items():
        if name:
            with moved_into_place(folder / name) as temporary:
                data = content.read_bytes() if isinstance(content, Path) else content
                temporary.write_bytes(data)


def read_results(body: bytes, index: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read what the page posts: a name for a file, and a recording as benchmarks/latency.py's.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        posted = json.loads(body)
        recording, keys = posted['recording'], {file['key'] for file in index['files']}
        settings, engines = recording['settings'], recording['milliseconds']
        times = [pair for engine in engines.values() for pair in engine.items()]
        name = f'{posted["time"]}_{re.sub("[^A-Za-z0-9]+", "-", posted["device"])[:60].strip("-")}'
        pd.DataFrame(recording['rows'])[['file', 'engine', 'ms']]  # to be printed
        if not (
            times
            and settings['shape'] == index['shape']
            and all(
                len(ms) == settings['runs'] and min(ms) > 0 and key in keys for key, ms in times
            )
            and all(re.fullmatch('[a-z]+-[a-z]+(-int8)?', engine) for engine in engines)
            and re.fullmatch(r'\d{8}-\d{6}', posted['time'])
            and not re.search(UNPRINTABLE, json.dumps(posted, allow_nan=False))
        ):
            raise ValueError('other values')
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError('These are not results of this page.') from error
    return name, recording


class Handler(BaseHTTPRequestHandler):
    """Answer below the server's token: what it contains, and the results."""

    server: 'PhoneServer'
    timeout, server_version, sys_version = 60, 'mmcare', ''

    def parse_request(self) -> bool:
        """Refuse all that lacks the token, before any method is looked at."""
        if not super().parse_request():
            return False
        token, _, self.name = self.path.split('?')[0].removeprefix('/').partition('/')
        if secrets.compare_digest(token.encode(), self.server.token.encode()):
            return True
        self.answer(404)
        return False

    def answer(self, status: int, content: Path | bytes = b'', kind: str = 'text/plain') -> None:
        """Send bytes or a file."""
        data = content if isinstance(content, bytes) else content.read_bytes()
        self.send_response(status)
        described = {'Content-Type': kind, 'Content-Length': str(len(data))}
        for name, value in (HEADERS | described).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(data)

    def do_GET(self) -> None:
        """Send what the page asks for, by its name."""
        content = self.server.contents.get(self.name)
        kind = TYPES.get((self.name or '.html').rpartition('.')[2], 'application/octet-stream')
        self.answer(404) if content is None else self.answer(200, content, kind)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Write the results of a measurement, and print them."""
        size = self.headers.get('Content-Length', '')
        body = self.rfile.read(int(size) if re.fullmatch('[0-9]{1,8}', size) else 0)
        if len(body) > LARGEST_POST or self.name != 'results':
            return self.answer(404 if self.name != 'results' else 413, b'These are too long.')
        try:
            name, recording = read_results(body, self.server.index)
        except ValueError as error:
            return self.answer(400, str(error).encode())
        with moved_into_place(self.server.out / f'{name}.json') as temporary:
            temporary.write_text(json.dumps(recording, indent=1) + '\n', encoding='utf-8')
        table = pd.DataFrame(recording['rows']).to_string(index=False, na_rep='')
        print(f'{table}\nWritten to {self.server.out / name}.json', flush=True)
        self.answer(200, b'')

    def log_message(self, *_: Any) -> None:
        """Stay silent: the terminal shows the results."""


class PhoneServer(ThreadingTCPServer):
    """Serve what :func:`gather` collects at ``url``, whose token is random unless it is given."""

    daemon_threads = allow_reuse_address = True

    def __init__(
        self, contents: Contents, out: Path, host: str, port: int = 0, secure: bool = True,
        token: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__((host, port), Handler)
        self.contents, self.out, self.token = contents, out, token or secrets.token_urlsafe(16)
        self.index = json.loads(bytes(contents['files.json']))
        if secure:  # threads shake hands, so that nobody holds up the others
            wrap = partial(certify(str(self.server_address[0])).wrap_socket, server_side=True)
            self.socket = wrap(self.socket, do_handshake_on_connect=False)
        self.url = f'http{"s" * secure}://{host}:{self.server_address[1]}/{self.token}/'

    def handle_error(self, *_: Any) -> None:
        """Stay silent where a browser leaves, or refuses the certificate."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*_)


def certify(host: str) -> ssl.SSLContext:
    """Make a certificate for an IP address."""
    x509 = require('cryptography.x509', 'HTTPS', 'phone')
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, 'mmcare')])
    address, day = x509.IPAddress(ipaddress.ip_address(host)), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 30 * day)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    hidden = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with TemporaryDirectory() as folder:  # the ssl module reads files only
        file = Path(folder, 'pem')
        file.write_bytes(key.private_bytes(pem, *hidden) + certificate.public_bytes(pem))
        context.load_cert_chain(file)
    return context
