"""A resumed run ends with the weights of an uninterrupted one, or says why it cannot."""

import os
import random
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import assert_equal, warned
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from toy_training import EPOCHS, ITERATIONS, Model, Numbers, StopAt, build, saved, train

from mmcare.engine.training_state import SeededLoader, end_with_parent
from mmcare.weights.reading import CheckpointError

PLAIN_SGD = dict(state={}, param_groups=[dict(momentum=0)])
ADAM = dict(optimizer=dict(type='AdamW', lr=0.05))
EMPTY_ADAM = dict(state={}, param_groups=[dict(betas=1)])


def test_exact_resume_with_workers(tmp_path):
    for exact in (True, False):
        options = dict(exact=exact, loader=dict(num_workers=2))
        train(tmp_path / f'whole_{exact}', **options)
        train(tmp_path / f'parts_{exact}', hooks=[StopAt(9)], **options)
        assert saved(tmp_path / f'parts_{exact}')['last'] == 8
        train(tmp_path / f'parts_{exact}', resume=True, **options)
        same = saved(tmp_path / f'parts_{exact}') == saved(tmp_path / f'whole_{exact}')
        assert same == exact


def test_workers_draw_other_numbers_in_each_epoch(tmp_path):
    """MMEngine seeds them alike in every epoch, so that augmentations would repeat."""
    seen, hook = [], Hook()
    hook.before_train_iter = lambda _, **given: seen.append(given['data_batch']['inputs'])
    loader = dict(num_workers=1, sampler=dict(type='DefaultSampler', shuffle=False))
    train(tmp_path, hooks=[hook], loader=loader)
    epochs = torch.stack(seen).unflatten(0, (EPOCHS, -1))
    assert not torch.equal(epochs[0], epochs[1])


def test_iterations_and_seeds_draw_other_numbers(tmp_path):
    """Iterations of runs with neighboring seeds do not share numbers either."""
    runner = train(tmp_path, hooks=[StopAt(0)])
    draws = []
    for runner._seed in (3, 4):
        for runner.train_loop._iter in (5, 6):
            runner.call_hook('before_train_iter', batch_idx=0)
            draws.append(torch.rand(()).item())
    assert len(set(draws)) == 4


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(by_epoch=False, loader=dict(num_workers=0)), 'Set train_dataloader.num_workers'),
        (dict(randomness=dict(seed=None)), 'Set randomness.seed'),
        (dict(loader=dict(num_workers=1, persistent_workers=True)), 'persistent_workers=False'),
        (dict(by_epoch=False, loader=dict(num_workers=1, persistent_workers=True)), None),
        (dict(checkpoint=dict(by_epoch=False)), 'Set default_hooks.checkpoint.by_epoch=True'),
        (dict(by_epoch=False, checkpoint=dict(by_epoch=True)), 'checkpoint.by_epoch=False'),
        (
            dict(optim_wrapper=dict(ADAM, accumulative_counts=3)),
            'a multiple of accumulative_counts',
        ),
        (dict(optim_wrapper=dict(ADAM, accumulative_counts=4)), None),
        (dict(), None),
    ],
)
def test_warns_where_it_cannot_be_exact(tmp_path, logged, options, words):
    train(tmp_path, hooks=[StopAt(0)], **options)
    texts = warned(logged, 'not reproduce')
    assert len(texts) == bool(words) and all(words in text for text in texts)


ADAM_GROUP = dict(lr=1, betas=(0, 0), eps=1, weight_decay=0)
NAN = torch.full((8,), float('nan'))


def rename(checkpoint):
    checkpoint['state_dict']['layer.0.other'] = checkpoint['state_dict'].pop('layer.0.weight')


def reshape(checkpoint):  # as of a head with another number of classes
    checkpoint['state_dict']['layer.3.bias'] = torch.zeros(2)


