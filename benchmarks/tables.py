"""Check every table with figures in the README, docs and configs against its recording.

A table is named by its page and its header. Those in ``RECORDED`` have a function that makes their
cells from recordings; None stands for a cell that the tests count. Those in ``STATED`` hold
settings, limits, sources and the like. The script fails if a cell differs from its recording, if a
table with figures is assigned to none, or if two tables with figures have the same name.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import accuracy
import latency
import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results'
PLACES = (
    'README.md',
    'docs/*.md',
    'configs/README.md',
    'configs/*/README.md',
    'projects/*/README.md',
)
IN_CODE_OR_LINK = re.compile(r'`[^`]*`|\]\([^)]*\)')
COCO = 'coco/bbox_mAP', 'coco/segm_mAP'
Row = list[Any]  # strings; None: not checked here
Name = tuple[str, str]  # page, and the cells of the header, joined by |


def split(line: str) -> list[str]:
    """Split a line of a table into cells; the outer bars may be left out."""
    inner = line.strip().removeprefix('|').removesuffix('|')
    return [cell.strip() for cell in re.split(r'(?<!\\)\|', inner)]


def find_tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the header, joined, and the rows of each table of a page, also of indented ones."""
    text = re.sub(r'```.*?```', '', text, flags=re.S)
    for block in re.findall(r'(?:^.*(?<!\\)\|.*\n?)+', text, re.M):
        header, *rows = map(split, block.strip().split('\n'))
        if rows and all(re.fullmatch(r':?-+:?', cell) for cell in rows[0]):
            yield ' | '.join(header), rows[1:]


def has_figures(rows: list[list[str]]) -> bool:
    """Whether a table has a digit outside code and links."""
    cells = (IN_CODE_OR_LINK.sub('', cell) for row in rows for cell in row)
    return any(re.search(r'\d', cell) for cell in cells)


def read(name: str) -> Any:
    """Read a recording."""
    path = RESULTS / name
    if path.suffix == '.csv':
        return pd.read_csv(path)
    if path.suffix == '.jsonl':
        return [json.loads(line) for line in path.read_text().splitlines()]
    return json.loads(path.read_text())


def percent(metrics: dict[str, float], *names: str, scale: float = 100) -> str:
    """Write metrics as ``65.9, 68.8``."""
    return ', '.join(f'{metrics[name] * scale:.1f}' for name in names)


def span(*values: float) -> str:
    """Write whole numbers as ``53 to 67``, or one number if they are equal."""
    low, high = f'{min(values):.0f}', f'{max(values):.0f}'
    return low if low == high else f'{low} to {high}'


# Accuracies.


def public_sets() -> list[Row]:
    """README: all seeds of the chosen rates."""
    columns: list[dict[str, str]] = []
    for name in ('dsb2018', 'bccd', 'camvid'):
        runs, metric = accuracy.read_runs(name), next(iter(accuracy.SETS[name][3]))
        rates = accuracy.choose_rates(name, runs)
        tests = runs[(runs['split'] == 'test') & (runs['rate'] == runs['key'].map(rates))]
        columns.append(dict(tests.groupby('key')[metric].apply(accuracy.describe)))
    keys = 's0', 'mobilenetv4_m', 'resnet18'
    return [[latency.PEERS['label'][key], *(column[key] for column in columns)] for key in keys]


def accuracy_table(name: str, fresh: bool = False) -> pd.DataFrame:
    """results.md: a public set; a test counts parameters and GMACs."""
    runs = accuracy.read_runs(name, accuracy.RESULTS / ('fresh' if fresh else ''))
    table = accuracy.make_rows(name, runs).drop(columns='key')
    for column in ('parameters, M', 'GMACs'):
        table.insert(len(table.columns) - 1, column, None)
    return table.rename(columns={'backbone': f'{name}, fresh splits'} if fresh else {})


def accuracy_of(name: str, fresh: bool = False) -> list[Row]:
    """Return the rows of this table."""
    return accuracy_table(name, fresh).to_numpy().tolist()


def fresh_tables() -> dict[Name, Callable[[], list[Row]]]:
    """results.md: the public sets that were tested on fresh splits."""
    recorded = {path.name.split('_')[0] for path in (accuracy.RESULTS / 'fresh').glob('*.csv')}
    found: dict[Name, Callable[[], list[Row]]] = {}
    for name in sorted(recorded):
        if (accuracy.read_runs(name, accuracy.RESULTS / 'fresh')['split'] == 'test').any():
            header = ' | '.join(accuracy_table(name, fresh=True).columns)
            found['docs/results.md', header] = partial(accuracy_of, name, fresh=True)
    return found


def padding() -> list[Row]:
    """results.md: CARE-S0 on padded pictures of DSB2018."""
    table = read('accuracy/padding_dsb2018.csv')
    table = table.set_index(['multiples of', 'split', 'seed']).sort_index()
    names = {
        32: '32, the config',
        96: '96 (256 pixels become 288)',
        160: '160 (256 pixels become 320)',
    }
    return [
        [name, *(accuracy.describe(table['mask AP'][sides, split]) for split in ('val', 'test'))]
        for sides, name in names.items()
    ]


