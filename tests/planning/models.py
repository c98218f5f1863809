"""The variables of two models of the L-GreCo paper, by their shapes."""

from tf_gradcomp.policy import LayerPolicy


def resnet18():
    """For CIFAR-100: 11,220,132 parameters."""
    shapes = [*convolution(3, 3, 64)]
    inputs = 64
    for channels in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [*convolution(3, inputs, channels), *convolution(3, channels, channels)]
            if inputs != channels:
                shapes += convolution(1, inputs, channels)
            inputs = channels
    return specs([*shapes, (512, 100), (100,)])


def resnet50(biases=False):
    """For ImageNet: 25,557,032 parameters; 25,583,592 with biases, as Keras has it."""
    shapes = [*convolution(7, 3, 64, biases)]
    inputs = 64
    for channels, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(1, inputs, channels, biases)
            shapes += convolution(3, channels, channels, biases)
            shapes += convolution(1, channels, 4 * channels, biases)
            if block == 0:
                shapes += convolution(1, inputs, 4 * channels, biases)
            inputs = 4 * channels
    return specs([*shapes, (2048, 1000), (1000,)])


def convolution(kernel, inputs, outputs, bias=False):
    """A kernel, and the two vectors of the normalization behind it."""
    return [(kernel, kernel, inputs, outputs), *[(outputs,)] * (3 if bias else 2)]


def specs(shapes):
    policy = LayerPolicy()
    return [policy.spec(f"model/{i}/kernel", shape, "float32") for i, shape in enumerate(shapes)]
