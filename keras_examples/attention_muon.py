"""Muon for models with attention."""

import re

import keras


@keras.saving.register_keras_serializable("attention_muon")
class AttentionMuon(keras.optimizers.Muon):
    """Muon that takes kernels of `MultiHeadAttention` for matrices, and leaves biases to AdamW.

    `keras.optimizers.Muon` orthogonalizes variables of two dimensions only. These kernels have
    three: query, key and value become [width, heads * size], and the output [heads * size, width].
    """

    def _should_use_adamw(self, variable):
        if variable.path.endswith("bias"):
            return True
        if not re.search(r"(query|key|value|attention_output)/kernel$", variable.path):
            return super()._should_use_adamw(variable)
        return any(re.search(pattern, variable.path) for pattern in self.exclude_layers)

    def _muon_update_step(self, gradient, variable, lr, m):
        path = self._trainable_variables[self._get_variable_index(variable)].path
        is_output = path.endswith("attention_output/kernel")
        shape = (-1, variable.shape[-1]) if is_output else (variable.shape[0], -1)
        self.assign_add(m, gradient + m * (self.momentum - 1))
        momentum = gradient + self.momentum * m if self.nesterov else m
        matrix = keras.ops.reshape(momentum, shape)
        update = lr * self.zeropower_via_newtonschulz5(matrix, self.ns_steps)
        self.assign_sub(variable, keras.ops.reshape(self.lr_adjust(update), variable.shape))