def bccd_recipes() -> list[Row]:
    """results.md: box APs of recipes on BCCD's validation pictures; their texts are not checked."""
    table = read('accuracy/retinanet_recipes.csv').dropna(subset=['coco/bbox_mAP'])
    last = table.groupby('recipe')['coco/bbox_mAP'].last().mul(100).map('{:.1f}'.format)
    runs = accuracy.read_runs('bccd')
    vals = runs[(runs['split'] == 'val') & (runs['rate'] == '3e-3')]
    shipped = vals.groupby(['key', 'seed'])['coco/bbox_mAP'].last().map('{:.1f}'.format)
    whole = '3e-3, Kaiming initialization of the whole head, warm-up of 50'
    return [
        [
            None,
            f'{shipped["s0", 0]} and {shipped["s0", 1]} (two seeds; ResNet18: '
            f'{shipped["resnet18", 0]} and {shipped["resnet18", 1]})',
        ],
        [
            None,
            f'{last[f"{whole}, seed 0"]} and {last[f"{whole}, seed 1"]} (two seeds; ResNet18: '
            f'{last[f"ResNet18: {whole}"]}; MobileNetV4-Conv-M: '
            f'{last[f"MobileNetV4-Conv-M: {whole}"]})',
        ],
        [None, last['3e-3']],
        [None, last['3e-3, norms in neck and head']],
        [
            None,
            f'{last["1e-3, earlier recipe"]} (ResNet18: {last["ResNet18: 1e-3, earlier recipe"]})',
        ],
    ]


def pedestrians() -> list[Row]:
    """results.md: detector.py with two rates."""
    table = read('accuracy/pedestrians_detector.csv').query('test == "padded"')
    last = table.groupby(['seed', 'rate'])['box AP'].last().map('{:.1f}'.format)
    rows = {0: 'seed 0, 30 epochs', 1: 'seed 1, 15 epochs'}
    return [[name, last[seed, 1e-3], last[seed, 3e-3]] for seed, name in rows.items()]


def letterboxes() -> list[Row]:
    """app.md: pictures that are placed or scaled otherwise."""
    rows: list[Row] = []
    for model in read('exported_letterbox_1.0.0.json').values():
        places = [
            list(model[place].items())[-1][1]
            for place in ('top-left', 'center', 'stretched', 'smoothed')
        ]
        metrics = (m['mIoU'] if 'mIoU' in m else 100 * m['coco/bbox_mAP'] for m in places)
        rows.append([None, None, *(f'{metric:.1f}' for metric in metrics)])
    return rows


def int8_onnx() -> list[Row]:
    """boards.md: Mask R-CNN in int8."""
    table = pd.DataFrame(read('int8_onnx_1.1.0.json')['rows']).set_index(['precision', 'engine'])
    rows: list[Row] = []
    for precision in ('float32', 'int8'):
        cells = [table.loc[precision, engine] for engine in ('onnxruntime', 'openvino')]
        aps = [percent(cell, 'bbox_mAP', 'segm_mAP', scale=1) for cell in cells]
        rows.append([precision, f'{cells[0]["MB"]}', *aps])
    return rows


HEADS = (
    *('FCN', 'FPN', 'UPer', 'PSP', 'ASPP', 'DepthwiseSeparableASPP', 'DA', 'Enc', 'LightHam'),
    *('SegFormer', 'Segmenter', 'cascade of FCN and OCR', 'cascade with PointHead'),
)


def heads() -> list[Row]:
    """exported_figures.md: the largest error of heads; a star: fails at a size; a dash: at all."""
    table = read('heads_1.0.0.csv')
    table['error'] = pd.to_numeric(table['result'], errors='coerce')
    order = 'coreml', 'onnx', 'onnx_float16', 'executorch', 'ncnn', 'litert', 'litert_float16'
    rows: list[Row] = []
    for head in HEADS:
        row = [head]
        for name in order:
            errors = table[(table['head'] == head) & (table['format'] == name)]['error']
            star = '\\*' if errors.isna().any() else ''
            row.append(f'{errors.max():.0e}{star}' if errors.notna().any() else '–')
        rows.append(row)
    return rows


def proposals() -> list[Row]:
    """exported_figures.md: accuracy and time over the number of proposals, on scenes."""
    table = read('exported_mask_rcnn_1.0.0.json')
    found = [
        table[f'{n}_100/care_s0_mask_rcnn_scenes_model_160x160_decoded.onnx'] for n in PROPOSALS
    ]
    whole = table['PyTorch']['ms']
    return [
        ['box AP', *(percent(row, COCO[0]) for row in found)],
        ['mask AP', *(percent(row, COCO[1]) for row in found)],
        ['time', *(f'{row["ms"] / whole:.2f}' for row in found)],
    ]


PROPOSALS = 20, 50, 100, 200, 1000


