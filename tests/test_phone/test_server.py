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
from mmcare.phone.files import gather
from mmcare.phone.server import PhoneServer

INDEX = dict(shape=[64, 96], files=[dict(name='a.onnx', key='a')])
ENGINE = {'onnxruntime-wasm': dict(a=[1, 2, 3])}


@pytest.fixture(params=[False, True], ids=['http', 'https'])
def ask(request, tmp_path):
    """Ask a server that has a page and no files."""
    contents = {'': b'the page', 'a.js': b'code', 'files.json': json.dumps(INDEX).encode()}
    server = PhoneServer(contents, tmp_path / 'out', '127.0.0.1', secure=request.param)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def send(method, path, body=b'', token=f'/{server.token}'):
        connection = http.client.HTTPConnection(*server.server_address, timeout=30)
        if request.param:
            trust = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(*server.server_address, context=trust)
        connection.putrequest(method, token + path)
        connection.putheader('Content-Length', str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    send.address = server.server_address
    yield send
    server.shutdown()
    server.server_close()


def results(**changes):
    """Write results as the page posts them."""
    recording = dict(settings=dict(shape=[64, 96], runs=3), milliseconds=ENGINE)
    recording['rows'] = [dict(file='a.onnx', engine='onnxruntime-wasm', ms=2.0)]
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
    for token in ('', '/', '/wrong', '/%ff', '/..'):
        for method in ('GET', 'POST', 'PUT', 'DELETE', 'ODD'):
            assert ask(method, '/a.js', token=token)[0] == 404
    assert ask('PUT', '/a.js')[0] == 501 and ask('POST', '/a.js', b'{}')[0] == 404
    with socket.create_connection(ask.address) as stalled:  # holds up nobody
        stalled.sendall(b'\x00nonsense')
        assert ask('GET', '/')[0] == 200


def test_results_are_written_and_nonsense_is_not(ask, tmp_path, capfd):
    for body in (
        b'', b'{}', b'[1]', b'\xff', b'[' * 100_000, b'null', b'{"recording": 1}',
        results(settings=dict(shape=[64, 64], runs=3)),
        results(settings=dict(shape=[64, 96], runs=4)),
        results(milliseconds={}), results(rows=3), results(rows=[]),
        results(milliseconds={'../../up': dict(a=[1, 2, 3])}),
        results(milliseconds={'onnxruntime-wasm': dict(b=[1, 2, 3])}),
        results(milliseconds={'onnxruntime-wasm': dict(a=[1, 2, 'x'])}),
        results(milliseconds={'onnxruntime-wasm': dict(a=[1, -2, 3])}),
        results(rows=[dict(file='a\x1b[2J', engine='b', ms=1)]),
        results().replace(b'20260102', b'../../up'),
        results().replace(b'[1, 2, 3]', b'[1, NaN, 3]'),
        results().replace(b'[1, 2, 3]', b'[1, 1e999, 3]'),
    ):  # fmt: skip
        assert ask('POST', '/results', body)[:2] == (400, b'These are not results of this page.')
    assert ask('POST', '/results', b' ' * 10 * 2**20)[0] == 413
    assert not (tmp_path / 'out').exists()
    for _ in range(2):  # once more, as after a lost answer
        assert ask('POST', '/results', results())[:2] == (200, b'')
    (file,) = (tmp_path / 'out').iterdir()
    assert file.name == '20260102-030405_Phone-7.json'
    assert json.loads(file.read_text())['milliseconds'] == ENGINE
    assert 'a.onnx onnxruntime-wasm' in capfd.readouterr().out


def test_bad_input_is_one_sentence(exported, tmp_path):
    """And ends the tool with status 2."""
    _, onnx, source = exported('retinanet', 'backbone')
    other, damaged = tmp_path / 'a.pte', tmp_path / 'b.onnx'
    other.touch()
    damaged.touch()
    small = tmp_path / export_backbone(source, tmp_path, (32, 64), ('onnx',))['onnx']['file']
    runtimes, folder = tmp_path / 'node_modules', tmp_path / 'static'
    with pytest.raises(FileNotFoundError, match='make phone'):
        gather([onnx], runtimes)
    (runtimes / 'onnxruntime-web/dist').mkdir(parents=True)
    (runtimes / 'onnxruntime-web/dist/ort.wasm.min.mjs').touch()
    bad = {'is neither': [other], 'does not exist': [tmp_path / 'c.onnx'], 'cannot be': [damaged]}
    for error, files in {**bad, 'are called': [onnx, onnx], 'one --shape': [onnx, small]}.items():
        with pytest.raises((OSError, ValueError), match=error):
            gather(files, runtimes)
    tool = sys.executable, ROOT / 'tools/phone.py', onnx, '--runtime', runtimes
    run(*tool, '--static', folder)
    assert json.loads((folder / 'files.json').read_text())['static']
    assert (folder / 'files' / onnx.name).read_bytes() == onnx.read_bytes()
    assert (folder / 'runtime/onnxruntime-web/dist/ort.wasm.min.mjs').exists()
    with socket.create_server(('127.0.0.1', 0)) as taken:
        done = run(*tool, '--http', '--port', taken.getsockname()[1], check=False)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith('error: [Errno')
