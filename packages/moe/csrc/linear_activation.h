// The activations of dense layers.
#pragma once

namespace kestrel::moe {

enum class LinearActivation { none, gelu_tanh, gelu };

}  // namespace kestrel::moe