def two_stage_formats() -> list[Row]:
    """exported_figures.md: Mask R-CNN with 100 proposals in each format."""
    table = read('exported_mask_rcnn_1.0.0.json')
    names = {
        'PyTorch': "PyTorch, mmdet's `predict`",
        '100_100/': '`.onnx`',
        'tflite/': '`.tflite`',
        'tflite16/': '`.tflite`, float16',
        'tflite8/': '`.tflite`, int8',
        'pte/': '`.pte`',
        'ml/': '`.mlpackage`, float16',
    }
    rows: list[Row] = []
    for start, name in names.items():
        (row,) = (row for file, row in table.items() if file.startswith(start))
        time = f'{row["ms"] / table["PyTorch"]["ms"]:.2f}' if 'ms' in row else ''
        rows.append(
            [name, f'{row["MB"]:.1f}', '1' if time == '1.00' else time, percent(row, *COCO)]
        )
    return rows


def proposals_on_pedestrians() -> list[Row]:
    """exported_figures.md: the same on photographs."""
    table = pd.DataFrame(read('proposals_pedestrians_1.0.0.json')['rows'])
    whole = table.loc[table['file'] == 'PyTorch', 'ms'].item()
    onnx = table[(table['file'] == '.onnx') & (table['max_detections'] == 100)].set_index(
        'proposals'
    )
    return [
        ['box AP, mask AP', *(percent(onnx.loc[n], *COCO) for n in PROPOSALS)],
        [None, *(f'{onnx["ms"][n] / whole:.2f}' for n in PROPOSALS)],
    ]


def exported(start: str) -> Callable[[str], dict[str, float]]:
    """Return a function that finds a row of a recording by the end of the file's name."""
    table = read(start)
    return lambda end: next((row for file, row in table.items() if file.endswith(end)), {})


FORMATS = {
    '.onnx': '`.onnx`',
    '160.pte': '`.pte`',
    'int8.pte': '`.pte`, int8',
    '160.tflite': '`.tflite`',
    'float16.tflite': '`.tflite`, float16',
    'int8.tflite': '`.tflite`, int8',
    '.ncnn': '`.ncnn`',
    '.mlpackage': '`.mlpackage`, float16',
}


def exported_sizes() -> list[Row]:
    """exported_figures.md: MB and ms of the demos' files."""
    detector = exported('exported_mask_rcnn_backbone_1.0.0.json')
    segmentor = exported('exported_seg_1.0.0.json')

    def cell(row: dict[str, float]) -> str:
        return ', '.join(f'{row[name]:.1f}' for name in ('MB', 'ms') if name in row)

    whole = ['PyTorch', cell(detector('PyTorch')), cell(segmentor('160x160'))]
    return [
        whole,
        *([name, cell(detector(end)), cell(segmentor(end))] for end, name in FORMATS.items()),
    ]


def exported_metrics() -> list[Row]:
    """exported_figures.md: metrics of the demos' files."""
    detector = exported('exported_mask_rcnn_backbone_1.0.0.json')
    segmentor = exported('exported_seg_1.0.0.json')
    wanted = {'PyTorch': '160x160', 'int8.pte': 'int8.pte', 'int8.tflite': 'int8.tflite'}
    names = {'PyTorch': 'PyTorch, at 160x160'} | FORMATS
    return [
        [
            names[end],
            percent(detector(end), *COCO),
            percent(segmentor(other), 'mIoU', 'aAcc', scale=1),
        ]
        for end, other in wanted.items()
    ]


def exported_yolox() -> list[Row]:
    """families.md: one detector with two backbones."""
    tiny, care = read('exported_yolox_1.1.0.json').values()
    ratio = ['1', f'{care["ms"] / tiny["ms"]:.2f}']
    return [
        [
            None,
            None,
            f'{row["MB"]:.1f}',
            *percent(row, 'coco/bbox_mAP', 'coco/bbox_mAP_50').split(', '),
            time,
        ]
        for row, time in zip((tiny, care), ratio, strict=True)
    ]


# Times.


def latencies(file: str, table: int) -> list[Row]:
    """latency.md: the tables of latency.py; 0: times, 1: rivals."""
    found = list(find_tables(latency.markdown(read(file))))
    return [list(row) for row in found[table][1]]


def operators() -> list[Row]:
    """latency.md: shares of operators."""
    table = read('operators_1.0.0.csv')

    def share(file: str, kinds: str) -> str:
        rows = table[table['file'].str.endswith(file)]
        chosen = rows['ms'][rows['kind'].str.match(kinds)].sum() / rows['ms'].sum()
        return f'{100 * chosen:.1f}%' if chosen < 0.01 else f'{100 * chosen:.0f}%'

    pte, onnx = partial(share, '.pte'), partial(share, '.onnx')
    return [
        [
            '1x1 convolutions',
            pte('Fully Connected'),
            f'{onnx("Conv$")}, with the other convolutions',
        ],
        ['depth-wise convolutions', pte('.*DWConv'), ''],
        ['GELU', pte('GELU'), onnx('Gelu')],
        ['products of the attention', pte('Batch Matrix'), onnx('(Fused)?MatMul')],
    ]


