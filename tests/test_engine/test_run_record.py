"""What a run consists of is in its log and in its checkpoints."""

import hashlib

import torch
from helpers import THIN, newer, random_backbone
from mmengine.config import Config
from mmengine.dataset import BaseDataset, ConcatDataset
from toy_training import Numbers, StopAt, train

import mmcare
from mmcare.convert import convert_checkpoint
from mmcare.engine.run_record import find_unshared
from mmcare.models import CARE
from mmcare.weights.reading import read_checkpoint

RECORD = dict(type='mmcare.RunRecordHook')


class Listed(BaseDataset):
    """The numbers, with an annotation file."""

    def load_data_list(self):
        return [{}] * 8

    def __getitem__(self, index):
        return Numbers()[index]


def test_runs_are_recorded(tmp_path, logged):
    """The first one, and the one that resumes with other workers; a third one is the same again."""
    file = tmp_path / 'list.json'
    file.write_text('[1]')
    data = Listed(ann_file=str(file), metainfo=dict(classes=('a', 'b')))
    for resume, workers, stop in ((False, 0, 5), (True, 1, 9), (True, 1, 13)):
        loader = dict(dataset=data, num_workers=workers)
        train(tmp_path / 'run', resume=resume, hooks=[RECORD, StopAt(stop)], loader=loader)
    last = (tmp_path / 'run/last_checkpoint').read_text()
    runs = torch.load(last, weights_only=True)['meta']['mmcare_runs']
    assert [run['iteration'] for run in runs] == [0, 4]
    assert [run['world']['num_workers'] for run in runs] == [0, 1]
    digest = hashlib.sha256(b'[1]').hexdigest()
    assert all(run['data']['train']['annotations'] == {'list.json': digest} for run in runs)
    assert runs[0]['versions']['mmcare'] == mmcare.__version__
    assert runs[0]['versions']['torch'] == torch.__version__
    texts = [text for _, text in logged if text.startswith('This run:')]
    assert len(texts) == 3 and digest in texts[0]
    assert [run['weights'] for run in runs] == [{}, {}]


def test_files_of_the_same_name_have_their_own_digests(tmp_path):
    """As those of two converted data sets in a ConcatDataset."""
    digests = {}
    for folder in 'ab':
        (tmp_path / folder).mkdir()
        (tmp_path / folder / 'train.json').write_text(folder)
        digests[folder] = hashlib.sha256(folder.encode()).hexdigest()
    parts = [Listed(ann_file=str(tmp_path / folder / 'train.json')) for folder in 'ab']
    train(tmp_path / 'run', hooks=[RECORD, StopAt(9)], loader=dict(dataset=ConcatDataset(parts)))
    last = (tmp_path / 'run/last_checkpoint').read_text()
    (run,) = torch.load(last, weights_only=True)['meta']['mmcare_runs']
    wanted = {'train.json': digests['a'], 'train.json (2)': digests['b']}
    assert run['data']['train']['annotations'] == wanted


@newer
def test_exports_and_conversions_keep_the_record(tmp_path, monkeypatch):
    """Without the command: it has paths of the machine that trained."""
    from mmcare.export import load_model

    monkeypatch.setitem(CARE.arch_zoo, 'thin', THIN)
    runs = [dict(command='a'), dict(command='python /home/me', versions=dict(torch='2.0'))]
    state = dict(meta=dict(mmcare_runs=runs), state_dict=random_backbone().state_dict())
    torch.save(state, tmp_path / 'trained.pth')
    convert_checkpoint(tmp_path / 'trained.pth', tmp_path / 'published.pth')
    assert read_checkpoint(tmp_path / 'published.pth')['meta']['mmcare_runs'] == runs
    Config(dict(model=dict(type='mmcare.CARE', arch=THIN))).dump(tmp_path / 'config.py')
    loaded = load_model(tmp_path / 'config.py', tmp_path / 'trained.pth')
    assert loaded.metadata == dict(training=dict(versions=dict(torch='2.0')))


def test_folders_that_do_not_exist_yet(tmp_path):
    """MMEngine makes the folder in which metrics are collected only when it needs it."""
    assert not find_unshared({'folder for metrics': str(tmp_path / 'new'), 'current folder': '.'})
    assert not [*(tmp_path / 'new').iterdir()]