def unwrap(checkpoint):
    for key in [*checkpoint['state_dict']]:
        checkpoint['state_dict'][f'module.{key}'] = checkpoint['state_dict'].pop(key)


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (rename, r'1 weights of the model .*: layer\.0\.weight'),
        (reshape, r'1 weights of the model .*: layer\.3\.bias'),
        (unwrap, None),
        (lambda checkpoint: checkpoint.pop('optimizer'), 'the state of the optimizer is missing'),
        (dict(optimizer=EMPTY_ADAM), 'the state of the optimizer is missing'),
        (dict(optimizer=dict(a=PLAIN_SGD, b=EMPTY_ADAM)), 'the state of the optimizer is missing'),
        (
            dict(optimizer=dict(state={0: {}}, param_groups=[dict(lr=1, momentum=0)])),
            'its optimizer has no betas, eps, weight_decay, which the AdamW of the run needs',
        ),
        (
            dict(optimizer=dict(state={0: {}}, param_groups=[dict(ADAM_GROUP, params=[0, 1])])),
            'its optimizer has 2 parameters in 1 groups, the AdamW of the run has 6 parameters',
        ),
        (lambda c: c['state_dict'].update({'layer.1.running_var': NAN}), 'not finite, such as'),
        (dict(param_schedulers=[]), 'it has 0 schedulers, the run has 1'),
        (dict(param_schedulers=[{}, {}]), 'it has 2 schedulers, the run has 1'),
    ],
)
def test_incomplete_resume_is_refused(tmp_path, change, words):
    train(tmp_path, hooks=[StopAt(5)])
    checkpoint = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)
    checkpoint.update(change) if isinstance(change, dict) else change(checkpoint)
    file = tmp_path / 'epoch_1.pth'
    torch.save(checkpoint, file)
    refused = pytest.raises(CheckpointError, match=rf'epoch_1\.pth.*{words}.*load_from')
    with refused if words else nullcontext():
        train(tmp_path, resume=True, load_from=str(file), hooks=[StopAt(5)])


def test_another_schedule_is_a_warning(tmp_path, logged):
    """MMEngine keeps the checkpoint's, whose rate may have ended."""
    for t_max in (EPOCHS, 9):
        schedule = dict(type='CosineAnnealingLR', T_max=t_max)
        train(tmp_path, resume=t_max == 9, hooks=[StopAt(5)], param_scheduler=schedule)
    (text,) = warned(logged, 'are kept')
    assert f'ignored: CosineAnnealingLR.T_max={EPOCHS} (config: 9). To use' in text


def test_a_schedule_names_the_length_of_epochs(tmp_path, logged):
    """The config is the same; twice as many images a step halve the epoch."""
    schedule = dict(type='LinearLR', end=3, by_epoch=True, convert_to_iter_based=True)
    for batch_size in (2, 4):
        options = dict(loader=dict(batch_size=batch_size), param_scheduler=schedule)
        train(tmp_path, resume=batch_size == 4, hooks=[StopAt(5)], **options)
    (text,) = warned(logged, 'are kept')
    assert 'LinearLR.end=12 (config: 6)' in text
    assert 'An epoch has 2 iterations, and had 4: 6 are left.' in text


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (dict(loader=dict(num_workers=2)), ['num_workers=1 (now 2): augmentations']),
        (
            dict(loader=dict(batch_size=4)),
            ['on 48 images in place of 24', 'at image 8 of the sampler, and goes on at image 16',
             '8 images are skipped'],
        ),
        (dict(optim_wrapper=dict(ADAM, accumulative_counts=2)), ['has 4 images in place of 2',
                                                               '1.41 times']),
        ({}, []),
    ],
)  # fmt: skip
def test_a_resume_in_another_world_says_so(tmp_path, logged, change, words):
    for resume, options in (False, {}), (True, change):
        train(tmp_path, by_epoch=False, resume=resume, hooks=[StopAt(4 + resume)], **options)
    texts = warned(logged, 'The checkpoint is of')
    assert len(texts) == bool(words) and all(word in texts[0] for word in words)


