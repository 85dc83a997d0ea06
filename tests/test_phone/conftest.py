"""Thin networks in files, a server for them, and Chromium as the phone."""

import shutil
from threading import Thread

import pytest
import torch
from toy_configs import make_data, toy_config

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'google-chrome'))), None)
OPTIONS = ['--no-sandbox', '--disable-quic', '--disable-component-update', '--disable-sync',
           '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader']  # fmt: skip


@pytest.fixture(scope='session')
def exported(tmp_path_factory):
    """Export a thin network once: .tflite, .onnx, and the network in PyTorch."""
    pytest.importorskip('litert_torch')
    from mmcare.export import export_backbone, load_source

    folder, done = tmp_path_factory.mktemp('phone'), {}

    def export(task, part='model'):
        if (task, part) not in done:
            data, config = folder / task, folder / f'{task}.py'
            if not data.exists():
                make_data(task, data)
            toy_config(task, data, folder / f'{task}_run').dump(config)
            source = load_source(config, part=part)
            for name, weight in source.network.named_parameters():
                if 'head' in name and weight.dim() > 1:  # as if it were sure of what it sees
                    torch.manual_seed(3)
                    weight.data = torch.randn(weight.shape) * 1.5 / weight[0].numel() ** 0.5
            report = export_backbone(source, folder, (64, 96), ('onnx', 'litert'))
            files = [folder / report[kind]['file'] for kind in ('litert', 'onnx')]
            done[task, part] = [*files, source]
        return done[task, part]

    return export


@pytest.fixture
def serve(tmp_path):
    """Start servers for files; results go to ``out``."""
    from mmcare.phone.files import RUNTIMES, gather
    from mmcare.phone.server import PhoneServer

    if not RUNTIMES.exists():
        pytest.skip('no runtimes: make phone')
    servers = []

    def start(*files, source=None, port=0, secure=False):
        contents = gather(files, source=source)
        servers.append(PhoneServer(contents, tmp_path / 'out', '127.0.0.1', port, secure))
        Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return servers[-1]

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
        yield started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)


@pytest.fixture
def phone(browser):
    """Open a server's page in a new profile of a phone's size; it may ask no other host."""
    page = browser.new_page(viewport=dict(width=390, height=844), ignore_https_errors=True)
    asked, errors = [], []
    page.on('request', lambda request: asked.append(request.url))
    page.on('pageerror', lambda error: errors.append(error))

    def visit(server):
        page.goto(server.url)
        page.wait_for_selector('#measure:enabled')
        return page

    yield visit
    assert all('://127.0.0.1:' in url or url.startswith(('blob:', 'data:')) for url in asked)
    assert asked and not errors
    page.close()
