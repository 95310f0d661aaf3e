"""Gradients of every recipe against float32's, at a trained checkpoint: of each product alone, and of the whole model.

    python -m benchmarks.fidelity --json --model llama-124m --base-steps 1000
    python -m benchmarks.fidelity --json --model gpt2 --start base.npz --data novels/

The reference is the same model in float32 with products of the highest precision. A product "alone" gets the inputs x,
the weight and the gradient g of its result as the reference has them, so that its three results (forward, dgrad, wgrad)
have its own error and nobody else's. The "whole" gradient is that of a training step, all products and activations as
the recipe and `dtype` say, so that errors add up through the model.

    SNR = 10 log10(sum r^2 / sum (v - r)^2)        cosine = sum r v / sqrt(sum r^2 sum v^2)        r: the reference

A run is judged by a mean over many steps: the SNR of the gradient's mean over some batches tells how much of the error
such a mean takes away, and how much stays. Each batch has random bits of its own, for recipes that draw some.
"""

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import tcfp_jax
from benchmarks import common
from benchmarks.capture import Operands, captured, measure_products
from benchmarks.common import Result, markdown_table
from models import ComputeDtype
from models.families import FAMILIES, family_of, learner, model_names
from models.settings import TrainConfig, preset
from models.train import corpus_of
from models.training import TrainState, batch_key, init, loss_function, make_train_step, product_key, windows
from tcfp_jax import paths
from tcfp_jax.recipes import NAMES, recipe
