"""The latency benchmark: what is measured and in which order, what is made of it, bad input."""

import csv
import json
import runpy
import sys
import types
from pathlib import Path
from statistics import median

import cv2
import onnxruntime
import pytest
import torch
from torch import nn

from mmcare.deploy import latency, latency_models, latency_runners
from mmcare.deploy.latency import Settings, benchmark, measure_in_turn, write_report
from mmcare.deploy.latency_folding import fold_batch_norms
from mmcare.deploy.latency_models import STRIDES, FourMaps, build_four_maps
from mmcare.deploy.latency_peers import arch_keys, choose_contenders, peer_keys, read_contenders
from mmcare.deploy.latency_recording import (
    Measurement,
    Recording,
    describe_machine,
    installed_versions,
    read_recording,
    write_recording,
)
from mmcare.deploy.latency_report import (
    growth_exponent,
    growth_of,
    growth_rows,
    latency_rows,
    markdown_report,
    pareto_line,
    verdicts,
)
from mmcare.models import CARE

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / 'tools' / 'benchmark_latency.py'
RECORDED = ROOT / 'tests' / 'data' / 'latency_recording.json'
PAGE = (ROOT / 'docs' / 'latency.md').read_text()


def run_tool(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', [TOOL.name, *map(str, arguments)])
    runpy.run_path(str(TOOL), run_name='__main__')


# ------------------------------------------------------------ peers.csv


def test_each_network_competes_with_the_care_of_nearest_accuracy():
    contenders = read_contenders()
    archs = {key: contenders[key].top1 for key in arch_keys()}
    assert list(archs) == list(CARE.arch_zoo)
    for key, one in contenders.items():
        nearest = min(archs, key=lambda arch: abs(archs[arch] - one.top1))
        assert one.care_class == nearest, key


def test_each_accuracy_has_a_source():
    contenders = read_contenders().values()
    for one in contenders:
        assert 60 < one.top1 < 90
        assert one.source and one.link.startswith('https://'), one.key
    assert len({one.label for one in contenders}) == len(contenders)
    assert len({one.timm_model for one in contenders if one.timm_model}) == len(peer_keys())


def test_networks_are_looked_up():
    chosen = choose_contenders(['s1'], ['resnet18', 'resnet18'])
    assert [one.label for one in chosen] == ['CARE-S1', 'ResNet18']
    for archs, peers, words in (
        (['s3'], [], "'s3' is no arch: give of s0, s1, s2"),
        (['s0'], ['resnet19'], "'resnet19' is no peer: give of mobilenetv2"),
        (['resnet18'], [], "'resnet18' is no arch"),
        ([], [], 'nothing to measure'),
    ):
        with pytest.raises(ValueError, match=words):
            choose_contenders(archs, peers)


# ------------------------------------------------------------ networks


def test_care_is_folded():
    network = build_four_maps(read_contenders()['s0'], (64, 96))
    image = torch.randn(2, 3, 64, 96)
    maps = network(image)
    assert [tuple(one.shape[2:]) for one in maps] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    assert network.backbone.deploy and not network.training
    assert not [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    again = build_four_maps(read_contenders()['s0'], (64, 96))(image)
    assert all(torch.equal(a, b) for a, b in zip(maps, again, strict=True)), 'one seed'


class Features(nn.Module):
    """What timm gives with features_only=True: maps of these strides, this order of dimensions."""

    def __init__(self, strides, output_fmt):
        super().__init__()
        self.output_fmt = output_fmt
        self.feature_info = types.SimpleNamespace(reduction=lambda: strides)

    def forward(self, image):
        maps = [nn.functional.avg_pool2d(image, stride) for stride in self.feature_info.reduction()]
        return [one.permute(0, 2, 3, 1) if self.output_fmt == 'NHWC' else one for one in maps]


@pytest.mark.parametrize('output_fmt', ['NCHW', 'NHWC'])
def test_four_maps_of_a_feature_extractor(output_fmt):
    image = torch.randn(1, 3, 64, 96)
    maps = FourMaps(Features([2, 4, 8, 16, 32], output_fmt))(image)
    for one, stride in zip(maps, STRIDES, strict=True):
        assert torch.equal(one, nn.functional.avg_pool2d(image, stride))
    with pytest.raises(ValueError, match='maps of strides'):
        FourMaps(Features([4, 8, 16], output_fmt))


class BatchNormAct2d(nn.BatchNorm2d):
    """Like timm's of this name: an activation behind the norm."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(super().forward(x))


class OtherNorm(nn.BatchNorm2d):
    """A norm that does something else, too."""

    def forward(self, x):
        return super().forward(x) + 1


class Tangled(nn.Module):
    """Convolutions and norms, in ways that can and cannot be folded."""

    def __init__(self):
        super().__init__()
        for name in ('plain', 'act', 'shortcut', 'twice', 'out', 'other', 'in_place'):
            setattr(self, f'{name}_conv', nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False))
            setattr(self, f'{name}_norm', nn.BatchNorm2d(4))
        self.act_norm, self.other_norm = BatchNormAct2d(4), OtherNorm(4)

    def forward(self, x):
        x = self.plain_norm(self.plain_conv(x))
        x = self.act_norm(self.act_conv(x))
        between = self.shortcut_conv(x)
        x = between + self.shortcut_norm(between)
        x = self.twice_norm(self.twice_conv(self.twice_norm(self.twice_conv(x))))
        put_out = self.out_conv(x)
        x = self.other_norm(self.other_conv(self.out_norm(put_out)))
        changed = self.in_place_conv(x)
        changed.mul_(2)
        return put_out, x, self.in_place_norm(changed)


def randomize_norms(network: nn.Module) -> nn.Module:
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.1)
    return network.eval()


@torch.no_grad()
def test_batch_norms_are_folded_only_where_nothing_else_sees_the_convolution():
    network, image = randomize_norms(Tangled()), torch.randn(2, 4, 8, 8)
    expected = network(image)
    assert fold_batch_norms(network, image) is network
    for ours, theirs in zip(network(image), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    left = {
        name
        for name, module in network.named_children()
        if name.endswith('_norm') and isinstance(module, nn.BatchNorm2d)
    }
    assert left == {'shortcut_norm', 'twice_norm', 'out_norm', 'other_norm', 'in_place_norm'}
    assert isinstance(network.act_norm, nn.ReLU)
    assert network.plain_conv.bias is not None and network.plain_conv.groups == 2


def test_batch_norms_of_a_network_in_training_mode_stay():
    with pytest.raises(ValueError, match='training mode'):
        fold_batch_norms(Tangled(), torch.zeros(1, 4, 8, 8))


# ------------------------------------------------------------ with timm


@pytest.mark.parametrize(
    'key',
    [
        pytest.param(key, marks=[] if key in ('resnet18', 'swin_tiny') else pytest.mark.slow)
        for key in peer_keys()
    ],
)
def test_peers_are_backbones_with_four_maps(key):
    pytest.importorskip('timm')
    shape = (64, 96)
    network = build_four_maps(read_contenders()[key], shape)
    maps = network(torch.randn(1, 3, *shape))
    assert [tuple(one.shape[2:]) for one in maps] == [
        (shape[0] // stride, shape[1] // stride) for stride in STRIDES
    ]
    assert all(one.isfinite().all() for one in maps)


@pytest.mark.parametrize(
    ('key', 'left'), [('mobileone_s1', 0), ('fastvit_sa12', 2), ('mobilenetv4_m', 0)]
)
@torch.no_grad()
def test_peers_are_folded_exactly(key, left, monkeypatch):
    """In FastViT-SA12 two norms stand behind convolutions whose output is a shortcut, too."""
    timm = pytest.importorskip('timm')
    create, made = timm.create_model, []

    def with_random_norms(*arguments, **options):
        made.append(randomize_norms(create(*arguments, **options)))
        return made[-1]

    monkeypatch.setattr(timm, 'create_model', with_random_norms)
    folded = build_four_maps(read_contenders()[key], (64, 64))
    image = torch.randn(1, 3, 64, 64)
    for ours, theirs in zip(folded(image), FourMaps(made[0].eval())(image), strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert sum(isinstance(module, nn.BatchNorm2d) for module in folded.modules()) == left


# ------------------------------------------------------------ runs and timers


class TwoMaps(nn.Module):
    """A small network; the graph made of it computes something else, if it is told so."""

    def __init__(self, steady=True):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        self.steady = steady

    def forward(self, image):
        changed = torch.compiler.is_compiling() and not self.steady
        return self.conv(image), image + (2 if changed else 1)


def test_onnx_runs_what_pytorch_computes():
    network, image = TwoMaps().eval(), torch.randn(1, 3, 8, 8)
    outputs = latency_runners.onnx_run(network, image)()
    for ours, theirs in zip(network(image), outputs, strict=True):
        torch.testing.assert_close(ours.detach(), torch.from_numpy(theirs), rtol=1e-5, atol=1e-5)


def test_onnx_that_computes_something_else_is_refused():
    with pytest.raises(latency_runners.LatencyError, match='map 2 in ONNX Runtime differs'):
        latency_runners.onnx_run(TwoMaps(steady=False).eval(), torch.randn(1, 3, 8, 8))


def test_onnx_runs_with_the_threads_that_were_asked_for(monkeypatch):
    given, make = [], onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime,
        'InferenceSession',
        lambda path, options, **others: given.append(options) or make(path, options, **others),
    )
    latency_runners.onnx_run(TwoMaps().eval(), torch.randn(1, 3, 8, 8), threads=2)
    assert [options.intra_op_num_threads for options in given] == [2]


def test_torch_runs_in_the_layout_and_precision_that_were_asked_for():
    seen = []
    network = nn.Conv2d(3, 4, 3).eval()
    network.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    output = latency_runners.torch_run(network, torch.randn(2, 3, 8, 8), channels_last=True)()
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert network.weight.is_contiguous(memory_format=torch.channels_last)
    assert output.is_inference() and output.dtype == torch.float32
    latency_runners.torch_run(network, torch.randn(2, 3, 8, 8), half=True)()
    assert seen[1].dtype == network.weight.dtype == torch.float16


def test_care_runs_in_float16():
    """As on a GPU; CPUs have the operators, too."""
    network = build_four_maps(read_contenders()['s0'], (64, 64))
    maps = latency_runners.torch_run(network, torch.randn(1, 3, 64, 64), half=True)()
    assert all(one.dtype == torch.float16 and one.isfinite().all() for one in maps)


def test_gpu_runs_are_timed_between_two_events(monkeypatch):
    """With events that note what happens; on a GPU the benchmark has not been run."""
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.name = f'event {sum("made" in one for one in happened)}'
            happened.append(f'{self.name} made')

        def record(self):
            happened.append(f'{self.name} recorded')

        def synchronize(self):
            happened.append(f'{self.name} waited for')

        def elapsed_time(self, end):
            return 1.5 if (self.name, end.name) == ('event 0', 'event 1') else None

    monkeypatch.setattr(torch.cuda, 'Event', Event)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: happened.append('all waited for'))
    assert latency_runners.cuda_timer(lambda: happened.append('run')) == 1.5
    assert happened[2:] == [
        'all waited for',
        'event 0 recorded',
        'run',
        'event 1 recorded',
        'event 1 waited for',
    ]


def test_networks_run_in_turn_and_warm_up_does_not_count(capsys):
    ran, clock = [], iter(range(100))
    runs = {name: lambda name=name: ran.append(name) for name in 'abc'}

    def timer(run):
        run()
        return float(next(clock))

    times = measure_in_turn(runs, 2, timer, warm_up=1, label='here')
    assert ''.join(ran) == 'abcabcabc'
    assert times == dict(a=[3, 6], b=[4, 7], c=[5, 8])
    assert 'here: 3/3' in capsys.readouterr().err


def test_the_number_of_threads_is_given_back():
    before = torch.get_num_threads()
    with latency_runners.torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# ------------------------------------------------------------ a whole run


def test_a_run_and_what_it_leaves(tmp_path):
    settings = Settings(
        archs=('s0', 's1'), shape=(64, 64), sizes=(64, 96), backends=('torch',), runs=3, size_runs=3
    )
    recording = benchmark(settings, tmp_path / 'out')
    assert [(one.backend, one.shape) for one in recording.measurements] == [
        ('torch', (64, 64)),
        ('torch', (96, 96)),
    ]
    for one in recording.measurements:
        assert {key: len(values) for key, values in one.milliseconds.items()} == dict(s0=3, s1=3)
        assert one.processor_share > 0
    assert recording.parameters.keys() == {'s0', 's1'}
    unfolded = sum(parameter.numel() for parameter in CARE('s0').parameters())
    assert 0.95 * unfolded < recording.parameters['s0'] < unfolded
    assert {path.name for path in (tmp_path / 'out').iterdir()} == {
        'recording.json',
        'latency.csv',
        'latency.md',
        'accuracy_torch.png',
        'sizes.csv',
        'sizes.png',
    }
    assert markdown_report(recording) + '\n' == (tmp_path / 'out/latency.md').read_text()


def test_what_was_measured_survives_an_interruption(tmp_path, monkeypatch):
    add = latency._add_measurement

    def interrupted(recording, settings, backend, contenders, shape, rounds):
        if shape != settings.shape:
            raise KeyboardInterrupt
        add(recording, settings, backend, contenders, shape, rounds)

    monkeypatch.setattr(latency, '_add_measurement', interrupted)
    settings = Settings(archs=('s0',), shape=(64, 64), sizes=(96,), backends=('torch',), runs=3)
    with pytest.raises(KeyboardInterrupt):
        benchmark(settings, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['recording.json']
    assert 'CARE-S0' in write_report(read_recording(tmp_path / 'recording.json'), tmp_path)


def test_a_network_that_fails_is_named(tmp_path, monkeypatch):
    def fail(contender, shape):
        raise RuntimeError('no such size\nand many more lines')

    monkeypatch.setattr(latency, 'build_four_maps', fail)
    with pytest.raises(latency_runners.LatencyError) as caught:
        benchmark(Settings(archs=('s0',), backends=('torch',)), tmp_path)
    assert str(caught.value) == (
        'CARE-S0 cannot be measured with torch at 512x512, batch 1: RuntimeError: no such size'
    )
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------ tables and pictures


def make_recording(milliseconds, shape=(64, 64), **more):
    """A recording of these times, the first at the main shape."""
    measurements = [Measurement('torch', shape, milliseconds, 1.0)]
    measurements += [Measurement('torch', side, times) for side, times in more.get('sizes', [])]
    settings = dict(
        shape=list(shape),
        backends=['torch'],
        device='cpu',
        threads=1,
        batch=1,
        runs=3,
        half=False,
        channels_last=False,
    )
    return Recording(
        settings, describe_machine('cpu'), {}, dict.fromkeys(read_contenders(), 10**6), measurements
    )


def test_rows_compare_rounds_with_care_of_the_same_class():
    """The third round was slow for all, which the ratio of the rounds does not see."""
    recording = make_recording(
        dict(
            s0=[10.0, 12.0, 100.0],
            resnet18=[20.0, 24.0, 150.0],
            swin_tiny=[5.0, 5.0, 5.0],
        )
    )
    rows = {row['key']: row for row in latency_rows(recording)}
    assert [rows['s0'][name] for name in ('milliseconds', 'lower_quartile', 'upper_quartile')] == [
        12,
        11,
        56,
    ]
    assert rows['s0']['ratio'] == 1 and rows['resnet18']['ratio'] == 2
    assert rows['swin_tiny']['ratio'] == '', 'CARE of its class was not measured'
    assert list(rows) == ['s0', 'resnet18', 'swin_tiny'], 'by class, then latency'
    assert [key for key, row in rows.items() if row['pareto'] == 'yes'] == ['swin_tiny']


def test_pareto_line():
    """Accuracies: ResNet18 69.8, MobileNetV2 71.8, CARE-S0 78.4, CARE-S2 and ConvNeXt-T 82.1."""
    times = dict(s0=3.0, s2=9.0, mobilenetv2=2.0, resnet18=2.5, convnext_tiny=9.5)
    assert pareto_line(times) == ['mobilenetv2', 's0', 's2']
    assert pareto_line({**times, 'resnet18': 1.0}) == ['resnet18', 'mobilenetv2', 's0', 's2']
    assert pareto_line({**times, 's2': 2.0}) == ['s2']


def test_it_is_said_where_care_loses():
    recording = make_recording(
        dict(s0=[10.0] * 3, resnet18=[20.0] * 3, mobilenetv2=[5.0] * 3, repvit_m1_0=[9.0] * 3)
    )
    (sentence,) = verdicts(latency_rows(recording))
    assert sentence == (
        'CARE-S0: 10.0 ms, 78.4 %; faster than 1 of 2 peers of its class. At least as fast and as '
        'accurate: RepViT-M1.0.'
    )
    del recording.measurements[0].milliseconds['repvit_m1_0']
    assert verdicts(latency_rows(recording))[0].endswith(
        'No peer is at least as fast and as accurate.'
    )


@pytest.mark.parametrize('exponent', [2, 3.5])
def test_growth_exponent(exponent):
    times = {side: 0.01 * side**exponent for side in (224, 512, 1024)}
    assert growth_exponent(times) == pytest.approx(exponent)


def test_growth_is_of_square_images_at_several_sizes():
    recording = make_recording(
        dict(s0=[1.0] * 3, resnet18=[2.0] * 3),
        sizes=[((128, 128), dict(s0=[4.0] * 3)), ((64, 128), dict(s0=[9.0] * 3))],
    )
    assert growth_of(recording) == dict(s0={64: 1.0, 128: 4.0})
    (row,) = growth_rows(recording)
    assert (row['ms_64'], row['ms_128'], row['exponent']) == (1, 4, 2)
    assert '| CARE-S0 | 1.0 | 4.0 | 2.00 |' in markdown_report(recording)


def test_a_busy_machine_is_mentioned():
    recording = make_recording(dict(s0=[1.0] * 3))
    assert 'busy' not in markdown_report(recording)
    recording.measurements[0].processor_share = 0.5
    assert 'this process had 0.50 of a core' in markdown_report(recording)


def test_a_gpu_is_named():
    recording = make_recording(dict(s0=[1.0] * 3))
    recording.settings.update(device='cuda', half=True, channels_last=True)
    recording.machine['gpu'] = 'of this kind'
    assert 'a GPU (of this kind, float16), channels last' in markdown_report(recording)


def test_the_machine_has_no_name():
    assert describe_machine('cpu').keys() == {
        'cores',
        'architecture',
        'vector_instructions',
        'system',
    }
    versions = installed_versions(['torch', 'a package that is not there'])
    assert versions.keys() == {'mmcare', 'python', 'torch'}


def test_recordings_are_read_as_they_were_written(tmp_path):
    recording = read_recording(RECORDED)
    write_recording(recording, tmp_path / 'again.json')
    assert read_recording(tmp_path / 'again.json') == recording
    assert (tmp_path / 'again.json').read_text() == RECORDED.read_text()


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (lambda content: content.update(format=0), 'another version'),
        (lambda content: content.pop('format'), 'format'),
        (lambda content: content.pop('machine'), 'machine'),
        (lambda content: content.update(more=1), 'more'),
        (lambda content: content['settings'].pop('threads'), "'threads' is missing"),
        (lambda content: content['settings'].update(shape=[32, 32]), 'nothing was measured'),
        (lambda content: content['parameters'].pop('s0'), "'s0' is not known"),
        (
            lambda content: content['measurements'][0]['milliseconds'].update(vgg=[1.0] * 5),
            "'vgg' is not known",
        ),
        (
            lambda content: content['measurements'][0]['milliseconds'].update(s0=[1.0]),
            'different numbers of rounds',
        ),
        (
            lambda content: content['measurements'][0]['milliseconds']['s0'].__setitem__(0, -1),
            'not positive',
        ),
    ],
)
def test_recordings_that_are_none(change, words, tmp_path):
    content = json.loads(RECORDED.read_text())
    change(content)
    (tmp_path / 'recording.json').write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f'is not a recording of a run.*{words}'):
        read_recording(tmp_path / 'recording.json')


def test_the_tool_rebuilds_the_recorded_run(tmp_path, monkeypatch, capsys):
    """Figures are compared with the recorded times themselves, and text with the page."""
    monkeypatch.setitem(sys.modules, 'timm', None)  # it is not needed
    run_tool(monkeypatch, '--from-recording', RECORDED, '--out-dir', tmp_path / 'out')
    printed = capsys.readouterr().out
    example = PAGE.split('tests/data/latency_recording.json\n```\n\n````text\n')[1]
    assert printed.split('\n\nWritten to')[0] == example.split('\n\nWritten to')[0]

    content = json.loads(RECORDED.read_text())
    with open(tmp_path / 'out/latency.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 5
    for row, other in zip(rows[:5], rows[5:], strict=True):
        assert (row['backend'], other['backend']) == ('onnxruntime', 'torch')
    for row in rows:
        times = next(
            one['milliseconds']
            for one in content['measurements']
            if one['backend'] == row['backend'] and one['shape'] == [128, 128]
        )
        assert float(row['milliseconds']) == median(times[row['key']])
        ratios = [a / b for a, b in zip(times[row['key']], times[row['care_class']], strict=True)]
        assert float(row['ratio']) == pytest.approx(median(ratios), abs=1e-3)
        assert row['accuracy_link'] == read_contenders()[row['key']].link
    with open(tmp_path / 'out/sizes.csv', newline='') as file:
        assert [row['key'] for row in csv.DictReader(file)] == ['s0', 's1', 'resnet18']
    names = {path.name for path in (tmp_path / 'out').iterdir()}
    pictures = {'accuracy_onnxruntime.png', 'accuracy_torch.png', 'sizes.png'}
    assert names == {'latency.csv', 'latency.md', 'sizes.csv', *pictures}
    for name in pictures:
        picture = cv2.imread(str(tmp_path / 'out' / name))
        assert min(picture.shape[:2]) > 300 and picture.std() > 10, f'{name} is empty'


# ------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['--archs', 's3'], "'s3' is no arch: give of s0, s1, s2"),
        (['--peers', 'resnet'], "'resnet' is no peer: give of mobilenetv2, "),
        (['--archs', '--peers'], 'nothing to measure'),
        (['--size-peers', 'resnet'], "'resnet' is no peer"),
        (['--shape', '0', '512'], 'shape must be of 64 to 4096, got 0'),
        (['--shape', '512', '-512'], 'shape must be of 64 to 4096, got -512'),
        (['--shape', '512', '999999'], 'shape must be of 64 to 4096, got 999999'),
        (['--shape', '512', '500'], 'shape must be multiples of 32, since'),
        (['--sizes', '224', '32'], 'sizes must be of 64 to 4096, got 32'),
        (['--threads', '0'], 'threads must be of 1 to'),
        (['--batch', '0'], 'batch must be of 1 to'),
        (['--runs', '2'], 'runs must be of 3 to'),
        (['--size-runs', '0'], 'size-runs must be of 3 to'),
        (['--backend', 'tensorrt'], 'backend must be of onnxruntime, torch'),
        (['--backend', 'torch', 'torch'], 'each once'),
        (['--float16'], 'float16 is measured on a GPU only'),
        (['--channels-last'], 'give --backend torch'),
        (['--device', 'cuda', '--backend', 'onnxruntime'], 'only PyTorch is measured'),
        (['--device', 'cuda'], 'PyTorch sees no GPU'),
        (['--from-recording', 'missing.json'], 'missing.json is not a file'),
        (['--from-recording', TOOL], 'is not a recording of a run'),
    ],
)
def test_bad_input_is_refused_before_any_work(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(latency_models, 'require', lambda *arguments: FakeTimm)
    with pytest.raises(SystemExit) as stop:
        run_tool(monkeypatch, *arguments, '--out-dir', tmp_path / 'out')
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count('\n') == 1 and not printed.out
    assert not (tmp_path / 'out').exists()


class FakeTimm:
    """As much of timm as is looked at before any work."""

    __version__ = '0.9'

    @staticmethod
    def is_model(name):
        return not name.startswith('swiftformer')


@pytest.mark.parametrize('module', ['timm', 'onnxruntime', 'onnxscript', 'matplotlib'])
def test_missing_packages_are_named_with_what_installs_them(module, tmp_path, monkeypatch, capsys):
    if module != 'timm':
        monkeypatch.setitem(sys.modules, 'timm', types.SimpleNamespace(is_model=lambda name: True))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as stop:
        run_tool(monkeypatch, '--peers', 'resnet18', '--out-dir', tmp_path / 'out')
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert f' {module}, which is not installed: ' in message
    advice = 'matplotlib' if module == 'matplotlib' else '-e ".[bench]"'
    assert message.endswith(f'pip install {advice}\n') and message.count('\n') == 1
    assert not (tmp_path / 'out').exists()


def test_a_timm_that_is_too_old(monkeypatch):
    monkeypatch.setattr(latency_models, 'require', lambda *arguments: FakeTimm)
    latency_models.check_timm(choose_contenders(['s0'], ['resnet18']))
    with pytest.raises(ImportError, match=r'timm 0.9 has no swiftformer_s, .* --upgrade timm'):
        latency_models.check_timm(choose_contenders([], ['resnet18', 'swiftformer_s']))


def test_without_peers_timm_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, 'timm', None)
    latency_models.check_timm(choose_contenders(arch_keys(), []))


def test_an_output_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / 'file').write_text('kept')
    for more in (['--peers'], ['--from-recording', RECORDED]):
        with pytest.raises(SystemExit) as stop:
            run_tool(monkeypatch, *more, '--out-dir', tmp_path / 'file' / 'out')
        assert stop.value.code == 2
        printed = capsys.readouterr()
        assert 'is not a directory' in printed.err and printed.err.count('\n') == 1
    assert (tmp_path / 'file').read_text() == 'kept'
