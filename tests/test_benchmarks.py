"""The benchmarks: what is fused, run, counted and written. No time is asserted."""

import json
import sys

import pandas as pd
import pytest
import torch
from helpers import ROOT, thin_backbone
from torch import nn

sys.path.insert(0, str(ROOT / 'benchmarks'))  # where scripts find each other

import accuracy
import counts
import latency
import operators
import tables
import training

from mmcare.export import export_model, open_exported
from mmcare.export.loading import IMAGENET, LoadedModel
from mmcare.export.tasks import make_task
from mmcare.models.deployment import BackboneInfo


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr('mmcare.analysis.timing.SECONDS', 1e-9)
    monkeypatch.setattr(latency, 'CARE', lambda arch: thin_backbone())
    monkeypatch.setattr(training, 'CARE', lambda arch, **options: thin_backbone(**options))
    yield
    torch.set_flush_denormal(False)


def call(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', [script.__file__, *map(str, arguments)])
    script.main()


@pytest.mark.parametrize('name', ['mobilenetv2_035', 'cpubone_nano'])
@torch.no_grad()
def test_fused_peers_compute_the_same(name):
    """With norms that have activations, shortcuts, and attention that fx cannot trace."""
    timm = pytest.importorskip('timm')
    network = latency.FourMaps(timm.create_model(name, features_only=True))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.bias, std=0.1)
    image = torch.randn(1, 3, 64, 96)
    expected = network.eval()(image)
    fused = latency.fuse_norms(network)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    torch.testing.assert_close(fused(image), expected, rtol=1e-4, atol=1e-4)
    assert [output.shape[2] for output in expected] == [64 // stride for stride in latency.STRIDES]


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 4, 4, stride) for stride in latency.STRIDES)

    def forward(self, image):
        return tuple(conv(image) for conv in self.convs)


@pytest.mark.conversion
def test_a_run_and_what_it_leaves(tmp_path, monkeypatch, capsys):
    info = BackboneInfo('tiny', output_names=latency.OUTPUT_NAMES)
    networks = dict(s0=make_task(Tiny(), info=info))
    monkeypatch.setattr(latency, 'build', lambda key, shape: networks[key])
    arguments = '--archs', 's0', 's1', '--peers', '--shape', 64, 64, '--rounds', 2
    call(latency, monkeypatch, *arguments, '--out-dir', tmp_path / 'out', '--keep', tmp_path)
    recording = json.loads((tmp_path / 'out/recording.json').read_text())
    assert list(recording['milliseconds']) == list(latency.ENGINES)
    for times in recording['milliseconds'].values():
        assert list(times) == ['s0'] and len(times['s0']) == 2 and min(times['s0']) > 0
    reasons = {f'CARE-S1, {engine}': "KeyError: 's1'" for engine in latency.ENGINES}
    assert recording['left_out'] == reasons
    assert recording['delegates'] == {engine: dict(s0=1) for engine in [*latency.ENGINES][1:]}
    assert "Left out: CARE-S1, xnnpack: KeyError: 's1'." in capsys.readouterr().out
    assert recording['parameters'] == dict(s0=4 * (3 * 4 * 16 + 4))
    for name in ('s0_64x64.tflite', 's0_64x64.onnx'):  # for projects/phone
        about = open_exported(tmp_path / name).description
        assert (about['key'], about['parameters'], about['shape']) == ('s0', 784, [64, 64])
        assert about['inputs'][0]['mean'] == [*IMAGENET.mean] and len(about['outputs']) == 4
    # An interrupted run goes on with the files that are there.
    monkeypatch.setattr(latency, 'export_model', None)
    call(latency, monkeypatch, *arguments, '--out-dir', tmp_path / 'on', '--keep', tmp_path)
    resumed = json.loads((tmp_path / 'on/recording.json').read_text())
    assert resumed['delegates'] == recording['delegates']
    # Everything else can be made again from the recording.
    again, recorded = tmp_path / 'again', tmp_path / 'out/recording.json'
    call(latency, monkeypatch, '--from-recording', recorded, '--out-dir', again)
    for path in again.iterdir():
        assert path.read_bytes() == (tmp_path / 'out' / path.name).read_bytes()


def test_each_peer_has_a_source():
    assert latency.PEERS['link'].str.startswith('https://').all()