def sweep() -> list[Row]:
    """latency.md: ratios to CARE-S0 over the size of images."""
    sides = 256, 384, 512, 768
    times = [
        pd.DataFrame(read(f'sweep_{n}_1.0.0.json')['milliseconds']['onnxruntime']) for n in sides
    ]
    keys = 'mobilenetv4_m', 'repvit_m1_0', 'resnet18', 'resnet50', 'swin_tiny'
    return [
        [latency.PEERS['label'][key], *(f'{(t[key] / t["s0"]).median():.2f}' for t in times)]
        for key in keys
    ]


def engines() -> list[Row]:
    """latency.md: times of networks, engines and precisions as shares of ONNX Runtime's."""
    ((_, rows),) = find_tables(latency.engines_table(read('latency_engines_1.1.0.json')))
    return rows


def int8_operators() -> list[Row]:
    """boards.md: what is quantized, time and noise in two networks."""
    wanted = {
        'convolutions': 'convolutions',
        'convolutions and `Concat`: the default': '+ Concat',
        'also `Add`': '+ Add, Concat',
        'also `Split` and `Slice`': '+ Add, Concat, Split, Slice',
        'also GELU': '+ these and Gelu',
        '`--int8-for tensorrt`': 'for TensorRT',
    }
    tables = [
        pd.DataFrame(read(f'int8_operators_{name}_1.1.0.json')['rows']).set_index(
            ['quantized', 'engine']
        )
        for name in ('s0', 'demo')
    ]
    rows: list[Row] = []
    for label, name in wanted.items():
        row = [label]
        for engine in ('onnxruntime', 'openvino'):
            known = name in tables[0].xs(engine, level='engine').index
            row.append(f'{tables[0].loc[(name, engine), "x float32"]:.2f}' if known else '')
        decibels = [min(table.loc[(name, 'onnxruntime'), 'dB']) for table in tables]
        rows.append([*row, *map('{:.1f}'.format, decibels)])
    return rows


def device() -> list[Row]:
    """boards.md: sizes, memory and times of engines."""
    names = dict(onnxruntime='ONNX Runtime', openvino='OpenVINO', litert='LiteRT', ncnn='ncnn')
    return [
        [
            names[row['engine']],
            f'{row["installed_MB"]:.0f}',
            f'{row["first_s"]:.1f}',
            f'{row["first_MB"]:.0f}',
            ', '.join(f'{row[f"{part}_ms"]:.1f}' for part in ('prepare', 'run', 'read')),
            f'{row["added_MB"]:.1f}',
        ]
        for row in read('device_1.0.0.json')['rows']
    ]


def gpu_recipes() -> list[Row]:
    """gpu_figures.md: steps of recipes on a GPU; hours are for 12 epochs of COCO."""
    precisions = dict(fp32='float32', fp16='float16', bf16='bfloat16')
    rows: list[Row] = []
    for row in read('gpu_h200_1.0.0.jsonl'):
        if not row.get('case'):
            continue
        ms, coco = [row['ms'], row['queued']], row['case'].startswith('mask_rcnn')
        hours = [time / row['batch'] * 12 * 117_266 / 3.6e6 for time in ms]
        rows.append(
            [
                None,
                precisions[row['prec']] if coco else None,
                None,
                span(*ms),
                span(*(time / row['batch'] for time in ms)),
                f'{row["gpu"]:.0f}' if row.get('gpu') else 'not run',
                f'{row["GiB"]:.1f}',
                span(*hours) if coco else 'not run',
                'not run',
            ]
        )
    order = [0, 1, 2, 3, 4, 6, 5]
    return [*(rows[place] for place in order), [None] * 9]


def gpu_backbones() -> list[Row]:
    """gpu_figures.md: steps of backbones on a GPU."""
    names = dict(s0='S0', s1='S1', s2='S2', repvit_m1_1='RepViT-M1.1')
    names['mobilenetv4_conv_medium'] = 'MobileNetV4-Conv-M'
    precisions = dict(fp32='float32', bf16='bfloat16', fp16='float16')
    table = pd.DataFrame(read('gpu_h200_1.0.0.jsonl')[1:])
    same = (table['part'] == 'proto') & (table['tag'] == 'plain')  # S1 in another round
    table.loc[same, ['net', 'prec', 'last']] = 's1', 'bf16', 0.0
    table = table[table['part'].isin(['train', 'peers', 'graph']) | same]
    eager, rows = table['part'] != 'graph', []
    for (net, prec, last), part in table.groupby(['net', 'prec', 'last'], sort=False):
        if (net, prec) == ('s1', 'fp16'):
            continue  # not on the page
        steps = part[eager[part.index]]
        graphs = [
            *part.loc[~eager[part.index], ['ms', 'queued']].to_numpy().flat,
            *part['graph'].dropna(),
        ]
        missing = 'not run'
        rows.append(
            [
                names[net],
                precisions[prec],
                'channels-last' if last else 'contiguous',
                span(*steps[['ms', 'queued']].to_numpy().flat) if len(steps) else missing,
                span(*steps['gpu'].dropna()) if steps['gpu'].notna().any() else missing,
                f'{steps["kernels"].max():,.0f}' if steps['kernels'].notna().any() else missing,
                span(*graphs) if graphs else missing,
                f'{steps["GiB"].dropna().iloc[0]:.1f}' if len(steps) else missing,
            ]
        )
    places = list(names.values()), list(precisions.values()), ['contiguous', 'channels-last']
    return sorted(
        rows, key=lambda row: [place.index(cell) for place, cell in zip(places, row, strict=False)]
    )


