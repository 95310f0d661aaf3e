"""`cross_entropy`: the loss of a language model's head, `x @ kernel` and softmax as one
operation.

    logits[t] = cap(x[t] @ kernel)
    cap(a)    = soft_cap tanh(a / soft_cap)
    q[t]      = (1 - label_smoothing) one_hot(target[t]) + label_smoothing / vocabulary
    loss[t]   = logsumexp(logits[t]) - q[t] . logits[t] + z_loss logsumexp(logits[t])**2

With 128256 ids the logits of 16384 tokens take 4.2 GB in BF16, and their gradient as
much again. Here both exist for some tokens at a time. A gradient needs nothing but the
weight of each token in the mean. So the forward pass computes the gradients of a chunk
as soon as it has the chunk's logits. It keeps only the gradients of x and the kernel,
and the backward pass multiplies them by a number.

Sources: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"; Hsu
et al. 2024, "Liger Kernel".

Left out: other losses of logits, such as distillation, and samples from them: compute
the logits of a few tokens by `tcfp_jax.matmul`. Left out, too: a function of the
single losses with another gradient than the mean's: pass `weights`.
"""

from tcfp_jax.losses.head import cross_entropy, loss_of
from tcfp_jax.losses.logits import Chunks, Loss

__all__ = ["Chunks", "Loss", "cross_entropy", "loss_of"]