@pytest.mark.conversion
def test_shares_of_operators_and_stages(tmp_path, monkeypatch, capsys):
    source = LoadedModel('thin', 'random', make_task(thin_backbone()), IMAGENET)
    report = export_model(source, tmp_path, (64, 64), ('onnx', 'executorch'))
    files = tmp_path / 'thin_64x64.onnx', tmp_path / 'thin_64x64.pte'
    call(operators, monkeypatch, *files, '--rounds', 3, '--out-dir', tmp_path / 'out')
    table = pd.read_csv(tmp_path / 'out/operators.csv')
    assert table['ms'].sum() > 0 and len(list((tmp_path / 'out').iterdir())) == 3
    for file, engine in zip(files, ('onnx', 'executorch'), strict=True):
        rows = table[table['file'] == str(file)]
        convolutions = rows[rows['kind'].str.match(operators.CONVOLUTION)]
        found = convolutions.groupby('stage', sort=False)['number'].sum()
        assert [*map(list, found.items())] == report[engine]['convolutions']
        assert list(found.index) == ['stem', *(f'stages.{index}' for index in range(4))]
    report['onnx']['convolutions'][0] = ['stem', 2]
    (tmp_path / 'thin_64x64.onnx.json').write_text(json.dumps(report['onnx']))
    with pytest.raises(SystemExit, match='convolutions were run, the report has'):
        call(operators, monkeypatch, files[0], '--out-dir', tmp_path / 'other')


