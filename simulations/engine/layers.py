"""Layers of c models at once, with backward passes written by hand.

A chunk of c clients shares every operation: their vectors are [c, b, f], a batch of b for each. An
image batch is [b, c * C, H, W] in channels-last memory, the channels of client after client, so
that a grouped convolution, a pooling or a batch normalisation of all clients is one call, and for
c = 1 is the plain one. The parameters are views of the clients' flat rows (the layout of
`peer.learning.learner.Manifest`), and a backward pass adds gradients to mu times the velocity
directly. Whoever adds a layer: one class, one line in `_BUILDERS`, and one in the tests.

In mixed precision (Micikevicius et al. 2018) products and convolutions take, and activations are,
bfloat16; parameters, velocities, statistics and the output layer are float32. Its exponents are
those of float32, so that no loss needs scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from peer.learning.learner import Manifest

Shape = tuple[int, ...]

_WIDE = 32
"""Output channels of a convolution from which on bfloat16 pays: those of one vector of AVX-512.

Measured: of the cnn's layers it takes half the time, of lenet's (6 and 16) up to twice as much."""

_aten = torch.ops.aten


class NotStackableError(Exception):
    """A module that these layers cannot express; says why. Another path trains it."""


@dataclass
class Context:
    """What a training pass needs beside its inputs.

    `sizes`: how many of the b samples are real, per client; the rest is padding that no loss
    counts. `generators`: one per client, for dropout.
    """

    sizes: Sequence[int]
    generators: Sequence[torch.Generator]


class Layer:
    """One layer of c clients.

    `bind` gives it the clients' rows; `forward` with a context is a training pass and keeps what
    `backward` needs. No method changes its input. Without parameters, `bind` has nothing to do.
    """

    parametric = False
    rounds = False
    """Whether its products take bfloat16; the models decide, by `compose`."""
    alike_sizes = False
    """Whether the clients of a chunk must have batches of one size (padding would count)."""

    def bind(self, rows: Tensor, velocity: Tensor | None) -> None:
        """Take the parameters from `rows` [c, e] and the velocities from [c, trainable]."""

    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Return the layer's output; evaluation mode without a context."""
        raise NotImplementedError

    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """Return the loss's gradient by the input, if `inputs`, given that by the output.

        Velocities become momentum * velocity + gradient; a momentum of 0 overwrites them.
        """
        raise NotImplementedError


@dataclass
class _Parameter:
    """A tensor of the model: where it lies in a client's row, and its views in the chunk."""

    start: int
    shape: Shape
    value: Tensor = field(init=False)
    velocity: Tensor = field(init=False)

    def bind(self, rows: Tensor, velocity: Tensor | None) -> None:
        self.value = self._view(rows)
        if velocity is not None:
            self.velocity = self._view(velocity)

    def accumulate(self, gradient: Tensor, momentum: float) -> None:
        """velocity <- momentum * velocity + gradient [c, *shape, in any split of the axes]."""
        gradient = gradient.reshape(self.velocity.shape)
        if not momentum:
            self.velocity.copy_(gradient)
        elif gradient.dtype is self.velocity.dtype:
            self.velocity.mul_(momentum).add_(gradient)
        else:  # one pass less, and a rounding less
            torch.add(gradient, self.velocity, alpha=momentum, out=self.velocity)

    def operand(self, *, rounded: bool) -> Tensor:
        """Return what products take: the value, or its rounding.

        A rounding is contiguous: of rows of a matrix, products would make such a copy once more.
        """
        return self.value.bfloat16() if rounded else self.value

    def _view(self, rows: Tensor) -> Tensor:
        stop = self.start + math.prod(self.shape)
        return rows[:, self.start : stop].view(len(rows), *self.shape)


