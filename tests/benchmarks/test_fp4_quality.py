"""The benchmark of FP4's accuracy: rows of one trained model, and their table."""

import json
import math

import pytest

from benchmarks import common, fp4_quality

NAMES = ("nearest", "search")


@pytest.mark.slow
def test_rows_are_of_one_model_and_a_search_leaves_less_noise(tmp_path):
    rows = common.main(
        "fp4_quality", ["--smoke", "--out", str(tmp_path), "--methods", ",".join(NAMES)]
    )
    base, nearest, search = rows
    assert [row.name for row in rows] == [fp4_quality.BASELINE, *NAMES]
    assert base.bits == 16 and nearest.bits == search.bits == pytest.approx(
        4.5, abs=0.01
    )
    assert search.weight_db > nearest.weight_db + 1 > 21
    assert len({row.heldout_loss for row in rows}) == 3 and all(
        math.isfinite(row.perplexity) for row in rows
    )
    content = json.loads(
        (tmp_path / common.device_slug() / "fp4_quality.json").read_text()
    )
    assert [row["name"] for row in content["rows"]] == [row.name for row in rows]
    page = fp4_quality.table(common.read_result("fp4_quality", tmp_path))
    titles, _, *lines = page.split("\n\n")[0].splitlines()
    assert len(lines) == 3 and {line.count("|") for line in lines} == {
        titles.count("|")
    }
    assert "1 layers of width 64" in page


def test_methods_are_known_and_the_default_has_the_main_ones():
    assert {
        "nearest",
        "four_over_six",
        "search",
        "gptq",
        "gptq_four_over_six",
        "mxfp4",
    } <= set(fp4_quality.DEFAULT)
    assert set(fp4_quality.DEFAULT) <= set(fp4_quality.METHODS)
    with pytest.raises(ValueError, match="--methods has"):
        common.main("fp4_quality", ["--smoke", "--methods", "best"])