def test_replayed_batches_are_counted_in_the_log(tmp_path, logged, monkeypatch):
    """In each epoch of the sampler: these 8 batches are two of them."""
    monkeypatch.setattr('mmcare.engine.hooks.exact_resume_hook.EVERY', 0)
    monkeypatch.setattr('mmengine.runner.loops.time', SimpleNamespace(sleep=id))  # of MMEngine
    options = dict(by_epoch=False, loader=dict(sampler=dict(type='DefaultSampler', shuffle=True)))
    for resume in (False, True):
        train(tmp_path, resume=resume, hooks=[StopAt(9 + resume)], **options)
    texts = [text for _, text in logged if text.startswith('Replaying')]
    assert len(texts) == 8 and ' 8 of 8, about 0 minutes left' in texts[-1]


@pytest.mark.parametrize(
    ('first', 'second', 'words'),
    [
        (dict(lr=0.05), dict(lr=0.1), 'lr=0.05 (config: 0.1)'),
        (dict(weight_decay=0.1), dict(betas=(0.8, 0.9)),
         'betas=[0.9, 0.999] (config: [0.8, 0.9]), weight_decay=0.1 (config: 0.01)'),
        (dict(type='SGD', momentum=0.5), dict(type='SGD', momentum=0.6),
         'momentum=0.5 (config: 0.6)'),
        (dict(eps=1e-8), {}, None),
        (dict(foreach=True), dict(foreach=False), None),
    ],
)  # fmt: skip
def test_another_setting_of_the_optimizer_is_a_warning(tmp_path, logged, first, second, words):
    """PyTorch keeps the checkpoint's. Schedulers change rates; they start from the same ones."""
    for resume, options in (False, first), (True, second):
        optimizer = dict(dict(type='AdamW', lr=0.05), **options)
        wrapper = dict(optimizer=optimizer)
        train(tmp_path, resume=resume, hooks=[StopAt(5 + resume)], optim_wrapper=wrapper)
    texts = warned(logged, 'are kept')
    assert len(texts) == bool(words) and all(f'ignored: {words}. To use' in text for text in texts)


def test_optimizers_without_state_resume(tmp_path):
    options = dict(optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)))
    train(tmp_path, hooks=[StopAt(5)], **options)
    assert train(tmp_path, resume=True, **options).epoch == EPOCHS


@pytest.mark.parametrize('evaluate', ['val', 'test'])
def test_a_config_of_a_resumed_run_evaluates(tmp_path, evaluate):
    """``resume=True`` with a best checkpoint, which has neither optimizer nor schedulers."""
    train(tmp_path, hooks=[StopAt(5)])
    best = tmp_path / 'best_acc_epoch_1.pth'
    assert 'optimizer' not in torch.load(best, weights_only=True)
    runner = build(tmp_path, resume=True, load_from=str(best))
    getattr(runner, evaluate)()
    assert runner._has_loaded


def assert_resumes(tmp_path, iteration, kind=Model, hooks=(), loader=dict, **options):
    """Compare a run with one that is interrupted before an iteration, and resumed."""
    for folder, more in dict(
        whole=dict(hooks=hooks),
        parts=dict(hooks=[*hooks, StopAt(iteration)]),
        resumed=dict(hooks=hooks, resume=True),
    ).items():
        torch.manual_seed(0)  # of the weights
        options.update(model=kind(), loader=loader(), **more)
        train(tmp_path / folder.replace('resumed', 'parts'), **options)
        if folder == 'parts':
            assert saved(tmp_path / folder)['last'] == iteration // ITERATIONS * ITERATIONS
    assert saved(tmp_path / 'parts') == saved(tmp_path / 'whole')
    return saved(tmp_path / 'whole')['last']


def test_a_scheduler_that_waits_for_metrics(tmp_path):
    """Checkpoints precede its step, so the validation is repeated."""
    plateau = dict(type='ReduceOnPlateauLR', monitor='acc', rule='greater', patience=0)
    options = dict(checkpoint=dict(save_best=None), param_scheduler=plateau)
    assert_resumes(tmp_path, 3 * ITERATIONS + 1, **options)


def test_early_stopping_keeps_its_count(tmp_path):
    """It waits for two epochs, one of them before the interruption."""
    stopping = dict(type='EarlyStoppingHook', monitor='acc', min_delta=9, patience=2)
    options = dict(hooks=[stopping], checkpoint=dict(save_best=None))
    last = assert_resumes(tmp_path, 2 * ITERATIONS + 1, **options)
    assert last == 3 * ITERATIONS < EPOCHS * ITERATIONS


