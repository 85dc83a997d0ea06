"""The main jobs, shown on sample data that the package makes itself."""

# An initialisation that keeps the scale of signals, for training from scratch within minutes.
QUICK_START = [
    dict(type='Kaiming', layer=['Conv2d'], mode='fan_in', distribution='normal'),
    dict(type='Constant', layer=['_BatchNorm'], val=1.0, bias=0.0),
]
