"""What a run consists of is in its log and in its checkpoints."""

import hashlib

import torch
from mmengine.dataset import BaseDataset
from toy_training import Numbers, StopAt, train

import mmcare

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