class Sized(Model):
    """As mmdet's BatchSyncRandomResize: a size that is drawn anew from time to time."""

    def __init__(self):
        super().__init__()
        self._input_size = None
        self.count = 0

    def forward(self, inputs, mode='tensor'):
        loss = super().forward(inputs * (self._input_size or (1.0,))[0], mode)
        self.count += 1
        if self.count % 6 == 0:
            self._input_size = (random.uniform(0.5, 2), 1)
        return loss


def test_numbers_of_modules_resume(tmp_path):
    """Also those that do not change again after the first resume."""
    assert_resumes(tmp_path, 2 * ITERATIONS + 1, Sized)
    for _ in range(2):
        train(tmp_path / 'again', hooks=[StopAt(9)], resume=True, model=Sized())
    state = torch.load(tmp_path / 'again' / 'epoch_2.pth', weights_only=True)['training_state']
    assert state['', 'count'] == 2 * ITERATIONS and ('', 'training') not in state


class Priors(Model):
    """As heads of mmyolo and mmpose: priors for the sizes of maps, computed when these change."""

    def __init__(self, kind='attribute', count=False):
        super().__init__()
        self.sizes, self.kind, self.count = None, kind, count and 0
        if kind == 'attribute':
            self.priors = None
        elif kind != 'new':
            self.register_buffer('priors', None, persistent=kind == 'buffer')

    def forward(self, inputs, mode='tensor'):
        sizes = [inputs.shape]
        if sizes != self.sizes:
            self.sizes, self.levels, self.priors = sizes, [1], inputs.new_ones(4)
        if self.count is not False:
            self.count += 1
        return super().forward(inputs * self.priors[: 4 * self.levels[0]], mode)


@pytest.mark.parametrize('kind', ['attribute', 'new', 'buffer', 'unsaved buffer'])
def test_objects_are_restored_whole_or_not_at_all(tmp_path, logged, kind):
    """Sizes without their priors would stop the resumed run."""
    assert_resumes(tmp_path, 2 * ITERATIONS + 1, lambda: Priors(kind))
    state = torch.load(tmp_path / 'parts' / 'epoch_4.pth', weights_only=True)['training_state']
    assert state == dict(whole=True) and not warned(logged, 'not reproduce')
    (text, *again) = [text for _, text in logged if 'No checkpoint holds' in text]
    assert 'Priors.levels, Priors.priors, Priors.sizes, which are empty' in text
    assert len(again) == 2  # once in each run


class Evaluated(Model):
    """As mmyolo's heads: validations replace the priors that the constructor made."""

    def __init__(self, trains):
        super().__init__()
        self.sizes, self.priors, self.trains = [(1, 1)], torch.ones(4), trains

    def forward(self, inputs, mode='tensor'):
        if self.trains and self.sizes == [(2, 4)]:  # after a validation
            self.sizes = [(3, 3)]
        return super().forward(inputs, mode)


class Evaluating(Hook):
    def before_val_epoch(self, runner):
        runner.model.sizes, runner.model.priors = [(2, 4)], torch.ones(4)


@pytest.mark.parametrize('trains', [False, True])
def test_what_validations_alone_change(tmp_path, logged, trains):
    train(tmp_path, model=Evaluated(trains), hooks=[Evaluating()])
    texts = warned(logged, 'not reproduce') if trains else [text for _, text in logged]
    (text,) = [text for text in texts if 'Evaluated.priors, Evaluated.sizes' in text]
    assert 'start as constructed' in text if trains else 'fills them again' in text
    assert trains or not warned(logged, 'not reproduce')


def test_a_count_beside_a_tensor_is_named(tmp_path, logged):
    train(tmp_path, model=Priors(count=True))
    (text,) = warned(logged, 'not reproduce')
    assert 'Training changes Priors.count, Priors.levels, Priors.priors, Priors.sizes' in text