class Linear(Layer):
    """[c, b, in] -> [c, b, out]."""

    parametric = True

    def __init__(self, weight: _Parameter, bias: _Parameter | None) -> None:
        self._weight, self._bias = weight, bias

    @override
    def bind(self, rows: Tensor, velocity: Tensor | None) -> None:
        """Take the views of weight [c, out, in] and bias [c, out]."""
        for parameter in filter(None, (self._weight, self._bias)):
            parameter.bind(rows, velocity)

    @override
    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Return x W^T + b of every client."""
        weight = self._weight.operand(rounded=self.rounds)
        if context is not None:
            self._x, self._w = x, weight
        if self._bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        bias = self._bias.operand(rounded=self.rounds)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @override
    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """In float32 the product that makes the gradient adds mu times the velocity by itself."""
        dx = torch.bmm(dy, self._w) if inputs else None
        if self.rounds:
            self._weight.accumulate(torch.bmm(dy.transpose(1, 2), self._x), momentum)
        else:
            self._weight.velocity.baddbmm_(dy.transpose(1, 2), self._x, beta=momentum)
        if self._bias is not None:
            self._bias.accumulate(dy.sum(dim=1, dtype=self._bias.velocity.dtype), momentum)
        return dx


class Conv2d(Layer):
    """[b, c * C, H, W] -> [b, c * O, H', W'], as one grouped convolution."""

    parametric = True

    def __init__(self, layer: nn.Conv2d, weight: _Parameter, bias: _Parameter | None) -> None:
        self._weight, self._bias = weight, bias
        self._geometry: tuple[Any, Any, Any] = (layer.stride, layer.padding, layer.dilation)
        self._groups = layer.groups
        self.wide = layer.out_channels // layer.groups >= _WIDE

    @override
    def bind(self, rows: Tensor, velocity: Tensor | None) -> None:
        """Take the views of weight [c, O, C / groups, k, k] and bias [c, O]."""
        for parameter in filter(None, (self._weight, self._bias)):
            parameter.bind(rows, velocity)

    @override
    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Return the convolution of every client's channels with its own filters."""
        weight = self._weight.operand(rounded=self.rounds).flatten(0, 1)
        bias = None
        if self._bias is not None:
            bias = self._bias.operand(rounded=self.rounds).reshape(-1)
        groups = self._groups * len(self._weight.value)
        if context is not None:
            self._x, self._w = x, weight
        return nn.functional.conv2d(x, weight, bias, *self._geometry, groups)

    @override
    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """All gradients come from one call, as autograd would make it."""
        biased = self._bias is not None
        dx, dw, db = _aten.convolution_backward(
            dy, self._x, self._w, [len(self._w)] if biased else None,
            *self._geometry, False, [0, 0],
            self._groups * len(self._weight.value), [inputs, True, biased],
        )  # fmt: skip
        self._weight.accumulate(dw, momentum)
        if self._bias is not None:
            self._bias.accumulate(db, momentum)
        return dx if inputs else None


class ReLU(Layer):
    """max(x, 0)."""

    @override
    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Return x where it is positive."""
        self._y = torch.relu(x)
        return self._y

    @override
    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """The gradient passes where the output is positive."""
        return _aten.threshold_backward(dy, self._y, 0) if inputs else None


class MaxPool2d(Layer):
    """The largest of every window; of equal ones the first, which alone gets the gradient."""

    def __init__(self, layer: nn.MaxPool2d) -> None:
        kernel, stride, padding, dilation = (
            [value, value] if isinstance(value, int) else list(value)
            for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        )
        self._geometry = (kernel, stride, padding, dilation, layer.ceil_mode)

    @override
    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Return the maxima, and remember where they were."""
        y, self._places = _aten.max_pool2d_with_indices(x, *self._geometry)
        if context is not None:
            self._x = x
        return y  # type: ignore[no-any-return]

    @override
    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """Send every gradient to where the maximum was."""
        if not inputs:
            return None
        return _aten.max_pool2d_with_indices_backward(  # type: ignore[no-any-return]
            dy, self._x, *self._geometry, self._places
        )


class Flatten(Layer):
    """[b, c * C, H, W] -> [c, b, C * H * W]; what is flat already stays."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._clients = 1

    @override
    def bind(self, rows: Tensor, velocity: Tensor | None) -> None:
        """Only the number of clients matters here."""
        self._clients = len(rows)

    @override
    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Return the clients' features in the order of a module that sees one client."""
        if len(self._shape) == 1:
            return x
        b, c = len(x), self._clients
        return x.reshape(b, c, *self._shape).transpose(0, 1).reshape(c, b, -1)

    @override
    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """Return the gradient in channels-last memory."""
        if not inputs or len(self._shape) == 1:
            return dy if inputs else None
        c, b = dy.shape[:2]
        return image_batch(dy.view(c, b, *self._shape), dy.dtype)


