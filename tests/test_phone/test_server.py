"""The server without a browser: what it gives away, and what it takes."""

import http.client
import json
import socket
import ssl
import sys
from threading import Thread

import pytest
from helpers import ROOT, run

from mmcare.export import export_backbone
from mmcare.phone import server as module

INDEX = dict(shape=[64, 96], static=False, files=[dict(name='a.onnx', key='a')])


@pytest.fixture(params=[False, True], ids=['http', 'https'])
def ask(request, tmp_path):
    """Ask a server that has a page and no files."""
    contents = {'': b'the page', 'a.js': b'code', 'files.json': json.dumps(INDEX).encode()}
    server = module.PhoneServer(contents, tmp_path / 'out', '127.0.0.1', secure=request.param)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    host, port = server.server_address

    def send(method, path, body=None, token=server.token):
        context = ssl._create_unverified_context()
        kind = http.client.HTTPSConnection if request.param else http.client.HTTPConnection
        connection = kind(host, port, timeout=30, **dict(context=context) if request.param else {})
        connection.putrequest(method, f'/{token}{path}' if token else path)
        if body is not None:
            connection.putheader('Content-Length', str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    send.address = host, port
    yield send
    server.shutdown()
    server.server_close()


def results(**changes):
    """Write results as the page posts them."""
    rows = [dict(file='a.onnx', engine='onnxruntime-wasm', ms=2.0)]
    recording = dict(
        settings=dict(shape=[64, 96], runs=3),
        milliseconds={'onnxruntime-wasm': dict(a=[1, 2, 3])},
        rows=rows,
    )
    posted = dict(time='20260102-030405', device='Phone/../7', recording=recording | changes)
    return json.dumps(posted).encode()


def test_only_named_things_and_only_with_the_token(ask):
    status, body, headers = ask('GET', '/')
    assert (status, body, headers['Content-Type']) == (200, b'the page', 'text/html')
    assert headers['Cross-Origin-Opener-Policy'] == 'same-origin'
    assert headers['Cross-Origin-Embedder-Policy'] == 'require-corp'
    assert ask('GET', '/a.js?x')[1] == b'code' and ask('HEAD', '/a.js')[:2] == (200, b'')
    for path in ('/../a.js', '/%2e%2e/a.js', '//a.js', '/./a.js', '//etc/passwd', '/a%2ejs', '/b'):
        assert ask('GET', path)[:2] == (404, b''), path
    for token in ('', 'wrong', '%ff', '..'):
        for method in ('GET', 'POST', 'PUT', 'DELETE', 'ODD'):
            assert ask(method, '/' if token else '/a.js', token=token)[0] == 404
    assert ask('PUT', '/a.js')[0] == 501 and ask('POST', '/a.js', b'{}')[0] == 404
    with socket.create_connection(ask.address) as stalled:  # holds up nobody
        stalled.sendall(b'\x00nonsense')
        assert ask('GET', '/')[0] == 200


def test_results_are_written_and_nonsense_is_not(ask, tmp_path, capfd):
    engine = {'onnxruntime-wasm': dict(a=[1, 2, 3])}
    for body in (
        b'', b'{}', b'[1]', b'\xff', b'[' * 100_000, b'null', b'{"recording": 1}',
        results(settings=dict(shape=[64, 64], runs=3)),
        results(settings=dict(shape=[64, 96], runs=4)),
        results(milliseconds={}),
        results(milliseconds={'../../up': dict(a=[1, 2, 3])}),
        results(milliseconds={'onnxruntime-wasm': dict(b=[1, 2, 3])}),
        results(milliseconds={'onnxruntime-wasm': dict(a=[1, 2, 'x'])}),
        results(milliseconds={'onnxruntime-wasm': dict(a=[1, -2, 3])}),
        results(rows=3), results(rows=[]),
        results(rows=[dict(file='a\x1b[2J', engine='b', ms=1)]),
        results(milliseconds=engine).replace(b'20260102', b'../../up'),
        results().replace(b'[1, 2, 3]', b'[1, NaN, 3]'),
        results().replace(b'[1, 2, 3]', b'[1, 1e999, 3]'),
    ):  # fmt: skip
        assert ask('POST', '/results', body)[:2] == (400, b'These are not results of this page.')
    assert ask('POST', '/results', b'[' + b' ' * 10 * 2**20 + b']')[0] == 413
    assert not (tmp_path / 'out').exists()
    assert ask('POST', '/results', results())[:2] == (200, b'')
    assert ask('POST', '/results', results())[0] == 200  # once more, as after a lost answer
    (file,) = (tmp_path / 'out').iterdir()
    assert file.name == '20260102-030405_Phone-7.json'
    assert json.loads(file.read_text())['milliseconds'] == engine
    assert 'a.onnx onnxruntime-wasm' in capfd.readouterr().out


def test_bad_input_is_one_sentence(exported, tmp_path):
    """And ends the tool with status 2."""
    (_, onnx, source), tool = exported('retinanet', 'backbone'), ROOT / 'tools/phone.py'
    other, damaged, wrong = (tmp_path / name for name in ('a.pte', 'damaged.onnx', 'wrong.onnx'))
    other.touch()
    damaged.touch()
    small = tmp_path / export_backbone(source, tmp_path, (32, 64), ('onnx',))['onnx']['file']
    report = small.with_suffix('.json').read_text().replace(small.name, wrong.name)
    wrong.with_suffix('.json').write_text(report)
    wrong.write_bytes(onnx.read_bytes())
    runtimes = tmp_path / 'node_modules'
    (runtimes / 'onnxruntime-web/dist').mkdir(parents=True)
    (runtimes / 'onnxruntime-web/dist/ort.wasm.min.mjs').touch()
    for names, error in (
        ([other], 'is neither .tflite nor .onnx'),
        ([tmp_path / 'none.onnx'], 'does not exist'),
        ([onnx, onnx], 'two files are called'),
        ([onnx, small], 'one --shape'),
        ([wrong], 'not what its report says'),
        ([damaged], 'damaged.onnx cannot be opened'),
    ):
        with pytest.raises((OSError, ValueError), match=error):
            module.gather(names, runtimes)
    with pytest.raises(FileNotFoundError, match='make phone'):
        module.gather([onnx], tmp_path)
    folder = tmp_path / 'static'
    run(sys.executable, tool, onnx, '--runtime', runtimes, '--static', folder)
    assert json.loads((folder / 'files.json').read_text())['static']
    assert (folder / 'files' / onnx.name).read_bytes() == onnx.read_bytes()
    assert (folder / 'runtime/onnxruntime-web/dist/ort.wasm.min.mjs').exists()
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        done = run(sys.executable, tool, onnx, '--http', '--port', port, '--runtime', runtimes,
                   check=False)  # fmt: skip
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith('error: [Errno')