class Assigner:
    def __init__(self, threshold):
        self.threshold = threshold


class Holding(Model):
    """As mmdet's DynamicRoIHead: training changes what an assigner does, which is no module."""

    def __init__(self, kind=None):
        super().__init__()
        assigner = Assigner(0.1)
        self.held = {None: assigner, 'list': [assigner], 'dict': dict(a=[assigner])}[kind]
        self.shared = assigner

    def forward(self, inputs, mode='tensor'):
        self.shared.threshold += 0.1
        return super().forward(inputs * self.shared.threshold, mode)


@pytest.mark.parametrize('kind', [None, 'list', 'dict'])
def test_numbers_of_objects_that_modules_hold_resume(tmp_path, logged, kind):
    assert_resumes(tmp_path, 2 * ITERATIONS + 1, lambda: Holding(kind))
    assert not warned(logged, 'not reproduce')


class Averaged(Model):
    """One layer has two names, as in the heads of RTMDet."""

    def __init__(self):
        super().__init__()
        self.again = self.layer[0]


@pytest.mark.parametrize('by_epoch', [True, False])
@pytest.mark.parametrize('options', [dict(momentum=0.1), dict(update_buffers=True, interval=3)])
def test_averaged_weights_resume(tmp_path, logged, options, by_epoch):
    """Of both: those that train and those that EMAHook averages, in the loop's validations too."""
    averaging = dict(type='EMAHook', **options)
    loader = lambda: dict(num_workers=1)  # noqa: E731
    assert_resumes(tmp_path, 2 * ITERATIONS + 1, Averaged, [averaging], loader, by_epoch=by_epoch)
    averages = [
        torch.load(tmp_path / name, weights_only=True)['ema_state_dict']
        for folder in ('whole', 'parts')
        for name in [Path(tmp_path, folder, 'last_checkpoint').read_text()]
    ]
    assert_equal(*averages)
    assert not warned(logged, 'not reproduce')


def test_numbers_that_training_adds_resume(tmp_path):
    class Adding(Sized):
        def forward(self, inputs, mode='tensor'):
            loss = super().forward(inputs, mode)
            if self.count == 6:
                self.added = self._input_size[0]
            loss['loss'] = loss['loss'] * getattr(self, 'added', 1)
            return loss

    assert_resumes(tmp_path, 2 * ITERATIONS + 1, Adding)


def test_parts_of_objects_in_files_of_1_0(tmp_path, logged):
    """It saved the sizes alone."""
    train(tmp_path, hooks=[StopAt(5)], model=Priors())
    file = tmp_path / 'epoch_1.pth'
    checkpoint = torch.load(file, weights_only=True)
    checkpoint['training_state'] = {('', 'sizes'): [(2, 4)], ('', 'other'): 1}
    torch.save(checkpoint, file)
    train(tmp_path, resume=True, model=Priors())
    (text,) = warned(logged, 'not reproduce')
    assert 'Priors.other, Priors.sizes start as constructed' in text


class Mixed(Numbers):
    """A dataset whose pipeline mixes each sample with earlier ones, or draws by itself."""

    def __init__(self, *steps):
        super().__init__()
        self.pipeline = list(steps)

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        for step in self.pipeline:
            sample = step(sample)
        return sample


def decorated(function):
    """Wrap as mmdet's autocast_box_type does, without functools.wraps."""
    return lambda self, sample: function(self, sample)


class Cached:
    """As mmdet's CachedMosaic; it also sets what it needs again and again, as MinIoURandomCrop."""

    def __init__(self):
        self.results_cache, self.factor, self.ignore, self.label = [], 1, None, False

    @decorated
    def __call__(self, sample):
        self.results_cache.append(sample)
        self.index = len(self.results_cache) // 2
        if self.ignore is None:
            self.ignore = 255  # as mmseg's LoadAnnotations
        if self.label is None:  # another pipeline has run it before
            self.label = True
        return sample + self.results_cache[self.index]


class Noisy:
    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, sample):
        return sample + self.generator.random()