class Dropout(Layer):
    """Zero with probability p, else divide by 1 - p.

    A client's mask comes from its own generator, one draw a layer and step, sample by sample, in
    the shape that a module would see: where torch draws alike, the masks are those of the device.
    """

    def __init__(self, p: float, shape: Shape) -> None:
        self._p, self._shape = p, shape

    @override
    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Return the masked input; in evaluation mode the input."""
        if context is None:
            return x
        self._noise = None if self._p == 0 else self._draw(x, context)
        return x if self._noise is None else x * self._noise

    @override
    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """Return the gradient behind the same mask."""
        if not inputs:
            return None
        return dy if self._noise is None else dy * self._noise

    def _draw(self, x: Tensor, context: Context) -> Tensor:
        noise = torch.zeros_like(x)
        if self._p == 1:
            return noise
        c = len(context.sizes)
        clients = (
            noise if len(self._shape) == 1 else noise.view(len(x), c, *self._shape).transpose(0, 1)
        )
        for client, size, generator in zip(clients, context.sizes, context.generators, strict=True):
            mask = torch.empty(size, *self._shape, dtype=x.dtype, device=x.device)
            client[:size] = mask.bernoulli_(1 - self._p, generator=generator).div_(1 - self._p)
        return noise


class BatchNorm(Layer):
    """Batch normalisation of c * C channels: every client's own statistics, exactly.

    The running statistics are part of the clients' rows, and a training pass updates them there.
    """

    parametric = True
    alike_sizes = True

    def __init__(
        self, layer: nn.BatchNorm1d | nn.BatchNorm2d, parameters: Sequence[_Parameter], shape: Shape
    ) -> None:
        self._mean, self._var, *self._affine = parameters
        self._momentum, self._eps = float(layer.momentum or 0.0), layer.eps
        self._flat = len(shape) == 1

    @override
    def bind(self, rows: Tensor, velocity: Tensor | None) -> None:
        """Take the views of the statistics and of weight and bias, each [c, C]."""
        for statistic in (self._mean, self._var):
            statistic.bind(rows, None)
        for parameter in self._affine:
            parameter.bind(rows, velocity)

    @override
    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Normalise by the batch's statistics in training, by the running ones otherwise."""
        x = self._channels(x)
        mean, var = (s.value.reshape(-1).clone() for s in (self._mean, self._var))
        weight = self._affine[0].value.reshape(-1) if self._affine else None
        bias = self._affine[1].value.reshape(-1) if self._affine else None
        training = context is not None
        y, saved_mean, saved_scale = torch.native_batch_norm(
            x, weight, bias, mean, var, training, self._momentum, self._eps
        )
        if training:
            self._saved = (x, weight, saved_mean, saved_scale)
            self._mean.value.copy_(mean.view_as(self._mean.value))
            self._var.value.copy_(var.view_as(self._var.value))
        return self._clients(y)

    @override
    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """All gradients come from one call, as autograd would make it."""
        x, weight, mean, scale = self._saved
        affine = bool(self._affine)
        dx, dw, db = _aten.native_batch_norm_backward(
            self._channels(dy), x, weight, None, None, mean, scale, True, self._eps,
            [inputs, affine, affine],
        )  # fmt: skip
        for parameter, gradient in zip(self._affine, (dw, db), strict=False):
            parameter.accumulate(gradient, momentum)
        return self._clients(dx) if inputs else None

    def _channels(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1) if self._flat else x

    def _clients(self, y: Tensor) -> Tensor:
        return y.view(len(y), *self._mean.value.shape).transpose(0, 1) if self._flat else y


class Cast(Layer):
    """The same values in another precision, where layers of two precisions meet."""

    def __init__(self, given: torch.dtype, wanted: torch.dtype) -> None:
        self._given, self._wanted = given, wanted

    @override
    def forward(self, x: Tensor, context: Context | None) -> Tensor:
        """Return x in the precision of the layers behind."""
        return x.to(self._wanted)

    @override
    def backward(self, dy: Tensor, momentum: float, *, inputs: bool) -> Tensor | None:
        """Return the gradient in the precision of the layers before."""
        return dy.to(self._given) if inputs else None


