"""Measure exported files in a phone's browser, and show what they see in its photos.

Open the address with a phone in the same network, and accept the certificate, made on the spot.
Results are printed, and written to --out as benchmarks/latency.py's recordings. Ctrl+C ends.
"""

import argparse
import io
import sys
from contextlib import suppress
from pathlib import Path

try:
    from mmcare.compatibility import require
    from mmcare.export import load_source
    from mmcare.export.runtime import open_exported
    from mmcare.files import check_writable
    from mmcare.phone.files import RUNTIMES, gather
    from mmcare.phone.server import PhoneServer, write_static
except ImportError as error:  # an older Python or PyTorch, or no pandas
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Serve, or write, the page."""
    add = (parser := argparse.ArgumentParser(description=__doc__)).add_argument
    add('files', type=Path, nargs='+', metavar='FILE', help='.tflite or .onnx, of one --shape')
    add('--source', nargs='+', default=[], help='config, checkpoint: compare with PyTorch')
    add('--host', help="address to listen on; default: this computer's in its network")
    add('--port', type=int, default=8443, help='default: %(default)s')
    add('--http', action='store_true', help='no TLS, and localhost: for a tunnel')
    add('--out', type=Path, default=Path('work_dirs/phone'), metavar='DIR', help='for results')
    add('--static', type=Path, metavar='DIR', help='serve nothing; write it for any HTTPS host')
    add('--runtime', type=Path, default=RUNTIMES, metavar='DIR', help='another node_modules')
    arguments = parser.parse_args()
    try:
        check_writable(arguments.static or arguments.out)
        part = open_exported(arguments.files[0]).description.get('part', 'backbone')
        source = load_source(*arguments.source, part=part) if arguments.source else None
        contents = gather(arguments.files, arguments.runtime, source)
        if arguments.static:
            write_static(contents, arguments.static)
            return print(f'Written to {arguments.static}. For threads, see docs/phone.md.')
        host = arguments.host or '127.0.0.1' * arguments.http
        server = PhoneServer(contents, arguments.out, host, arguments.port, not arguments.http)
        code = io.StringIO()
        require('segno', 'the QR code', 'phone').make(server.url).terminal(code, compact=True)
    except (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        sys.exit(2)
    with suppress(UnicodeEncodeError):  # its blocks are not in all encodings
        print(code.getvalue(), end='')
    sys.stdout.reconfigure(errors='backslashreplace')  # names of devices and files
    print(server.url, flush=True)
    server.serve_forever()


if __name__ == '__main__':
    with suppress(KeyboardInterrupt):
        main()