class OwnGenerators:
    """As Albumentations' Compose from 1.4.21 on, which ignores the seeds of the run."""

    def __init__(self):
        self.set_random_state(np.random.default_rng(), random.Random())

    def set_random_state(self, generator, python):
        self.generator, self.python = generator, python

    def __call__(self, sample):
        return sample + self.generator.random() + self.python.random()


class Augmented:
    """As mmdet's Albu: a transform around another library's."""

    def __init__(self):
        self.aug = OwnGenerators()

    def __call__(self, sample):
        return self.aug(sample).float()


@pytest.mark.parametrize('workers', [0, 2])
def test_generators_of_other_libraries(tmp_path, workers):
    """They are seeded, so that equally seeded runs are equal, and so are resumed ones."""

    def loader():
        return dict(dataset=Mixed(Augmented(), Augmented()), num_workers=workers)

    assert_resumes(tmp_path, 2 * ITERATIONS + 1, loader=loader)


class Augmenter(list):
    """As imgaug's: a list of augmenters with a generator within an object of its own."""

    def __init__(self, seed, *parts):
        super().__init__(parts)
        self.random_state = SimpleNamespace(generator=np.random.default_rng(seed))

    def __call__(self, sample):
        for part in self:
            sample = part(sample)
        return sample + self.random_state.generator.random()


