"""The example of pi-0 trains in each way, and its state has the bytes of its way."""

import pytest

from examples import pi0
from tests.helpers import parametrize, slow

# Bytes per parameter of weights, moments and the average. Norms, biases, positions and
# the patches of images stay float, a larger share of a tiny model.
BYTES = {"float": (16, 16.1), "stored": (6, 8), "late": (6, 8)}


pytestmark = pytest.mark.usefixtures("standard_promotion")


@slow
@parametrize("way", pi0.WAYS)
def test_all_of_pi0_trains(way, capsys):
    result = pi0.measure(pi0.TINY, way, size=16, steps=12, rate=3e-3)
    losses = result["losses"]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), losses
    least, most = BYTES[way]
    assert least <= result["state_bytes"] / result["parameters"] < most
    assert result["step_bytes"] > result["state_bytes"]
    assert f"step 12 loss {losses[-1]:.4f}" in capsys.readouterr().out


def test_an_empty_batch_is_refused(capsys):
    with pytest.raises(SystemExit):
        pi0.main(["--tiny", "--batch", "0"])
    assert "--batch 0 must be at least 1" in capsys.readouterr().err


def test_the_shapes_are_those_of_pi0():
    config = pi0.Config()
    init, _ = pi0.float_training(config, 1e-4)
    state, (images, *_), _ = pi0.shapes_of(config, init, 2)
    params = state[0]
    assert images.shape == (2, 3, 224, 224, 3)
    assert params["tokens"]["embedding"].shape == (257_152, 2048)
    assert params["vision"]["up"]["kernel"].shape == (27, 1152, 4304)
    joint = params["joint"]
    assert joint["language_gate"]["kernel"].shape == (18, 2048, 16_384)
    assert joint["action_down"]["kernel"].shape == (18, 4096, 1024)
    assert joint["action_q"]["kernel"].shape == (18, 1024, 8 * 256)
    assert joint["language_k"]["kernel"].shape == (18, 2048, 256)
    # Gemma-2B has 2.51 billion weights, its table among them; the expert 0.31 billion
    # without a table; SigLIP 0.41 billion.
    assert 3.2e9 < pi0.sizes_of(state)["parameters"] < 3.3e9