def memory() -> list[Row]:
    """multi_gpu.md: MiB that training.py's ``bytes_kept`` counts for one image."""
    table = read('memory_1.1.0.csv').set_index(['arch', 'image', 'precision', 'option'])['MiB']
    return [
        [
            arch.upper(),
            image + ', bfloat16' * (precision == 'bfloat16'),
            *(
                f'{table[arch, image, precision, o]:.0f}'
                for o in ('plain', 'activations', 'with_cp')
            ),
        ]
        for arch in ('s0', 's2')
        for image, precision in (
            ('512x512', 'float32'),
            ('512x512', 'bfloat16'),
            ('800x1344', 'float32'),
        )
    ]


def kernels() -> list[Row]:
    """gpu_figures.md: what counts.py counts."""
    names = dict(s0='CARE-S0', s1='CARE-S1', s2='CARE-S2', repvit_m1_1='RepViT-M1.1')
    names |= dict(mobilenetv4_conv_medium='MobileNetV4-Conv-M', resnet50='ResNet-50')
    names['swin_tiny_patch4_window7_224'] = 'Swin-T'
    table = read('counts_1.1.0.csv').set_index(['arch', 'precision'])
    rows: list[Row] = []
    for arch, name in names.items():
        counted = [table.loc[arch, precision] for precision in ('float32', 'bfloat16')]
        cells = ((f'{each["kernels"]:,.0f}', f'{each["GB"]:.1f}') for each in counted)
        rows.append([name, *(cell for pair in cells for cell in pair)])
    return rows


# What the paper has, and what is counted.


def paper() -> pd.DataFrame:
    """Read the paper's figures."""
    table = pd.read_csv(ROOT / 'benchmarks/paper.csv', dtype=str, na_filter=False)
    return table.set_index('network')


def papers(*columns: str) -> list[Row]:
    """paper.md: a table of the paper's figures."""
    table = paper()[list(columns)]
    return [
        [name, *row] for name, row in zip(table.index, table.to_numpy(), strict=True) if any(row)
    ]


def listed(folder: str) -> dict[str, dict[str, Any]]:
    """Read the counts of a folder's configs, which the tests compare with the models."""
    models = yaml.safe_load((ROOT / 'configs' / folder / 'metafile.yml').read_text())['Models']
    return {Path(model['Config']).stem: model['Metadata'] for model in models}


def costs() -> list[Row]:
    """README: costs of the backbones, and the paper's accuracies."""
    rows: list[Row] = []
    for (name, row), counts in zip(
        list(paper().iterrows())[:3], listed('mask_rcnn').values(), strict=False
    ):
        counted = f'{counts["Backbone Parameters"]:,}', f'{counts["Backbone GMACs"]:.2f}'
        rows.append([name, *counted, *row[['top1', 'box_ap', 'mask_ap', 'miou']]])
    return rows


def configs(folder: str, columns: Sequence[str]) -> list[Row]:
    """READMEs of configs: counts, and the paper's figures; ``gmacs`` is counted by a slow test."""
    rows: list[Row] = []
    for stem, counts in listed(folder).items():
        figures = paper().loc[f'CARE-{stem.split("_")[1].upper()}']
        if stem not in {path.stem for path in (ROOT / 'configs' / folder).glob('*_s?_*.py')}:
            continue
        cells: dict[str, Any] = dict(gmacs=None, ours='')
        cells['parameters'] = f'{counts["Parameters"]:,}'
        if 'Backbone Parameters' in counts:
            cells['backbone'] = f'{counts["Backbone Parameters"]:,}'
            cells['backbone_gmacs'] = f'{counts["Backbone GMACs"]:.2f}'
        distilled = 'distill' in stem
        row = [cells[c] if c in cells else '' if distilled else figures.get(c) for c in columns]
        rows.append([f'[{stem}]({stem}.py)', *row])
    return rows


def ablations() -> list[Row]:
    """configs/ablation: counts, and the paper's figures."""
    printed = pd.read_csv(ROOT / 'mmcare/analysis/paper.csv', dtype=str, na_filter=False)
    gmacs = dict(zip(printed['config'], printed['GMACs'], strict=True))
    times = pd.read_csv(ROOT / 'benchmarks/paper_ablations.csv', dtype=str, na_filter=False)
    times, rows = times.set_index('config'), []
    for stem, counts in listed('ablation').items():
        parameters = f'{counts["Parameters"]:,}'
        name = f'[{stem}]({stem}.py)'
        figures = [gmacs[f'ablation/{stem}'], None, *times.loc[stem]]
        rows.append([name, None, parameters, None, *figures, ''])
    full = listed('imagenet')
    for name, row in list(paper().iterrows())[:3]:
        counts = full[f'care_{name[-2:].lower()}_in1k']
        figures = [row['gmacs_224'], None, row['iphone13_ms_224'], row['rtx4090_batch64_ms_224']]
        rows.append([None, None, f'{counts["Parameters"]:,}', None, *figures, row['top1'], ''])
    return rows