class Around:
    """As the transforms of mmocr and mmaction2 around imgaug."""

    def __init__(self, seed):
        self.augmenter = Augmenter(seed, Augmenter(seed + 1))
        self.python, self.old = random.Random(seed), np.random.RandomState(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def __call__(self, sample):
        draws = self.python.random() + self.old.rand()
        return (self.augmenter(sample) + draws + torch.rand((), generator=self.torch)).float()


class MixedAround(Mixed):
    """Built by MMEngine, which copies datasets: PyTorch 2.0 cannot copy its generators."""

    def __init__(self, seed):
        super().__init__(Around(seed))


class OwnSampler(torch.utils.data.Sampler):
    """It draws from a generator of its own, or in the main process, as GroupMultiSourceSampler."""

    def __init__(self, seed, endless=False):
        self.generator = None if seed == 'global' else np.random.default_rng(seed)
        self.endless = endless

    def __len__(self):
        return 2 * ITERATIONS

    def __iter__(self):
        while True:
            for _ in range(len(self)):
                yield int((self.generator or np.random).choice(len(self)))
            if not self.endless:
                return


def run_parts(tmp_path, first, second, **options):
    """Run once until an interruption; end this run, and resume it with another loader."""
    for folder, loader, more in (
        ('parts', first, dict(hooks=[StopAt(2 * ITERATIONS + 1)])),
        ('parts', second, dict(resume=True)),
        ('whole', first, {}),
    ):
        torch.manual_seed(0)
        train(tmp_path / folder, model=Model(), loader=loader(), **options, **more)
    return saved(tmp_path / 'parts') == saved(tmp_path / 'whole')


@pytest.mark.parametrize('workers', [0, 1])
def test_generators_within_transforms_resume(tmp_path, workers, logged):
    """They start from other states in each process, as without a seed."""

    def build_loader(seed=1):
        return dict(dataset=dict(type=MixedAround, seed=seed), num_workers=workers)

    assert run_parts(tmp_path, build_loader, lambda: build_loader(2))
    assert not warned(logged, 'not reproduce')


@pytest.mark.parametrize('place', ['sampler', 'batch_sampler'])
def test_samplers_with_generators_resume(tmp_path, place, logged):
    def build_loader(seed=1):
        sampler = OwnSampler(seed)
        if place == 'sampler':
            return dict(sampler=sampler)
        # MMEngine builds batch samplers from dicts.
        return dict(
            sampler=sampler, batch_sampler=dict(type=torch.utils.data.BatchSampler, drop_last=False)
        )

    assert run_parts(tmp_path, build_loader, lambda: build_loader(2))
    assert not warned(logged, 'not reproduce')


class Grouping(torch.utils.data.BatchSampler):
    """It holds some samples within an epoch, as mmdet's AspectRatioBatchSampler does."""

    def __init__(self, sampler, batch_size, keeps_rest):
        super().__init__(sampler, batch_size, drop_last=False)
        self.held, self.keeps_rest = [], keeps_rest

    def __iter__(self):
        for index in self.sampler:
            self.held.append(index)
            if len(self.held) > self.batch_size:
                yield [self.held.pop() for _ in range(self.batch_size)]
        if not self.keeps_rest:
            rest, self.held = self.held, []
            yield rest


@pytest.mark.parametrize('keeps_rest', [False, True])
def test_samplers_that_hold_samples_within_an_epoch(tmp_path, keeps_rest, logged):
    """Checkpoints at the end of an epoch lose nothing, unless some are still held."""
    loader = lambda: dict(batch_sampler=dict(type=Grouping, keeps_rest=keeps_rest))  # noqa: E731
    assert run_parts(tmp_path, loader, loader) != keeps_rest
    assert bool(warned(logged, 'Training changes Grouping.held')) == keeps_rest


@pytest.mark.parametrize('endless', [True, False])
def test_samplers_that_draw_in_the_main_process(tmp_path, logged, monkeypatch, endless):
    """As in mmdet's semi-supervised configs: batches are drawn ahead, and again by a replay."""
    monkeypatch.setattr('mmengine.runner.loops.time', SimpleNamespace(sleep=id))  # of MMEngine

    def loader():
        return dict(sampler=OwnSampler('global', endless), num_workers=1)

    assert_resumes(tmp_path, 2 * ITERATIONS + 1, loader=loader, by_epoch=False)
    assert not warned(logged, 'not reproduce')


def test_batches_that_workers_draw_ahead():
    """A sampler's draws are not repeated, and those without workers."""
    batches = {
        workers: [
            batch.tolist()
            for batch in SeededLoader(
                torch.utils.data.DataLoader(
                    range(2 * ITERATIONS), sampler=OwnSampler('global'), num_workers=workers
                ),
                0,
            )
        ]
        for workers in (0, 1)
    }
    assert batches[0] == batches[1]


class OwnIterator(torch.utils.data.DataLoader):
    """As loaders that keep their workers between epochs: its iterator is not PyTorch's."""

    def __iter__(self):
        yield from super().__iter__()


def test_loaders_with_iterators_of_their_own():
    loader = OwnIterator(range(ITERATIONS))
    assert len([*SeededLoader(loader, 0)]) == ITERATIONS


@pytest.mark.parametrize('second', [1, 2])
def test_replayed_samplers_must_start_alike(tmp_path, second, logged):
    loader = lambda seed: dict(sampler=OwnSampler(seed, True), num_workers=1)  # noqa: E731
    train(tmp_path, by_epoch=False, loader=loader(1), hooks=[StopAt(5)])
    train(tmp_path, by_epoch=False, loader=loader(second), hooks=[StopAt(5)], resume=True)
    texts = warned(logged, 'not reproduce')
    assert len(texts) == (second == 2)
    assert all('starts anew: OwnSampler.generator' in text for text in texts)


class CachedNoisy(Cached, Noisy):
    """Its generator alone is not restored, since its cache is lost."""

    def __init__(self):
        Cached.__init__(self)
        self.generator = np.random.default_rng(0)

    def __call__(self, sample):
        return Noisy.__call__(self, Cached.__call__(self, sample))


def test_generators_of_objects_that_lose_a_cache(tmp_path, logged):
    loader = lambda: dict(dataset=Mixed(CachedNoisy()), num_workers=0)  # noqa: E731
    train(tmp_path, loader=loader(), hooks=[StopAt(5)])
    state = torch.load(tmp_path / 'epoch_1.pth', weights_only=True)
    assert state['random_generators'] == {}
    logged.clear()
    train(tmp_path, loader=loader(), hooks=[StopAt(5)], resume=True)
    text = warned(logged, 'not reproduce')[0]
    assert 'starts anew: CachedNoisy.generator (its state is in no checkpoint)' in text


class Packing:
    """As mmpretrain's PackMultiTaskInputs: it builds transforms when it needs them."""

    def __init__(self):
        self.task_handlers = {}

    def __call__(self, sample):
        return self.task_handlers.setdefault('task', Augmented())(sample)


class Flag(Hook):
    """As mmyolo's YOLOv5ParamSchedulerHook: it ends the warm-up after some iterations."""

    __module__ = 'mmyolo.engine.hooks'

    def __init__(self):
        self._warmup_end = False

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self._warmup_end = runner.iter > 1


def test_what_follows_from_iterations_is_not_named(tmp_path, logged):
    loader = dict(dataset=Mixed(Packing()), num_workers=0)
    train(tmp_path, hooks=[Flag(), StopAt(6)], loader=loader)
    assert not warned(logged, 'not reproduce')


class Patience(Hook):
    """What it counts changes after validations."""

    def __init__(self):
        self.best, self.history, self.limit = None, [], 3

    def after_val_epoch(self, runner, metrics=None):
        self.best = metrics['acc']
        self.history.append(self.best)


class Careful(Patience):
    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['history'] = self.history


@pytest.mark.parametrize('resumes', [False, True])
@pytest.mark.parametrize(('workers', 'first'), [(0, ['Cached.results_cache']), (1, [])])
def test_lost_state_is_named_once_it_changes(tmp_path, logged, workers, first, resumes):
    """In the second iteration, or at a checkpoint; workers start anew in each epoch."""
    loader = lambda: dict(dataset=Mixed(Cached(), Noisy()), num_workers=workers)  # noqa: E731
    if resumes:
        train(tmp_path, hooks=[StopAt(ITERATIONS + 1)], loader=loader())
        logged.clear()
    train(tmp_path, resume=resumes, loader=loader(), hooks=[Patience(), Careful()])
    run = 'This resumed run does' if resumes else 'A resume of this run will'
    texts = warned(logged, 'not reproduce')
    assert all(text.startswith(run) for text in texts)
    names = [re.search('changes (.*), which no checkpoint holds', text)[1] for text in texts]
    assert names == [*first, 'Patience.best, Patience.history']


def test_a_scheduler_that_waits_for_metrics_needs_our_checkpoints(tmp_path, logged):
    """MMEngine's hook does not repeat the validation."""
    plateau = dict(type='ReduceOnPlateauLR', monitor='loss')
    options = dict(checkpoint=dict(type='CheckpointHook'), param_scheduler=plateau)
    train(tmp_path, hooks=[StopAt(0)], **options)
    (text,) = warned(logged, 'not reproduce')
    assert 'checkpoint.type=mmcare.AtomicCheckpointHook' in text


class TwoParts(Model):
    """Two optimizers, of which one has no gradients, as of a frozen backbone."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    def train_step(self, data, optim_wrapper):
        loss = self(**self.data_preprocessor(data, True), mode='loss')['loss']
        optim_wrapper['layer'].update_params(loss)
        return dict(loss=loss)

    def optimizers(self):
        parts = {name: getattr(self, name).parameters() for name in ('layer', 'frozen')}
        return OptimWrapperDict(**{k: OptimWrapper(torch.optim.AdamW(v)) for k, v in parts.items()})


@pytest.mark.parametrize('trains', [False, True])
def test_an_optimizer_without_gradients(tmp_path, trains):
    """Its state is empty, which is right; that of an optimizer with gradients is not."""
    for resume in (False, True):
        model = TwoParts()
        options = dict(model=model, optim_wrapper=model.optimizers(), param_scheduler=None)
        model.frozen.requires_grad_(trains and resume)
        refused = pytest.raises(CheckpointError, match='state of the optimizer is missing')
        with refused if trains and resume else nullcontext():
            train(tmp_path, hooks=[StopAt(5 + resume)], resume=resume, **options)


def test_workers_end_with_a_killed_parent():
    """Also while nobody takes their batches."""
    end, kept = os.pipe()
    parent = os.fork()
    if parent == 0:
        parent = os.getpid()
        if os.fork() == 0:
            end_with_parent(parent, 0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(kept)  # the child of the child has the last copy
    os.waitpid(parent, 0)
    assert os.read(end, 1) == b''
    os.close(end)
