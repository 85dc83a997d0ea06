"""CARE through timm in other projects; `make test-third-party` installs them."""

import copy

import pytest
import torch

pytest.importorskip('mmcare.timm')


def test_segmentation_models_pytorch():
    smp = pytest.importorskip('segmentation_models_pytorch')
    model = smp.FPN('tu-care_s0', encoder_weights=None, decoder_dropout=0, classes=3)
    images = torch.rand(2, 3, 64, 96)
    labels = (images.mean(1) > 0.5).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(4):
        losses.append(smp.losses.DiceLoss('multiclass')(model(images), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < losses[0]
    model.eval()
    with torch.no_grad():
        exported = torch.export.export(model, (images,)).module()
        torch.testing.assert_close(exported(images), model(images))


def test_training_step_of_effdet():
    effdet = pytest.importorskip('effdet')
    config = effdet.get_efficientdet_config('efficientdet_d0')
    config.update(backbone_name='care_s0', backbone_indices=(1, 2, 3), image_size=(128, 128))
    model = effdet.EfficientDet(config, pretrained_backbone=False)
    target = dict(bbox=torch.tensor([[[8.0, 8.0, 64.0, 48.0]]] * 2), cls=torch.ones(2, 1))
    effdet.DetBenchTrain(model)(torch.rand(2, 3, 128, 128), target)['loss'].backward()
    assert all(parameter.grad is not None for parameter in model.backbone.parameters())


@torch.no_grad()
def test_transformers_model_with_the_backbone(tmp_path):
    transformers = pytest.importorskip('transformers')
    backbone = transformers.TimmBackboneConfig(backbone='care_s0', out_indices=(0, 1, 2, 3))
    options = dict(use_auxiliary_head=False, hidden_size=32, num_labels=3)
    config = transformers.UperNetConfig(backbone_config=backbone, **options)
    model = transformers.UperNetForSemanticSegmentation(config).eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    image = torch.rand(1, 3, 64, 96)
    # The head's weights lie elsewhere in memory, for which some processors have other kernels.
    torch.testing.assert_close(loaded(image).logits, model(image).logits, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize('targets', [r'.*\.(expand|project|query_key)', r'.*\.fc'])
def test_adapters_of_peft(tmp_path, targets):
    """LoRA learns, is saved alone, loaded into the network that it adapts, and merged."""
    peft, timm = pytest.importorskip('peft'), pytest.importorskip('timm')
    network = timm.create_model('care_s0', num_classes=3, layer_scale_init_value=0.1).eval()
    images, fresh = torch.rand(2, 3, 64, 96), copy.deepcopy(network)
    model = peft.get_peft_model(network, peft.LoraConfig(target_modules=targets)).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, 0.02)
    for _ in range(3):  # one factor of each product is zero at first
        model(images).sum().backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected, before = model(images), fresh(images)
        loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
        torch.testing.assert_close(loaded(images), expected)
        assert (expected - before).abs().max() > 0.01 * before.abs().max()
        torch.testing.assert_close(loaded.merge_and_unload()(images), expected)