def families() -> list[Row]:
    """families.md: the largest error in each format, and in float16; agreement with the toolbox."""
    table, rows = read('families_1.1.0.csv'), []
    for (name, config), cells in table.groupby(['family', 'config'], sort=False):
        of = cells.set_index('format').to_dict('index')
        equal = of['onnx']['equal']
        is_classifier = of['onnx']['toolbox'] == 'mmpretrain'
        agreement = '–' if pd.isna(equal) else f'{equal:.0e}' if is_classifier else f'{equal:.2f}'
        photographs = of['onnx']['photographs']
        row = [name, f'`{Path(config).name}`', agreement]
        row.append('–' if pd.isna(photographs) else f'{photographs:.2f}')
        for format_name in FAMILY_FORMATS:
            cell = of.get(format_name, {})
            errors = [cell.get(key) for key in ('error', 'float16')]
            row.append(', '.join(f'{x:.0e}' for x in errors if x is not None and x == x) or '–')
        rows.append(row)
    return rows


def reasons() -> list[Row]:
    """families.md: why a family has no file in a format, or none in float16."""
    table = read('families_1.1.0.csv').dropna(subset=['reason'])
    short = table['reason'].map(partial(shorten, width=200, placeholder=' ...'))
    return table[['family', 'format']].assign(reason=short).to_numpy().tolist()


