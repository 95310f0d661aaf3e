"""torchao's benchmark: that it asks for what it lacks, and runs where its packages
are.
"""

import pytest

from benchmarks import torchao


def test_it_asks_for_packages_and_a_gpu(monkeypatch):
    options = torchao.argparse.Namespace(smoke=False)
    monkeypatch.setattr(torchao, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(
        ValueError, match="needs no_such_package; run `pip install no_such_package`"
    ):
        torchao.configure(options)
    monkeypatch.setattr(torchao, "NEEDED", ("json",))
    with pytest.raises(ValueError, match="needs a GPU, not cpu; use --smoke"):
        torchao.configure(options)


@pytest.mark.slow
@pytest.mark.parametrize("part", torchao.PARTS)
def test_every_candidate_runs(part):
    for name in torchao.NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed")
    found = torchao.measure_torch(
        part, torchao.configure(torchao.argparse.Namespace(smoke=True))
    )
    assert [*found] == [torchao.PYTORCH, *torchao.RECIPES]
    worst = [snr_db for _, snr_db in found.values()]
    assert worst[0] is None
    assert min(worst[1:]) > torchao.train_step.LEAST_SNR_DB
