"""torchao's benchmark: that it asks for what it lacks, and runs where its packages are."""

import dataclasses

import pytest

from benchmarks import torchao


def test_it_asks_for_packages_and_a_gpu(monkeypatch):
    options = torchao.argparse.Namespace(smoke=False)
    monkeypatch.setattr(torchao, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(ValueError, match="needs no_such_package; run `pip install no_such_package`"):
        torchao.check_options(options)
    monkeypatch.setattr(torchao, "NEEDED", ("json",))
    with pytest.raises(ValueError, match="needs a GPU, not cpu; use --smoke"):
        torchao.check_options(options)


def test_wrong_results_are_not_timed():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    right = (torch.ones(4), torch.arange(4.0))
    assert torchao._worst("x", right, (right[0], right[1] * 1.01)) > 30
    with pytest.raises(ArithmeticError, match="wrong: results have"):
        torchao._worst("wrong", right, (right[0], -right[1]))


@pytest.mark.slow
@pytest.mark.parametrize("part", torchao.PARTS)
def test_every_candidate_runs(part):
    for name in torchao.NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed")
    config = torchao.configure(torchao.argparse.Namespace(smoke=True))
    found = torchao.measure_torch(part, dataclasses.replace(config, rounds=1))
    assert [*found] == [torchao.PYTORCH, *torchao.RECIPES]
    assert found[torchao.PYTORCH][1] is None
    assert all(snr_db > torchao.LEAST_SNR_DB for _, snr_db in [*found.values()][1:])