FAMILY_FORMATS = 'onnx', 'litert', 'executorch', 'coreml', 'ncnn'
RIVALS = ' | onnxruntime | openvino'
TIMES = 'class | backbone | top-1, %'
ENGINES = (
    'x onnxruntime | onnxruntime | onnxruntime-int8 | openvino | openvino-bf16 | openvino-int8 | '
    'xnnpack | xnnpack-int8 | litert | litert-int8 | ncnn'
)
RUN = 'minus CARE-S0 | parameters, M | GMACs | time, x CARE-S0'
COUNTS = 'Parameters | GMACs | Backbone parameters | Backbone GMACs'
ONE_STAGE = ('parameters', 'gmacs', 'backbone', 'backbone_gmacs', 'ours')
RECORDED: dict[Name, Callable[[], list[Row]]] = {
    (
        'README.md',
        ' | parameters | GMACs at 512x512 | ImageNet top-1 | COCO box AP | COCO mask AP | '
        'ADE20K mIoU',
    ): costs,
    (
        'README.md',
        ' | DSB2018 (nuclei), mask AP | BCCD (blood cells), box AP | CamVid (streets), mIoU',
    ): public_sets,
    ('docs/app.md', 'model | input | top left | `center` | stretched | smoothed'): letterboxes,
    ('docs/boards.md', ' | MB | box AP, mask AP in ONNX Runtime | in OpenVINO'): int8_onnx,
    (
        'docs/boards.md',
        'in 8 bits | time in ONNX Runtime | time in OpenVINO | dB, CARE-S0 | dB, the demo',
    ): int8_operators,
    (
        'docs/boards.md',
        ' | installed, MB | seconds to the first result | memory after the first result, MB | '
        'ms for a frame: prepare, run, read results | memory added by 500 frames, MB',
    ): device,
    (
        'docs/exported_figures.md',
        'head | Core ML | ONNX | ONNX, float16 | ExecuTorch | ncnn | LiteRT | LiteRT, float16',
    ): heads,
    (
        'docs/exported_figures.md',
        '`--proposals` | 20 | 50 | 100, the default | 200 | 1000',
    ): proposals,
    (
        'docs/exported_figures.md',
        'with 100 proposals | MB | time | box, mask AP',
    ): two_stage_formats,
    (
        'docs/exported_figures.md',
        '`--proposals` | 20 | 50 | 100 | 200 | 1000',
    ): proposals_on_pedestrians,
    (
        'docs/exported_figures.md',
        'MB, ms | Mask R-CNN, its backbone | Semantic FPN',
    ): exported_sizes,
    (
        'docs/exported_figures.md',
        'metrics | Mask R-CNN: box AP, mask AP | Semantic FPN: mIoU, pixel accuracy',
    ): exported_metrics,
    (
        'docs/families.md',
        'family | config | as the toolbox | photographs | ONNX | LiteRT | ExecuTorch | Core ML | '
        'ncnn',
    ): families,
    ('docs/families.md', 'family | format | reason'): reasons,
    (
        'docs/families.md',
        'backbone | parameters of the detector, M | `.tflite`, MB | box AP on validation | AP50 | '
        'time',
    ): exported_yolox,
    ('docs/latency.md', f'{TIMES}{RIVALS}'): partial(latencies, 'latency_1.0.0.json', 0),
    ('docs/latency.md', RIVALS): partial(latencies, 'latency_1.0.0.json', 1),
    (
        'docs/latency.md',
        f'{TIMES}{RIVALS} | openvino-bf16 | openvino-bf16, x float32 | xnnpack | litert',
    ): partial(latencies, 'latency_avx512_1.1.0.json', 0),
    ('docs/latency.md', f'{RIVALS} | openvino-bf16 | xnnpack | litert'): partial(
        latencies, 'latency_avx512_1.1.0.json', 1
    ),
    ('docs/latency.md', ENGINES): engines,
    ('docs/latency.md', ' | ExecuTorch | ONNX Runtime'): operators,
    ('docs/latency.md', 'side, pixels | 256 | 384 | 512 | 768'): sweep,
    (
        'docs/gpu_figures.md',
        'recipe | precision | images in a step | ms a step | ms an image | GPU computes, ms | '
        'GiB | hours on 1 GPU | on 8 GPUs',
    ): gpu_recipes,
    (
        'docs/gpu_figures.md',
        'network | precision | layout | ms | GPU computes, ms | kernels | graph, ms | GiB',
    ): gpu_backbones,
    ('docs/multi_gpu.md', "backbone | image | `False` | `'activations'` | `True`"): memory,
    (
        'docs/gpu_figures.md',
        'network | float32: kernels | float32: GB moved | bfloat16: kernels | bfloat16: GB moved',
    ): kernels,
    (
        'docs/paper.md',
        "network (the paper's figures) | GMACs at 224 | top-1 | iPhone 13 at 224, ms | "
        'iPad Pro, ms | Intel i9, ms | RTX 4090, 64 images, ms',
    ): partial(
        papers,
        *('gmacs_224', 'top1', 'iphone13_ms_224', 'ipad_pro_ms_224', 'i9_ms_224'),
        'rtx4090_batch64_ms_224',
    ),
    (
        'docs/paper.md',
        "network (the paper's figures) | GMACs at 512 | iPhone 13 at 512, ms | RTX 4090, s | "
        'box AP | mask AP | mIoU',
    ): partial(
        papers, 'gmacs_512', 'iphone13_ms_512', 'rtx4090_s_512', 'box_ap', 'mask_ap', 'miou'
    ),
    (
        'docs/results.md',
        f'backbone | rate | mask AP on validation | mask AP | mask AP50 | box AP | {RUN}',
    ): partial(accuracy_of, 'dsb2018'),
    (
        'docs/results.md',
        f'backbone | rate | box AP on validation | box AP | AP50 (VOC) | {RUN}',
    ): partial(accuracy_of, 'bccd'),
    (
        'docs/results.md',
        f'backbone | rate | mIoU on validation | mIoU | pixel accuracy | {RUN}',
    ): partial(accuracy_of, 'camvid'),
    ('docs/results.md', 'sides padded to multiples of | validation | test'): padding,
    ('docs/results.md', 'recipe of CARE-S0 | box AP'): bccd_recipes,
    ('docs/results.md', '`detector.py`, box AP | rate 1e-3 | rate 3e-3'): pedestrians,
    (
        'configs/ablation/README.md',
        'Config | Row of the paper | Parameters | GMACs at 224 | GMACs (paper) | '
        'Backbone parameters | iPhone 13, ms (paper) | RTX 4090, ms (paper) | Top-1 (paper) | '
        'Top-1 (ours)',
    ): ablations,
    (
        'configs/imagenet/README.md',
        'Config | Parameters | GMACs at 224 | Backbone parameters | Top-1 (paper) | Top-1 (ours)',
    ): partial(configs, 'imagenet', ('parameters', 'gmacs', 'gmacs', 'top1', 'ours')),
    (
        'configs/mask_rcnn/README.md',
        'Config | Parameters | Backbone parameters | Backbone GMACs | Box AP (paper) | '
        'Mask AP (paper) | Box AP (ours) | Mask AP (ours)',
    ): partial(
        configs,
        'mask_rcnn',
        ('parameters', 'backbone', 'backbone_gmacs', 'box_ap', 'mask_ap', 'ours', 'ours'),
    ),
    ('configs/fpn/README.md', f'Config | {COUNTS} | mIoU (paper) | mIoU (ours)'): partial(
        configs, 'fpn', (*ONE_STAGE[:4], 'miou', 'ours')
    ),
    ('configs/retinanet/README.md', f'Config | {COUNTS} | Box AP (ours)'): partial(
        configs, 'retinanet', ONE_STAGE
    ),
    ('configs/rtmdet/README.md', f'Config | {COUNTS} | Box AP (ours)'): partial(
        configs, 'rtmdet', ONE_STAGE
    ),
    ('configs/upernet/README.md', f'Config | {COUNTS} | mIoU (ours)'): partial(
        configs, 'upernet', ONE_STAGE
    ),
}
RECORDED |= fresh_tables()
# Settings, shapes, limits, versions, and what others published with its source.
STATED: set[Name] = {
    ('README.md', 'environment | what to type'),
    ('docs/app.md', 'platform | file | options | what opens it'),
    ('docs/app.md', ' | output | what the app does'),
    ('docs/app.md', 'format | `nms` | boxes'),
    ('docs/boards.md', 'engine | reads these files | evidence'),
    ('docs/boards.md', 'option | what it does'),
    ('docs/boards.md', 'option of the commands | what it does'),
    ('docs/families.md', 'family | reason'),
    (
        'docs/exported_figures.md',
        'phone and engine | file | option of the engine | computes in | evidence',
    ),
    ('docs/deploy.md', '`--format` | file | `--precision`, default first | checked with'),
    ('docs/deploy.md', 'option | what it does'),
    ('docs/description.md', 'key | value'),
    ('docs/description.md', 'key of the input | value'),
    ('docs/description.md', 'key of `decode` | value'),
    ('docs/deploy.md', ' | limit'),
    ('docs/deploy.md', 'option | what is exported | outputs'),
    ('docs/faq.md', 'operators that are needed | models'),
    ('docs/interfaces.md', 'argument | what it loads'),
    ('docs/interfaces.md', 'library | line | what was run'),
    (
        'docs/multi_gpu.md',
        'GPUs | COCO, Mask R-CNN | ADE20K, Semantic FPN | ADE20K, UperNet | ImageNet',
    ),
    ('docs/multi_gpu.md', 'folder | why'),
    ('docs/multi_gpu.md', 'backend | COCO | ADE20K | ImageNet'),
    ('docs/multi_gpu.md', 'setting | what to know'),
    ('docs/paper.md', " | the paper's text | the released network, and mmcare's"),
    ('docs/recipes.md', 'setting | `configs/imagenet` | paper, 4.1 | released script'),
    ('docs/recipes.md', 'setting | `configs/mask_rcnn` | paper, 4.2 | peers'),
    ('docs/recipes.md', 'setting | `configs/fpn` | paper, 4.3 | peers'),
    ('docs/recipes.md', "setting | `configs/upernet` | MLLA-B and mmseg's Swin"),
    ('docs/recipes.md', 'repository | files'),
    ('docs/results.md', ' | '),
    ('docs/results.md', 'set | published result | what differs'),
    ('docs/resume.md', 'problem | what happens'),
    ('docs/resume.md', 'state | with our hooks'),
    (
        'docs/use_in_your_project.md',
        '`arch` | `out_channels` (strides 4, 8, 16, 32) | with `expand_last=False`',
    ),
    ('docs/use_in_your_project.md', 'hook | what it does | switch it off with `--cfg-options`'),
    (
        'docs/use_in_your_project.md',
        'project | configs that ran | constructor | what to mind, besides `in_channels`',
    ),
    ('configs/README.md', 'Folder | Toolbox | Task'),
    ('configs/demo/README.md', 'Config | Data | Goal'),
    ('projects/phone/README.md', 'option | '),
    ('projects/phone/README.md', ' | '),
    ('projects/phone/README.md', 'what | limit'),
}