def test_bytes_that_are_kept_are_counted_once():
    """By hand: a convolution keeps its input, GELU its own, a product both factors."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, image):
            features = nn.functional.gelu(self.conv(image))
            return (features * features[:1],)

    kept = 3 + 4 + 4  # image, before GELU, after GELU: channels of 2 x 64 positions
    assert training.bytes_kept(Network(), torch.rand(2, 3, 8, 8), 'float32') == kept * 2 * 64 * 4


def test_time_of_operators():
    """By the profiler; tests/test_cuda.py measures on a GPU."""
    network = nn.Conv2d(8, 32, 3)
    assert training.busy(lambda: network(torch.rand(4, 8, 64, 64)), 'cpu') > 0
    assert training.busy(lambda: None, 'cpu') == 0


def test_kernels_of_a_step(tmp_path, monkeypatch):
    """By hand: convolution and ReLU, mean, stack and sum; 4 kernels of gradients."""

    class Network(nn.Sequential):
        def forward(self, images):
            return (super().forward(images),)

    network = Network(nn.Conv2d(3, 8, 1), nn.ReLU())
    assert counts.count(network, torch.zeros(2, 3, 8, 8), 'float32')[0] == 5 + 4
    assert network[0].weight.grad is None
    call(counts, monkeypatch, 's0', '--shape', 64, 64, '--out-dir', tmp_path)
    table = pd.read_csv(tmp_path / 'counts.csv').set_index('precision')
    assert table['kernels']['bfloat16'] > table['kernels']['float32']  # casts
    assert table['GB']['bfloat16'] < table['GB']['float32']


def test_training_steps_side_by_side(tmp_path, monkeypatch):
    call(training, monkeypatch, 's0', '--shape', 64, 64, '--rounds', 2, '--out-dir', tmp_path)
    table = pd.read_csv(tmp_path / 'training.csv').set_index('option')
    assert list(table.index) == list(training.OPTIONS)
    assert (table['ms'] > 0).all() and table['time']['plain'] == table['memory']['plain'] == 1
    assert table['memory']['with_cp'] < 0.3 and table['memory']['activations'] < 0.7
    assert 'activations' in (tmp_path / 'training.md').read_text()
    options = '--inference', '--options', 'plain', '--rounds', 1, '--out-dir', tmp_path
    call(training, monkeypatch, 's0', '--shape', 64, 64, *options)
    (inference,) = pd.read_csv(tmp_path / 'training.csv')['ms']
    assert inference > 0


def test_the_named_care_is_trained():
    config = accuracy.read_config('camvid', 's2', '1e-3')
    model = config.model
    assert (model.backbone.arch, model.neck.in_channels) == ('s2', [32, 64, 192, 1536])
    assert config.optim_wrapper.optimizer.lr == 1e-3


def recorded(*runs):
    """Scalars of runs, each with a key, a rate, a seed, a last validation, and a test if any."""
    rows = []
    for key, rate, seed, val, *test in runs:
        about = dict(key=key, rate=rate, seed=seed)
        steps = enumerate([99, val, *test])
        places = 'val', 'val', 'test'
        rows += [dict(about, split=places[step], step=step, mIoU=mIoU) for step, mIoU in steps]
    return pd.DataFrame(rows)


def test_rates_are_chosen_by_the_last_validation_of_common_seeds():
    """Neither the test, nor an earlier validation, nor a seed of one rate alone decides."""
    runs = recorded(
        ('s0', '3e-3', 0, 40, 10), ('s0', '1e-3', 0, 30, 90), ('s0', '1e-3', 1, 80, 90),
        ('resnet18', '3e-3', 0, 20, 90), ('resnet18', '1e-3', 0, 21, 10),
    )  # fmt: skip
    assert accuracy.choose_rates('camvid', runs) == dict(s0='3e-3', resnet18='1e-3')


def test_intervals():
    """t of 2 degrees of freedom is 4.303: 1 * 4.303 / sqrt(3), and sqrt(2 / 3) * 2.776 for 4."""
    ours, others = pd.Series([1.0, 2, 3]), pd.Series([2.0, 3, 4])
    assert accuracy.describe(ours) == '2.0 ± 2.5'
    assert accuracy.describe(ours[:2]) == '1.0, 2.0'
    assert accuracy.difference(ours, others) == '+1.0 ± 2.3'
    assert accuracy.difference(ours, others[:1]) == 'one seed'


def test_fresh_test_pictures_are_read_once_and_last(monkeypatch):
    runs = [
        (key, rate, seed, 40)
        for key in accuracy.BACKBONES for rate in accuracy.RATES for seed in accuracy.SEEDS
    ]  # fmt: skip
    monkeypatch.setattr(accuracy, 'read_runs', lambda name, folder: recorded(*runs[1:]))
    with pytest.raises(SystemExit, match='train these first'):
        accuracy.test_fresh('camvid')
    runs.insert(1, (*runs.pop(0), 50))
    monkeypatch.setattr(accuracy, 'read_runs', lambda name, folder: recorded(*runs))
    with pytest.raises(SystemExit, match='read before'):
        accuracy.test_fresh('camvid')


def test_who_is_faster_is_decided_by_ratios():
    """Not by medians, which the drift of a machine moves; about as fast is neither."""
    times = dict(s0=[100, 200, 300], repvit_m1_0=[90, 180, 270], swiftformer_s=[80, 300, 310])
    times |= dict(resnet18=[10, 20, 30])  # less accurate
    recording = dict(milliseconds=dict(onnxruntime=times), parameters={}, delegates={})
    found = latency.rivals(recording, 'onnxruntime')
    assert found['faster than CARE-S0'] == 'RepViT-M1.0'
    assert found['about as fast as CARE-S0'] == 'SwiftFormer-S'
    table = latency.latency_table(recording, 'onnxruntime')
    assert set(table.index[table['pareto']]) == {'resnet18', 'repvit_m1_0'}


def test_the_page_of_results_shows_the_runs(tmp_path, monkeypatch):
    """The better backbone is first, with the rate that validation prefers."""
    pytest.importorskip('timm')
    page, text = tmp_path / 'page.md', accuracy.PAGE.read_text()
    page.write_text(text)
    monkeypatch.setattr(accuracy, 'SETS', {'camvid': accuracy.SETS['camvid']})
    monkeypatch.setattr(accuracy, 'PAGE', page)
    monkeypatch.setattr(accuracy, 'CURVES', tmp_path / 'curves.png')
    accuracy.report()
    assert page.read_text() == text and '**1e-3**' in text
    assert (tmp_path / 'curves.png').stat().st_size > 10_000


def test_tables_show_their_recordings():
    with pytest.raises(SystemExit) as stopped:
        tables.main()
    assert stopped.value.code is None, stopped.value.code


def test_wrong_cells_and_unassigned_tables_are_found():
    page = 'docs/latency.md'
    _, _, text = (ROOT / page).read_text().partition('## Over the size of images')
    assert '| ResNet50 | 3.54 |' in text and not list(tables.check(page, text))
    (wrong,) = tables.check(page, text.replace('| ResNet50 | 3.54 |', '| ResNet50 | 3.45 |'))
    assert "has '3.45', its recording '3.54'" in wrong
    (shorter,) = tables.check(page, text.replace('\n| ResNet50 | 3.54 | 3.35 | 3.83 | 3.83 |', ''))
    assert 'has rows' in shorter
    new = '\n\n| network | ms |\n|---|---|\n| network | 12 |\n'
    (unassigned,) = tables.check(page, text + new)
    assert 'network | ms' in unassigned and 'assigned to no recording' in unassigned
    assert not list(tables.check(page, text + new.replace('12', '`12`')))  # an option, a name
    bare = '\n\nnetwork | ms\n---|---\nnetwork | 12\n'
    for hidden in (new.replace('\n|', '\n  |'), bare, '<table><tr><td>12</td></tr></table>'):
        assert len(list(tables.check(page, text + hidden))) == 1
    stated = '\n\n| | |\n|---|---|\n| ms | 12 |\n'
    (same,) = tables.check('docs/results.md', stated * 2)
    assert 'two tables' in same