class Stack:
    """A model of c clients: `bind` rows, then `forward`, then `backward`.

    `images` says whether inputs are image batches or vectors (see the module's text), `dtype` in
    which precision; `alike_sizes`, whether the clients of a chunk must have batches of one size.
    """

    def __init__(self, layers: Sequence[Layer], *, images: bool) -> None:
        self._layers = list(layers)
        self.images = images
        self.dtype = _given(layers)
        self.alike_sizes = any(layer.alike_sizes for layer in self._layers)
        self._first = next(i for i, layer in enumerate(self._layers) if layer.parametric)

    def bind(self, rows: Tensor, velocity: Tensor | None = None) -> None:
        """Work on the models `rows` [c, e]; training needs their velocity [c, trainable]."""
        for layer in self._layers:
            layer.bind(rows, velocity)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return the logits [c, b, classes]."""
        for layer in self._layers:
            x = layer.forward(x, context)
        return x

    def backward(self, gradient: Tensor, momentum: float) -> None:
        """Update the velocities, given the loss's gradient by the logits [c, b, classes]."""
        dy: Tensor | None = gradient
        for place in range(len(self._layers) - 1, self._first - 1, -1):
            assert dy is not None
            dy = self._layers[place].backward(dy, momentum, inputs=place > self._first)


def loss_gradient(logits: Tensor, labels: Tensor, weights: Tensor | float) -> Tensor:
    """Return the gradient of weighted cross-entropies by the logits [c, b, classes].

    `labels` [c, b]; `weights` broadcasts to [c, b, 1]: 1 / size for a client's mean loss.
    """
    gradient = torch.softmax(logits, dim=-1)
    ones = torch.ones_like(gradient[..., :1])
    return gradient.scatter_add_(-1, labels.unsqueeze(-1), ones.neg_()).mul_(weights)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy [c, b] of every sample, given logits [c, b, classes]."""
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return logits.logsumexp(dim=-1).sub_(chosen)


def image_batch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return clients' images [c, b, C, H, W] as one channels-last batch [b, c * C, H, W].

    The memory is laid out first and permuted then, so that it has channels-last strides even for
    one channel, where torch's own conversion leaves those that make it take the slow path.
    """
    x = x.permute(1, 3, 4, 0, 2)
    batch = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
    return batch.flatten(3).permute(0, 3, 1, 2)


def compose(module: nn.Module, manifest: Manifest, shape: Shape, *, mixed: bool = False) -> Stack:
    """Return the stack that computes what `module` does for inputs [*shape].

    `mixed`: in mixed precision (see the module's text). Raises NotStackableError, which says what
    is in the way.
    """
    starts, start = {}, 0
    for entry in manifest.entries:
        starts[entry.name] = start
        start += entry.size
    if any(not parameter.requires_grad for parameter in module.parameters()):
        raise NotStackableError("some parameters are not trained")
    parts = list(_leaves(module, ""))
    tensors = sum(len(list(part.parameters())) for _, part in parts)
    if tensors != len(list(module.parameters())):
        raise NotStackableError("layers share parameters")
    images = len(shape) == 3 and type(_first_shaped(parts)) is not nn.Flatten
    if not images and len(shape) > 1 and type(_first_shaped(parts)) is not nn.Flatten:
        raise NotStackableError(f"inputs of shape {shape} are not flattened first")
    given, layers = shape if images else (math.prod(shape),), []
    for name, part in parts:
        if type(part) is nn.Identity:
            continue
        builder = _BUILDERS.get(type(part))
        if builder is None:
            raise NotStackableError(f"there is no stacked {type(part).__name__}")
        parameters = {
            key: _Parameter(starts[f"{name}{key}"], tuple(tensor.shape))
            for key, tensor in part.state_dict().items()
            if f"{name}{key}" in starts
        }
        layer, given = builder(part, parameters, given)
        layers.append(layer)
    if len(given) != 1:
        raise NotStackableError("the outputs are not vectors of logits")
    if not any(layer.parametric for layer in layers):
        raise NotStackableError("no layer is trained")
    layers = _pools_first(layers)
    return Stack(_mixed(layers) if mixed else layers, images=images)


