"""Thin networks in files, a server for them, and Chromium as the phone."""

import shutil
from threading import Thread

import pytest
import torch
from helpers import ROOT
from toy_configs import make_data, toy_config

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'google-chrome'))), None)
OPTIONS = [
    '--no-sandbox',
    '--no-first-run',
    '--disable-quic',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
    '--enable-unsafe-webgpu',
    '--use-webgpu-adapter=swiftshader',
]
RUNTIMES = ROOT / 'mmcare/phone/node_modules'
SHAPE = (64, 96)


@pytest.fixture(scope='session')
def exported(tmp_path_factory):
    """Export a thin network once: files by ending, and the network in PyTorch."""
    pytest.importorskip('litert_torch')
    from mmcare.export import export_backbone, load_source

    folder, done = tmp_path_factory.mktemp('phone'), {}

    def export(task, part='model'):
        if (task, part) not in done:
            if not (folder / task).exists():
                make_data(task, folder / task)
            toy_config(task, folder / task, folder / f'{task}_run').dump(folder / f'{task}.py')
            source = load_source(folder / f'{task}.py', part=part)
            generator = torch.Generator().manual_seed(3)
            for name, weight in source.network.named_parameters():
                if 'head' in name and weight.dim() > 1:  # as if it were sure of what it sees
                    weight.data = torch.randn(weight.shape, generator=generator)
                    weight.data *= 1.5 / weight[0].numel() ** 0.5
            report = export_backbone(source, folder, SHAPE, ('onnx', 'litert'))
            files = [folder / report[kind]['file'] for kind in ('litert', 'onnx')]
            done[task, part] = [*files, source]
        return done[task, part]

    return export


@pytest.fixture
def serve(tmp_path):
    """Start servers for files; results go to ``out``."""
    server_module = pytest.importorskip('mmcare.phone.server')
    if not RUNTIMES.exists():
        pytest.skip('no runtimes: make phone')
    servers = []

    def start(*files, source=None, **options):
        contents = server_module.gather(files, source=source)
        server = server_module.PhoneServer(
            contents, tmp_path / 'out', '127.0.0.1', **{'secure': False, **options}
        )
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope='session')
def browser():
    """Start Debian's Chromium."""
    playwright = pytest.importorskip('playwright.sync_api')
    if CHROMIUM is None:
        pytest.skip('no Chromium: apt-get install chromium')
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield chromium
        chromium.close()


@pytest.fixture
def phone(browser):
    """Open addresses in a new profile of a phone's size; no other host may be asked."""
    context = browser.new_context(viewport=dict(width=390, height=844), ignore_https_errors=True)
    page, asked, errors = context.new_page(), [], []
    page.on('request', lambda request: asked.append(request.url))
    page.on('pageerror', lambda error: errors.append(error))

    def visit(server):
        page.goto(server.url)
        page.wait_for_function("document.querySelector('#status').textContent !== 'loading'")
        return page

    yield visit
    hosts = ('http://127.0.0.1:', 'https://127.0.0.1:', 'blob:', 'data:')
    assert asked and all(url.startswith(hosts) for url in asked) and not errors
    context.close()