def differences(rows: list[list[str]], wanted: list[Row]) -> Iterator[str]:
    """Compare the cells of a table."""
    if (shape := [len(row) for row in rows]) != [len(row) for row in wanted]:
        yield f'has rows of {shape} cells, its recording {[len(row) for row in wanted]}'
        return
    for cells, recorded in zip(rows, wanted, strict=True):
        for cell, value in zip(cells, recorded, strict=True):
            if value is not None and cell != value:
                yield f'{" | ".join(cells)}: has {cell!r}, its recording {value!r}'


def check(page: str, text: str) -> Iterator[str]:
    """Yield what is wrong with the tables of a page."""
    if '<table' in text:
        yield f'{page} has a table in HTML, which is not checked'
    seen: set[str] = set()
    for header, rows in find_tables(text):
        name = page, header
        if name in RECORDED:
            yield from (f'{page}: {each}' for each in differences(rows, RECORDED[name]()))
        elif has_figures(rows) and name not in STATED:
            yield f'{page}: the table {header!r} has figures and is assigned to no recording'
        if has_figures(rows) and header in seen:
            yield f'{page} has two tables {header!r}: name them apart'
        seen.add(header)


def pages() -> Iterable[Path]:
    """Find the pages."""
    return sorted(path for place in PLACES for path in ROOT.glob(place))


def main() -> None:
    """Check all pages, and names that no page has any more."""
    wrong: list[str] = []
    names: set[Name] = set()
    for path in pages():
        page, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding='utf-8')
        wrong += check(page, text)
        names |= {(page, header) for header, _ in find_tables(text)}
    gone = {*RECORDED, *STATED} - names
    wrong += [f'{page} has no table {header!r} any more' for page, header in sorted(gone)]
    print(f'{len(RECORDED)} tables compared with their recordings')
    sys.exit('\n'.join(wrong) or None)


if __name__ == '__main__':
    main()