def _pools_first(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with every pooling before the ReLU that it follows.

    Of a window that is positive somewhere both orders take the same value and send the gradient to
    the same place; of any other both give 0 and send none. There are fewer values after pooling.
    """
    found: list[Layer] = []
    for layer in layers:
        if isinstance(layer, MaxPool2d) and found and isinstance(found[-1], ReLU):
            found.insert(-1, layer)
        else:
            found.append(layer)
    return found


def _mixed(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers in mixed precision, a `Cast` before each that wants another than is given.

    [choice] The last product stays in float32: logits of eight bits would tie. So do convolutions
    that would be no faster.
    """
    for product in _products(layers)[:-1]:
        product.rounds = not isinstance(product, Conv2d) or product.wide
    given, found = _given(layers), list[Layer]()
    for layer in layers:
        wanted = next(map(_dtype, _products([layer])), given)
        if wanted is not given:
            found.append(Cast(given, wanted))
            given = wanted
        found.append(layer)
    return found


def _products(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if isinstance(layer, Linear | Conv2d)]


def _dtype(product: Layer) -> torch.dtype:
    return torch.bfloat16 if product.rounds else torch.float32


def _given(layers: Sequence[Layer]) -> torch.dtype:
    """Return the precision of the inputs: that of the first product."""
    return next(map(_dtype, _products(layers)), torch.float32)


def _first_shaped(parts: Sequence[tuple[str, nn.Module]]) -> nn.Module | None:
    """Return the first layer that cares how its input is laid out."""
    shapeless = (nn.Identity, nn.ReLU)
    return next((part for _, part in parts if type(part) not in shapeless), None)


def _leaves(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield (prefix of its names, layer) of nested `nn.Sequential`s, in order."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise NotStackableError("a layer has hooks")
    if type(module) is not nn.Sequential:
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _leaves(child, f"{prefix}{name}.")


_Built = tuple[Layer, Shape]
_Parameters = dict[str, _Parameter]


def _linear(layer: Any, parameters: _Parameters, shape: Shape) -> _Built:
    _require(len(shape) == 1, "Linear on images")
    return Linear(parameters["weight"], parameters.get("bias")), (layer.out_features,)


def _conv(layer: Any, parameters: _Parameters, shape: Shape) -> _Built:
    _require(len(shape) == 3, "Conv2d on vectors")
    _require(layer.padding_mode == "zeros", f"padding mode {layer.padding_mode}")
    _require(not isinstance(layer.padding, str), "padding by name")
    built = Conv2d(layer, parameters["weight"], parameters.get("bias"))
    return built, _output_shape(layer, shape)


def _pool(layer: Any, _parameters: _Parameters, shape: Shape) -> _Built:
    _require(len(shape) == 3, "MaxPool2d on vectors")
    _require(not layer.return_indices, "MaxPool2d with indices")
    return MaxPool2d(layer), _output_shape(layer, shape)


def _flatten(layer: Any, _parameters: _Parameters, shape: Shape) -> _Built:
    _require((layer.start_dim, layer.end_dim) == (1, -1), "Flatten of some axes only")
    return Flatten(shape), (math.prod(shape),)


def _dropout(layer: Any, _parameters: _Parameters, shape: Shape) -> _Built:
    return Dropout(layer.p, shape), shape


def _relu(_layer: Any, _parameters: _Parameters, shape: Shape) -> _Built:
    return ReLU(), shape


def _batch_norm(layer: Any, parameters: _Parameters, shape: Shape) -> _Built:
    _require(len(shape) == (3 if type(layer) is nn.BatchNorm2d else 1), "BatchNorm on such inputs")
    _require(layer.track_running_stats, "BatchNorm without running statistics")
    _require(layer.momentum is not None, "BatchNorm with a cumulative average")
    names = ["running_mean", "running_var"] + (["weight", "bias"] if layer.affine else [])
    return BatchNorm(layer, [parameters[name] for name in names], shape), shape


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotStackableError(otherwise)


def _output_shape(layer: nn.Module, shape: Shape) -> Shape:
    with torch.no_grad():
        parameter = next(layer.parameters(), torch.empty(0))
        return tuple(layer(parameter.new_zeros(1, *shape)).shape[1:])


_BUILDERS: dict[type[nn.Module], Callable[[Any, _Parameters, Shape], _Built]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.MaxPool2d: _pool,
    nn.Flatten: _flatten,
    nn.Dropout: _dropout,
    nn.ReLU: _relu,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
}
